"""Prove that an instruction of VECTOR reads the results of earlier ones, and is done after its last write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from amaranth import Const, Mux, Signal, Value
from amaranth.lib import data

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Destination, is_supported
from celosia.hw.spec.pipeline import vector_stages
from celosia.hw.vector_unit.vector import Vector
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies


def _any(conditions: list[Value]) -> Value:
    return sum(conditions[1:], conditions[0]).any()


def one(facts: data.View[data.StructLayout]) -> Value:
    """Select any instruction."""
    return Const(1)


def hazards(cfg: Config) -> Harness:
    """At most two instructions are under way: `current` and the one before it. `ends` follows the last item of each.

    Three facts are proved elsewhere. The last iteration ends a reduction (addresses of the loops). A ring returns with
    an item the value that the item put there, here whether it is its instruction's last (rings). No item reaches an
    item that stays for the next part of its residual (rings; that proof uses this one's result of the cycle before).
    """
    h = Harness()
    dut = Vector(cfg)
    inside = h.add(dut)
    stage, items, issue = vector_stages(cfg), inside["items"], inside["issue"]
    constants, current, step = issue.sets, issue.current, issue.step
    under_way, busy = inside["issue.under_way"], inside["issue.loops.busy"]
    h.assume(implies(step.end, step.last))
    destination = dut.instr.payload.fields.destination
    h.assume(_any([destination == to for to in Destination if is_supported(cfg, to)]))  # proved of fetch

    all_ = items.stages
    ends: list[Value] = [step.end]
    for number, each in enumerate(all_[1:], 1):
        ends.append(Signal(name=f"ends{number}"))
        with h.m.If(~each.stall):
            h.m.d.sync += ends[number].eq(ends[number - 1])
    h.assume(implies(items.complete, inside["is_end"] == ends[-1]))
    h.assume(~(items.add.stall & all_[stage["add"] - 1].fire))

    def of(which: Value, fact: Callable[[data.View[data.StructLayout]], Value]) -> Value:
        return Mux(which, fact(constants[1]), fact(constants[0]))

    def writes(facts: data.View[data.StructLayout], to: Destination) -> Value:
        return facts.to[to] if to < len(facts.to) else Const(0)

    kinds: dict[str, tuple[Destination, Callable[[data.View[data.StructLayout]], Value]]] = {
        "acc": (Destination.ACC, lambda facts: ~facts.a_vin),
        "vin": (Destination.VIN, lambda facts: facts.a_vin | facts.b_vin),
    }
    reads = {"acc": (stage["acc"], dut.acc_read.en), "vin": (stage["read" if cfg.taps else "acc"], dut.vin.en)}
    for name, (to, wants) in kinds.items():
        number, asks = reads[name]
        unwritten = [
            each.valid
            & (each.constants_set != all_[number].constants_set)
            & of(each.constants_set, partial(writes, to=to))
            for each in all_[number + 1 :]
        ]
        h.ensure(implies(asks, ~_any(unwritten)), f"reads_{name}_when_it_is_written")
        if name == "acc":  # conflicts with any next one: entries may wait for GEMM, in whichever order it ends
            wants = one
        conflict = of(~current, partial(writes, to=to)) & of(current, wants)
        h.ensure(implies(under_way == 2, ~conflict), f"no_conflict_in_{name}")
        h.ensure(
            implies(under_way != 0, inside["issue.feeds"][name == "vin"] == of(current, partial(writes, to=to))),
            f"feeds_{name}",
        )

    # Instructions: items of the one before `current` are in front of its own, and each has one last item.
    h.ensure(under_way <= 2, "two")
    h.ensure(implies(busy, under_way != 0), "busy")
    inner = list(enumerate(all_))[1:]
    last = {number: each.valid & ends[number] & each.completes_entry for number, each in inner}
    # One that writes acc ends when its last entry has been written, which the queue says of each (landing).
    to_acc = of(all_[-1].constants_set, partial(writes, to=Destination.ACC))
    lands: Value = Const(0)
    if cfg.int32:
        lands = Signal(name="lands")
        written = inside["writeback"].last
        h.assume(implies(written, lands))
        with h.m.If(items.complete & ends[-1] & to_acc):
            h.m.d.sync += lands.eq(1)
        with h.m.Elif(written):
            h.m.d.sync += lands.eq(0)
        with h.m.If(dut.halt):
            h.m.d.sync += lands.eq(0)
        h.ensure(implies(lands, (under_way == 1) & of(current, partial(writes, to=Destination.ACC))), "lands")
        h.ensure(items.writes[Destination.ACC] == (items.complete & to_acc), "arrives")
        h.ensure(~(inside["raw"] & items.writes[Destination.ACC] & ~items.write.constants.raw), "one_kind_at_once")
    # From the oldest stage to the first: which of the two instructions have an item, or their last, in a later stage.
    passed: list[Value] = [Const(0), Const(0)]
    ended: list[Value] = [lands & ~current, lands & current]
    for number, each in reversed(inner):
        present = (under_way == 2) | ((under_way == 1) & (each.constants_set == current))
        h.ensure(implies(each.valid, present), f"of_one_under_way{number}")
        h.ensure(
            implies(each.valid & (each.constants_set != current), ~Mux(current, passed[1], passed[0])), f"order{number}"
        )
        h.ensure(implies(each.valid, ~Mux(each.constants_set, ended[1], ended[0])), f"none_after_the_last{number}")
        passed = [before | (each.valid & (each.constants_set == i)) for i, before in enumerate(passed)]
        ended = [before | (last[number] & (each.constants_set == i)) for i, before in enumerate(ended)]
        for name in sorted({"a_vin", "b_vin", "to", "raw", "rescale_add"} & set(each.constants.shape().members)):
            came = of(each.constants_set, lambda facts, name=name: Value.cast(facts[name]))
            h.ensure(implies(each.valid, each.constants[name] == came), f"{name}_of_{number}")
    own, older = (
        [bit & (all_[number].constants_set == which) for number, bit in last.items()] for which in (current, ~current)
    )
    h.ensure(implies(under_way != 0, busy + lands + sum(own[1:], own[0]) == 1), "one_last_of_current")
    h.ensure(implies(under_way == 2, sum(older[1:], older[0]) == 1), "one_last_of_the_one_before")
    h.ensure(implies(busy, Value.cast(issue.now) == of(current, data.View.as_value)), "now")
    for number in range(1, stage["reduce"] + 1):
        is_last = all_[number].carried.last
        h.ensure(implies(all_[number].valid & ends[number], is_last), f"ends_its_reduction{number}")
    left = [each.valid & (each.constants_set == all_[-1].constants_set) for each in all_[1:-1]]
    finish = inside["issue.retire"].retires
    ended_now = lands | (items.complete & ends[-1])
    h.ensure(
        implies(finish, ended_now & ~_any(left) & ~(busy & (current == all_[-1].constants_set))),
        "done_after_its_last_write",
    )
    h.ensure(implies(finish, under_way != 0), "finishes_what_is_under_way")

    # The proof of the rings assumes this.
    for i, held in enumerate(constants):
        uses = h.register(_any([each.valid & (each.constants_set == i) for each in all_[1:]]), f"uses{i}")
        facts = data.View.as_value(held)
        h.ensure(implies(uses, facts == h.register(facts, f"constants{i}_before")), f"constants{i}_stay")
    return h


FILE = "vector_unit/issue.py"
NOT_VIN = Mutant(
    FILE, "reads_vin = (fields.a_source == ASource.VIN) | ", "reads_vin = (fields.a_source == ASource.VIN) & "
)
NOT_ACC = Mutant(FILE, "feeds.eq(Cat(to_acc, to_vin))", "feeds.eq(Cat(0, to_vin))")
BASE = replace(SMALL, block_in=2, block_out=2)
for name, cfg, mutants in (
    ("plain", BASE, (NOT_ACC,)),
    ("with taps", replace(BASE, taps=2, forward=True), (NOT_VIN, NOT_ACC)),
    ("with residuals in two parts", replace(BASE, forward=True, residual_cycles=2), (NOT_VIN, NOT_ACC)),
    ("without int32", replace(BASE, forward=True, int32=False), (NOT_VIN,)),
):
    prove(
        f"hazards of the vector unit, {name}",
        Mutant(FILE, "waits.eq((under_way != 0) & ", "waits.eq(0 & "),
        *mutants,
        depth=1,
        reach=14,
        tested=name in ("plain", "without int32"),
    )(partial(hazards, cfg))
