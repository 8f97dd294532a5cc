"""Compare parts of the vector unit that track instructions and items, each alone, with models that use lists."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from amaranth.lib import data
from amaranth.sim import Simulator
from thorough import some

from celosia.hw.lib.layout import done_layout
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import OUTER_LOOPS, VECTOR_LOOPS, ASource, BSource, Destination, is_supported
from celosia.hw.spec.pipeline import WRITEBACK_DEPTH
from celosia.hw.vector_unit.issue import IssueStage
from celosia.hw.vector_unit.retire import RetireStage
from celosia.hw.vector_unit.slots import SlotScheduler
from celosia.hw.vector_unit.softmax_tracker import SoftmaxTracker
from celosia.hw.vector_unit.stages import PipelineStages, Stage, StageSignature
from celosia.hw.vector_unit.war_hazard import WarHazardTracker

SMALL = Config(
    block_in=8, block_out=8, bus_bytes=8, inp_depth=16, wgt_depth=8, acc_depth=16, vin_depth=32, out_depth=16,
    par_depth=4, lut_count=1,
)  # fmt: skip
CONFIGS = {
    "small": SMALL,
    "without int32": replace(SMALL, int32=False, residual_cycles=2),
    "with taps": replace(SMALL, taps=3, tap_depth=4, residual_cycles=4, forward=True),
    "with softmax and norm": replace(SMALL, softmax=2, norm=1, forward=True, residual_cycles=2),
}
SOFTMAX = CONFIGS["with softmax and norm"]


def simulate(dut: Any, testbench: Callable[[Any], Awaitable[None]]) -> None:
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()


@pytest.mark.parametrize("parts", [False, True])
def test_stage(parts: bool) -> None:
    """A stage takes over the item of the stage before in the next cycle, with the constants of its instruction."""
    constants_layout = data.StructLayout({"scale": 5, "raw": 1})
    before = StageSignature(data.StructLayout({}), data.StructLayout({"address": 4, "first": 1}))
    dut = Stage(before, StageSignature(constants_layout, data.StructLayout({"address": 4})), parts)
    rng = random.Random(1)

    async def testbench(ctx: Any) -> None:
        valid, expected, is_whole = 0, None, None
        for _ in range(300):
            sets = [{name: rng.getrandbits(shape) for name, shape in (("scale", 5), ("raw", 1))} for _ in range(2)]
            signals = {name: rng.getrandbits(1) for name in ("valid", "stall", "completes_entry", "constants_set")}
            signals["fire"] = signals["valid"] & rng.getrandbits(1)
            address, passes, stalls, halt = (
                rng.getrandbits(4),
                rng.getrandbits(1),
                rng.getrandbits(1),
                rng.random() < 0.1,
            )
            for name, value in signals.items():
                ctx.set(getattr(dut.before, name), value)
            for port, value in zip(dut.constant_sets, sets, strict=True):
                ctx.set(port, value)
            ctx.set(dut.before.carried.address, address)
            for port, value in ((dut.may_fire, passes), (dut.stay, stalls), (dut.halt, halt)):
                ctx.set(port, int(value))
            assert ctx.get(dut.item.valid) == valid
            assert ctx.get(dut.item.fire) == (valid and passes) and ctx.get(dut.item.stall) == stalls
            if expected is not None:
                scale, raw, which, address_expected = expected
                assert ctx.get(dut.item.constants.scale) == scale and ctx.get(dut.item.constants_set) == which
                assert (
                    ctx.get(dut.item.int8) == (valid and not raw)
                    and ctx.get(dut.item.carried.address) == address_expected
                )
            if is_whole is not None:
                assert ctx.get(dut.item.completes_entry) == (is_whole if parts else 1)
            valid = int((signals["fire"] or stalls) and not halt)
            is_whole = signals["completes_entry"] and not signals["stall"]
            if signals["valid"]:
                constants = sets[signals["constants_set"]]
                expected = constants["scale"], constants["raw"], signals["constants_set"], address
            await ctx.tick()

    simulate(dut, testbench)


@pytest.mark.parametrize("name", some(CONFIGS, [*CONFIGS][1:]))
def test_pipeline(name: str) -> None:
    """Items reach stage n in n cycles; a reduction leaves one item; a residual passes in several parts."""
    cfg, rng = CONFIGS[name], random.Random(2)
    dut = PipelineStages(cfg)
    stages = dict(zip(vars_of(dut), dut.stages, strict=True))
    names, parts = list(stages), cfg.residual_cycles
    reduce, add = names.index("reduce"), names.index("add")

    async def testbench(ctx: Any) -> None:
        constants_of_sets = [
            {"rescale_add": n, "to": 1 << rng.randrange(len(dut.writes)), "post": rng.getrandbits(4)} for n in (0, 1)
        ]
        for port, constants in zip(dut.constant_sets, constants_of_sets, strict=True):
            for field, value in constants.items():
                ctx.set(port[field], value)
        # items[cycle]: (which, last, address) of a step that was issued then.
        items: dict[int, tuple[int, int, int]] = {}
        free, added, completed = 0, 0, 0
        for cycle in range(400):
            step = None
            if cycle >= free and rng.random() < 0.7:
                step = rng.getrandbits(1), int(rng.random() < 0.6), rng.randrange(cfg.acc_depth)
                items[cycle] = step
                free = cycle + 1 + (parts - 1) * (step[0] & step[1])
            which, last, address = step or (rng.getrandbits(1), rng.getrandbits(1), 0)
            for field, value in (
                ("valid", step is not None),
                ("fire", step is not None),
                ("constants_set", which),
                ("completes_entry", 1),
            ):
                ctx.set(getattr(dut.read, field), int(value))
            ctx.set(dut.read.carried.last, last)
            ctx.set(dut.read.carried.acc_addr, address)
            for number, stage in enumerate(dut.stages[1:], 1):
                item = items.get(cycle - number)
                if number <= reduce:
                    assert ctx.get(stage.valid) == (item is not None), (cycle, number)
                    if item and number <= names.index("acc"):
                        assert ctx.get(stage.carried.acc_addr) == item[2]
                elif number <= add:
                    delay = max(
                        range(parts if number == add else 1), key=lambda n: items.get(cycle - number - n, (0, 0))[1]
                    )
                    item = items.get(cycle - number - delay)
                    expected = bool(item and item[1] and (delay == 0 or item[0]))
                    assert ctx.get(stage.valid) == expected, (cycle, number)
                if item and ctx.get(stage.valid):
                    assert ctx.get(stage.constants_set) == item[0]
            added += ctx.get(dut.added)
            if ctx.get(dut.complete):
                completed += 1
                assert ctx.get(dut.writes) == constants_of_sets[ctx.get(dut.write.constants_set)]["to"]
                assert ctx.get(dut.write.constants.post) == constants_of_sets[ctx.get(dut.write.constants_set)]["post"]
            else:
                assert ctx.get(dut.writes) == 0
            await ctx.tick()
        behind = len(names) + parts
        outputs = [item for cycle, item in items.items() if item[1] and cycle < 400 - behind]
        assert len(outputs) <= completed <= len(outputs) + behind
        assert sum(which for which, *_ in outputs) <= added <= sum(which for which, *_ in outputs) + behind

    simulate(dut, testbench)


def vars_of(dut: PipelineStages) -> list[str]:
    """Return the names of the stages, in order."""
    return [name for stage in dut.stages for name, value in vars(dut).items() if value is stage]


@pytest.mark.parametrize("name", some(CONFIGS, [*CONFIGS][1:]))
def test_slots(name: str) -> None:
    """No step is issued if GEMM reads its bank, during parts of a residual, or while the queue to acc is full."""
    cfg, rng = CONFIGS[name], random.Random(3)
    dut = SlotScheduler(cfg)

    async def testbench(ctx: Any) -> None:
        left, queued, slot, full = 0, 0, True, False
        for _ in range(1500):
            reads_acc, bank, claimed, blocked = (rng.getrandbits(n) for n in (1, 1, 2, 1))
            blocked, adds, to_acc = rng.random() < 0.05, rng.random() < 0.1, rng.random() < 0.9
            output, halt = slot and rng.random() < 0.9, rng.random() < 0.005
            lands = queued > 0 and rng.random() < 0.4
            inputs = dict(reads_acc=reads_acc, bank=bank, claimed=claimed, blocked=blocked, adds=adds, to_acc=to_acc,
                          output=output, lands=lands, halt=halt)  # fmt: skip
            for port, value in inputs.items():
                ctx.set(getattr(dut, port), int(value))
            assert ctx.get(dut.slot) == slot and ctx.get(dut.bubble) == (left > 0)
            left = cfg.residual_cycles - 1 if output and adds else max(0, left - 1)
            queued += int(cfg.int32 and output and to_acc)
            conflicts = reads_acc and claimed >> bank & 1
            full |= queued == WRITEBACK_DEPTH
            slot = halt or not (conflicts or blocked or left or queued == WRITEBACK_DEPTH)
            queued -= int(cfg.int32 and lands)
            if halt:
                left, queued = 0, 0
            await ctx.tick()
        assert full == cfg.int32

    simulate(dut, testbench)


@pytest.mark.parametrize("softmax", [False, True])
def test_retire(softmax: bool) -> None:
    """Each instruction is reported once, in program order."""
    dut, rng = RetireStage(softmax), random.Random(4)

    async def testbench(ctx: Any) -> None:
        program: list[tuple[bool, int]] = []  # (is softmax, number) of each instruction that is not reported yet
        ended, started, expected = 0, 0, None
        for _ in range(1000):
            softmaxes = [number for is_softmax, number in program if is_softmax]
            steps = [number for is_softmax, number in program if not is_softmax]
            # At most two of each kind are under way; a softmax starts only if no instruction with steps is.
            kind = softmax and rng.random() < 0.5
            if rng.random() < 0.5 and len(softmaxes if kind else steps) < 2 and not (kind and steps):
                program.append((kind, started))
                started += 1
            ends = ended < len(steps) and rng.random() < 0.3
            softmax_ends = bool(softmaxes) and rng.random() < 0.2
            ctx.set(dut.ends, int(ends))
            ctx.set(dut.softmax_ends, int(softmax_ends))
            ctx.set(dut.softmax_under_way, int(bool(softmaxes)))
            for port, number in (
                (dut.ended, steps[ended] if ends else 99), (dut.oldest, steps[0] if steps else 99),
                (dut.softmax, softmaxes[0] if softmaxes else 99),
            ):  # fmt: skip
                ctx.set(port, {"index": number, "post": number % 16})
            assert ctx.get(dut.done.valid) == (expected is not None)
            if expected is not None:
                assert ctx.get(dut.done.payload) == done_layout.const({"index": expected, "post": expected % 16})
            ended, expected = ended + ends, None
            if softmax_ends:
                expected = softmaxes[0]
            elif not softmaxes and ended:
                expected, ended = steps[0], ended - 1
            assert ctx.get(dut.retires) == (expected is not None and not softmax_ends)
            if expected is not None:
                assert program.pop(0)[1] == expected
            await ctx.tick()
        assert started > 80

    simulate(dut, testbench)


@pytest.mark.parametrize("seed", range(6))
def test_war_hazard(seed: int) -> None:
    """An entry is written as soon as softmax has read the row that contains it, and not before."""
    dut, rng = WarHazardTracker(SOFTMAX), random.Random(seed)
    entries, rows = rng.randint(1, 4), rng.randint(1, 4)
    base = rng.randint(0, 6)
    first = rng.randint(0, base)
    last = base + rows * entries

    async def testbench(ctx: Any) -> None:
        ctx.set(dut.entries, entries)
        ctx.set(dut.fields, {"a_base": base, "a_n": 1, "a_x": entries, "extent_n": entries})
        ctx.set(dut.starts, 1)
        await ctx.tick()
        for name, value in (("starts", 0), ("under_way", 1), ("comes", 1), ("waits", 1)):
            ctx.set(getattr(dut, name), value)
        fields = {
            "destination": Destination.VIN, "a_source": ASource.ACC, "b_source": BSource.IMM, "extent_n": 1,
            "extent_y": 1, "dst_x": 1, "dst_base": first,
        }  # fmt: skip
        ctx.set(dut.fields, fields)
        await ctx.tick().repeat(2)
        ctx.set(dut.comes, 0)
        assert not ctx.get(dut.follows)  # the tracker has not walked over the softmax's rows yet
        ctx.set(dut.walked, 1)
        for change in ({"dst_base": base + 1}, {"extent_n": 2}, {"b_source": BSource.VIN}, {"dst_x": 2}):
            ctx.set(dut.fields, fields | change)
            await ctx.tick().repeat(2)
            assert not ctx.get(dut.follows), change
        ctx.set(dut.fields, fields)
        await ctx.tick().repeat(2)
        assert ctx.get(dut.follows)
        ctx.set(dut.loads, 1)
        ctx.set(dut.accept, 1)
        assert ctx.get(dut.blocks)  # blocks for one cycle, to count the entries
        await ctx.tick()
        for name in ("loads", "accept", "waits"):
            ctx.set(getattr(dut, name), 0)
        front, place, slot = base, first, False
        for _ in range(200):
            over = front < last and rng.random() < 0.2
            writes = slot and place < last and rng.random() < 0.8
            assert not writes or place < front
            ctx.set(dut.over, int(over))
            ctx.set(dut.writes, int(writes))
            front, place = front + over * entries, place + writes
            slot = not ctx.get(dut.blocks)
            assert slot == (place < front)
            await ctx.tick()
        assert place == last

    simulate(dut, testbench)


def test_softmax_tracker() -> None:
    """While a softmax runs, a similar one may start, or an instruction from acc to OUT; with two, nothing starts."""
    dut, rng = SoftmaxTracker(SOFTMAX), random.Random(5)
    to_out = 1 << Destination.OUT

    async def testbench(ctx: Any) -> None:
        under_way: list[tuple[int, int]] = []  # (post, destination, zero point) of each softmax
        history = [False, False]  # for each cycle: an instruction was offered while one softmax ran
        fields, to, zero_point = {}, 0, 0
        started = set()
        for cycle in range(1500):
            offered = cycle % 6 > 0
            if not offered:
                fields = {
                    "softmax": rng.getrandbits(1), "post": rng.getrandbits(4),
                    "a_source": rng.choice(list(ASource)), "b_source": rng.choice(list(BSource)),
                    "destination": rng.choice([Destination.OUT, Destination.VIN]),
                }  # fmt: skip
                to, zero_point = 1 << rng.choice([Destination.OUT, Destination.INP]), rng.getrandbits(1)
            single = len(under_way) == 1
            ctx.set(dut.instr.fields, fields)
            ctx.set(dut.offered, int(offered))
            for port in (dut.constants, dut.spare):
                ctx.set(port, {"post": fields["post"], "to": to, "zero_point": zero_point})
            room = single and rng.random() < 0.5
            finish = bool(under_way) and rng.random() < 0.1
            oldest = under_way[0] if under_way else None
            if oldest is not None:
                assert ctx.get(dut.oldest.post) == oldest[0]
            ctx.set(dut.engine.room, int(room))
            ctx.set(dut.engine.finish, int(finish))
            may_run_along = fields["destination"] == Destination.OUT and bool(oldest) and oldest[1] != to_out
            may_run_along &= fields["a_source"] == ASource.ACC and fields["b_source"] != BSource.VIN and single
            is_alike = single and (to, zero_point) == oldest[1:]
            second = is_alike and room and all(history[-2:])
            history.append(single and offered)
            blocks = bool(under_way) and not (second if fields["softmax"] else may_run_along)
            if offered:
                assert ctx.get(dut.blocks_start) == blocks, cycle
            assert ctx.get(dut.under_way) == bool(under_way)
            starts = offered and bool(fields["softmax"]) and not blocks and not finish and rng.random() < 0.3
            ctx.set(dut.starts, int(starts))
            if finish:
                under_way.pop(0)
            if starts:
                started.add(len(under_way))
                under_way.append((fields["post"], to, zero_point))
            await ctx.tick()
        assert started == {0, 1}

    simulate(dut, testbench)


def iterations(fields: dict[str, int]) -> list[tuple[int, ...]]:
    """Return the steps of an instruction: addresses of A and of the result, and flags first, last and end."""
    extents = [range(fields[f"extent_{loop}"]) for loop in VECTOR_LOOPS]
    steps = []
    for index in product(*extents):
        counters = dict(zip(VECTOR_LOOPS, index, strict=True))
        a = fields["a_base"] + sum(counters[loop] * fields[f"a_{loop}"] for loop in VECTOR_LOOPS)
        dst = fields["dst_base"] + sum(counters[loop] * fields[f"dst_{loop}"] for loop in OUTER_LOOPS)
        first, last = (
            counters["r"] == counters["s"] == 0,
            (counters["r"], counters["s"]) == (extents[-2][-1], extents[-1][-1]),
        )
        steps.append((a, dst, int(first), int(last), int(last and all(n == e[-1] for n, e in zip(index, extents)))))
    return steps


@pytest.mark.parametrize("name", some(CONFIGS, [*CONFIGS][1:]))
def test_issue(name: str) -> None:
    """Each step is issued once, with its instruction's constants; reads of vin wait for instructions that write it."""
    cfg, rng = CONFIGS[name], random.Random(6)
    dut, latency = IssueStage(cfg), 12
    destinations = [to for to in Destination if is_supported(cfg, to)]
    program = []
    for index in range(20):
        fields = {f"extent_{loop}": rng.choice([1, 1, 2, 3]) for loop in VECTOR_LOOPS}
        for operand, loops in (("a", VECTOR_LOOPS), ("dst", OUTER_LOOPS)):
            fields |= {f"{operand}_{part}": rng.choice([0, 1, 2]) for part in ("base", *loops)}
        fields |= {"a_source": rng.choice(list(ASource)), "b_source": BSource.IMM, "post": index % 16}
        program.append(fields | {"destination": rng.choice(destinations)})

    async def testbench(ctx: Any) -> None:
        waiting, steps, done = list(enumerate(program)), [], []
        ends: dict[int, int] = {}  # the instruction that ends in a cycle
        ended: dict[int, int] = {}
        begun: dict[int, int] = {}
        landing: set[int] = set()
        quiet = 0
        for cycle in range(2000):
            quiet = quiet + 1 if len(done) >= len(program) else 0
            if quiet == 100:
                break
            ctx.set(dut.instr.valid, int(bool(waiting) and rng.random() < 0.8))
            if waiting:
                ctx.set(dut.instr.payload.index, waiting[0][0])
                ctx.set(dut.instr.payload.fields, waiting[0][1])
            ctx.set(dut.claimed, rng.getrandbits(2))
            ctx.set(dut.ends, int(cycle in ends))
            if cycle in ends:
                ctx.set(dut.ended, {"index": ends[cycle], "post": ends[cycle] % 16})
                ended[ends[cycle]] = cycle
            if ctx.get(dut.done.valid):
                done.append((ctx.get(dut.done.payload.index), ctx.get(dut.done.payload.post)))
            if ctx.get(dut.fire):
                index = ctx.get(dut.now.index)
                begun.setdefault(index, cycle)
                assert ctx.get(dut.now.a_vin) == (program[index]["a_source"] == ASource.VIN)
                assert ctx.get(dut.sets[ctx.get(dut.current)].index) == index
                steps.append((index, *(ctx.get(dut.step[name]) for name in ("a", "dst", "first", "last", "end"))))
                if steps[-1][-2] and program[index]["destination"] == Destination.ACC:
                    landing.add(cycle + latency)
                if steps[-1][-1]:
                    ends[cycle + latency] = index
            ctx.set(dut.lands, int(cycle in landing))
            if ctx.get(dut.instr.valid) and ctx.get(dut.instr.ready):
                waiting.pop(0)
            await ctx.tick()
        assert steps == [(index, *step) for index, fields in enumerate(program) for step in iterations(fields)]
        assert done == [(index, fields["post"]) for index, fields in enumerate(program)] and ctx.get(dut.idle)
        for index, (before, fields) in enumerate(pairwise(program)):
            if before["destination"] == Destination.ACC or (
                before["destination"] == Destination.VIN and fields["a_source"] == ASource.VIN
            ):
                assert begun[index + 1] > ended[index]

    simulate(dut, testbench)
