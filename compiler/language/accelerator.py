"""Kernels on the accelerator: the layer that a recognised kernel becomes, the choice of its tile, and its execution.

The layer is one like those of a model (compiler/layer.py), whose tile is the block of a program. The compiler adds
scratchpads, tokens and loads ahead, as for models.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable
from celosia.compiler.graph.select.matrices import can_multiply_activations, form_of_matrices
from celosia.compiler.language.attention_kernels import AttentionKernel, HeadsKernel
from celosia.compiler.language.block_reader import ON_CPU
from celosia.compiler.language.head_layers import AttentionLayers, HeadLayers, SoftmaxLayers
from celosia.compiler.language.language_errors import fail
from celosia.compiler.language.lowered_kernel import (
    Arrays,
    LoweredKernel,
    build_epilogue,
    predict_cycles,
    unpack_requantise,
)
from celosia.compiler.language.recognise import RecognisedLayer, recognise
from celosia.compiler.language.softmax_of_rows import SoftmaxKernel
from celosia.compiler.language.tile import ArrayArgument, KernelRun
from celosia.compiler.launch.image import Image
from celosia.compiler.layer import (
    Activation,
    ActivationGemm,
    Epilogue,
    Gemm,
    Layer,
    Requantise,
)
from celosia.compiler.program.model import pack_activation, unpack_activation
from celosia.compiler.tensorize.roofline import estimate
from celosia.compiler.tensorize.space import CUT_ORDERS, Tiling, Workload, parts, point
from celosia.hw.spec.config import Config

TIMEOUT = 1 << 40
"""Cycles after which a run is positions up."""


def dims_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return (images, channels, height, width) of an array [rows, channels] or [images, height, width, channels]."""
    if len(shape) == 2:
        return shape[0], shape[1], 1, 1
    images = shape[0] if len(shape) == 4 else 1
    return images, shape[-1], shape[-3], shape[-2]


class KernelLayer(LoweredKernel):
    """A kernel that is one layer: a sum of products with constants, a maximum or an element-wise function."""

    def __init__(self, cfg: Config, name: str, recognised: RecognisedLayer, at: str) -> None:
        """Create the activations of x, y and the residual. Raises LanguageError for ranks other than 2 to 4."""
        super().__init__(cfg, name, recognised.y, recognised.tile, at)
        self.recognised = recognised
        constants = recognised.w, recognised.par, recognised.table
        self.constants = [array for array in constants if array is not None]
        for array in (recognised.x, self.y):
            if not 2 <= len(array.shape) <= 4:
                fail(f"the accelerator has matrices and images; {array.name} has {len(array.shape)} dimensions", at)
        self.acts = {
            array: Activation.alone(cfg, array.name, *dims_of(array.shape))
            for array in (recognised.x, self.y, recognised.residual) if array is not None
        }  # fmt: skip

    def form(self, array: ArrayArgument) -> ActivationLayout:
        if len(array.shape) != 2:
            raise NotOffloadable("its images have their channels last; the accelerator's have them first")
        return ActivationLayout((*array.shape, 1, 1))

    def arrange_argument(self, array: ArrayArgument, values: NDArray[Any]) -> NDArray[np.int8]:
        """Return an argument of the kernel, channels last, as the accelerator reads it: channels first."""
        images, channels, rows, columns = self.acts[array].dims
        return np.asarray(values.reshape(images, rows, columns, channels).transpose(0, 3, 1, 2))

    def restore_output(self, values: NDArray[np.int8]) -> NDArray[np.int8]:
        """Return the output of the accelerator, [N, C, H, W], in the shape of the kernel's y: channels last."""
        return np.asarray(values.transpose(0, 2, 3, 1).reshape(self.y.shape))

    def layers(self, arrays: Arrays) -> list[Layer]:
        return [self._layer(arrays)]

    def _layer(self, arrays: Arrays) -> Layer:
        """Build the layer with the values of a call's constants: a pooling, an element-wise layer, or a convolution.

        The zero point of x is folded into the bias of a convolution.
        """
        f = self.recognised
        x, y = self.acts[f.x], self.acts[f.y]
        if f.pool:
            return Layer(self.name, x, y, f.window, f.pad, reduce="max", epilogue=self._epilogue(arrays))
        if f.w is None or f.par is None:
            return Layer(self.name, x, y, epilogue=self._epilogue(arrays))
        out, into = f.axes
        others = [d for d in range(len(f.w.shape)) if d not in f.axes]
        moved = arrays[f.w].transpose(out, into, *others)
        channels = slice(None), slice(None)
        weights: Any = np.stack([np.stack([moved[channels + tap] for tap in row], -1) for row in f.taps], -2)
        requantise = self._requantise(arrays)
        if f.x.zero_point:  # int32 wraps in the bias as it does in the sum
            sums = weights.reshape(len(weights), -1).sum(1, dtype=np.int64)
            requantise = replace(requantise, bias=(requantise.bias - f.x.zero_point * sums).astype(np.int32))
        gemm, epilogue = Gemm(np.ascontiguousarray(weights)), self._epilogue(arrays)
        return Layer(self.name, x, y, f.window, f.pad, gemm, requantise=requantise, epilogue=epilogue)

    def _requantise(self, arrays: Arrays) -> Requantise:
        """Unpack the requantisation from the values of its parameters."""
        f = self.recognised
        assert f.par is not None
        return unpack_requantise(arrays[f.par], int(f.more["zero_point"]))

    def _epilogue(self, arrays: Arrays) -> Epilogue:
        """Build the table and the residual that follow the requantisation."""
        f = self.recognised
        operand = None if f.residual is None else self.acts[f.residual]
        return build_epilogue(
            f.more.get("clip", (-128, 127)), None if f.table is None else arrays[f.table], operand, f.rescale
        )

    def _choose_tiling(self, p: Workload) -> Tiling:
        """Return the tiling whose tile is a program's block, with the loop order of the fewest estimated cycles."""
        cfg, tile = self.cfg, self.tile
        if tile[-1] % cfg.block_out and tile[-1] < self.y.shape[-1]:
            self.refuse(f"columns of a block come in multiples of block_out, {cfg.block_out}, and not {tile[-1]}")
        n = min(-(-tile[-1] // cfg.block_out), p.out_blocks)
        if len(tile) == 2:
            if tile[0] % cfg.batch and tile[0] < self.y.shape[0]:
                self.refuse(f"rows of a block come in multiples of the batch, {cfg.batch}, and not {tile[0]}")
            y, x = 1, min(-(-tile[0] // cfg.batch), p.columns)
        else:
            y, x = min(tile[-3], p.rows), min(tile[-2], p.columns)
        fitting = self.fitting_tilings(p, [
            point(cfg, p, n, y, x, k, order)
            for order in (("weights", "input", "split", "pieces") if p.in_blocks else ("rows",))
            for k in (parts(p.in_blocks)[1:] if order in CUT_ORDERS else [max(p.in_blocks, 1)])
        ])  # fmt: skip
        return min(fitting, key=lambda d: estimate(cfg, p, d)) if p.in_blocks else fitting[0]


class ProductLayer(KernelLayer):
    """A matrix product whose second operand w is an activation, and no constant."""

    def __init__(self, cfg: Config, name: str, recognised: RecognisedLayer, w: ArrayArgument, at: str) -> None:
        super().__init__(cfg, name, recognised, at)
        self.w = w
        self.constants.remove(w)
        self.acts = {array: Activation.alone(cfg, array.name, *self.form(array).dims) for array in (*self.acts, w)}

    def form(self, array: ArrayArgument) -> ActivationLayout:
        is_w = array is self.w
        pixels = "columns" if is_w and self.recognised.axes == (1, 0) else "rows"
        pad = array.zero_point if is_w or array is self.recognised.x else 0
        return form_of_matrices(self.cfg, array.shape, pixels, pad, self.cfg.block_out if is_w else 1)

    arrange_argument, restore_output = LoweredKernel.arrange_argument, LoweredKernel.restore_output

    def _layer(self, arrays: Arrays) -> Layer:
        f, requantise, epilogue = self.recognised, self._requantise(arrays), self._epilogue(arrays)
        product = ActivationGemm(self.acts[self.w], -f.x.zero_point, -self.w.zero_point)
        return Layer(
            self.name, self.acts[f.x], self.acts[f.y], product=product, requantise=requantise, epilogue=epilogue
        )


def lower_to_layers(
    cfg: Config, name: str, run: KernelRun, at: str, varying: Collection[ArrayArgument] = ()
) -> LoweredKernel:
    """Lower a traced kernel to layers on a Config. Raises LanguageError where the accelerator cannot run it.

    varying: arrays whose values change from run to run, besides those that are `quantised`.
    """
    kernel = recognise(run, varying)
    if isinstance(kernel, SoftmaxKernel):
        return SoftmaxLayers(cfg, name, kernel, at)
    if isinstance(kernel, AttentionKernel):
        return AttentionLayers(cfg, name, kernel, at)
    if isinstance(kernel, HeadsKernel):
        return HeadLayers(cfg, name, kernel, at)
    w = kernel.w
    if w is None or not (w.quantised or w in varying):
        return KernelLayer(cfg, name, kernel, at)
    if can_multiply_activations(cfg) and len(kernel.y.shape) == len(w.shape) == 2 and w is not kernel.x:
        return ProductLayer(cfg, name, kernel, w, at)
    if w in varying or w.zero_point:
        fail(
            f"{w.name} is no constant, or has a zero point: the accelerator multiplies matrices by such, others than "
            f"{w.name} itself, on a Config with batch = 1 and block_in = block_out{ON_CPU}", kernel.w_at,
        )  # fmt: skip
    return KernelLayer(cfg, name, kernel, at)


class AcceleratorVariant:
    """A kernel for one set of types and shapes.

    positions: of each array among the kernel's arguments. constants: values with which `image` and `layers` were made,
    which are made again when these values change.
    """

    def __init__(self, kernel: Any, run: KernelRun, positions: dict[ArrayArgument, int]) -> None:
        self.kernel, self.cfg = kernel, kernel.machine
        self.lowered = lower_to_layers(self.cfg, kernel.name, run, kernel.at)
        self.positions = positions
        self.constants: list[NDArray[Any]] = []
        self.image: Image | None = None
        self.layers: list[Layer] = []

    def prepare(self, arrays: list[Any]) -> Image:
        """Return the image for the constants among the arguments `arrays`, compiled again where these changed."""
        constants = [arrays[self.positions[array]] for array in self.lowered.constants]
        if self.image is None or not all(map(np.array_equal, constants, self.constants)):
            self.layers = self.lowered.layers({array: arrays[n] for array, n in self.positions.items()})
            self.image = self.lowered.build_image(self.layers)
            self.constants = [values.copy() for values in constants]
        return self.image

    def cycles(self, arrays: list[Any]) -> int:
        """Predict the cycles by the timing model."""
        return predict_cycles(self.cfg, self.prepare(arrays))

    def __call__(self, arrays: list[Any], device: Any, addresses: object = None) -> dict[str, Any]:
        """Run the kernel on `device`, write its output array, and return the report of the run."""
        image, cfg = self.prepare(arrays), self.cfg
        (launch,) = image.launches
        machine = self.kernel.device(device)
        started = time.perf_counter()
        machine.allocate(image.size)
        machine.write(image.constants_address, image.constants)
        for array, act in self.lowered.acts.items():
            if array is not self.lowered.y:
                values = self.lowered.arrange_argument(array, arrays[self.positions[array]])
                machine.write(image.addresses[act.storage], pack_activation(cfg, values, act.storage_groups))
        counters = machine.run(launch.address, launch.count, TIMEOUT)
        y = self.lowered.y
        act, out = self.lowered.acts[y], arrays[self.positions[y]]
        data = machine.read(image.addresses[act.storage], act.size(cfg))
        out[...] = self.lowered.restore_output(unpack_activation(cfg, data, act.dims, act.storage_groups))
        return {
            "target": "accelerator", "device": device if isinstance(device, str) else type(device).__name__,
            "config": cfg.name, "cycles": counters.cycles, "instructions": launch.count,
            "bytes_stored": sum(launch.bytes_stored),
            "seconds": time.perf_counter() - started, "counters": counters.values,
        }  # fmt: skip
