"""GEMM adds up the pixels of images that do not fit scratchpad vin, for their means (`Layer.sums_on_gemm`)."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from agreement import CONFIGS, check
from configs import CONFIGS as SMALL_CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from simulators import rtl_device
from small_models import Builder
from thorough import tries

import celosia
from celosia.compiler.compile import network_of
from celosia.compiler.layer import Activation, Storage, StridedView
from celosia.compiler.tensorize.layer_lowering import pixels_of_part
from celosia.compiler.tune.layer_trial import LayerJob, Status, measure, pickled
from celosia.hw.boards.memory import ZYNQ_HP
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.hw.spec.scratchpads import depths
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.timing import predict

FURTHER = "4x8", "8x4-batch2-taps5", "2x8x4-bus16-ports2", "8x8-bus4-weights4"
ALL_CONFIGS = CONFIGS | {name: SMALL_CONFIGS[name] for name in FURTHER}


def mean_model(shape: tuple[int, ...], kind: type = np.int8, form: str = "qdq") -> Builder:
    b = Builder(form, kind, 1, True, 17)
    b.output(b.global_average(b.input(list(shape))))
    return b


@pytest.mark.parametrize("name", ALL_CONFIGS)
@pytest.mark.parametrize("shape", [(1, 20, 24, 30), (2, 16, 40, 18)])
@pytest.mark.parametrize(("kind", "form"), [(np.int8, "qdq"), (np.uint8, "operators")])
def test_gemm_adds_up_large_images(name: str, shape: tuple[int, ...], kind: type, form: str) -> None:
    if name == "pynq":
        shape = (*shape[:2], 3 * shape[2], shape[3])
    (launch,) = check(mean_model(shape, kind, form), FunctionalDevice(ALL_CONFIGS[name])).launches
    (layer,) = launch.layers
    assert layer.what.startswith("sum pool")


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_squeeze_and_excitation_of_large_images(name: str) -> None:
    b = Builder("qdq", np.int8, 2, True, 17)
    b.output(b.conv(b.squeeze_excite(b.conv(b.input([1, 8, 50, 72]), 16, (1, 1)), 8), 8, (1, 1)))
    assert len(check(b, FunctionalDevice(ALL_CONFIGS[name])).launches) == 1


@pytest.mark.rtl
@pytest.mark.parametrize("name", ["8x4-batch2-taps5", "8x8-bus4-weights4"])
def test_the_hardware_adds_up_large_images(name: str) -> None:
    with closing(rtl_device(SMALL_CONFIGS[name])) as device:
        assert len(check(mean_model((2, 12, 24, 30)), device).launches) == 1


def test_a_large_image_at_full_rate() -> None:
    """LOAD is busy all the time: it reads 16 bytes of each pixel in two beats."""
    program = celosia.compile(mean_model((1, 32, 112, 112)).model(), "pynq")
    (launch,) = program.launches
    start = launch.address - program.image_address
    code = program.image[start : start + launch.count * instruction_bytes(program.config)]
    assert predict(program.config, code.tobytes(), ZYNQ_HP, launch.address).cycles < 1.1 * 2 * 2 * 112 * 112


def test_images_that_cannot_be_cut_stay_on_the_cpu() -> None:
    """An image with an odd number of pixels stays on the CPU: blocks of wide arrays hold two parts of equal size."""
    program = check(mean_model((1, 16, 97, 97)), FunctionalDevice(PRESETS["wide"]))
    assert not program.launches


@settings(max_examples=tries(100), deadline=None)
@given(st.sampled_from(sorted(ALL_CONFIGS)), st.integers(1, 300), st.integers(1, 300))
def test_parts_are_equal_and_fit(name: str, height: int, width: int) -> None:
    cfg: Config = ALL_CONFIGS[name]
    x, y = (Activation.alone(cfg, "", 1, 8, *size) for size in ((height, width), (1, 1)))
    part = pixels_of_part(cfg, x, y)
    if part is not None:
        assert height * width % (part * cfg.inp_pieces) == 0 and 2 * part <= depths(cfg)["inp"]


def test_parts_of_views_and_of_regions_of_several_images_are_none() -> None:
    cfg = PRESETS["pynq"]
    x, y = (Activation.alone(cfg, "", 2, 16, *size) for size in ((64, 64), (1, 1)))
    assert pixels_of_part(cfg, x, y) is not None
    view = x.region((2, 16, 32, 32), 0, StridedView(64, 64))
    region = Activation("", 2, 16, 64, 64, Storage("", 2), 1)
    assert pixels_of_part(cfg, view, y) is pixels_of_part(cfg, region, y) is None


@pytest.mark.parametrize("name", ["pynq", "4x16"])
def test_the_tuner_measures_sums_on_gemm(name: str) -> None:
    size = 64 if name == "pynq" else 32
    network = network_of(mean_model((1, 16, size, size)).model(), ALL_CONFIGS[name], records="none")
    (occurrence,) = network.occurrences()
    assert "by one entry of weights" in occurrence.workload
    result = measure(LayerJob(network.cfg, pickled(occurrence.layer), occurrence.usual))
    assert result.status == Status.OK, result.detail
