"""Prove three facts for hosts that share an accelerator, or die: the number of a run, its registers, and its lease."""

from __future__ import annotations

from amaranth import Mux, Signal, Value

from celosia.hw.control import Control
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.regs import CONTROL_ABORT, REGISTERS, Access
from proofs.declare import Mutant, prove
from proofs.harness import Harness, Inside, implies

CONTROL, REGS = "control.py", "spec/regs.py"


def _control() -> tuple[Harness, Control, Inside]:
    h = Harness()
    dut = Control(PRESETS["tiny"])
    return h, dut, h.add(dut)


def _place(address: Value, name: str) -> Value:
    """Return whether `address` is the one of register `name`."""
    return address[2:] == REGISTERS[name].offset // 4


@prove(
    "the number and the registers of a run",
    Mutant(CONTROL, "values, locked=busy | stuck", "values, locked=stuck"),
    Mutant(CONTROL, "write & ~(locked & (register.access == Access.SETUP))", "write"),
    Mutant(CONTROL, "index.eq(0), runs.eq(runs + 1)]", "index.eq(0), runs.eq(runs + ~self.halt)]"),
    Mutant(CONTROL, "Mux(bit, values[name], 0)", 'Mux(bit & (name != "runs"), values[name], 0)'),
    Mutant(REGS, '"instr_addr", Access.SETUP', '"instr_addr", Access.WRITE'),
)
def number() -> Harness:
    """`runs` counts every start of a run, and prepared registers keep their values while the run needs them.

    They keep them during the run and while memory owes it answers. So a host that finds its own registers, and the next
    number, knows whose run it was.
    """
    h, dut, inside = _control()
    values = inside["values"]
    begun = Signal(32)
    h.m.d.sync += begun.eq(begun + dut.clear)
    h.ensure(values["runs"] == (begun + dut.clear)[:32], "counts_runs")
    h.ensure(implies(dut.run & ~h.register(dut.run, "ran"), h.register(dut.clear, "cleared")), "none_is_left_out")
    locked = h.register(inside["busy"] | inside["stuck"], "locked_before")
    prepared = ("instr_addr", "instr_count", "dma_base_lo", "dma_base_hi", "dma_size")
    for name in prepared:
        h.ensure(implies(locked, values[name] == h.register(values[name], f"{name}_before")), f"{name}_stays")
    for name in ("runs", *prepared):
        taken = h.register(inside["read"] & _place(dut.axil.araddr, name), f"{name}_taken")
        asked = h.register(taken, f"{name}_asked")
        h.ensure(implies(asked, dut.axil.rdata == h.register(values[name], f"{name}_then")), f"{name}_is_read")
    # Invariants for the induction: of the bits that choose a value, that of the address is set, and no other.
    address = Signal.like(dut.axil.araddr)
    with h.m.If(inside["read"]):
        h.m.d.sync += address.eq(dut.axil.araddr)
    for name, bit in inside["asked"].items():
        h.ensure(implies(inside["reading"], bit == _place(address, name)), f"{name}_is_asked_for")
    assert {name for name, register in REGISTERS.items() if register.access == Access.SETUP} <= set(prepared)
    return h


@prove(
    "a lease that is not renewed ends the run",
    Mutant(CONTROL, "(Error.LEASE, lapsed), ", ""),
    Mutant(CONTROL, "restart = moved | expired | self.clear", "restart = moved | expired"),
    Mutant(CONTROL, "restart = moved | expired | self.clear", "restart = expired | self.clear"),
    Mutant(
        CONTROL,
        '"lease": m.d.comb += renewed.eq(1)',
        '"lease":\n                                m.d.comb += renewed.eq(~self.run)',
    ),
    Mutant(CONTROL, "(idle >= limit)", "(idle == limit - 1)"),
)
def lease() -> Harness:
    """A halt ends a run within two cycles after its lease ends, not before, and never if the lease register is 0.

    The lease counts from the last write of its register or the start of the run.
    """
    h, dut, inside = _control()
    limit, idle, lapsed = inside["values"]["lease"], inside["idle"], inside["lapsed"]
    renewed = inside["write"] & _place(dut.axil.awaddr, "lease")
    since = Signal(34)  # stops at its end
    h.m.d.sync += since.eq(Mux(dut.clear | renewed, 0, since + ~since.all()))
    h.ensure(implies(dut.run & (limit != 0), since <= limit + 2), "in_time")
    long_enough = h.register((limit != 0) & (since >= limit), "long_enough")
    h.ensure(implies(dut.run & lapsed, long_enough), "not_early")
    after = h.register(dut.run & lapsed, "lapsed_before")
    well = h.register(inside["finished"] & inside["all_idle"], "ended_well")
    h.ensure(implies(after, ~dut.run & (well | dut.halt)), "ends")
    # Invariant: the hardware's counter is as old, or younger by the cycle in which the write is on its way.
    late = h.register(renewed, "renewed_before")
    counted = (since == idle) | (since == idle + 1)
    h.ensure(implies(dut.run & ~lapsed & ~late & (limit != 0), counted), "counts_cycles")
    return h


@prove(
    "an abort ends the run",
    Mutant(CONTROL, ", (Error.ABORTED, abort)", ""),
    Mutant(
        CONTROL,
        "m.d.sync += aborted.eq(abort)",
        "m.d.sync += aborted.eq(abort & self.run)",
        near="abort.eq((bus.wdata & CONTROL_ABORT)",
    ),
    Mutant(CONTROL, "& bus.wstrb[0] & ~abort)", "& bus.wstrb[0])"),
)
def abort() -> Harness:
    """An abort during a run halts it two cycles later, unless it is over by then.

    No abort is written in the cycle of a start, so none comes while the pipeline is reset.
    """
    h, dut, inside = _control()
    busy = inside["busy"]
    bits = (dut.axil.wdata & CONTROL_ABORT).any() & dut.axil.wstrb[0]
    written = inside["write"] & _place(dut.axil.awaddr, "control") & bits
    h.ensure(implies(written, ~inside["start"]), "starts_nothing")
    h.ensure(implies(dut.clear, ~inside["abort"]), "none_during_reset")
    due = h.register(h.register(written & busy, "aborted_before"), "due")
    h.ensure(implies(due, dut.halt | ~busy | dut.clear), "is_halted")
    # Invariants: the states of a run are told by `clear`, `run` and `halt`.
    h.ensure(implies(busy & ~dut.run, dut.clear | dut.halt), "is_reset_or_halted")
    h.ensure(implies(dut.clear, busy & ~dut.run), "is_reset_before_it_runs")
    h.ensure(inside["abort"] == h.register(written, "written_before"), "takes_a_cycle")
    h.ensure(implies(dut.clear, h.register(inside["start"], "started_before")), "is_started")
    return h
