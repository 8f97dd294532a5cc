"""Prove of streams that offers are kept until they are taken, and that no `valid` waits for its `ready`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from amaranth import Cat, Signal, Value
from amaranth.lib import data, wiring

from celosia.hw.control import Control
from celosia.hw.dae_pipeline.address_generators import DramAddressGenerator, ScratchpadAddressGenerator
from celosia.hw.dae_pipeline.aligner import Aligner, chunk_position, chunk_stop
from celosia.hw.dae_pipeline.dma import BurstSplitter, ReadEngine, WriteEngine
from celosia.hw.dae_pipeline.fetch import Fetch
from celosia.hw.dae_pipeline.fifo import StreamFifo
from celosia.hw.dae_pipeline.load import Load
from celosia.hw.dae_pipeline.readmux import ReadMux
from celosia.hw.dae_pipeline.retire_queue import RetireQueue
from celosia.hw.dae_pipeline.scratchpad_writer import ScratchpadWriter
from celosia.hw.dae_pipeline.store import BeatPacker, ScratchpadReader, Store
from celosia.hw.dae_pipeline.tokens import DependencyGate
from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.gemm_core.loops import Loops
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import GEMM_LOOPS, OUTER_LOOPS, Unit, load_channels
from celosia.hw.top import Accelerator
from celosia.hw.vector_unit.vector import Vector
from proofs.declare import Method, Mutant, prove
from proofs.harness import Harness, implies
from proofs.netlist import through, waiting

SMALL = Config(
    block_in=4, block_out=4, bus_bytes=8, inp_depth=16, wgt_depth=8, acc_depth=16, vin_depth=16, out_depth=16,
    par_depth=4, lut_count=1, queue_depth=2, token_bits=2,
)  # fmt: skip
OTHER = Config(
    batch=2, block_in=8, block_out=4, bus_bytes=16, inp_depth=16, wgt_depth=8, acc_depth=16, vin_depth=16, out_depth=32,
    par_depth=4, lut_count=2, queue_depth=4, token_bits=3, taps=3, tap_depth=4, forward=True, residual_cycles=2,
)  # fmt: skip
CONFIGS = {"small": SMALL, "other": OTHER}
TWO_PORTS = replace(OTHER, ports=2)


def gates(cfg: Config) -> Harness:
    """An instruction passes exactly when its tokens are there, and there is room for those that it promises.

    Each unit that it waits for must have given a token that is not used yet. Tokens are counted at the ports.
    """
    h = Harness()
    dut = DependencyGate(cfg)
    inside = h.add(dut)
    h.streams(dut)
    most = (1 << cfg.token_bits) - 1
    ports = dict(zip(Unit, zip(dut.queues.each, dut.passed.each, dut.done.each)))
    may_pass: dict[Unit, Value] = {unit: queue.valid for unit, (queue, _, _) in ports.items()}
    for (source, target), semaphore in inside["semaphores"].items():
        name = f"{source.name}_{target.name}"
        (promises, promising, done), (waits, waiting, _) = ports[source], ports[target]
        wants, promise = waits.payload.fields["wait"][source], promises.payload.fields["post"][target]
        take = waiting.valid & waiting.ready & wants
        reserve = promising.valid & promising.ready & promise
        put = done.valid & done.payload.post[target]
        promised, given = (Signal(cfg.token_bits + 1, name=f"{what}_{name}") for what in ("promised", "given"))
        h.m.d.sync += [promised.eq(promised + reserve - put), given.eq(given + put - take)]
        h.assume(implies(put, promised != 0))  # a unit is done once with each instruction
        may_pass[target] = may_pass[target] & (~wants | (given != 0))
        may_pass[source] = may_pass[source] & (~promise | (promised + given < most))
        h.ensure(promised + given <= most, f"never_too_many_{name}")
        room, tokens = inside.of(semaphore, "room"), inside.of(semaphore, "tokens")
        h.ensure((tokens == given) & (room + given + promised == most), f"counts_{name}")
        h.ensure((semaphore.has_token == (tokens != 0)) & (semaphore.has_room == (room != 0)), f"knows_{name}")
    for unit, (queue, instr, _) in ports.items():
        h.ensure(instr.valid == may_pass[unit], f"{unit.name}_passes")
        h.ensure((queue.valid & queue.ready) == (instr.valid & instr.ready), f"{unit.name}_passes_once")
        h.ensure(Value.cast(instr.payload) == Value.cast(queue.payload), f"{unit.name}_passes_as_it_is")
    return h


def component(make: Callable[[], wiring.Component]) -> Harness:
    """Output streams keep their offers if input streams do."""
    h = Harness()
    dut = make()
    h.add(dut)
    h.streams(dut)
    return h


def rows(max_shift: int) -> Harness:
    """Rows are kept, and consist of at least one whole element."""
    h = Harness()
    dut = DramAddressGenerator(max_shift)
    inside = h.add(dut)
    h.streams(dut)
    sizes = dut.block.payload
    h.assume((sizes.x_size != 0) & (sizes.y_size != 0) & (sizes.z_size != 0) & (sizes.shift <= max_shift))
    size, shift = dut.row.payload.bytes, dut.row.payload.shift
    h.ensure(implies(dut.row.valid, size != 0), "no_empty_row")
    h.ensure(implies(dut.row.valid, size == (size >> shift) << shift), "whole_elements")
    h.ensure(implies(dut.row.valid, dut.row.payload.alone == (size == 1 << shift)), "alone")
    held = inside["block"]
    h.ensure(implies(inside["waiting"], (held.x_size != 0) & (held.y_size != 0) & (held.z_size != 0)), "held")
    h.ensure(implies(inside["waiting"], (held.shift <= max_shift) & (inside["plane_size"] != 0)), "held_shift")
    h.ensure(implies(inside["waiting"], inside["plane_size"] >= held.x_size), "held_plane")
    return h


def walker() -> Harness:
    h = Harness()
    dut = ScratchpadAddressGenerator(6, 2, data.StructLayout({"tag": 2}), padded=True)
    h.add(dut)
    h.streams(dut)
    return h


def loops() -> Harness:
    """Loops keep their iterations until taken, unless halted, which drops the instruction."""
    h = Harness()
    dut = Loops(("n", "k", "r"), {"acc": (4, ("n",)), "inp": (4, ("n", "k", "r"))}, reduction=("k", "r"))
    h.add(dut)
    h.streams(dut, unless=h.register(dut.halt, "halted") | dut.halt)
    return h


def aligner(bus_bytes: int) -> Harness:
    """A chunk keeps its own bytes until taken; bytes above them are undefined."""
    h = Harness()
    dut = Aligner(bus_bytes)
    inside = h.add(dut)
    h.trusts(dut.row, "row")
    h.trusts(dut.beat, "beat")
    row, following = dut.row.payload, inside["following"]

    def facts(first: Value) -> Value:
        return chunk_position(bus_bytes, first, chunk_stop(bus_bytes, first, row.shift), row.last)

    h.assume(row.shift <= bus_bytes.bit_length() - 1)
    h.assume(Value.cast(row.chunk) == facts(row.chunk.first))
    known = Value.cast(following) == facts(following.first)
    h.ensure(implies(inside["inside"], known & dut.row.valid), "following")
    chunk = dut.chunk.payload
    # An error stands for its chunk: the bytes of such a chunk mean nothing.
    bits = Signal(range(8 * bus_bytes + 1))
    h.m.d.comb += bits.eq(8 << dut.row.payload.shift)
    own = Signal(8 * bus_bytes)
    with h.m.If(chunk.error == 0):
        h.m.d.comb += own.eq(chunk.data & ((1 << bits) - 1))
    h.ensure(h.kept(dut.chunk.valid, dut.chunk.ready, Cat(own, chunk.error), "chunk"), "chunk_kept")
    return h


def reader(cfg: Config) -> Harness:
    h = Harness()
    dut = ScratchpadReader(cfg)
    h.add(dut)
    was_read = h.register(dut.out.en & dut.out.ready, "was_read")
    h.assume(was_read | (dut.out.data == h.register(dut.out.data, "held")))
    h.streams(dut)
    return h


def registers() -> Harness:
    """AXI4-Lite responses are kept, and there is one for each request, never before it."""
    h = Harness()
    dut = Control(SMALL)
    inside = h.add(dut)
    axi, reading = dut.axil, inside["reading"]  # an address has been taken, and its answer comes next
    for name, payload in (("aw", axi.awaddr), ("w", Cat(axi.wdata, axi.wstrb)), ("ar", axi.araddr)):
        h.assume(h.kept(getattr(axi, f"{name}valid"), getattr(axi, f"{name}ready"), payload, name))
    h.ensure(h.kept(axi.bvalid, axi.bready, axi.bresp, "b"), "b_kept")
    h.ensure(h.kept(axi.rvalid, axi.rready, Cat(axi.rdata, axi.rresp), "r"), "r_kept")
    written, read = axi.bvalid & axi.bready, axi.rvalid & axi.rready
    requests = {
        "aw": (axi.awvalid & axi.awready, written),
        "w": (axi.wvalid & axi.wready, written),
        "ar": (axi.arvalid & axi.arready, read),
    }
    for name, (asked, answered) in requests.items():
        open_ = Signal(2, name=f"open_{name}")
        h.m.d.sync += open_.eq(open_ + asked - answered)
        h.ensure(open_ == (axi.rvalid + reading if name == "ar" else axi.bvalid), f"one_answer_{name}")
    h.ensure(~(axi.rvalid & reading), "room_for_the_answer")
    awake = h.register(1, "awake")
    h.ensure(implies(awake & axi.awvalid & axi.wvalid & axi.bready, axi.awready & axi.wready), "write_goes_on")
    h.ensure(implies(awake & axi.arvalid & axi.rready & ~reading, axi.arready), "read_goes_on")
    return h


def _components(cfg: Config) -> list[wiring.Component]:
    reader_ = ScratchpadReader(cfg)
    return [
        StreamFifo(8, 4), StreamFifo(8, 4, block_ram=True), BurstSplitter(cfg.bus_bytes, 32), ReadEngine(cfg.bus_bytes),
        WriteEngine(cfg.bus_bytes), ReadMux(cfg.bus_bytes), Fetch(cfg), DependencyGate(cfg), DramAddressGenerator(4),
        Aligner(cfg.bus_bytes),
        ScratchpadAddressGenerator(6, 2, data.StructLayout({"tag": 2})), RetireQueue(2, 4),
        ScratchpadWriter(cfg, load_channels(cfg)[0]),
        BeatPacker(cfg.bus_bytes, reader_.chunk_bytes, 8), reader_,
        Loops(GEMM_LOOPS, {"acc": (4, OUTER_LOOPS), "inp": (4, GEMM_LOOPS)}, reduction=("k", "r", "s")),
        Load(cfg), Store(cfg), Gemm(cfg), Vector(cfg), Control(cfg),
    ]  # fmt: skip


def no_valid_waits() -> list[str]:
    """Return the `valid` signals that wait for their `ready`, of all components and whole units."""
    return [line for cfg in (*CONFIGS.values(), TWO_PORTS) for part in _components(cfg) for line in waiting(part)]


def no_path_through() -> list[str]:
    """Return the paths from inputs through the AXI manager to its outputs, which AXI A3.2.1 forbids, on both ports.

    Interrupt, lights and the simulation's view of units must come from registers, too. The RTL simulator relies on
    that, because it evaluates once a cycle (sim/rtl/harness.cpp).
    """
    return through(Accelerator(TWO_PORTS), "s_axil")


TOKENS, WALK, LOAD = "dae_pipeline/tokens.py", "dae_pipeline/address_generators.py", "dae_pipeline/aligner.py"
STORE, LOOPS, CONTROL = "dae_pipeline/store.py", "gemm_core/loops.py", "control.py"
for name, cfg in CONFIGS.items():
    prove(
        f"token gates, Config {name}",
        Mutant(TOKENS, "ready = has_tokens & has_room", "ready = has_room"),
        Mutant(
            TOKENS,
            'has_room = Cat(~fields["post"][other] | semaphores[unit, other].has_room',
            'has_room = Cat(~fields["post"][other] | semaphores[other, unit].has_room',
        ),
        Mutant(
            TOKENS,
            "semaphores[unit, other].release.eq(done.valid & ",
            "semaphores[unit, other].release.eq(done.valid & ~passes[other] & ",
            near='semaphores[other, unit].acquire.eq(passes[unit] & fields["wait"][other])',
        ),
        Mutant(
            TOKENS,
            "instr.valid.eq(queue.valid & ready)",
            "instr.valid.eq(queue.valid & ready & ~done.valid)",
            near="semaphores[unit, other].release.eq(done.valid &",
        ),
        depth=1,
    )(partial(gates, cfg))
for max_shift in (4, 8):
    prove(
        f"rows of blocks, elements of up to {1 << max_shift} bytes",
        Mutant(WALK, "with m.If(busy & self.row.ready):", "with m.If(busy):"),
        Mutant(WALK, "plane_size == 1, block.x_size == 1", "plane_size == 1, plane_size == 1"),
        depth=1,
    )(partial(rows, max_shift))
prove(
    "walker keeps its steps",
    Mutant(WALK, "self.job.ready.eq(~busy | (self.step.ready & last))", "self.job.ready.eq(~busy | last)"),
)(walker)
prove(
    "loops keep their iterations",
    Mutant(LOOPS, "renew.eq(~busy | (self.step.ready & all_done))", "renew.eq(~busy | all_done)"),
)(loops)
for bus_bytes in (8, 16):
    prove(
        f"aligner keeps its chunks, {8 * bus_bytes} bits",
        Mutant(LOAD, "(~crosses | self.beat.valid | (held.error != Error.NONE))", "1"),
    )(partial(aligner, bus_bytes))
    prove(
        f"packer keeps its beats, {8 * bus_bytes} bits",
        Mutant(STORE, "(self.beat.ready | ~(fills | row_end))", "(self.beat.ready | ~fills)"),
    )(partial(component, partial(BeatPacker, bus_bytes, 4, 8)))
for name, cfg in CONFIGS.items():
    prove(
        f"reader of out keeps its chunks, Config {name}",
        Mutant(
            STORE,
            "free = ~full | self.chunk.ready",
            "free = ~full | self.chunk.ready | walker.step.valid",
            near="self.out.en.eq(walker.step.valid & free)",
        ),
    )(partial(reader, cfg))
prove(
    "control registers on AXI4-Lite",
    Mutant(CONTROL, "(~bus.rvalid | bus.rready)", "1"),
    Mutant(CONTROL, "bus.wready.eq(write)", "bus.wready.eq(write | ~bus.awvalid)"),
)(registers)
prove(
    "no valid waits for its ready",
    Mutant(TOKENS, "instr.valid.eq(queue.valid & ready)", "instr.valid.eq(queue.valid & ready & instr.ready)"),
    method=Method.NETLIST,
    depth=0,
)(no_valid_waits)
prove(
    "no path through the AXI manager",
    Mutant(
        "dae_pipeline/readmux.py", "axi.rready.eq(owners.o.valid & ", "axi.rready.eq(owners.o.valid & axi.rvalid & "
    ),
    Mutant("top.py", "done.eq(unit.done.valid)", "done.eq(unit.done.valid & self.m_axi.write.wready)"),
    method=Method.NETLIST,
    depth=0,
)(no_path_through)
