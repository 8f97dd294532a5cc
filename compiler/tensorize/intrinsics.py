"""The intrinsics of a Config, for Stage.tensorize: GEMM, LOAD, STORE and the passes of VECTOR (types: intrinsic.py).

In order: `declared`, which lists all; GEMM and the moves; passes of VECTOR; softmax and normalisation of a row, each
one instruction that also computes what it needs of the row (largest element, sums). A row is the channels of a pixel,
whose entries lie in sequence in vin; lanes beyond its last element do not count.

>>> from celosia.hw.spec.config import PRESETS
>>> cfg = PRESETS["tiny"]
>>> largest, total = (softmax_intrinsic(cfg, name, 7) for name in ("largest", "total"))
>>> for intrinsic in (gemm(cfg), largest, total, norm_intrinsic(cfg, "row_squares", 7)):
...     print(intrinsic.behaviour.body)
sum[q, k](int32(inp[q, b, k]) * int32(wgt[q, ((p * 4) + g), k]))
max[k](a[k])
ordered_sum[k](powers[0, (int64((int32(a[k]) - int32(largest[]))) + 255)])
sum[k]((int64(a[k]) + offset) * (int64(a[k]) + offset))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from math import log2

from celosia.compiler.expr.loops import Declared
from celosia.compiler.expr.nodes import INDEX, Axis, Expr, Load, Tensor, Value, Var, call, clip, select
from celosia.compiler.expr.tensor import compute, ordered_sum, placeholder, reduce_axis
from celosia.compiler.expr.tensor import max as max_over
from celosia.compiler.expr.tensor import sum as sum_over
from celosia.compiler.layer import Layer
from celosia.compiler.numerics.norm import INT, OfRow, norm_row, sums
from celosia.compiler.tensorize.intrinsic import POWERS, ROW, Compute, ImplicitOperand, Move, TensorIntrinsic
from celosia.compiler.tensorize.space import recorded_text
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import ASource, BinaryOp, BSource, Buffer, Destination, Opcode, ReduceOp
from celosia.hw.spec.scratchpads import EXP_ENTRIES, PAR_FIELDS, scratchpads


@cache
def declared(cfg: Config) -> Mapping[str, Declared]:
    """Return the intrinsics of a Config by name, for templates, `expr.parse` and traces of schedules."""
    loads = [declare(cfg, scope) for declare in (load, padded_load) for scope in BUFFERS if scope in scratchpads(cfg)]
    vectors = [vector(cfg, p) for p in vector_ops(cfg)]
    others = gemm(cfg), *loads, widening_load(cfg), requantise(cfg), window_max(cfg), store(cfg), *vectors
    return _Intrinsics(cfg, {i.name: i for i in others})


class _Intrinsics(Mapping[str, Declared]):
    """Intrinsics by name. Those of rows, whose names end in the number of elements, are declared on demand."""

    def __init__(self, cfg: Config, declared_intrinsics: Mapping[str, Declared]) -> None:
        self._cfg, self._declared = cfg, declared_intrinsics

    def __getitem__(self, name: str) -> Declared:
        if name in self._declared:
            return self._declared[name]
        kind, _, count = name.rpartition("_")
        if count.isdecimal() and int(count) >= 1:
            if self._cfg.softmax and kind in SOFTMAX_NAMES:
                return softmax_intrinsic(self._cfg, kind, int(count))
            if self._cfg.norm and kind in NORM_NAMES:
                return norm_intrinsic(self._cfg, kind, int(count))
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)


BUFFERS = {b.name.lower(): b for b in Buffer}
"""Scope -> the scratchpad that LOAD writes."""


def tile_shape(cfg: Config, scope: str) -> tuple[int, ...]:
    """Return the shape of an entry of scratchpad `scope`, on which GEMM and the vector unit work."""
    return scratchpads(cfg)[scope].shape


def element_shape(cfg: Config, scope: str) -> tuple[int, ...]:
    """Return the shape of an element of scratchpad `scope`, which one step of LOAD or STORE moves."""
    return scratchpads(cfg)[scope].piece_shape


def element_type(cfg: Config, scope: str) -> str:
    """Return the element type of scratchpad `scope`."""
    return scratchpads(cfg)[scope].element


# GEMM, LOAD and STORE ----------------------------------------------------------------------------------------


def gemm(cfg: Config) -> TensorIntrinsic:
    """Declare GEMM: acc += inp . wgt transposed, for one entry of each; the first step of a reduction overwrites
    acc."""
    inp = placeholder(tile_shape(cfg, "inp"), "int8", "inp")
    wgt = placeholder(tile_shape(cfg, "wgt"), "int8", "wgt")
    q, k = reduce_axis(cfg.inp_pieces, "q"), reduce_axis(cfg.group, "k")

    def element(p: Expr, b: Expr, g: Expr) -> Expr:
        weight = wgt[q, p * cfg.group + g, k]
        return sum_over(inp[q, b, k].astype("int32") * weight.astype("int32"), (q, k))

    acc = compute(tile_shape(cfg, "acc"), element, "acc", axes=("p", "b", "g"))
    operands = {"acc": "acc", "inp": "inp", "wgt": "wgt"}
    return TensorIntrinsic("gemm", acc, operands, Compute(Opcode.GEMM, operands))


def load(cfg: Config, scope: str) -> TensorIntrinsic:
    """Declare LOAD: copy one element from DRAM to scratchpad `scope`."""
    src = placeholder(element_shape(cfg, scope), element_type(cfg, scope), "src")
    dst = compute(src.shape, lambda *i: src[i], "dst")
    return TensorIntrinsic(f"load_{scope}", dst, {"src": "dram", "dst": scope}, Move(Opcode.LOAD))


def padded_load(cfg: Config, scope: str) -> TensorIntrinsic:
    """Declare a LOAD with padding: copy an element if `inside` holds, else fill it with `pad`."""
    src = placeholder(element_shape(cfg, scope), element_type(cfg, scope), "src")
    inside, pad = Var("inside", "bool"), Var("pad", element_type(cfg, scope))
    dst = compute(src.shape, lambda *i: select(inside, src[i], pad), "dst")
    return TensorIntrinsic(f"padded_load_{scope}", dst, {"src": "dram", "dst": scope}, Move(Opcode.LOAD))


def widening_load(cfg: Config) -> TensorIntrinsic:
    """Declare the LOAD that copies one int8 element from DRAM to acc as int32."""
    src = placeholder(element_shape(cfg, "acc"), "int8", "src")
    dst = compute(src.shape, lambda *i: src[i].astype("int32"), "dst")
    fields = lambda: {"widen": 1}  # noqa: E731
    return TensorIntrinsic("widening_load", dst, {"src": "dram", "dst": "acc"}, Move(Opcode.LOAD, fields))


def store(cfg: Config) -> TensorIntrinsic:
    """Declare STORE: copy one element from out to DRAM."""
    src = placeholder(element_shape(cfg, "out"), "int8", "src")
    dst = compute(src.shape, lambda *i: src[i], "dst")
    return TensorIntrinsic("store", dst, {"src": "out", "dst": "dram"}, Move(Opcode.STORE))


# Passes of VECTOR ---------------------------------------------------------------------------------------------


def requantise(cfg: Config) -> TensorIntrinsic:
    """Declare the VECTOR that requantises one entry of acc to out (for user schedules; layers use `vector`)."""
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
    """Declare the VECTOR that takes the maximum of vin over the reduction loops around it (for user schedules)."""
    vin = placeholder(tile_shape(cfg, "vin"), "int8", "vin")
    out = compute(vin.shape, lambda p, b, g: max_over(vin[p, b, g], ()), "out", axes=("p", "b", "g"))

    def fields() -> dict[str, int]:
        common = {"a_source": ASource.VIN, "destination": Destination.OUT, "reduce_op": ReduceOp.MAX}
        return {**common, "clip_lo": -128, "clip_hi": 127}

    rule = Compute(Opcode.VECTOR, {"out": "dst", "vin": "a"}, fields)
    return TensorIntrinsic("window_max", out, {"out": "out", "vin": "vin"}, rule)


@dataclass(frozen=True)
class VectorOp:
    """The operations of one VECTOR instruction (a pass) on operand A; `name` is that of its intrinsic.

    source: the scratchpad of A, "acc" or "vin". The operations, in order: taps: multiply A by weights of tap before the
    sum. reduce: combine the window of A by "sum" or "max". multiply: by operand B, from vin. requantise: with an entry
    of par. lookup: in a table. residual: add operand B, from vin. byte: take one byte of A, and do nothing else.

    to: the scratchpad that is written. padded: whether places outside the image are filled with a number.
    """

    source: str
    reduce: str = ""
    multiply: bool = False
    requantise: bool = False
    lookup: bool = False
    residual: bool = False
    taps: bool = False
    to: str = "out"
    padded: bool = False
    byte: bool = field(default=False, repr=False)  # see recorded_text

    def __repr__(self) -> str:
        return recorded_text("Pass", self)

    @staticmethod
    def of(layer: Layer, source: str) -> VectorOp:
        """Return the vector operations of `layer`, with operand A from `source`."""
        return VectorOp(
            source, layer.reduce, layer.multiply is not None, layer.requantise is not None,
            layer.epilogue.table is not None, layer.epilogue.residual is not None,
            byte=layer.gemm is not None and layer.gemm.sum_bytes > 0,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Name of the intrinsic."""
        operations = [
            operation
            for operation in ("taps", "multiply", "byte", "requantise", "lookup", "residual")
            if getattr(self, operation)
        ]
        target = [] if self.to == "out" else ["to", self.to, *(["padded"] if self.padded else [])]
        return "_".join(["vector", self.source, *filter(None, [self.reduce]), *operations, *target])


def vector_ops(cfg: Config) -> Iterator[VectorOp]:
    """Yield every pass of this Config for which an intrinsic is declared.

    A layer with another combination has no tiling. The fields are those of `VectorOp`, in its order.
    """
    if cfg.sums:
        yield VectorOp("acc", byte=True)
    for lookup, residual in product((False, True), repeat=2):
        yield VectorOp("acc", "", False, True, lookup, residual)  # after gemm
        yield VectorOp("acc", "", False, False, lookup, residual)
    for lookup in (False, True):
        yield VectorOp("acc", "", True, True, lookup)
        yield VectorOp("vin", "", False, False, lookup)
        yield VectorOp("vin", "max", False, False, lookup)
        yield VectorOp("vin", "sum", False, True, lookup)
        if cfg.taps:
            yield VectorOp("vin", "sum", False, True, lookup, taps=True)
        if not cfg.forward:
            continue
        yield VectorOp("acc", "", False, True, lookup, True, to="vin")  # for a map that reads it in the same tile
        yield VectorOp("vin", "", False, False, lookup, to="vin")
        yield VectorOp("acc", "", False, False, lookup, True, to="vin")
        for to, padded in product(("inp", "vin"), (False, True)):
            yield VectorOp("acc", "", False, True, lookup, to=to, padded=padded)
            yield VectorOp("acc", "", True, True, lookup, to=to, padded=padded)
            yield VectorOp("vin", "max", False, False, lookup, to=to, padded=padded)
            yield VectorOp("vin", "sum", False, True, lookup, to=to, padded=padded)
            if cfg.taps:
                yield VectorOp("vin", "sum", False, True, lookup, taps=True, to=to, padded=padded)


def vector(cfg: Config, p: VectorOp) -> TensorIntrinsic:
    """Declare the VECTOR of pass `p`: one entry of `p.to` from an entry of acc or vin."""
    shape = tile_shape(cfg, "out")
    tiles = {
        "a": placeholder((cfg.taps, *shape) if p.taps else shape, element_type(cfg, p.source), "a"),
        "b": placeholder(shape, "int8", "b"),
        **({"tap": placeholder(tile_shape(cfg, "tap"), "int8", "tap")} if p.taps else {}),
        "par": placeholder(tile_shape(cfg, "par"), "uint64", "par"),
        "table": placeholder(tile_shape(cfg, "lut"), "int8", "table"),
    }  # fmt: skip
    variables = {name: Var(name, dtype) for name, dtype in PARAMETERS.items()}

    taps = (reduce_axis(cfg.taps, "t"),) if p.taps else ()

    def element(piece: Expr, b: Expr, g: Expr) -> Expr:
        """Return the result in one lane, or the padding where `inside` does not hold."""
        channel = piece * cfg.group + g
        index: dict[str, tuple[Value, ...]] = {
            "a": (*taps, piece, b, g), "tap": (*taps, channel), "par": (channel,), "table": (0,),
        }  # fmt: skip
        get = lambda name: tiles[name][index.get(name, (piece, b, g))]  # noqa: E731
        value = vector_value(p, get, variables.__getitem__, taps)
        return select(Var("inside", "bool"), value, variables["pad"]) if p.padded else value

    out = compute(shape, element, "out", axes=("p", "b", "g"))
    scopes = {"out": p.to, "a": p.source, "b": "vin", "par": "par", "table": "lut", "tap": "tap"}
    operands = {"out": "dst", "a": "a", "b": "b", "par": "par", "table": "table", "tap": "tap"}
    rule = Compute(Opcode.VECTOR, operands, partial(_vector_fields, p))
    return TensorIntrinsic(p.name, out, scopes, rule, {"a": out.size})


def _vector_fields(
    p: VectorOp, *, a_offset: int = 0, b_offset: int = 0, zero_point: float = 0, lo: float = 0, hi: float = 0,
    clip_lo: int = 0, clip_hi: int = 0, scale_v: float = 0, scale_b: float = 0, scale_c: float = 0, unit: float = 1,
    add_lo: float = 0, add_hi: float = 0, pad: int = 0, byte: int = 0,
) -> dict[str, int]:  # fmt: skip
    """Return the fields of VECTOR for the operations of pass `p` and the values of its parameters."""
    fields: dict[str, int] = {
        "destination": Destination[p.to.upper()], "a_source": ASource.ACC if p.source == "acc" else ASource.VIN,
        "clip_lo": int(lo) if p.requantise else clip_lo, "clip_hi": int(hi) if p.requantise else clip_hi,
    }  # fmt: skip
    if p.reduce:
        fields["reduce_op"] = ReduceOp.MAX if p.reduce == "max" else ReduceOp.ADD
    if p.taps:
        fields["taps"] = 1
    if p.multiply:
        fields |= {"binary_op": BinaryOp.MUL, "b_source": BSource.VIN, "a_offset": a_offset, "b_offset": b_offset}
    if p.byte:
        fields |= {"binary_op": BinaryOp.BYTE, "b_source": BSource.IMM, "imm": byte, "clip_lo": -128, "clip_hi": 127}
    if p.requantise:
        fields |= {"requantise": 1, "zero_point": int(zero_point)}
    if p.lookup:
        fields["lookup"] = 1
    if p.residual:
        fields |= {
            "rescale_add": 1, "b_source": BSource.VIN, "scale_v": int(scale_v), "scale_b": int(scale_b),
            "scale_c": int(scale_c), "scale_shift": -round(log2(unit)), "add_lo": int(add_lo), "add_hi": int(add_hi),
        }  # fmt: skip
    return fields


PARAMETERS = {
    "a_offset": "int32", "b_offset": "int32", "zero_point": "float32", "lo": "float32", "hi": "float32",
    "clip_lo": "int32", "clip_hi": "int32", "scale_v": "float64", "scale_b": "float64", "scale_c": "float64",
    "unit": "float64", "add_lo": "float64", "add_hi": "float64", "pad": "int8", "byte": INDEX,
}  # fmt: skip
"""Parameter of a pass -> its type."""
Get = Callable[[str], Expr]
"""Function that gives an operand or parameter by its name."""


def vector_value(p: VectorOp, operand: Get, parameter: Get, window: tuple[Axis, ...] = ()) -> Expr:
    """Return the int8 that a pass computes in one lane, as an expression.

    operand: gives "a" (int32 of acc or int8 of vin), "tap" and "b" (int8), "par" (uint64), and "table" (its first
    entry). parameter: gives a_offset, b_offset (int32), byte (int64), zero_point, lo, hi (float32), clip_lo, clip_hi
    (int32, without requantisation), scale_v, scale_b, scale_c, unit, add_lo, add_hi (float64).
    """
    v = operand("a").astype("int32")
    if p.byte:
        return (v >> (parameter("byte") * 8).astype("int32")).astype("int8")
    if p.taps:
        v = v * operand("tap").astype("int32")
    if p.reduce:
        v = (sum_over if p.reduce == "sum" else max_over)(v, window)
    if p.multiply:
        v = (v + parameter("a_offset")) * (operand("b").astype("int32") + parameter("b_offset"))
    if p.requantise:
        v = requantised(v, operand("par"), *(parameter(name) for name in ("zero_point", "lo", "hi")))
    else:
        v = clip(v, parameter("clip_lo"), parameter("clip_hi")).astype("int8")
    if p.lookup:
        table = operand("table")
        assert isinstance(table, Load)
        v = Load(table.tensor, (*table.index[:-1], v.astype(INDEX) + 128))
    if p.residual:
        scales = (parameter(name) for name in ("scale_v", "scale_b", "scale_c", "unit"))
        v = clip(rescaled(v, operand("b"), *scales), parameter("add_lo"), parameter("add_hi")).astype("int8")
    return v


def requantised(acc: Expr, par: Expr, zero_point: Value = 0.0, lo: Value = -128.0, hi: Value = 127.0) -> Expr:
    """Return the int8 clip(round((acc + bias) * multiplier * 2^-shift) + zero_point, lo, hi), the product in float32.

    acc: int32. par: bias, multiplier and shift as one uint64 (see tensorize.pack.pack_parameters).
    """
    bias = par.astype("int32")
    multiplier = PAR_FIELDS["multiplier"].of(par).astype("int32").astype("float32")
    exponent = 127 - PAR_FIELDS["shift"].of(par).astype("int32")
    scale = multiplier * call("bitcast", exponent << 23, dtype="float32")
    value = call("round_even", (acc + bias).astype("float32") * scale) + zero_point
    return clip(value, lo, hi).astype("int8")


def rescaled(v: Expr, b: Expr, scale_v: Value, scale_b: Value, scale_c: Value, unit: Value) -> Expr:
    """Return round((v * scale_v + b * scale_b + scale_c) * unit) of two int8, ties to even, as float64.

    If the scales are integers of 32 and 48 bits and unit a power of two, float64 is exact.
    """
    total = v.astype("float64") * scale_v + b.astype("float64") * scale_b + scale_c
    return call("round_even", total * unit)


# Softmax of a row ---------------------------------------------------------------------------------------------

SOFTMAX_NAMES = ("largest", "total", "softmax", "softmax_to_inp")
"""Names of the intrinsics; `_` and the number of elements of a row follow."""


@cache
def softmax_intrinsic(cfg: Config, name: str, count: int) -> TensorIntrinsic:
    """Declare the intrinsic with this one of SOFTMAX_NAMES, for rows of `count` elements."""
    lanes = cfg.lanes
    entries = -(-count // lanes)
    a = placeholder((entries * lanes,), "int8", "a")
    powers = placeholder((1, EXP_ENTRIES), "float32", "powers")
    peak, row_total = placeholder((), "int8", "largest"), placeholder((), "float32", "total")
    element: Element = lambda k: a[k]  # noqa: E731
    destination = "inp" if name.endswith("inp") else "out"
    scopes = {"a": "vin", "powers": POWERS, "largest": ROW, "total": ROW, "out": destination}
    axis = reduce_axis(count, "k")
    if name in ("largest", "total"):
        value = largest_element(element, axis) if name == "largest" else sum_of_powers(element, powers, peak[()], axis)
        return TensorIntrinsic(f"{name}_{count}", compute((), lambda: value, name), scopes, ImplicitOperand())
    zero_point, low, high = (Var(name, "float32") for name in ("zero_point", "lo", "hi"))
    out = compute(
        a.shape,
        lambda c: softmax_share(element, powers, peak[()], row_total[()], c, count, zero_point, low, high),
        "out",
        axes=("c",),
    )
    fields = partial(_softmax_fields, Destination[destination.upper()], entries, entries * lanes - count)
    rule = Compute(Opcode.VECTOR, {"out": "dst", "a": "a"}, fields, "x", alone=True)
    return TensorIntrinsic(f"{name}_{count}", out, scopes, rule, {"a": lanes, "out": lanes})


def _softmax_fields(
    to: Destination, entries: int, spare: int, *, zero_point: float, lo: float, hi: float
) -> dict[str, int]:
    """Return the fields of a softmax's VECTOR. entries: of a row. spare: lanes beyond its last element."""
    return {
        "softmax": 1, "a_source": ASource.VIN, "destination": to, "extent_n": entries, "a_n": 1, "dst_n": 1,
        "imm": spare, "zero_point": int(zero_point), "clip_lo": int(lo), "clip_hi": int(hi),
    }  # fmt: skip


Element = Callable[[Value], Expr]
"""Function that gives the element of a row at a position."""


def largest_element(a: Element, axis: Axis) -> Expr:
    """Return the largest element of a row, int8."""
    return max_over(a(axis), axis)


def sum_of_powers(a: Element, powers: Tensor, peak: Expr, axis: Axis) -> Expr:
    """Return the sum of the powers of all elements, float32, added in order from the first one on."""
    return ordered_sum(powers[0, _distance(a(axis), peak) + (EXP_ENTRIES // 2 - 1)], axis)


def softmax_share(
    a: Element, powers: Tensor, peak: Expr, row_total: Expr, position: Expr, count: int, zero_point: Value, low: Value,
    high: Value,
) -> Expr:  # fmt: skip
    """Return the int8 probability of the element at `position`; beyond the row's `count` elements, that of 0."""
    steps = call("round_even", powers[0, _distance(a(position), peak) + (EXP_ENTRIES - 1)] / row_total)
    result = clip(steps + zero_point, low, high).astype("int8")
    if isinstance(position, Axis) and position.extent == count:
        return result
    return select(position < count, result, clip(zero_point, low, high).astype("int8"))  # type: ignore[arg-type]


def _distance(element: Expr, peak: Expr) -> Expr:
    """Return element - peak, 0 or negative, as an index into the powers."""
    return (element.astype("int32") - peak.astype("int32")).astype(INDEX)


# Normalisation of a row ---------------------------------------------------------------------------------------

NORM_SUMS = ("row_total", "row_squares")
"""Names of the intrinsics of the sums, which the instruction computes itself."""
NORM_NAMES = (*NORM_SUMS, "layer_norm", "rms_norm")
"""Names of the intrinsics; `_` and the number of elements of a row follow."""


@cache
def norm_intrinsic(cfg: Config, name: str, count: int) -> TensorIntrinsic:
    """Declare the intrinsic with this one of NORM_NAMES, for rows of `count` elements."""
    lanes = -(-count // cfg.lanes) * cfg.lanes
    a, par = placeholder((lanes,), "int8", "a"), placeholder((lanes,), "uint64", "par")
    within = tuple(placeholder((), INT, sum_name) for sum_name in NORM_SUMS)
    offset, epsilon = Var("offset", INT), Var("epsilon", INT)
    element: OfRow = lambda k: shifted(a[k], offset)  # noqa: E731
    scopes = {"a": "vin", "par": "par", "out": "out", **dict.fromkeys(NORM_SUMS, ROW)}
    if name in NORM_SUMS:
        behaviour = compute((), sums(element, count)[NORM_SUMS.index(name)], name)
        return TensorIntrinsic(f"{name}_{count}", behaviour, scopes, ImplicitOperand())
    centre = name == "layer_norm"
    limits = (Var("zero_point", "float32"), Var("lo", "float32"), Var("hi", "float32"))
    total, squares = (lambda number=number: number[()] for number in within)
    value = norm_results(element, lambda c: par[c], (total, squares), epsilon, count, centre, limits)
    out = compute((lanes,), value, "out", axes=("c",))
    fields = partial(_norm_fields, int(centre), lanes // cfg.lanes, lanes - count)
    rule = Compute(Opcode.VECTOR, {"out": "dst", "a": "a", "par": "par"}, fields, "x")
    return TensorIntrinsic(f"{name}_{count}", out, scopes, rule, dict.fromkeys(("a", "out", "par"), cfg.lanes))


def _norm_fields(
    centre: int, entries: int, spare: int, *, offset: int, epsilon: int, zero_point: float, lo: float, hi: float
) -> dict[str, int]:
    """Return the fields of a norm's VECTOR. entries: of a row. spare: lanes beyond its last element."""
    return {
        "norm": 1, "centre": centre, "a_source": ASource.VIN, "destination": Destination.OUT, "requantise": 1,
        "extent_n": entries, "a_n": 1, "dst_n": 1, "par_n": 1, "imm": spare, "a_offset": offset, "scale_c": epsilon,
        "zero_point": int(zero_point), "clip_lo": int(lo), "clip_hi": int(hi),
    }  # fmt: skip


def norm_results(
    element: OfRow, par: OfRow, within: tuple[OfRow, OfRow], epsilon: Expr, count: int, centre: bool,
    limits: tuple[Value, Value, Value],
) -> OfRow:  # fmt: skip
    """Return the int8 result of a norm as a function of a row's indices and the position in the row.

    element: int64, by the same indices. par: uint64, by the position. within: sum of a row and sum of its squares, by
    the row's indices. count: elements of a row. centre: whether the mean is subtracted. limits: zero point, lowest and
    highest result.
    """
    row = norm_row(*within, epsilon, count, centre, lambda name, number: number)
    return lambda *i: requantised(row.element(element(*i), *i[:-1]), par(i[-1]), *limits)


def shifted(value: Expr, offset: Value) -> Expr:
    """Return an element of a row as it enters the sums: int64, plus `offset`."""
    return value.astype(INT) + offset
