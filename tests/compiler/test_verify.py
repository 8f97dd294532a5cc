"""The verifier accepts the compiler's streams, and finds each planted fault by the rule that it breaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from thorough import paired, some

from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import Report, Rule, VerifyError, order, verify
from celosia.compiler.vthread.verify.decode import InstructionShape
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    UNIT_OF,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Opcode,
    Unit,
    formats,
)
from celosia.sim.device import DeviceError
from celosia.sim.functional.checking import CheckError
from celosia.sim.functional.decode import decode
from celosia.sim.functional.fsim import FunctionalDevice

from . import blocks

ARENA, DRAM = 4096, 8192
"""Bytes of activations, and of activations and constants."""
_SMALL = dict(inp_depth=32, wgt_depth=16, acc_depth=32, vin_depth=32, out_depth=32, par_depth=8)
CONFIGS = {
    "4x4": Config(block_in=4, block_out=4, **_SMALL),
    "4x4-tokens2": Config(block_in=4, block_out=4, queue_depth=2, token_bits=2, **_SMALL),
    "batch2": Config(batch=2, block_in=4, block_out=4, **_SMALL),
    "8x4": Config(block_in=8, block_out=4, **_SMALL),
    "4x8": Config(block_in=4, block_out=8, **_SMALL),
    "4x4-forward": Config(block_in=4, block_out=4, taps=3, tap_depth=8, forward=True, **_SMALL),
    "8x4-forward": Config(block_in=8, block_out=4, taps=2, tap_depth=8, forward=True, **_SMALL),
    "4x8-taps": Config(block_in=4, block_out=8, taps=3, tap_depth=8, **_SMALL),
}
CFG = CONFIGS["4x4"]
NO_SHAPE = InstructionShape((), (), 0, False)
Stream = list[StreamInstruction]


def check(cfg: Config, stream: Stream) -> Report:
    return verify(cfg, encode(cfg, stream), DRAM, (0, ARENA))


def broken(cfg: Config, stream: Stream) -> Rule | None:
    """Return the rule that `stream` breaks, or None."""
    try:
        check(cfg, stream)
    except VerifyError as error:
        return error.rule
    return None


# Random streams -------------------------------------------------------------------------------------------


def _extents(loops: tuple[str, ...]) -> dict[str, int]:
    return {f"extent_{loop}": 1 for loop in loops}


def prologue(cfg: Config) -> Stream:
    """Return instructions that fill all scratchpads."""
    sizes = {
        Buffer.INP: cfg.inp_depth * cfg.inp_pieces, Buffer.WGT: cfg.wgt_depth * cfg.inp_pieces,
        Buffer.ACC: cfg.acc_depth * cfg.out_pieces, Buffer.VIN: cfg.vin_depth * cfg.out_pieces,
        Buffer.PAR: cfg.par_depth, Buffer.LUT: cfg.lut_count,
    } | ({Buffer.TAP: cfg.tap_depth} if cfg.taps else {})  # fmt: skip
    stream = [
        StreamInstruction(
            Opcode.LOAD,
            dict(buffer=buffer, dram_addr=ARENA, x_size=size, y_size=1, z_size=1, sram_x=1, widen=buffer == Buffer.ACC),
        )
        for buffer, size in sizes.items()
    ]
    copy = _extents(VECTOR_LOOPS) | dict(extent_x=cfg.out_depth, a_x=1, dst_x=1, destination=Destination.OUT)
    return [*stream, StreamInstruction(Opcode.VECTOR, copy)]


def soup(cfg: Config, seed: int, count: int) -> Stream:
    """Draw `count` small instructions after the prologue, with tokens."""
    rng = random.Random(seed)

    def lines(operand: str, loops: str, depth: int) -> dict[str, int]:
        """Draw a dense block, or one with gaps, for the last two of `loops`, with extents from 1 to 4."""
        reach = depth
        while reach >= depth:
            y, x = rng.randint(1, 3), rng.randint(1, 4)
            x_step = rng.choice((1, 1, 2))
            y_step = x * x_step + rng.randint(0, 2)
            reach = (y - 1) * y_step + (x - 1) * x_step
        base = rng.randint(0, depth - 1 - reach)
        return {f"{operand}_base": base, f"{operand}_{loops[0]}": y_step, f"{operand}_{loops[1]}": x_step} | {
            f"extent_{loops[0]}": y, f"extent_{loops[1]}": x
        }  # fmt: skip

    def within(operand: str, loops: str, depth: int, extents: dict[str, int], each: int = 1) -> dict[str, int]:
        reach = depth
        while reach >= depth:
            steps = {loop: rng.choice((0, 1, 2, 4)) for loop in loops}
            reach = sum((extents[f"extent_{loop}"] - 1) * step for loop, step in steps.items()) + each - 1
        base = rng.randint(0, depth - 1 - reach)
        return {f"{operand}_base": base} | {f"{operand}_{loop}": step for loop, step in steps.items()}

    def block(base: str, depth: int) -> dict[str, int]:
        f = lines(base, "yx", depth)
        return {key: f[key] for key in f if not key.startswith("extent")} | dict(
            y_size=f["extent_y"], x_size=f["extent_x"], z_size=1,
            dram_addr=cfg.piece_bytes * rng.randint(0, 100), dram_y=cfg.piece_bytes * rng.randint(4, 10),
        )  # fmt: skip

    def draw() -> StreamInstruction:
        opcode = rng.choices(list(Opcode), (3, 3, 3, 3))[0]
        if opcode == Opcode.LOAD:
            sizes = [(Buffer.INP, cfg.inp_depth * cfg.inp_pieces), (Buffer.WGT, cfg.wgt_depth * cfg.inp_pieces),
                     (Buffer.VIN, cfg.vin_depth * cfg.out_pieces)]  # fmt: skip
            buffer, depth = rng.choice([*sizes, (Buffer.TAP, cfg.tap_depth)] if cfg.taps else sizes)
            return StreamInstruction(opcode, dict(buffer=buffer) | block("sram", depth))
        if opcode == Opcode.STORE:
            return StreamInstruction(opcode, block("sram", cfg.out_depth * cfg.out_pieces))
        f = _extents(GEMM_LOOPS if opcode == Opcode.GEMM else VECTOR_LOOPS)
        if opcode == Opcode.GEMM:
            f |= lines("acc", "yx", cfg.acc_depth) | dict(accumulate=rng.randint(0, 1), extent_k=rng.randint(1, 2))
            f |= within("inp", "yxk", cfg.inp_depth, f) | within("wgt", "yxk", cfg.wgt_depth, f)
            return StreamInstruction(opcode, f)
        return vector(f | dict(requantise=rng.randint(0, 1)))

    def vector(f: dict[str, int]) -> StreamInstruction:
        """Draw a VECTOR that writes one half of vin and reads the other half."""
        half = rng.randint(0, 1)
        depths = {Destination.OUT: cfg.out_depth}
        if cfg.forward:
            depths |= {Destination.INP: cfg.inp_depth * cfg.inp_pieces, Destination.VIN: cfg.vin_depth // 2}
        destination = rng.choice(list(depths))
        f |= lines("dst", "yx", depths[destination]) | dict(destination=destination)
        taps = rng.randint(0, 1) if cfg.taps else 0
        vin = cfg.vin_depth // 2
        if rng.randint(0, 1):
            f |= within("a", "yx", cfg.acc_depth, f) | within("b", "yx", vin, f) | dict(b_source=BSource.VIN)
            f["b_base"] += half * vin
        else:
            f |= dict(a_source=ASource.VIN, extent_r=2, taps=taps)
            f |= within("a", "yxr", vin, f, cfg.taps if taps else 1)
            f["a_base"] += half * vin
            if taps:
                f |= within("tap", "r", cfg.tap_depth, f)
        if destination == Destination.VIN:
            f["dst_base"] += (1 - half) * vin
        return StreamInstruction(Opcode.VECTOR, f)

    stream = prologue(cfg) + [draw() for _ in range(count)]
    insert_tokens(cfg, stream, ARENA)
    return stream


def _copy(stream: Stream) -> Stream:
    return [StreamInstruction(i.opcode, dict(i.fields)) for i in stream]


def _masks(instruction: StreamInstruction, kind: str) -> Iterator[Unit]:
    return (unit for unit in Unit if instruction.fields.get(kind, 0) >> unit & 1)


def pairs(stream: Stream) -> Iterator[tuple[int, int, Unit, Unit]]:
    """Yield (giver, taker, unit that gives, unit that takes) of each token."""
    for source in Unit:
        for target in Unit:
            posts = [n for n, i in enumerate(stream) if UNIT_OF[i.opcode] == source and target in _masks(i, "post")]
            waits = [n for n, i in enumerate(stream) if UNIT_OF[i.opcode] == target and source in _masks(i, "wait")]
            yield from ((post, wait, source, target) for post, wait in zip(posts, waits, strict=True))


SEEDS = [(name, seed) for name in CONFIGS for seed in range(2)]
LARGER = ("4x4-tokens2", "batch2", "8x4-forward", "4x8-taps")
"""Half of the Configs, with each part that one can have; together with the other half they are all."""


@pytest.mark.parametrize("name, seed", some(SEEDS, [(name, 0) for name in CONFIGS]))
def test_streams_with_inserted_tokens_pass(name: str, seed: int) -> None:
    for part in range(8):
        check(CONFIGS[name], soup(CONFIGS[name], 100 * seed + part, 60))


def _runs(cfg: Config, stream: Stream) -> bool:
    """Return whether the functional simulator, which checks accesses differently, finds no fault."""
    device = FunctionalDevice(cfg, checking=True)
    code = encode(cfg, stream)
    device.allocate(DRAM + code.size)
    device.write(DRAM, code.reshape(-1))
    try:
        device.run(DRAM, len(code))
    except (CheckError, DeviceError):
        return False
    return True


@pytest.mark.parametrize("name, seed", some(SEEDS, [(name, 0) for name in CONFIGS if name not in LARGER]))
def test_a_token_may_be_dropped_only_where_nothing_needs_it(name: str, seed: int) -> None:
    assert needed_tokens(CONFIGS[name], soup(CONFIGS[name], seed, 40)) > 20


@pytest.mark.parametrize("name, ahead", paired(blocks.CONFIGS, [False, True]))
def test_a_token_of_a_block_may_be_dropped_only_where_nothing_needs_it(name: str, ahead: bool) -> None:
    hand = blocks.BlockByHand(blocks.CONFIGS[name], tile_rows=5, ahead=ahead)
    hand.codes()
    assert needed_tokens(hand.cfg, hand.stream) > 15


def needed_tokens(cfg: Config, stream: Stream) -> int:
    """Count the tokens whose removal the verifier reports; the simulator must agree."""
    needed = 0
    for post, wait, source, target in pairs(stream):
        faulty = _copy(stream)
        faulty[post].fields["post"] ^= 1 << target
        faulty[wait].fields["wait"] ^= 1 << source
        rule = broken(cfg, faulty)
        assert rule in (None, Rule.ORDER)
        assert (rule is None) == _runs(cfg, faulty), f"token of instruction {post} for {wait}"
        needed += rule is not None
    return needed


BITS = [(kind, name, seed) for kind in ("wait", "post") for name, seed in SEEDS]


@pytest.mark.parametrize("kind, name, seed", some(BITS, [("wait", "batch2", 1), ("post", "4x8-taps", 1)]))
def test_any_single_bit_dropped_or_added_is_found(kind: str, name: str, seed: int) -> None:
    cfg = CONFIGS[name]
    stream = soup(cfg, seed, 30)
    for number, instruction in enumerate(stream):
        for unit in Unit:
            if unit == UNIT_OF[instruction.opcode]:
                continue
            faulty = _copy(stream)
            faulty[number].fields[kind] = faulty[number].fields.get(kind, 0) ^ 1 << unit
            assert broken(cfg, faulty) == Rule.BALANCE


QUICK = [(name, 0, 20) for name in LARGER]


@pytest.mark.parametrize("name, seed, tries", some([*QUICK, *((*case, 60) for case in SEEDS)], QUICK))
def test_what_passes_runs_in_any_order_as_in_the_programs(name: str, seed: int, tries: int) -> None:
    """A randomly changed stream that passes gives the same DRAM in any possible order of execution.

    Changes move posts, swap instructions, shift addresses and drop tokens.
    """
    cfg, rng = CONFIGS[name], random.Random(seed)
    original = soup(cfg, seed, 30)
    passed = 0
    for _ in range(tries):
        stream = _copy(original)
        for _ in range(rng.randint(1, 2)):
            _disturb(cfg, stream, rng)
        if broken(cfg, stream) is not None:
            continue
        passed += 1
        assert _runs(cfg, stream) or cfg.block_in != cfg.block_out  # the simulator wants every piece to be written
        expected = _execute(cfg, stream, range(len(stream)))
        for _ in range(2):
            assert np.array_equal(_execute(cfg, stream, _some_order(cfg, stream, rng)), expected)
    assert tries // 20 < passed < tries - tries // 20


def _disturb(cfg: Config, stream: Stream, rng: random.Random) -> None:
    first = rng.randrange(len(prologue(cfg)), len(stream))
    kind = rng.randrange(4)
    if kind == 0:  # swap neighbours
        first -= 1
        stream[first], stream[first + 1] = stream[first + 1], stream[first]
    elif kind == 1:  # swap the tokens of two instructions of a unit
        second = rng.choice([n for n, i in enumerate(stream) if i.opcode == stream[first].opcode])
        mask = rng.choice(("wait", "post"))
        a, b = stream[first].fields, stream[second].fields
        a[mask], b[mask] = b.get(mask, 0), a.get(mask, 0)
    elif kind == 2:  # shift an address
        field = rng.choice([f for f in stream[first].fields if f.endswith(("_base", "_y", "_x"))])
        stream[first].fields[field] = max(0, stream[first].fields[field] + rng.choice((-1, 1)))
    else:  # drop a token
        post, wait, source, target = rng.choice(list(pairs(stream)))
        stream[post].fields["post"] ^= 1 << target
        stream[wait].fields["wait"] ^= 1 << source


def _some_order(cfg: Config, stream: Stream, rng: random.Random) -> list[int]:
    """Draw an order in which the hardware may execute `stream`."""
    tokens = {(a, b): 0 for a in Unit for b in Unit}
    queues: dict[Unit, list[int]] = {unit: [] for unit in Unit}
    fetched, order = 0, list[int]()
    while len(order) < len(stream):
        ready = [
            (unit, queue[0])
            for unit, queue in queues.items()
            if queue and all(tokens[other, unit] for other in _masks(stream[queue[0]], "wait"))
        ]
        may_fetch = fetched < len(stream) and len(queues[UNIT_OF[stream[fetched].opcode]]) < cfg.queue_depth
        assert ready or may_fetch
        if may_fetch and (not ready or rng.random() < 0.7):
            queues[UNIT_OF[stream[fetched].opcode]].append(fetched)
            fetched += 1
            continue
        unit, number = rng.choice(ready)
        queues[unit].pop(0)
        order.append(number)
        for other in _masks(stream[number], "wait"):
            tokens[other, unit] -= 1
        for other in _masks(stream[number], "post"):
            tokens[unit, other] += 1
    return order


def _execute(cfg: Config, stream: Stream, order: list[int] | range) -> NDArray[np.uint8]:
    """Execute the instructions in this order, ignoring tokens, and return the DRAM."""
    device = FunctionalDevice(cfg)
    device.allocate(DRAM)
    device.write(0, np.random.default_rng(0).integers(0, 256, DRAM, np.uint8))
    instructions = decode(cfg, encode(cfg, stream))
    for number in order:
        instruction = instructions[number]
        assert instruction is not None
        device.execute(instruction, number)
    return device.read(0, DRAM)


# Planted faults, one for each way to break a rule ---------------------------------------------------------

LOAD, GEMM, VECTOR, STORE = (1 << unit for unit in Unit)


def sound() -> Stream:
    """Return a correct stream: load inputs and weights, multiply, requantise, store."""
    return [
        StreamInstruction(
            Opcode.LOAD, dict(buffer=Buffer.INP, x_size=4, y_size=2, z_size=1, sram_x=1, sram_y=4, dram_y=16)
        ),
        StreamInstruction(
            Opcode.LOAD, dict(buffer=Buffer.PAR, x_size=1, y_size=1, z_size=1, dram_addr=ARENA, post=VECTOR)
        ),
        StreamInstruction(
            Opcode.LOAD,
            dict(buffer=Buffer.WGT, x_size=2, y_size=1, z_size=1, sram_x=1, dram_addr=ARENA + 64, post=GEMM),
        ),
        StreamInstruction(
            Opcode.GEMM,
            _extents(GEMM_LOOPS)
            | dict(extent_x=4, extent_k=2, inp_x=1, inp_k=4, wgt_k=1, acc_x=1, wait=LOAD, post=VECTOR),
        ),
        StreamInstruction(
            Opcode.VECTOR,
            _extents(VECTOR_LOOPS)
            | dict(extent_x=4, a_x=1, dst_x=1, requantise=1, destination=Destination.OUT, wait=LOAD | GEMM, post=STORE),
        ),
        StreamInstruction(Opcode.STORE, dict(x_size=4, y_size=1, z_size=1, sram_x=1, dram_addr=1024, wait=VECTOR)),
    ]  # fmt: skip


def test_the_sound_stream_passes_and_is_reported() -> None:
    report = check(CFG, sound())
    assert report.instructions == {Unit.LOAD: 3, Unit.GEMM: 1, Unit.VECTOR: 1, Unit.STORE: 1}
    assert report.tokens == 4
    assert report.entries == {"inp": 8, "wgt": 2, "acc": 4, "vin": 0, "out": 4, "par": 1, "lut": 0}
    assert (report.dram_read, report.dram_written) == (8 * 4 + 32 + 2 * 16, 4 * 4)


def sets(index: int, **fields: int) -> Callable[[Stream], Stream]:
    def change(stream: Stream) -> Stream:
        stream[index].fields |= fields
        return stream

    return change


def inserts(index: int, opcode: Opcode, **fields: int) -> Callable[[Stream], Stream]:
    return lambda stream: [*stream[:index], StreamInstruction(opcode, fields), *stream[index:]]


LAST_INP = CFG.inp_depth - 1
ROW = dict(x_size=1, y_size=1, z_size=1)
FAULTS: list[tuple[Callable[[Stream], Stream], Rule, str]] = [
    # Words.
    (sets(0, x_size=0), Rule.WORD, r"instruction 0 is illegal \(LOAD: a size is 0\)"),
    (sets(3, extent_r=0), Rule.WORD, "instruction 3 is illegal .GEMM: an extent is 0"),
    (sets(3, post=GEMM), Rule.WORD, "waits for or posts to itself"),
    # Scratchpad addresses.
    (sets(0, sram_base=LAST_INP - 6), Rule.RANGE, r"instruction 0 \(LOAD\) reaches inp entry 32 of 32 with sram"),
    (sets(0, sram_y=30), Rule.RANGE, "reaches inp entry 33 of 32"),
    (sets(0, pad_bottom=7), Rule.RANGE, "reaches inp entry 35 of 32"),
    (sets(0, pad_left=1, pad_right=31), Rule.RANGE, "reaches inp entry 39 of 32"),
    (sets(3, inp_x=10), Rule.RANGE, r"instruction 3 \(GEMM\) reaches inp entry 34 of 32 with inp"),
    (sets(3, inp_x=31), Rule.RANGE, "reaches inp entry 97 of 32"),  # -1 modulo the depth
    (sets(3, wgt_base=15), Rule.RANGE, "reaches wgt entry 16 of 16 with wgt"),
    (sets(3, acc_base=29), Rule.RANGE, "reaches acc entry 32 of 32 with acc"),
    (sets(4, dst_x=11), Rule.RANGE, r"instruction 4 \(VECTOR\) reaches out entry 33 of 32 with dst"),
    (sets(4, a_base=31), Rule.RANGE, "reaches acc entry 34 of 32 with a"),
    (sets(4, par_x=3), Rule.RANGE, "reaches par entry 9 of 8 with par"),
    (sets(4, b_source=BSource.VIN, b_x=16), Rule.RANGE, "reaches vin entry 48 of 32 with b"),
    (sets(5, sram_base=31), Rule.RANGE, r"instruction 5 \(STORE\) reaches out entry 34 of 32 with sram"),
    # DRAM.
    (sets(0, dram_addr=DRAM - 31), Rule.LIMIT, r"instruction 0 \(LOAD\) reaches byte 8192 of 8192 in DRAM"),
    (sets(0, dram_y=(1 << 32) - 16, dram_addr=64), Rule.LIMIT, r"instruction 0 \(LOAD\) reaches byte"),
    (sets(5, dram_addr=DRAM), Rule.LIMIT, r"instruction 5 \(STORE\) reaches byte 8207 of 8192"),
    (
        sets(5, dram_addr=ARENA),
        Rule.WRITABLE,
        r"instruction 5 \(STORE\) writes bytes 4096 to 4111 of DRAM, outside 0 to 4095",
    ),
    (sets(5, dram_addr=ARENA - 15), Rule.WRITABLE, "writes bytes 4081 to 4096 of DRAM"),
    (sets(5, x_size=1, y_size=4, dram_y=1025, sram_y=1), Rule.WRITABLE, "writes bytes 1024 to 4102"),
    # Sense.
    (sets(1, pad_top=1, sram_y=1), Rule.PADDING, r"instruction 1 \(LOAD\) pads par"),
    (sets(0, sram_y=3), Rule.ONCE, r"instruction 0 \(LOAD\) writes a place more than once"),
    (sets(0, sram_x=0), Rule.ONCE, "writes a place more than once"),
    (sets(3, acc_x=0), Rule.ONCE, r"instruction 3 \(GEMM\)"),
    (sets(4, dst_x=0), Rule.ONCE, r"instruction 4 \(VECTOR\)"),
    (sets(5, x_size=2, y_size=2, dram_y=4, sram_y=2), Rule.ONCE, r"instruction 5 \(STORE\)"),
    (
        sets(4, destination=Destination.ACC, dst_base=1),
        Rule.OWN_RESULT,
        r"instruction 4 \(VECTOR\) reads an entry of acc that an earlier step of it wrote",
    ),
    # Tokens.
    (sets(3, post=0), Rule.BALANCE, r"instruction 4 \(VECTOR\) awaits a token that GEMM never gives"),
    (sets(3, wait=0), Rule.BALANCE, r"instruction 2 \(LOAD\) gives GEMM a token that is never taken"),
    (sets(0, post=GEMM), Rule.BALANCE, r"instruction 2 \(LOAD\) gives GEMM a token that is never taken"),
    (
        lambda stream: sets(0, wait=STORE)(sets(5, post=LOAD)(stream)),
        Rule.PROGRESS,
        r"instruction 0 \(LOAD\) never gets a token from STORE",
    ),
    (
        lambda stream: [
            stream[0],
            *(StreamInstruction(Opcode.LOAD, dict(ROW, wait=STORE)) for _ in range(17)),
            *stream[1:5],
            sets(5, post=LOAD)(stream)[5],
            *(StreamInstruction(Opcode.STORE, dict(ROW, post=LOAD)) for _ in range(16)),
        ],
        Rule.PROGRESS,
        r"instruction 1 \(LOAD\) never gets a token from STORE while the fetch is held up at 17",
    ),
    # Order between units.
    (
        lambda stream: sets(0, post=GEMM)(sets(2, post=0)(stream)),
        Rule.ORDER,
        r"instruction 3 \(GEMM\) reads wgt entry 0, which instruction 2 \(LOAD\) writes and may not have ended",
    ),
    (
        lambda stream: sets(4, wait=LOAD)(sets(3, post=0)(stream)),
        Rule.ORDER,
        r"instruction 4 \(VECTOR\) reads acc entry 0, which instruction 3 \(GEMM\) writes",
    ),
    (
        inserts(6, Opcode.LOAD, **ROW, dram_addr=1036, sram_base=20),
        Rule.ORDER,
        r"instruction 6 \(LOAD\) reads DRAM 4-byte block 259, which instruction 5 \(STORE\) writes",
    ),
    (
        inserts(6, Opcode.LOAD, **ROW, sram_base=7),
        Rule.ORDER,
        r"instruction 6 \(LOAD\) writes inp entry 7, which instruction 3 \(GEMM\) reads",
    ),
    (
        inserts(3, Opcode.LOAD, **ROW, dram_addr=1024, sram_base=20),
        Rule.ORDER,
        r"instruction 6 \(STORE\) writes DRAM 4-byte block 256, which instruction 3 \(LOAD\) reads",
    ),
    (
        lambda stream: [stream[3], *stream[:3], *stream[4:]],  # in time, but the program says otherwise
        Rule.ORDER,
        r"instruction 0 \(GEMM\) reads inp entry 0, which instruction 1 \(LOAD\) writes and must wait for it",
    ),
    # Contents.
    (sets(0, y_size=1), Rule.WRITTEN, r"instruction 3 \(GEMM\) reads inp entry 4, which nothing wrote"),
    (sets(3, wgt_k=2), Rule.WRITTEN, r"reads wgt entry 2, which nothing wrote"),
    (sets(3, accumulate=1), Rule.WRITTEN, r"reads acc entry 0, which nothing wrote"),
    (sets(4, a_base=1), Rule.WRITTEN, r"instruction 4 \(VECTOR\) reads acc entry 4"),
    (sets(4, lookup=1), Rule.WRITTEN, "reads lut entry 0"),
    (sets(4, b_source=BSource.VIN), Rule.WRITTEN, "reads vin entry 0"),
    (sets(4, par_x=1), Rule.WRITTEN, "reads par entry 1"),
    (sets(5, sram_base=2), Rule.WRITTEN, r"instruction 5 \(STORE\) reads out entry 4"),
]


@pytest.mark.parametrize("change, rule, message", FAULTS)
def test_planted_faults_are_found(change: Callable[[Stream], Stream], rule: Rule, message: str) -> None:
    with pytest.raises(VerifyError, match=message) as caught:
        check(CFG, change(sound()))
    assert caught.value.rule == rule
    assert str(caught.value).endswith(f", but {rule}")


def test_every_rule_has_a_planted_fault() -> None:
    assert {rule for _, rule, _ in FAULTS} == set(Rule)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bit_beyond_the_fields_is_found(name: str) -> None:
    cfg = CONFIGS[name]
    stream = soup(cfg, 0, 10)
    form = min(formats(cfg).values(), key=lambda form: form.width)
    number = next(n for n, i in enumerate(stream) if i.opcode == form.opcode)
    code = encode(cfg, stream).copy()
    code[number, -1] ^= 0x80
    with pytest.raises(VerifyError, match=rf"instruction {number} .*{form.width}"):
        verify(cfg, code, DRAM, (0, ARENA))


def test_semaphores_too_small_for_a_stream_are_found() -> None:
    """The verifier finds a deadlock: three tokens of LOAD for GEMM need a queue of three."""

    def ahead(cfg: Config, count: int) -> Rule | None:
        loads = [
            StreamInstruction(Opcode.LOAD, dict(ROW, buffer=Buffer.INP, sram_base=n, post=GEMM)) for n in range(count)
        ]
        weights = [StreamInstruction(Opcode.LOAD, dict(ROW, buffer=Buffer.WGT))]
        gemms = [
            StreamInstruction(Opcode.GEMM, _extents(GEMM_LOOPS) | dict(inp_base=n, wait=LOAD)) for n in range(count)
        ]
        return broken(cfg, weights + loads + gemms)

    small = Config(block_in=4, block_out=4, queue_depth=2, token_bits=2, **_SMALL)
    assert ahead(small, 5) is None  # three tokens given, two loads in the queue
    assert ahead(small, 6) == Rule.PROGRESS
    assert ahead(CFG, 6) is None


@pytest.mark.parametrize("name", ["4x4", "4x4-tokens2"])
def test_program_order_is_an_execution_exactly_where_the_closed_form_says_so(name: str) -> None:
    cfg, seen = CONFIGS[name], set[bool]()
    for seed in range(300):
        rng = random.Random(seed)
        units = rng.choices(list(Unit), k=12)
        stream = [StreamInstruction(next(o for o, u in UNIT_OF.items() if u == unit), {}) for unit in units]
        waits, posts = [0] * len(units), [0] * len(units)
        for _ in range(rng.randrange(1, 9)):
            giver, taker = sorted(rng.sample(range(len(units)), 2), reverse=rng.random() < 0.1)
            if units[giver] != units[taker]:
                posts[giver] |= 1 << units[taker]
                waits[taker] |= 1 << units[giver]
        decoded = [
            order.Decoded(index, i.opcode, UNIT_OF[i.opcode], {"wait": wait, "post": post}, [], NO_SHAPE)
            for index, (i, wait, post) in enumerate(zip(stream, waits, posts))
        ]
        try:
            _, in_order = order._pair_tokens(cfg, decoded)
            executed = order._execute(cfg, decoded)
        except VerifyError:
            continue
        assert in_order == (executed == list(range(len(units))))
        seen.add(in_order)
    assert seen == {True, False}


def test_a_word_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"code.*\[count, \d+\].*\[3, 7\]"):
        verify(CFG, np.zeros((3, 7), np.uint8), DRAM, (0, ARENA))
