"""Loop IR to LLVM IR.

A kernel is `void name(arguments, part, parts)`: a list of pointers to inputs, outputs and a workspace, which do not
overlap, and two numbers; an input that is computed in place is read through the pointer of its output. Where threads
can share loops there are more functions, see `render`. Arithmetic is exactly as written: no contraction, no reordering.
Only Update of kind "sum" may add in any order, and adds products with one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import amx, dot, operations
from celosia.compiler.cpu.llvm.memory import I64, V
from celosia.compiler.cpu.llvm.numbers import of_numbers
from celosia.compiler.cpu.llvm.operations import aligned
from celosia.compiler.cpu.llvm.writer import BodyWriter
from celosia.compiler.cpu.schedule import parallel
from celosia.compiler.cpu.schedule.block_prefetch import next_block_prefetches
from celosia.compiler.cpu.schedule.iteration_prefetch import next_iteration_prefetches
from celosia.compiler.cpu.schedule.streaming_stores import streamed_outputs
from celosia.compiler.cpu.schedule.vector_lanes import with_lanes
from celosia.compiler.cpu.target import target
from celosia.compiler.expr.loops import Alloc, Function
from celosia.compiler.expr.nodes import (
    Tensor,
)


@dataclass(frozen=True)
class Rendered:
    """LLVM IR of one module that defines the function, and the bytes of workspace that it wants.

    phases: for a function with loops that threads can share, whether each of its phases has one; see `render`.
    shared_bytes: of the workspace, those that all threads share; each has the others for itself.
    """

    text: str
    workspace_bytes: int
    shared_bytes: int = 0
    phases: tuple[bool, ...] = ()


def render(function: Function, features: frozenset[str] | None = None) -> Rendered:
    """A function `name(arguments, part, parts)` that does all of the work, and where threads can share loops, one for
    each of its phases: `name.0` does `part` of `parts` parts. All threads give the same arguments; beside what they
    share of the workspace, each takes its own of the places that follow.

    features: of the processor, in LLVM's names; by default those of the target.
    """
    function = with_lanes(function)
    module = ir.Module(name=function.name)
    module.features = dot.features() if features is None else features
    shared, phases = parallel.split_phases(function)
    divided = len(phases) > 1 or phases[0].loop is not None
    places: dict[Tensor, int] = {}
    shared_bytes = own_bytes = 0
    for tensor in shared:
        places[tensor] = shared_bytes
        shared_bytes += aligned(tensor.nbytes)
    bodies = []
    for number, phase in enumerate(phases):
        body, size = _body(module, function, f"{function.name}.body{number}", phase, places)
        bodies.append(body)
        own_bytes = max(own_bytes, size)
    _entry(module, function, function.name, bodies, shared_bytes)
    for number, body in enumerate(bodies if divided else []):
        _entry(module, function, f"{function.name}.{number}", [body], shared_bytes, own_bytes)
    return Rendered(
        str(module), shared_bytes + own_bytes, shared_bytes,
        tuple(phase.loop is not None for phase in phases) if divided else (),
    )  # fmt: skip


def _body(
    module: Any, function: Function, name: str, phase: parallel.Phase, places: dict[Tensor, int]
) -> tuple[Any, int]:
    """(`name(tensors..., shared workspace, own workspace, part, parts)`, bytes of its own workspace)."""
    tensors = len(function.inputs) + len(function.outputs)
    body, *given = _function(module, name, tensors + 2, (I64, I64))
    body.linkage = "internal"
    body.attributes.add("noinline")  # what is known of the pointers is that of arguments
    writer = BodyWriter(body, _places(function, given), given[-3], phase.loop, (given[-2], given[-1]))
    for tensor, at in places.items():
        writer.memory[tensor] = writer.entry.gep(given[-4], [I64(at)], inbounds=True, source_etype=ir.IntType(8))
    stmt = phase.body
    for tensor in phase.private:
        stmt = Alloc(tensor, stmt, "local")
    writer.ahead, writer.streamed = next_iteration_prefetches(phase.body), streamed_outputs(function)
    writer.numbers, writer.following = of_numbers(function.body), next_block_prefetches(phase.body)
    writer.stmt(stmt, {})
    if writer.streamed:
        operations.fence(writer.b)
    if writer.tile_rows:
        amx.release(writer.b, module)
    writer.b.ret_void()
    return body, writer.workspace_bytes


def _entry(
    module: Any, function: Function, name: str, bodies: list[Any], shared_bytes: int, own_bytes: int | None = None
) -> None:
    """`name(arguments, part, parts)`, which calls `bodies`: for all of the work, or where workspaces of `own_bytes`
    follow each other, for a part of it."""
    fn, arguments, *share = _function(module, name, 1, (I64, I64))
    if target().machine:
        fn.linkage = "weak_odr"  # its symbol says what it is: of two objects with the same kernel a linker takes one
    if own_bytes is None:
        share, own_bytes = [I64(0), I64(1)], 0
    b = ir.IRBuilder(fn.append_basic_block("start"))
    pointer, byte = ir.PointerType(), ir.IntType(8)
    places = [
        b.gep(arguments, [I64(k)], inbounds=True, source_etype=pointer)
        for k in range(len(function.inputs) + len(function.outputs) + 1)
    ]
    given = [b.load(place, typ=pointer) for place in places]
    start = b.add(I64(shared_bytes), b.mul(share[0], I64(own_bytes)))
    own = b.gep(given[-1], [start], inbounds=True, source_etype=byte)
    for body in bodies:
        b.call(body, [*given, own, *share])
    b.ret_void()


def _function(module: Any, name: str, pointers: int, more: tuple[Any, ...] = ()) -> list[V]:
    """[function, its arguments...]: pointers to memory that does not overlap, then others."""
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.PointerType()] * pointers + [*more]), name)
    fn.attributes.add("nounwind")
    for number, arg in enumerate(fn.args[:pointers]):
        arg.add_attribute("noalias")
        arg.add_attribute("captures(none)")
        arg.name = f"p{number}"
    return [fn, *fn.args]


def _places(function: Function, arguments: list[V]) -> dict[Tensor, V]:
    """Where the inputs and outputs are."""
    places = dict(zip((*function.inputs, *function.outputs), arguments))
    for out, number in function.in_place:
        places[function.inputs[number]] = places[function.outputs[out]]
    return places
