"""Schedules with TVM's API, on top of those of compiler.expr.

Primitives refer to loops by name, so that a schedule of open sizes can be applied again once sizes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

from celosia.compiler.expr.loops import Declared
from celosia.compiler.expr.nodes import Axis, loaded, topological
from celosia.compiler.expr.nodes import Tensor as Node
from celosia.compiler.expr.schedule import PRIMITIVES, Trace, TraceStep
from celosia.compiler.expr.schedule import Schedule as Loops
from celosia.compiler.expr.schedule import Stage as LoopStage
from celosia.compiler.expr.schedule import create_schedule as default_schedule
from celosia.driver.te.nodes import SizedAxis, SizedNode, TensorExpr
from celosia.driver.te.te_accelerator import Copies

SCOPES = {"global": "workspace"}
"""The compiler's names of memories that TVM names otherwise."""
Loop = Axis | str
"""A loop: its axis or its name."""


@dataclass(frozen=True)
class ThreadAxis:
    """The kind of thread that a loop is bound to: always a virtual thread."""

    tag: str


def thread_axis(dom: Any = None, tag: str | None = None, name: str = "") -> ThreadAxis:
    """Return virtual threads for `StageView.bind`: tag "vthread", or VTA's "cthread". ValueError for threads of a GPU.

    dom: ignored, or the tag; name: ignored.
    """
    tag = tag or dom
    if tag not in ("vthread", "cthread"):
        raise ValueError(f"no loop is bound to {tag!r}: virtual threads are 'vthread'; parallel(axis) is for a CPU's")
    return ThreadAxis(tag)


def create_schedule(outputs: TensorExpr | Sequence[TensorExpr]) -> TensorSchedule:
    """Return the default schedule of `outputs`: loops in the order of axes. `s[C]` are the loops of tensor C."""
    return TensorSchedule((outputs,) if isinstance(outputs, TensorExpr) else tuple(outputs))


class TensorSchedule:
    """A schedule as in TVM: `s[tensor]` is the StageView of a computed tensor, whose methods change its loops.

    It records each change by names of loops, so that a schedule of dynamic sizes is applied again to the given sizes.

    outputs: tensors that it computes. loops: the schedule of compiler.expr.
    """

    def __init__(self, outputs: Sequence[TensorExpr]) -> None:
        self.outputs = tuple(output.node for output in outputs)
        self.loops: Loops = default_schedule(self.outputs)
        self.declared: dict[str, Declared] = {}
        """Intrinsics that stages are tensorized with, by name."""

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
    def has_fixed_sizes(self) -> bool:
        """Whether every size is a number, so that the schedule can be compiled at once."""
        nodes = [node for node in topological(self.outputs) if isinstance(node, SizedNode)]
        sizes = [size for node in nodes for size in node.sizes]
        axes = [axis for stage in self.loops.stages.values() for axis in stage.roots if isinstance(axis, SizedAxis)]
        return all(isinstance(size, int) for size in (*sizes, *(axis.size for axis in axes)))

    def replay_for(self, outputs: Sequence[Node], declared: dict[str, Declared]) -> Loops:
        """Return this schedule for `outputs`, which equal its own except for sizes.

        declared: intrinsics by name. ValueError where a primitive does not apply to these sizes.
        """
        loops = default_schedule(outputs)
        self.loops.trace.replay(loops, declared)
        return loops

    def cache_read(
        self, tensor: TensorExpr, scope: str, readers: TensorExpr | Sequence[TensorExpr] | None = None
    ) -> TensorExpr:
        """Copy `tensor` to memory `scope`, and let `readers` read the copy; None for all readers. Return the copy."""
        if readers is None:
            names = [t.name for t, stage in self.loops.stages.items() if tensor.name in _tensors_read(stage)]
        else:
            names = [reader.name for reader in ((readers,) if isinstance(readers, TensorExpr) else readers)]
        return TensorExpr(self.loops.cache_read(tensor.name, SCOPES.get(scope, scope), names))

    def cache_write(self, tensor: TensorExpr, scope: str) -> TensorExpr:
        """Compute `tensor` in memory `scope`, and copy it from there. Return the tensor that is computed there.

        Primitives so far on the loops of `tensor` now apply to that tensor; the copy has default loops.
        """
        steps = self.loops.trace.steps
        loops = default_schedule(self.outputs)
        cache = loops.cache_write(tensor.name, SCOPES.get(scope, scope))
        Trace([_redirect_step(step, tensor.name, cache.name) for step in steps]).replay(loops, self.declared)
        self.loops = loops
        return TensorExpr(cache)


def _tensors_read(stage: LoopStage) -> set[str]:
    """Return the names of the tensors that a stage reads."""
    return {tensor.name for tensor in loaded(stage.body)}


def _redirect_step(step: TraceStep, name: str, cache: str) -> TraceStep:
    """Return a step of a trace with the tensor `name` replaced by its cache."""

    def redirect(arg: Any) -> Any:
        """Replace the name in an argument: a name, a stage as a dict, or a list of arguments."""
        if isinstance(arg, dict):
            return {"stage": cache if arg["stage"] == name else arg["stage"]}
        return [redirect(element) for element in arg] if isinstance(arg, list) else cache if arg == name else arg

    args = step.args
    if step.primitive == "cache_read":
        args = (*args[:2], redirect(args[2]))
    elif step.primitive == "compute_at":
        args = (redirect(args[0]), *args[1:])
    return replace(step, stage=cache if step.stage == name else step.stage, args=args)


class StageView:
    """The loops of one tensor, with the primitives of TVM's stages.

    Besides the methods here: `reorder`, `vectorize`, `unroll`, `parallel`, `pipeline`, `compute_inline`, `compute_root`
    and all others of compiler.expr's Stage. owner: the schedule. op: the tensor.
    """

    def __init__(self, owner: TensorSchedule, tensor: TensorExpr) -> None:
        self.owner, self.op = owner, tensor

    @property
    def stage(self) -> LoopStage:
        """The stage of compiler.expr, which changes when the schedule is replayed."""
        return self.owner.loops[self.op.name]

    def __getattr__(self, primitive: str) -> Callable[..., Any]:
        if primitive not in PRIMITIVES or not hasattr(LoopStage, primitive):
            known_names = sorted(name for name in {*PRIMITIVES, "bind", "tile"} if name in ("bind", *dir(LoopStage)))
            raise AttributeError(f"a stage has no primitive {primitive!r}; there are {', '.join(known_names)}")
        return lambda *args: getattr(self.stage, primitive)(*(_name_of_argument(arg) for arg in args))

    def split(self, parent: Loop, factor: int | None = None, nparts: int | None = None) -> tuple[Axis, Axis]:
        """Split a loop into tiles of `factor` iterations, or into `nparts` tiles. Return (loop over tiles, loop in a
        tile).

        ValueError for both arguments or none, and for `nparts` while sizes are open.
        """
        if (factor is None) == (nparts is None):
            raise ValueError(f"{self.op.name}: split {_name_of_argument(parent)} by a factor or into nparts")
        if nparts is not None:
            if not self.owner.has_fixed_sizes or nparts < 1:
                raise ValueError(
                    f"{self.op.name}: {_name_of_argument(parent)} has no {nparts} parts while its size is open; "
                    "split by a factor"
                )
            factor = -(-self.stage.axis(_name_of_argument(parent)).extent // nparts)
        assert factor is not None
        return self.stage.split(_name_of_argument(parent), factor)

    def tile(self, *axes_and_factors: Any) -> tuple[Axis, ...]:
        """Tile any number of loops, as `tile(y, x, 8, 8)`: split each, and reorder.

        Returns the loops over tiles, then the loops in a tile, from the outermost on.
        """
        half = len(axes_and_factors) // 2
        pairs = [self.split(*pair) for pair in zip(axes_and_factors[:half], axes_and_factors[half:], strict=True)]
        loops = (*(outer for outer, _ in pairs), *(inner for _, inner in pairs))
        self.reorder(*loops)
        return loops

    def fuse(self, *axes: Loop) -> Axis:
        """Fuse loops, each of which is inside the one before it, into one loop; return it."""
        return reduce(lambda outer, inner: self.stage.fuse(_name_of_argument(outer), _name_of_argument(inner)), axes)  # type: ignore[return-value]

    def bind(self, axis: Loop, thread: ThreadAxis) -> None:
        """Run a loop as virtual threads. thread: of `thread_axis`."""
        self.stage.vthread(_name_of_argument(axis))

    def compute_at(self, parent: StageView, axis: Loop) -> None:
        """Compute the tensor inside loop `axis` of `parent`: in each iteration the elements that it reads."""
        self.stage.compute_at(parent.stage, _name_of_argument(axis))

    def set_scope(self, scope: str) -> None:
        """Keep the tensor in memory `scope`."""
        self.stage.set_scope(SCOPES.get(scope, scope))

    def tensorize(self, axis: Loop, intrinsic: Declared) -> None:
        """Replace loop `axis` and those inside it by `intrinsic`. Building raises where they compute something else."""
        if self.owner.declared.setdefault(intrinsic.name, intrinsic) is not intrinsic:
            raise ValueError(f"two intrinsics of this schedule are called {intrinsic.name}")
        self.stage.tensorize(_name_of_argument(axis), intrinsic)

    def pragma(self, axis: Loop, copies: Copies) -> None:
        """Copy the tensor by the accelerator's LOAD or STORE, in loop `axis`. copies: `dma_copy` of an Environment.

        The intrinsic replaces the loops in `axis` that copy as many elements as it does; ValueError where there are
        none.
        """
        environment = copies.environment
        source = next(iter(_tensors_read(self.stage)))
        scope = self.owner.loops[source].scope if source in {t.name for t in self.owner.loops.stages} else "dram"
        intrinsic = environment.copy(scope, self.stage.scope)
        inner = self.stage.order[self.stage.order.index(self.stage.axis(_name_of_argument(axis))) :]
        for start in reversed(range(len(inner))):
            if prod(loop.extent for loop in inner[start:]) == intrinsic.size:
                return self.tensorize(inner[start], intrinsic)
        raise ValueError(
            f"{self.op.name}: no loops in {_name_of_argument(axis)} copy {intrinsic.size} elements, as {intrinsic.name}"
        )


def _name_of_argument(arg: Any) -> Any:
    """Return the name of an axis; other arguments of a primitive as they are. ValueError for a list of axes."""
    if isinstance(arg, Sequence) and any(isinstance(element, Axis) for element in arg):
        raise ValueError("loops are given one by one, as reorder(*loops), not as a list")
    return arg.name if isinstance(arg, Axis) else arg
