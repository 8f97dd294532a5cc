"""The verifier accepts correct programs and finds each fault planted in reads, computations and stores.

Faults are planted before tokens are inserted, so that the order of the remaining instructions stays correct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle, product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from thorough import some, tries

from celosia.compiler.graph.select.matrices import can_multiply_activations
from celosia.compiler.launch import image as image_module
from celosia.compiler.launch.image import Image, LayerErrors
from celosia.compiler.launch.memory_plan import Lifetime
from celosia.compiler.layer import Activation, Epilogue, Gemm, Layer, Multiplication, Storage, Window
from celosia.compiler.program import ArenaPlan
from celosia.compiler.tensorize import pack, plan
from celosia.compiler.tensorize.space import Tiling, Workload, candidates
from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import Meaning, ProvenanceError, Run, VerifyError, verify, verify_provenance
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, Opcode, formats, opcode_of
from celosia.sim.functional.fsim import FunctionalDevice

from .layers import CONFIGS, Builder, Network, builders, code_of, requantise, residual, table, windows

NAMES = [
    "tiny",
    "pynq",
    "batch2",
    "4x8",
    "16x4",
    "batch2-4x8",
    "batch2-8x4",
    "softmax",
    "softmax-4x8",
    "norm",
    "norm-4x8",
    "packed-4x8",
    "packed-16x4",
    "packed-32x8",
]
QUICK = ["pynq", "batch2-8x4", "softmax-4x8", "norm-4x8", "packed-4x8"]
"""Configs with each part that one can have: batch, arrays that are not square, softmax, norm and packed weights."""
SAME = Window((3, 3), pads=(1, 1, 1, 1))


@dataclass
class Program:
    """A compiled network whose instructions and constants can be changed."""

    net: Network
    image: Image
    launches: list[list[StreamInstruction]] = field(default_factory=list)

    def __post_init__(self) -> None:
        cfg = self.net.cfg
        self.constants = self.image.constants.copy()
        for number, launch in enumerate(self.image.launches):
            words = [int.from_bytes(row.tobytes(), "little") for row in code_of(cfg, self.image, number)]
            rows = zip(words, launch.layer_of.tolist(), strict=True)
            self.launches.append([_instruction(cfg, word, layer) for word, layer in rows])

    def codes(self) -> list[NDArray[np.uint8]]:
        """Return the instructions of each launch, encoded with fresh tokens."""
        for stream in self.launches:
            for i in stream:
                i.fields |= {"wait": 0, "post": 0}
            insert_tokens(self.net.cfg, stream, self.image.constants_address)
        return [encode(self.net.cfg, stream) for stream in self.launches]

    def verify(self) -> None:
        packed, taken = self.net.borders()
        runs = [
            Run(code, layers, np.array([i.layer for i in stream], np.int32), into, out_of)
            for code, layers, stream, into, out_of in zip(
                self.codes(), self.net.launches, self.launches, packed, taken, strict=True
            )
        ]
        image = self.image
        verify_provenance(self.net.cfg, runs, image.addresses, image.constants_address, self.constants, image.size)

    def storage(self, name: str) -> Storage:
        return next(storage for storage in self.image.addresses if storage.name == name)

    def address(self, name: str) -> int:
        return self.image.addresses[self.storage(name)]

    def find(self, opcode: Opcode, layer: int = 0, launch: int = 0, **fields: int) -> list[StreamInstruction]:
        """Return the instructions of `layer` with `fields`."""
        return [
            i for i in self.launches[launch]
            if (i.opcode, i.layer) == (opcode, layer) and all(i.fields[name] == fields[name] for name in fields)
        ]  # fmt: skip

    def loads(self, buffer: Buffer, layer: int = 0) -> list[StreamInstruction]:
        return self.find(Opcode.LOAD, layer, buffer=buffer)

    def drop(self, instruction: StreamInstruction) -> None:
        self.launches[0] = [i for i in self.launches[0] if i is not instruction]

    def insert_after(self, instruction: StreamInstruction, new: StreamInstruction) -> None:
        at = next(n for n, i in enumerate(self.launches[0]) if i is instruction)
        self.launches[0].insert(at + 1, new)


Fields = dict[str, int]
ROW_FAULTS: dict[str, Callable[[Fields], Fields]] = {
    "an element less": lambda f: {"imm": f["imm"] + 1},
    "another entry in its place": lambda f: {"a_n": 0},
    "the row beside it": lambda f: {"a_base": f["a_base"] + f["a_x"]},
    "rows in a wrong place": lambda f: {"dst_x": f["dst_n"], "dst_n": f["dst_x"]},
    "another zero point": lambda f: {"zero_point": f["zero_point"] + 1},
    "other limits": lambda f: {"clip_hi": 100},
}
"""Of VECTORs that work row by row: what changes of their fields."""


def _instruction(cfg: Config, word: int, layer: int) -> StreamInstruction:
    opcode = opcode_of(word)
    assert opcode is not None
    return StreamInstruction(opcode, formats(cfg)[opcode].decode(word), layer)


# The program that faults are planted in -------------------------------------------------------------------


class Maker:
    """Adds layers with chosen sizes; each method returns the output of its layer."""

    def __init__(self, cfg: Config, images: int) -> None:
        self.net, self.rng, self.images = Network(cfg), np.random.default_rng(1), images

    def host_input(self, channels: int, height: int, width: int) -> Activation:
        act = Activation.alone(self.net.cfg, f"in{len(self.net.host_inputs)}", self.images, channels, height, width)
        values = self.rng.integers(-128, 128, (self.images, channels, height, width)).astype(np.int8)
        self.net.host_inputs[act] = values
        return act

    def output(self, channels: int, height: int, width: int) -> Activation:
        return Activation.alone(self.net.cfg, f"t{len(self.net.layers)}", self.images, channels, height, width)

    def add(self, layer: Layer) -> Activation:
        self.net.launches[-1].append(layer)
        return layer.y

    def conv(
        self, x: Activation, y: Activation, window: Window, groups: int = 1, epilogue: Epilogue | None = None,
        name: str | None = None,
    ) -> Activation:  # fmt: skip
        shape = (y.channels, x.channels // groups, *window.kernel)
        weights = self.rng.integers(-128, 128, shape).astype(np.int8)
        scale = requantise(self.rng, y.channels, 74 * 74 * float(np.sqrt(np.prod(shape[1:]))))
        label = f"layer{len(self.net.layers)}" if name is None else name
        gemm, end = Gemm(weights, groups), epilogue or Epilogue()
        return self.add(Layer(label, x, y, window, 7, gemm, requantise=scale, epilogue=end))


CONV, STRIDED, ADDED, LEFT, RIGHT, WHOLE, MAXIMUM, AVERAGE, FACTOR, TABLE, DEPTHWISE = range(11)
"""Layers of `program`."""


def program(cfg: Config) -> Program:
    """Return one launch with every kind of layer, on two images (or batches of them)."""
    return Program(*_built(cfg))


@cache
def _built(cfg: Config) -> tuple[Network, Image]:
    m = Maker(cfg, 2 * cfg.batch)
    channels = 3 * max(cfg.block_in, cfg.block_out)
    x = m.host_input(channels, 6, 5)
    a = m.conv(x, m.output(channels, 6, 5), SAME, epilogue=Epilogue((-90, 100), table(m.rng)))
    m.conv(a, m.output(channels, 2, 2), Window((3, 3), (2, 2)))
    c = m.output(channels, 6, 5)
    m.conv(a, c, Window((1, 1)), epilogue=Epilogue(residual=residual(m.rng, x)))
    whole = Activation.alone(cfg, "whole", m.images, 2 * channels, 6, 5)
    for offset in (0, c.groups(cfg)):
        m.conv(c, replace(m.output(channels, 6, 5), storage=whole.storage, group_offset=offset), Window((1, 1)))
    m.conv(whole, m.output(channels, 6, 5), Window((1, 1)))
    clip = Epilogue((-100, 127))
    b = m.add(Layer("max", c, m.output(channels, 5, 4), Window((2, 2)), -128, reduce="max", epilogue=clip))
    scale = requantise(m.rng, channels, 74 * 2)
    strided = Window((3, 3), (2, 2), pads=(1, 1, 1, 1))
    m.add(Layer("average", c, m.output(channels, 3, 3), strided, 3, reduce="sum", requantise=scale))
    multiply, scale = Multiplication(c, 5, -9), requantise(m.rng, channels, 150 * 150)
    m.add(Layer("multiply", a, m.output(channels, 6, 5), multiply=multiply, requantise=scale))
    m.add(Layer("map", b, m.output(channels, 5, 4), epilogue=Epilogue(table=table(m.rng))))
    m.conv(c, m.output(channels, 6, 5), SAME, groups=channels)
    return m.net, m.net.build()


@pytest.mark.parametrize("name", some(NAMES, QUICK))
def test_the_sound_program_passes(name: str) -> None:
    sound = program(CONFIGS[name])
    sound.verify()
    sound.net.check()


# Planted faults -------------------------------------------------------------------------------------------

Fault = Callable[[Program], None]
FAULTS: dict[str, tuple[Fault, set[Meaning], str]] = {}


def fault(message: str, *rules: Meaning) -> Callable[[Fault], Fault]:
    """Register a planted fault, with the rules that find it and a pattern of the error message."""

    def plant(function: Fault) -> Fault:
        FAULTS[function.__name__] = function, set(rules), message
        return function

    return plant


READS = Meaning.TERMS, Meaning.OPERAND
SHIFTED = Meaning.PLACE, Meaning.TERMS
"""Where one piece of the output becomes what another should be, it may as well have been stored in the wrong place."""


@fault("by other weights", Meaning.TERMS)
def swapped_weights(p: Program) -> None:
    first, second = p.loads(Buffer.WGT, LEFT)[0], p.loads(Buffer.WGT, RIGHT)[0]
    first.fields["dram_addr"], second.fields["dram_addr"] = second.fields["dram_addr"], first.fields["dram_addr"]


@fault("by other weights", Meaning.TERMS)
def transposed_kernel(p: Program) -> None:
    for layer in (CONV, STRIDED, DEPTHWISE):
        for i in p.find(Opcode.GEMM, layer, extent_r=3, extent_s=3):  # in narrow tiles, both are one loop
            i.fields["wgt_r"], i.fields["wgt_s"] = i.fields["wgt_s"], i.fields["wgt_r"]
    for i in p.find(Opcode.VECTOR, DEPTHWISE, taps=1):  # the first row of the kernel for all of them
        i.fields["tap_r"] = i.fields["tap_s"] = 0


@fault("by other weights", Meaning.TERMS)
def one_weight_changed(p: Program) -> None:
    p.constants[p.loads(Buffer.WGT, CONV)[0].fields["dram_addr"] - p.image.constants_address + 1] ^= 0x80


@fault(r"leaves out \d+ of \d+ terms", Meaning.TERMS)
def missing_term(p: Program) -> None:
    p.find(Opcode.GEMM, CONV)[-1].fields["extent_s"] -= 1


@fault(r"leaves out \d+ of \d+ terms", Meaning.TERMS)
def missing_block_of_the_reduction(p: Program) -> None:
    p.find(Opcode.GEMM, ADDED)[0].fields["extent_k"] -= 1


@fault(r"takes \d+ terms too many", Meaning.TERMS)
def doubled_terms(p: Program) -> None:
    gemm = p.find(Opcode.GEMM, CONV)[0]
    p.insert_after(gemm, StreamInstruction(Opcode.GEMM, gemm.fields | {"accumulate": 1}, CONV))


@fault(r"takes \d+ terms too many", Meaning.TERMS)
def one_term_twice(p: Program) -> None:
    gemm = p.find(Opcode.GEMM, CONV)[0]
    once = dict.fromkeys((f"extent_{loop}" for loop in "nyxkrs"), 1)
    p.insert_after(gemm, StreamInstruction(Opcode.GEMM, gemm.fields | once | {"accumulate": 1}, CONV))


@fault("as B instead of", Meaning.OPERAND)
def wrong_residual(p: Program) -> None:
    """Add another activation of the same shape."""
    a, x = (p.address(name) for name in ("t0", "in0"))
    for i in p.loads(Buffer.VIN, ADDED):
        i.fields["dram_addr"] += a - x


@fault("has residual", Meaning.OPERATION)
def wrong_scale_of_the_residual(p: Program) -> None:
    p.find(Opcode.VECTOR, ADDED)[-1].fields["scale_b"] += 1


@fault("other parameters", Meaning.PARAMETERS)
def wrong_parameters(p: Program) -> None:
    left, right = p.loads(Buffer.PAR, LEFT)[0], p.loads(Buffer.PAR, RIGHT)[0]
    right.fields["dram_addr"] = left.fields["dram_addr"]


@fault("other parameters", Meaning.PARAMETERS)
def parameters_of_the_next_block(p: Program) -> None:
    load = p.loads(Buffer.PAR, CONV)[0]
    load.fields["dram_addr"] += 8 * p.net.cfg.block_out


@fault("other parameters", Meaning.PARAMETERS)
def one_bias_changed(p: Program) -> None:
    p.constants[p.loads(Buffer.PAR, CONV)[0].fields["dram_addr"] - p.image.constants_address] ^= 1


@fault("instead of|what is|by other weights", *SHIFTED)
def halo_off_by_one(p: Program) -> None:
    for i in p.loads(Buffer.INP, CONV):
        f = i.fields
        if f["pad_left"]:
            f["pad_left"], f["pad_right"] = f["pad_left"] - 1, f["pad_right"] + 1


@fault("instead of|what is", *SHIFTED)
def halo_a_row_too_low(p: Program) -> None:
    for i in (*p.loads(Buffer.INP, DEPTHWISE), *p.loads(Buffer.VIN, DEPTHWISE)):
        f = i.fields
        if f["pad_top"]:
            f["pad_top"], f["pad_bottom"] = f["pad_top"] - 1, f["pad_bottom"] + 1


@fault("takes padding of 8 instead of padding of 7", Meaning.TERMS)
def wrong_padding(p: Program) -> None:
    for i in p.loads(Buffer.INP, CONV):
        i.fields["pad_value"] = 8


@fault("instead of", Meaning.OPERAND)
def wrong_padding_of_a_pooling(p: Program) -> None:
    p.loads(Buffer.VIN, AVERAGE)[0].fields["pad_value"] = 0


@fault("instead of", Meaning.TERMS)
def wrong_stride(p: Program) -> None:
    for i in p.find(Opcode.GEMM, STRIDED):
        i.fields["inp_x"] = 1


@fault("instead of", Meaning.OPERAND)
def wrong_step_in_the_window_of_a_pooling(p: Program) -> None:
    for i in p.find(Opcode.VECTOR, AVERAGE):
        i.fields["a_s"] = 0


@fault("instead of", Meaning.TERMS)
def input_of_the_other_image(p: Program) -> None:
    for i in p.loads(Buffer.INP, ADDED):
        i.fields["dram_addr"] = _other_image(p, "t0", i.fields["dram_addr"])


@fault("instead of", *READS)
def operand_of_the_other_image(p: Program) -> None:
    i = p.loads(Buffer.VIN, FACTOR)[0]
    i.fields["dram_addr"] = _other_image(p, "t2", i.fields["dram_addr"])


@fault("stores ", Meaning.PLACE, Meaning.ONCE)
def store_to_the_other_image(p: Program) -> None:
    for i in p.find(Opcode.STORE, STRIDED):
        i.fields["dram_addr"] = _other_image(p, "t1", i.fields["dram_addr"])


def _other_image(p: Program, storage: str, address: int) -> int:
    """Return `address` moved to the other of the two images (or batches of them) in `storage`."""
    acts = {layer.y.storage.name: layer.y for layer in p.net.layers}
    size = acts[storage].size(p.net.cfg) // 2
    return address + size if address < p.address(storage) + size else address - size


@fault("stores ", Meaning.PLACE)
def swapped_stores(p: Program) -> None:
    first, second, *_ = p.find(Opcode.STORE, CONV)
    first.fields["dram_addr"], second.fields["dram_addr"] = second.fields["dram_addr"], first.fields["dram_addr"]


@fault("not its output's|of its output what is", Meaning.PLACE)
def wrong_group_offset_in_a_concatenation(p: Program) -> None:
    for i in p.find(Opcode.STORE, RIGHT):
        i.fields["dram_addr"] -= 6 * 5 * p.net.cfg.piece_bytes


@fault("not its output's", Meaning.PLACE)
def part_of_a_concatenation_in_the_place_of_the_other(p: Program) -> None:
    groups = p.net.layers[LEFT].y.groups(p.net.cfg)
    for i in p.find(Opcode.STORE, RIGHT):
        i.fields["dram_addr"] -= groups * 6 * 5 * p.net.cfg.piece_bytes


@fault("outside the memory of its output", Meaning.PLACE)
def store_to_another_activation(p: Program) -> None:
    i = p.find(Opcode.STORE, STRIDED)[0]
    i.fields["dram_addr"] += p.address("in0") - p.address("t1")


@fault("between the pieces", Meaning.PLACE)
def store_between_pieces(p: Program) -> None:
    p.find(Opcode.STORE, STRIDED)[0].fields["dram_addr"] += 1


@fault("nothing has stored", Meaning.ONCE)
def lost_store(p: Program) -> None:
    p.drop(p.find(Opcode.STORE, WHOLE)[0])


@fault("ends a launch that stores nothing of this layer", Meaning.ONCE)
def lost_stores_of_a_layer(p: Program) -> None:
    for i in p.find(Opcode.STORE, WHOLE):
        p.drop(i)


@fault("a second time", Meaning.ONCE)
def store_twice(p: Program) -> None:
    i = p.find(Opcode.STORE, WHOLE)[0]
    p.insert_after(i, StreamInstruction(Opcode.STORE, dict(i.fields), WHOLE))


@fault("looks up another table", Meaning.OPERATION)
def wrong_table(p: Program) -> None:
    first, second = p.loads(Buffer.LUT, CONV)[0], p.loads(Buffer.LUT, TABLE)[0]
    second.fields["dram_addr"] = first.fields["dram_addr"]


@fault("looks up no table", Meaning.OPERATION)
def no_table(p: Program) -> None:
    p.find(Opcode.VECTOR, CONV)[0].fields["lookup"] = 0


@fault(r"has clip \(-90, 99\) instead of \(-90, 100\)", Meaning.OPERATION)
def wrong_clip(p: Program) -> None:
    p.find(Opcode.VECTOR, CONV)[-1].fields["clip_hi"] = 99


@fault("has zero point", Meaning.OPERATION)
def wrong_zero_point(p: Program) -> None:
    p.find(Opcode.VECTOR, LEFT)[0].fields["zero_point"] ^= 1


@fault("has reduce 0 instead of 1", Meaning.OPERATION)
def sum_instead_of_maximum(p: Program) -> None:
    p.find(Opcode.VECTOR, MAXIMUM)[0].fields["reduce_op"] = 0


@fault("has offset 4 instead of 5", Meaning.OPERATION)
def wrong_offset(p: Program) -> None:
    p.find(Opcode.VECTOR, FACTOR)[0].fields["a_offset"] = 4


@fault("leaves out", Meaning.OPERAND)
def smaller_window(p: Program) -> None:
    p.find(Opcode.VECTOR, AVERAGE)[0].fields["extent_s"] = 2


@fault("instead of|what is", *SHIFTED)
def accumulators_of_another_row(p: Program) -> None:
    p.find(Opcode.VECTOR, CONV)[0].fields["a_x"] = 0


@pytest.mark.parametrize(("planted", "name"), some(product(FAULTS, NAMES), [*zip(FAULTS, cycle(QUICK))]))
def test_planted_faults_are_found(planted: str, name: str) -> None:
    change, rules, message = FAULTS[planted]
    faulty = program(CONFIGS[name])
    change(faulty)
    with pytest.raises(ProvenanceError, match=message) as caught:
        faulty.verify()
    assert caught.value.rule in rules
    assert str(caught.value).endswith(f", but {caught.value.rule}")


# Faults of other programs ---------------------------------------------------------------------------------


def two_equal_convolutions(cfg: Config, names: tuple[str, str]) -> Network:
    m = Maker(cfg, 1)
    channels = max(cfg.block_in, cfg.block_out)
    x = m.host_input(channels, 4, 4)
    y = m.conv(x, m.output(channels, 4, 4), SAME, name=names[0])
    m.conv(y, m.output(channels, 4, 4), SAME, name=names[1])
    return m.net


@pytest.mark.parametrize("name", NAMES)
def test_a_stale_entry_of_a_ring_is_found(name: str) -> None:
    """The verifier finds a layer that reads the inputs of an equal layer before it instead of its own."""
    net = two_equal_convolutions(CONFIGS[name], ("first", "second"))
    stale = Program(net, net.build(cold=False))  # in equal tiles
    for i in stale.loads(Buffer.INP, 1):
        stale.drop(i)
    for first, second in zip(stale.find(Opcode.GEMM, 0), stale.find(Opcode.GEMM, 1), strict=True):
        second.fields["inp_base"] = first.fields["inp_base"]
    with pytest.raises(ProvenanceError, match=r"layer 1 'second'\).*'in0'.*'t0'"):
        stale.verify()


@pytest.mark.parametrize("name", NAMES)
def test_a_load_before_the_store_that_it_needs_is_found(name: str) -> None:
    """The verifier finds a LOAD that reads DRAM before the layer before it has stored there."""
    net = two_equal_convolutions(CONFIGS[name], ("first", "second"))
    early = Program(net, net.build())
    store, load = early.find(Opcode.STORE, 0)[-1], early.loads(Buffer.INP, 1)[-1]
    early.drop(store)
    early.insert_after(load, store)
    with pytest.raises(ProvenanceError, match=r"layer 1 'second'.*nothing.*'t0'"):
        early.verify()


def test_two_unnamed_layers_are_compiled_rightly_or_refused() -> None:
    net = two_equal_convolutions(CONFIGS["tiny"], ("", ""))
    try:
        net.check()
    except ProvenanceError as error:
        assert error.rule == Meaning.TERMS


def splitting(order: str) -> Callable[..., Tiling]:
    """Return a function that chooses the tiling of this order with the most pieces of the reduction."""

    def choose(cfg: Config, workload: Workload, *_: object) -> Tiling:
        return min((t for t in candidates(cfg, workload) if t.order == order), key=lambda t: t.k)

    return choose


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_piece_of_a_split_reduction_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "choose", splitting("split"))
    cfg = CONFIGS[name]
    m = Maker(cfg, 1)
    x = m.host_input(4 * cfg.block_in, 3, 3)
    m.conv(x, m.output(cfg.block_out, 3, 3), SAME)
    split = Program(m.net, m.net.build())
    split.verify()
    *_, before, last = split.find(Opcode.GEMM)
    assert last.fields["accumulate"]
    split.drop(last)
    with pytest.raises(ProvenanceError, match=r"leaves out \d+ of \d+ terms") as caught:
        split.verify()
    assert caught.value.rule == Meaning.TERMS
    last.fields["accumulate"] = 0
    split.insert_after(before, last)
    with pytest.raises(ProvenanceError, match=r"leaves out \d+ of \d+ terms"):
        split.verify()


def test_activations_in_the_same_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier finds a memory plan that puts all activations at address 0."""

    def plan(lifetimes: list[Lifetime], alignment: int = 64) -> ArenaPlan:
        return ArenaPlan({lifetime.buffer: 0 for lifetime in lifetimes}, max(lifetime.size for lifetime in lifetimes))

    monkeypatch.setattr(image_module, "plan_memory", plan)
    net, image = _built.__wrapped__(CONFIGS["tiny"])
    with pytest.raises(ProvenanceError, match="instead of"):
        net.verify(image)


def two_launches(cfg: Config) -> Program:
    """Return a launch of two layers, and one with a layer that reads the output of the first."""
    m = Maker(cfg, 1)
    x = m.host_input(cfg.group, 3, 3)
    y = m.conv(x, m.output(cfg.group, 3, 3), SAME)
    m.conv(x, m.output(cfg.group, 3, 3), SAME)
    m.net.launches.append([])
    m.conv(y, m.output(cfg.group, 3, 3), SAME)
    return Program(m.net, m.net.build())


def test_what_the_host_takes_is_checked() -> None:
    taken = two_launches(CONFIGS["tiny"])
    taken.verify()
    runs = taken.net.borders()[1]
    assert [{storage.name for storage in run} for run in runs] == [set(), {"t1", "t2"}]
    assert taken.address("t1") != taken.address("t2")
    distance = taken.address("t2") - taken.address("t1")
    moved = taken.image.addresses | {taken.storage("t1"): taken.address("t2")}
    taken.image = replace(taken.image, addresses=moved)
    for i in taken.find(Opcode.STORE, 1):
        i.fields["dram_addr"] += distance
    with pytest.raises(ProvenanceError, match=r"host takes 't1'.*overwritten"):
        taken.verify()


def test_a_later_launch_must_read_what_an_earlier_one_stored() -> None:
    launches = two_launches(CONFIGS["tiny"])
    for i in launches.launches[1]:
        if i.opcode == Opcode.LOAD and i.fields["buffer"] == Buffer.INP:
            i.fields["dram_addr"] += launches.address("t1") - launches.address("t0")
    with pytest.raises(ProvenanceError, match=r"GEMM, layer 0 'layer2'.*'t1'"):
        launches.verify()


def test_what_the_host_does_not_pack_is_noise() -> None:
    net = two_equal_convolutions(CONFIGS["tiny"], ("first", "second"))
    image = net.build()
    runs = [Run(code_of(net.cfg, image), net.layers, image.launches[0].layer_of, set(), set())]
    with pytest.raises(ProvenanceError, match="what nothing has written"):
        verify_provenance(net.cfg, runs, image.addresses, image.constants_address, image.constants)


# Any field of any instruction -----------------------------------------------------------------------------


def bounded(examples: int) -> settings:
    return settings(max_examples=tries(examples), deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program of a layer or two of random shapes."""
    b: Builder = draw(builders(NAMES))
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    images, height, width = number(1, 3), number(2, 6), number(2, 6)
    x = b.host_input(images, number(1, 20), height, width, number(0, 1), number(0, 1))
    kind = number(0, 6 if b.cfg.softmax or b.cfg.norm else 5 if can_multiply_activations(b.cfg) else 4)
    kind = 4 if kind == 5 and not can_multiply_activations(b.cfg) else kind
    if kind == 0:
        window = draw(windows(3))
        top, left, bottom, right = window.pads
        assume(height + top + bottom >= window.reach(0) and width + left + right >= window.reach(1))
        b.conv(x, window, number(1, 20))
    elif kind == 1:
        b.conv(x, SAME, x.channels, x.channels)
    elif kind == 2:
        b.pool(x, Window((2, 2), pads=(1, 0, 0, 1)), bool(number(0, 1)))
    elif kind == 3:
        b.multiply(x, b.host_input(images, x.channels, *((1, 1) if number(0, 1) else (height, width))))
    elif kind == 6:
        rows = b.conv(x, Window((1, 1)), number(1, 20)) if number(0, 1) else x
        b.softmax(rows) if b.cfg.softmax else b.norm(rows)
    elif kind == 5:
        del b.net.host_inputs[x]  # another takes its place
        inner, columns = b.cfg.group * number(1, 3), number(1, 20)
        rows = b.host_input(1, inner, 1, number(1, 20), number(0, 1), number(0, 1))
        keys = b.host_input(1, inner, 1, pack.blocks(columns, b.cfg.block_out) * b.cfg.block_out, number(0, 1))
        b.product(rows, b.conv(keys, Window((1, 1)), inner) if number(0, 1) else keys, columns)
    else:
        y = b.conv(x, SAME, number(1, 20))
        b.map(y, b.host_input(images, y.channels, height, width) if number(0, 1) else None)
    try:
        return Program(b.net, b.net.build())
    except LayerErrors:
        assume(False)
        raise


@bounded(80)
@given(programs(), st.data())
def test_a_changed_field_is_found_or_changes_nothing(p: Program, data: st.DataObject) -> None:
    cfg, (stream,) = p.net.cfg, p.launches
    expected = _outputs(p)
    i = data.draw(st.sampled_from(stream))
    form = formats(cfg)[i.opcode]
    changed = data.draw(st.sampled_from([f for f in form.fields if f.name not in ("opcode", "wait", "post")]))
    low, high = (
        (-(1 << changed.width - 1), (1 << changed.width - 1) - 1) if changed.signed else (0, (1 << changed.width) - 1)
    )
    old = i.fields[changed.name]
    near = [old + step for step in (-64, -8, -4, -2, -1, 1, 2, 4, 8, 64) if low <= old + step <= high]
    new = data.draw(st.sampled_from(near) | st.integers(low, high))
    assume(new != old)
    i.fields[changed.name] = new
    try:
        verify(cfg, encode(cfg, stream), p.image.size, (0, p.image.constants_address))
    except VerifyError as error:
        if error.rule.name not in ("ORDER", "WRITTEN"):
            return
    try:
        p.codes()
    except ValueError:  # a load across the end of the activations, for which no tokens can be found
        assume(False)
    try:
        p.verify()
    except VerifyError:
        return
    for output, wanted in zip(_outputs(p), expected, strict=True):
        np.testing.assert_array_equal(output, wanted)


def _outputs(p: Program) -> list[NDArray[np.uint8]]:
    """Run a program on the functional simulator and return its outputs. DRAM is first filled with noise."""
    cfg, image = p.net.cfg, p.image
    device = FunctionalDevice(cfg)
    device.allocate(image.size)
    device.write(0, np.random.default_rng(0).integers(0, 256, image.constants_address, np.uint8))
    device.write(image.constants_address, p.constants)
    for act, values in p.net.host_inputs.items():
        p.net._fill(device, image, act, values)
    for launch, code in zip(image.launches, p.codes(), strict=True):
        device.write(launch.address, code.reshape(-1))
        device.run(launch.address, launch.count)
    results = []
    for act in p.net.outputs():
        storage = device.read(image.addresses[act.storage], act.size(cfg)).reshape(
            act.batches(cfg), act.storage_groups, -1
        )
        results.append(storage[:, act.group_offset : act.group_offset + act.groups(cfg)])
    return results
