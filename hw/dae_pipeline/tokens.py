"""Tokens: counting semaphores between the units, and the gate that holds back instructions without tokens."""

from __future__ import annotations

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import INDEX_BITS, PerUnit, Pulse, done_layout, instructions
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Unit


class Semaphore(wiring.Component):
    """Count the tokens from one unit to another. At most 2^bits - 1 tokens exist or are reserved.

    A token is reserved when the instruction that will give it starts, so that there is room when the instruction ends.
    `reserve`, `release` and `acquire` may all come in the same cycle.

    Parameters
    ----------
    bits : int      Width of the count.

    Members
    -------
    reserve : In(1)     A token is reserved; only while `has_room`.
    release : In(1)     A reserved token is given.
    acquire : In(1)     A token is taken; only while `has_token`.
    has_room : Out(1)   One more token may be reserved.
    has_token : Out(1)  At least one token can be taken.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        super().__init__(
            {"reserve": In(1), "release": In(1), "acquire": In(1), "has_room": Out(1), "has_token": Out(1)}
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        room = Signal(self._bits, init=(1 << self._bits) - 1)
        tokens = Signal(self._bits)
        # Whether each count is not 0: registers, as the path of an instruction through its gate begins here.
        some_room = Signal(init=1)
        some_token = Signal()
        m.d.comb += [self.has_room.eq(some_room), self.has_token.eq(some_token)]
        for count, is_nonzero, up, down in (
            (room, some_room, self.acquire, self.reserve), (tokens, some_token, self.release, self.acquire),
        ):  # fmt: skip
            more, less = (count + 1)[: self._bits], (count - 1)[: self._bits]  # `acquire` comes late: it only selects
            m.d.sync += [
                count.eq(Mux(up == down, count, Mux(up, more, less))),
                is_nonzero.eq(Mux(up == down, is_nonzero, up | (count != 1))),
            ]
        probes(self, tokens=tokens, room=room)
        return m


class DependencyGate(wiring.Component):
    """Scoreboard: pass an instruction to its unit once it has its tokens, and give its tokens when it is done.

    An instruction passes when each unit in `wait` has given a token, which it takes, and when each semaphore to a unit
    in `post` has room. The room is reserved at once, so that `done` needs no back-pressure. The gate adds no cycle.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    queues : In(PerUnit)    Instructions in program order, from the queue of each unit.
    passed : Out(PerUnit)   The same instructions, after they have taken their tokens.
    done : In(PerUnit)      `done` of each unit.
    wait_token : Out(4)     A bit for each unit whose next instruction waits for a token or for room.
    oldest : Out            Number of the oldest instruction that waits here; if none waits, of the last one that
                            passed. It comes a few cycles late.
    """

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        super().__init__({
            "queues": In(instructions(cfg)), "passed": Out(instructions(cfg)),
            "done": In(PerUnit(lambda opcode: Pulse(done_layout))),
            "wait_token": Out(len(Unit)), "oldest": Out(INDEX_BITS),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        semaphores = {
            (source, target): Semaphore(self._cfg.token_bits) for source in Unit for target in Unit if source != target
        }
        for (source, target), semaphore in semaphores.items():
            m.submodules[f"{source.name}_to_{target.name}".lower()] = semaphore

        waiting = Signal(len(Unit))
        passes = Signal(len(Unit))
        for unit, queue, instr, done in zip(Unit, self.queues.each, self.passed.each, self.done.each):
            fields = queue.payload.fields
            others = [other for other in Unit if other != unit]
            has_tokens = Cat(~fields["wait"][other] | semaphores[other, unit].has_token for other in others).all()
            has_room = Cat(~fields["post"][other] | semaphores[unit, other].has_room for other in others).all()
            ready = has_tokens & has_room
            m.d.comb += [
                instr.payload.eq(queue.payload),
                instr.valid.eq(queue.valid & ready),
                queue.ready.eq(instr.ready & ready),
                passes[unit].eq(instr.valid & instr.ready),
                waiting[unit].eq(queue.valid & ~ready),
            ]
            for other in others:
                m.d.comb += [
                    semaphores[other, unit].acquire.eq(passes[unit] & fields["wait"][other]),
                    semaphores[unit, other].reserve.eq(passes[unit] & fields["post"][other]),
                    semaphores[unit, other].release.eq(done.valid & done.payload.post[other]),
                ]
        m.d.comb += self.wait_token.eq(waiting)

        # The oldest waiting instruction, for error reports: these can wait for a register after each comparison.
        last = Signal(INDEX_BITS)
        waiters = []
        for unit, queue in zip(Unit, self.queues.each):
            index = queue.payload.index
            with m.If(passes[unit]):
                m.d.sync += last.eq(index)
            waiters.append(self._register_waiter(m, f"waiter_{unit.name.lower()}", waiting[unit], index))
        level = 0
        while len(waiters) > 1:
            pairs = enumerate(zip(waiters[::2], waiters[1::2]))
            waiters = [self._older_waiter(m, f"waiter{level}_{number}", *pair) for number, pair in pairs]
            level += 1
        m.d.sync += self.oldest.eq(Mux(waiters[0].waits, waiters[0].index, last))
        probes(self, semaphores=semaphores)
        return m

    def _register_waiter(self, m: Module, name: str, waits: Value, index: Value) -> data.View[data.StructLayout]:
        """Return a register of a waiting instruction: whether there is one (`waits`), and its number (`index`)."""
        waiter = Reg(data.StructLayout({"waits": 1, "index": INDEX_BITS}), name=name)
        m.d.sync += [waiter.waits.eq(waits), waiter.index.eq(index)]
        return waiter

    def _older_waiter(
        self, m: Module, name: str, a: data.View[data.StructLayout], b: data.View[data.StructLayout]
    ) -> data.View[data.StructLayout]:
        """Return, a cycle later, the waiting instruction with the lower number of two: a node of a comparison tree."""
        older = Mux(b.waits & (~a.waits | (b.index < a.index)), b.index, a.index)
        return self._register_waiter(m, name, a.waits | b.waits, older)
