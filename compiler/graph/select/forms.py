"""Layouts of the graph's tensors as activations of the accelerator."""

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
"""End of a reason for which there is no way out."""
HOST_INPUT = "the host has its input; quantise the operator that makes it, so that the accelerator has it"
OTHER_ROWS = "its rows are not in the last two axes as the accelerator holds them; reshape its input to [rows, columns]"


class NotOffloadable(Exception):
    """An operator that stays on the CPU; the message is the reason, `;`, and what changes it, or NO_WAY."""


@dataclass(frozen=True)
class ActivationLayout:
    """Layout of a tensor of the graph as an activation: its logical [images, channels, height, width].

    fold: "" for the tensor itself; "xy" or "x" where each pixel holds the window (or the row of the window) that a
    convolution reads there, made by the host, so that a first layer of few channels fills the blocks. Of those of
    program.model.MATRICES, the tensor is matrices, whose rows are the pixels of one row of the image and whose columns
    are channels, one matrix after the other. pad: what the host puts beyond a tensor's own elements. inverted: it turns
    all bits round.
    """

    dims: tuple[int, int, int, int]
    fold: str = ""
    window: Window | None = None
    pad: int = 0
    inverted: bool = False

    @property
    def info(self) -> FormInfo:
        """The arrangement that the host carries out, as the Program holds it."""
        w = self.window or Window((1, 1))
        return FormInfo(self.dims, self.fold, w.kernel, w.strides, w.dilations, w.pads, self.pad, self.inverted)


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """The shape of a tensor with elements. NotOffloadable if unknown."""
    dims = shape(value)
    if dims is None:
        raise NotOffloadable(f"the shape of {value.name!r} is not static; give the sizes of the inputs with `--shape`")
    if 0 in dims:
        raise NotOffloadable(f"{value.name!r} is empty; leave the operator out of the model")
    return dims


def natural_form(value: ir.Value, rows: bool = False) -> ActivationLayout:
    """Images and channels of a tensor: NCHW, or rows x columns for matrices and where `rows`. NotOffloadable if
    unknown."""
    dims = shape_of(value)
    if len(dims) == 4 and not rows:
        return ActivationLayout((dims[0], dims[1], dims[2], dims[3]))
    if len(dims) == 3 and not rows:
        return ActivationLayout((dims[0], dims[1], 1, dims[2]))
    if len(dims) >= 1 and (rows or len(dims) == 2):
        return ActivationLayout((math.prod(dims[:-1]), dims[-1], 1, 1))
    raise NotOffloadable(f"{value.name!r} has {len(dims)} dimensions; reshape it to one with two to four")


def cut_axes(node: ir.Node, whole: list[range]) -> list[tuple[int, range]]:
    """Each axis that a Slice cuts, and the positions that it takes of it. NotOffloadable where they are not
    constant."""
    lists: list[list[int] | None] = []
    for name in ("starts", "ends", "axes", "steps"):
        given = attribute(node, name)
        if given is None and (value := operand(node, name)) is not None:
            array = constant(value)
            if array is None:
                raise NotOffloadable(f"its {name} are not constant; export them as initializers")
            given = array.reshape(-1).tolist()
        lists.append(given)
    starts, ends, axes, steps = lists
    assert starts is not None and ends is not None
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    if 0 in steps or not all(-len(whole) <= axis < len(whole) for axis in axes):
        raise NotOffloadable("its axes or steps are impossible; export axes that its input has, and steps other than 0")
    return [
        (axis % len(whole), slice_positions(len(whole[axis]), start, end, step))
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True)
    ]
