"""Run compiled models on the whole accelerator in cocotb, with the usual Program and Runtime.

Outputs must be those of onnxruntime, and memory must hold the bytes that the functional device leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import bench
import cocotb
import numpy as np
import onnx
import pytest
from cocotb.task import bridge
from host import CocotbDevice, Host
from numpy.typing import NDArray

from celosia.compiler.program import Program
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import PRESETS
from celosia.sim.functional.fsim import FunctionalDevice

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "cosim")]
from configs import CONFIGS
from small_models import Builder
from thorough import some

Array = NDArray[Any]
VARIED = ["4x4", "8x8-taps3-ports2"]
"""Names of Configs that other tests simulate, too; `make test` simulates the second one."""
MEMORY = 1 << 20


# Models --------------------------------------------------------------------------------------------------


def residual() -> onnx.ModelProto:
    """Return a model with a convolution, a residual block, a pooling, and a fully connected layer."""
    b = Builder("qdq", np.int8, seed=1)
    x = b.conv(b.input([2, 3, 6, 6]), 8, (3, 3), pads=(1, 1, 1, 1), activation="Relu")
    x = b.binary("Add", b.conv(x, 8, (3, 3), pads=(1, 1, 1, 1)), x)
    x = b.max_pool(x, (3, 3), (2, 2), (1, 1, 1, 1))
    b.output(b.matmul(b.flatten(b.global_average(x)), 10))
    return b.model()


def depthwise() -> onnx.ModelProto:
    """Return an unsigned model in operator form.

    It has a strided depthwise convolution, a table, a Concat, and a branch that is an output.
    """
    b = Builder("qoperator", np.uint8, seed=2)
    x = b.conv(b.input([1, 5, 6, 5]), 16, (1, 1))
    y = b.unary(b.conv(x, 16, (3, 3), (2, 2), (1, 1, 1, 1), group=16), "Sigmoid")
    z = b.concat([y, b.max_pool(x, (2, 2), (2, 2), (0, 0, 0, 1))], equal=False)
    b.output(b.conv(z, 6, (1, 1), per_channel=False))
    b.output(b.global_average(y), real=True)
    return b.model()


def demo() -> onnx.ModelProto:
    """Return the trained ResNet-8 with all layers, for images of 8 by 8 pixels."""
    from celosia.models import demo_model_path

    model = onnx.load(demo_model_path())
    for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_value = 8
    del model.graph.value_info[:]
    return model


def expected(model: onnx.ModelProto, feed: dict[str, Array]) -> dict[str, Array]:
    from oracle import opened

    session = opened(model, int8=True)
    names = [output.name for output in model.graph.output]
    return dict(zip(names, session.run(names, feed), strict=True))


def simulate(make: Callable[[], onnx.ModelProto], config: str, folder: Path, **params: Any) -> None:
    import celosia
    from celosia.hw.top import Accelerator

    model, cfg = make(), (CONFIGS | PRESETS)[config]
    rng = np.random.default_rng(1)
    sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
    feed = {name: rng.random(size, np.float32) * 4 for name, size in sizes.items()}
    celosia.compile(model, cfg).save(folder / "program")
    np.savez(folder / "inputs.npz", **feed)
    np.savez(folder / "expected.npz", **expected(model, feed))
    bench.run(partial(Accelerator, cfg), __file__, cfg=cfg, params={"folder": str(folder), **params})


OTHERS = ["8x4-batch2-taps5", "batch2", "2x8x4-bus16-ports2", "8x8-bus16", "4x8", "8x4"]
SMALL_MODELS = [*product([*VARIED, *OTHERS], (residual, depthwise))]
QUICK = [(VARIED[1], depthwise)]
"""The model and Config of `make test`; test_board.py runs the other model."""


@pytest.mark.rtl
@pytest.mark.parametrize(("config", "make"), some(SMALL_MODELS, QUICK))
def test_small_model(config: str, make: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    simulate(make, config, tmp_path, pauses=[0, 0.5])


@pytest.mark.rtl
@pytest.mark.thorough  # tests/cosim/test_models.py has it on the RTL, faster
# `python -m benchmarks.activity` reads the waveform of `tiny`
@pytest.mark.parametrize("config", [VARIED[-1], "2x8x4-bus16-ports2", "8x8-bus16", "tiny"])
def test_demo_model(config: str, tmp_path: Path) -> None:
    simulate(demo, config, tmp_path, pauses=[0.1])


@pytest.mark.rtl
def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"\d+ bytes differ in memory, the first at 0x"):
        simulate(depthwise, VARIED[1], tmp_path, pauses=[0], fault=True)


# The simulation ------------------------------------------------------------------------------------------


@cocotb.test()
async def equals_onnxruntime(dut: bench.Dut) -> None:
    params = bench.params()
    folder = Path(params["folder"])
    program = Program.load(folder / "program")
    inputs, expected_outputs = (dict(np.load(folder / f"{name}.npz")) for name in ("inputs", "expected"))
    functional = FunctionalDevice(program.config)
    Runtime(program, functional).run(inputs)
    host = Host(dut, MEMORY)
    await host.begin()
    device = CocotbDevice(host)
    for pause in params["pauses"]:
        host.pause(pause)
        runtime = Runtime(program, device)
        if params.get("fault"):
            start = program.image_address
            device.write(start, device.read(start, 1) ^ 1)
        result = await bridge(runtime.run)(inputs)
        different = np.flatnonzero(device.read(0, device.size) != functional.read(0, device.size))
        assert not len(different), f"{len(different)} bytes differ in memory, the first at {different[0]:#x}"
        for name, array in expected_outputs.items():
            assert np.array_equal(result.outputs[name], array), name
