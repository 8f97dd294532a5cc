"""Prove that every burst of the AXI master is legal on AXI3 and AXI4, inside the limits, and ends, for any memory."""

from __future__ import annotations

from functools import partial

from amaranth import Cat, Module, Mux, Signal, Value

from celosia.hw.dae_pipeline.dma import OFFSET_BITS, BurstSplitter, ReadEngine, WriteEngine
from celosia.hw.dae_pipeline.readmux import ReadMux
from celosia.hw.lib.axi import BURST_INCR
from celosia.hw.spec.pipeline import BURST_BOUNDARY, MAX_BURST
from proofs.declare import Mutant, prove
from proofs.fifos import Tracked, place
from proofs.harness import Harness, Inside, implies

LIMITS = ("dma_base", "dma_size")
"""Ports that keep their values during a run."""


def limits(h: Harness, dma_base: Value, dma_size: Value) -> None:
    """Assume what software promises: a base on a page boundary, and an end within 40 bits."""
    h.assume(dma_base[:12] == 0)
    h.assume(~(dma_base + dma_size + BURST_BOUNDARY)[40])


def words(count: Value, bus_bytes: int) -> Value:
    """Return `count` bytes in words of the bus, rounded up."""
    return (count + bus_bytes - 1) >> (bus_bytes.bit_length() - 1)


def legal(burst: Value, dma_base: Value, dma_size: Value, bus_bytes: int) -> Value:
    """Return whether a burst has whole words, inside a page of 4 KB, among the words that contain the limits."""
    size = (burst.len + 1) * bus_bytes
    return Cat(
        burst.addr % bus_bytes == 0,
        burst.addr[:12] + size <= BURST_BOUNDARY,
        burst.addr >= dma_base,
        burst.addr + size <= dma_base + words(dma_size, bus_bytes) * bus_bytes,
        burst.len < MAX_BURST,
    ).all()


def rows_inside(h: Harness, inside: Inside, part: str, bus_bytes: int, dma_size: Value) -> None:
    """Prove invariants of a `BurstSplitter`: its row lies inside the limits, and the burst is as long as possible."""
    word, left = inside[f"{part}word"], inside[f"{part}left"]
    active = inside[f"{part}valid"] & ~inside[f"{part}refused"]
    h.ensure(implies(active, word + left < words(dma_size, bus_bytes)), "row_inside")
    length, ends = inside[f"{part}length"], inside[f"{part}ends"]
    page = ~word[: (BURST_BOUNDARY // bus_bytes - 1).bit_length()]
    most = Mux(page < MAX_BURST, page, MAX_BURST - 1)
    h.ensure(implies(active, length == Mux(left < most, left, most)), "burst_length")
    h.ensure(implies(active, ends == (left == length)), "burst_ends")


def splitter(bus_bytes: int, bytes_bits: int) -> Harness:
    """Bursts are legal and cover each row exactly, in order."""
    h = Harness()
    dut = BurstSplitter(bus_bytes, bytes_bits)
    inside = h.add(dut, LIMITS)
    limits(h, dut.dma_base, dut.dma_size)
    row, split = dut.row.payload, dut.split.payload
    h.assume(row.bytes != 0)
    h.trusts(dut.row, "row")
    offers = Value.cast(split.burst)
    h.ensure(h.kept(dut.split.valid, dut.split.ready, Cat(offers, split.refused), "split"), "split_kept")
    shown = dut.split.valid & ~split.refused
    h.ensure(implies(shown, legal(split.burst, dut.dma_base, dut.dma_size, bus_bytes)), "legal")
    rows_inside(h, inside, "", bus_bytes, dut.dma_size)

    # The row by itself: the words that are still to come.
    m: Module = h.m
    at, count, final = Signal(OFFSET_BITS + 1), Signal(OFFSET_BITS + 1), Signal()
    goes = shown & dut.split.ready
    after = count - split.burst.len - 1
    first = row.offset >> (bus_bytes.bit_length() - 1)
    end = words((row.offset + row.bytes)[: OFFSET_BITS + 1], bus_bytes)
    with m.If(goes):
        m.d.sync += [at.eq(at + split.burst.len + 1), count.eq(after)]
    with m.If(dut.row.valid & dut.row.ready):
        m.d.sync += [at.eq(first), count.eq(end - first), final.eq(row.final)]
    h.ensure(implies(shown, split.burst.addr == dut.dma_base + at * bus_bytes), "where_the_last_one_ended")
    h.ensure(implies(shown, split.burst.len < count), "not_beyond_the_row")
    h.ensure(implies(shown, split.row_end == ((after == 0) | dut.halt)), "row_end")
    h.ensure(implies(shown, split.final == (split.row_end & final)), "final")
    h.ensure(implies(shown, (at == inside["word"]) & (count == inside["left"] + 1)), "model")
    h.ensure(implies(dut.split.valid, final == inside["final"]), "final_model")
    return h


def write_engine(bus_bytes: int, outstanding: int) -> Harness:
    """AW, W and B follow the rules of AXI for any behaviour of the memory."""
    h = Harness()
    dut = WriteEngine(bus_bytes, OFFSET_BITS, outstanding)
    inside = h.add(dut, LIMITS)
    axi = dut.axi
    limits(h, dut.dma_base, dut.dma_size)
    h.assume(dut.row.payload.bytes != 0)
    h.streams(dut)
    rows_inside(h, inside, "splitter.", bus_bytes, dut.dma_size)

    # AW: legal and kept.
    address = Cat(axi.awid, axi.awaddr, axi.awlen, axi.awsize, axi.awburst, axi.awcache, axi.awprot)
    h.ensure(h.kept(axi.awvalid, axi.awready, address, "aw"), "aw_kept")
    size = (axi.awlen + 1) * bus_bytes
    lies = Cat(
        axi.awaddr % bus_bytes == 0,
        axi.awlen < MAX_BURST,
        axi.awaddr[:12] + size <= BURST_BOUNDARY,
        axi.awaddr >= dut.dma_base,
        axi.awaddr + size <= dut.dma_base + words(dut.dma_size, bus_bytes) * bus_bytes,
        (1 << axi.awsize) == bus_bytes,
        axi.awburst == BURST_INCR,
    )
    h.ensure(implies(axi.awvalid, lies.all()), "aw_legal")

    # W: kept; each burst has as many beats as its AW says, and `last` with the last of them.
    h.ensure(h.kept(axi.wvalid, axi.wready, Cat(axi.wdata, axi.wstrb, axi.wlast), "w"), "w_kept")
    lengths = inside["lengths"]
    new = lengths.i.valid & lengths.i.ready
    beat, ending = axi.wvalid & axi.wready, axi.wvalid & axi.wlast
    tracked = Tracked(h, new, ending & axi.wready, lengths.i.payload, outstanding + 1)
    was_new = h.register(new, "was_new")
    offered = inside["split"].payload.burst
    same = (axi.awlen == h.register(lengths.i.payload, "new_len")) & (
        axi.awaddr == h.register(offered.addr, "new_addr")
    )
    h.ensure(implies(was_new, axi.awvalid & same), "one_aw_each")
    h.ensure(implies(axi.awvalid & ~h.register(axi.awvalid & ~axi.awready, "aw_stood"), was_new), "no_other_aw")
    sent = Signal(5)
    with h.m.If(beat):
        h.m.d.sync += sent.eq(sent + 1)
        with h.m.If(axi.wlast):
            h.m.d.sync += sent.eq(0)
    h.ensure(implies(axi.wvalid, tracked.count != 0), "no_data_without_a_burst")
    oldest = tracked.inside & (tracked.ahead == 0)
    h.ensure(implies(oldest & axi.wvalid, axi.wlast == (sent == tracked.value)), "last_in_time")
    # Invariants for the induction: where the lengths lie, and the beat in the register.
    level = inside["lengths.queue.level"]
    produce, consume = inside["lengths.queue.produce"], inside["lengths.queue.consume"]
    h.ensure((level == tracked.count - ending) & (level <= outstanding), "level")
    h.ensure(produce == place(consume, level, outstanding), "distance")
    content = inside.memory("lengths.queue.storage", place(consume, tracked.ahead - ending, outstanding))
    in_register = oldest & ending
    h.ensure(implies(tracked.inside & ~in_register, content == tracked.value), "content")
    h.ensure(implies(ending | (level == 0), inside["count"] == 0), "starts_anew")
    h.ensure(implies(~ending, inside["count"] == sent + axi.wvalid), "count")
    h.ensure(implies(level != 0, inside["count"] <= lengths.o.payload), "not_too_many")

    # The writer makes progress: a beat is offered as soon as there is one (on halt always), each response is taken.
    given = h.register(inside["lengths.o"].valid & (dut.beat.valid | dut.halt), "given")
    h.ensure(implies(given, axi.wvalid), "w_goes_on")
    order = inside["order.o"]
    h.ensure(axi.bready | ~order.valid | order.payload.refused, "every_response_is_taken")
    h.ensure(implies(dut.idle, ~(axi.awvalid | axi.wvalid | order.valid | inside["splitter"].split.valid)), "quiet")
    return h


class Responses:
    """The bursts of a `WriteEngine` without a response; memory answers only bursts that it has received.

    level, marks: number of entries in the queue of responses, and which of them are bursts. due: a response may come.
    """

    def __init__(self, h: Harness, dut: WriteEngine, inside: Inside, outstanding: int) -> None:
        axi = dut.axi
        # Bursts of which memory has the address, and of which it has the data.
        self.addressed, self.sent = addressed, sent = Signal(5), Signal(5)
        response = axi.bvalid & axi.bready
        h.m.d.sync += [
            addressed.eq(addressed + (axi.awvalid & axi.awready) - response),
            sent.eq(sent + (axi.wvalid & axi.wready & axi.wlast) - response),
        ]
        self.due = (addressed != 0) & (sent != 0)
        h.assume(implies(axi.bvalid, self.due))
        # Invariants for the induction: the bursts in the queue of responses, and the queue of lengths.
        self.level, consume = inside["order.queue.level"], inside["order.queue.consume"]
        ring = place(consume, self.level, outstanding)
        entries = [inside.memory("order.queue.storage", place(consume, i, outstanding)) for i in range(outstanding)]
        self.marks = [(self.level > i) & ~entry[1] for i, entry in enumerate(entries)]
        bursts = sum(self.marks[1:], self.marks[0])
        h.ensure((self.level <= outstanding) & (inside["order.queue.produce"] == ring), "distance")
        h.ensure(addressed + axi.awvalid == bursts, "addressed")
        h.ensure(sent + (axi.wvalid & axi.wlast) + inside["lengths.queue.level"] == bursts, "sent")
        lengths, level, count = inside["lengths"], inside["lengths.queue.level"], inside["count"]
        ring = place(inside["lengths.queue.consume"], level, outstanding)
        h.ensure((level <= outstanding) & (inside["lengths.queue.produce"] == ring), "lengths_distance")
        h.ensure(Mux(lengths.o.valid, count <= lengths.o.payload, count == 0), "not_too_many")


def responses(bus_bytes: int, outstanding: int) -> Harness:
    """When the engine is idle, memory has received every burst and answered it; it answers none before that."""
    h = Harness()
    dut = WriteEngine(bus_bytes, OFFSET_BITS, outstanding)
    inside = h.add(dut, LIMITS)
    counts = Responses(h, dut, inside, outstanding)
    order = inside["order.o"]
    answered = dut.axi.bready | (order.valid & order.payload.refused)  # a refused row leaves in one cycle
    h.ensure(implies(counts.due, answered), "every_response_is_taken")
    h.ensure((counts.addressed <= outstanding) & (counts.sent <= outstanding), "no_more_than_allowed")
    h.ensure(implies(dut.idle, (counts.addressed == 0) & (counts.sent == 0)), "quiet")
    return h


class Requests:
    """The bursts of a `ReadEngine`; memory sends only their beats.

    level: number of bursts and refused rows. coming: number of beats that are still to come. refused: rows whose beat
    is not in the queue of beats yet. inner: beats in that queue except the oldest. front: the oldest beat is there.
    """

    def __init__(self, h: Harness, dut: ReadEngine, inside: Inside, outstanding: int, room: int) -> None:
        request, response, order = dut.bus.request, dut.bus.response, inside["order"]
        asks, arrives = request.valid & request.ready, response.valid & response.ready
        self.coming, self.refused = Signal(12), Signal(6)
        h.m.d.sync += [
            self.coming.eq(self.coming + asks * (request.payload.len + 1) - arrives),
            self.refused.eq(
                self.refused
                + (order.i.valid & order.i.ready & order.i.payload.refused)
                - (order.o.valid & order.o.ready & order.o.payload.refused)
            ),
        ]
        h.assume(implies(response.valid, self.coming != 0))
        beats = inside["beats"]
        h.ensure(implies(beats.i.valid, beats.i.ready), "room_for_every_beat")
        # Invariants for the induction: how many of the entries in the queue of bursts are refused rows, and the levels.
        self.level = level = inside["order.queue.level"]
        consume = inside["order.queue.consume"]
        entries = [inside.memory("order.queue.storage", place(consume, i, outstanding)) for i in range(outstanding)]
        marks = [(level > i) & entry[1] for i, entry in enumerate(entries)]
        h.ensure(self.refused == sum(marks[1:], marks[0]), "refused_counted")
        ring = place(consume, level, outstanding)
        h.ensure((level <= outstanding) & (inside["order.queue.produce"] == ring), "distance")
        self.inner, self.front, level = inside["beats.queue.inner_level"], beats.o.valid, inside["beats.queue.level"]
        right = (level == self.inner + self.front) & (self.inner < room) & (self.front | (self.inner <= 1))
        h.ensure(right, "levels")
        h.ensure(inside["free"] + level + self.coming + self.refused == room, "every_beat_counted")


def read_engine(bus_bytes: int, outstanding: int, room: int) -> Harness:
    """Requests are legal and kept, and there is room for every beat that a request brings."""
    h = Harness()
    dut = ReadEngine(bus_bytes, OFFSET_BITS, outstanding, room)
    inside = h.add(dut, LIMITS)
    limits(h, dut.dma_base, dut.dma_size)
    h.assume(dut.row.payload.bytes != 0)
    request, response = dut.bus.request, dut.bus.response
    h.trusts(dut.row, "row")
    h.trusts(response, "response")
    h.obeys(dut.beat, "beat", unless=dut.halt)
    h.obeys(request, "request")
    burst = request.payload
    h.ensure(implies(request.valid, legal(burst, dut.dma_base, dut.dma_size, bus_bytes)), "legal")
    rows_inside(h, inside, "splitter.", bus_bytes, dut.dma_size)
    requests = Requests(h, dut, inside, outstanding, room)
    h.ensure(implies(dut.idle, (requests.coming == 0) & ~request.valid & ~dut.beat.valid), "quiet")
    return h


def read_mux(bus_bytes: int, outstanding: int) -> Harness:
    """AR carries each request once and is kept until taken; each beat goes to the unit that requested its burst."""
    h = Harness()
    dut = ReadMux(bus_bytes, outstanding)
    inside = h.add(dut)
    axi = dut.axi
    for name, client in (("fetch", dut.fetch), ("load", dut.load)):
        h.trusts(client.request, f"{name}_request")
    r_payload = Cat(axi.rid, axi.rdata, axi.rresp, axi.rlast)
    h.assume(h.kept(axi.rvalid, axi.rready, r_payload, "r"))
    address = Cat(axi.arid, axi.araddr, axi.arlen, axi.arsize, axi.arburst, axi.arcache, axi.arprot)
    h.ensure(h.kept(axi.arvalid, axi.arready, address, "ar"), "ar_kept")
    h.ensure(((1 << axi.arsize) == bus_bytes) & (axi.arburst == BURST_INCR), "ar_size")

    fetch, load = (client.request.valid & client.request.ready for client in (dut.fetch, dut.load))
    h.ensure(~(fetch & load), "one_at_a_time")
    was_fetch, was_load = h.register(fetch, "was_fetch"), h.register(load, "was_load")
    for name, was, client in (("fetch", was_fetch, dut.fetch), ("load", was_load, dut.load)):
        asked = h.register(client.request.payload, f"{name}_asked")
        same = Cat(axi.araddr, axi.arlen[:4]) == asked
        h.ensure(implies(was, axi.arvalid & same & (axi.arlen < MAX_BURST)), f"{name}_goes_out")
        h.ensure(h.kept(client.response.valid, client.response.ready, client.response.payload, name), f"{name}_kept")
    stood = h.register(axi.arvalid & ~axi.arready, "stood")
    h.ensure(implies(axi.arvalid & ~stood, was_fetch | was_load), "nothing_else_goes_out")

    # Neither has to wait for more than one burst of the other.
    free = (~axi.arvalid | axi.arready) & inside["owners"].i.ready
    h.ensure(implies(free & (dut.fetch.request.valid | dut.load.request.valid), fetch | load), "goes_on")
    for name, goes, other, next_ in (("fetch", fetch, load, 0), ("load", load, fetch, 1)):
        overtaken = Signal(name=f"{name}_overtaken")
        h.m.d.sync += overtaken.eq(getattr(dut, name).request.valid & ~goes & (overtaken | other))
        h.ensure(implies(overtaken, ~other & (inside["load_next"] == next_)), f"{name}_is_next")

    taken = axi.rvalid & axi.rready
    tracked = Tracked(h, fetch | load, taken & axi.rlast, load, outstanding)
    oldest = tracked.inside & (tracked.ahead == 0) & axi.rvalid
    h.ensure(implies(oldest, dut.load.response.valid == tracked.value), "load_gets_its_own")
    h.ensure(implies(oldest, dut.fetch.response.valid == ~tracked.value), "fetch_gets_its_own")
    h.ensure(implies(axi.rready, tracked.count != 0), "takes_only_what_was_asked_for")
    h.ensure(implies(dut.idle, ~axi.arvalid & (tracked.count == 0)), "quiet")
    ready = Cat(dut.fetch.response.ready, dut.load.response.ready).all()
    h.ensure(implies(ready & (tracked.count != 0), axi.rready), "every_beat_is_taken")
    produce, consume = inside["owners.queue.produce"], inside["owners.queue.consume"]
    h.ensure(inside["owners.queue.level"] == tracked.count, "level")
    h.ensure(produce == place(consume, tracked.count, outstanding), "distance")
    content = inside.memory("owners.queue.storage", place(consume, tracked.ahead, outstanding))
    h.ensure(implies(tracked.inside, content == tracked.value), "content")
    return h


DMA, MUX = "dae_pipeline/dma.py", "dae_pipeline/readmux.py"
CROSSES = Mutant(DMA, "page = ~word[:page_bits]", "page = ~word[:page_bits] | ((1 << page_bits) - 1)")
OUTSIDE = Mutant(DMA, "row.offset + row.bytes > self.dma_size", "row.offset > self.dma_size")
for bus_bytes, bytes_bits in ((8, 33), (16, 38)):
    prove(f"bursts of a row, {8 * bus_bytes} bits", CROSSES, OUTSIDE)(partial(splitter, bus_bytes, bytes_bits))
    prove(
        f"write channels, {8 * bus_bytes} bits",
        CROSSES,
        OUTSIDE,
        Mutant(DMA, "w_last.eq(count == lengths.o.payload)", "w_last.eq(count[:3] == lengths.o.payload[:3])"),
        Mutant(DMA, "w_free.eq(~axi.wvalid | axi.wready)", "w_free.eq(1)"),
        Mutant(DMA, "aw_free = ~axi.awvalid | axi.awready", "aw_free = ~axi.awvalid | axi.awready | axi.wready"),
        reach=14,
    )(partial(write_engine, bus_bytes, 8))
    prove(
        f"read requests, {8 * bus_bytes} bits",
        CROSSES,
        OUTSIDE,
        Mutant(DMA, "(free > split.payload.burst.len)", "(free != 0)"),
        reach=14,
    )(partial(read_engine, bus_bytes, 8, 128))
    prove(
        f"read channels, {8 * bus_bytes} bits",
        Mutant(MUX, "with m.If(~axi.arvalid | axi.arready):", "with m.If(1):"),
        Mutant(
            MUX,
            "owners.i.payload.eq(pick_load)",
            "owners.i.payload.eq(load_next)",
            near="pick_load.eq(load.request.valid & (load_next |",
        ),
    )(partial(read_mux, bus_bytes, 16))
prove(
    "write responses",
    Mutant(
        DMA, "Cat(split.valid, axi.awvalid, axi.wvalid, order.o.valid)", "Cat(split.valid, axi.awvalid, axi.wvalid)"
    ),
    depth=1,
    reach=14,
)(partial(responses, 8, 8))
