"""Models exported as C give the bytes of `celosia run` on each processor, and errors as codes.

The C allocates no memory and needs no unexpected symbols.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from driver_models import floats, quantised, shifted
from exported import IDENTITY, SOURCES, CForm, CImage, CState, Misbehaving, exported, mixed, runtime
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import celosia
from celosia.compiler.program import Pack, TensorInfo, Unpack
from celosia.compiler.program.model import MATRICES, FormInfo, matrix_counts, pack_activation, unpack_activation
from celosia.compiler.program.safe_files import OutputError
from celosia.driver.choices import EXPORT_TARGETS
from celosia.driver.cli import app
from celosia.driver.export import emulate
from celosia.driver.export.bridge import Bridge, FunctionalRegisters, RtlRegisters, empty_outputs
from celosia.driver.export.c_project import RUNTIME, Exported, export_program, write_project
from celosia.driver.export.forms import form_of
from celosia.driver.export.memory_map import NotExportable, assign_locations
from celosia.driver.export.objects import undefined_symbols
from celosia.driver.export.targets import find_export_target
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.regs import CONTROL_ABORT, ERROR_TEXT, STATUS_DONE, STATUS_ERROR_SHIFT, STATUS_STUCK, Error

RUNTIME_LINES, RUNTIME_BYTES = 1000, 32 << 10


def require(target: str) -> None:
    """Skip the test if this machine cannot run C for `target`."""
    lack = emulate.missing_tools(find_export_target(target))
    if lack is not None:
        pytest.skip(lack)


def inputs_of(made: Exported, rng: np.random.Generator) -> list[Any]:
    return [rng.normal(size=each.shape).astype(each.dtype) for each in made.model.program.inputs]


# Bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", [each if each in ("x86_64", "armv7-linux") else pytest.param(each, marks=pytest.mark.thorough)
               for each in EXPORT_TARGETS],
)  # fmt: skip
def test_two_models_in_one_program_return_the_bytes_of_celosia_run(target: str, tmp_path: Path) -> None:
    """Two models in one program have separate states: run in turn, each gives its own bytes."""
    require(target)
    sources = {"first": mixed(), "second": shifted()}
    made = [exported(source, target, name) for name, source in sources.items()]
    here = [celosia.compile(source, "tiny", check=False) for source in sources.values()]
    made.append(export_program(made[0].model.program, made[0].target, "third"))  # with the kernels of the first
    bridge = Bridge(emulate.build_bridge_program(made, tmp_path / "c"), FunctionalRegisters(PRESETS["tiny"]))
    rng = np.random.default_rng(0)
    assert bridge.code == 0
    for number in (0, 1, 2, 0):
        inputs = inputs_of(made[number], rng)
        program = here[number % 2]
        wanted = celosia.Runtime(program, "functional").run(
            {tensor.name: array for tensor, array in zip(program.inputs, inputs)}
        )
        found = empty_outputs(wanted.outputs)
        assert bridge.run(inputs, found, number + 1) == 0
        for array, (name, each) in zip(found, wanted.outputs.items()):
            assert array.tobytes() == each.tobytes(), name
    assert bridge.close() == 0
    assert len(made[0].model.program.launches) == 2 and made[0].model.program.kernels
    assert {pack.value for pack in here[1].launches[0].pack} & {*here[1].constants}


@dataclass(frozen=True)
class Built:
    """An exported model as a program on a bridge, its inputs, and the outputs of `celosia run`."""

    exported: Exported
    command: list[str]
    inputs: list[Any]
    wanted: dict[str, Any]

    def differs(self, bridge: Bridge) -> bool:
        """Return whether a run returns an error or other bytes."""
        outputs = empty_outputs(self.wanted)
        code = bridge.run(self.inputs, outputs)
        return bool(code) or [array.tobytes() for array in outputs] != [
            array.tobytes() for array in self.wanted.values()
        ]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Built:
    require("x86_64")
    made, program = exported(quantised(), "x86_64", "net"), celosia.compile(quantised(), "tiny", check=False)
    inputs = inputs_of(made, np.random.default_rng(1))
    wanted = celosia.Runtime(program, "functional").run({program.inputs[0].name: inputs[0]}).outputs
    return Built(made, emulate.build_bridge_program([made], tmp_path_factory.mktemp("net")), inputs, wanted)


@pytest.mark.rtl
def test_on_the_rtl(net: Built) -> None:
    """The program runs on registers and memory of the Verilated accelerator, with interrupt, lease and counters."""
    bridge = Bridge(net.command, RtlRegisters(PRESETS["tiny"]))
    assert bridge.code == 0 and not net.differs(bridge) and bridge.close() == 0


def test_faults_are_seen(net: Built, tmp_path: Path) -> None:
    """The comparison finds planted faults: memory not flushed or not invalidated, and a wrong padding."""
    for spoilt in ("", "write", "read"):
        registers = FunctionalRegisters(PRESETS["tiny"])
        if spoilt:
            setattr(registers.device, spoilt, lambda _, size: np.zeros(size if isinstance(size, int) else 0, np.uint8))
        bridge = Bridge(net.command, registers)
        assert net.differs(bridge) == bool(spoilt), spoilt
        bridge.kill()
    text = net.exported.files["net.c"]
    spoilt_text = re.sub(rb"(pack_0_0 = .*?\{\d+, \d+\}, \{\d+, \d+\}, \{)(\d+)", rb"\g<1>1\g<2>", text)
    assert spoilt_text != text
    command = emulate.build_bridge_program(
        [replace(net.exported, files=net.exported.files | {"net.c": spoilt_text})], tmp_path
    )
    bridge = Bridge(command, FunctionalRegisters(PRESETS["tiny"]))
    assert net.differs(bridge)
    bridge.kill()


# Tensors ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    require("x86_64")
    return runtime(tmp_path_factory.mktemp("runtime"))


def windows(rng: np.random.Generator) -> tuple[FormInfo, tuple[int, ...]]:
    """Draw a form of windows, and the tensor's shape."""
    fold = str(rng.choice(["x", "xy"]))
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(4, 8)), int(rng.integers(4, 8)))
    shape = shape if rng.random() < 0.7 else (*shape[:2], shape[3])
    flat = len(shape) == 3
    kernel, strides, dilations = ((int(a), int(b)) for a, b in rng.integers(1, 3, (3, 2)))
    pads = tuple(map(int, rng.integers(0, 3, 4)))
    if flat:
        kernel, strides, pads = (1, kernel[1]), (1, strides[1]), (0, pads[1], 0, pads[3])
    form = FormInfo((1, 1, 1, 1), fold, kernel, strides, dilations, pads, int(rng.integers(-128, 128)))
    return replace(form, dims=form.arrange(np.zeros(shape, np.int8)).shape), shape


def matrices(rng: np.random.Generator) -> tuple[FormInfo, tuple[int, ...]]:
    """Draw a form of matrices, which may be larger than the tensor's, and the tensor's shape."""
    fold = str(rng.choice([*MATRICES]))
    shape = tuple(map(int, rng.integers(1, 6, 3)))
    count, columns, rows = matrix_counts(fold, shape)
    dims = 1, count * (columns + int(rng.integers(0, 3))), 1, rows + int(rng.integers(0, 3))
    pad = int(rng.integers(-128, 128))
    return FormInfo(dims, fold, pad=pad, inverted=bool(rng.random() < 0.5)), shape


def plain(rng: np.random.Generator) -> tuple[FormInfo, tuple[int, ...]]:
    shape = tuple(map(int, rng.integers(1, 5, 4)))
    return FormInfo((shape[0], shape[1], shape[2], shape[3])), (shape[0] * shape[1], shape[2] * shape[3])


@pytest.mark.parametrize("make", [plain, windows, matrices])
def test_tensors_are_stored_as_by_python(lib: ctypes.CDLL, make: Any) -> None:
    rng = np.random.default_rng(7)
    for number in range(40):
        cfg = replace(PRESETS["tiny"], batch=int(rng.choice([1, 2, 4])))
        form, shape = make(rng)
        info = TensorInfo("t", str(rng.choice(["int8", "uint8"])), shape)
        array = rng.integers(0, 256, shape).astype(np.uint8)
        groups = -(-form.dims[1] // cfg.group) + int(rng.integers(0, 2))
        signed = (array ^ 0x80 if info.dtype == "uint8" else array).view(np.int8)
        wanted = pack_activation(cfg, form.arrange(signed), groups)
        memory = rng.integers(0, 256, wanted.nbytes + 100).astype(np.uint8)
        around = memory.copy()
        device = Misbehaving().device(memory)
        state = CState(ctypes.addressof(device))
        c_form = CForm.of(form_of(cfg, Pack("t", form, 0, groups), info))
        lib.celosia_pack(ctypes.byref(state), ctypes.byref(c_form), 50, array.ctypes.data_as(ctypes.c_void_p))
        around[50 : 50 + wanted.nbytes] = wanted
        assert np.array_equal(memory, around), (number, form, shape)
        if make is windows:
            continue
        offset = int(rng.integers(0, 2))
        stored = rng.integers(0, 256, wanted.nbytes // groups * (groups + offset)).astype(np.uint8)
        values = unpack_activation(cfg, stored, form.dims, groups + offset, offset)
        back = form.restore(values, shape)
        device = (misbehaving := Misbehaving()).device(stored)
        state.device = ctypes.addressof(device)
        made = np.zeros(array.nbytes + 8, np.uint8)
        c_form = CForm.of(form_of(cfg, Unpack("t", form, 0, groups + offset, offset), info))
        lib.celosia_unpack(ctypes.byref(state), ctypes.byref(c_form), 0, made.ctypes.data_as(ctypes.c_void_p))
        told = back if info.dtype == "int8" else back.view(np.uint8) ^ 0x80
        assert made.tobytes() == told.tobytes() + bytes(8), (number, form, shape)
        assert misbehaving.log == []


# Runs of the hardware --------------------------------------------------------------------------------------------


class Launches:
    """Calls celosia_open and celosia_launch on registers."""

    def __init__(self, lib: ctypes.CDLL, registers: Misbehaving, **fields: Any) -> None:
        self.lib, self.registers = lib, registers
        self.memory = np.zeros(8192, np.uint8)
        self.device = registers.device(self.memory, **fields)
        self.state, self.image = CState(), CImage(IDENTITY, SOURCES, 8192, 64, 4, b"code")

    def open(self) -> int:
        return int(self.lib.celosia_open(*map(ctypes.byref, (self.state, self.device, self.image))))

    def launch(self, count: int = 3) -> int:
        return int(self.lib.celosia_launch(ctypes.byref(self.state), ctypes.byref(self.image), 128, count))

    def text(self, code: int) -> str:
        return str(self.lib.celosia_text(code).decode())


@pytest.fixture
def launches(lib: ctypes.CDLL) -> Iterator[Launches]:
    made = Launches(lib, Misbehaving())
    assert made.open() == 0 and made.memory[64:68].tobytes() == b"code" and made.registers.flushed == [4]
    yield made


def test_a_launch_as_the_python_driver_makes_it(launches: Launches) -> None:
    registers = launches.registers
    registers.values |= {"cycles_lo": 7, "cycles_hi": 1}
    assert launches.launch() == 0
    assert launches.state.cycles == 7 + (1 << 32)
    written = dict(registers.log)
    assert written["dma_base_lo"] == 4096 and written["dma_size"] == 8192 and written["instr_count"] == 3
    assert written["watchdog"] and written["lease"] and not written["irq_enable"]
    names = [name for name, _ in registers.log]
    assert names.count("control") == 1 and names.index("control") > names.index("watchdog")
    assert "lease" in names[names.index("control") :], "a host that waits renews its lease"
    assert launches.lib.celosia_close(ctypes.byref(launches.state)) == 0


@pytest.mark.parametrize("error", [error for error in Error if error])
def test_errors_of_the_hardware_are_codes(launches: Launches, error: Error) -> None:
    launches.registers.ends = STATUS_DONE | error << STATUS_ERROR_SHIFT
    launches.registers.values["error_index"] = 2
    code = launches.launch()
    assert code == error and launches.state.instruction == 2
    assert launches.text(code) == ERROR_TEXT[error]


def test_a_run_without_end_is_aborted(launches: Launches) -> None:
    launches.registers.after = 1 << 40
    code = launches.launch()
    assert launches.text(code) == "the run has not ended in time"
    assert launches.registers.log[-1] == ("control", CONTROL_ABORT)
    launches.registers.after = 2
    assert launches.launch() == 0


def test_without_a_clock_looks_are_counted(lib: ctypes.CDLL) -> None:
    made = Launches(lib, Misbehaving(after=1 << 40), now=type(Misbehaving().device(np.zeros(1, np.uint8)).now)())
    made.registers.aborts_end = True
    made.open()
    code = lib.celosia_close(ctypes.byref(made.state))
    assert code == 0
    made = Launches(lib, registers := Misbehaving(after=50), now=made.device.now)
    assert made.open() == 0 and made.launch() == 0 and registers.left == 0


def test_memory_that_does_not_answer(launches: Launches) -> None:
    launches.registers.values["status"] = STATUS_DONE | STATUS_STUCK
    assert "restart the board" in launches.text(launches.launch())
    assert not any(name == "control" for name, _ in launches.registers.log)
    assert "restart the board" in launches.text(launches.open())


def test_another_process_at_the_registers(launches: Launches) -> None:
    values = launches.registers.values
    for spoil in ({"runs": 100}, {"instr_addr": 4}):
        launches.registers.on_start = lambda spoil=spoil: values.update(spoil)
        assert "another process has used" in launches.text(launches.launch())
    launches.registers.in_use = 1
    assert "another process holds" in launches.text(launches.launch())


@pytest.mark.parametrize(
    "register, value, said",
    [
        ("magic", 0, "no Celosia accelerator"),
        ("identity", 1, "another Config"),
        ("sources", 1, "other hardware sources"),
    ],
)
def test_the_wrong_hardware(launches: Launches, register: str, value: int, said: str) -> None:
    launches.registers.values[register] = value
    assert said in launches.text(launches.launch()) and said in launches.text(launches.open())


def test_the_wrong_memory(lib: ctypes.CDLL) -> None:
    assert "multiple of 4096" in (made := Launches(lib, Misbehaving(), base=100)).text(made.open())
    assert "less memory" in (made := Launches(lib, Misbehaving(), size=100)).text(made.open())


# What the C is ---------------------------------------------------------------------------------------------------


def test_sizes_are_compared_and_nothing_is_allocated(net: Built, tmp_path: Path) -> None:
    """The library of the Makefile is small and calls no malloc; its functions refuse foreign states and wrong sizes."""
    for made in (net.exported, exported(floats(), "x86_64", "sum")):
        write_project(made, tmp_path)
    (tmp_path / "wrong.c").write_text(WRONG)
    (tmp_path / "Makefile").write_text((tmp_path / "Makefile").read_text().replace("-Wextra", "-Wextra -Werror"))
    for what in ("all", "wrong"):
        command = ["make", what, "LDLIBS=libcelosia_models.a -lm", "CC=cc"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert subprocess.run([tmp_path / "wrong"], check=False).returncode == 0
    strict = "CC=cc -fsanitize=alignment -fno-sanitize-recover=alignment"
    done = subprocess.run(["make", "-B", "wrong", command[2], strict], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "wrong"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for array, name in ((np.arange(6), "a"), (np.arange(6) * 3, "b")):
        array.astype(np.float32).tofile(tmp_path / name)
    subprocess.run(["./sum", "a", "b", "y"], cwd=tmp_path, check=True)
    assert np.fromfile(tmp_path / "y", np.float32).tolist() == [12 * k for k in range(6)]
    objects = [path for path in tmp_path.glob("**/*.o") if path.name != "device_linux.o"]
    wanted = set().union(*(undefined_symbols(path.read_bytes()) for path in objects))
    assert {"memcpy", "memset"} <= wanted and not wanted & {"malloc", "calloc", "realloc", "free"}
    lines = sum(len(path.read_text().splitlines()) for path in RUNTIME.iterdir())
    assert lines <= RUNTIME_LINES
    sizes = subprocess.run(
        ["size", "celosia.o", "device_linux.o", "device_mapped.o"], cwd=tmp_path, capture_output=True
    )
    rows = [row.split() for row in sizes.stdout.decode().splitlines()[1:]]
    assert len(rows) == 3 and sum(int(row[0]) for row in rows) <= RUNTIME_BYTES
    assert all(row[1] == row[2] == "0" for row in rows), "state outside of the caller's"


def test_outputs_that_no_step_makes(tmp_path: Path) -> None:
    """Outputs may be constants, folded constants, an input, or a tensor without elements."""
    constant = np.arange(6, dtype=np.float32).reshape(2, 3)
    nodes = [
        helper.make_node("Add", ["held", "held"], ["folded"]),
        helper.make_node("Mul", ["a", "folded"], ["made"]),
        helper.make_node("Identity", ["a"], ["given"]),
        helper.make_node("Slice", ["a", "zero", "zero"], ["none"]),
    ]
    names = "held", "folded", "made", "given", "none"
    shapes = {name: [2, 3] for name in ("a", *names)} | {"none": [0, 3]}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    constants = [numpy_helper.from_array(constant, "held"), numpy_helper.from_array(np.zeros(1, np.int64), "zero")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    require("x86_64")
    write_project(exported(model, "x86_64", "consts"), tmp_path)
    a = np.full((2, 3), 7, np.float32)
    a.tofile(tmp_path / "a")
    for command in (["make", "CC=cc"], ["./consts", "a", *names]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    wanted = {"held": constant, "folded": constant * 2, "made": constant * 14, "given": a, "none": a[:0]}
    for name, array in wanted.items():
        assert (tmp_path / name).read_bytes() == array.tobytes(), name


NAMES = (
    "image",
    "steps",
    "in0",
    "code",
    "main",
    "class",
    "int8_t",
    "celosia",
    "device_linux",
    "é",
    "model_celosia",
    "exit",
    "NULL",
    "_x",
    "all",
)
"""Of models, also such as C, C++ or the runtime have for something else."""


def test_names_that_c_has_for_something_else(tmp_path: Path) -> None:
    """Names that are reserved in C or C++ are changed so that all files compile; tensors may have any name."""
    model = floats()
    renamed = {"a": "bytes", "b": "class", "a/sum": "inputs"}
    for value in (*model.graph.input, *model.graph.output):
        value.name = renamed[value.name]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    program = exported(model, "x86_64", "sum").model.program
    target = find_export_target("x86_64")
    made = [export_program(replace(program, name=name), target) for name in NAMES]
    made += [export_program(program, target, name) for name in ("Total", "TOTAL", "total")]
    assert len({each.model.name for each in made}) == len(made)
    for each in made:
        write_project(each, tmp_path)
    headers = "#include <cstdio>\n#include <cstdlib>\n#include <cstring>\n"
    headers += "".join(f'#include "{(name := each.model.name)}.h"\nextern {name} an_{name};\n' for each in made)
    (tmp_path / "all.cc").write_text(headers)
    flags = "FLAGS=-Werror", "CFLAGS=-O0 -std=c11 -Wall -Wextra"
    for command in (["make", "-j2", *flags], ["c++", "-fsyntax-only", "-Wall", "-Werror", "all.cc"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


WRONG = """
#include "sum.h"
#include "net.h"
#include "celosia_mapped.h"
static sum model;
static net other;
static celosia_device device;
static uint32_t registers[16];
static _Alignas(4096) uint8_t memory[NET_DEVICE_BYTES];
int main(void) {
    float a[6] = {0}, b[6] = {0}, y[6];
    const void *inputs[] = {a, b}, *none[] = {a, 0};
    void *outputs[] = {y}, *nowhere[] = {0};
    size_t in[] = SUM_INPUT_BYTES, out[] = SUM_OUTPUT_BYTES, wrong[] = {24, 23}, large[] = {25};
    if (sum_run(&model, a, b, y) != CELOSIA_NOT_OPEN) return 1;
    if (sum_open((sum *)((char *)&model + 8), &device) != CELOSIA_UNALIGNED_INSTANCE) return 2;
    if (sum_run((sum *)((char *)&model + 8), a, b, y) != CELOSIA_UNALIGNED_INSTANCE) return 12;
    if (sum_close((sum *)((char *)&model + 8)) != CELOSIA_UNALIGNED_INSTANCE) return 13;
    if (sum_open(&model, &device)) return 3;
    if (sum_run_sized(&model, inputs, wrong, outputs, out) != CELOSIA_INPUT_SIZE) return 4;
    if (sum_run_sized(&model, inputs, in, outputs, large) != CELOSIA_OUTPUT_SIZE) return 5;
    if (sum_run_sized(&model, none, in, outputs, out) != CELOSIA_NO_TENSOR) return 6;
    if (sum_run_sized(&model, inputs, in, nowhere, out) != CELOSIA_NO_TENSOR) return 7;
    if (sum_run_sized(&model, inputs, in, outputs, out)) return 8;
    if (net_open(&other, &device) != CELOSIA_LITTLE_MEMORY) return 9;
    device = celosia_mapped((uintptr_t)registers, (uintptr_t)memory, sizeof memory);
    device.write(device.context, 8, 7);
    if (registers[2] != 7 || device.read(device.context, 8) != 7) return 10;
    if (net_open(&other, &device) != CELOSIA_NO_ACCELERATOR) return 11;
    return sum_close(&model);
}
"""


def test_undefined_symbols_of_each_kind_of_object() -> None:
    """A planted function is found among the undefined symbols of ELF with 32 and 64 bits, and of WebAssembly."""
    for target in ("riscv32-none", "x86_64", "wasm32"):
        with pytest.raises(NotExportable) if target != "x86_64" else nothing():
            made = exported(one_operator("Sinh"), target, "model")
            assert made.functions == ("sinhf",)
    assert exported(one_operator("Relu"), "riscv32-none", "model").functions == (), "an extreme without floats"
    with pytest.raises(ValueError, match="neither ELF nor WebAssembly"):
        undefined_symbols(b"no object")


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def one_operator(op: str, dims: tuple[int | str, ...] = (2, 3), kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Return a model of one operator, `the node`, from `a` to `y`."""
    values = [
        helper.make_tensor_value_info("a", TensorProto.FLOAT, dims),
        helper.make_tensor_value_info("y", kind, None),
    ]
    graph = helper.make_graph([helper.make_node(op, ["a"], ["y"], name="the node")], "one", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


# The command -----------------------------------------------------------------------------------------------------


def command(*args: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, args), "--no-check"])
    assert done.exit_code == code, f"{done.exit_code}: {done.output}"
    return " ".join(done.output.split())


def test_the_command(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    said = command(models / "quantised.onnx", "-o", folder, "--config", "tiny")
    assert "quantised.h for x86_64; 1 launches" in said and "make -C" in said
    assert {"quantised.h", "quantised.c", "celosia.c", "Makefile", "CMakeLists.txt"} <= {
        p.name for p in folder.iterdir()
    }
    options = "--config", "tiny", "--records", "none", "--rounding", "correct", "--place", "*=cpu"
    assert "; 0 launches" in command(models / "quantised.onnx", "-o", tmp_path / "cpu", *options)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    said = command(models / "floats.onnx", "-o", folder, "--target", "wasm32", code=1)
    assert "holds models for x86_64, not for wasm32; give another folder" in said
    assert "such as model_2nd" in command(models / "floats.onnx", "-o", folder, "--name", "2nd", code=1)
    assert "'x86' is not one of" in command(models / "floats.onnx", "-o", folder, "--target", "x86", code=2)
    assert "there is no folder" in command(models / "floats.onnx", "-o", tmp_path / "no" / "where", code=1)
    assert "it is no folder" in command(models / "floats.onnx", "-o", models / "x.npy", code=1)
    onnx.save(one_operator("NonZero", kind=TensorProto.INT64), tmp_path / "host.onnx")
    said = command(tmp_path / "host.onnx", "-o", folder, code=1)
    assert "NonZero (the node) cannot be exported: numpy computes it" in said and "deploy" in said
    onnx.save(one_operator("Sinh"), tmp_path / "sinh.onnx")
    said = command(tmp_path / "sinh.onnx", "-o", tmp_path / "bare", "--target", "armv7-none", code=1)
    assert "Sinh (the node) cannot be exported for armv7-none: it calls sinhf" in said
    assert "size is not given" in command(models / "dynamic.onnx", "-o", folder, code=1)
    celosia.compile(floats(), "tiny").save(tmp_path / "floats.celosia")
    assert "give the ONNX model" in command(tmp_path / "floats.celosia", "-o", folder, code=1)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert not (tmp_path / "bare").exists()


def test_cmake_builds_with_ziglang(tmp_path: Path) -> None:
    """CMake builds with ziglang for a processor whose gcc options `zig cc` refuses."""
    require("armv7-linux")
    if shutil.which("cmake") is None:
        pytest.skip("could not find 'cmake'")
    write_project(exported(floats(), "armv7-linux", "sum"), tmp_path)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for command in ("-B b -S . -DCMAKE_TOOLCHAIN_FILE=ziglang.cmake", "--build b --target celosia_models"):
        done = subprocess.run(
            ["cmake", *command.split()], cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PATH": path}
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "b" / "libcelosia_models.a").read_bytes().startswith(b"!<arch>")


def test_files_of_others_stay_and_are_not_built(tmp_path: Path) -> None:
    """Export never overwrites files of others and never builds them; exporting a model again is allowed."""
    made = exported(floats(), "x86_64", "sum")
    for number, other in enumerate(("Makefile", "CMakeLists.txt", "celosia.c", "sum.h", "sum_kernels/mine.o")):
        path = tmp_path / str(number) / other
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        with pytest.raises(OutputError, match=rf"{Path(other).parts[0]}.*celosia export"):
            write_project(made, tmp_path / str(number))
        assert [path] == [each for each in (tmp_path / str(number)).rglob("*") if each.is_file()]
    folder = tmp_path / "own"
    write_project(made, folder)
    write_project(made, folder)
    others = "sensor_data.c", "net.c", "mine.o", "net_kernels/mine.o"
    (folder / "net_kernels").mkdir()
    for other in others:
        (folder / other).write_text("#error no model's")
    with pytest.raises(OutputError, match=r"net\.c is there"):
        write_project(exported(floats(), "x86_64", "net"), folder)
    cmakes = [["cmake", "-B", "b", "-S", "."], ["cmake", "--build", "b"]] if shutil.which("cmake") else []
    for command in (["make", "all"], *cmakes, ["make", "clean"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert all((folder / other).read_text() == "#error no model's" for other in others)


def test_tensors_that_c_has_not() -> None:
    program = celosia.compile(floats(), "tiny")
    for changed, said in (({"dtype": "object"}, "C has no object"), ({"shape": (-1, 3)}, "only known when it runs")):
        other = replace(program.inputs[0], **changed)  # type: ignore[arg-type]
        with pytest.raises(NotExportable, match=said):
            assign_locations(replace(program, inputs=(other, *program.inputs[1:])))
