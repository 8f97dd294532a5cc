"""Model a memory behind an AXI4 port, with latency and errors, and check the port's behaviour."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import bench

Sample = dict[str, int]
"""The values of an AXI port's signals in one cycle, by name without the prefix."""

ADDRESS = ("id", "addr", "len", "size", "burst", "cache", "prot", "valid", "ready")
READ = (*(f"ar{name}" for name in ADDRESS), "rlast", "rvalid", "rready")
OKAY, SLVERR, DECERR = 0, 2, 3
"""Response codes. EXOKAY, 1, is legal for exclusive accesses only, and the accelerator makes none."""
WRITE = (*(f"aw{name}" for name in ADDRESS), "wdata", "wstrb", "wlast", "wvalid", "wready", "bvalid", "bready")


@dataclass
class Checker:
    """Check one sample a cycle; raise AssertionError if the manager breaks a rule of AXI or of this project.

    A sample may leave out the payload of a channel that is not valid.

    bus_bytes: width of the port. base, size: the range that may be accessed, up to a whole word of the bus.
    bursts, beats: counts of both directions together.
    """

    bus_bytes: int
    base: int = 0
    size: int = 1 << 40
    bursts: int = 0
    beats: int = 0
    _before: Sample = field(default_factory=dict)
    _lengths: deque[int] = field(default_factory=deque)  # of write bursts with missing beats
    _sent: deque[int] = field(default_factory=deque)  # beats of write bursts without their address so far
    _w_beats: int = 0
    _w_done: int = 0
    _answers: int = 0

    def step(self, now: Sample) -> None:
        for channel in ("ar", "aw", "w"):
            if f"{channel}valid" in now:
                self._stable(channel, now)
        for channel in ("ar", "aw"):
            if now.get(f"{channel}valid") and now[f"{channel}ready"]:
                self._burst(channel, now)
        if now.get("rvalid") and now["rready"]:
            self.beats += 1
        if now.get("wvalid") and now["wready"]:
            self.beats += 1
            self._w_beats += 1
            if now["wlast"]:
                self._sent.append(self._w_beats)
                self._w_beats = 0
            assert self._w_beats < 16, "W: no WLAST within 16 beats"
        while "wvalid" in now and self._sent and self._lengths:
            sent, length = self._sent.popleft(), self._lengths.popleft()
            assert sent == length, f"W: WLAST after {sent} beats, AWLEN said {length}"
        self._before = now

    def _stable(self, channel: str, now: Sample) -> None:
        before = self._before
        if before.get(f"{channel}valid") and not before[f"{channel}ready"]:
            for name, value in now.items():
                if name.startswith(channel) and not name.endswith("ready"):
                    assert value == before[name], f"{name} changed from {before[name]:#x} to {value:#x} before ready"

    def _burst(self, channel: str, now: Sample) -> None:
        addr, beats = now[f"{channel}addr"], now[f"{channel}len"] + 1
        stop = addr + beats * self.bus_bytes
        text = f"{channel.upper()}: {beats} beats at {addr:#x}"
        assert beats <= 16, f"{text}: over 16 beats"
        assert 1 << now[f"{channel}size"] == self.bus_bytes, f"{text}: size {now[f'{channel}size']}"
        assert now[f"{channel}burst"] == 1, f"{text}: not INCR"
        assert now[f"{channel}id"] == 0, f"{text}: ID {now[f'{channel}id']}"
        assert now[f"{channel}cache"] == 0b0011, (
            f"{text}: cache {now[f'{channel}cache']:#06b}, not modifiable, bufferable"
        )
        assert now[f"{channel}prot"] == 0, f"{text}: protection {now[f'{channel}prot']:#05b}, not unprivileged data"
        assert addr % self.bus_bytes == 0, f"{text}: not aligned to the bus"
        assert addr // 4096 == (stop - 1) // 4096, f"{text}: crosses 4 KB"
        limit = self.base + -(-self.size // self.bus_bytes) * self.bus_bytes
        assert self.base <= addr and stop <= limit, f"{text}: outside {self.base:#x} to {limit:#x}"
        self.bursts += 1
        if channel == "aw":
            self._lengths.append(beats)

    @property
    def written_out(self) -> bool:
        """Return True if all write bursts have had all of their beats."""
        return not self._lengths and not self._sent and not self._w_beats


def sampler(dut: Any, prefix: str, names: tuple[str, ...]) -> Callable[[], Sample]:
    """Return a function that samples `valid` and `ready` of each channel, and its other signals while it is valid."""
    channels = []
    for valid in names:
        if valid.endswith("valid"):
            channel_names = [name for name in names if name.startswith(valid.removesuffix("valid")) and name != valid]
            channel_names.sort(key=lambda name: not name.endswith("ready"))
            channels.append([(name, getattr(dut, f"{prefix}__{name}")) for name in (valid, *channel_names)])

    def sample() -> Sample:
        sample_values = {}
        for (valid, handle), *rest in channels:
            sample_values[valid] = bench.value(handle)
            for name, part in rest if sample_values[valid] else rest[:1]:
                sample_values[name] = bench.value(part)
        return sample_values

    return sample


async def check(dut: Any, prefix: str, names: tuple[str, ...], checker: Checker) -> None:
    """Pass a sample of each cycle to `checker`, forever: start it with `cocotb.start_soon`."""
    sample = sampler(dut, prefix, names)
    while True:
        await bench.fall(dut)
        checker.step(sample())


@dataclass
class Memory:
    """A memory with `data` from address `base` on, behind port `prefix`.

    Run `reads` and `writes` with `cocotb.start_soon`.
    latency: cycles from an address to its first beat, and from the last written beat to its response. outstanding:
    bursts that are accepted at once, in each direction. pause: probability that a channel stalls in a cycle.
    fails: returns True for addresses of beats (read) or bursts (write) that end in an error.
    errors: response codes, one of which an error draws.
    first: for writes, the channel that is accepted first, "address" or "data"; AXI permits both orders.
    """

    dut: Any
    data: bytearray
    bus_bytes: int
    prefix: str = "m_axi"
    base: int = 0
    latency: int = 4
    outstanding: int = 8
    pause: float = 0.0
    fails: Callable[[int], bool] = lambda addr: False
    errors: tuple[int, ...] = (SLVERR, DECERR)
    first: str | None = None

    def _signals(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self.dut, f"{self.prefix}__{name}") for name in names}

    def _response(self, addr: int) -> int:
        return random.choice(self.errors) if self.fails(addr) else OKAY

    async def reads(self) -> None:
        s = self._signals(("araddr", "arlen", "arvalid", "arready", "rdata", "rresp", "rlast", "rvalid", "rready"))
        bursts: deque[list[int]] = deque()  # [cycle of the first beat, address, beats left]
        cycle, offered = 0, False
        set_ready, set_valid = bench.driver(s["arready"]), bench.driver(s["rvalid"])
        while True:
            accept = len(bursts) < self.outstanding and random.random() >= self.pause
            set_ready(int(accept))
            if not offered and bursts and bursts[0][0] <= cycle and random.random() >= self.pause:
                offered = True
                _, addr, left = bursts[0]
                at = addr - self.base
                s["rdata"].value = int.from_bytes(self.data[at : at + self.bus_bytes], "little")
                s["rresp"].value = self._response(addr)
                s["rlast"].value = int(left == 1)
            set_valid(int(offered))
            await bench.fall(self.dut)
            if offered and bench.value(s["rready"]):
                offered = False
                bursts[0][1] += self.bus_bytes
                bursts[0][2] -= 1
                if not bursts[0][2]:
                    bursts.popleft()
            if accept and bench.value(s["arvalid"]):
                bursts.append([cycle + self.latency, bench.value(s["araddr"]), bench.value(s["arlen"]) + 1])
            cycle += 1
            await bench.rise(self.dut)

    async def writes(self) -> None:
        s = self._signals((
            "awaddr", "awlen", "awvalid", "awready", "wdata", "wstrb", "wlast", "wvalid", "wready",
            "bresp", "bvalid", "bready",
        ))  # fmt: skip
        addresses: deque[int] = deque()
        beats: list[tuple[int, int]] = []
        sent: deque[list[tuple[int, int]]] = deque()
        answers: deque[tuple[int, int]] = deque()
        cycle, offered = 0, False
        set_accept, set_take, set_valid = (bench.driver(s[name]) for name in ("awready", "wready", "bvalid"))
        while True:
            under_way = len(addresses) + len(answers)
            accept = under_way < self.outstanding and random.random() >= self.pause
            take = len(sent) < self.outstanding and random.random() >= self.pause
            accept = accept and (self.first != "data" or bool(sent))
            take = take and (self.first != "address" or len(addresses) > 0)
            set_accept(int(accept))
            set_take(int(take))
            if not offered and answers and answers[0][0] <= cycle and random.random() >= self.pause:
                offered = True
                s["bresp"].value = answers[0][1]
            set_valid(int(offered))
            await bench.fall(self.dut)
            if offered and bench.value(s["bready"]):
                offered = False
                answers.popleft()
            if accept and bench.value(s["awvalid"]):
                addresses.append(bench.value(s["awaddr"]))
            if take and bench.value(s["wvalid"]):
                beats.append((bench.value(s["wdata"]), bench.value(s["wstrb"])))
                if bench.value(s["wlast"]):
                    sent.append(beats)
                    beats = []
            while addresses and sent:
                addr = addresses.popleft()
                answers.append((cycle + self.latency, self._response(addr)))
                self._store(addr - self.base, sent.popleft())
            cycle += 1
            await bench.rise(self.dut)

    def _store(self, at: int, beats: list[tuple[int, int]]) -> None:
        for data, strobe in beats:
            word = data.to_bytes(self.bus_bytes, "little")
            for i in range(self.bus_bytes):
                if strobe >> i & 1:
                    self.data[at + i] = word[i]
            at += self.bus_bytes
