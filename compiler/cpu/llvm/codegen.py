"""Code generation: loop IR to LLVM IR.

A kernel is `void name(arguments, part, parts)`: a list of pointers to inputs, outputs and a workspace, which do not
overlap, and two integers; an in-place input is read through the pointer of its output. Where threads can share loops
there are more functions, see `render`. Arithmetic is exactly as written: no contraction, no reordering.
Only Update of kind "sum" may add in any order, and adds products with one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import amx, dot, operations
from celosia.compiler.cpu.llvm.memory_access import I64, V
from celosia.compiler.cpu.llvm.nan_free_extremes import nan_free_extremes
from celosia.compiler.cpu.llvm.operations import align_size
from celosia.compiler.cpu.llvm.writer import BodyWriter
from celosia.compiler.cpu.schedule import parallel
from celosia.compiler.cpu.schedule.prefetch import next_block_prefetches, next_iteration_prefetches
from celosia.compiler.cpu.schedule.streaming_stores import streamed_outputs
from celosia.compiler.cpu.schedule.vector_lanes import legalise_vector_loops
from celosia.compiler.expr.loops import Alloc, Function
from celosia.compiler.expr.nodes import Tensor
from celosia.compiler.target import target


@dataclass(frozen=True)
class Rendered:
    """LLVM IR of a module that defines a kernel (`text`), and the bytes of workspace that the kernel needs.

    phases: for a function with loops that threads share, whether each of its phases has one; see `render`.
    shared_bytes: the part of the workspace that all threads share; each thread has its own copy of the rest.
    """

    text: str
    workspace_bytes: int
    shared_bytes: int = 0
    phases: tuple[bool, ...] = ()


def render(function: Function, features: frozenset[str] | None = None) -> Rendered:
    """Render `name(arguments, part, parts)`, which does all of the work, and functions for threads.

    Where threads can share loops, `name.0`, `name.1`, ... do part `part` of `parts` of each phase. All threads pass the
    same arguments. Behind the shared part of the workspace, each thread has a part of its own. features: of the
    processor, in LLVM's names; by default those of the target.
    """
    function = legalise_vector_loops(function)
    module = ir.Module(name=function.name)
    module.features = dot.features() if features is None else features
    shared, phases = parallel.split_phases(function)
    has_shared_loops = len(phases) > 1 or phases[0].loop is not None
    workspace_offsets: dict[Tensor, int] = {}
    shared_bytes = own_bytes = 0
    for tensor in shared:
        workspace_offsets[tensor] = shared_bytes
        shared_bytes += align_size(tensor.nbytes)
    bodies = []
    for position, phase in enumerate(phases):
        body, size = _render_body(module, function, f"{function.name}.body{position}", phase, workspace_offsets)
        bodies.append(body)
        own_bytes = max(own_bytes, size)
    _render_entry(module, function, function.name, bodies, shared_bytes)
    for position, body in enumerate(bodies if has_shared_loops else []):
        _render_entry(module, function, f"{function.name}.{position}", [body], shared_bytes, own_bytes)
    return Rendered(
        str(module), shared_bytes + own_bytes, shared_bytes,
        tuple(phase.loop is not None for phase in phases) if has_shared_loops else (),
    )  # fmt: skip


def _render_body(
    module: Any, function: Function, name: str, phase: parallel.Phase, workspace_offsets: dict[Tensor, int]
) -> tuple[Any, int]:
    """Render a phase as `name(tensors..., shared workspace, own workspace, part, parts)`.

    Returns (the LLVM function, bytes of its own workspace). workspace_offsets: byte of the shared workspace at which
    each tensor that several phases touch begins.
    """
    tensors = len(function.inputs) + len(function.outputs)
    body, *arguments = _declare_function(module, name, tensors + 2, (I64, I64))
    body.linkage = "internal"
    body.attributes.add("noinline")  # inlined, the pointers would lose the attributes of arguments
    writer = BodyWriter(
        body, _tensor_pointers(function, arguments), arguments[-3], phase.loop, (arguments[-2], arguments[-1])
    )
    for tensor, offset in workspace_offsets.items():
        writer.memory[tensor] = writer.entry.gep(
            arguments[-4], [I64(offset)], inbounds=True, source_etype=ir.IntType(8)
        )
    stmt = phase.body
    for tensor in phase.private:
        stmt = Alloc(tensor, stmt, "local")
    writer.prefetch_distance, writer.streaming_stores = (
        next_iteration_prefetches(phase.body),
        streamed_outputs(function),
    )
    writer.nan_free, writer.prefetched = nan_free_extremes(function.body), next_block_prefetches(phase.body)
    writer.stmt(stmt, {})
    if writer.streaming_stores:
        operations.fence(writer.b)
    if writer.tile_rows:
        amx.release(writer.b, module)
    writer.b.ret_void()
    return body, writer.workspace_bytes


def _render_entry(
    module: Any, function: Function, name: str, bodies: list[Any], shared_bytes: int, own_bytes: int | None = None
) -> None:
    """Render `name(arguments, part, parts)`, which calls `bodies`.

    own_bytes: size of a thread's own workspace, where the function does one part of the work; the workspaces of threads
    lie behind each other. None where it does all of the work.
    """
    fn, arguments, *share = _declare_function(module, name, 1, (I64, I64))
    if target().machine:
        fn.linkage = "weak_odr"  # of equal kernels in several objects, which have one symbol, a linker takes one
    if own_bytes is None:
        share, own_bytes = [I64(0), I64(1)], 0
    b = ir.IRBuilder(fn.append_basic_block("start"))
    pointer, byte = ir.PointerType(), ir.IntType(8)
    slots = [
        b.gep(arguments, [I64(k)], inbounds=True, source_etype=pointer)
        for k in range(len(function.inputs) + len(function.outputs) + 1)
    ]
    pointers = [b.load(slot, typ=pointer) for slot in slots]
    start = b.add(I64(shared_bytes), b.mul(share[0], I64(own_bytes)))
    own_workspace = b.gep(pointers[-1], [start], inbounds=True, source_etype=byte)
    for body in bodies:
        b.call(body, [*pointers, own_workspace, *share])
    b.ret_void()


def _declare_function(module: Any, name: str, pointers: int, more: tuple[Any, ...] = ()) -> list[V]:
    """Declare a function of `pointers` pointers to memory that does not overlap, then arguments of the types `more`.

    Returns [function, its arguments...].
    """
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.PointerType()] * pointers + [*more]), name)
    fn.attributes.add("nounwind")
    for position, arg in enumerate(fn.args[:pointers]):
        arg.add_attribute("noalias")
        arg.add_attribute("captures(none)")
        arg.name = f"p{position}"
    return [fn, *fn.args]


def _tensor_pointers(function: Function, arguments: list[V]) -> dict[Tensor, V]:
    """Return the pointers of inputs and outputs; an in-place input has that of its output."""
    pointers = dict(zip((*function.inputs, *function.outputs), arguments))
    for output, input_position in function.in_place:
        pointers[function.inputs[input_position]] = pointers[function.outputs[output]]
    return pointers
