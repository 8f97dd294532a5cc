"""Loops whose bodies are intrinsics to the accelerator's instructions.

The innermost loops around an intrinsic become loops of its instruction, as many as it has, base and strides taken from
the affine indices; the loops around those are run here, and emit instructions, as is every loop marked `unroll`.

    for y in 8:                                  GEMM  extent_x=8 extent_k=4  acc_x=1  inp_x=4 inp_k=1  wgt_k=1
      for k in 4:                            ->
        gemm(acc[y, 0], inp[y, k, 0], wgt[k, 0, 0], (k == 0))

Tensors in a scratchpad lie there from their allocation to its end. Which instruction must wait for which is found by
vthread.tokens, and proved by vthread.verify.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.affine import flatten, linear
from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Intrinsic, Let, Stmt
from celosia.compiler.expr.nodes import Expr, Load, Tensor, Var, walk
from celosia.compiler.expr.verify import verify as verify_loops
from celosia.compiler.tensorize.intrinsics import BUFFERS, Compute, TensorIntrinsic, tile_shape
from celosia.compiler.tensorize.layer import Untileable
from celosia.compiler.tensorize.transfer import X_MAX, YZ_MAX, Dim, transfer
from celosia.compiler.vthread.disassemble import listing
from celosia.compiler.vthread.emit import encode
from celosia.compiler.vthread.interleave import interleave
from celosia.compiler.vthread.stream import Instruction
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import verify
from celosia.hw.config import Config
from celosia.hw.isa import EXTENT_BITS, Opcode, formats

PAGE = 4096
ALIGN = 64
PAD_MAX = 255


class RenderError(ValueError):
    """Loops that the accelerator cannot run; the message says why."""


class _Refused(Exception):
    """Why these loops are not one instruction."""


@dataclass(frozen=True)
class AcceleratorKernel:
    """Instructions for one function, and where its arrays lie in DRAM: [written][read only][instructions].

    addresses: byte offset of each input and output; constants: what else has to be there, by address.
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
        return "\n".join(listing(self.cfg, (int.from_bytes(row.tobytes(), "little") for row in self.code)))


def render(cfg: Config, function: Function) -> AcceleratorKernel:
    """The instructions that compute `function`, verified. RenderError where it holds what is no instruction.

    Arrays in DRAM are row-major, as the function declares them.
    """
    function = verify_loops(interleave(function))
    addresses: dict[Tensor, int] = {}
    end = 0

    def place(tensor: Tensor) -> None:
        nonlocal end
        addresses[tensor] = end
        end = -(-(end + tensor.nbytes) // ALIGN) * ALIGN

    body = function.body
    written = list(function.outputs)
    while isinstance(body, Alloc) and body.scope == "workspace":
        written.append(body.tensor)
        body = body.body
    for tensor in written:
        place(tensor)
    writable = end = -(-end // PAGE) * PAGE
    for tensor in function.inputs:
        place(tensor)
    renderer = _Renderer(cfg, addresses, place)
    renderer.stmt(body, {})
    insert_tokens(cfg, renderer.instructions, writable)
    code = encode(cfg, renderer.instructions)
    constants = {a: t.value for t, a in addresses.items() if t.value is not None}
    kernel = AcceleratorKernel(
        function.name, cfg, function.inputs, function.outputs, addresses, constants, code, end, end + code.size
    )
    verify(cfg, code, kernel.size, (0, writable))
    return kernel


@dataclass(frozen=True)
class _Access:
    """A tile's address: first, and by how much each loop moves it; in elements of the tensor."""

    base: int
    steps: tuple[int, ...]

    def in_units(self, size: int, what: str) -> _Access:
        if self.base % size or any(step % size for step in self.steps):
            raise _Refused(f"{what} begins or moves by other than multiples of {size} elements")
        return _Access(self.base // size, tuple(step // size for step in self.steps))


Env = dict[Var, int]


class _Renderer:
    def __init__(self, cfg: Config, addresses: dict[Tensor, int], place: Any) -> None:
        self.cfg, self.addresses, self.place = cfg, addresses, place
        self.instructions: list[Instruction] = []
        self.slots: dict[Tensor, tuple[str, int]] = {}  # scratchpad and first entry
        self.used: dict[str, int] = {}
        self.depths = {
            "inp": cfg.inp_depth, "wgt": cfg.wgt_depth, "acc": cfg.acc_depth, "vin": cfg.vin_depth,
            "out": cfg.out_depth, "par": cfg.par_depth,
        }  # fmt: skip

    def stmt(self, s: Stmt, env: Env) -> None:
        match s:
            case Block(body):
                for each in body:
                    self.stmt(each, env)
            case Alloc():
                self._alloc(s, env)
            case Let(var, value, body):
                self.stmt(body, env | {var: int(evaluate(value, env))})
            case If(cond, body, orelse):
                if evaluate(cond, env):
                    self.stmt(body, env)
                elif orelse is not None:
                    self.stmt(orelse, env)
            case For() | Intrinsic():
                loops, leaf = _nest(s)
                if isinstance(leaf, Intrinsic):
                    self._emit(loops, leaf, env)
                    return
                assert isinstance(s, For)
                if s.kind not in ("serial", "unrolled"):
                    raise RenderError(f"the accelerator cannot run the {s.kind} loop {s.var.name}")
                for i in range(s.extent):
                    self.stmt(s.body, env | {s.var: i})
            case _:
                raise RenderError(f"no instruction does `{s}`; tensorize it")

    def _alloc(self, s: Alloc, env: Env) -> None:
        tensor, scope = s.tensor, s.scope
        if scope not in self.depths:
            raise RenderError(f"{tensor.name} is in {scope} memory inside loops, which the accelerator has not")
        first, entry = self.used.get(scope, 0), prod(tile_shape(self.cfg, scope))
        count = -(-tensor.size // entry)
        if first + count > self.depths[scope]:
            raise RenderError(
                f"{tensor.name} needs {count} entries of {scope}, which has {self.depths[scope]}, {first} in use"
            )
        self.slots[tensor] = scope, first * entry
        self.used[scope] = first + count
        self.stmt(s.body, env)
        self.used[scope] = first

    def _emit(self, loops: Sequence[For], leaf: Intrinsic, env: Env) -> None:
        """One instruction for all of `loops` if that is possible, else one for each iteration of the outermost."""
        if not isinstance(leaf.declared, TensorIntrinsic):
            raise RenderError(f"{leaf.name} is no intrinsic of the accelerator")
        reason = "its loop is unrolled"
        if all(loop.kind == "serial" for loop in loops):
            try:
                self._instruction(loops, leaf, leaf.declared, env)
                return
            except _Refused as refused:
                reason = str(refused)
        if not loops:
            raise RenderError(f"{leaf}: {reason}")
        if loops[0].kind not in ("serial", "unrolled"):
            raise RenderError(f"the accelerator cannot run the {loops[0].kind} loop {loops[0].var.name}")
        for i in range(loops[0].extent):
            self._emit(loops[1:], leaf, env | {loops[0].var: i})

    def _instruction(self, loops: Sequence[For], leaf: Intrinsic, intrinsic: TensorIntrinsic, env: Env) -> None:
        tiles, values, first = intrinsic.split_args(leaf.args)
        env = env | {loop.var: 0 for loop in loops if loop.extent == 1}
        loops = [loop for loop in loops if loop.extent > 1]
        if isinstance(intrinsic.rule, Compute):
            fields = self._compute(loops, intrinsic, intrinsic.rule, tiles, values, first, env)
        else:
            fields = self._move(loops, intrinsic, tiles, values, env)
        opcode = intrinsic.rule.opcode
        try:
            formats(self.cfg)[opcode].encode(**fields)
        except ValueError as error:
            raise _Refused(str(error)) from None
        self.instructions.append(Instruction(opcode, fields))

    def _access(self, load: Load, loops: Sequence[For], env: Env) -> _Access:
        variables = {loop.var: d for d, loop in enumerate(loops)}
        steps = [0] * len(loops)
        base = 0
        for atom, k in linear(flatten(load.tensor.shape, load.index)).items() if load.index else ():
            if atom is None:
                base += k
            elif isinstance(atom, Var) and atom in variables:
                steps[variables[atom]] = k
            elif any(isinstance(node, Var) and node in variables for node in walk(atom)):
                raise _Refused(f"{load} is not affine in its loops")
            else:
                base += k * int(evaluate(atom, env))
        return _Access(base, tuple(steps))

    def _in_scratchpad(self, load: Load, unit: int, loops: Sequence[For], env: Env) -> _Access:
        """In units of `unit` elements, from the begin of the scratchpad."""
        if load.tensor not in self.slots:
            raise RenderError(f"{load.tensor.name} is in no scratchpad")
        access = self._access(load, loops, env)
        start = self.slots[load.tensor][1]
        return _Access(access.base + start, access.steps).in_units(unit, str(load))

    # GEMM and VECTOR

    def _compute(
        self, loops: Sequence[For], intrinsic: TensorIntrinsic, rule: Compute, tiles: Mapping[Tensor, Load],
        values: Mapping[Var, Expr], first: Expr, env: Env,
    ) -> dict[str, int]:  # fmt: skip
        accesses = {
            rule.operands[tile.name]: self._in_scratchpad(load, tile.size, loops, env) for tile, load in tiles.items()
        }
        target = rule.operands[intrinsic.behaviour.name]
        data: Dims = []
        sums: Dims = []
        for d, loop in enumerate(loops):
            steps = {name: access.steps[d] for name, access in accesses.items()}
            (data if steps[target] else sums).append((loop.extent, steps))
        fields = dict(rule.fields(**{v.name: self._value(e, loops, env).item() for v, e in values.items()}))
        if intrinsic.reduces:
            absorbed = {loop.var: 0 for loop in loops}
            begins = bool(evaluate(first, env | absorbed))
            if rule.opcode == Opcode.GEMM:
                fields["accumulate"] = int(not begins)
            elif not begins:
                raise _Refused("its reduction does not fit into one instruction")
        elif sums:
            raise _Refused("it writes the same place again")
        inner = {Opcode.GEMM: "krs", Opcode.VECTOR: "rs"}[rule.opcode]
        for slots, dims in (("nyx", _merged(data)), (inner, _merged(sums))):
            if len(dims) > len(slots):
                raise _Refused(f"{rule.opcode.name} has {len(slots)} such loops, not {len(dims)}")
            for slot, (extent, steps) in zip(slots[len(slots) - len(dims) :], dims):
                fields[f"extent_{slot}"] = extent
                fields |= {f"{name}_{slot}": step for name, step in steps.items() if step}
        names = {field.name for field in formats(self.cfg)[rule.opcode].fields if field.name.startswith("extent_")}
        fields = dict.fromkeys(sorted(names), 1) | fields
        return fields | {f"{name}_base": access.base for name, access in accesses.items()}

    def _value(self, e: Expr, loops: Sequence[For], env: Env) -> Any:
        inside = {loop.var for loop in loops}
        if any(isinstance(node, Var) and node in inside for node in walk(e)):
            raise _Refused(f"{e} is not the same in all iterations")
        return evaluate(e, env)

    # LOAD and STORE

    def _move(
        self, loops: Sequence[For], intrinsic: TensorIntrinsic, tiles: Mapping[Tensor, Load],
        values: Mapping[Var, Expr], env: Env,
    ) -> dict[str, int]:  # fmt: skip
        opcode = intrinsic.rule.opcode
        near, far = intrinsic.tiles if opcode == Opcode.LOAD else reversed(intrinsic.tiles)
        place = self._in_scratchpad(tiles[near], near.size, loops, env)
        away = self._access(tiles[far], loops, env)
        tensor = tiles[far].tensor
        if tensor not in self.addresses:
            if tensor.value is None:
                raise RenderError(f"{tensor.name} is not in DRAM")
            self.place(tensor)
        item, start = tensor.nbytes // max(tensor.size, 1), self.addresses[tensor]
        away = _Access(start + away.base * item, tuple(step * item for step in away.steps))
        if any(step < 0 for step in (*away.steps, *place.steps)):
            raise _Refused("a loop runs backwards through memory")
        dims = [Dim(loop.extent, a, p) for loop, a, p in zip(loops, away.steps, place.steps)]
        fields = {"buffer": int(BUFFERS[intrinsic.scopes[near.name]])} if opcode == Opcode.LOAD else {}
        named = {v.name: e for v, e in values.items()}
        if "inside" in named:
            mask = self._mask(named["inside"], loops, env)
            if not mask.all():
                fields["pad_value"] = int(self._value(named["pad"], loops, env))
                return fields | _padded(dims, mask, near.nbytes, away.base, place.base)
        try:
            return fields | transfer(dims, near.nbytes, away.base, place.base)
        except Untileable as error:
            raise _Refused(str(error)) from None

    def _mask(self, inside: Expr, loops: Sequence[For], env: Env) -> NDArray[np.bool_]:
        """`inside` at each point of the loops."""
        shape = tuple(loop.extent for loop in loops)
        used = [d for d, loop in enumerate(loops) if any(node is loop.var for node in walk(inside))]
        small = np.zeros([loop.extent if d in used else 1 for d, loop in enumerate(loops)], np.bool_)
        for point in np.ndindex(small.shape):
            small[point] = evaluate(inside, env | {loop.var: i for loop, i in zip(loops, point)})
        return np.broadcast_to(small, shape)


def _nest(s: Stmt) -> tuple[list[For], Stmt]:
    loops = []
    while isinstance(s, For):
        loops.append(s)
        s = s.body
    return loops, s


Dims = list[tuple[int, dict[str, int]]]


def _merged(dims: Dims) -> Dims:
    """Neighbouring loops through which every operand walks evenly become one."""
    done: Dims = []
    for extent, steps in dims:
        last = done[-1] if done else None
        even = last is not None and all(last[1][name] == extent * step for name, step in steps.items())
        if last is not None and even and last[0] * extent < 1 << EXTENT_BITS:
            done[-1] = last[0] * extent, steps
        else:
            done.append((extent, steps))
    return done


def _padded(dims: list[Dim], mask: NDArray[np.bool_], piece: int, address: int, base: int) -> dict[str, int]:
    """Fields of a LOAD of the block `dims` where only the elements in `mask` are read and the others are padding.

    address, base: of the block's first element, be it padding or not.
    """
    varies = [bool((mask != mask.take([0], d)).any()) for d in range(len(dims))]
    order = sorted(range(len(dims)), key=lambda d: (dims[d].dram == piece, varies[d], -dims[d].dram))
    reason = _Refused("a padded block has at most planes, rows and elements")
    for shape in _shapes([dims[d] for d in order], piece):
        try:
            return _bordered(shape, mask.transpose(order).reshape([dim.count for dim in shape]), address, base)
        except _Refused as refused:
            reason = refused
    raise reason


def _shapes(dims: list[Dim], piece: int) -> Iterator[list[Dim]]:
    """Ways to see a block as planes, rows and elements: neighbouring dimensions apart, or as one where that is even."""
    for together in product((False, True), repeat=max(len(dims) - 1, 0)):
        shape = dims[:1]
        for dim, one in zip(dims[1:], together):
            last = shape[-1]
            if one and (last.dram, last.sram) != (dim.count * dim.dram, dim.count * dim.sram):
                break
            shape[-1:] = [Dim(last.count * dim.count, dim.dram, dim.sram)] if one else [last, dim]
        else:
            if not shape or shape[-1].dram != piece:
                shape.append(Dim(1, piece, 1))
            shape = [Dim(1, 0, 0)] * (3 - len(shape)) + shape
            if len(shape) == 3 and shape[2].count <= X_MAX and max(shape[0].count, shape[1].count) <= YZ_MAX:
                yield shape


def _bordered(shape: list[Dim], cube: NDArray[np.bool_], address: int, base: int) -> dict[str, int]:
    """The same for planes, rows and elements."""
    if not cube.any():
        raise _Refused("all of a tile lies in the padding")
    plane = cube[0]
    if not plane.any():
        raise _Refused("whole planes lie in the padding")
    rows, columns = np.flatnonzero(plane.any(1)), np.flatnonzero(plane.any(0))
    top, left = int(rows[0]), int(columns[0])
    bottom, right = plane.shape[0] - 1 - int(rows[-1]), plane.shape[1] - 1 - int(columns[-1])
    box = np.zeros_like(plane)
    box[top : plane.shape[0] - bottom, left : plane.shape[1] - right] = True
    if not (cube == box).all():
        raise _Refused("padding is not a border of the same width around every plane")
    if max(top, left, bottom, right) > PAD_MAX:
        raise _Refused(f"padding is wider than {PAD_MAX}")
    z, y, x = shape
    return {
        "dram_addr": address + top * y.dram + left * x.dram, "dram_y": y.dram, "dram_z": z.dram,
        "x_size": x.count - left - right, "y_size": y.count - top - bottom, "z_size": z.count,
        "sram_base": base, "sram_x": x.sram, "sram_y": y.sram, "sram_z": z.sram,
        "pad_top": top, "pad_bottom": bottom, "pad_left": left, "pad_right": right,
    }  # fmt: skip
