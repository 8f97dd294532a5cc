"""The environment of a component in a proof: free inputs, assumptions, and conditions to prove."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from amaranth import ClockDomain, Const, Elaboratable, Module, Signal, Value
from amaranth.asserts import AnyConst, AnySeq
from amaranth.back import rtlil
from amaranth.hdl import Assert, Assume, Fragment, ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.fifo import SyncFIFO, SyncFIFOBuffered
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In

from celosia.garbage import raised_gc_threshold
from celosia.hw.lib.layout import UNITS


class Inside:
    """Signals, memories and parts inside a component, by name: `inside["queue.level"]`.

    A path leads through parts. Each name in it is one that the part declares with `celosia.hw.lib.probes`, an
    attribute, the number of an item of a list, or a signal of a queue of Amaranth's library.
    """

    def __init__(self, component: Elaboratable, m: Module) -> None:
        self._component, self._m = component, m
        self.fragment = Fragment.get(component, None)

    def __getitem__(self, path: str) -> Any:
        return self.of(self._component, path)

    def of(self, part: Any, path: str) -> Any:
        """Resolve a path that begins in `part`."""
        for name in path.split("."):
            if isinstance(part, list):
                part = part[int(name)]
            elif name in (declared := getattr(part, "probes", {})):
                part = declared[name]
            elif isinstance(part, SyncFIFO | SyncFIFOBuffered) and not hasattr(part, name):
                part = _of_library(self.fragment, part)[name]
            else:
                part = getattr(part, name)
        return part

    def memory(self, path: str, address: Value) -> Signal:
        """Return the word at `address` of a memory."""
        instance = _with_content(self.fragment, self[path].data)
        content = Signal(len(instance._read_ports[0]._data), name="content")
        place = Signal(range(instance._data.depth), name="place")
        self._m.d.comb += place.eq(address)
        instance.read_port(domain="comb", addr=place, data=content, en=Const(1), transparent_for=())
        return content


def _of_library(fragment: Fragment, queue: Elaboratable) -> dict[str, Any]:
    """Return the signals of a queue of Amaranth's library by name, and its memory as "storage"."""
    own = next(part for part in _parts(fragment) if queue in (part.origins or ()))
    statements = [statement for group in own.statements.values() for statement in group]
    signals = {signal.name: signal for statement in statements for signal in statement._lhs_signals()}
    memories = (origin for part in _parts(own) for origin in part.origins or () if isinstance(origin, Memory))
    return {**signals, "storage": next(memories)}


def _parts(fragment: Any) -> Iterator[Any]:
    yield fragment
    for part, *_ in fragment.subfragments:
        yield from _parts(part)


def _with_content(fragment: Any, content: object) -> Any:
    """Return the part of `fragment` with the memory `content`; ResetInserter replaces the elaborated part by a copy."""
    return next((part for part in _parts(fragment) if getattr(part, "_data", None) is content), None)


class Harness:
    """A module with components whose inputs are free in each cycle, until something is assumed about them.

    There is no reset: cycle 0 begins with the registers' initial values.

    part: the part of the conditions to prove now, if all of them are too much for the solver; None for all of them. The
    conditions of other parts are assumed to hold in the cycle before, so all parts together are one induction.
    """

    def __init__(self, part: int | None = None) -> None:
        self._part = part
        self.m = Module()
        self.m.domains.sync = self._clock = ClockDomain(reset_less=True)
        self._count = 0

    def add(self, component: wiring.Component, constant: Collection[str] = ()) -> Inside:
        """Add a component whose inputs take any value in each cycle; those named in `constant` keep theirs."""
        inside = Inside(component, self.m)
        self.m.submodules.dut = inside.fragment
        for path, member, port in component.signature.flatten(component):
            if member.flow is In:
                value = Value.cast(port)
                self.m.d.comb += value.eq((AnyConst if path[0] in constant else AnySeq)(len(value)))
        return inside

    def any(self, shape: ShapeLike, name: str) -> Signal:
        """Return a signal with any value, a new one in each cycle."""
        signal = Signal(shape, name=name)
        self.m.d.comb += Value.cast(signal).eq(AnySeq(len(Value.cast(signal))))
        return signal

    def constant(self, shape: ShapeLike, name: str) -> Signal:
        """Return a signal with any value, the same one in all cycles."""
        signal = Signal(shape, name=name)
        self.m.d.comb += Value.cast(signal).eq(AnyConst(len(Value.cast(signal))))
        return signal

    def register(self, next_value: Any, name: str, init: int = 0) -> Signal:
        """Return a signal with the value of `next_value` in the cycle before."""
        value = Value.cast(next_value)
        signal = Signal(value.shape(), name=name, init=init)
        self.m.d.sync += signal.eq(value)
        return signal

    def ensure(self, condition: Any, name: str, part: int = 0) -> None:
        """Prove a condition, as a member of `part`."""
        if self._part in (None, part):
            self.m.d.comb += Assert(self._named(condition, f"holds_{name}"))
        else:
            self.assume(self.register(self._named(condition, f"holds_{name}"), f"held_{name}", init=1))

    def assume(self, condition: Any) -> None:
        """Assume a condition, which the component's environment guarantees."""
        self._count += 1
        self.m.d.comb += Assume(self._named(condition, f"assumed{self._count}"))

    def _named(self, condition: Any, name: str) -> Signal:
        signal = Signal(name=name)
        self.m.d.comb += signal.eq(Value.cast(condition).bool())
        return signal

    # Streams ------------------------------------------------------------------------------------------------

    def kept(self, valid: Any, ready: Any, payload: Any, name: str, unless: Any = 0) -> Value:
        """Return 1 unless `valid` or `payload` changed after a cycle in which `ready` was 0."""
        waits = self.register(valid & ~ready, f"{name}_waits")
        before = self.register(payload, f"{name}_before")
        return ~waits | unless | (valid & (Value.cast(payload) == before))

    def obeys(self, port: stream.Interface, name: str, unless: Any = 0) -> None:
        """Prove that the stream keeps its offer until it is taken."""
        self.ensure(self.kept(port.valid, port.ready, port.payload, name, unless), f"{name}_kept")

    def trusts(self, port: stream.Interface, name: str) -> None:
        """Assume that the neighbour keeps its offer until it is taken."""
        self.assume(self.kept(port.valid, port.ready, port.payload, name))

    def streams(self, component: wiring.Component, unless: Any = 0) -> None:
        """Assume for all input streams, and prove for all output streams, that offers are kept until they are taken."""
        for name, flow, port in _streams(component):
            if flow is In:
                self.trusts(port, name)
            else:
                self.obeys(port, name, unless)

    def rtlil(self) -> str:
        with raised_gc_threshold():
            text: str = rtlil.convert(Fragment.get(self.m, None), name="top", ports=[self._clock.clk], emit_src=False)
        return text


def _streams(component: wiring.Component) -> Iterator[tuple[str, wiring.Flow, stream.Interface]]:
    """Yield name, direction and object of each stream of a component, including those that it has for each unit."""
    for name, member in component.signature.members.items():
        if member.is_signature and not member.dimensions:
            port = getattr(component, name)
            several = {f"{name}_{unit}": each for unit, each in zip(UNITS, getattr(port, "each", ()))}
            for own, each in (several or {name: port}).items():
                if {"valid", "ready", "payload"} == set(each.signature.members):
                    yield own, member.flow, each


def implies(condition: Any, conclusion: Any) -> Value:
    return ~Value.cast(condition).bool() | Value.cast(conclusion).bool()
