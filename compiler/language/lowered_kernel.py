"""Kernels as layers of the accelerator, whose tile is the block of a program, and their instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.graph.select.forms import ActivationLayout
from celosia.compiler.language.language_errors import fail
from celosia.compiler.language.tile import ArrayArgument
from celosia.compiler.launch.image import Image, LayerErrors, build
from celosia.compiler.layer import Activation, Epilogue, Layer, Requantise, Residual, TilingError
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.schedule_policy import FixedSchedule
from celosia.compiler.tensorize.space import Tiling, Workload, why_not
from celosia.compiler.vthread.verify import Run, verify_provenance
from celosia.hw.spec.config import Config
from celosia.sim.timing import predict

Arrays = dict[ArrayArgument, NDArray[Any]]
"""Values of the arrays of a call."""


class LoweredKernel:
    """A kernel as layers for a Config; subclasses say which layers. Each program writes a block of y of sizes `tile`.

    acts: the activation of each array that changes from call to call, y among them. constants: arrays that become part
    of the layers. planner: decides the layers' schedules; None until layers are made. at: file and line of the kernel.
    """

    acts: dict[ArrayArgument, Activation]
    constants: list[ArrayArgument]

    def __init__(self, cfg: Config, name: str, y: ArrayArgument, tile: tuple[int, ...], at: str) -> None:
        self.cfg, self.name, self.y, self.tile, self.at = cfg, name, y, tile, at
        self.planner: Planner | None = None

    def layers(self, arrays: Arrays) -> list[Layer]:
        """Return the layers of a launch, in order, with the values of the call's constants."""
        raise NotImplementedError

    def tilings(self, layer: Layer) -> list[Tiling]:
        """Return the tilings with which a layer's tile is the block of a program, one for each of its computations."""
        return [self._choose_tiling(d.workload) for d in lower_layer(self.cfg, layer)]  # type: ignore[arg-type]

    def _choose_tiling(self, p: Workload) -> Tiling:
        """Return the tiling of a workload. Raises LanguageError where the block of a program does not fit."""
        raise NotImplementedError

    def form(self, array: ArrayArgument) -> ActivationLayout:
        """Return the layout of an array as an activation of a graph. Raises NotOffloadable where it has none."""
        raise NotImplementedError

    def arrange_argument(self, array: ArrayArgument, values: NDArray[Any]) -> NDArray[np.int8]:
        """Arrange an array as its activation, [images, channels, height, width]."""
        return np.asarray(self.form(array).info.arrange(values))

    def restore_output(self, values: NDArray[np.int8]) -> NDArray[np.int8]:
        """Return the values of y, in its shape, from its activation [images, channels, height, width]."""
        return np.asarray(self.form(self.y).info.restore(values, self.y.shape))

    def refuse(self, sentence: str) -> NoReturn:
        """Raise LanguageError for the kernel."""
        fail(f"{self.name} on {self.cfg.name}: {sentence}", self.at)

    def fitting_tilings(
        self, p: Workload, points: Sequence[Tiling], otherwise: str = "take smaller blocks"
    ) -> list[Tiling]:
        """Return the tilings among `points` that fit the scratchpads. Raises LanguageError where none does.

        otherwise: advice for the error.
        """
        reasons = {d: why_not(self.cfg, p, d) for d in points}
        fitting = [d for d, reason in reasons.items() if reason is None]
        if not fitting:
            self.refuse(f"a block of {list(self.tile)} does not fit: {[*reasons.values()][-1]}; {otherwise}")
        return fitting

    def build_image(self, layers: Sequence[Layer]) -> Image:
        """Return the verified instructions of `layers`. Raises LanguageError where they do not fit."""
        try:
            if self.planner is None:
                is_one_kind = all(layer.kind == layers[0].kind for layer in layers)
                self.planner = Planner(self.cfg, FixedSchedule(self.tilings(layers[0])) if is_one_kind else None)
            return build_verified_image(self.cfg, layers, self.planner)
        except (LayerErrors, TilingError) as error:
            self.refuse(f"it does not fit: {error}")


def unpack_requantise(words: NDArray[np.uint64], zero_point: int) -> Requantise:
    """Unpack parameters of `cl.parameters`, [columns], to a requantisation."""
    bias, multiplier, shift = pack.unpack_parameters(words)
    return Requantise(bias.astype(np.int32), multiplier.astype(np.uint32), shift.astype(np.uint8), zero_point)


def build_epilogue(
    clip: tuple[int, int], table: NDArray[np.int8] | None, operand: Activation | None, rescale: dict[str, Any]
) -> Epilogue:
    """Build the epilogue of a layer: a lookup table, and a residual that adds `operand`.

    rescale: the arguments of cl.residual_add: scales, shift and clip.
    """
    residual = None
    if operand is not None:
        scales = rescale["scale_v"], rescale["scale_b"], rescale["scale_c"], rescale["shift"]
        residual = Residual(operand, *scales, *rescale["clip"])
    return Epilogue(clip, None if table is None else table.copy(), residual)


def build_verified_image(cfg: Config, layers: Sequence[Layer], planner: Planner) -> Image:
    """Return the image of one launch of `layers`, whose instructions are proved to compute them.

    Raises LayerErrors, TilingError.
    """
    outputs = {layers[-1].y.storage}
    inputs = {act.storage for layer in layers for act in layer.inputs()} - {layer.y.storage for layer in layers}
    image = build(cfg, [list(layers)], [inputs], [outputs], planner)
    (launch,) = image.launches
    run = Run(image.code(launch), list(layers), launch.layer_of, inputs, outputs)
    verify_provenance(cfg, [run], image.addresses, image.constants_address, image.constants, image.size)
    return image


def predict_cycles(cfg: Config, image: Image) -> int:
    """Predict the cycles of an image by the timing model."""
    (launch,) = image.launches
    return predict(cfg, image.code(launch).tobytes(), address=launch.address).cycles
