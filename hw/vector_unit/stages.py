"""The stages of the vector unit's pipeline: what each one holds of its item."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from amaranth import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, formats
from celosia.hw.spec.pipeline import MAX_NORM_ROWS, vector_stages
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.vector_unit.constants import constants_layout


@dataclass
class StageFields:
    """Names of the values that a stage has of its item.

    constants: of its instruction, see `constants_layout`. carried: from stage to stage, see `carried_layout`.
    """

    constants: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


def carried_layout(cfg: Config) -> data.StructLayout:
    """Values of an item that travel with it, each as far as the last stage that uses it.

    first, last: the step is the first or last one of its reduction. vin_addr, acc_addr, par_addr: where it reads.
    row: number of its row in a norm.
    """
    pads = scratchpads(cfg)
    par_bits = next(field.width for field in formats(cfg)[Opcode.VECTOR].fields if field.name == "par_base")
    addresses = {"vin_addr": pads["vin"].address_bits, "acc_addr": pads["acc"].address_bits, "par_addr": par_bits}
    return data.StructLayout({"first": 1, "last": 1, **addresses, "row": exact_log2(MAX_NORM_ROWS)})


def stage_names(cfg: Config, first: str, end: str) -> list[str]:
    """Return the names of the stages from `first` to the one in front of `end`."""
    names = list(vector_stages(cfg))
    return names[names.index(first) : names.index(end)]


def vin_stage(cfg: Config) -> str:
    """Return the stage that reads vin: earlier with taps, since the sum of taps takes the stages up to `offset`."""
    return "read" if cfg.taps else "acc"


def stage_fields(cfg: Config) -> dict[str, StageFields]:
    """Return, by stage, the values that the stage needs of its item: constants, and values that are carried along."""
    fields = {name: StageFields() for name in vector_stages(cfg)}

    def use(constants: Iterable[str], *stages: str) -> None:
        """Declare that these stages use these constants."""
        for stage in stages:
            fields[stage].constants += tuple(name for name in constants if name not in fields[stage].constants)

    def carry(value: str, last: str) -> None:
        """Declare that a value travels with the item from stage `read` to stage `last`."""
        for passed in [*stage_names(cfg, "read", last), last]:
            fields[passed].carried += (value,)

    use(["a_vin", "b_vin"], vin_stage(cfg))
    use(["a_vin"], "acc", "offset")
    if cfg.taps:
        use(["weigh"], "read", "tap")
    if cfg.norm:
        use(["norm", "a_offset"], "acc")
        use(["norm", "b_constant"], "offset")
        use(["norm"], "reduce", "binary")
        carry("row", "acc")
    else:
        use(["a_offset"], "offset")
        use(["b_constant"], "reduce")
    use(["reduce_op", "b_offset", "b_vin", "rescale_add"], "reduce")
    use(["binary_op", "requantise"], "binary")
    use(["requantise"], "requantise")
    use(["zero_point", "clip_lo", "clip_hi", "lookup", "table"], "clip")
    use(["lookup"], "select")
    adds = stage_names(cfg, "add", "write")
    multiply, _, total, by_bytes, by_bits, clip = adds
    use(["rescale_add"], *adds)
    use(["scale_v", "scale_b"], multiply)
    use(["scale_c"], total)
    use(["scale_shift"], by_bytes, by_bits)
    use(["add_lo", "add_hi", "to"], clip)
    use(["post", "index"], "write")
    if cfg.int32:
        use(["raw"], *stage_names(cfg, "requantise", "write"), "write")
        use(["to"], "write")
    carry("first", "reduce")
    carry("last", "reduce")
    carry("vin_addr", vin_stage(cfg))
    carry("acc_addr", "acc")
    carry("par_addr", "binary")
    return fields


class StageSignature(wiring.Signature):
    """The item of a stage.

    Parameters
    ----------
    constants, carried : StructLayout, of those of its values that the stage has.

    Members
    -------
    valid : Out(1)      The stage holds an item.
    int8 : Out(1)       It does, and the item's result has 8 bits.
    fire : Out(1)       The item goes to the next stage.
    stall : Out(1)      The item is here in the next cycle as well. It may fire all the same: a part of it then goes on.
    whole : Out(1)      The item is an entry, or the last part of one.
    which : Out(1)      The set of constants that belongs to the item's instruction.
    constants : Out     Constants of the instruction.
    carried : Out       Values of the item.
    """

    def __init__(self, constants: data.StructLayout, carried: data.StructLayout) -> None:
        flags = ("valid", "int8", "fire", "stall", "whole", "which")
        super().__init__({**{flag: Out(1) for flag in flags}, "constants": Out(constants), "carried": Out(carried)})


def stage_signature(cfg: Config, fields: StageFields) -> StageSignature:
    """Return the signature of a stage with these fields."""

    def some(layout: data.StructLayout, names: Iterable[str]) -> data.StructLayout:
        """Return the layout of only those fields."""
        return data.StructLayout({name: layout[name].shape for name in names})

    return StageSignature(some(constants_layout(cfg), fields.constants), some(carried_layout(cfg), fields.carried))


class Stage(wiring.Component):
    """A stage of the pipeline: takes the item of the stage before, and what it needs of that and of its instruction.

    Parameters
    ----------
    before, own : signatures of the stage before and of this one, which may carry less.
    in_parts : whether items may be parts of an entry; without, all are whole.

    Members
    -------
    before : In(StageSignature)     The stage before.
    sets : In(constants).array(2)   The constants that this stage has, of the instructions under way.
    passes : In(1)                  An item here fires.
    stalls : In(1)                  An item here stays.
    halt : In(1)                    Drops the item that comes.
    item : Out(StageSignature)      This stage.
    """

    def __init__(self, before: StageSignature, own: StageSignature, in_parts: bool = False) -> None:
        self._in_parts = in_parts
        super().__init__({
            "before": In(before), "sets": In(own.members["constants"].shape).array(2), "passes": In(1),
            "stalls": In(1), "halt": In(1), "item": Out(own),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        before, item, (even, odd) = self.before, self.item, self.sets
        valid = Signal()
        which = Reg()
        constants = Reg(item.constants.shape())
        carried = Reg(item.carried.shape())
        m.d.comb += [
            item.valid.eq(valid), item.fire.eq(valid & self.passes), item.stall.eq(self.stalls), item.which.eq(which),
            item.constants.eq(constants), item.carried.eq(carried),
            item.int8.eq(valid & ~constants.raw if "raw" in constants.shape().members else valid),
        ]  # fmt: skip
        m.d.sync += valid.eq(before.fire | self.stalls)
        with m.If(self.halt):
            m.d.sync += valid.eq(0)
        with m.If(before.valid):
            m.d.sync += which.eq(before.which)
            for name, _ in constants.shape():
                m.d.sync += constants[name].eq(Mux(before.which, odd[name], even[name]))
            m.d.sync += [carried[name].eq(before.carried[name]) for name, _ in carried.shape()]
        if self._in_parts:
            whole = Signal()
            m.d.sync += whole.eq(before.whole & ~before.stall)
            m.d.comb += item.whole.eq(whole)
        else:
            m.d.comb += item.whole.eq(1)
        return m


class PipelineTracker(wiring.Component):
    """The items under way in the stages of the vector unit.

    No item waits. One with a residual is in stage `add` for as many cycles as the Config says, in each of which a part
    of it goes on; issue leaves as many cycles behind it.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    read : In(StageSignature)       The first stage: the step that issue offers.
    tap ... write : Out(StageSignature)     The others, by the names of `vector_stages`.
    sets : In(constants).array(2)   Constants of the instructions under way.
    halt : In(1)                    Drops all items.
    part : Out                      Number of the part of a residual that stage `add` passes on.
    added : Out(1)                  Stage `add` passes on the last part of an item with a residual.
    complete : Out(1)               The last stage has an entry, or the last part of one.
    writes : Out                    Where that is written, a bit for each destination: registers.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg, constants = cfg, constants_layout(cfg)
        self._signatures = {name: stage_signature(cfg, fields) for name, fields in stage_fields(cfg).items()}
        super().__init__({
            **{name: (In if name == "read" else Out)(signature) for name, signature in self._signatures.items()},
            "sets": In(constants).array(2), "halt": In(1), "part": Out(range(cfg.residual_cycles)),
            "added": Out(1), "complete": Out(1), "writes": Out(constants["to"].shape),
        })  # fmt: skip
        self.stages: list[Any] = [getattr(self, name) for name in self._signatures]
        """All stages, in their order."""

    def between(self, first: str, end: str) -> list[Any]:
        """Return the stages from `first` to the one in front of `end`."""
        return [getattr(self, name) for name in stage_names(self._cfg, first, end)]

    def elaborate(self, platform: object) -> Module:
        m = Module()
        before: Any = wiring.flipped(self.read)
        after_add = ("write", *stage_names(self._cfg, "add", "write")[1:])
        for previous, name in pairwise(self._signatures):
            in_parts = self._cfg.residual_cycles > 1 and name in after_add
            stage = Stage(self._signatures[previous], self._signatures[name], in_parts)
            m.submodules[name] = stage
            wiring.connect(m, before, stage.before)
            wiring.connect(m, stage.item, wiring.flipped(getattr(self, name)))
            before = stage.item
            m.d.comb += [
                *(
                    used[constant].eq(constants[constant])
                    for used, constants in zip(stage.sets, self.sets, strict=True)
                    for constant, _ in used.shape()
                ),
                stage.halt.eq(self.halt),
                stage.passes.eq(stage.item.carried.last if name == "reduce" else 1),
                stage.stalls.eq(self._add(m) if name == "add" else 0),
            ]
        *_, last, _ = self.stages
        m.d.comb += self.complete.eq(self.write.valid & self.write.whole)
        writes = Signal.like(self.writes)
        m.d.comb += self.writes.eq(writes)
        for destination, written in enumerate(writes):
            m.d.sync += written.eq(last.valid & last.whole & last.constants.to[destination] & ~self.halt)
        probes(self, stages=self.stages)
        return m

    def _add(self, m: Module) -> Any:
        """Count the parts of a residual. Returns whether the item in stage `add` has others behind this one."""
        adds = self.add.valid & self.add.constants.rescale_add
        last_part = self.part == self._cfg.residual_cycles - 1
        m.d.comb += self.added.eq(adds & last_part)
        if self._cfg.residual_cycles == 1:
            return 0
        with m.If(adds):
            m.d.sync += self.part.eq(self.part + 1)
        with m.If(self.halt):
            m.d.sync += self.part.eq(0)
        return adds & ~last_part
