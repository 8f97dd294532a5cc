"""Forms: in which layout the accelerator holds a tensor of the graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.values import attribute, constant, shape
from celosia.compiler.layer import Window
from celosia.compiler.program.host.shape_rules import slice_positions
from celosia.compiler.program.model import FormInfo

NO_WAY = "no setting changes that, only another operator in its place"
"""Advice at the end of a reason where nothing helps."""
# Reasons of several operators.
HOST_INPUT = "the host has its input; quantise the operator that makes it, so that the accelerator has it"
OTHER_ROWS = "its rows are not in the last two axes as the accelerator holds them; reshape its input to [rows, columns]"


class NotOffloadable(Exception):
    """Raised for an operator that must stay on the CPU. The message is the reason, `;`, and advice or NO_WAY."""


@dataclass(frozen=True)
class ActivationLayout:
    """The form of a tensor: how its elements lie as an activation of the accelerator.

    dims: [images, channels, height, width] of the activation.
    fold: "" for the tensor as it is. "xy" or "x": im2col by the host; each pixel holds in its channels the window (or
        one row of the window) that a convolution reads there, so that a first layer of few channels fills whole blocks.
        A key of program.model.MATRICES: the tensor is matrices, side by side in the channels; rows of a matrix are
        pixels of an image of one row, its columns are channels.
    window: the convolution's, for "xy" and "x".
    pad: the byte that the host puts where the tensor has no elements.
    inverted: whether the host complements all bits.
    """

    dims: tuple[int, int, int, int]
    fold: str = ""
    window: Window | None = None
    pad: int = 0
    inverted: bool = False

    @property
    def info(self) -> FormInfo:
        """The form as the Program holds it, for the host that arranges the tensor."""
        w = self.window or Window((1, 1))
        return FormInfo(self.dims, self.fold, w.kernel, w.strides, w.dilations, w.pads, self.pad, self.inverted)


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of `value`. Raises NotOffloadable if it is unknown or the tensor has no elements."""
    dims = shape(value)
    if dims is None:
        raise NotOffloadable(f"the shape of {value.name!r} is not static; give the sizes of the inputs with `--shape`")
    if 0 in dims:
        raise NotOffloadable(f"{value.name!r} is empty; leave the operator out of the model")
    return dims


def natural_form(value: ir.Value, rows: bool = False) -> ActivationLayout:
    """Return the form of a tensor without fold.

    Four axes are [images, channels, height, width]; three are [images, channels, width]. A matrix, or any tensor where
    `rows` is set, has its last axis as channels and all others as images of one pixel. Raises NotOffloadable if the
    shape is unknown or has another number of axes.
    """
    dims = shape_of(value)
    if len(dims) == 4 and not rows:
        return ActivationLayout((dims[0], dims[1], dims[2], dims[3]))
    if len(dims) == 3 and not rows:
        return ActivationLayout((dims[0], dims[1], 1, dims[2]))
    if len(dims) >= 1 and (rows or len(dims) == 2):
        return ActivationLayout((math.prod(dims[:-1]), dims[-1], 1, 1))
    raise NotOffloadable(f"{value.name!r} has {len(dims)} dimensions; reshape it to one with two to four")


def cut_axes(node: ir.Node, positions: list[range]) -> list[tuple[int, range]]:
    """Return each axis that a Slice cuts, with the positions that it takes of `positions`, all those of its input.

    Raises NotOffloadable if starts, ends, axes or steps are not constant or impossible.
    """
    lists: list[list[int] | None] = []
    for name in ("starts", "ends", "axes", "steps"):
        numbers = attribute(node, name)
        if numbers is None and (value := operand(node, name)) is not None:
            array = constant(value)
            if array is None:
                raise NotOffloadable(f"its {name} are not constant; export them as initializers")
            numbers = array.reshape(-1).tolist()
        lists.append(numbers)
    starts, ends, axes, steps = lists
    assert starts is not None and ends is not None
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    if 0 in steps or not all(-len(positions) <= axis < len(positions) for axis in axes):
        raise NotOffloadable("its axes or steps are impossible; export axes that its input has, and steps other than 0")
    return [
        (axis % len(positions), slice_positions(len(positions[axis]), start, end, step))
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True)
    ]
