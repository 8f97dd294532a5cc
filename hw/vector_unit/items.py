"""What is under way in the stages of the vector unit, what holds it up, and rings for what skips stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from amaranth import Const, Module, Mux, Signal, Value
from amaranth.hdl import ShapeLike
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.config import Config
from celosia.hw.isa import Destination
from celosia.hw.pipeline import ring_places, vector_stages

_REGISTER = partial(Signal, reset_less=True)


class Bypass(wiring.Component):
    """A ring of words for what skips `stages` of the pipeline: pushed where it leaves, popped where it returns."""

    def __init__(self, shape: ShapeLike, stages: int) -> None:
        self._shape, self._places = shape, ring_places(stages)
        super().__init__({"clear": In(1), "push": In(1), "i": In(shape), "pop": In(1), "o": Out(shape)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.ring = ring = Memory(shape=self._shape, depth=self._places, init=[])
        to, of = ring.write_port(), ring.read_port(domain="comb")
        head, tail = Signal(range(self._places)), Signal(range(self._places))
        m.d.comb += [to.en.eq(self.push), to.addr.eq(head), to.data.eq(self.i), of.addr.eq(tail), self.o.eq(of.data)]
        with m.If(self.push):
            m.d.sync += head.eq(head + 1)
        with m.If(self.pop):
            m.d.sync += tail.eq(tail + 1)
        with m.If(self.clear):
            m.d.sync += [head.eq(0), tail.eq(0)]
        return m


class Stage:
    """A stage of the pipeline.

    valid: an item is here. which: the set of constants that belongs to it. whole: of an item in several parts it is the
    last one. move: what is here goes on. leaves: an item goes to the next stage; of some stages not all do.
    """

    def __init__(self, number: int, move: Signal, constants: Sequence[Any], before: Stage | None, int32: bool) -> None:
        """int32: there are items whose results have 32 bits."""
        self._number, self._constants, self.before = number, constants, before
        self.move, self._int32 = move, int32
        self.valid, self.which = Signal(name=f"valid{number}"), _REGISTER(name=f"which{number}")
        self.whole: Value = Const(1)
        self.leaves: Value = self.valid & move
        self.registered: dict[str, Signal] = {}

    def at(self, name: str) -> Signal:
        """A constant of the instruction to which the item belongs: a register that comes with it."""
        if name not in self.registered:
            self.registered[name] = _REGISTER(self._constants[0][name].shape(), name=f"{name}_{self._number}")
        return self.registered[name]

    def take(self, m: Module) -> None:
        """Items come from the stage before, and what `at` was asked for with them."""
        before, (even, odd) = self.before, self._constants
        assert before is not None
        with m.If(before.move):
            m.d.sync += self.valid.eq(before.leaves)
        with m.If(before.enable):
            m.d.sync += self.which.eq(before.which)
            m.d.sync += [value.eq(Mux(before.which, odd[name], even[name])) for name, value in self.registered.items()]

    @property
    def enable(self) -> Value:
        """What the item leaves behind is kept for the next stage."""
        return self.valid & self.move

    @property
    def int8(self) -> Value:
        """The result of the item has 8 bits."""
        return self.valid & ~self.at("raw") if self._int32 else self.valid

    @property
    def adds(self) -> Value:
        """The item has a residual."""
        return self.int8 & self.at("rescale_add")


class Items:
    """What is under way in the stages of the vector unit.

    back, middle, front: the stages from rescale_add on move, those from the read of acc on, and those in front of it.
    They are registers: back is 0 where the port of acc to which an item writes is GEMM's, middle also while an item
    with a residual is not through with rescale_add (hold), front also where the port from which one reads is GEMM's.
    From rescale_add on the parts of an item follow each other. complete: the last one is in the last stage.
    writes: the destination to which it goes in this cycle, by the bits of `to`; registers, too.
    """

    def __init__(self, m: Module, cfg: Config, constants: Sequence[Any], now: Any, current: Signal) -> None:
        self._m, self._cfg = m, cfg
        self.back, self.middle, self.front = (Signal(name=name, init=1) for name in ("back", "middle", "front"))
        self.hold = Signal(name="hold")
        names = vector_stages(cfg)
        self.all: list[Stage] = []
        for number in names.values():
            move = self.front if number < names["acc"] else self.middle if number < names["add"] else self.back
            stage = Stage(number, move, constants, self.all[-1] if self.all else None, cfg.int32)
            if cfg.residual_cycles > 1 and number > names["add"]:
                stage.whole = Signal(name=f"whole{number}")
            self.all.append(stage)
        self._named = {name: self.all[number] for name, number in names.items()}
        first = self["read"]
        m.d.comb += first.which.eq(current)
        first.registered = {name: now[name] for name, _ in now.shape()}
        self["acc"].leaves = self["acc"].valid & self.front
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
            values.append(_REGISTER(source.shape(), name=f"{name}{len(values)}"))
            with self._m.If(stage.enable):
                self._m.d.sync += values[-1].eq(values[-2])
        names = {id(stage): name for name, stage in self._named.items()}
        return {names[id(stage)]: value for stage, value in zip([*way, self[to]], values)}

    def advance(self, halt: Value) -> None:
        """Items go from stage to stage; nothing is left after `halt`. To be called last."""
        m = self._m
        for before, after in pairwise(self.all):
            after.take(m)
            if isinstance(after.whole, Signal):
                with m.If(before.move):
                    m.d.sync += after.whole.eq(before.whole & ~self.hold if before is self["add"] else before.whole)
        with m.If(halt):
            m.d.sync += [stage.valid.eq(0) for stage in self.all[1:]]

    def stall(
        self, claims: Any, halt: Value, read_bank: Mapping[str, Value], write_bank: Mapping[str, Value] | None
    ) -> Value:
        """Finds a cycle ahead what holds up whom. claims: which ports GEMM takes in the next cycle. read_bank,
        write_bank: of the items in the stages acc and write ("here"), and in those before them ("before"); write_bank
        None: VECTOR does not write acc. Returns the number of the part of the item in front of rescale_add."""
        m, acc, add = self._m, self["acc"], self["add"]
        assert acc.before is not None and add.before is not None

        def reads(stage: Stage, bank: Value) -> Value:
            return stage.valid & ~stage.at("a_vin") & claims.read.bit_select(bank, 1)

        read_blocks, holds = Signal(), Signal()
        write_blocks: Value = Const(0)
        in_acc: Value = Const(0)
        if write_bank is not None:
            write_blocks, in_acc = self._writes_to_acc(claims, write_bank)
        m.d.comb += read_blocks.eq(
            Mux(self.front, reads(acc.before, read_bank["before"]), reads(acc, read_bank["here"]))
        )
        m.d.sync += [
            self.back.eq(halt | ~write_blocks),
            self.middle.eq(halt | ~(write_blocks | holds)),
            self.front.eq(halt | ~(write_blocks | holds | read_blocks)),
            self.hold.eq(holds & ~halt),
        ]
        # An item that could not be written to acc is still there; all others are new in the last stage.
        before = self["write"].before
        assert before is not None
        for to in range(len(self.writes)):
            goes = self.back & before.valid & before.whole & before.at("to")[to]
            m.d.sync += self.writes[to].eq((in_acc if to == Destination.ACC else goes) & ~halt)

        parts = self._cfg.residual_cycles
        part = Signal(range(parts))
        if parts > 1:
            with m.If(self.middle):
                m.d.comb += holds.eq(add.before.adds)
                m.d.sync += part.eq(0)
            with m.Elif(self.back):
                m.d.comb += holds.eq(self.hold & (part != parts - 2))
                m.d.sync += part.eq(part + self.hold)
            with m.Else():
                m.d.comb += holds.eq(self.hold)
            with m.If(halt):
                m.d.sync += part.eq(0)
        return part

    def _writes_to_acc(self, claims: Any, bank: Mapping[str, Value]) -> tuple[Value, Value]:
        """Whether in the next cycle an item is kept from its write to acc, and whether one is written there."""
        write, blocks = self["write"], Signal(name="write_blocks")
        assert write.before is not None

        def writes(stage: Stage) -> Value:
            return stage.valid & stage.whole & stage.at("to")[Destination.ACC]

        claimed = [claims.write.bit_select(bank[where], 1) for where in ("before", "here")]
        self._m.d.comb += blocks.eq(Mux(self.back, writes(write.before) & claimed[0], writes(write) & claimed[1]))
        return blocks, Mux(self.back, writes(write.before) & ~claimed[0], writes(write) & ~claimed[1])
