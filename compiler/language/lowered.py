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
    """A kernel on a Config, each program of which writes a block `tile` of y.

    acts: activations of arrays that change from call to call, y among them. constants: arrays that become part of
    layers. planner: decides the layers' schedules, once there are any.
    """

    acts: dict[ArrayArgument, Activation]
    constants: list[ArrayArgument]

    def __init__(self, cfg: Config, name: str, y: ArrayArgument, tile: tuple[int, ...], at: str) -> None:
        self.cfg, self.name, self.y, self.tile, self.at = cfg, name, y, tile, at
        self.planner: Planner | None = None

    def layers(self, arrays: Arrays) -> list[Layer]:
        """Return the layers of a launch, in order, with the values of the call's constants."""
        raise NotImplementedError

    def decide(self, layer: Layer) -> list[Tiling]:
        """Return the decisions that make a layer's tile the block of a program."""
        return [self._decide(d.workload) for d in lower_layer(self.cfg, layer)]  # type: ignore[arg-type]

    def _decide(self, p: Workload) -> Tiling:
        raise NotImplementedError

    def form(self, array: ArrayArgument) -> ActivationLayout:
        """Return the layout of an array as an activation of a graph. Raises NotOffloadable where it has none."""
        raise NotImplementedError

    def placed(self, array: ArrayArgument, values: NDArray[Any]) -> NDArray[np.int8]:
        """Arrange an array as its activation, [images, channels, height, width]."""
        return np.asarray(self.form(array).info.arrange(values))

    def taken(self, values: NDArray[np.int8]) -> NDArray[np.int8]:
        """Restore y from its activation."""
        return np.asarray(self.form(self.y).info.restore(values, self.y.shape))

    def refuse(self, sentence: str) -> NoReturn:
        """Raise LanguageError for the kernel."""
        fail(f"{self.name} on {self.cfg.name}: {sentence}", self.at)

    def fitting(self, p: Workload, points: Sequence[Tiling], otherwise: str = "take smaller blocks") -> list[Tiling]:
        """Return those of `points` that fit. Raises LanguageError where none does."""
        reasons = {d: why_not(self.cfg, p, d) for d in points}
        fitting = [d for d, reason in reasons.items() if reason is None]
        if not fitting:
            self.refuse(f"a block of {list(self.tile)} does not fit: {[*reasons.values()][-1]}; {otherwise}")
        return fitting

    def image(self, layers: Sequence[Layer]) -> Image:
        """Return the verified instructions of `layers`. Raises LanguageError where they do not fit."""
        try:
            if self.planner is None:
                alike = all(layer.kind == layers[0].kind for layer in layers)
                decided = FixedSchedule(self.decide(layers[0])) if alike else None
                self.planner = Planner(self.cfg, decided)
            return image_of(self.cfg, layers, self.planner)
        except (LayerErrors, TilingError) as error:
            self.refuse(f"it does not fit: {error}")


def requantise_of(words: NDArray[np.uint64], zero_point: int) -> Requantise:
    """Unpack parameters of `cl.parameters`, [columns], to a requantisation."""
    bias, multiplier, shift = pack.unpack_parameters(words)
    return Requantise(bias.astype(np.int32), multiplier.astype(np.uint32), shift.astype(np.uint8), zero_point)


def epilogue_of(
    clip: tuple[int, int], table: NDArray[np.int8] | None, operand: Activation | None, rescale: dict[str, Any]
) -> Epilogue:
    """Build the epilogue of a layer: a table, and a residual of `operand` with the arguments of cl.residual_add."""
    residual = None
    if operand is not None:
        scales = rescale["scale_v"], rescale["scale_b"], rescale["scale_c"], rescale["shift"]
        residual = Residual(operand, *scales, *rescale["clip"])
    return Epilogue(clip, None if table is None else table.copy(), residual)


def image_of(cfg: Config, layers: Sequence[Layer], planner: Planner) -> Image:
    """Return the verified instructions of a launch's layers. Raises LayerErrors, TilingError."""
    made = {layers[-1].y.storage}
    given = {act.storage for layer in layers for act in layer.inputs()} - {layer.y.storage for layer in layers}
    image = build(cfg, [list(layers)], [given], [made], planner)
    (launch,) = image.launches
    run = Run(image.code(launch), list(layers), launch.layer_of, given, made)
    verify_provenance(cfg, [run], image.addresses, image.constants_address, image.constants, image.size)
    return image


def cycles(cfg: Config, image: Image) -> int:
    """Predict the cycles of an image by the timing model."""
    (launch,) = image.launches
    return predict(cfg, image.code(launch).tobytes(), address=launch.address).cycles
