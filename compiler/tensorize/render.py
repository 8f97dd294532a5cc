"""Render loops whose bodies are intrinsics as the accelerator's instructions.

The innermost loops around an intrinsic become loops of its instruction, as many as it has, base and strides taken from
the affine indices; the loops around those are run here, and emit instructions, as is every loop marked `unroll`.

    for y in 8:                                  GEMM  extent_x=8 extent_k=4  acc_x=1  inp_x=4 inp_k=1  wgt_k=1
      for k in 4:                            ->
        gemm(acc[y, 0], inp[y, k, 0], wgt[k, 0, 0], (k == 0))

The fields of an instruction that are the same in all iterations are computed once (instruction.py). The iterations of a
pipelined loop become tiles, whose loads go ahead of their compute (vthread.pipeline); elsewhere, tensors in a
scratchpad lie there from their allocation to its end. Which instruction must wait for which is found by vthread.tokens,
and proved by vthread.verify.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Intrinsic, Let, Stmt, statements
from celosia.compiler.expr.nodes import Tensor, Var
from celosia.compiler.expr.verify import verify as verify_loops
from celosia.compiler.tensorize.instruction import (
    ComputeInstruction,
    Env,
    MoveInstruction,
    NotOneInstruction,
    RenderError,
)
from celosia.compiler.tensorize.instruction_builder import build_instruction
from celosia.compiler.tensorize.intrinsic import ROW, ImplicitOperand, TensorIntrinsic
from celosia.compiler.tensorize.intrinsics import tile_shape
from celosia.compiler.tensorize.tiles import Branch, Fill, Node, Pipelined, Region, SerialLoop, TilePlan
from celosia.compiler.vthread.encode import disassemble, encode
from celosia.compiler.vthread.interleave import interleave
from celosia.compiler.vthread.pipeline import Stream, reorder_first_loads, spread_weights
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import verify
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import depths

PAGE = 4096
"""Bytes; what is only read begins at a multiple of it, since a device may protect pages against writes."""
ALIGN = 64
"""Bytes; each array begins at a multiple of it."""


@dataclass(frozen=True)
class AcceleratorKernel:
    """Instructions for one function, and where its arrays lie in DRAM: [written][read only][instructions].

    addresses: byte offset of each input and output. constants: arrays that must lie in DRAM, by address. code: one row
    of bytes for each instruction. size: bytes of all.
    """

    name: str
    cfg: Config
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    addresses: Mapping[Tensor, int]
    constants: Mapping[int, NDArray[Any]]
    code: NDArray[np.uint8]
    code_address: int
    size: int

    def listing(self) -> str:
        """The instructions as text, one a line."""
        return "\n".join(disassemble(self.cfg, (int.from_bytes(row.tobytes(), "little") for row in self.code)))


def render(cfg: Config, function: Function) -> AcceleratorKernel:
    """Render a user's function: return the instructions that compute it, verified. Raises RenderError for other loops.

    Arrays in DRAM are row-major, as the function declares them.
    """
    function = verify_loops(interleave(function))
    body = function.body
    written = list(function.outputs)
    while isinstance(body, Alloc) and body.scope == "workspace":
        written.append(body.tensor)
        body = body.body
    addresses: dict[Tensor, int] = {}
    end = 0
    plan = compile_loops(cfg, body)
    for tensor in written:
        addresses[tensor], end = end, _align(end + tensor.nbytes, ALIGN)
    writable = end = _align(end, PAGE)
    for tensor in (*function.inputs, *(t for t in plan.tensors if t.value is not None)):
        if tensor not in addresses:
            addresses[tensor], end = end, _align(end + tensor.nbytes, ALIGN)
    if missing := [t.name for t in plan.tensors if t not in addresses]:
        raise RenderError(f"{missing[0]} is not in DRAM")
    stream = Stream(cfg)
    bound = plan.bind(stream, addresses)
    for tile in bound.tiles():
        if tile.node is None:  # an instruction outside of pipelined loops, with places of its own
            stream.finish()
            for phase in tile.load():
                assert phase is not None
                phase()
            for ring in stream.rings.values():
                ring.live.clear()  # the instruction may have overwritten their content
            continue
        loaded = {move.tensor for move in tile.moves(loads=True)}
        for node in {id(waiting.writes): waiting.writes for waiting in stream.waiting}.values():
            if isinstance(node, Pipelined) and node.stored & loaded:
                stream.settle(node)
        stream.start(0, tile.node, tile.load)
    stream.finish()
    stream.instructions = reorder_first_loads(cfg, stream.instructions)
    spread_weights(cfg, stream.instructions)
    insert_tokens(cfg, stream.instructions, writable)
    code = encode(cfg, stream.instructions)
    constants = {a: t.value for t, a in addresses.items() if t.value is not None}
    kernel = AcceleratorKernel(
        function.name, cfg, function.inputs, function.outputs, addresses, constants, code, end, end + code.size
    )
    verify(cfg, code, kernel.size, (0, writable))
    return kernel


def _align(size: int, alignment: int) -> int:
    """Round `size` up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


# Loops, compiled ----------------------------------------------------------------------------------------------


class _Compiler:
    """Compiles loops to nodes of a TilePlan.

    places: see `compile_loops`. tensors: those in DRAM -> whether the loops only read them. scopes: tensors in
    scratchpads -> scratchpad. used: entries of each scratchpad that regions around the current loops take.
    """

    def __init__(self, cfg: Config, places: Mapping[Tensor, tuple[int, ...]]) -> None:
        self.cfg, self.places = cfg, places
        self.depths = depths(cfg)
        self.tensors: dict[Tensor, bool] = {}
        self.scopes: dict[Tensor, str] = {}
        self.used: dict[str, int] = {}

    def compile(self, s: Stmt, fixed: Env) -> list[Node]:
        """Compile a statement to nodes. fixed: values of the unrolled loops around it. Raises RenderError."""
        match s:
            case Block(body):
                return [node for statement in body for node in self.compile(statement, fixed)]
            case Alloc(scope=scope) if scope == ROW:
                return self.compile(s.body, fixed)
            case Alloc():
                return [self._compile_region(s, fixed)]
            case Let(var, value, body):
                return self.compile(body, fixed | {var: int(evaluate(value, fixed))})
            case If(body=body, orelse=orelse) if not isinstance(_split_nest(body)[-1], Intrinsic):
                else_nodes = [] if orelse is None else self.compile(orelse, fixed)
                return [Branch(s, self.compile(body, fixed), else_nodes)]
            case For(kind="pipelined"):
                return [self._compile_pipelined(s, fixed)]
            case For() | Intrinsic() | If():
                loops, tests, leaf = _split_nest(s)
                if isinstance(leaf, Intrinsic):
                    return self._compile_intrinsic(loops, tests, leaf, fixed)
                assert isinstance(s, For)
                if s.kind not in ("serial", "unrolled"):
                    raise RenderError(f"the accelerator cannot run the {s.kind} loop {s.var.name}")
                return [SerialLoop(s.var, s.extent, self.compile(s.body, fixed))]
        raise RenderError(f"no instruction does `{s}`; tensorize it")

    def _compile_region(self, s: Alloc, fixed: Env) -> Region:
        """Compile an allocation: entries of a scratchpad while its body runs. Raises RenderError if there are too
        few."""
        tensor, scope = s.tensor, s.scope
        if scope not in self.depths:
            raise RenderError(f"{tensor.name} is in {scope} memory inside loops, which the accelerator has not")
        self.scopes[tensor] = scope
        entries = -(-tensor.size // prod(tile_shape(self.cfg, scope)))
        is_resident = _is_resident(scope, s.body)
        before, depth = 0 if is_resident else self.used.get(scope, 0), self.depths[scope]
        if before + entries > depth:
            raise RenderError(f"{tensor.name} needs {entries} entries of {scope}, which has {depth}, {before} in use")
        if is_resident:  # tiles that use it take and release its place
            return Region(tensor, scope, entries, s.kept, self.compile(s.body, fixed))
        self.used[scope] = before + entries
        region = Region(tensor, scope, entries, s.kept, self.compile(s.body, fixed))
        self.used[scope] = before
        return region

    def _compile_intrinsic(self, loops: list[For], tests: list[If], leaf: Intrinsic, fixed: Env) -> list[Node]:
        """Compile an intrinsic and its loops to one instruction if possible, else unroll the outermost loop.

        tests: conditions between the loops. Raises RenderError if no loop is left to unroll.
        """
        if not isinstance(leaf.declared, TensorIntrinsic):
            raise RenderError(f"{leaf.name} is no intrinsic of the accelerator")
        if isinstance(leaf.declared.rule, ImplicitOperand):
            return []
        reason = "its loop is unrolled"
        if all(loop.kind == "serial" for loop in loops):
            try:
                conditions = [test.cond for test in tests]
                node = build_instruction(self.cfg, loops, conditions, leaf, fixed, self.scopes, self.places)
                if isinstance(node, MoveInstruction):
                    self.tensors[node.tensor] = node.loads and self.tensors.get(node.tensor, True)
                return [node]
            except NotOneInstruction as refused:
                reason = str(refused)
        if not loops:
            raise RenderError(f"{leaf}: {reason}")
        outer, *inner_loops = loops
        if outer.kind not in ("serial", "unrolled"):
            raise RenderError(f"the accelerator cannot run the {outer.kind} loop {outer.var.name}")
        return [
            n
            for i in range(outer.extent)
            for n in self._compile_intrinsic(inner_loops, tests, leaf, fixed | {outer.var: i})
        ]

    def _compile_pipelined(self, s: For, fixed: Env) -> Pipelined:
        """Compile a pipelined loop to tiles: LOADs, which go ahead, and instructions that compute. Raises
        RenderError."""
        fills: list[Fill] = []
        computes: list[ComputeInstruction | MoveInstruction] = []
        self._collect_tile(self.compile(s.body, fixed), fills, computes, s.var)
        for scope, depth in self.depths.items():
            entries = sum(fill.entries for fill in fills if fill.scope == scope)  # at least: see Pipelined.handed_on
            if entries > depth:
                name = s.var.name
                raise RenderError(
                    f"an iteration of the pipelined loop {name} needs {entries} of {depth} {scope} entries"
                )
        inside = {fill.tensor for fill in fills}
        used = {tensor: None for compute in computes for tensor in compute.scratchpads}
        outer = [tensor for tensor in used if tensor not in inside]
        tile = Pipelined(s.var, s.extent, fills, computes, outer, self.depths)
        if tile.attends:  # values load late, since the next tile's queries and keys are needed earlier
            first = {tensor for node in tile.phases[0] for tensor in node.scratchpads}
            for fill in fills:
                fill.late = fill.scope == "wgt" and fill.tensor not in first
        return tile

    def _collect_tile(
        self, nodes: list[Node], fills: list[Fill], computes: list[ComputeInstruction | MoveInstruction], var: Var
    ) -> None:
        """Append the fills and computes of a tile, from the nodes of its loop's body. Raises RenderError."""
        for node in nodes:
            if isinstance(node, Region):
                fills.append(Fill(node.tensor, node.scope, node.entries, node.kept, []))
                self._collect_tile(node.body, fills, computes, var)
            elif isinstance(node, SerialLoop | Branch | Pipelined):
                raise RenderError(f"the pipelined loop {var.name} holds loops that are no instruction")
            elif isinstance(node, MoveInstruction) and node.loads:
                target = next((fill for fill in fills if fill.tensor is node.on_chip), None)
                if target is None:
                    raise RenderError(
                        f"{node.on_chip.name} is loaded in the pipelined loop {var.name}, but lies outside"
                    )
                if target.kept and not self.tensors[node.tensor]:
                    raise RenderError(f"{node.on_chip.name} is kept, but {node.tensor.name}, of which it is, changes")
                target.loads.append(node)
            else:
                computes.append(node)


def compile_loops(cfg: Config, body: Stmt, places: Mapping[Tensor, tuple[int, ...]] | None = None) -> TilePlan:
    """Compile loops to instructions without addresses. Raises RenderError if a statement is no instruction.

    places: strides in bytes of tensors in DRAM that are not row-major.
    """
    compiler = _Compiler(cfg, places or {})
    nodes = compiler.compile(body, {})
    return TilePlan(cfg, nodes, compiler.tensors)


def _is_resident(scope: str, s: Stmt) -> bool:
    """Whether a tensor in `scope`, allocated around `s`, is written by tiles and read by later ones."""
    loops = (statement for statement in statements(s) if isinstance(statement, For))
    return scope in ("inp", "vin") and any(loop.kind == "pipelined" for loop in loops)


def _split_nest(s: Stmt) -> tuple[list[For], list[If], Stmt]:
    """Split off the loops and conditions around a statement: the loops, the conditions, the statement inside."""
    loops: list[For] = []
    tests: list[If] = []
    while (isinstance(s, For) and s.kind != "pipelined") or (isinstance(s, If) and s.orelse is None):
        if isinstance(s, For):
            loops.append(s)
        else:
            tests.append(s)
        s = s.body
    return loops, tests, s
