"""Prove of data through STORE and LOAD that any one byte of any one copy moves from its source to its destination.

Both are chains of queues and parts that keep an order. So what is proved of the n-th item of one link holds for the
n-th item of the next, however long items wait between them:

    instruction -> Rows, Walker     both get the same copy, and the links are joined     instruction_of_store, .._load
    Rows -> row                     of elements that are spread, the channel's halves     halves_of_rows
    Rows, Walker                    the n-th element of a copy is the n-th of its rows   elements_of_rows, .._of_steps
    STORE: step -> chunk             the bytes of its place in the scratchpad             chunks_of_steps
           chunk -> W                each byte to its address                             chunks_to_memory
    LOAD:  row -> beats             its words in memory, in order                        beats_of_rows
           beat -> chunk             its bytes, in order                                  bytes.py
           step -> scratchpad       the bytes of its chunk, or padding                    steps_to_scratchpads

fifos.py proves that queues are lists, and addresses.py that steps and rows follow the closed form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from amaranth import Array, Cat, Const, Mux, Signal, Value
from amaranth.lib import data

from celosia.hw.dae_pipeline import address_generators, dma
from celosia.hw.dae_pipeline.address_generators import ElementSplitter, listed_row_layout
from celosia.hw.dae_pipeline.dma import OFFSET_BITS, ReadEngine
from celosia.hw.dae_pipeline.load import LoadChannel
from celosia.hw.dae_pipeline.scratchpad_writer import ScratchpadWriter
from celosia.hw.dae_pipeline.store import ScratchpadReader, Store
from celosia.hw.lib.axi import ADDR_BITS
from celosia.hw.lib.layout import ERROR_BITS
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, buffers, element_bytes
from celosia.hw.spec.regs import Error
from celosia.hw.spec.scratchpads import scratchpads
from proofs.addresses import list_of, walk_of
from proofs.bursts import LIMITS, limits
from proofs.declare import Mutant, prove
from proofs.fifos import List, place
from proofs.handshakes import CONFIGS, OTHER, SMALL
from proofs.harness import Harness, Inside, implies
from proofs.writes import CUT, Model

SIZE_BITS, NUMBER_BITS, MAX_SHIFT = 2, 9, 1
"""Bits of the sizes of blocks whose elements are numbered, and of the numbers; log2 of the largest element's bytes."""
ROW_BITS, ELEMENT, BUS = 12, 32, 4
"""For rows of elements that are cut in halves: bits of their length, bytes of an element and of a bus word."""
BYTE = 3
"""Number of this part of the proof of STORE from its rows on; writes.py has the other parts."""


SPREAD = replace(SMALL, block_in=16, block_out=8, ports=2)
"""A Config whose weights may come through both read ports."""


def log2(value: int) -> int:
    return value.bit_length() - 1


# Both -------------------------------------------------------------------------------------------------------


def small_blocks() -> Any:
    """Return blocks of up to 3 elements, rows and planes, so that products of sizes are small."""
    return patch.multiple(
        address_generators, BORDERS={axis: SIZE_BITS + 1 for axis in "xy"}, X_BITS=SIZE_BITS, YZ_BITS=SIZE_BITS
    )


def product(*factors: Value) -> Value:
    """Multiply sizes or indices, in as many bits as the number of an element has."""
    result = factors[0]
    for factor in factors[1:]:
        result = (result * factor)[:NUMBER_BITS]
    return result


def elements_of_rows() -> Harness:
    """The rows of a copy hold its elements in the order z, y, x, the last of them at its end.

    Any element, by its number, lies in one row, at addr + z * z_step + y * y_step + x * its size.
    """
    with small_blocks():
        listing = list_of(Harness(), MAX_SHIFT)
    h, row, block, count = listing.h, listing.dut.row.payload, listing.listed, listing.count
    x, y, z = (h.constant(SIZE_BITS, axis) for axis in "xyz")
    exists = listing.runs & (x < block.x_size) & (y < block.y_size) & (z < block.z_size)
    number, before, size = (Signal(NUMBER_BITS, name=name) for name in ("number", "before", "size"))
    h.m.d.comb += [
        number.eq(product(product(z, block.y_size) + y, block.x_size) + x),
        size.eq(row.bytes >> block.shift),
    ]
    with h.m.If(listing.begins):
        h.m.d.sync += before.eq(0)
    with h.m.Elif(listing.steps):
        h.m.d.sync += before.eq(before + size)
    in_row = (before <= number) & (number < before + size)
    its_row = (count.index["z"] == z) & (listing.planes | (count.index["y"] == y))
    h.ensure(implies(exists, in_row == its_row), "in_its_row")
    offset = row.offset + ((number - before) << block.shift)
    wanted = block.addr + z * block.z_step + y * block.y_step + (x << block.shift)
    bits = len(block.addr)
    h.ensure(implies(exists & in_row, offset[:bits] == wanted[:bits]), "at_its_address")
    total = product(block.x_size, block.y_size, block.z_size)
    h.ensure(implies(listing.runs & row.final, before + size == total), "as_many_as_there_are")
    # Invariants that make the proof inductive.
    rows = product(count.index["z"], block.y_size) + count.index["y"]
    h.ensure(implies(listing.runs, before == product(rows[:NUMBER_BITS], block.x_size)), "before")
    merged = (block.x_size << block.shift) == block.y_step
    h.ensure(implies(listing.runs, listing.planes == merged), "merged")
    waits, waiting = listing.waits, listing.waiting
    h.ensure(implies(waits, listing.sizes == waiting.x_size * waiting.y_size), "sizes")
    h.ensure(implies(waits, waiting.shift <= MAX_SHIFT) & implies(listing.runs, block.shift <= MAX_SHIFT), "shifts")
    plane = (block.x_size * block.y_size) << block.shift
    h.ensure(implies(listing.runs, listing.plane_bytes == plane), "plane_bytes")
    size_of_row = Mux(merged, plane, block.x_size << block.shift)
    h.ensure(implies(listing.runs, row.bytes == size_of_row), "row_bytes")
    return h


def elements_of_steps(padded: bool) -> Harness:
    """The steps within the borders of a copy belong to its elements in the order z, y, x, by their number."""
    with small_blocks():
        walk_ = walk_of(Harness(), padded)
    h, job, new, index = walk_.h, walk_.held, walk_.dut.job.payload, walk_.count.index
    number = Signal(NUMBER_BITS, name="number")
    with h.m.If(walk_.accepts):
        h.m.d.sync += number.eq(0)
    with h.m.Elif(walk_.steps & walk_.ends & ~walk_.outside):
        h.m.d.sync += number.eq(number + 1)

    def first(axis: str) -> Value:
        return job[f"{axis}_first"] if padded else Const(0)

    def stop(axis: str) -> Value:
        return job[f"{axis}_stop"] if padded else job[f"{axis}_end"] + 1

    def passed(axis: str) -> Value:
        """Return the number of indices within the borders before this one."""
        beyond = Mux(index[axis] >= stop(axis), stop(axis), index[axis])
        return Mux(index[axis] < first(axis), 0, beyond - first(axis))[: SIZE_BITS + 1]

    if padded:
        for axis in "xy":
            some = new[f"{axis}_first"] < new[f"{axis}_stop"]
            h.assume(some & (new[f"{axis}_stop"] <= new[f"{axis}_end"] + 1))  # see instruction_of_load
    width, height = (Signal(SIZE_BITS + 2, name=name) for name in ("width", "height"))
    h.m.d.comb += [width.eq(stop("x") - first("x")), height.eq(stop("y") - first("y"))]
    plane = index["z"]

    def numbered(y: Value, x: Value) -> Value:
        row = (product(plane, height) + y)[:NUMBER_BITS]
        return (product(row, width) + x)[:NUMBER_BITS]

    inside = walk_.runs & ~walk_.outside
    own = numbered(index["y"] - first("y"), index["x"] - first("x"))
    h.ensure(implies(inside, number == own), "numbers")
    ends = walk_.ends & walk_.count.at_end()
    total = product(job.z_end + 1, height, width)
    h.ensure(implies(walk_.runs & ends, number + Mux(walk_.outside, 0, 1) == total), "as_many_as_there_are")
    # Invariants that make the proof inductive.
    in_row = (index["y"] >= first("y")) & (index["y"] < stop("y"))
    h.ensure(implies(walk_.runs, number == numbered(passed("y"), Mux(in_row, passed("x"), 0))), "counts")
    for axis in "xy":
        good = (first(axis) < stop(axis)) & (stop(axis) <= job[f"{axis}_end"] + 1)
        h.ensure(implies(walk_.runs, good), f"borders_of_{axis}")
    return h


def goes_to(h: Harness, stream: Any, goes: Value, fields: Mapping[str, tuple[Value, Value]], name: str) -> None:
    """`stream` takes an item exactly when `goes` is 1, with `fields`: pairs of actual and expected values."""
    h.ensure((stream.valid & stream.ready) == goes, f"{name}_with_it")
    for field, (value, wanted) in fields.items():
        h.ensure(implies(goes, Value.cast(value) == wanted), f"{name}_{field}")


def joined(h: Harness, inside: Inside, *pairs: str) -> None:
    """The two streams of each pair "from to" are one: every item passes through both."""
    for pair in pairs:
        source, sink = (getattr(inside[part], port) for part, port in (path.split(".") for path in pair.split()))
        name = pair.replace(" ", "_to_").replace(".", "_")
        h.ensure((source.valid == sink.valid) & (source.ready == sink.ready), name)
        h.ensure(Value.cast(source.payload) == Value.cast(sink.payload), f"{name}_as_it_is")


def instruction_of_store(cfg: Config) -> Harness:
    """An instruction goes to Rows and to the Reader's walker at once, and a row to the engine and to the packer."""
    h = Harness()
    dut = Store(cfg, 2)
    inside = h.add(dut)
    f, chunk = dut.instr.payload.fields, inside["reader"].chunk_bytes
    h.assume((f.x_size != 0) & (f.y_size != 0) & (f.z_size != 0))  # proved of fetch
    goes = dut.instr.valid & dut.instr.ready
    blocks, jobs, rows = inside["rows"].block, inside["jobs"].i, inside["rows"].row
    block, job, row = blocks.payload, jobs.payload, rows.payload
    goes_to(h, blocks, goes, dram_side(block, f) | {"size": (1 << block.shift, Const(cfg.piece_bytes))}, "block")
    ends = {axis: (job[f"{axis}_end"] + 1, f[f"{axis}_size"]) for axis in "xyz"}
    steps = {"steps": ((job.step_end + 1) * chunk, Const(cfg.piece_bytes))}
    goes_to(h, jobs, goes, scratchpad_side(job, f) | ends | steps, "job")

    listed, positions = rows.valid & rows.ready & ~inside["stop"], inside["positions"].i  # `stop` resets all of them
    requests, bits = inside["requests"].i, log2(cfg.bus_bytes)
    h.assume((row.bytes != 0) & (row.bytes & (cfg.piece_bytes - 1) == 0))  # proved of Rows
    goes_to(
        h,
        requests,
        listed,
        {name: (requests.payload[name], row[name]) for name in ("offset", "bytes", "final")},
        "requests",
    )
    place_ = positions.payload
    chunks = {
        "first": (place_.first, row.offset[:bits]),
        "chunks": ((place_.chunks + 1) * chunk, row.bytes),
        "single": (place_.single, row.bytes == chunk),
        "fills": (place_.fills, row.offset[:bits] + chunk >= cfg.bus_bytes),
    }
    goes_to(h, positions, listed, chunks, "place")
    joined(h, inside, "jobs.o reader.job", "requests.o engine.row", "positions.o packer.row")
    joined(h, inside, "reader.chunk chunks.i", "chunks.o packer.chunk", "packer.beat engine.beat")
    return h


def widens(cfg: Config, f: Any) -> Value:
    """Return whether `widen` is legal: only loads to acc widen, and without `int32` all of them do."""
    of_acc = f.buffer == Buffer.ACC
    return implies(f.widen, of_acc) if cfg.int32 else f.widen == of_acc


def dram_side(block: Any, f: Any) -> dict[str, tuple[Value, Value]]:
    fields = {"addr": "dram_addr", "y_step": "dram_y", "z_step": "dram_z"}
    fields |= {name: name for name in ("x_size", "y_size", "z_size")}
    return {name: (block[name], Value.cast(f[field])) for name, field in fields.items()}


def scratchpad_side(job: Any, f: Any) -> dict[str, tuple[Value, Value]]:
    fields = {"base": "sram_base", "x_step": "sram_x", "y_step": "sram_y", "z_step": "sram_z"}
    return {name: (job[name], Value.cast(f[field])) for name, field in fields.items()}


def halves_of_rows() -> Harness:
    """A row of elements to be cut gives one half for each element, each an element behind the one before.

    A row that is not to be cut stays as it is.
    """
    h = Harness()
    dut = ElementSplitter(listed_row_layout(ROW_BITS, 3), ELEMENT, BUS)
    inside = h.add(dut)
    row, half, count = dut.row.payload, dut.half.payload, Signal(ROW_BITS, name="count")
    h.trusts(dut.row, "row")
    h.assume((row.bytes != 0) & implies(row.cut, row.bytes & (ELEMENT - 1) == 0))  # this and the next: proved of Rows
    h.assume(implies(row.cut, row.alone == (row.bytes == ELEMENT)))
    whole = row.bytes >> log2(ELEMENT)
    with h.m.If(dut.row.valid & dut.half.ready):
        h.m.d.sync += count.eq(Mux(dut.row.ready, 0, count + 1))
    h.ensure(dut.half.valid == dut.row.valid, "valid")
    is_last = ~row.cut | (count + 1 == whole)
    there = dut.row.valid
    h.ensure(implies(there, dut.row.ready == (dut.half.ready & is_last)), "as_many_as_there_are")
    h.ensure(implies(there, half.final == (row.final & is_last)), "final")
    h.ensure(implies(there, half.bytes == Mux(row.cut, ELEMENT // 2, row.bytes)), "bytes")
    h.ensure(implies(there, half.offset == (row.offset + (count << log2(ELEMENT)))[:OFFSET_BITS]), "offset")
    # Invariants that make the proof inductive.
    h.ensure(inside["inside"] == (count != 0), "inside")
    h.ensure(implies(count != 0, dut.row.valid & row.cut), "goes_on")
    h.ensure(implies(count != 0, (count < whole) & (inside["left"] == whole - count)), "left")
    h.ensure(implies(count != 0, inside["last"] == (count + 1 == whole)), "last")
    begin = ((row.offset + (count << log2(ELEMENT)))[:OFFSET_BITS]) >> log2(BUS)
    h.ensure(implies(count != 0, inside["begin"] == begin), "begin")
    return h


def instruction_of_load(cfg: Config, number: int = 0) -> Harness:
    """An instruction goes to Rows and to the Writer's walker at once, and a row to the engine and to the aligner.

    Channel `number` loads its half of spread elements.
    """
    h = Harness()
    own, spread = buffers(cfg), scratchpads(cfg)["wgt"].spread
    dut = LoadChannel(cfg, own, 2, number)
    inside = h.add(dut)
    f, bus, bits = dut.instr.payload.fields, cfg.bus_bytes, log2(cfg.bus_bytes)
    h.assume((f.x_size != 0) & (f.y_size != 0) & (f.z_size != 0))  # these three are proved of fetch
    h.assume(f.buffer <= own[-1])
    h.assume(widens(cfg, f))
    is_spread = f.spread if spread else Const(0)
    h.assume(implies(is_spread, f.buffer == Buffer.WGT))
    goes = dut.instr.valid & dut.instr.ready
    blocks, jobs = inside["rows"].block, inside["jobs"].i
    rows = inside["halves"].half if spread else inside["rows"].row
    block, job, row = blocks.payload, jobs.payload, rows.payload
    size = Signal(range(1 << 17), name="element_bytes")
    for buffer in own:
        with h.m.If(f.buffer == buffer):
            h.m.d.comb += size.eq(element_bytes(cfg, buffer))
    with h.m.If(f.widen):
        h.m.d.comb += size.eq(element_bytes(cfg, Buffer.ACC, True))
    chunk = Mux(size < bus, size, bus)
    begin = (f.dram_addr + Mux(is_spread, number * element_bytes(cfg, Buffer.WGT) // 2, 0))[:OFFSET_BITS]
    of_block = {"size": (1 << block.shift, size), "addr": (block.addr, begin), "cut": (block.cut, is_spread)}
    goes_to(h, blocks, goes, dram_side(block, f) | of_block, "block")
    fields = {"z": (job.z_end + 1, f.z_size), "steps": ((job.step_end + 1) * chunk, size >> is_spread)}
    for axis, before, after in (("x", f.pad_left, f.pad_right), ("y", f.pad_top, f.pad_bottom)):
        first, stop, end = job[f"{axis}_first"], job[f"{axis}_stop"], job[f"{axis}_end"]
        fields |= {
            f"{axis}_first": (first, before),
            f"{axis}_size": (stop - first, f[f"{axis}_size"]),
            f"{axis}_end": (end + 1 - stop, after),
        }
    names = ("post", "buffer", "widen", "spread") if spread else ("post", "buffer", "widen")
    tag = {name: (job.tag[name], Value.cast(f[name])) for name in names}
    tag |= {"index": (job.tag.index, dut.instr.payload.index)}
    tag |= {"pad_value": (job.tag.pad_value, Value.cast(f.pad_value).as_unsigned())}
    goes_to(h, jobs, goes, scratchpad_side(job, f) | fields | tag, "job")

    listed = rows.valid & rows.ready & ~dut.halt  # which resets all of them
    positions, requests = inside["positions"].i, inside["requests"].i
    goes_to(
        h,
        requests,
        listed,
        {name: (requests.payload[name], row[name]) for name in ("offset", "bytes", "final")},
        "requests",
    )
    element, place_ = Signal(range(1 << 17), name="row_element"), positions.payload
    h.m.d.comb += element.eq(1 << row.shift)
    chunk = Mux(element < bus, element, bus)
    first, end = row.offset[:bits], row.offset[:bits] + row.bytes - 1
    facts = {
        "shift": (1 << place_.shift, chunk),
        "last": (place_.last, end[:bits]),
        "first": (place_.chunk.first, first),
        "stop": (place_.chunk.stop, first + chunk),
        "crosses": (place_.chunk.crosses, first + chunk > bus),
        "final": (place_.chunk.final, (first + chunk - 1)[:bits] == end[:bits]),
    }
    h.assume(row.shift <= max(log2(element_bytes(cfg, buffer)) for buffer in own))
    goes_to(h, positions, listed, facts, "place")
    joined(h, inside, "jobs.o writer.job", "requests.o engine.row", "positions.o aligner.row")
    joined(h, inside, "engine.beat beats.i", "beats.o aligner.beat", "aligner.chunk chunks.i", "chunks.o writer.chunk")
    return h


# STORE ------------------------------------------------------------------------------------------------------


def chunks_of_steps(cfg: Config) -> Harness:
    """Each step gives one chunk, in order, with the bytes of its part of its piece. Any one byte of out is followed."""
    h = Harness()
    dut = ScratchpadReader(cfg)
    inside = h.add(dut)
    entry, at, value = (
        h.constant(len(dut.out.addr), "entry"),
        h.constant(range(cfg.lanes), "at"),
        h.constant(8, "value"),
    )
    reads, was_read, of = (
        dut.out.en & dut.out.ready,
        Signal(name="was_read"),
        Signal(len(dut.out.addr), name="read_entry"),
    )
    with h.m.If(reads):
        h.m.d.sync += [was_read.eq(1), of.eq(dut.out.addr)]
    h.assume(implies(was_read & (of == entry), dut.out.data.word_select(at, 8) == value))

    walked, step = inside["walker"].step, Signal(inside["walker"].step.payload.shape(), name="step")
    goes, leaves, waiting = walked.valid & walked.ready, dut.chunk.valid & dut.chunk.ready, Signal(2, name="waiting")
    h.m.d.sync += waiting.eq(waiting + goes - leaves)
    with h.m.If(goes):
        h.m.d.sync += step.eq(walked.payload)
    h.ensure(dut.chunk.valid == waiting, "a_chunk_for_each_step")
    # Elements are pieces, several to an entry, and have several steps.
    pieces, size = log2(cfg.out_pieces), dut.chunk_bytes
    first = (step.element[:pieces] << log2(cfg.piece_bytes)) + step.step * size
    here = dut.chunk.valid & (step.element >> pieces == entry) & (at >= first) & (at < first + size)
    in_chunk = Signal(range(max(2, size)), name="in_chunk")
    h.m.d.comb += in_chunk.eq(at - first)
    h.assume(step.step * size < cfg.piece_bytes)  # proved of Walker, whose last step that is
    h.ensure(implies(here, dut.chunk.payload.word_select(in_chunk, 8) == value), "its_byte")
    # Invariants that make the proof inductive.
    first_step = (step.element[:pieces] << log2(cfg.piece_bytes // size)) + step.step
    h.ensure(implies(waiting != 0, was_read & (of == step.element >> pieces)), "was_read_for_it")
    h.ensure(implies(waiting != 0, inside["selected"] == first_step), "selected")
    return h


def chunks_to_memory(cfg: Config) -> Harness:
    """Each byte of a chunk is written, to base + offset of the row + place within the row.

    The results of writes.py about the same design are assumed for the cycle before.
    """
    model = Model(cfg, BYTE)
    model.writes_its_own()
    model.bursts_follow()
    model.queues_hold()
    model.packer_is_right()
    h, inside, rows, row, axi = model.h, model.inside, model.rows, model.oldest, model.dut.axi
    enters, ends = inside["positions"].i, model.takes & (model.word == model.last_word(row))
    chunk, number = inside["packer.chunk"].payload, h.constant(len(row.chunks), "chunk_number")
    at, value = h.constant(range(len(chunk) // 8), "at"), h.constant(8, "value")
    tracks, ahead = Signal(name="tracks"), Signal(range(len(rows.items) + 2), name="ahead")
    with h.m.If(~tracks & enters.valid & enters.ready & h.any(1, "choose")):
        h.m.d.sync += [tracks.eq(1), ahead.eq(rows.count - ends)]
    with h.m.Elif(tracks & ends):
        h.m.d.sync += [tracks.eq(ahead != 0), ahead.eq(ahead - 1)]
    mine = tracks & (ahead == 0) & (number <= row.chunks)
    before = (inside["packer.count"] - 1)[: len(row.chunks)]  # chunks of the row that were taken
    h.assume(implies(mine & inside["packer.take"] & (before == number), chunk.word_select(at, 8) == value))

    position, byte = Signal(len(row.end), name="position"), Signal(model.word_bits, name="byte")
    h.m.d.comb += [position.eq(row.offset + (number << model.chunk) + at), byte.eq(position)]
    in_word = mine & (position >> model.word_bits == model.word)
    goes = h.register(model.takes & in_word, "goes")
    address = model.bursts.items[0].addr + (inside["engine.count"] << model.word_bits)
    wanted = model.dut.dma_base + (position >> model.word_bits << model.word_bits)
    went_to, went_as = h.register((address == wanted)[:1], "went_to_its_address"), h.register(byte, "went_as")
    written = axi.wstrb.bit_select(went_as, 1) & (axi.wdata.word_select(went_as, 8) == value)
    h.ensure(implies(goes, axi.wvalid & went_to & written), "written_to_its_address", BYTE)

    # Invariants for the induction: where the byte is held.
    begun, flush, held = (inside[f"packer.{name}"] for name in ("inside", "flush", "held"))
    h.ensure(model.off | implies(tracks, ahead < rows.count), "tracked_is_inside", BYTE)
    taken = in_word & (flush | (begun & (before > number)))
    h.ensure(model.off | implies(taken, held.data.word_select(byte, 8) == value), "held_byte", BYTE)
    rest = Cat(held.strobe[i] | ~held.data.word_select(i, 8).any() for i in range(model.bus))
    h.ensure(model.off | rest.all(), "rest_is_zero", BYTE)
    return h


# LOAD -------------------------------------------------------------------------------------------------------


class Reading:
    """A ReadEngine with lists of its rows, and of its bursts from AR to their last beats; memory answers in order.

    word: place of the next beat in DRAM, in words of the bus. off: there was a halt. DRAM has 64 KB here.
    """

    BUS, OUTSTANDING, OFFSET = 8, 2, 16

    def __init__(self) -> None:
        self.h = h = Harness()
        with patch.object(dma, "OFFSET_BITS", self.OFFSET):
            self.dut = dut = ReadEngine(self.BUS, self.OFFSET, self.OUTSTANDING, 32)
            self.inside = inside = h.add(dut, LIMITS)
        self.bits = bits = log2(self.BUS)
        limits(h, dut.dma_base, dut.dma_size)
        row, split = dut.row.payload, inside["split"].payload
        h.assume(row.bytes != 0)
        self.off = Signal()
        h.m.d.sync += self.off.eq(self.off | dut.halt)

        word_bits = self.OFFSET - bits
        self.row_layout = data.StructLayout({"offset": self.OFFSET, "end": self.OFFSET + 1})
        burst = data.StructLayout({"addr": ADDR_BITS, "len": 4, "word": word_bits, "row_end": 1, "refused": 1})
        self.rows = rows = List(h.m, "row", self.row_layout, self.OUTSTANDING + 1)
        self.bursts = bursts = List(h.m, "burst", burst, self.OUTSTANDING)
        self.oldest, self.burst = rows.items[0], bursts.items[0]
        self.given, self.sent, self.word = Signal(word_bits, name="given"), Signal(4, name="sent"), Signal(word_bits)
        order, response, beats = inside["order"], dut.bus.response, inside["beats"].i
        self.asks, self.answered = order.i.valid & order.i.ready, order.o.valid & order.o.ready
        arrives, self.gives = response.valid & response.ready, beats.valid
        h.assume(implies(beats.valid, beats.ready))  # proved of read requests
        ends = self.gives & (self.refused(self.oldest) | (self.word == self.last_word(self.oldest)))
        self.ends = ends
        rows.moves(dut.row.valid & dut.row.ready, Cat(row.offset, row.offset + row.bytes - 1), ends)
        of_burst = (split.burst.addr, split.burst.len, inside["splitter.word"], split.row_end, split.refused)
        bursts.moves(self.asks, Cat(of_burst), self.answered)
        h.m.d.comb += self.word.eq((self.oldest.offset >> bits) + self.given)
        h.m.d.sync += [
            self.given.eq(Mux(self.gives, Mux(ends, 0, self.given + 1), self.given)),
            self.sent.eq(Mux(arrives, Mux(response.payload.last, 0, self.sent + 1), self.sent)),
        ]
        # Memory: what is in the word of DRAM that is followed, at its address.
        self.followed, self.value = h.constant(ADDR_BITS, "address"), h.constant(8 * self.BUS, "value")
        there, address = bursts.count != 0, self.burst.addr + (self.sent << bits)
        h.assume(implies(response.valid, there & (response.payload.last == (self.sent == self.burst.len))))
        h.assume(implies(response.valid & (address == self.followed), response.payload.data == self.value))

    def last_word(self, row: Value) -> Value:
        return row.end >> self.bits

    def refused(self, row: Value) -> Value:
        return row.end >= self.dut.dma_size

    def row(self, number: Value) -> data.View:
        return data.View(self.row_layout, Array([Value.cast(row) for row in self.rows.items])[number])

    def always(self, condition: Value, name: str) -> None:
        self.h.ensure(self.off | condition, name)

    def bursts_follow(self) -> None:
        """Invariants for the induction: bursts follow each other through the rows, and the queue holds the bursts."""
        rows, bursts, inside, always = self.rows, self.bursts, self.inside, self.always
        always((bursts.count <= self.OUTSTANDING) & (rows.count <= self.OUTSTANDING + 1), "counts")
        number: Value = Const(0)
        following: Value = (self.word - self.sent)[: len(self.word)]
        for i, burst in enumerate(bursts.items):
            there, row = bursts.count > i, self.row(number)
            last, end = burst.word + burst.len, self.last_word(row)
            always(implies(there, (rows.count > number) & (burst.refused == self.refused(row))), f"burst{i}_of_row")
            reads = there & ~burst.refused
            always(implies(reads, burst.word == following), f"burst{i}_follows")
            placed = burst.addr == self.dut.dma_base + (burst.word << self.bits)
            always(implies(reads, placed), f"burst{i}_address")
            always(implies(reads, Mux(burst.row_end, last == end, last < end)), f"burst{i}_end")
            always(implies(there & burst.refused, burst.row_end & (bursts.count == i + 1)), f"burst{i}_refused")
            new_number, new_following = Signal(4, name=f"number{i}"), Signal.like(self.word, name=f"following{i}")
            after = Mux(burst.row_end, self.row(number + 1).offset >> self.bits, last + 1)
            self.h.m.d.comb += [
                new_number.eq(number + (there & burst.row_end)),
                new_following.eq(Mux(there, after, following)),
            ]
            number, following = new_number, new_following
        word, valid, stuck, refused, left = (
            inside[f"splitter.{name}"] for name in ("word", "valid", "stuck", "refused", "left")
        )
        length, ends = inside["splitter.length"], inside["splitter.ends"]
        row = self.row(number)
        end = self.last_word(row)
        always(~(valid & stuck), "one_row")
        always(rows.count == number + valid, "no_other_row")
        always(implies(valid, refused == self.refused(row)), "refused")
        newest = [bursts.count == i + 1 for i in range(self.OUTSTANDING)]
        for i, burst in enumerate(bursts.items):
            always(implies(newest[i], burst.row_end | (valid & ~refused)), f"burst{i}_newest")
            always(implies((bursts.count > i) & burst.refused, stuck), f"burst{i}_stuck")
        within = valid & ~refused
        rest = (word == following) & (left == end - word) & (word <= end)
        always(implies(within, rest & (length <= left) & (ends == (length == left))), "rest")
        always(
            implies(within, self.dut.dma_base + (word << self.bits) == inside["split"].payload.burst.addr), "requests"
        )
        # Invariants on the oldest burst.
        idle = (self.sent == 0) & (within | (self.given == 0))
        always(Mux(bursts.count == 0, idle, self.sent <= self.burst.len), "sent")
        always(implies(self.refused(self.oldest) & (rows.count != 0), self.given == 0), "refused_gives_nothing_else")
        always(implies((rows.count == 0), self.given == 0), "nothing_given")
        always(implies((bursts.count != 0) & self.burst.refused, self.sent == 0), "refused_sends_nothing")
        queue = "order.queue"
        level, consume, produce = (inside[f"{queue}.{name}"] for name in ("level", "consume", "produce"))
        ring = place(consume, level, self.OUTSTANDING)
        always((level == bursts.count) & (produce == ring), "order")
        for i, item in enumerate(bursts.items):
            content = inside.memory(f"{queue}.storage", place(consume, i, self.OUTSTANDING))
            always(implies(level > i, content == Cat(item.row_end, item.refused)), f"order{i}")


def beats_of_rows() -> Harness:
    """Each row gives its words in order, with the content of memory at their addresses; the last word is marked.

    A refused row gives one beat with an error. All beats of a row come behind those of the rows before.
    """
    reading = Reading()
    h, dut = reading.h, reading.dut
    beat, row, gives = reading.inside["beats"].i.payload, reading.oldest, reading.gives
    refused = reading.refused(row)
    address = dut.dma_base + (reading.word << reading.bits)
    reading.always(implies(gives, reading.rows.count != 0), "of_a_row")
    in_memory = gives & ~refused & (address == reading.followed)
    reading.always(implies(in_memory, beat.data == reading.value), "from_its_address")
    reading.always(implies(gives, beat.last == (refused | (reading.word == reading.last_word(row)))), "last")
    error = Mux(refused, Error.ADDRESS, Mux(dut.bus.response.payload.error, Error.READ, Error.NONE))
    reading.always(implies(gives, beat.error == error), "error")
    reading.bursts_follow()
    return h


class Entry:
    """Any one byte of an entry of a scratchpad while LOAD writes steps: which steps write it, and with what value.

    at: its place in the entry. An element takes `size` bytes of the entry, in steps of `chunk`, from byte `first` on.
    """

    def __init__(self, at: Value, element: Value, pieces: int, size: int, chunk: int, step: Value) -> None:
        low = log2(pieces)
        first = (element[:low] * size) if low else Const(0)
        self.in_element = (at >= first) & (at < first + size)
        self.place = at - first - step * chunk
        self.in_chunk = self.in_element & (self.place >= 0) & (self.place < chunk)


def steps_of(cfg: Config, buffer: Buffer, widen: bool) -> int:
    """Return the number of steps in which LOAD writes an element."""
    return max(1, element_bytes(cfg, buffer, widen) // cfg.bus_bytes)


def is_spread(cfg: Config, step: Any) -> Value:
    """Return whether each half of a step's element comes through its own port."""
    return step.spread if scratchpads(cfg)["wgt"].spread else Const(0, 1)


def steps_to_scratchpads(cfg: Config, number: int = 0) -> Harness:
    """Each step writes the bytes of its chunk to its part of its element, or, in the padding, the whole element.

    Channel `number` writes only its half of a spread element. (The scratchpad ignores writes to the second half of an
    entry through the port of channel 0.) A chunk with an error is not written. Errors and ends are reported in order.
    """
    h = Harness()
    dut = ScratchpadWriter(cfg, buffers(cfg), number)
    inside = h.add(dut)
    out, chunk = inside["out"], dut.chunk.payload
    h.assume(out.buffer <= buffers(cfg)[-1])  # proved of fetch
    h.assume(widens(cfg, out))
    h.assume(implies(is_spread(cfg, out), out.buffer == Buffer.WGT))
    elements = [*((buffer, False) for buffer in buffers(cfg) if cfg.int32 or buffer != Buffer.ACC), (Buffer.ACC, True)]
    for buffer, widen in elements:
        of = (out.buffer == buffer) & (out.widen == widen)
        h.assume(implies(of, out.step < steps_of(cfg, buffer, widen) >> is_spread(cfg, out)))  # proved of Walker
    takes = dut.chunk.valid & dut.chunk.ready
    h.ensure(takes == (inside["moves"] & ~out.outside), "takes_a_unit_for_each_step_within_borders")
    # Writes that wait for their port: steps with the chunks that they took.
    write = data.StructLayout({"step": out.shape(), "word": 8 * cfg.bus_bytes, "error": ERROR_BITS})
    queue, waiting = inside["write_queue"], List(h.m, "write", write, 2)
    goes = queue.o.valid & queue.o.ready
    error = Mux(out.outside, Error.NONE, chunk.error)
    waiting.moves(inside["moves"], Cat(Value.cast(out), chunk.data, error[:ERROR_BITS]), goes)
    step, word = waiting.items[0].step, waiting.items[0].word
    fails = waiting.items[0].error != Error.NONE
    told, code = Signal(2), Signal(ERROR_BITS)
    index, post = Signal.like(step.index), Signal.like(step.post)
    h.m.d.sync += [
        told.eq(Cat(goes & fails, goes & step.last & ~fails)),
        code.eq(waiting.items[0].error),
        index.eq(step.index),
        post.eq(step.post),
    ]
    h.ensure(Cat(dut.error.valid, dut.done.valid) == told, "tells_errors_and_ends_in_their_turn")
    names = (dut.error.payload.code == code) & (dut.error.payload.index == index)
    h.ensure(implies(dut.error.valid, names), "names_the_error")
    ends = (dut.done.payload.index == index) & (dut.done.payload.post == post)
    h.ensure(implies(dut.done.valid, ends), "names_the_end")
    pad = step.pad_value.as_signed()
    for buffer in buffers(cfg):
        name = buffer.name.lower()
        port = getattr(dut, name)
        grain = len(port.data) // len(port.mask)
        at = h.constant(range(len(port.data) // 8), f"{name}_at")
        enabled, byte = port.mask.bit_select(at * 8 // grain, 1), port.data.word_select(at, 8)
        here = port.en & (step.buffer == buffer)
        h.ensure(implies(port.en, (step.buffer == buffer) & ~fails), f"{name}_is_meant")
        pieces_of = {
            Buffer.INP: cfg.inp_pieces, Buffer.WGT: cfg.inp_pieces,
            Buffer.VIN: cfg.out_pieces, Buffer.ACC: cfg.out_pieces,
        }  # fmt: skip
        pieces = pieces_of.get(buffer, 1)
        h.ensure(
            implies(
                here & (cfg.lut_count > 1 or buffer != Buffer.LUT),
                port.addr == (step.element >> log2(pieces))[: len(port.addr)],
            ),
            f"{name}_entry",
        )
        wide = element_bytes(cfg, buffer)
        halved = is_spread(cfg, step) if buffer == Buffer.WGT else Const(0)
        part = step.step + Mux(halved, number * steps_of(cfg, buffer, False) // 2, 0)
        exact = Entry(at, step.element, pieces, wide, min(cfg.bus_bytes, wide), part)
        writes, value = exact.in_chunk, word.word_select(exact.place[: log2(cfg.bus_bytes)], 8)
        within, padding = exact.in_element & (~halved | ((at >= wide // 2) == number)), pad[:8]
        if buffer == Buffer.ACC:
            size, lowest = element_bytes(cfg, buffer, True), at[: log2(grain // 8)] == 0
            lane = Entry(at >> log2(grain // 8), step.element, pieces, size, min(cfg.bus_bytes, size), step.step)
            int8 = word.word_select(lane.place[: log2(cfg.bus_bytes)], 8)
            writes = Mux(step.widen, lane.in_chunk, writes)
            value = Mux(step.widen, Mux(lowest, int8, int8[7].replicate(8)), value)
            within, padding = lane.in_element, Mux(lowest, pad, pad[7].replicate(8))
        writes, value = Mux(step.outside, within, writes), Mux(step.outside, padding, value)
        counts = here if number else here & ~(halved & (at >= wide // 2))
        h.ensure(implies(counts, enabled == writes), f"{name}_writes_its_own")
        h.ensure(implies(here & enabled, byte == value[:8]), f"{name}_writes_its_byte")
    # Invariants for the induction: the queue holds those steps, the oldest one as its head.
    h.ensure(inside["write_queue.holds"] + inside["write_queue.level"] == waiting.count, "as_many_as_wait")
    h.ensure(inside["write_queue.holds"] | (inside["write_queue.level"] == 0), "head_first")
    contents = (inside["write_queue.head"], inside["write_queue.of"].data)
    for i, (item, content) in enumerate(zip(waiting.items, contents)):
        step, held = item.step, data.View(queue.o.payload.shape(), content)
        padding = step.pad_value.as_unsigned().replicate(cfg.bus_bytes)
        wanted = {
            "element": step.element,
            "step": step.step + Mux(is_spread(cfg, step), number * steps_of(cfg, Buffer.WGT, False) // 2, 0),
            "enable": Mux(item.error == Error.NONE, 1 << step.buffer, 0),
            "widen": step.widen | step.outside,
            "whole": step.outside,
            "far": is_spread(cfg, step) & number,
            "word": Mux(step.outside, padding, item.word),
            "error": item.error,
            "last": step.last,
            "done": Cat(step.post, step.index),
        }
        for name, value in wanted.items():
            h.ensure(implies(waiting.count > i, Value.cast(held[name]) == value), f"waits{i}_with_{name}")
        h.ensure(implies(waiting.count > i, widens(cfg, step)), f"waits{i}_for_acc")
        h.ensure(implies((waiting.count > i) & is_spread(cfg, step), step.buffer == Buffer.WGT), f"waits{i}_spread")
        for buffer, widen in elements:
            of = (step.buffer == buffer) & (step.widen == widen)
            within = step.step < steps_of(cfg, buffer, widen) >> is_spread(cfg, step)
            h.ensure(implies((waiting.count > i) & of, within), f"waits{i}_step_of_{buffer.name}_{widen}")
    return h


STORE, LOAD, WRITE, DMA, WALK = (
    f"dae_pipeline/{name}.py" for name in ("store", "load", "scratchpad_writer", "dma", "address_generators")
)
prove(
    "rows hold the elements of a block in order",
    Mutant(WALK, "offset.eq(next_plane)", "offset.eq(plane)", near="next_plane = (plane + z_step)[:OFFSET_BITS]"),
    Mutant(
        WALK,
        "rows_left.eq(rows), last_row.eq(single), planes_left.eq(planes_left - 1)",
        "rows_left.eq(1), last_row.eq(single), planes_left.eq(planes_left - 1)",
    ),
    depth=1,
)(elements_of_rows)
for padded in (True, False):
    prove(
        f"steps are of the elements of a block in order{', with padding' if padded else ''}",
        Mutant(WALK, "self._set_next(1, self._single, ", "self._set_next(1, Const(0), "),
        *((Mutant(WALK, "stop | (self.outside & ~first)", "stop | self.outside"),) if padded else ()),
        depth=1,
        tested=padded,
    )(partial(elements_of_steps, padded))
ALL = [
    "rows",
    "reader",
    "writer",
    "engine",
    "packer",
    "aligner",
    "jobs",
    "positions",
    "requests",
    "beats",
    "chunks",
    "waiting",
]
PARTS = ("cutpoint " + " ".join(f"t:top.dut.{part}" for part in ALL),)
WIDER = Mutant(WRITE, "found = Mux(fields.widen, of(Buffer.ACC, True), found)", "pass")
LEAN = {"without int32": replace(OTHER, int32=False)}
for name, cfg in CONFIGS.items():
    prove(
        f"both sides of STORE get each instruction and each row, Config {name}",
        Mutant(STORE, "job.y_step.eq(f.sram_y)", "job.y_step.eq(f.sram_z)"),
        Mutant(
            STORE,
            "positions.i.valid.eq(rows.row.valid & requests.i.ready & ~stop)",
            "positions.i.valid.eq(rows.row.valid & ~stop)",
            near="positions.i.payload.first.eq(row.offset)",
        ),
        Mutant(STORE, "block.z_step.eq(f.dram_z)", "block.z_step.eq(f.dram_y)"),
        Mutant(
            STORE,
            "wiring.connect(m, requests.o, engine.row)",
            "wiring.connect(m, rows.row, engine.row)",
            near="self._request_rows(m, rows, requests, positions, packer, stop)",
        ),
        depth=1,
        script=PARTS,
        tested=name == "small",
    )(partial(instruction_of_store, cfg))
    prove(
        f"each byte of STORE is written to its address, Config {name}",
        Mutant(STORE, "Mux(fills, bytes_[8 * bus :], ", "Mux(fills, 0, "),
        Mutant(
            STORE,
            "bytes_.eq(self.chunk.payload << (first << 3))",
            "bytes_.eq(self.chunk.payload << (place << 3))",
            near="first = Mux(inside, place, row.first)",
        ),
        Mutant(STORE, "held.data | Mux(flush, 0, bytes_[: 8 * bus])", "Mux(flush, 0, bytes_[: 8 * bus])"),
        Mutant(
            DMA,
            " word.eq(self.beat.payload.data)",
            " word.eq(Mux(count[0], 0, self.beat.payload.data))",
            near="count.eq(Mux(w_last, 0, count + 1))",
        ),
        depth=1,
        script=CUT,
        tested=False,
    )(partial(chunks_to_memory, cfg))
prove(
    "of elements that are spread each half is asked for once, in order",
    Mutant(WALK, "last.eq(count == 2)", "last.eq(count == 1)", near="left.eq(count - 1)"),
    Mutant(WALK, "following.eq(here + (1 << (shift - low)))", "following.eq(here + (1 << (shift - low - 1)))"),
    Mutant(WALK, "half.final.eq(row.final & is_last)", "half.final.eq(row.final)"),
    Mutant(WALK, "Mux(inside, last, row.alone)", "Mux(inside, last, 0)"),
    depth=1,
)(halves_of_rows)
for number in range(2):
    prove(
        f"both sides of LOAD get each instruction and each row, spread, channel {number}",
        Mutant(WRITE, "f.spread, steps // 2 - 1", "f.spread, steps - 1"),
        *((Mutant(LOAD, "Mux(cut, own_half, 0)", "0"),) if number else ()),
        depth=1,
        script=PARTS,
        tested=False,
    )(partial(instruction_of_load, SPREAD, number))
for name, cfg in (CONFIGS | LEAN).items():
    prove(
        f"both sides of LOAD get each instruction and each row, Config {name}",
        Mutant(WRITE, '"x_end": x_stop + f.pad_right - 1', '"x_end": x_stop - 1'),
        Mutant(
            LOAD,
            "positions.i.valid.eq(rows.valid & requests.i.ready & ~self.halt)",
            "positions.i.valid.eq(rows.valid & ~self.halt)",
            near="positions.i.payload.last.eq(last)",
        ),
        *((WIDER,) if cfg.int32 else ()),
        depth=1,
        script=PARTS,
        tested=name == "small",
    )(partial(instruction_of_load, cfg))
PIECES = replace(SMALL, batch=4, block_out=8)
"""A Config in which entries of out, vin and acc have two pieces, and pieces have two steps."""
WRITES = (  # the first where a Config has int32: else the scratchpad widens
    Mutant(WRITE, "byte[7].replicate(24)", "byte[7].replicate(23)"),
    Mutant(WRITE, "to.whole.eq(out.outside)", "to.whole.eq(0)"),
    Mutant(WRITE, "to.widen.eq(out.widen | out.outside)", "to.widen.eq(out.widen)"),
    Mutant(WRITE, "out.pad_value.replicate(cfg.bus_bytes)", "out.pad_value"),
    Mutant(
        WRITE,
        "mask = _one_hot(write.step, steps) | self._padding_mask(write, steps)",
        "mask = _one_hot(write.step, steps)",
    ),
)
READS = (Mutant(STORE, "full.eq(walker.step.valid & self.out.ready)", "full.eq(walker.step.valid)"),)
SHIFTS = Mutant(WRITE, "mask << (write.element[: exact_log2(pieces)] * len(mask)) if pieces > 1 else mask", "mask")
ENDS = (
    Mutant(WRITE, "write.last & ~failed)", "write.last)"),
    Mutant(WRITE, "code.eq(write.error)", "code.eq(self.chunk.payload.error)"),
    Mutant(WRITE, "Mux(error == Error.NONE, 1 << out.buffer, 0)", "1 << out.buffer"),
)
SELECTS = Mutant(
    STORE, "selected.eq((step.element[:piece_shift] << self._step_shift) | step.step)", "selected.eq(step.step)"
)
for number in range(2):
    prove(
        f"each step of LOAD writes its bytes or padding, spread, channel {number}",
        *((Mutant(WRITE, "near = write.whole & ~write.far", "near = write.whole"),) if number else ()),
        Mutant(WRITE, "to.whole.eq(out.outside)", "to.whole.eq(0)"),
        depth=1,
        tested=bool(number),
    )(partial(steps_to_scratchpads, SPREAD, number))
for name, cfg in LEAN.items():
    prove(f"each step of LOAD writes its bytes or padding, Config {name}", *WRITES[1:], depth=1, tested=False)(
        partial(steps_to_scratchpads, cfg)
    )
for name, cfg, writes, reads in (
    ("small", SMALL, (*WRITES, *ENDS), READS),
    ("other", OTHER, WRITES, READS),
    ("pieces", PIECES, (SHIFTS,), (SELECTS, *READS)),
):
    prove(f"each step of LOAD writes its bytes or padding, Config {name}", *writes, depth=1, tested=False)(
        partial(steps_to_scratchpads, cfg)
    )
    prove(f"each step of STORE gives the bytes of its piece, Config {name}", *reads, depth=1, tested=name == "pieces")(
        partial(chunks_of_steps, cfg)
    )
prove(
    "beats of LOAD come in the order of its rows, from their addresses",
    Mutant(DMA, "response.payload.last & oldest.row_end", "response.payload.last"),
    Mutant(
        DMA,
        "next_left.eq((row.offset[:word_bits] + row.bytes - 1) >> word_bits)",
        "next_left.eq((row.bytes - 1) >> word_bits)",
    ),
    Mutant(
        DMA,
        "self.dma_base + (word << word_bits)",
        "self.dma_base + (left << word_bits)",
        near="word.eq(next_word), left.eq(next_left)",
    ),
    Mutant(DMA, "order.i.payload.refused.eq(split.payload.refused)", "order.i.payload.refused.eq(0)"),
    depth=1,
    tested=False,
)(beats_of_rows)
