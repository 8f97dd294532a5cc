"""Simulate the netlist of `tiny` for a xc7z020 cell by cell: `make post-synthesis`.

It must leave the functional simulator's bytes in the RTL's cycles, and other bytes if one table is inverted. Yosys,
Verilator and the compiler take minutes each, the latter two twice.
"""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.utils import Extractor
from programs import TestProgram, random_program

import celosia
from celosia.bitstreams.postsynthesis import map_accelerator, simulation_verilog
from celosia.hw.spec.config import PRESETS
from celosia.models import demo_images, demo_model_path
from celosia.sim.device import Device, DeviceError
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl import build
from celosia.sim.rtl.rtlsim import ZYNQ_HP, MemoryModel, RtlDevice, random_stalls

TINY = PRESETS["tiny"]


@cache
def netlist() -> dict[str, Any]:
    return map_accelerator(TINY)


def simulator(module: dict[str, Any]) -> RtlDevice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_optimisation_flag", lambda cfg: "-O0")  # 28 MB of C++ for runs of seconds
        return RtlDevice(TINY, source=simulation_verilog(module))


@cache
def device() -> RtlDevice:
    return simulator(netlist())


def same(program: TestProgram, simulated: RtlDevice, memory: MemoryModel) -> bool:
    simulated.use(memory)
    return np.array_equal(program.run(FunctionalDevice(TINY)), program.run(simulated))


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    program = random_program(TINY, seed, count=30, align=1 if seed % 2 else None)
    assert same(program, device(), random_stalls(seed) if seed % 4 < 2 else ZYNQ_HP)


def beginning(model: onnx.ModelProto, convolutions: int) -> onnx.ModelProto:
    """Return the model up to the result of its first `convolutions` convolutions."""
    (name,) = [node.output[0] for node in model.graph.node if node.op_type == "Conv"][convolutions - 1 : convolutions]
    kind = "Conv"
    while kind != "DequantizeLinear":
        (node,) = (node for node in model.graph.node if name in node.input)
        (name,), kind = node.output, node.op_type
    return Extractor(onnx.shape_inference.infer_shapes(model)).extract_model(
        [model_input.name for model_input in model.graph.input], [name]
    )


@pytest.mark.parametrize("convolutions", [1, 2])
def test_the_first_layers_of_the_demo(convolutions: int) -> None:
    """The netlist has the outputs, cycles and unit counters of the RTL for an image."""
    program = celosia.compile(beginning(onnx.load(demo_model_path()), convolutions), TINY)
    (name,) = (tensor.name for tensor in program.inputs)

    def run(on: Device) -> tuple[list[bytes], dict[str, Any]]:
        result = celosia.Runtime(program, on).run({name: demo_images()[0][:1]})
        return [array.tobytes() for array in result.outputs.values()], result.report

    device().use(ZYNQ_HP)
    (outputs, report), (expected, rtl_report) = run(device()), run(RtlDevice(TINY))
    assert outputs == expected == run(FunctionalDevice(TINY))[0]
    assert [report[key] for key in ("cycles", "units")] == [rtl_report[key] for key in ("cycles", "units")]


def table_in_front_of(module: dict[str, Any], register: str) -> str:
    """Return a random LUT cell whose output is the data input of a register in this part of the design."""
    bits = {bit for name, row in module["netnames"].items() if name.startswith(register) for bit in row["bits"]}
    cells = module["cells"].values()
    taken = {
        cell["connections"]["D"][0] for cell in cells if cell["type"] == "FDRE" and cell["connections"]["Q"][0] in bits
    }
    tables = (name for name, cell in module["cells"].items() if cell["type"].startswith("LUT"))
    return random.Random(1).choice([name for name in tables if module["cells"][name]["connections"]["O"][0] in taken])


def test_a_wrong_table_is_found() -> None:
    wrong = copy.deepcopy(netlist())
    name = table_in_front_of(wrong, "vector.requantise")
    parameters = wrong["cells"][name]["parameters"]
    # Invert the whole table, because the inputs of a single bit might never occur.
    parameters["INIT"] = parameters["INIT"].translate(str.maketrans("01", "10"))
    faulty = simulator(wrong)
    for seed in range(40):
        program = random_program(TINY, seed, count=30, align=1 if seed % 2 else None)
        try:
            if not same(program, faulty, ZYNQ_HP):
                return
        except DeviceError:
            return
    pytest.fail(f"40 programs do not find that the table {name} is wrong")
