"""What is under way in the stages of the vector unit, and rings for what skips stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from amaranth import Const, Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import ring_places, vector_stages


class DelayQueue(wiring.Component):
    """A ring of words for what skips `stages` of the pipeline, two at least: pushed where it leaves, popped where it
    returns. The word that is the next to be popped stands in a register.
    """

    def __init__(self, shape: ShapeLike, stages: int) -> None:
        self._shape, self._places = shape, ring_places(stages)
        super().__init__({"clear": In(1), "push": In(1), "i": In(shape), "pop": In(1), "o": Out(shape)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.ring = ring = Memory(shape=self._shape, depth=self._places, init=[])
        to = ring.write_port()
        of = ring.read_port(domain="comb")
        head, tail, next_tail = (Signal(range(self._places), name=name) for name in ("head", "tail", "next_tail"))
        oldest = Signal.like(of.data, reset_less=True)
        m.d.comb += [to.en.eq(self.push), to.addr.eq(head), to.data.eq(self.i), of.addr.eq(next_tail)]
        m.d.comb += [next_tail.eq(tail + self.pop), self.o.eq(oldest)]
        m.d.sync += [head.eq(head + self.push), tail.eq(next_tail), oldest.eq(of.data)]
        with m.If(self.clear):
            m.d.sync += [head.eq(0), tail.eq(0)]
        probes(self, head=head, tail=tail, ring=ring)
        return m


class Stage:
    """A stage of the pipeline. What is here is in the next stage in the next cycle.

    valid: an item is here. which: the set of constants that belongs to it. whole: of an item in several parts it is the
    last one. leaves: an item goes to the next stage; of some stages not all do. stays: it is here in the next cycle as
    well.
    """

    def __init__(self, number: int, constants: Sequence[Any], before: Stage | None, int32: bool) -> None:
        """int32: there are items whose results have 32 bits."""
        self._number, self._constants, self.before = number, constants, before
        self._int32 = int32
        self.valid, self.which = Signal(name=f"valid{number}"), Reg(name=f"which{number}")
        self.whole: Value = Const(1)
        self.leaves: Value = self.valid
        self.stays: Value = Const(0)
        self.registered: dict[str, Signal] = {}

    def at(self, name: str) -> Signal:
        """A constant of the instruction to which the item belongs: a register that comes with it."""
        if name not in self.registered:
            self.registered[name] = Reg(self._constants[0][name].shape(), name=f"{name}_{self._number}")
        return self.registered[name]

    def take(self, m: Module) -> None:
        """Items come from the stage before, and what `at` was asked for with them."""
        before, (even, odd) = self.before, self._constants
        assert before is not None
        m.d.sync += self.valid.eq(before.leaves | self.stays)
        with m.If(before.valid):
            m.d.sync += self.which.eq(before.which)
            m.d.sync += [value.eq(Mux(before.which, odd[name], even[name])) for name, value in self.registered.items()]

    @property
    def int8(self) -> Value:
        """The result of the item has 8 bits."""
        return self.valid & ~self.at("raw") if self._int32 else self.valid

    @property
    def adds(self) -> Value:
        """The item has a residual."""
        return self.valid & self.at("rescale_add")


class PipelineTracker:
    """What is under way in the stages of the vector unit.

    Nothing holds them up. An item with a residual is in `add` for as many cycles as the Config says, in each of which a
    part of it goes on; issue leaves as many cycles behind it.

    part: the number of the one that does; last_part: it is the last. complete: the last part is in the last stage.
    writes: the destination to which the item goes in this cycle, by the bits of `to`; registers.
    """

    def __init__(self, m: Module, cfg: Config, constants: Sequence[Any], now: Any, current: Signal) -> None:
        self._m, self._cfg = m, cfg
        names = vector_stages(cfg)
        self.all: list[Stage] = []
        for number in names.values():
            stage = Stage(number, constants, self.all[-1] if self.all else None, cfg.int32)
            if cfg.residual_cycles > 1 and number > names["add"]:
                stage.whole = Signal(name=f"whole{number}")
            self.all.append(stage)
        self._named = {name: self.all[number] for name, number in names.items()}
        first = self["read"]
        m.d.comb += first.which.eq(current)
        first.registered = {name: now[name] for name, _ in now.shape()}
        self.part = Signal(range(cfg.residual_cycles), name="part")
        self.last_part = self.part == cfg.residual_cycles - 1
        self.complete = self["write"].valid & self["write"].whole
        self.writes = Signal(len(now.to), name="writes")

    def __getitem__(self, name: str) -> Stage:
        return self._named[name]

    def between(self, first: str, end: str) -> list[Stage]:
        """The stages from `first` to the one in front of `end`."""
        return self.all[self.all.index(self[first]) : self.all.index(self[end])]

    def carry(self, source: Any, name: str, to: str) -> dict[str, Any]:
        """`source`, which belongs to the item in the first stage, in each stage up to `to`, by the stage's name."""
        values, way = [source], self.between("read", to)
        for stage in way:
            values.append(Reg(source.shape(), name=f"{name}{len(values)}"))
            with self._m.If(stage.valid):
                self._m.d.sync += values[-1].eq(values[-2])
        names = {id(stage): name for name, stage in self._named.items()}
        return {names[id(stage)]: value for stage, value in zip([*way, self[to]], values)}

    def advance(self, halt: Value) -> None:
        """Items go from stage to stage; nothing is left after `halt`. To be called last."""
        m, add, parts = self._m, self["add"], self._cfg.residual_cycles
        if parts > 1:
            add.stays = add.adds & ~self.last_part
            with m.If(add.adds):
                m.d.sync += self.part.eq(self.part + 1)
        last = self["write"].before
        assert last is not None
        for to, writes in enumerate(self.writes):
            m.d.sync += writes.eq(last.valid & last.whole & last.at("to")[to] & ~halt)
        for before, after in pairwise(self.all):
            after.take(m)
            if isinstance(after.whole, Signal):
                m.d.sync += after.whole.eq(before.whole & ~before.stays)
        with m.If(halt):
            m.d.sync += [self.part.eq(0), *(stage.valid.eq(0) for stage in self.all[1:])]
