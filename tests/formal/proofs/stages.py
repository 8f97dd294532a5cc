"""Prove that values that skip stages of VECTOR keep step with their items, and that no stall is needed.

One more property is about GEMM, whose claims VECTOR's steps respect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from amaranth import Const, Mux, Value
from amaranth.lib import data

from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Destination
from celosia.hw.spec.pipeline import WRITEBACK_DEPTH, claim_lead, vector_stages
from celosia.hw.vector_unit import slots, writeback
from celosia.hw.vector_unit.vector import Vector
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies


class Inner:
    """A vector unit and its stages, with assumptions that other properties prove.

    The constants of an item stay until it has left. At most two instructions are under way, each with its own
    constants.
    """

    def __init__(self, cfg: Config) -> None:
        self.h, self.cfg, self.dut = Harness(), cfg, Vector(cfg)
        self.inside = self.h.add(self.dut)
        self.stage, self.items = vector_stages(cfg), self.inside["items"]
        self.last = [stage.carried.last for stage in self.items.stages[: self.stage["reduce"] + 1]]
        issue = self.inside["issue"]
        self.constants = issue.sets
        h, current = self.h, issue.current
        for i, held in enumerate(self.constants):
            uses = Value.cast(0)
            for each in self.items.stages[1:]:
                uses = uses | (each.valid & (each.constants_set == i))
            facts = data.View.as_value(held)
            h.assume(implies(h.register(uses, f"uses{i}"), facts == h.register(facts, f"constants{i}_before")))
            if cfg.int32:
                h.assume(implies(held.raw, ~held.rescale_add & held.to[Destination.ACC]))
        even, odd = (data.View.as_value(held) for held in self.constants)
        now = Value.cast(issue.now)
        h.assume(implies(self.inside["issue.loops.busy"], now == Mux(current, odd, even)))

    def of(self, number: int, name: str) -> Value:
        """Return constant `name` of the instruction whose item is in stage `number`."""
        return Mux(self.items.stages[number].constants_set, self.constants[1][name], self.constants[0][name])

    def waiting(self, first: int, end: int, counts: Callable[[int], Value]) -> Value:
        """Count the items that have left stage `first` and not stage `end`; an item in parts counts once."""
        there = Const(0)
        for i in range(first + 1, end + 1):
            is_item = self.last[i] if i <= self.stage["reduce"] else self.items.stages[i].completes_entry
            there = there + (self.items.stages[i].valid & is_item & counts(i))
        return there


def rings(cfg: Config) -> Harness:
    """Each ring holds as many values as there are items that wait for one, so that each item finds its own value.

    An item leaves once, and values are its place, its residual, or its result. So rings are lists.
    """
    it = Inner(cfg)
    h, stage, items, of = it.h, it.stage, it.items, it.of
    # A stage's constants are those of its item's instruction.
    for number, each in enumerate(items.stages[1:], 1):
        for name, _ in each.constants.shape():
            h.ensure(implies(each.valid, each.constants[name] == of(number, name)), f"{name}_of_{number}")
    spaced(it)

    kinds: dict[str, tuple[int, int, Callable[[int], Value]]] = {
        "places": (0, stage["write"], lambda i: Const(1)),
        "residuals": (stage["reduce"], stage["add"], lambda i: of(i, "rescale_add")),
    }
    for name, (first, end, counts) in kinds.items():
        head, tail = it.inside[f"{name}.head"], it.inside[f"{name}.tail"]
        there = it.waiting(first, end, counts)
        h.ensure((head - tail)[: len(head)] == there[: len(head)], f"{name}_in_step")
        h.ensure(there <= end - first, f"{name}_room")
    for i in range(stage["add"] + 1, stage["write"] + 1):
        h.ensure(implies(items.stages[i].valid & ~of(i, "rescale_add"), items.stages[i].completes_entry), f"whole{i}")
    if cfg.int32:
        writes_back(it)
    return h


def few_places(cfg: Config) -> Harness:
    """Prove `rings` with a queue to acc of four places, which is full within the cycles of the search for mutants."""
    with (
        patch.object(slots, "WRITEBACK_DEPTH", 4),
        patch.object(writeback, "WRITEBACK_DEPTH", 4),
        patch.dict(globals(), WRITEBACK_DEPTH=4),
    ):
        return rings(cfg)


def spaced(it: Inner) -> None:
    """No item reaches a stage that another one still occupies, so no stall is needed.

    Behind an item with a residual, stages are empty for as long as the residual takes.
    """
    h, items, parts, part = it.h, it.items, it.cfg.residual_cycles, it.items.part
    add, bubbles = it.stage["add"], it.inside["issue.slots.bubbles"]
    slot = it.inside["issue.slots"].slot
    h.ensure(implies(items.add.stall, ~items.stages[add - 1].fire), "nothing_meets_a_residual")
    h.ensure(implies(bubbles != 0, ~slot), "no_step_in_a_bubble")
    h.ensure(implies(~(items.add.valid & it.of(add, "rescale_add")), part == 0), "parts_of_residuals_alone")
    for i in range(1, add + 1):
        is_item = it.last[i] if i < len(it.last) else Const(1)
        adds = items.stages[i].valid & is_item & it.of(i, "rescale_add")
        here = part if i == add else Const(0)  # cycles that it has been here
        for behind in range(1, parts):
            empty = ~items.stages[i - behind].valid if behind < i else bubbles >= parts - i
            h.ensure(implies(adds & (here + behind < parts), empty), f"nothing{behind}_behind_{i}")


def writes_back(it: Inner) -> None:
    """The queue to acc has room for everything under way to acc, so no stall is needed.

    The data of an entry arrive there before its address, in the same order.
    """
    h, items, write = it.h, it.items, it.items.write
    requantise = it.stage["requantise"]
    part: Any = it.inside["writeback"]
    put, arrived, goes, at, waiting = (
        it.inside.of(part, name) for name in ("put", "arrived", "goes", "written", "waiting")
    )
    queued, bits = it.inside["issue.slots.queued"], len(put)
    arrives = items.writes[Destination.ACC]
    h.ensure(arrives == (items.complete & it.of(it.stage["write"], "to")[Destination.ACC]), "arrives")
    h.assume(~(it.inside["raw"] & arrives & ~write.constants.raw))  # of two instructions; see hazards
    under_way = it.waiting(0, it.stage["write"], lambda i: it.of(i, "to")[Destination.ACC])
    h.ensure(queued == under_way + waiting + part.write.en, "counts_what_is_under_way")
    h.ensure(queued <= WRITEBACK_DEPTH, "room")
    h.ensure(implies(it.inside["issue.slots"].slot, queued < WRITEBACK_DEPTH), "room_for_a_step")
    raw = it.waiting(requantise, it.stage["write"], lambda i: it.of(i, "raw"))
    h.ensure((put - arrived)[:bits] == raw[:bits], "values_first")
    h.ensure((arrived - goes)[:bits] == waiting[:bits], "places")
    h.ensure((goes - at)[:bits] == part.write.en, "written")


def claims(cfg: Config) -> Harness:
    """GEMM takes exactly the ports of acc that it has claimed, reads as many cycles before as VECTOR looks ahead.

    A claimed read may be missing after a halt, or if scratchpads are not ready.
    """
    h = Harness()
    dut = Gemm(cfg)
    inside = h.add(dut)
    early = len(inside["pipe"]) - 5 < claim_lead(cfg)
    for kind, port, lead in (("read", dut.acc_read, claim_lead(cfg)), ("write", dut.acc_write, 1)):
        for bank in range(2):
            claimed: Value = dut.claims[kind][bank]
            for cycle in range(lead):
                claimed = h.register(claimed, f"claimed_{kind}{bank}_{cycle}")
            takes = port.en & (port.addr[-1] == bank)
            h.ensure(implies(takes, claimed) if early and kind == "read" else takes == claimed, f"{kind}{bank}")
    return h


VECTOR, STAGES = "vector_unit/vector.py", "vector_unit/stages.py"
ISSUE, SLOTS = "vector_unit/issue.py", "vector_unit/slots.py"
POPS = Mutant(STAGES, "self.added.eq(adds & last_part)", "self.added.eq(adds)")
LOST = Mutant(STAGES, 'stage.item.carried.last if name == "reduce" else 1', "1")
MEETS = Mutant(SLOTS, "blocked |= left[: len(bubbles)].any()", "pass")
SHORT = Mutant(SLOTS, "cfg.residual_cycles - 1, bubbles", "cfg.residual_cycles - 2, bubbles")
FULL = Mutant(SLOTS, "blocked |= with_this == WRITEBACK_DEPTH", "pass")
COUNT = Mutant(ISSUE, "output.eq(self.fire & loops.step.payload.last)", "output.eq(self.fire)")
LATE = Mutant(VECTOR, "queue.put.eq(raw | (arrives", "queue.put.eq((arrives")
EARLY = Mutant("gemm_core/gemm.py", "- claim_lead(self.cfg)", "- claim_lead(self.cfg) + 1")
WIDE = replace(SMALL, block_in=8, taps=3)
for name, cfg in (
    ("of a small array", replace(SMALL, taps=3)),
    ("of an array of two", replace(SMALL, block_in=2, taps=3)),
    ("of a larger one", WIDE),
    ("without taps", replace(WIDE, taps=0)),
):  # fmt: skip
    prove(f"GEMM takes the ports of acc that it has claimed, {name}", EARLY, depth=claim_lead(cfg) + 1)(
        partial(claims, cfg)
    )
BASE = replace(SMALL, block_in=8, block_out=4)
for name, cfg, mutants, reach in (
    ("with taps", replace(BASE, taps=3, forward=True, residual_cycles=1), (LOST, COUNT, LATE), 14),
    (
        "with taps, without int32", replace(BASE, taps=3, forward=True, residual_cycles=2, int32=False),
        (LOST, POPS, MEETS), 22,
    ),
    ("with residuals in two parts", replace(BASE, residual_cycles=2), (LOST, POPS, MEETS, COUNT), 22),
    ("with taps, and residuals in four parts", replace(BASE, taps=3, residual_cycles=4), (LOST, MEETS, SHORT), 12),
):  # fmt: skip
    prove(
        f"no stall is needed in the vector unit, and its rings are in step with its items, {name}",
        *mutants,
        depth=1,
        reach=reach,
        tested=name == "with residuals in two parts",
    )(partial(rings, cfg))
prove(
    "no stall is needed in the vector unit, with a queue to acc of four places",
    FULL,
    depth=1,
)(partial(few_places, replace(SMALL, block_in=2, block_out=2)))
