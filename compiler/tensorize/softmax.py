"""Softmax of a row as intrinsics: one instruction, which also computes the row's largest element and sum of powers.

A row is the channels of a pixel, whose entries lie in sequence in vin; lanes beyond its last element do not count.

>>> from celosia.hw.spec.config import PRESETS
>>> for name in ("largest", "total"):
...     print(intrinsic(PRESETS["tiny"], name, 7).behaviour.body)
max[k](a[k])
ordered_sum[k](powers[0, (int64((int32(a[k]) - int32(largest[]))) + 255)])
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from celosia.compiler.expr.nodes import INDEX, Axis, Expr, Tensor, Value, Var, call, clip, select
from celosia.compiler.expr.tensor import compute, ordered_sum, placeholder, reduce_axis
from celosia.compiler.expr.tensor import max as max_over
from celosia.compiler.tensorize.intrinsic import POWERS, ROW, Compute, ImplicitOperand, TensorIntrinsic
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import ASource, Destination, Opcode
from celosia.hw.spec.scratchpads import EXP_ENTRIES as PLACES

NAMES = ("largest", "total", "softmax", "softmax_to_inp")
"""Names of the intrinsics; `_` and the number of elements of a row follow."""
Element = Callable[[Value], Expr]
"""Function that gives the element of a row at a position."""


def largest(a: Element, axis: Axis) -> Expr:
    """Return the largest element of a row, int8."""
    return max_over(a(axis), axis)


def total(a: Element, powers: Tensor, peak: Expr, axis: Axis) -> Expr:
    """Return the sum of the powers of all elements, float32, added in order from the first one on."""
    return ordered_sum(powers[0, _distance(a(axis), peak) + (PLACES // 2 - 1)], axis)


def share(
    a: Element, powers: Tensor, peak: Expr, row_total: Expr, position: Expr, count: int, zero_point: Value, low: Value,
    high: Value,
) -> Expr:  # fmt: skip
    """Return the int8 probability of the element at `position`; beyond the row's `count` elements, that of 0."""
    steps = call("round_even", powers[0, _distance(a(position), peak) + (PLACES - 1)] / row_total)
    result = clip(steps + zero_point, low, high).astype("int8")
    if isinstance(position, Axis) and position.extent == count:
        return result
    return select(position < count, result, clip(zero_point, low, high).astype("int8"))  # type: ignore[arg-type]


def _distance(element: Expr, peak: Expr) -> Expr:
    """Return element - peak, 0 or negative, as an index into the powers."""
    return (element.astype("int32") - peak.astype("int32")).astype(INDEX)


@cache
def intrinsic(cfg: Config, name: str, count: int) -> TensorIntrinsic:
    """Declare the intrinsic with this one of NAMES, for rows of `count` elements."""
    lanes = cfg.lanes
    entries = -(-count // lanes)
    a = placeholder((entries * lanes,), "int8", "a")
    powers = placeholder((1, PLACES), "float32", "powers")
    peak, row_total = placeholder((), "int8", "largest"), placeholder((), "float32", "total")
    element: Element = lambda k: a[k]  # noqa: E731
    scopes = {
        "a": "vin",
        "powers": POWERS,
        "largest": ROW,
        "total": ROW,
        "out": "inp" if name.endswith("inp") else "out",
    }
    axis = reduce_axis(count, "k")
    if name == "largest":
        return TensorIntrinsic(
            f"largest_{count}", compute((), lambda: largest(element, axis), name), scopes, ImplicitOperand()
        )
    if name == "total":
        behaviour = compute((), lambda: total(element, powers, peak[()], axis), name)
        return TensorIntrinsic(f"total_{count}", behaviour, scopes, ImplicitOperand())
    zero_point, low, high = (Var(name, "float32") for name in ("zero_point", "lo", "hi"))
    out = compute(
        a.shape,
        lambda c: share(element, powers, peak[()], row_total[()], c, count, zero_point, low, high),
        "out",
        axes=("c",),
    )
    fields = partial(_fields, Destination[scopes["out"].upper()], entries, entries * lanes - count)
    rule = Compute(Opcode.VECTOR, {"out": "dst", "a": "a"}, fields, "x", alone=True)
    return TensorIntrinsic(f"{name}_{count}", out, scopes, rule, {"a": lanes, "out": lanes})


def _fields(to: Destination, entries: int, spare: int, *, zero_point: float, lo: float, hi: float) -> dict[str, int]:
    """Return the fields of a softmax's VECTOR. entries: of a row. spare: lanes beyond its last element."""
    return {
        "softmax": 1, "a_source": ASource.VIN, "destination": to, "extent_n": entries, "a_n": 1, "dst_n": 1,
        "imm": spare, "zero_point": int(zero_point), "clip_lo": int(lo), "clip_hi": int(hi),
    }  # fmt: skip
