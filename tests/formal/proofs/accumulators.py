"""The accumulators: gemm adds to the newest value, and every access at their ports is served once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from amaranth import Const, Mux, Signal, Value

from celosia.hw.config import Config
from celosia.hw.dae_pipeline.scratchpad import AccScratchpad
from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.isa import Destination
from celosia.hw.vector_unit.vector import Vector
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies

TINY = replace(SMALL, block_in=2, block_out=2)
FLIGHT = 6
"""Cycles of an output from before its read to the one in which memory holds it."""


def forwarding(cfg: Config) -> Harness:
    """An output is the sum, on top of the newest value if it accumulates, whatever is under way for the same entry.

    `word` is what one entry, any one, should hold: it changes where an output is finished, and where others write, who
    wait for their tokens until nothing is under way. Memory gives garbage where it is read and written at once.
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
        h.m.d.comb += part.eq(inside["array"].total.word_select(lane, 32) + on_top)
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
    """Gemm never waits, vector for gemm, load for both where they write, each only in its own bank; what is taken is
    done once: it is in memory in the next cycle, or is what memory held, and of a bank's port one has its turn in a
    cycle.
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

    # A read gives the word of the cycle in which it was taken: gemm's for a cycle, vector's until its next one.
    gemm, vector = sides["read"]
    h.ensure(
        implies(h.register(gemm.en & (gemm.addr == entry), "gemm_asked"), gemm.data == h.register(word, "was")), "gemm"
    )
    asked, seen = Signal(name="vector_asked"), Signal.like(word, name="vector_saw")
    with h.m.If(vector.en & vector.ready):
        h.m.d.sync += [asked.eq(vector.addr == entry), seen.eq(word)]
    h.ensure(implies(asked, vector.data == seen), "vector")
    new = inside["vector_new"]
    h.ensure(implies(asked & ~new, inside["held"] == seen), "vector_holds")
    for bank in range(2):
        gives = asked & new & (entry[-1] == bank)
        h.ensure(implies(gives, inside["vector_bank"] == bank), f"vector_of{bank}")
    return h


def turns(cfg: Config) -> Harness:
    """Vector takes a port of acc only where gemm does not, which says so a cycle ahead, so that it need not look.

    Two facts are proved elsewhere: what a stage knows of its item's instruction is right (hazards), and the place of an
    item returns from its ring when the item is written (rings), so that its bank does.
    """
    h = Harness()
    dut = Vector(cfg)
    inside = h.add(dut)
    items, banks = inside["items"], inside["banks"]
    if cfg.int32:
        h.assume(implies(items.complete, dut.acc_write.addr[-1] == banks["write"]))
    for each in items.all:
        for name, value in each.registered.items():
            came = Mux(each.which, *(Value.cast(constants[name]) for constants in reversed(inside["issue.constants"])))
            h.assume(implies(each.valid, value == came))
    for kind, port in {"read": dut.acc_read, **({"write": dut.acc_write} if cfg.int32 else {})}.items():
        for bank in range(2):
            claimed = h.register(dut.claims[kind][bank], f"claimed_{kind}{bank}")
            h.ensure(implies(port.en & (port.addr[-1] == bank), ~claimed), f"{kind}{bank}")
    # What makes it inductive; and where VECTOR does not write acc, nothing holds an item up behind rescale_add.
    h.ensure(implies(items.writes[Destination.ACC], items.complete), "writes_what_is_there")
    if not cfg.int32:
        h.ensure(items.back & ~items.writes[Destination.ACC], "nothing_holds_it_up")
    return h


GEMM, PADS, VECTOR = "gemm_core/gemm.py", "dae_pipeline/scratchpad.py", "vector_unit/items.py"
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
    Mutant(PADS, "Mux(vector_new, Mux(vector_bank, data[1], data[0]), held)", "Mux(vector_bank, data[1], data[0])"),
)
FIRST = Mutant(PADS, "port.ready.eq(~wants[:i].any() if i else 1)", "port.ready.eq(~wants[:1].any() if i else 1)")
prove("accumulators serve gemm, vector and load", FIRST, *SERVED, depth=1)(partial(arbitration, TINY))
WIDENED = Mutant(PADS, "value[-1].replicate(32 - size)", "value[0].replicate(32 - size)")
prove("accumulators serve gemm and load, and vector, which reads", WIDENED, *SERVED, depth=1)(
    partial(arbitration, replace(TINY, int32=False))
)
READS = Mutant(
    VECTOR,
    'Mux(self.front, reads(acc.before, read_bank["before"]), reads(acc, read_bank["here"]))',
    'reads(acc.before, read_bank["before"])',
)
WRITES = Mutant(
    VECTOR,
    "writes(write.before) & ~claimed[0], writes(write) & ~claimed[1]",
    "writes(write.before) & ~claimed[0], writes(write)",
)
ALL = replace(SMALL, taps=3, forward=True, residual_cycles=2)
for name, cfg, mutants in (
    ("plain", TINY, (READS, WRITES)),
    ("with all features", ALL, (READS, WRITES)),
    ("without int32", replace(ALL, int32=False), (READS,)),
):
    prove(
        f"VECTOR takes the ports of acc that GEMM leaves, {name}",
        *mutants,
        depth=1,
        reach=26,
        tested=False,
    )(partial(turns, cfg))
