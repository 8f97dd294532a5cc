"""Schedules: the order, kind and memory of loops that compute a tensor. They never change its values.

In order: traces, which store a schedule as data; Stage, the loops of one tensor; Schedule, all stages.

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

A trace has every primitive that was applied, in order. It prints as the Python that makes the schedule, goes to JSON
and back, and can be applied to a fresh definition of the same tensors. (The idea is that of TVM's `Trace`.)

>>> print(s.trace)
s["b"].split("i0", 4)
s["b"].vectorize("i0.i")
>>> again = create_schedule(b)
>>> Trace.from_json(s.trace.to_json()).replay(again)
>>> print(again.trace == s.trace)
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, ParamSpec, TypeVar

from celosia.compiler.expr.loops import SCOPES, Declared
from celosia.compiler.expr.nodes import (
    Axis,
    Expr,
    Load,
    Reduce,
    Scan,
    Tensor,
    Var,
    loads,
    minimum,
    rewrite,
    substitute,
    topological,
    walk,
)

P = ParamSpec("P")
R = TypeVar("R")


class ReplayError(ValueError):
    """A trace step that cannot be applied; the message says which and why."""


@dataclass(frozen=True)
class TraceStep:
    """One applied primitive. stage: name of the tensor whose loops it changes, "" for one of the complete schedule.

    args: loops, tensors and intrinsics by name, numbers, and lists of these; {"stage": name} stands for the loops of a
    tensor.
    """

    stage: str
    primitive: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        target = f'["{self.stage}"]' if self.stage else ""
        return f"s{target}.{self.primitive}({', '.join(_source_text(arg) for arg in self.args)})"


@dataclass
class Trace:
    """The primitives that made a schedule, in order. Tuning records store schedules so."""

    steps: list[TraceStep] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))

    def to_json(self) -> list[list[Any]]:
        """Convert to plain data: stage, primitive and arguments of each step."""
        return [[step.stage, step.primitive, *step.args] for step in self.steps]

    @staticmethod
    def from_json(rows: Any) -> Trace:
        """Read the data of `to_json`; ReplayError where it is not a trace."""
        steps = []
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, list) or len(row) < 2 or not all(isinstance(text, str) for text in row[:2]):
                raise ReplayError(f"a step of a trace is [stage, primitive, arguments ...], not {row!r}")
            steps.append(TraceStep(row[0], row[1], tuple(row[2:])))
        return Trace(steps)

    def replay(self, schedule: Schedule, intrinsics: Mapping[str, Declared] | None = None) -> None:
        """Apply all steps to a fresh `schedule`; ReplayError for one that does not apply.

        intrinsics: by name, those that tensorize may use.
        """
        for position, step in enumerate(self.steps):
            try:
                target: Stage | Schedule = schedule[step.stage] if step.stage else schedule
                if step.primitive not in PRIMITIVES or not hasattr(target, step.primitive):
                    owner = "a tensor" if isinstance(target, Stage) else "the schedule"
                    raise ValueError(f"{owner} has no primitive {step.primitive!r}")
                _check_arguments(step)
                args = [_from_data(schedule, arg) for arg in step.args]
                if step.primitive == "tensorize":
                    if args[-1] not in (intrinsics or {}):
                        raise ValueError(f"no intrinsic is called {args[-1]!r}")
                    args[-1] = (intrinsics or {})[args[-1]]
                getattr(target, step.primitive)(*args)
            except ValueError as error:
                raise ReplayError(f"step {position}, {step}: {error}") from None


PRIMITIVES: dict[str, Signature] = {}
"""Name of each recorded method of Stage and Schedule -> its signature."""


def _is_text(arg: Any) -> bool:
    return isinstance(arg, str)


def _is_number(arg: Any) -> bool:
    return isinstance(arg, int) and not isinstance(arg, bool)


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "Axis | str": ("the name of a loop", _is_text),
    "Tensor | str": ("the name of a tensor", _is_text),
    "Tensor | str | Sequence[Tensor | str]": (
        "the name of a tensor, or a list of them",
        lambda arg: _is_text(arg) or (isinstance(arg, list | tuple) and all(map(_is_text, arg))),
    ),
    "Stage": (
        'loops, {"stage": name}',
        lambda arg: isinstance(arg, dict) and list(arg) == ["stage"] and _is_text(arg["stage"]),
    ),
    "Declared": ("the name of an intrinsic", _is_text),
    "int": ("a whole number", _is_number),
    "str": ("a name", _is_text),
    "str | None": ("a name", lambda arg: arg is None or _is_text(arg)),
    "tuple[int, ...]": (
        "a list of whole numbers", lambda arg: isinstance(arg, list | tuple) and all(map(_is_number, arg))
    ),
}  # fmt: skip
"""Annotation of a primitive's parameter -> description of its form in a trace, and the test for that form."""


def _check_arguments(step: TraceStep) -> None:
    """Raise ValueError where the arguments of `step` do not match the signature of its primitive."""
    try:
        bound = PRIMITIVES[step.primitive].bind(None, *step.args)
    except TypeError as error:
        raise ValueError(str(error)) from None
    for name, value in list(bound.arguments.items())[1:]:
        parameter = PRIMITIVES[step.primitive].parameters[name]
        description, is_valid = _FORMS[parameter.annotation]
        for arg in value if parameter.kind is Parameter.VAR_POSITIONAL else (value,):
            if not is_valid(arg):
                raise ValueError(f"{name} is {description}, not {arg!r}")


def recorded(primitive: Callable[P, R]) -> Callable[P, R]:
    """Decorate a primitive of a stage or a schedule so that it appends a TraceStep to the trace."""
    PRIMITIVES[primitive.__name__] = form = signature(primitive)
    assert all(p.annotation in _FORMS for p in list(form.parameters.values())[1:]), form

    @wraps(primitive)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Run the primitive and record it as one step, in place of the steps of primitives that it calls."""
        owner: Any = args[0]
        trace: Trace | None = owner.trace
        if trace is None:
            return primitive(*args, **kwargs)
        before = len(trace.steps)
        result = primitive(*args, **kwargs)
        del trace.steps[before:]  # steps of primitives that this one called
        stage = owner.tensor.name if isinstance(owner, Stage) else ""
        bound = form.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = list(bound.args[1:])
        while arguments and arguments[-1] is None:
            arguments.pop()
        trace.steps.append(TraceStep(stage, primitive.__name__, tuple(_to_data(arg) for arg in arguments)))
        return result

    return call


def _to_data(arg: Any) -> Any:
    """Convert an argument to what a trace stores: names of loops, tensors and intrinsics, numbers, lists."""
    if isinstance(arg, Axis | Tensor):
        return arg.name
    if isinstance(arg, list | tuple):
        return [_to_data(element) for element in arg]
    if isinstance(arg, Stage):
        return {"stage": arg.tensor.name}
    return arg if isinstance(arg, int | str) else arg.name


def _from_data(schedule: Schedule, arg: Any) -> Any:
    """Resolve a stored argument against `schedule`; the inverse of `_to_data`."""
    if isinstance(arg, dict):
        return schedule[arg["stage"]]
    return tuple(arg) if isinstance(arg, list) else arg


def _source_text(arg: Any) -> str:
    """Return a stored argument as the Python that makes it."""
    if isinstance(arg, dict) and "stage" in arg:
        return f'''s["{arg["stage"]}"]'''
    if isinstance(arg, list):
        return f"[{', '.join(_source_text(element) for element in arg)}]"
    return f'"{arg}"' if isinstance(arg, str) else repr(arg)


TAILS = ("shift", "guard", "peel")
"""Treatment of a last tile that is smaller than the others. shift: it begins earlier and computes some elements again.
guard: a condition masks the iterations beyond the end. peel: it becomes a loop nest of its own, with smaller loops."""


class ScheduleError(ValueError):
    """A schedule that cannot be followed; the message names the tensor, the loop, and the reason."""


@dataclass(frozen=True)
class Split:
    """Relation of a split: `parent` is outer * (extent of inner) + inner + first."""

    parent: Axis
    outer: Axis
    inner: Axis
    tail: str = "shift"
    first: int = 0


@dataclass(frozen=True)
class Fuse:
    """Relation of a fusion: `fused` is outer * (extent of inner) + inner."""

    outer: Axis
    inner: Axis
    fused: Axis


class Stage:
    """The loops of one tensor: `order` lists them from the outermost, `kinds` how each runs.

    body: the expression of an element; that of the tensor, until cache_read or cache_write insert another tensor.
    scope: the memory that holds the tensor. attached: the loop of another stage inside which this one is computed.
    step: the schedule of one step of a scan. tail: the default of `split` for loops over data, of TAILS. relations: the
    splits and fusions that made the loops of `order` from the axes of the definition, `roots`. inlined: whether it has
    no loops, see compute_inline. kept: see `keep`. intrinsic: the tensorized loop, and the intrinsic that replaces it.
    lanes: widths of vectors of a loop, see accumulate_lanes. trace: where primitives are recorded; None for copies.
    """

    def __init__(self, tensor: Tensor, scope: str = "workspace", trace: Trace | None = None):
        """Start with the plain loops of `tensor`, in the order of its axes, then of its reductions."""
        assert tensor.body is not None
        self.tensor = tensor
        self.trace = trace
        self.body: Expr = tensor.body
        self.scope = scope
        self.tail = "shift"
        self.relations: list[Split | Fuse] = []
        self.kinds: dict[Axis, str] = {}
        self.inlined = False
        self.kept = False
        self.attached: tuple[Stage, Axis] | None = None
        self.intrinsic: tuple[Axis, Declared] | None = None
        self.lanes: dict[Axis, tuple[int, ...]] = {}
        self.step = Schedule(self.body.updates) if isinstance(self.body, Scan) else None
        reduce_axes = dict.fromkeys(a for n in walk(self.body) if isinstance(n, Reduce) for a in n.axes)
        self.roots: list[Axis] = [*tensor.axes, *reduce_axes]
        """The axes of the definition, from which all loops derive."""
        self.order: list[Axis] = list(self.roots)

    def axis(self, axis: Axis | str) -> Axis:
        """Return the loop of this name, or the loop itself; ScheduleError where it is no longer one of the loops."""
        loops = [a for a in self.order if a is axis or a.name == axis]
        if len(loops) != 1:
            name = axis if isinstance(axis, str) else axis.name
            problem = "is not one of" if not loops else "is more than one of"
            raise ScheduleError(f"{self.tensor.name}: {name} {problem} the loops {[a.name for a in self.order]}")
        return loops[0]

    def _position(self, axis: Axis) -> int:
        """Return the position of a loop in `order`."""
        return self.order.index(self.axis(axis))

    @recorded
    def split(self, axis: Axis | str, factor: int, tail: str | None = None) -> tuple[Axis, Axis]:
        """Cut a loop into tiles of `factor`. Returns (tile number, index within the tile).

        tail: of TAILS, for an extent that is not a multiple of `factor`; default: the stage's, "guard" for reductions.
        """
        axis = self.axis(axis)
        position = self._position(axis)
        if factor < 1:
            raise ScheduleError(f"{self.tensor.name}: split {axis.name} by {factor}")
        tail = tail or ("guard" if axis.reduce else self.tail)
        if tail not in TAILS or (axis.reduce and tail == "shift"):
            raise ScheduleError(f"{self.tensor.name}: no last tile of {axis.name} is a {tail!r}")
        factor = min(factor, max(axis.extent, 1))
        outer = Axis(f"{axis.name}.o", extent=-(-axis.extent // factor), reduce=axis.reduce)
        inner = Axis(f"{axis.name}.i", extent=factor, reduce=axis.reduce)
        self.order[position : position + 1] = [outer, inner]
        self.relations.append(Split(axis, outer, inner, tail))
        return outer, inner

    @recorded
    def set_tail(self, tail: str) -> None:
        """Set the tail that `split` uses by default; initially "shift"."""
        if tail not in TAILS:
            raise ScheduleError(f"{self.tensor.name}: no last tile is a {tail!r}; take one of {', '.join(TAILS)}")
        self.tail = tail

    @recorded
    def fuse(self, outer: Axis | str, inner: Axis | str) -> Axis:
        """Fuse two loops into one over both; `inner` must follow `outer` directly."""
        outer, inner = self.axis(outer), self.axis(inner)
        position = self._position(outer)
        if self._position(inner) != position + 1 or outer.reduce != inner.reduce:
            raise ScheduleError(f"{self.tensor.name}: {inner.name} does not follow {outer.name}")
        fused = Axis(f"{outer.name}.{inner.name}", extent=outer.extent * inner.extent, reduce=outer.reduce)
        self.order[position : position + 2] = [fused]
        self.relations.append(Fuse(outer, inner, fused))
        return fused

    @recorded
    def reorder(self, *axes: Axis | str) -> None:
        """Put these loops in this order, in the positions that they occupy together."""
        loops = [self.axis(axis) for axis in axes]
        positions = sorted(self._position(axis) for axis in loops)
        if len(set(positions)) != len(loops):
            raise ScheduleError(f"{self.tensor.name}: an axis is named twice in reorder")
        for position, axis in zip(positions, loops):
            self.order[position] = axis

    def tile(self, y: Axis, x: Axis, fy: int, fx: int) -> tuple[Axis, Axis, Axis, Axis]:
        """Split two loops and put both inner ones inside. Returns the four loops from the outermost."""
        yo, yi = self.split(y, fy)
        xo, xi = self.split(x, fx)
        self.reorder(yo, xo, yi, xi)
        return yo, xo, yi, xi

    @recorded
    def unroll(self, axis: Axis | str) -> None:
        """Unroll the loop completely."""
        self.kinds[self.axis(axis)] = "unrolled"

    @recorded
    def parallel(self, axis: Axis | str) -> None:
        """Run the loop on several threads. ScheduleError for a reduction."""
        axis = self.axis(axis)
        if axis.reduce:
            raise ScheduleError(f"{self.tensor.name}: the reduction {axis.name} cannot be parallel")
        self.kinds[axis] = "parallel"

    @recorded
    def pipeline(self, axis: Axis | str) -> None:
        """Overlap the iterations of this loop by software pipelining (see vthread.pipeline).

        Loads into scratchpads are issued as far ahead as there is room, while earlier iterations compute. Iterations
        may depend on earlier ones only through memory outside of the loop.
        """
        self.kinds[self.axis(axis)] = "pipelined"

    @recorded
    def keep(self) -> None:
        """Leave the tensor in its scratchpad after the iteration that loads it, until others need the room.

        A later iteration that would load the same data skips the load.
        """
        self.kept = True

    @recorded
    def vectorize(self, axis: Axis | str) -> None:
        """Run all iterations of the loop as lanes of one vector; only the innermost loop over data allows it."""
        axis = self.axis(axis)
        if axis.reduce or any(not a.reduce for a in self.order[self._position(axis) + 1 :]):
            raise ScheduleError(f"{self.tensor.name}: only the innermost data loop can be vectorized, not {axis.name}")
        self.kinds[axis] = "vectorized"

    @recorded
    def accumulate_lanes(self, axis: Axis | str, widths: tuple[int, ...]) -> None:
        """Accumulate the innermost reduction in vectors of `widths`, wide ones first; combine their lanes."""
        axis = self.axis(axis)
        if not axis.reduce or self._position(axis) != len(self.order) - 1:
            raise ScheduleError(f"{self.tensor.name}: {axis.name} is not a reduction, or not the innermost loop")
        if not widths or min(widths) < 1:
            raise ScheduleError(f"{self.tensor.name}: vectors of {list(widths)} lanes")
        self.lanes[axis] = widths

    @recorded
    def vthread(self, axis: Axis | str) -> None:
        """Run the iterations as virtual threads, whose statements alternate (see vthread.interleave).

        Each has its own copy of the buffers that are computed inside.
        """
        axis = self.axis(axis)
        if axis.reduce:
            raise ScheduleError(f"{self.tensor.name}: the reduction {axis.name} cannot be a virtual thread")
        self.kinds[axis] = "vthread"

    @recorded
    def set_scope(self, scope: str) -> None:
        """Keep the tensor in this memory: "workspace", "local", or a scratchpad of the accelerator, see SCOPES."""
        if scope not in SCOPES:
            raise ScheduleError(f"{self.tensor.name}: no memory is called {scope!r}; there are {', '.join(SCOPES)}")
        self.scope = scope

    @recorded
    def compute_inline(self) -> None:
        """Compute each element where it is read, instead of storing it."""
        if any(isinstance(node, Reduce) for node in walk(self.body)):
            raise ScheduleError(f"{self.tensor.name}: a reduction cannot be inlined")
        if self.attached is not None:
            raise ScheduleError(f"{self.tensor.name}: it is computed at a loop, so it cannot be inlined")
        self.inlined = True

    @recorded
    def compute_at(self, consumer: Stage, axis: Axis | str) -> None:
        """Compute, in each iteration of loop `axis` of `consumer`, only the region that is read there.

        The region lies in a buffer of its size. All readers must lie inside that loop, which `lower` checks.
        """
        name = self.tensor.name
        axis = consumer.axis(axis)
        if consumer is self:
            raise ScheduleError(f"{name} cannot be computed inside itself")
        if self.inlined:
            raise ScheduleError(f"{name} is inlined, so it is computed nowhere else")
        if tuple(a.extent for a in self.tensor.axes) != self.tensor.shape:
            raise ScheduleError(f"{name}: its axes were merged, so the part that is read cannot be told")
        if consumer.kinds.get(axis) == "vectorized":
            raise ScheduleError(f"{name} cannot be computed inside the vectorized loop {axis.name}")
        outer: Stage | None = consumer
        while outer is not None:
            if outer is self:
                raise ScheduleError(f"{consumer.tensor.name} is computed inside {name} already")
            outer = outer.attached[0] if outer.attached else None
        self.attached = consumer, axis

    @recorded
    def compute_root(self) -> None:
        """Compute the complete tensor before everything that reads it, which is the default."""
        self.attached = None

    @recorded
    def tensorize(self, axis: Axis | str, intrinsic: Declared) -> None:
        """Replace loop `axis` and those inside it by `intrinsic`. `lower` raises where they compute something else.

        A tensor that an intrinsic accumulates is not reset before: the first step overwrites it.
        """
        self.intrinsic = self.axis(axis), intrinsic

    def peeled_splits(self, axis: Axis) -> list[Split]:
        """Return the splits behind the loop `axis` whose last tile becomes a nest of its own, the earliest first."""
        splits: list[Split] = []
        for relation in reversed(self.relations):
            if isinstance(relation, Split) and relation.outer is axis:
                axis = relation.parent
                if (
                    relation.tail == "peel"
                    and relation.first + relation.outer.extent * relation.inner.extent > axis.extent
                ):
                    splits.insert(0, relation)
        return splits

    def resized(
        self, extents: dict[Axis, int], tile: Split | None = None, first: int = 0, count: int = 0, size: int = 0
    ) -> tuple[Stage, dict[Axis, Axis]]:
        """Copy this stage for other extents of the tensor's axes. Returns (copy, loop of this stage -> its copy).

        tile: a split of this stage that has in the copy `count` tiles of `size` from element `first` on.
        """
        stage = Stage(self.tensor, self.scope)
        stage.body, stage.kept = self.body, self.kept
        new: dict[Axis, Axis] = {}
        # Each nest needs its own copy of the tensorized loop, since an intrinsic is matched per nest.
        tensorized = None if tile is None or self.intrinsic is None else self.intrinsic[0]

        def copy_axis(axis: Axis, extent: int) -> Axis:
            """Return the loop of the copy that corresponds to `axis`: itself where its extent does not change."""
            is_same = extent == axis.extent and axis is not tensorized
            new[axis] = axis if is_same else Axis(axis.name, extent=extent, reduce=axis.reduce)
            return new[axis]

        for axis in self.roots:
            copy_axis(axis, extents.get(axis, axis.extent))
        for relation in self.relations:
            match relation:
                case Split(parent, outer, inner, tail, begin):
                    new_extent = new[parent].extent
                    if relation is tile:
                        begin, tiles = first, (copy_axis(outer, count), copy_axis(inner, size))
                    elif new_extent == parent.extent:
                        tiles = copy_axis(outer, outer.extent), copy_axis(inner, inner.extent)
                    else:
                        factor = min(inner.extent, max(new_extent, 1))
                        tiles = copy_axis(outer, -(-new_extent // factor)), copy_axis(inner, factor)
                    stage.relations.append(Split(new[parent], *tiles, tail, begin))
                case Fuse(outer, inner, fused):
                    both = copy_axis(fused, new[outer].extent * new[inner].extent)
                    stage.relations.append(Fuse(new[outer], new[inner], both))
        stage.roots = [new[axis] for axis in self.roots]
        stage.order = [new[axis] for axis in self.order]
        stage.kinds = {new[axis]: kind for axis, kind in self.kinds.items() if axis in new}
        stage.lanes = {new[axis]: widths for axis, widths in self.lanes.items()}
        if self.intrinsic is not None:
            stage.intrinsic = new[self.intrinsic_loops()[0]], self.intrinsic[1]
        return stage, new

    def intrinsic_loops(self) -> list[Axis]:
        """Return the tensorized loop and those inside it; ScheduleError where it was split or fused since."""
        assert self.intrinsic is not None
        axis = self.intrinsic[0]
        if axis not in self.order:
            raise ScheduleError(f"{self.tensor.name}: the tensorized loop {axis.name} was split or fused")
        return self.order[self.order.index(axis) :]

    def index_values(self) -> tuple[dict[Var, Expr], list[Expr]]:
        """Express the tensor's axes in terms of the loops. Returns (axis -> expression, guards).

        An iteration counts only where all guards hold; others lie beyond the end of a split loop.
        """
        values: dict[Var, Expr] = {axis: axis for axis in self.order}
        guards: list[Expr] = []
        for relation in reversed(self.relations):
            match relation:
                case Split(parent, outer, inner, tail, first):
                    base = values[outer] * inner.extent + first
                    has_tail = first + outer.extent * inner.extent > parent.extent
                    if has_tail and tail == "shift":
                        base = minimum(base, parent.extent - inner.extent)
                    values[parent] = base + values[inner]
                    if has_tail and tail != "shift":
                        guards.append(values[parent] < parent.extent)
                case Fuse(outer, inner, fused):
                    values[outer] = values[fused] // inner.extent
                    values[inner] = values[fused] % inner.extent
        return values, guards


class Schedule:
    """The stages of all computed tensors that the outputs need: `schedule[tensor]`.

    `tensors` and `stages` are in topological order, producers first.
    """

    def __init__(self, outputs: Sequence[Tensor]):
        self.outputs = tuple(outputs)
        self.tensors = topological(self.outputs)
        self.trace = Trace()
        self.stages = {t: Stage(t, trace=self.trace) for t in self.tensors if t.body is not None}

    def tensor(self, tensor: Tensor | str) -> Tensor:
        """Return the tensor of this name, or the tensor itself; ScheduleError where there is none or more than one."""
        matches = [t for t in self.tensors if t is tensor or t.name == tensor]
        if isinstance(tensor, str) and len(matches) != 1:
            how = "more than one tensor" if matches else "no tensor"
            raise ScheduleError(
                f"{how} of this schedule is called {tensor}; there are {[t.name for t in self.tensors]}"
            )
        return matches[0] if isinstance(tensor, str) else tensor

    def __getitem__(self, tensor: Tensor | str) -> Stage:
        """Return the stage of a tensor; ScheduleError where this schedule does not compute it."""
        if isinstance(tensor, Tensor) and tensor in self.stages:
            return self.stages[tensor]
        tensor = self.tensor(tensor)
        if tensor not in self.stages:
            raise ScheduleError(f"{tensor.name} is not computed by this schedule")
        return self.stages[tensor]

    def _insert(self, tensor: Tensor, before: Tensor, scope: str) -> Stage:
        """Insert a new stage before the tensor `before`, and keep the topological order."""
        stage = Stage(tensor, scope, self.trace)
        position = self.tensors.index(before)
        self.tensors.insert(position, tensor)
        stages = {**self.stages, tensor: stage}
        self.stages = {t: stages[t] for t in self.tensors if t in stages}
        return stage

    def _cache_name(self, tensor: Tensor, scope: str, *avoid: str) -> str:
        """Return a name such as `a.inp` that no tensor of the schedule has and that is not in `avoid`."""
        if scope not in SCOPES:
            raise ScheduleError(f"{tensor.name}: no memory is called {scope!r}; there are {', '.join(SCOPES)}")
        used = {*avoid, *(t.name for t in self.tensors)}
        names = (f"{tensor.name}.{scope}{n or ''}" for n in range(len(used) + 1))
        return next(name for name in names if name not in used)

    @recorded
    def cache_read(self, tensor: Tensor | str, scope: str, readers: Tensor | str | Sequence[Tensor | str]) -> Tensor:
        """Insert a copy of `tensor` in memory `scope`, which `readers` read instead. Returns the copy."""
        tensor = self.tensor(tensor)
        names = (readers,) if isinstance(readers, Tensor | str) else tuple(readers)
        readers = tuple(self.tensor(reader) for reader in names)
        name = self._cache_name(tensor, scope, f"{tensor.name}.acc")  # lower.py gives this name to accumulators
        for reader in readers:
            if not any(load.tensor is tensor for load in loads(self[reader].body)):
                raise ScheduleError(f"{reader.name} does not read {tensor.name}")
            if any(len(n.index) != len(tensor.shape) for n in loads(self[reader].body) if n.tensor is tensor):
                raise ScheduleError(f"{reader.name} reads {tensor.name} by element numbers")
        if not readers:
            raise ScheduleError(f"cache_read of {tensor.name} without a reader")
        axes = tuple(Axis(f"i{d}", extent=extent) for d, extent in enumerate(tensor.shape))
        cache = Tensor(name, tensor.shape, tensor.dtype, axes, Load(tensor, axes))
        self._insert(cache, self.tensors[self.tensors.index(tensor) + 1], scope)
        for reader in readers:
            stage = self[reader]
            stage.body = rewrite(
                stage.body, lambda e: Load(cache, e.index) if isinstance(e, Load) and e.tensor is tensor else None
            )
        return cache

    @recorded
    def cache_write(self, tensor: Tensor | str, scope: str) -> Tensor:
        """Compute `tensor` in memory `scope` and copy it from there. Returns the tensor that is computed.

        It must come before any other change of the tensor's loops.
        """
        tensor = self.tensor(tensor)
        stage = self[tensor]
        if stage.relations or stage.kinds or stage.lanes or stage.intrinsic or stage.attached or stage.inlined:
            raise ScheduleError(f"{tensor.name}: cache_write comes before other changes of its loops")
        if tuple(a.extent for a in tensor.axes) != tensor.shape:
            raise ScheduleError(f"{tensor.name}: its axes were merged")
        axes = tuple(Axis(a.name, extent=a.extent) for a in tensor.axes)
        values: dict[Var, Expr] = dict(zip(tensor.axes, axes))
        cache = Tensor(
            self._cache_name(tensor, scope), tensor.shape, tensor.dtype, axes, substitute(stage.body, values)
        )
        self._insert(cache, tensor, scope)
        stage.body = Load(cache, tensor.axes)
        stage.roots = list(tensor.axes)
        stage.order = list(tensor.axes)
        return cache


def create_schedule(outputs: Tensor | Sequence[Tensor]) -> Schedule:
    """Create the default schedule: plain loops in the order of the axes."""
    return Schedule((outputs,) if isinstance(outputs, Tensor) else outputs)
