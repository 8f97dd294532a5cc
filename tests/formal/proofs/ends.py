"""Prove that each transaction ends in a bounded number of cycles, if no one delays the AXI master over PATIENCE cycles.

Work counts the remaining steps, with weights such that each step decreases it. In cycles without progress,
the component waits for another. So each unit of work takes at most PATIENCE + 1 cycles.
"""

from __future__ import annotations

from functools import partial

from amaranth import Mux, Signal, Value

from celosia.hw.dae_pipeline.dma import OFFSET_BITS, ReadEngine, WriteEngine
from celosia.hw.dae_pipeline.readmux import ReadMux
from celosia.hw.spec.pipeline import MAX_BURST
from proofs.bursts import LIMITS, Requests, Responses
from proofs.declare import Mutant, prove
from proofs.fifos import List, place
from proofs.harness import Harness, implies

PATIENCE = 3


def ends(h: Harness, going: Value, work: Value, most: int, waits: dict[str, Value]) -> None:
    """`going` lasts less than `most` * (PATIENCE + 1) cycles, where `most` is the maximum of the work.

    waits: the conditions under which the component waits, by the name of whom it waits for.
    """
    now, went = Signal(range(2 * most), name="work"), h.register(going, "went")
    h.m.d.comb += now.eq(work)
    before = h.register(now, "before")
    idle = Signal(range(PATIENCE + 3))
    h.m.d.comb += idle.eq(Mux(went & (now == before), h.register(idle, "was_idle") + 1, 0))
    time = Signal(range(2 * most * (PATIENCE + 1)))
    h.m.d.sync += time.eq(Mux(going, time + 1, 0))
    for name, condition in waits.items():
        waited = Signal(range(PATIENCE + 1), name=f"waited_{name}")
        h.m.d.sync += waited.eq(Mux(condition, waited + 1, 0))
        h.assume(implies(condition, waited < PATIENCE))
        h.ensure(implies(going & condition, waited >= idle), f"waits_{name}")
    h.ensure(implies(going, (now != 0) & (now <= most)), "work")
    h.ensure(implies(going & went, now <= before), "never_more")
    h.ensure(implies(going, idle <= PATIENCE), "somebody_is_waited_for")
    h.ensure(implies(going, time <= (most - now) * (PATIENCE + 1) + idle), "time")
    h.ensure(implies(going, time < most * (PATIENCE + 1)), "ends")


def write_burst(outstanding: int) -> Harness:
    """Any write burst ends, from AW to its response; before a halt it may wait for data."""
    h = Harness()
    dut = WriteEngine(8, OFFSET_BITS, outstanding)
    inside = h.add(dut, LIMITS)
    axi, m = dut.axi, h.m
    h.trusts(dut.beat, "beat")
    responses = Responses(h, dut, inside, outstanding)
    lengths, order = inside["lengths"], inside["order"]
    level, count = inside["lengths.queue.level"], inside["count"]
    pops, answers = lengths.o.valid & lengths.o.ready, order.o.valid & order.o.ready
    begins = lengths.i.valid & lengths.i.ready

    # For one chosen burst: how many are before and behind it in the queues; whether its address and last beat wait.
    open_, loaded, has_aw, has_w = Signal(), Signal(), Signal(), Signal()
    before_it, beats_before, behind = (Signal(range(outstanding + 1), name=n) for n in ("front", "loads", "behind"))
    with m.If(~open_ & begins & h.any(1, "choose")):
        m.d.sync += [open_.eq(1), loaded.eq(0), has_aw.eq(1), has_w.eq(0), behind.eq(0)]
        m.d.sync += [before_it.eq(responses.level - answers), beats_before.eq(level - pops)]
    with m.Elif(open_):
        m.d.sync += [behind.eq(behind + begins), has_aw.eq(has_aw & ~axi.awready)]
        with m.If(axi.wready):
            m.d.sync += has_w.eq(0)
        with m.If(pops & ~loaded):
            m.d.sync += [beats_before.eq(beats_before - 1), loaded.eq(beats_before == 0), has_w.eq(beats_before == 0)]
        with m.If(answers):
            m.d.sync += [before_it.eq(before_it - 1), open_.eq(before_it != 0)]

    to_load = Mux(loaded, has_w, 2 * (MAX_BURST * (beats_before + 1) - count) + axi.wvalid)
    complete = open_ & loaded & ~has_w & ~has_aw
    waits = {
        "aw": open_ & has_aw & ~axi.awready,
        "w": open_ & Mux(loaded, has_w, axi.wvalid) & ~axi.wready,
        "beat": open_ & ~loaded & ~axi.wvalid & ~dut.beat.valid & ~dut.halt,
        "b": complete & ~order.o.payload.refused & ~axi.bvalid,
    }
    ends(h, open_, before_it + 1 + has_aw + to_load, (2 * MAX_BURST + 1) * outstanding + 2, waits)
    h.ensure(implies(complete, responses.due), "response_is_due")
    # Invariants that make the proof inductive.
    last = axi.wvalid & axi.wlast
    h.ensure(implies(open_, before_it < responses.level), "in_order")
    h.ensure(implies(open_ & ~loaded, level == beats_before + 1 + behind), "in_lengths")
    h.ensure(implies(open_ & loaded, Mux(has_w, last & (level <= behind), level + last <= behind)), "loaded")
    h.ensure(implies(open_, Mux(has_aw, axi.awvalid & (behind == 0), ~axi.awvalid | (behind != 0))), "address")
    following = [mark & (before_it <= i) for i, mark in enumerate(responses.marks)]
    h.ensure(implies(open_, sum(following[1:], following[0]) == 1 + behind), "behind")
    return h


def write_halt(outstanding: int) -> Harness:
    """The write engine becomes idle after a halt."""
    h = Harness()
    dut = WriteEngine(8, OFFSET_BITS, outstanding)
    inside = h.add(dut, LIMITS)
    axi = dut.axi
    responses = Responses(h, dut, inside, outstanding)
    level, split = inside["lengths.queue.level"], inside["splitter.split"]
    to_load = 2 * (MAX_BURST * level - inside["count"])[: (MAX_BURST * outstanding).bit_length()]
    longest = 2 * MAX_BURST + 2  # what a burst of the splitter brings
    work = split.valid * (longest + 1) + to_load + axi.wvalid + axi.awvalid + responses.level
    waits = {
        "aw": axi.awvalid & ~axi.awready,
        "w": axi.wvalid & ~axi.wready,
        "b": responses.due & ~inside["order.o"].payload.refused & ~axi.bvalid,
    }
    ends(h, dut.halt & ~dut.idle, work, longest + 1 + (2 * MAX_BURST + 1) * outstanding + 2, waits)
    return h


def read_burst(outstanding: int) -> Harness:
    """Any read burst ends, from AR to its last beat; it may also wait for the unit that requested it."""
    h = Harness()
    dut = ReadMux(8, outstanding)
    inside = h.add(dut)
    axi, m = dut.axi, h.m
    begins = inside["ask"]
    taken = axi.rvalid & axi.rready
    finishes = taken & axi.rlast
    bursts = List(m, "burst", 4, outstanding)
    bursts.moves(begins, inside["burst"].len, finishes)
    sent = Signal(4)
    with m.If(taken):
        m.d.sync += sent.eq(Mux(axi.rlast, 0, sent + 1))
    # Memory sends only the beats of bursts that it has, and marks the last ones.
    h.assume(implies(axi.rvalid, (bursts.count > axi.arvalid) & (axi.rlast == (sent == bursts.items[0]))))

    open_, has_ar, before_it = Signal(), Signal(), Signal(range(outstanding + 1))
    with m.If(~open_ & begins & h.any(1, "choose")):
        m.d.sync += [open_.eq(1), has_ar.eq(1), before_it.eq(bursts.count - finishes)]
    with m.Elif(open_):
        m.d.sync += has_ar.eq(has_ar & ~axi.arready)
        with m.If(finishes):
            m.d.sync += [before_it.eq(before_it - 1), open_.eq(before_it != 0)]
    waits = {
        "ar": open_ & has_ar & ~axi.arready,
        "r": open_ & ~(has_ar & (before_it == 0)) & ~taken,
    }
    ends(h, open_, has_ar + MAX_BURST * (before_it + 1) - sent, MAX_BURST * outstanding + 1, waits)
    # Invariants that make the proof inductive.
    level, consume = inside["owners.queue.level"], inside["owners.queue.consume"]
    ring = place(consume, level, outstanding)
    h.ensure((level == bursts.count) & (inside["owners.queue.produce"] == ring) & (level <= outstanding), "level")
    h.ensure(Mux(level == 0, sent == 0, sent <= bursts.items[0]), "sent")
    h.ensure(implies(open_, before_it < level), "in_order")
    h.ensure(implies(axi.arvalid, level != 0), "has_a_burst")
    h.ensure(implies(axi.arvalid & (level == 1), sent == 0), "begins_with_its_address")
    h.ensure(implies(open_ & has_ar, axi.arvalid & (level == before_it + 1)), "newest")
    h.ensure(implies(open_ & ~has_ar & axi.arvalid, level > before_it + 1), "newer")
    return h


def read_halt(outstanding: int, room: int) -> Harness:
    """The read engine becomes idle after a halt, and takes every beat until then."""
    h = Harness()
    dut = ReadEngine(8, OFFSET_BITS, outstanding, room)
    inside = h.add(dut, LIMITS)
    request, response = dut.bus.request, dut.bus.response
    requests = Requests(h, dut, inside, outstanding, room)
    order = inside["order.o"]
    # Memory sends the beats of the oldest burst, and marks the last one.
    arrives, sent = response.valid & response.ready, Signal(5)
    bursts = List(h.m, "burst", 4, outstanding)
    bursts.moves(request.valid & request.ready, request.payload.len, arrives & response.payload.last)
    h.m.d.sync += sent.eq(Mux(arrives, Mux(response.payload.last, 0, sent + 1), sent))
    there = [bursts.count > i for i in range(outstanding)]
    h.assume(implies(response.valid, there[0] & (response.payload.last == (sent == bursts.items[0]))))
    lengths = [Mux(flag, item + 1, 0) for flag, item in zip(there, bursts.items)]
    h.ensure(requests.coming + sent == sum(lengths[1:], lengths[0]), "coming")
    h.ensure(Mux(there[0], sent <= bursts.items[0], sent == 0), "not_too_many")
    h.ensure(requests.refused + bursts.count == requests.level, "bursts_counted")
    turn = order.valid & order.payload.refused
    h.ensure(implies(there[0], response.ready | turn), "every_beat_is_taken")
    longest = 4 * MAX_BURST
    work = (
        inside["split"].valid * (longest + 1)
        + 4 * (requests.coming + requests.refused)
        + 2 * requests.inner
        + requests.front
    )
    waits = {
        "request": request.valid & ~request.ready,
        "response": there[0] & ~turn & ~response.valid,
    }
    ends(h, dut.halt & ~dut.idle, work, longest + 1 + 4 * room, waits)
    return h


DMA, MUX = "dae_pipeline/dma.py", "dae_pipeline/readmux.py"
FILLS = Mutant(
    DMA,
    "w_load.eq(w_free & lengths.o.valid & (self.beat.valid | self.halt))",
    "w_load.eq(w_free & lengths.o.valid & self.beat.valid)",
)
prove(
    "every write burst ends",
    FILLS,
    Mutant(
        DMA,
        "axi.bready.eq(order.o.valid & ~order.o.payload.refused)",
        "axi.bready.eq(order.o.valid & ~order.o.payload.refused & ~axi.wvalid)",
    ),
    depth=1,
)(partial(write_burst, 8))
prove(
    "the write engine is quiet after halt",
    Mutant(DMA, "last.eq(ends | refused | self.halt)", "last.eq(ends | refused)"),
    FILLS,
    depth=1,
)(partial(write_halt, 8))
prove(
    "every read burst ends",
    Mutant(
        MUX,
        "owners.o.ready.eq(self.read_beat & axi.rlast)",
        "owners.o.ready.eq(self.read_beat & axi.rlast & ~ask)",
        near="axi.arvalid.eq(ask)",
    ),
    depth=1,
)(partial(read_burst, 16))
prove(
    "the read engine is quiet after halt",
    Mutant(
        DMA,
        "order.o.ready.eq((response.valid & response.payload.last) | oldest.refused)",
        "order.o.ready.eq(response.valid & response.payload.last)",
    ),
    Mutant(DMA, "beats.o.ready.eq(self.beat.ready | self.halt)", "beats.o.ready.eq(self.beat.ready)"),
    depth=1,
)(partial(read_halt, 4, 128))
