"""The vector unit: what skips stages is in step with the items that it belongs to, however they are held up; and gemm,
which holds it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from amaranth import Const, Mux, Value
from amaranth.lib import data

from celosia.hw.config import Config
from celosia.hw.gemm_core.gemm import Gemm
from celosia.hw.pipeline import vector_stages
from celosia.hw.vector_unit.vector import Vector
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies


def rings(cfg: Config) -> Harness:
    """In each ring lie as many values as there are items for which they wait, so that each item, which leaves once,
    finds its own place, residual and value: rings are lists.
    """
    h = Harness()
    dut = Vector(cfg)
    inside = h.add(dut)
    stage, items, last = vector_stages(cfg), inside["items"], list(inside["last"].values())
    constants = inside["issue.constants"]

    def of(number: int, name: str) -> Value:
        return Mux(items.all[number].which, constants[1][name], constants[0][name])

    def waiting(first: int, end: int, counts: Callable[[int], Value]) -> Value:
        """Items that have left stage `first` and not stage `end`; of one in parts the last part counts."""
        there = Const(0)
        for i in range(first + 1, end + 1):
            is_item = last[i] if i <= stage["reduce"] else items.all[i].whole
            there = there + (items.all[i].valid & is_item & counts(i))
        return there

    # The constants of an item stay until it has left: at most two instructions are under way, each with its own.
    for i, held in enumerate(constants):
        uses = Value.cast(0)
        for each in items.all[1:]:
            uses = uses | (each.valid & (each.which == i))
        facts = data.View.as_value(held)
        h.assume(implies(h.register(uses, f"uses{i}"), facts == h.register(facts, f"constants{i}_before")))
        if cfg.int32:
            h.assume(implies(held.rescale_add, ~held.raw))

    # What a stage knows of its item's instruction came with the item.
    for number, each in enumerate(items.all[1:], 1):
        for name, value in each.registered.items():
            h.ensure(implies(each.valid, value == of(number, name)), f"{name}_of_{number}")
    h.ensure(implies(items.hold, items["add"].adds), "holds_what_adds")
    h.ensure((items.middle == (items.back & ~items.hold)) & implies(items.front, items.middle), "stalls")

    kinds: dict[str, tuple[int, int, Callable[[int], Value]]] = {
        "places": (0, stage["write"], lambda i: Const(1)),
        "residuals": (stage["reduce"], stage["add"], lambda i: of(i, "rescale_add")),
    }
    if cfg.int32:
        kinds["raw"] = (stage["requantise"], stage["write"], lambda i: of(i, "raw"))
    for name, (first, end, counts) in kinds.items():
        ring: Any = getattr(inside["m"].submodules, name)
        head, tail = inside.of(ring, "head"), inside.of(ring, "tail")
        there = waiting(first, end, counts)
        h.ensure((head - tail)[: len(head)] == there[: len(head)], f"{name}_in_step")
        h.ensure(there <= end - first, f"{name}_room")
    for i in range(stage["add"] + 1, stage["write"] + 1):
        h.ensure(implies(items.all[i].valid & ~of(i, "rescale_add"), items.all[i].whole), f"whole{i}")
    return h


def claims(cfg: Config) -> Harness:
    """GEMM takes the ports of acc that it has claimed a cycle before, and no others."""
    h = Harness()
    dut = Gemm(cfg)
    h.add(dut)
    for kind, port in (("read", dut.acc_read), ("write", dut.acc_write)):
        for bank in range(2):
            claimed = h.register(dut.claims[kind][bank], f"claimed_{kind}{bank}")
            h.ensure((port.en & (port.addr[-1] == bank)) == claimed, f"{kind}{bank}")
    return h


FILE, ITEMS = "vector_unit/vector.py", "vector_unit/items.py"
POPS = Mutant(FILE, "add.adds & items.middle,", "add.adds & items.back,")
LOST = Mutant(FILE, 'items["reduce"].leaves = items["reduce"].enable & last["reduce"]', "pass")
LATE = Mutant(FILE, 'requantise.enable & requantise.at("raw")', 'requantise.valid & items.back & requantise.at("raw")')
FRONT = Mutant(ITEMS, 'self["acc"].leaves = self["acc"].valid & self.front', "pass")
EARLY = Mutant("gemm_core/gemm.py", "before_reading = pipe[-6]", "before_reading = pipe[-5]")
prove("GEMM takes the ports of acc that it has claimed", EARLY, depth=1)(partial(claims, SMALL))
BASE = replace(SMALL, block_in=8, block_out=4)
for name, cfg, mutants, reach in (
    ("with taps", replace(BASE, taps=3, forward=True), (LOST, FRONT), 12),
    ("with taps, without int32", replace(BASE, taps=3, forward=True, residual_cycles=2, int32=False), (LOST, POPS), 22),
    ("with residuals in two parts", replace(BASE, residual_cycles=2), (LOST, POPS, LATE), 22),
    ("with taps, and residuals in four parts", replace(BASE, taps=3, residual_cycles=4), (LOST, FRONT), 12),
):
    prove(
        f"rings of the vector unit are in step with its items, {name}",
        *mutants,
        depth=1,
        reach=reach,
        tested=name == "with residuals in two parts",
    )(partial(rings, cfg))
