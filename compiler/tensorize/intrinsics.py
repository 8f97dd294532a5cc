"""What the accelerator can do, as intrinsics for Stage.tensorize. intrinsic.py says what an intrinsic is.

>>> from celosia.hw.config import Config
>>> print(gemm(Config.load("tiny")).behaviour.body)
sum[q, k](int32(inp[q, b, k]) * int32(wgt[((p * 4) + g), ((q * 4) + k)]))
"""

from __future__ import annotations

from celosia.compiler.expr.loops import Declared
from celosia.compiler.expr.nodes import Expr, Value, Var, call, clip, select
from celosia.compiler.expr.tensor import compute, placeholder, reduce_axis
from celosia.compiler.expr.tensor import max as max_over
from celosia.compiler.expr.tensor import sum as sum_over
from celosia.compiler.tensorize.intrinsic import Compute, Move, TensorIntrinsic
from celosia.hw.config import Config
from celosia.hw.isa import ASource, Buffer, Destination, Opcode, ReduceOp

__all__ = [
    "BUFFERS", "Compute", "Move", "TensorIntrinsic", "declared", "element_shape", "element_type", "gemm", "load",
    "padded_load", "requantise", "requantised", "store", "tile_shape", "window_max",
]  # fmt: skip

BUFFERS = {b.name.lower(): b for b in Buffer if b != Buffer.LUT}
"""Scratchpads that LOAD writes, by their scope."""


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
