"""Schedules in TVM's spelling: compiler.expr's primitives, taken by the names of loops, so that what was said for open
sizes is said again once they are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

from celosia.compiler.expr.loops import Declared
from celosia.compiler.expr.nodes import Axis
from celosia.compiler.expr.nodes import Tensor as Node
from celosia.compiler.expr.schedule import Schedule as Loops
from celosia.compiler.expr.schedule import Stage as LoopStage
from celosia.compiler.expr.schedule import create_schedule as plain
from celosia.compiler.expr.trace import PRIMITIVES, Trace, TraceStep
from celosia.compiler.expr.transform import topological
from celosia.compiler.expr.walk import loaded
from celosia.driver.te.nodes import SizedAxis, SizedNode, TensorExpr
from celosia.driver.te.te_accelerator import Copies

SCOPES = {"global": "workspace"}
"""Memories that have another name here."""
Loop = Axis | str


@dataclass(frozen=True)
class ThreadAxis:
    """Virtual thread that a loop is bound to."""

    tag: str


def thread_axis(dom: Any = None, tag: str | None = None, name: str = "") -> ThreadAxis:
    """Return `thread_axis("vthread")`, virtual threads ("cthread" is VTA's word). ValueError for a thread of a GPU."""
    tag = tag or dom
    if tag not in ("vthread", "cthread"):
        raise ValueError(f"no loop is bound to {tag!r}: virtual threads are 'vthread'; parallel(axis) is for a CPU's")
    return ThreadAxis(tag)


def create_schedule(outputs: TensorExpr | Sequence[TensorExpr]) -> TensorSchedule:
    """Plain loops in the order of the axes, to be changed: `s[C]` are those of C."""
    return TensorSchedule((outputs,) if isinstance(outputs, TensorExpr) else tuple(outputs))


class TensorSchedule:
    """Schedule with a StageView for every computed tensor: `s[tensor]`."""

    def __init__(self, outputs: Sequence[TensorExpr]) -> None:
        self.outputs = tuple(output.node for output in outputs)
        self.loops: Loops = plain(self.outputs)
        self.declared: dict[str, Declared] = {}
        """Intrinsics by their names."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a schedule has no {name!r}: it has cache_read and cache_write, and its stages, s[tensor], the primitives"
        )

    def __getitem__(self, tensor: TensorExpr) -> StageView:
        if not isinstance(tensor, TensorExpr):
            raise ValueError(f"{tensor!r} is no tensor of this schedule")
        _ = self.loops[tensor.name]
        return StageView(self, tensor)

    @property
    def sized(self) -> bool:
        """Whether every size is a number."""
        nodes = [node for node in topological(self.outputs) if isinstance(node, SizedNode)]
        sizes = [size for node in nodes for size in node.sizes]
        axes = [axis for stage in self.loops.stages.values() for axis in stage.roots if isinstance(axis, SizedAxis)]
        return all(isinstance(size, int) for size in (*sizes, *(axis.size for axis in axes)))

    def replayed(self, outputs: Sequence[Node], declared: dict[str, Declared]) -> Loops:
        """Replay this schedule for `outputs`, which are its own but for their sizes. ValueError where it does not apply
        to them."""
        loops = plain(outputs)
        self.loops.trace.replay(loops, declared)
        return loops

    def cache_read(
        self, tensor: TensorExpr, scope: str, readers: TensorExpr | Sequence[TensorExpr] | None = None
    ) -> TensorExpr:
        """Copy `tensor` to memory `scope`, where `readers` (left out: all) read it."""
        if readers is None:
            names = [t.name for t, stage in self.loops.stages.items() if tensor.name in _tensors_read(stage)]
        else:
            names = [reader.name for reader in ((readers,) if isinstance(readers, TensorExpr) else readers)]
        return TensorExpr(self.loops.cache_read(tensor.name, SCOPES.get(scope, scope), names))

    def cache_write(self, tensor: TensorExpr, scope: str) -> TensorExpr:
        """Compute `tensor` in memory `scope` and copy it from there. Returns what is computed: what was said of the
        loops of `tensor` holds for that; the copy's are plain.
        """
        before = self.loops.trace.steps
        loops = plain(self.outputs)
        cache = loops.cache_write(tensor.name, SCOPES.get(scope, scope))
        Trace([_redirect_step(step, tensor.name, cache.name) for step in before]).replay(loops, self.declared)
        self.loops = loops
        return TensorExpr(cache)


def _tensors_read(stage: LoopStage) -> set[str]:
    return {tensor.name for tensor in loaded(stage.body)}


def _redirect_step(step: TraceStep, name: str, cache: str) -> TraceStep:
    """Return `step` with the tensor `name` replaced by its cache."""

    def moved(arg: Any) -> Any:
        if isinstance(arg, dict):
            return {"stage": cache if arg["stage"] == name else arg["stage"]}
        return [moved(part) for part in arg] if isinstance(arg, list) else cache if arg == name else arg

    args = step.args
    if step.primitive == "cache_read":
        args = (*args[:2], moved(args[2]))
    elif step.primitive == "compute_at":
        args = (moved(args[0]), *args[1:])
    return replace(step, stage=cache if step.stage == name else step.stage, args=args)


class StageView:
    """The loops of one tensor. Beside the methods here: `reorder`, `vectorize`, `unroll`, `parallel`, `pipeline`,
    `compute_inline`, `compute_root` and all others of compiler.expr's Stage.
    """

    def __init__(self, owner: TensorSchedule, tensor: TensorExpr) -> None:
        self.owner, self.op = owner, tensor

    @property
    def stage(self) -> LoopStage:
        """Return the stage of compiler.expr."""
        return self.owner.loops[self.op.name]

    def __getattr__(self, primitive: str) -> Callable[..., Any]:
        if primitive not in PRIMITIVES or not hasattr(LoopStage, primitive):
            known_names = sorted(name for name in {*PRIMITIVES, "bind", "tile"} if name in ("bind", *dir(LoopStage)))
            raise AttributeError(f"a stage has no primitive {primitive!r}; there are {', '.join(known_names)}")
        return lambda *args: getattr(self.stage, primitive)(*(_name_of_argument(arg) for arg in args))

    def split(self, parent: Loop, factor: int | None = None, nparts: int | None = None) -> tuple[Axis, Axis]:
        """Tiles of `factor`, or `nparts` of them: (tile number, index within the tile). ValueError for both."""
        if (factor is None) == (nparts is None):
            raise ValueError(f"{self.op.name}: split {_name_of_argument(parent)} by a factor or into nparts")
        if nparts is not None:
            if not self.owner.sized or nparts < 1:
                raise ValueError(
                    f"{self.op.name}: {_name_of_argument(parent)} has no {nparts} parts while its size is open; "
                    "split by a factor"
                )
            factor = -(-self.stage.axis(_name_of_argument(parent)).extent // nparts)
        assert factor is not None
        return self.stage.split(_name_of_argument(parent), factor)

    def tile(self, *axes_and_factors: Any) -> tuple[Axis, ...]:
        """Tile loops: `tile(y, x, 8, 8)`, for any number of loops; returns the tiles' loops, then those inside, from
        the outermost."""
        half = len(axes_and_factors) // 2
        pairs = [self.split(*pair) for pair in zip(axes_and_factors[:half], axes_and_factors[half:], strict=True)]
        loops = (*(outer for outer, _ in pairs), *(inner for _, inner in pairs))
        self.reorder(*loops)
        return loops

    def fuse(self, *axes: Loop) -> Axis:
        """Fuse loops into one; each follows the one before."""
        return reduce(lambda outer, inner: self.stage.fuse(_name_of_argument(outer), _name_of_argument(inner)), axes)  # type: ignore[return-value]

    def bind(self, axis: Loop, thread: ThreadAxis) -> None:
        """Run the loop as virtual threads."""
        self.stage.vthread(_name_of_argument(axis))

    def compute_at(self, parent: StageView, axis: Loop) -> None:
        """Compute, in each iteration of loop `axis` of `parent`, what is read there."""
        self.stage.compute_at(parent.stage, _name_of_argument(axis))

    def set_scope(self, scope: str) -> None:
        """Keep the tensor in this memory."""
        self.stage.set_scope(SCOPES.get(scope, scope))

    def tensorize(self, axis: Loop, intrinsic: Declared) -> None:
        """Put `intrinsic` in the place of loop `axis` and those inside it; building raises where they do another."""
        if self.owner.declared.setdefault(intrinsic.name, intrinsic) is not intrinsic:
            raise ValueError(f"two intrinsics of this schedule are called {intrinsic.name}")
        self.stage.tensorize(_name_of_argument(axis), intrinsic)

    def pragma(self, axis: Loop, copies: Copies) -> None:
        """Let the accelerator's LOAD or STORE do the copy; `copies` is `dma_copy` of a Environment."""
        environment = copies.environment
        source = next(iter(_tensors_read(self.stage)))
        scope = self.owner.loops[source].scope if source in {t.name for t in self.owner.loops.stages} else "dram"
        intrinsic = environment.copy(scope, self.stage.scope)
        inner = self.stage.order[self.stage.order.index(self.stage.axis(_name_of_argument(axis))) :]
        for at in reversed(range(len(inner))):
            if prod(loop.extent for loop in inner[at:]) == intrinsic.size:
                return self.tensorize(inner[at], intrinsic)
        raise ValueError(
            f"{self.op.name}: no loops in {_name_of_argument(axis)} copy {intrinsic.size} elements, as {intrinsic.name}"
        )


def _name_of_argument(arg: Any) -> Any:
    if isinstance(arg, Sequence) and any(isinstance(part, Axis) for part in arg):
        raise ValueError("loops are given one by one, as reorder(*loops), not as a list")
    return arg.name if isinstance(arg, Axis) else arg
