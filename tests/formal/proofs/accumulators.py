"""Prove that gemm adds to the newest value of an accumulator, and that each access at the ports is served once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from amaranth import Const, Mux, Signal, Value

from celosia.hw.dae_pipeline.scratchpad import AccScratchpad
from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import claim_lead
from celosia.hw.vector_unit.writeback import WritebackQueue
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies
from proofs.stages import Inner

TINY = replace(SMALL, block_in=2, block_out=2)
FLIGHT = 6
"""Number of cycles of an output, from before its read until memory holds it."""


def forwarding(cfg: Config) -> Harness:
    """An output is the sum, plus the newest value if it accumulates, even if others for the same entry are under way.

    `word` is the expected content of any one entry. It changes when an output is finished, and when other units write;
    these wait for tokens until nothing is under way. A read of memory that coincides with a write returns garbage.
    """
    h = Harness()
    dut = Gemm(cfg)
    inside = h.add(dut)
    read, write, entry = dut.acc_read, dut.acc_write, h.constant(range(cfg.acc_depth), "entry")
    width = len(write.data)
    word, memory = Signal(width, name="word"), Signal(width, name="memory")

    read_before = h.register(read.en & (read.addr == entry), "read_before")
    held_before = h.register(memory, "memory_before")
    collided = h.register(write.en & (write.addr == entry), "collided")
    h.assume(implies(read_before & ~collided, read.data == held_before))

    stages = inside["stages"]  # from the read to the write
    before = inside["pipe"][: -len(stages)]
    now, last = stages[-2], stages[-1]
    under_way: Value = Const(0)
    for stage in (*before, *stages):
        under_way = under_way | (stage.valid & (stage.acc == entry))
    others, others_word = h.any(1, "others_write"), h.any(width, "others_word")
    h.assume(implies(others, ~under_way))

    ends = now.valid & now.last & (now.acc == entry)
    wanted = Signal(width, name="wanted")
    for lane in range(cfg.lanes):
        part = wanted.word_select(lane, 32)
        on_top = Mux(now.accumulate, word.word_select(lane, 32), 0)
        h.m.d.comb += part.eq(Value.cast(inside["array"].total).word_select(lane, 32) + on_top)
    with h.m.If(ends):
        h.m.d.sync += word.eq(wanted)
    with h.m.Elif(others):
        h.m.d.sync += word.eq(others_word)
    with h.m.If(write.en & (write.addr == entry)):
        h.m.d.sync += memory.eq(write.data)
    with h.m.Elif(others):
        h.m.d.sync += memory.eq(others_word)

    h.ensure(write.en == (last.valid & last.last), "writes_each_output")
    writes = write.en & (write.addr == entry)
    h.ensure(implies(writes, (write.data == word) & write.mask.all()), "writes_the_newest")
    h.ensure(implies(~writes, memory == word), "memory_holds_it")
    return h


def arbitration(cfg: Config) -> Harness:
    """Gemm never waits, vector waits for gemm, and load waits for both where they write, each only in its own bank.

    An accepted access happens once: memory holds the word in the next cycle, or the read returns the old word. A port
    of a bank serves one access per cycle.
    """
    h = Harness()
    dut = AccScratchpad(cfg)
    inside = h.add(dut)
    entry, word = h.constant(range(cfg.acc_depth), "entry"), Signal(len(dut.gemm_write.data), name="word")
    sides = {
        "read": [dut.gemm_read, dut.vector_read],
        "write": [dut.gemm_write, *([dut.vector_write] if cfg.int32 else []), dut.load_write],
    }
    for side, ports in sides.items():
        for number, port in enumerate(ports):
            first: Value = Const(0)
            for other in ports[:number]:
                first = first | (other.en & (other.addr[-1] == port.addr[-1]))
            h.ensure(port.ready == ~first, f"{side}{number}_waits_for_the_first_alone")
        for bank in range(2):
            served = [port.en & port.ready & (port.addr[-1] == bank) for port in ports]
            wants = [port.en & (port.addr[-1] == bank) for port in ports]
            h.ensure(sum(served[1:], served[0]) <= 1, f"{side}{bank}_serves_one")
            h.ensure(sum(served[1:], served[0]).any() == sum(wants[1:], wants[0]).any(), f"{side}{bank}_serves")
    for port in sides["write"]:
        size = len(port.data) // len(port.mask)  # 32, or 8
        for lane, bit in enumerate(port.mask):
            with h.m.If(port.en & port.ready & (port.addr == entry) & bit):
                h.m.d.sync += word.word_select(lane, 32).eq(port.data.word_select(lane, size).as_signed())
    for bank in range(2):
        content = inside.memory(f"banks.{bank}.memory", entry[:-1])
        h.ensure(implies(entry[-1] == bank, content == word), f"content{bank}")

    # A read gives the word of the cycle in which it was taken, for a cycle.
    was = h.register(word, "was")
    for name, port in zip(("gemm", "vector"), sides["read"], strict=True):
        asked = h.register(port.en & port.ready & (port.addr == entry), f"{name}_asked")
        h.ensure(implies(asked, port.data == was), name)
    return h


def turns(cfg: Config) -> Harness:
    """Vector takes a port of acc only if gemm does not, so no stall is needed.

    Gemm claims reads as early as a step is issued, so that the step's item meets no claim, whatever comes in between.
    Another property proves that issue and stages know the right facts of their instruction (hazards).
    """
    it = Inner(cfg)
    h, dut, items, issue = it.h, it.dut, it.items, it.inside["issue"]
    for number, each in enumerate(items.stages[1:], 1):
        for name, _ in each.constants.shape():
            h.assume(implies(each.valid, each.constants[name] == it.of(number, name)))
    reading = it.stage["acc"]
    banks = [stage.carried.acc_addr[-1] for stage in items.stages[: reading + 1]]
    for bank in range(2):
        claimed: list[Value] = [dut.claims.read[bank]]
        for cycle in range(claim_lead(cfg)):
            claimed.append(h.register(claimed[-1], f"claimed{bank}_{cycle}"))
        h.ensure(implies(dut.acc_read.en & (dut.acc_read.addr[-1] == bank), ~claimed[-1]), f"read{bank}")
        takes = issue.fire & ~issue.now.a_vin & (banks[0] == bank)
        h.ensure(implies(takes, ~claimed[1]), f"issued{bank}")
        for i in range(1, reading + 1):
            reads = items.stages[i].valid & ~it.of(i, "a_vin")
            h.ensure(implies(reads & (banks[i] == bank), ~claimed[i + 1]), f"read{bank}_in_{i}")
        if cfg.int32:
            written = h.register(dut.claims.write[bank], f"claimed_write{bank}")
            h.ensure(implies(dut.acc_write.en & (dut.acc_write.addr[-1] == bank), ~written), f"write{bank}")
    return h


def lands(cfg: Config) -> Harness:
    """The queue to acc writes to a bank only in cycles that GEMM has not claimed in the cycle before."""
    h, dut = Harness(), WritebackQueue(cfg)
    h.add(dut)
    for bank in range(2):
        claimed = h.register(dut.claims[bank], f"claimed{bank}")
        h.ensure(implies(dut.write.en & (dut.write.addr[-1] == bank), ~claimed), f"write{bank}")
    return h


GEMM, PADS = "gemm_core/gemm.py", "dae_pipeline/scratchpad.py"
prove(
    "GEMM adds to the newest value",
    Mutant(GEMM, "Mux(missed[4], committed, self.acc_read.data)", "self.acc_read.data"),
    Mutant(
        GEMM,
        "Mux(missed[2], written, Mux(missed[3], committed, kept))",
        "Mux(missed[3], committed, Mux(missed[2], written, kept))",
    ),
    Mutant(GEMM, "((4, 0), (3, 1), (2, 1), (1, 2))", "((4, 0), (3, 0), (2, 1), (1, 2))"),
    Mutant(GEMM, "before.valid & before.last & (before.acc == this.acc)", "before.valid & (before.acc == this.acc)"),
    depth=FLIGHT,
    reach=20,
    script=("cutpoint t:top.dut.array t:top.dut.loops",),
)(partial(forwarding, TINY))
SERVED = (
    Mutant(
        PADS,
        "with m.If(wants[i] & ~wants[:i].any()) if i else nullcontext():",
        "with m.If(wants[i]) if i else nullcontext():",
    ),
    Mutant(PADS, "m.d.sync += bank.eq(port.addr[-1])", "m.d.comb += bank.eq(port.addr[-1])"),
)
FIRST = Mutant(PADS, "port.ready.eq(~wants[:i].any() if i else 1)", "port.ready.eq(~wants[:1].any() if i else 1)")
prove("accumulators serve gemm, vector and load", FIRST, *SERVED, depth=1)(partial(arbitration, TINY))
WIDENED = Mutant(PADS, "value[-1].replicate(32 - size)", "value[0].replicate(32 - size)")
prove("accumulators serve gemm and load, and vector, which reads", WIDENED, *SERVED, depth=1)(
    partial(arbitration, replace(TINY, int32=False))
)
ISSUE, SLOTS, WRITEBACK = "vector_unit/issue.py", "vector_unit/slots.py", "vector_unit/writeback.py"
WRITES = Mutant(WRITEBACK, "~self.claims.bit_select(of_place.data[-1], 1)", "~self.claims[0]")
prove("no stall is needed in the vector unit: what it writes to acc takes the ports that GEMM leaves", WRITES, depth=1)(
    partial(lands, TINY)
)
BLIND = Mutant(SLOTS, "(self.reads_acc & self.claimed.bit_select(self.bank, 1))", "Const(0)")
OLD_BANK = Mutant(ISSUE, "slots.bank.eq(loops.ahead.a[", "slots.bank.eq(loops.step.payload.a[")
OLD_FACT = Mutant(ISSUE, "Mux(loops.instr.ready, fields.a_source == ASource.VIN, now.a_vin)", "now.a_vin")
ALL = replace(SMALL, taps=3, forward=True, residual_cycles=2)
for name, cfg, mutants in (
    ("plain", TINY, (BLIND, OLD_BANK, OLD_FACT)),
    ("with all features", ALL, (BLIND, OLD_BANK, OLD_FACT)),
    ("without int32", replace(ALL, int32=False), (BLIND, OLD_BANK, OLD_FACT)),
):
    prove(
        f"no stall is needed in the vector unit: it takes the ports of acc that GEMM leaves, {name}",
        *mutants,
        depth=1,
        reach=8,
        tested=name == "without int32",
    )(partial(turns, cfg))
