"""What the accelerator can do, as intrinsics for Stage.tensorize.

An intrinsic is declared by its behaviour, a tensor expression over tiles whose sizes come from the Config, and by its
lowering rule, which says of which instruction the tiles are operands. The loops around an intrinsic become loops of the
instruction, as many as it has (see render.py).

>>> from celosia.hw.config import Config
>>> print(gemm(Config.load("tiny")).behaviour.body)
sum[q, k](int32(inp[q, b, k]) * int32(wgt[((p * 4) + g), ((q * 4) + k)]))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from celosia.compiler.expr.affine import flatten
from celosia.compiler.expr.loops import Declared, For, If, Intrinsic, Stmt, Store, Update, block
from celosia.compiler.expr.lower import start_value
from celosia.compiler.expr.nodes import (
    INDEX,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    Value,
    Var,
    call,
    clip,
    rewrite,
    select,
    substitute,
    walk,
)
from celosia.compiler.expr.tensor import compute, placeholder, reduce_axis
from celosia.compiler.expr.tensor import max as max_over
from celosia.compiler.expr.tensor import sum as sum_over
from celosia.compiler.tensorize.match import match
from celosia.hw.config import Config
from celosia.hw.isa import ASource, Buffer, Destination, Opcode, ReduceOp

Args = tuple[Expr | Tensor | int, ...]
BUFFERS = {b.name.lower(): b for b in Buffer if b != Buffer.LUT}
"""Scratchpads that LOAD writes, by their scope."""


@dataclass(frozen=True)
class Compute:
    """Lowering to GEMM or VECTOR. operands: which operand of the instruction each tile is, by their names; fields: what
    else the instruction needs, from the values of the behaviour's parameters.
    """

    opcode: Opcode
    operands: Mapping[str, str]
    fields: Callable[..., dict[str, int]] = lambda: {}


@dataclass(frozen=True)
class Move:
    """Lowering to LOAD or STORE of tiles that are elements of the instruction. Parameters: `inside`, whether a tile is
    read or padding, and `pad`, the value of padding.
    """

    opcode: Opcode


@dataclass(frozen=True, eq=False)
class TensorIntrinsic:
    """A tile operation of the accelerator.

    behaviour: a tensor computed from placeholders (tiles) and variables (parameters: the same for the whole tile).
    scopes: the memory of each tile, by its name; "dram" is that of the caller.
    """

    name: str
    behaviour: Tensor
    scopes: Mapping[str, str]
    rule: Compute | Move

    def __post_init__(self) -> None:
        for tile in self.tiles:
            if tile.name not in self.scopes:
                raise ValueError(f"{self.name}: the memory of {tile.name} is not said")
            if isinstance(self.rule, Compute) and tile.name not in self.rule.operands:
                raise ValueError(f"{self.name}: {tile.name} is no operand of {self.rule.opcode.name}")

    @cached_property
    def tiles(self) -> tuple[Tensor, ...]:
        """What is written, then what is read, in the order of the expression."""
        assert self.behaviour.body is not None
        read = (node.tensor for node in walk(self.behaviour.body) if isinstance(node, Load))
        return self.behaviour, *dict.fromkeys(read)

    @cached_property
    def parameters(self) -> tuple[Var, ...]:
        assert self.behaviour.body is not None
        bound = {*self.behaviour.axes, *(a for n in walk(self.behaviour.body) if isinstance(n, Reduce) for a in n.axes)}
        free = (n for n in walk(self.behaviour.body) if isinstance(n, Var) and n not in bound)
        return tuple(dict.fromkeys(free))

    @property
    def reduces(self) -> bool:
        return isinstance(self.behaviour.body, Reduce)

    def match(self, nest: For, first: Expr, scope: Callable[[Tensor], str]) -> Intrinsic:
        return match(self, nest, first, scope)

    def split_args(self, args: Args) -> tuple[dict[Tensor, Load], dict[Var, Expr], Expr]:
        """(begin of each tile, values of parameters, whether a reduction begins). ValueError for other arguments."""
        wanted = len(self.tiles) + len(self.parameters) + self.reduces
        if len(args) != wanted:
            raise ValueError(f"{self.name} has {wanted} arguments, not {len(args)}")
        tiles: dict[Tensor, Load] = {}
        for tile, arg in zip(self.tiles, args):
            if not isinstance(arg, Load) or arg.dtype != tile.dtype:
                raise ValueError(f"{self.name}: {tile.name} is the begin of a tile of {tile.dtype}, not {arg}")
            tiles[tile] = arg
        values: dict[Var, Expr] = {}
        for parameter, arg in zip(self.parameters, args[len(self.tiles) :]):
            if not isinstance(arg, Expr) or arg.dtype != parameter.dtype:
                raise ValueError(f"{self.name}: {parameter.name} is a {parameter.dtype}, not {arg}")
            values[parameter] = arg
        first = args[-1] if self.reduces else Const(True, "bool")
        if not isinstance(first, Expr) or first.dtype != "bool":
            raise ValueError(f"{self.name}: the last argument says whether the reduction begins, not {first}")
        return tiles, values, first

    def broken(self, args: Args, scope: Callable[[Tensor], str]) -> str | None:
        try:
            tiles, _, _ = self.split_args(args)
        except ValueError as error:
            return str(error)
        for tile, load in tiles.items():
            if scope(load.tensor) != self.scopes[tile.name]:
                return f"{tile.name} is in {scope(load.tensor)}, not in {self.scopes[tile.name]}"
        return None

    def meaning(self, args: Args) -> Stmt:
        tiles, values, first = self.split_args(args)
        behaviour, body = self.behaviour, self.behaviour.body
        assert body is not None

        def at(tile: Tensor, index: tuple[Expr, ...]) -> tuple[Tensor, tuple[Expr, ...]]:
            start = tiles[tile]
            base: Expr = flatten(start.tensor.shape, start.index) if start.index else Const(0, INDEX)
            return start.tensor, (base + flatten(tile.shape, index),)

        def actual(e: Expr) -> Expr | None:
            return Load(*at(e.tensor, e.index)) if isinstance(e, Load) and e.tensor in tiles else None

        def loops(axes: tuple[Var, ...], inner: Stmt) -> Stmt:
            for axis in reversed(axes):
                inner = For(axis, getattr(axis, "extent", 1), inner)
            return inner

        value = substitute(rewrite(body.value if isinstance(body, Reduce) else body, actual), values)
        target, index = at(behaviour, behaviour.axes)
        if not isinstance(body, Reduce):
            return loops(behaviour.axes, Store(target, index, value))
        reset = If(first, Store(target, index, start_value(body.kind, behaviour.dtype)))
        return loops(behaviour.axes, block(reset, loops(body.axes, Update(body.kind, target, index, value))))


def tile_shape(cfg: Config, scope: str) -> tuple[int, ...]:
    """An entry of a scratchpad: what gemm and vector work on."""
    return {
        "inp": (cfg.inp_pieces, cfg.batch, cfg.group),
        "wgt": (cfg.block_out, cfg.block_in),
        "par": (cfg.block_out,),
    }.get(scope, (cfg.out_pieces, cfg.batch, cfg.group))


def element_shape(cfg: Config, scope: str) -> tuple[int, ...]:
    """What one step of LOAD or STORE moves."""
    return tile_shape(cfg, scope) if scope in ("wgt", "par") else (cfg.batch, cfg.group)


def element_type(scope: str) -> str:
    return {"acc": "int32", "par": "uint64"}.get(scope, "int8")


def gemm(cfg: Config) -> TensorIntrinsic:
    """acc += inp . wgt transposed, for one entry of each; the first step overwrites acc."""
    inp = placeholder(tile_shape(cfg, "inp"), "int8", "inp")
    wgt = placeholder(tile_shape(cfg, "wgt"), "int8", "wgt")
    q, k = reduce_axis(cfg.inp_pieces, "q"), reduce_axis(cfg.group, "k")

    def element(p: Expr, b: Expr, g: Expr) -> Expr:
        weight = wgt[p * cfg.group + g, q * cfg.group + k]
        return sum_over(inp[q, b, k].astype("int32") * weight.astype("int32"), (q, k))

    acc = compute(tile_shape(cfg, "acc"), element, "acc", axes=("p", "b", "g"))
    operands = {"acc": "acc", "inp": "inp", "wgt": "wgt"}
    return TensorIntrinsic("gemm", acc, operands, Compute(Opcode.GEMM, operands))


def load(cfg: Config, scope: str) -> TensorIntrinsic:
    """A copy of one element from DRAM to a scratchpad."""
    src = placeholder(element_shape(cfg, scope), element_type(scope), "src")
    dst = compute(src.shape, lambda *i: src[i], "dst")
    return TensorIntrinsic(f"load_{scope}", dst, {"src": "dram", "dst": scope}, Move(Opcode.LOAD))


def padded_load(cfg: Config, scope: str) -> TensorIntrinsic:
    """The same where `inside` holds, else an element full of `pad`."""
    src = placeholder(element_shape(cfg, scope), element_type(scope), "src")
    inside, pad = Var("inside", "bool"), Var("pad", element_type(scope))
    dst = compute(src.shape, lambda *i: select(inside, src[i], pad), "dst")
    return TensorIntrinsic(f"padded_load_{scope}", dst, {"src": "dram", "dst": scope}, Move(Opcode.LOAD))


def store(cfg: Config) -> TensorIntrinsic:
    """A copy of one element from out to DRAM."""
    src = placeholder(element_shape(cfg, "out"), "int8", "src")
    dst = compute(src.shape, lambda *i: src[i], "dst")
    return TensorIntrinsic("store", dst, {"src": "out", "dst": "dram"}, Move(Opcode.STORE))


def requantised(acc: Expr, par: Expr, zero_point: Value = 0.0, lo: Value = -128.0, hi: Value = 127.0) -> Expr:
    """int8 of the int32 `acc`: clip(round((acc + bias) * multiplier * 2^-shift) + zero_point, lo, hi), the product in
    float32, with bias, multiplier and shift of the par entry `par` (uint64, see tensorize.pack.parameters).
    """
    bias = par.astype("int32")
    multiplier = ((par >> 32) & 0xFFFFFF).astype("int32").astype("float32")
    exponent = 127 - ((par >> 56) & 63).astype("int32")
    scale = multiplier * call("bitcast", exponent << 23, dtype="float32")
    value = call("round_even", (acc + bias).astype("float32") * scale) + zero_point
    return clip(value, lo, hi).astype("int8")


def requantise(cfg: Config) -> TensorIntrinsic:
    """out = requantised(acc, par), for one entry of each."""
    acc = placeholder(tile_shape(cfg, "acc"), "int32", "acc")
    par = placeholder(tile_shape(cfg, "par"), "uint64", "par")
    zero_point, lo, hi = (Var(name, "float32") for name in ("zero_point", "lo", "hi"))

    def element(p: Expr, b: Expr, g: Expr) -> Expr:
        return requantised(acc[p, b, g], par[p * cfg.group + g], zero_point, lo, hi)

    out = compute(acc.shape, element, "out", axes=("p", "b", "g"))

    def fields(zero_point: float, lo: float, hi: float) -> dict[str, int]:
        common = {"a_source": ASource.ACC, "destination": Destination.OUT, "requantise": 1}
        return {**common, "zero_point": int(zero_point), "clip_lo": int(lo), "clip_hi": int(hi)}

    rule = Compute(Opcode.VECTOR, {"out": "dst", "acc": "a", "par": "par"}, fields)
    return TensorIntrinsic("requantise", out, {"out": "out", "acc": "acc", "par": "par"}, rule)


def window_max(cfg: Config) -> TensorIntrinsic:
    """out = the largest of vin over the loops around, which must be a reduction: max-pooling."""
    vin = placeholder(tile_shape(cfg, "vin"), "int8", "vin")
    out = compute(vin.shape, lambda p, b, g: max_over(vin[p, b, g], ()), "out", axes=("p", "b", "g"))

    def fields() -> dict[str, int]:
        common = {"a_source": ASource.VIN, "destination": Destination.OUT, "reduce_op": ReduceOp.MAX}
        return {**common, "clip_lo": -128, "clip_hi": 127}

    rule = Compute(Opcode.VECTOR, {"out": "dst", "vin": "a"}, fields)
    return TensorIntrinsic("window_max", out, {"out": "out", "vin": "vin"}, rule)


def declared(cfg: Config) -> dict[str, Declared]:
    """All of these, by name: what `expr.parse` takes."""
    loads = [make(cfg, scope) for make in (load, padded_load) for scope in BUFFERS]
    return {i.name: i for i in (gemm(cfg), *loads, requantise(cfg), window_max(cfg), store(cfg))}
