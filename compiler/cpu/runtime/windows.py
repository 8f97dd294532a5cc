"""Automatic padding of sliding windows, as ONNX defines it."""

from __future__ import annotations


def same_pads(size: int, stride: int, reach: int, auto: str) -> tuple[int, int]:
    """Padding before and after `size` inputs with which windows of `reach` inputs have size / stride outputs.

    auto: SAME_UPPER or SAME_LOWER.

    >>> same_pads(5, 2, 4, "SAME_UPPER")
    (1, 2)
    """
    return halves(max(0, (-(-size // stride) - 1) * stride + reach - size), auto)


def halves(total: int, auto: str) -> tuple[int, int]:
    """Padding before and after: the larger half comes after for SAME_UPPER."""
    small, large = total // 2, total - total // 2
    return (small, large) if auto == "SAME_UPPER" else (large, small)
