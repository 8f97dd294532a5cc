"""How tensors are computed: the order and kind of their loops. What they hold is not changed by any of this.

>>> from celosia.compiler.expr import placeholder, compute, lower
>>> a = placeholder((8,), "float32", "a")
>>> b = compute((8,), lambda i: a[i] + 1.0, "b")
>>> s = create_schedule(b)
>>> outer, inner = s[b].split(b.axes[0], 4)
>>> s[b].vectorize(inner)
>>> print(lower(s))
b(a: float32[8]) -> (b: float32[8]):
  for i0.o in 2:
    vectorized i0.i in 4:
      b[((i0.o * 4) + i0.i)] = (a[((i0.o * 4) + i0.i)] + 1.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from celosia.compiler.expr.nodes import Axis, Expr, Reduce, Tensor, Var, minimum, walk
from celosia.compiler.expr.transform import is_injective, topological


@dataclass(frozen=True)
class Split:
    parent: Axis
    outer: Axis
    inner: Axis


@dataclass(frozen=True)
class Fuse:
    outer: Axis
    inner: Axis
    fused: Axis


class Stage:
    """The loops of one tensor: `order` lists them from the outermost, `kinds` how each runs."""

    def __init__(self, tensor: Tensor):
        assert tensor.body is not None
        self.tensor = tensor
        self.relations: list[Split | Fuse] = []
        self.kinds: dict[Axis, str] = {}
        self.inlined = False
        self.lanes: dict[Axis, tuple[int, ...]] = {}
        reduce_axes = [a for n in walk(tensor.body) if isinstance(n, Reduce) for a in n.axes]
        self.order: list[Axis] = [*tensor.axes, *dict.fromkeys(reduce_axes)]

    def _position(self, axis: Axis) -> int:
        if axis not in self.order:
            raise ValueError(f"{self.tensor.name}: {axis.name} is not one of the loops {[a.name for a in self.order]}")
        return self.order.index(axis)

    def split(self, axis: Axis, factor: int) -> tuple[Axis, Axis]:
        """Cut a loop into tiles of `factor`: (tile number, index within the tile).

        Where the extent is not a multiple, the last tile begins earlier and computes some elements again, or, on a
        reduction, is guarded.
        """
        at = self._position(axis)
        if factor < 1:
            raise ValueError(f"{self.tensor.name}: split {axis.name} by {factor}")
        factor = min(factor, axis.extent)
        outer = Axis(f"{axis.name}.o", extent=-(-axis.extent // factor), reduce=axis.reduce)
        inner = Axis(f"{axis.name}.i", extent=factor, reduce=axis.reduce)
        self.order[at : at + 1] = [outer, inner]
        self.relations.append(Split(axis, outer, inner))
        return outer, inner

    def fuse(self, outer: Axis, inner: Axis) -> Axis:
        """One loop over both; `inner` must follow `outer` directly."""
        at = self._position(outer)
        if self._position(inner) != at + 1 or outer.reduce != inner.reduce:
            raise ValueError(f"{self.tensor.name}: {inner.name} does not follow {outer.name}")
        fused = Axis(f"{outer.name}.{inner.name}", extent=outer.extent * inner.extent, reduce=outer.reduce)
        self.order[at : at + 2] = [fused]
        self.relations.append(Fuse(outer, inner, fused))
        return fused

    def reorder(self, *axes: Axis) -> None:
        """Put these loops in this order, in the places that they hold together."""
        places = sorted(self._position(axis) for axis in axes)
        if len(set(places)) != len(axes):
            raise ValueError(f"{self.tensor.name}: an axis is named twice in reorder")
        for place, axis in zip(places, axes):
            self.order[place] = axis

    def tile(self, y: Axis, x: Axis, fy: int, fx: int) -> tuple[Axis, Axis, Axis, Axis]:
        yo, yi = self.split(y, fy)
        xo, xi = self.split(x, fx)
        self.reorder(yo, xo, yi, xi)
        return yo, xo, yi, xi

    def _mark(self, axis: Axis, kind: str) -> None:
        self._position(axis)
        self.kinds[axis] = kind

    def unroll(self, axis: Axis) -> None:
        self._mark(axis, "unrolled")

    def parallel(self, axis: Axis) -> None:
        if axis.reduce:
            raise ValueError(f"{self.tensor.name}: the reduction {axis.name} cannot be parallel")
        self._mark(axis, "parallel")

    def vectorize(self, axis: Axis) -> None:
        """Compute all iterations at once. The innermost loop over data only."""
        if axis.reduce or any(not a.reduce for a in self.order[self._position(axis) + 1 :]):
            raise ValueError(f"{self.tensor.name}: only the innermost data loop can be vectorized, not {axis.name}")
        self._mark(axis, "vectorized")

    def accumulate_lanes(self, axis: Axis, widths: tuple[int, ...]) -> None:
        """Accumulate the innermost reduction in vectors of `widths`, wide ones first; combine their lanes."""
        if not axis.reduce or self._position(axis) != len(self.order) - 1:
            raise ValueError(f"{self.tensor.name}: {axis.name} is not a reduction, or not the innermost loop")
        self.lanes[axis] = widths

    def compute_inline(self) -> None:
        """Compute each element where it is read, instead of storing it."""
        if not is_injective(self.tensor):
            raise ValueError(f"{self.tensor.name}: a reduction cannot be inlined")
        self.inlined = True

    def index_values(self) -> tuple[dict[Var, Expr], list[Expr]]:
        """The tensor's own axes in terms of the loops, and conditions under which a step of a reduction counts."""
        values: dict[Var, Expr] = {axis: axis for axis in self.order}
        guards: list[Expr] = []
        for relation in reversed(self.relations):
            match relation:
                case Split(parent, outer, inner):
                    base = values[outer] * inner.extent
                    exact = outer.extent * inner.extent == parent.extent
                    if not exact and not parent.reduce:
                        base = minimum(base, parent.extent - inner.extent)
                    values[parent] = base + values[inner]
                    if not exact and parent.reduce:
                        guards.append(values[parent] < parent.extent)
                case Fuse(outer, inner, fused):
                    values[outer] = values[fused] // inner.extent
                    values[inner] = values[fused] % inner.extent
        return values, guards


class Schedule:
    """A Stage for every computed tensor that the outputs need: `schedule[tensor]`."""

    def __init__(self, outputs: Sequence[Tensor]):
        self.outputs = tuple(outputs)
        self.tensors = topological(self.outputs)
        self.stages = {t: Stage(t) for t in self.tensors if t.body is not None}

    def __getitem__(self, tensor: Tensor) -> Stage:
        return self.stages[tensor]


def create_schedule(outputs: Tensor | Sequence[Tensor]) -> Schedule:
    """Plain loops in the order of the axes, to be changed."""
    return Schedule((outputs,) if isinstance(outputs, Tensor) else outputs)
