"""The self-check of `compile` accepts correct Programs, and finds each planted fault and names its layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray
from programs import random_program
from small_models import Builder, models
from thorough import paired, tries

import celosia
from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.select import LayerAssignment, convolution, reductions
from celosia.compiler.launch.image import Constants
from celosia.compiler.layer import Layer
from celosia.compiler.program import Program
from celosia.compiler.selfcheck import check_launches, shared_kernels
from celosia.compiler.selfcheck.check_launches import Checked, CheckFailed, SelfCheckError, self_check
from celosia.compiler.vthread.verify.meaning import layers_of
from celosia.driver.cli.errors import FAULT, UNCHECKED, exit_code_and_message
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import Buffer, Destination, Opcode, formats, instruction_bytes, opcode_of
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.functional import reference
from celosia.sim.functional.decode import decode
from celosia.sim.functional.reference import State

from .blocks import CONFIGS as BLOCK_CONFIGS
from .blocks import BlockByHand
from .layers import CONFIGS as SMALL_CONFIGS

CONFIGS = {name: SMALL_CONFIGS[name] for name in ("tiny", "pynq", "4x4-tight", "batch2-8x4", "4x8", "16x4")}
Fields = dict[str, int]


@dataclass
class Compiled:
    """The arguments that `compile` passes to the self-check."""

    program: Program
    rest: tuple[Any, ...]

    def check(self, seed: int = 0) -> Checked:
        return self_check(self.program, *self.rest, seed)

    def name(self, layer: int) -> str:
        return self.program.launches[0].layers[layer].name


@cache
def self_checked(model: bytes, cfg: Config) -> tuple[Any, ...]:
    """Compile a model and return the arguments of its self-check."""
    caught: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("celosia.compiler.compile.self_check", lambda *given: caught.append(given) or Checked())
        compile_model(onnx.ModelProto.FromString(model), cfg)
    return caught[0]


@pytest.fixture
def compiled() -> Callable[[Builder, Config], Compiled]:
    """Return a function that compiles a model, once for all tests; each test has its own image."""

    def of(b: Builder, cfg: Config) -> Compiled:
        (program, *rest) = self_checked(b.model().SerializeToString(), cfg)
        return Compiled(replace(program, image=program.image.copy()), tuple(rest))

    return of


def network(form: str = "qdq", dtype: Any = np.int8) -> Builder:
    """Return a model with padded convolutions, a residual, a table, pooling, a Concat, a mean and a product."""
    b = Builder(form, dtype, seed=3)
    x = b.conv(b.input([2, 6, 9, 8]), 12, (3, 3), pads=(1, 1, 1, 1))
    y = b.binary("Add", b.conv(x, 12, (3, 3), pads=(1, 0, 1, 2)), x)
    y = b.unary(b.conv(y, 16, (1, 1)), "Sigmoid")
    y = b.max_pool(y, (3, 3), (2, 2), (1, 1, 1, 1))
    y = b.concat([b.conv(y, 16, (1, 1)), b.conv(y, 8, (3, 3), pads=(1, 1, 1, 1), strides=(1, 1)), y], False)
    y = b.binary("Mul", y, b.conv(y, y.shape[1], (1, 1)))
    y = b.conv(y, y.shape[1], (3, 3), group=y.shape[1])
    y = b.global_average(y)
    b.output(b.matmul(b.reshape(y, y.shape[:2]), 10))
    return b


WRITTEN = [("qdq", np.int8), ("qoperator", np.uint8)]
"""Forms of a model and types of its activations."""

# What is right passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=tries(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(b=models())
def test_random_models_pass(name: str, b: Builder) -> None:
    celosia.compile(b.model(), CONFIGS[name])


@pytest.mark.parametrize(("name", "written"), paired(CONFIGS, WRITTEN))
def test_every_byte_of_every_layer_is_compared(
    name: str, written: tuple[str, Any], compiled: Callable[..., Compiled]
) -> None:
    form, dtype = written
    found = compiled(network(form, dtype), CONFIGS[name])
    layers = [layer for launch in found.program.launches for layer in launch.layers]
    plans = found.rest[0]
    size = sum(int(np.prod(choice.layer.y.dims)) for plan in plans for choice in plan.choices)
    for seed in range(3):
        assert found.check(seed) == Checked(len(layers), size)


def test_several_launches() -> None:
    b = Builder("qdq", seed=5)
    x = b.conv(b.input([1, 8, 6, 6]), 8, (3, 3))
    between = b.quantise(b.node("Softmax", [b.real(x)], axis=1), x.shape, 0.01)
    y = b.conv(between, 8, (1, 1))
    b.output(b.binary("Add", y, x))
    program = celosia.compile(b.model(), "tiny")
    assert len(program.launches) == 2


def test_check_false_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object) -> None:
        raise AssertionError

    monkeypatch.setattr("celosia.compiler.compile.self_check", never)
    stages: list[str] = []
    program = celosia.compile(network().model(), "tiny", progress=stages.append, check=False)
    assert "checking" not in stages and program.launches
    with pytest.raises(CheckFailed):
        celosia.compile(network().model(), "tiny", progress=stages.append)
    assert stages[-1] == "checking"


def test_an_error_inside_the_check_is_no_fault_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise ValueError("index can't contain negative values")

    monkeypatch.setattr("celosia.compiler.compile.check_rewriting", broken)
    with pytest.raises(CheckFailed, match=r"failed itself.*ValueError: index can't") as caught:
        celosia.compile(network().model(), "tiny")
    code, sentence = exit_code_and_message(caught.value)
    assert code == UNCHECKED and code not in (0, FAULT) and "--no-check" in sentence
    program = caught.value.program
    assert program is not None and program.launches and [each.name for each in program.outputs]


def test_without_launches_the_kernels_are_checked(compiled: Callable[..., Compiled]) -> None:
    stages: list[str] = []
    celosia.compile(network().model(), "tiny", accelerator=False, progress=stages.append)
    assert stages[-1] == "checking"
    assert self_check(compiled(network(), PRESETS["tiny"]).program, [], *[None] * 2) == Checked()  # type: ignore[arg-type]


# Faults in what was compiled -------------------------------------------------------------------------------------


def words(compiled: Compiled) -> Iterator[tuple[int, int, Opcode, Fields]]:
    """Yield (number, layer, opcode, fields) of the instructions of the first launch."""
    launch = compiled.program.launches[0]
    for number, word in enumerate(compiled.program.instructions(launch)):
        opcode = opcode_of(word)
        assert opcode is not None
        yield number, int(launch.layer_of[number]), opcode, formats(compiled.program.config)[opcode].decode(word)


def plant(found: Compiled, wanted: Callable[[Opcode, Fields], object], change: Callable[[Fields], Fields]) -> str:
    """Change the first instruction for which `wanted` is true; return the name of its layer."""
    number, layer, opcode, fields = next(word for word in words(found) if wanted(*word[2:]))
    program, cfg = found.program, found.program.config
    word = formats(cfg)[opcode].encode(**(fields | change(fields)))
    size = instruction_bytes(cfg)
    start = program.launches[0].address - program.image_address + number * size
    program.image[start : start + size] = np.frombuffer(word.to_bytes(size, "little"), np.uint8)
    return found.name(layer)


def spoil(compiled: Compiled, buffer: Buffer, change: Callable[[NDArray[np.uint8]], object]) -> str:
    """Change the constants that the first LOAD into `buffer` reads; return the name of its layer."""
    cfg, program = compiled.program.config, compiled.program
    sizes = {Buffer.WGT: scratchpads(cfg)["wgt"].piece_bytes, Buffer.PAR: 8 * cfg.block_out, Buffer.LUT: 256}
    loads = ((layer, f) for _, layer, opcode, f in words(compiled) if opcode == Opcode.LOAD and f["buffer"] == buffer)
    layer, f = next(loads)
    start = f["dram_addr"] - program.image_address
    change(program.image[start : start + sizes[buffer]])
    return compiled.name(layer)


def swap_rows(data: NDArray[np.uint8]) -> None:
    """Exchange the weights of the first two output channels."""
    rows = data.reshape(-1, len(data) // 2) if len(data) < 8 else data.reshape(-1, 4)
    rows[[0, -1]] = rows[[-1, 0]]


def shift_entries(data: NDArray[np.uint8]) -> None:
    """Shift a whole table by one entry, since a small layer may not reach a single changed entry."""
    data[:] = np.roll(data, 1)


def flip(place: int, mask: int = 0x55) -> Callable[[NDArray[np.uint8]], None]:
    def change(data: NDArray[np.uint8]) -> None:
        data[place] ^= mask

    return change


def loads(buffer: Buffer, field: str) -> Callable[[Opcode, Fields], object]:
    return lambda opcode, f: opcode == Opcode.LOAD and f["buffer"] == buffer and f[field]


def vectors(field: str) -> Callable[[Opcode, Fields], object]:
    return lambda opcode, f: opcode == Opcode.VECTOR and f[field]


def pads_a_pooling(opcode: Opcode, f: Fields) -> object:
    """Return whether a LOAD pads, or a VECTOR fills padding in a block."""
    if opcode == Opcode.VECTOR:
        return f["destination"] == Destination.VIN and f["clip_lo"] == f["clip_hi"]
    return loads(Buffer.VIN, "pad_top")(opcode, f)


def other_pad(f: Fields) -> Fields:
    return {"pad_value": 100} if "pad_value" in f else {"clip_lo": 100, "clip_hi": 100}


def stores(opcode: Opcode, f: Fields) -> bool:
    return opcode == Opcode.STORE and f["x_size"] > 1


INSTRUCTIONS: dict[str, Any] = {
    "zero point": (vectors("requantise"), lambda f: {"zero_point": f["zero_point"] ^ 3}),
    "clip": (vectors("requantise"), lambda f: {"clip_hi": 20}),
    "no requantisation": (vectors("requantise"), lambda f: {"requantise": 0}),
    "residual scale": (vectors("rescale_add"), lambda f: {"scale_b": f["scale_b"] // 2}),
    "residual offset": (vectors("rescale_add"), lambda f: {"scale_c": f["scale_c"] + (3 << f["scale_shift"])}),
    "no table": (vectors("lookup"), lambda f: {"lookup": 0}),
    "maximum": (vectors("reduce_op"), lambda f: {"reduce_op": 0}),
    "pad value": (loads(Buffer.INP, "pad_top"), lambda f: {"pad_value": f["pad_value"] ^ 64}),
    "pad of a pooling": (pads_a_pooling, other_pad),
    "padding moved": (
        loads(Buffer.INP, "pad_top"), lambda f: {"pad_top": 0, "pad_bottom": f["pad_bottom"] + f["pad_top"]},
    ),
    "gemm adds": (lambda opcode, f: opcode == Opcode.GEMM and not f["accumulate"], lambda f: {"accumulate": 1}),
    "gemm input": (
        lambda opcode, f: opcode == Opcode.GEMM and f["extent_x"] > 1, lambda f: {"inp_base": f["inp_base"] ^ 1},
    ),
    "missing store": (stores, lambda f: {"x_size": 1, "y_size": 1, "z_size": 1}),
    "store elsewhere": (stores, lambda f: {"dram_addr": f["dram_addr"] + 64}),
    "part of a load": (loads(Buffer.WGT, "x_size"), lambda f: {"dram_addr": f["dram_addr"] + 1}),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "name"), paired(INSTRUCTIONS, ["tiny", "pynq", "batch2-8x4"]))
def test_a_wrong_instruction_is_found(name: str, fault: str, compiled: Callable[..., Compiled]) -> None:
    found = compiled(network(), CONFIGS[name])
    layer = plant(found, *INSTRUCTIONS[fault])
    with pytest.raises(SelfCheckError) as caught:
        found.check()
    assert caught.value.layer == layer, caught.value


CONSTANTS: dict[str, tuple[Buffer, Callable[[NDArray[np.uint8]], None]]] = {
    "swapped weights": (Buffer.WGT, swap_rows),
    "one bit of a weight": (Buffer.WGT, flip(0, 16)),
    "bias": (Buffer.PAR, flip(1)),
    "multiplier": (Buffer.PAR, flip(6)),
    "shift": (Buffer.PAR, flip(7, 2)),
    "entries of a table": (Buffer.LUT, shift_entries),
}


@pytest.mark.parametrize(("fault", "name"), paired(CONSTANTS, ["tiny", "pynq", "batch2-8x4"]))
def test_a_wrong_constant_is_found(name: str, fault: str, compiled: Callable[..., Compiled]) -> None:
    found = compiled(network(), CONFIGS[name])
    layer = spoil(found, *CONSTANTS[fault])
    with pytest.raises(SelfCheckError, match=r"operators on the CPU.*first at image") as caught:
        found.check()
    assert caught.value.layer == layer, caught.value


def test_a_layer_that_stores_in_the_place_of_another(compiled: Callable[..., Compiled]) -> None:
    found = compiled(network(), PRESETS["tiny"])
    (launch,) = found.program.launches
    layer_of = launch.layer_of.copy()
    layer_of[layer_of == 1] = 0
    found.program.steps = [replace(step, layer_of=layer_of) if step is launch else step for step in found.program.steps]
    with pytest.raises(SelfCheckError, match="STORE writes outside"):
        found.check()


def test_a_launch_that_hangs(compiled: Callable[..., Compiled]) -> None:
    found = compiled(network(), PRESETS["tiny"])
    plant(found, lambda opcode, f: opcode == Opcode.LOAD and f["post"], lambda f: {"post": 0})
    with pytest.raises(SelfCheckError, match="no unit can proceed"):
        found.check()


def test_an_illegal_address(compiled: Callable[..., Compiled]) -> None:
    found = compiled(network(), PRESETS["tiny"])
    layer = plant(found, stores, lambda f: {"dram_addr": found.program.dram_size})
    with pytest.raises(SelfCheckError, match=r"instruction \d+.*STORE writes") as caught:
        found.check()
    assert caught.value.layer == layer


def test_a_store_over_constants(compiled: Callable[..., Compiled]) -> None:
    found = compiled(network(), PRESETS["tiny"])
    layer = plant(found, stores, lambda f: {"dram_addr": found.program.image_address})
    with pytest.raises(SelfCheckError, match="outside of the layer's output") as caught:
        found.check()
    assert caught.value.layer == layer


def test_a_wrong_place_of_an_output(compiled: Callable[..., Compiled]) -> None:
    found = compiled(network(), PRESETS["tiny"])
    (launch,) = found.program.launches
    moved = replace(launch, unpack=tuple(replace(each, address=each.address ^ 64) for each in launch.unpack))
    found.program.steps = [moved if step is launch else step for step in found.program.steps]
    with pytest.raises(SelfCheckError, match="where the host takes it from"):
        found.check()


# Blocks ----------------------------------------------------------------------------------------------------------


def as_block(found: Compiled, cfg: Config) -> Compiled:
    """Return the layers of the only launch as a block with hand-written instructions."""
    program, ((plan,), selection, addresses) = found.program, found.rest
    choices, (launch,) = plan.choices, program.launches
    block = Layer.block(tuple(layer for choice in choices for layer in layers_of(choice.layer)))
    nodes = [node for choice in choices for node in choice.nodes]
    reads = {storage: read for choice in choices for storage, read in choice.reads.items()}
    constants = Constants(program.image_address)
    hand = BlockByHand(cfg, block, addresses=addresses, packed=constants)
    code = hand.codes()
    moved = replace(
        launch, address=constants.base + len(hand.constants), count=len(code), layer_of=np.zeros(len(code), np.int32),
        layers=(replace(launch.layers[0], name=block.name),),
    )  # fmt: skip
    image = np.concatenate([hand.constants, code.reshape(-1)])
    steps = [moved if step is launch else step for step in program.steps]
    changed = replace(program, image=image, steps=steps, dram_size=constants.base + len(image))
    plans = [LaunchPlan([LayerAssignment(block, nodes, reads, choices[-1].value)], plan.unpacked)]
    return Compiled(changed, (plans, selection, addresses))


def residual_block(form: str, dtype: Any, middle: int) -> Builder:
    b = Builder(form, dtype, seed=4)
    x = b.input([2, 8, 6, 5])
    wide = b.conv(x, middle, (1, 1))
    deep = b.conv(wide, middle, (3, 3), pads=(1, 1, 1, 1), group=middle)
    b.output(b.binary("Add", b.conv(deep, 8, (1, 1)), x))
    return b


BLOCKS: dict[str, Any] = {
    "tap": (vectors("taps"), lambda f: {"tap_r": 0}),
    "no taps": (vectors("taps"), lambda f: {"taps": 0}),
    "padding": (
        lambda opcode, f: opcode == Opcode.VECTOR and f["destination"] == Destination.VIN and not f["requantise"],
        lambda f: {"clip_lo": f["clip_lo"] ^ 64, "clip_hi": f["clip_hi"] ^ 64},
    ),
    "parameters": (vectors("taps"), lambda f: {"par_base": f["par_base"] + 1}),
    "slice": (lambda opcode, f: opcode == Opcode.GEMM and f["accumulate"], lambda f: {"accumulate": 0}),
    "row of inp": (vectors("taps"), lambda f: {"dst_y": 0}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "written"), paired(BLOCK_CONFIGS, WRITTEN))
def test_a_block_is_compared_with_all_of_its_operators(
    name: str, written: tuple[str, Any], compiled: Callable[..., Compiled]
) -> None:
    (form, dtype), cfg = written, BLOCK_CONFIGS[name]
    found = as_block(compiled(residual_block(form, dtype, 4 * cfg.block_out), cfg), cfg)
    for seed in range(3):
        assert found.check(seed) == Checked(1, 2 * 8 * 6 * 5)
    for fault in BLOCKS.values():
        wrong = Compiled(replace(found.program, image=found.program.image.copy()), found.rest)
        layer = plant(wrong, *fault)
        with pytest.raises(SelfCheckError, match="operators on the CPU") as caught:
            wrong.check()
        assert caught.value.layer == layer


# Faults of the compiler ------------------------------------------------------------------------------------------


COMPILER: dict[str, tuple[ModuleType, str, Callable[[Any], Any]]] = {
    "bias": (convolution, "requantisation", lambda r: replace(r, bias=r.bias + 40)),
    "zero point": (convolution, "requantisation", lambda r: replace(r, zero_point=r.zero_point ^ 1)),
    "weights": (convolution, "require_symmetric", lambda w: w[::-1].copy()),
    "pads": (convolution, "window_of", lambda w: replace(w, pads=(w.pads[2], w.pads[3], w.pads[0], w.pads[1]))),
    "average": (reductions, "requantise_alike", lambda r: replace(r, multiplier=r.multiplier + (r.multiplier >> 5))),
}
"""Where layers are made: a function that is called there, and what is done to its result."""


@pytest.mark.parametrize("fault", COMPILER)
def test_a_wrong_layer_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, change = COMPILER[fault]
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: change(function(*given)))
    with pytest.raises(SelfCheckError):
        celosia.compile(network().model(), "tiny")


def test_the_first_difference_is_described(compiled: Callable[..., Compiled]) -> None:
    b = Builder("qoperator", np.uint8, seed=1)
    b.output(b.conv(b.input([1, 8, 4, 4]), 8, (1, 1)))
    found = compiled(b, PRESETS["tiny"])
    layer = plant(found, vectors("requantise"), lambda f: {"zero_point": f["zero_point"] ^ 1})
    with pytest.raises(SelfCheckError) as caught:
        found.check()
    pattern = (
        rf"layer '{layer}' gives \d+ of 128 bytes other than its operators on the CPU, "
        r"the first at image 0, channel \d, row \d, column \d: expected (\d+), found (\d+)"
    )
    match = re.fullmatch(pattern, str(caught.value))
    assert match and abs(int(match[1]) - int(match[2])) == 1
    code, sentence = exit_code_and_message(caught.value)
    assert code == FAULT and sentence.startswith("a fault of celosia: layer") and "report it" in sentence


# Its kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns", "length"), [(1, 1, 1), (8, 16, 4), (9, 17, 5), (100, 33, 147), (3, 40, 9)])
def test_dots(rows: int, columns: int, length: int) -> None:
    rng = np.random.default_rng(rows)
    x = shared_kernels.rows_for(rows, length)
    x[...] = rng.integers(0, 256, x.shape)
    w = rng.integers(-128, 128, (columns, length)).astype(np.int8)
    bias = rng.integers(-(2**31), 2**31, columns).astype(np.int32)
    bias[::2] //= 1 << 20
    scale = rng.uniform(0, 0.01, columns).astype(np.float32)
    total = ((x[:rows, :length].astype(np.int64) - 200) @ w.T.astype(np.int64) + bias).astype(np.int32)
    expected = np.clip(np.rint(total.astype(np.float32) * scale) + np.float32(77), 0, 255)
    assert np.array_equal(
        shared_kernels.matrix_product(x, 200, shared_kernels.pack_columns(w), bias, scale, 77)[:rows], expected
    )


def test_largest() -> None:
    x = np.random.default_rng(0).integers(0, 256, (5, 3 * shared_kernels.LANES)).astype(np.uint8)
    assert np.array_equal(shared_kernels.column_maxima(x), x.max(axis=0))


@pytest.mark.parametrize("preset", ["pynq", "ultra96", "zcu104"])
def test_products(preset: str) -> None:
    """The compiled GEMM equals the reference for many instructions on the same scratchpads."""
    cfg, rng = PRESETS[preset], np.random.default_rng(0)
    state, expected = State(cfg), State(cfg)
    state.randomise(rng)
    for name in ("inp", "wgt", "acc"):
        getattr(expected, name)[...] = getattr(state, name)
    execute, done = shared_kernels.compiled_gemm(state), 0
    assert execute is not None
    for seed in range(8):
        words = random_program(cfg, seed, count=40, wrap=0.2, tokens=False).words()
        size = instruction_bytes(cfg)
        code = np.frombuffer(b"".join(word.to_bytes(size, "little") for word in words), np.uint8).reshape(-1, size)
        for instruction in decode(cfg, code):
            if instruction is not None and instruction.opcode == Opcode.GEMM:
                execute(instruction)
                reference.gemm(expected, instruction.fields)
                assert np.array_equal(state.acc, expected.acc), instruction.fields
                done += 1
    assert done > 50


def test_products_where_entries_fill_no_vectors() -> None:
    assert shared_kernels.compiled_gemm(State(PRESETS["tiny"])) is None


def test_no_layers_no_work() -> None:
    program = celosia.compile(network().model(), "tiny", accelerator=False)
    assert check_launches.self_check(program, [], None, {}) == Checked(0, 0)  # type: ignore[arg-type]
