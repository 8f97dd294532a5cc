"""The stages of the vector unit's pipeline, and the values that each one has of its item."""

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

    constants : values of the item's instruction, see `constants_layout`.
    carried : values that are passed from stage to stage, see `carried_layout`.
    """

    constants: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


def carried_layout(cfg: Config) -> data.StructLayout:
    """Return the layout of the values that are passed from stage to stage with an item, as far as they are used.

    first, last: the step is the first or last one of its reduction. vin_addr, acc_addr, par_addr: addresses that it
    reads. row: number of its row in a norm.
    """
    pads = scratchpads(cfg)
    par_bits = next(field.width for field in formats(cfg)[Opcode.VECTOR].fields if field.name == "par_base")
    addresses = {"vin_addr": pads["vin"].address_bits, "acc_addr": pads["acc"].address_bits, "par_addr": par_bits}
    return data.StructLayout({"first": 1, "last": 1, **addresses, "row": exact_log2(MAX_NORM_ROWS)})


def stage_names(cfg: Config, first: str, end: str) -> list[str]:
    """Return the names of the stages from `first` on, up to but without `end`."""
    names = list(vector_stages(cfg))
    return names[names.index(first) : names.index(end)]


def vin_stage(cfg: Config) -> str:
    """Return the stage that reads vin. With taps it is an earlier one, as the sum of taps takes three stages."""
    return "read" if cfg.taps else "acc"


def stage_fields(cfg: Config) -> dict[str, StageFields]:
    """Return, for each stage by name, which constants and which carried values it needs."""
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
    """The item in a stage, as other stages and the lanes see it.

    Parameters
    ----------
    constants, carried : StructLayout, of the values that the stage has of its item.

    Members
    -------
    valid : Out(1)              The stage holds an item.
    int8 : Out(1)               The stage holds an item whose result is int8.
    fire : Out(1)               The item, or a part of it, moves to the next stage.
    stall : Out(1)              The item stays here for another cycle, in which a further part of it moves on.
    completes_entry : Out(1)    The item is a whole entry, or the last part of one.
    constants_set : Out(1)      Number of the set of constants of the item's instruction.
    constants : Out             Constants of the instruction.
    carried : Out               Values of the item.
    """

    def __init__(self, constants: data.StructLayout, carried: data.StructLayout) -> None:
        flags = ("valid", "int8", "fire", "stall", "completes_entry", "constants_set")
        super().__init__({**{flag: Out(1) for flag in flags}, "constants": Out(constants), "carried": Out(carried)})


def stage_signature(cfg: Config, fields: StageFields) -> StageSignature:
    """Return the signature of a stage with the values `fields`."""

    def select(layout: data.StructLayout, names: Iterable[str]) -> data.StructLayout:
        """Return a layout of only the fields `names` of `layout`."""
        return data.StructLayout({name: layout[name].shape for name in names})

    return StageSignature(select(constants_layout(cfg), fields.constants), select(carried_layout(cfg), fields.carried))


class Stage(wiring.Component):
    """Registers of one pipeline stage: the item of the previous stage, and the constants that this stage needs.

    Parameters
    ----------
    previous_signature, own_signature : those of the previous stage and of this one, which may have fewer values.
    in_parts : whether items may be parts of an entry; else all are whole.

    Members
    -------
    before : In(StageSignature)             The item of the previous stage.
    constant_sets : In(constants).array(2)  The constants of this stage, for both instructions under way.
    may_fire : In(1)                        An item in this stage may fire.
    stay : In(1)                            An item in this stage stays for another cycle.
    halt : In(1)                            Drops the item that enters.
    item : Out(StageSignature)              The item of this stage.
    """

    def __init__(
        self, previous_signature: StageSignature, own_signature: StageSignature, in_parts: bool = False
    ) -> None:
        self._in_parts = in_parts
        super().__init__({
            "before": In(previous_signature), "constant_sets": In(own_signature.members["constants"].shape).array(2),
            "may_fire": In(1), "stay": In(1), "halt": In(1), "item": Out(own_signature),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        before, item, (even, odd) = self.before, self.item, self.constant_sets
        valid = Signal()
        constants_set = Reg()
        constants = Reg(item.constants.shape())
        carried = Reg(item.carried.shape())
        m.d.comb += [
            item.valid.eq(valid), item.fire.eq(valid & self.may_fire), item.stall.eq(self.stay),
            item.constants_set.eq(constants_set), item.constants.eq(constants), item.carried.eq(carried),
            item.int8.eq(valid & ~constants.raw if "raw" in constants.shape().members else valid),
        ]  # fmt: skip
        m.d.sync += valid.eq(before.fire | self.stay)
        with m.If(self.halt):
            m.d.sync += valid.eq(0)
        with m.If(before.valid):
            m.d.sync += constants_set.eq(before.constants_set)
            for name, _ in constants.shape():
                m.d.sync += constants[name].eq(Mux(before.constants_set, odd[name], even[name]))
            m.d.sync += [carried[name].eq(before.carried[name]) for name, _ in carried.shape()]
        if self._in_parts:
            completes_entry = Signal()
            m.d.sync += completes_entry.eq(before.completes_entry & ~before.stall)
            m.d.comb += item.completes_entry.eq(completes_entry)
        else:
            m.d.comb += item.completes_entry.eq(1)
        return m


class PipelineStages(wiring.Component):
    """All stages of the vector unit's pipeline, with the items under way.

    No item waits for memory or a port. Only an item with a residual takes several cycles: it stays in stage `add` for
    `residual_cycles` cycles, in each of which a part of its lanes moves on. Issue leaves that many cycles between it
    and the next item.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    read : In(StageSignature)               The first stage: the step that issue offers.
    tap ... write : Out(StageSignature)     The other stages, by the names of `vector_stages`.
    constant_sets : In(constants).array(2)  Constants of the two instructions under way.
    halt : In(1)                            Drops all items.
    part : Out                              Number of the part that moves on from stage `add`.
    added : Out(1)                          The last part of an item with a residual moves on from stage `add`.
    complete : Out(1)                       The last stage has a whole entry, or the last part of one.
    writes : Out                            Destinations to which that entry is written, a bit for each: registers.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg, constants = cfg, constants_layout(cfg)
        self._signatures = {name: stage_signature(cfg, fields) for name, fields in stage_fields(cfg).items()}
        super().__init__({
            **{name: (In if name == "read" else Out)(signature) for name, signature in self._signatures.items()},
            "constant_sets": In(constants).array(2), "halt": In(1), "part": Out(range(cfg.residual_cycles)),
            "added": Out(1), "complete": Out(1), "writes": Out(constants["to"].shape),
        })  # fmt: skip
        self.stages: list[Any] = [getattr(self, name) for name in self._signatures]
        """All stages, in their order."""

    def stages_from(self, first: str, end: str) -> list[Any]:
        """Return the stages from `first` on, up to but without `end`."""
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
                    for used, constants in zip(stage.constant_sets, self.constant_sets, strict=True)
                    for constant, _ in used.shape()
                ),
                stage.halt.eq(self.halt),
                stage.may_fire.eq(stage.item.carried.last if name == "reduce" else 1),
                stage.stay.eq(self._build_part_counter(m) if name == "add" else 0),
            ]
        *_, last, _ = self.stages
        m.d.comb += self.complete.eq(self.write.valid & self.write.completes_entry)
        writes = Signal.like(self.writes)
        m.d.comb += self.writes.eq(writes)
        for destination, written in enumerate(writes):
            m.d.sync += written.eq(last.valid & last.completes_entry & last.constants.to[destination] & ~self.halt)
        probes(self, stages=self.stages)
        return m

    def _build_part_counter(self, m: Module) -> Any:
        """Drive `part` and `added`. Returns whether the item in stage `add` stays, as further parts follow."""
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
