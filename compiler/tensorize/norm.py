"""LayerNorm and RMSNorm of a row as intrinsics: one instruction, which also computes the sums of the row and its
squares.

A row is the channels of a pixel, whose entries lie in sequence in vin; lanes beyond its last element do not count.

>>> from celosia.hw.spec.config import PRESETS
>>> print(intrinsic(PRESETS["tiny"], "row_squares", 7).behaviour.body)
sum[k]((int64(a[k]) + offset) * (int64(a[k]) + offset))
"""

from __future__ import annotations

from functools import cache, partial

from celosia.compiler.expr.nodes import Expr, Value, Var
from celosia.compiler.expr.norm_expressions import INT, OfRow, norm_row, sums
from celosia.compiler.expr.tensor import compute, placeholder
from celosia.compiler.tensorize.intrinsic import ROW, Compute, ImplicitOperand, TensorIntrinsic
from celosia.compiler.tensorize.requantised import requantised
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import ASource, Destination, Opcode

SUMS = ("row_total", "row_squares")
"""Names of the intrinsics of the sums, which the instruction computes itself."""
NAMES = (*SUMS, "layer_norm", "rms_norm")
"""Names of the intrinsics; `_` and the number of elements of a row follow."""


def results(
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


@cache
def intrinsic(cfg: Config, name: str, count: int) -> TensorIntrinsic:
    """Declare the intrinsic with this one of NAMES, for rows of `count` elements."""
    lanes = -(-count // cfg.lanes) * cfg.lanes
    a, par = placeholder((lanes,), "int8", "a"), placeholder((lanes,), "uint64", "par")
    within = tuple(placeholder((), INT, sum_name) for sum_name in SUMS)
    offset, epsilon = Var("offset", INT), Var("epsilon", INT)
    element: OfRow = lambda k: shifted(a[k], offset)  # noqa: E731
    scopes = {"a": "vin", "par": "par", "out": "out", **dict.fromkeys(SUMS, ROW)}
    if name in SUMS:
        behaviour = compute((), sums(element, count)[SUMS.index(name)], name)
        return TensorIntrinsic(f"{name}_{count}", behaviour, scopes, ImplicitOperand())
    centre = name == "layer_norm"
    limits = (Var("zero_point", "float32"), Var("lo", "float32"), Var("hi", "float32"))
    total, squares = (lambda number=number: number[()] for number in within)
    value = results(element, lambda c: par[c], (total, squares), epsilon, count, centre, limits)
    out = compute((lanes,), value, "out", axes=("c",))
    fields = partial(_fields, int(centre), lanes // cfg.lanes, lanes - count)
    rule = Compute(Opcode.VECTOR, {"out": "dst", "a": "a", "par": "par"}, fields, "x")
    return TensorIntrinsic(f"{name}_{count}", out, scopes, rule, dict.fromkeys(("a", "out", "par"), cfg.lanes))


def _fields(
    centre: int, entries: int, spare: int, *, offset: int, epsilon: int, zero_point: float, lo: float, hi: float
) -> dict[str, int]:
    """Return the fields of a norm's VECTOR. entries: of a row. spare: lanes beyond its last element."""
    return {
        "norm": 1, "centre": centre, "a_source": ASource.VIN, "destination": Destination.OUT, "requantise": 1,
        "extent_n": entries, "a_n": 1, "dst_n": 1, "par_n": 1, "imm": spare, "a_offset": offset, "scale_c": epsilon,
        "zero_point": int(zero_point), "clip_lo": int(lo), "clip_hi": int(hi),
    }  # fmt: skip
