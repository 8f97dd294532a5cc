"""Memories of the scratchpads, and arbiters between units that use the same port."""

from __future__ import annotations

from contextlib import nullcontext

from amaranth import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from celosia.hw.lib.layout import ReadPort, WritePort, load_port, read_port, write_port
from celosia.hw.lib.probes import probes
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads


class Scratchpad(wiring.Component):
    """Memory with one write port and one read port, both always ready. A read sees the writes of earlier cycles.

    Parameters
    ----------
    depth : entries, a power of two.
    width : bits of an entry.
    grain : smallest number of bits that a write can change.

    Members
    -------
    write : In(WritePort)
    read : In(ReadPort)
    """

    def __init__(self, depth: int, width: int, grain: int) -> None:
        self.depth, self.width, self.grain = depth, width, grain
        bits = (depth - 1).bit_length()
        super().__init__({"write": In(WritePort(bits, width, grain)), "read": In(ReadPort(bits, width))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        # `no_rw_check`: no logic defines the result of a read at the address that is written in the same cycle. Tokens
        # prevent such reads, or GEMM forwards the written value instead.
        m.submodules.memory = memory = Memory(shape=self.width, depth=self.depth, init=[], attrs={"no_rw_check": 1})
        write = memory.write_port(granularity=self.grain)
        read = memory.read_port()
        m.d.comb += [
            write.en.eq(Mux(self.write.en, self.write.mask, 0)),
            write.addr.eq(self.write.addr),
            write.data.eq(self.write.data),
            self.write.ready.eq(1),
            read.en.eq(self.read.en),
            read.addr.eq(self.read.addr),
            self.read.data.eq(read.data),
            self.read.ready.eq(1),
        ]
        probes(self, memory=memory)
        return m


class HalvedScratchpad(wiring.Component):
    """Scratchpad whose pieces are two halves, so that two writers can write different halves in the same cycle.

    It holds spread weights: the first channel of LOAD writes lower halves, the second one upper halves.

    Parameters
    ----------
    depth, width, grain : as of Scratchpad.
    pieces : number of pieces of an entry.

    Members
    -------
    near : In(WritePort)    Writes lower halves only; the rest of its data is ignored. It has priority there.
    write : In(WritePort)   Writes whole pieces, or upper halves while `near` writes.
    read : In(ReadPort)     Reads whole entries.
    """

    def __init__(self, depth: int, width: int, grain: int, pieces: int = 1) -> None:
        self.depth, self.width, self.grain, self.pieces = depth, width, grain, pieces
        bits = (depth - 1).bit_length()
        port = WritePort(bits, width, grain)
        super().__init__({"near": In(port), "write": In(port), "read": In(ReadPort(bits, width))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        near, write, read, half = self.near, self.write, self.read, self.width // 2
        lower, upper = (Scratchpad(self.depth, half, self.grain) for _ in range(2))
        m.submodules.lower, m.submodules.upper = lower, upper
        lower_data, upper_data = self._halves(write.data)
        lower_mask, upper_mask = self._halves(write.mask)
        near_data, _ = self._halves(near.data)
        near_mask, _ = self._halves(near.mask)
        m.d.comb += [
            near.ready.eq(1),
            write.ready.eq(1),
            lower.write.en.eq(near.en | write.en),
            lower.write.addr.eq(Mux(near.en, near.addr, write.addr)),
            lower.write.mask.eq(Mux(near.en, near_mask, lower_mask)),
            lower.write.data.eq(Mux(near.en, near_data, lower_data)),
            upper.write.en.eq(write.en),
            upper.write.addr.eq(write.addr),
            upper.write.mask.eq(upper_mask),
            upper.write.data.eq(upper_data),
            *(port.eq(data_) for port, data_ in zip(self._halves(read.data), (lower.read.data, upper.read.data))),
            read.ready.eq(1),
        ]
        for part in (lower, upper):
            m.d.comb += [part.read.en.eq(read.en), part.read.addr.eq(read.addr)]
        return m

    def _halves(self, entry: Value) -> tuple[Value, Value]:
        """Return the lower halves of all pieces of `entry`, the data or the mask of a port, and the upper halves."""
        size = len(entry) // (2 * self.pieces)
        halves = data.View(data.ArrayLayout(size, 2 * self.pieces), entry)
        lower, upper = (Cat(halves[2 * piece + number] for piece in range(self.pieces)) for number in (0, 1))
        return lower, upper


class WindowScratchpad(wiring.Component):
    """Scratchpad whose reads return several consecutive entries, wrapping at the end of the memory.

    Entries are interleaved over banks by the lowest bits of their addresses. The number of banks is `window`, rounded
    up to a power of two.

    Parameters
    ----------
    depth, width, grain : as of Scratchpad.
    window : number of entries that a read returns, from 1 to `depth`.

    Members
    -------
    write : In(WritePort)
    read : In(ReadPort)     Returns `window` entries, the one at the address in the lowest bits.
    """

    def __init__(self, depth: int, width: int, grain: int, window: int) -> None:
        self.depth, self.width, self.grain, self.window = depth, width, grain, window
        bits = (depth - 1).bit_length()
        super().__init__({"write": In(WritePort(bits, width, grain)), "read": In(ReadPort(bits, window * width))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        write, read, low_bits = self.write, self.read, (self.window - 1).bit_length()
        banks = [Scratchpad(self.depth >> low_bits, self.width, self.grain) for _ in range(1 << low_bits)]
        first = Signal(low_bits)
        for number, bank in enumerate(banks):
            m.submodules[f"bank{number}"] = bank
            m.d.comb += [
                bank.write.en.eq(write.en & (write.addr[:low_bits] == number)),
                bank.write.addr.eq(write.addr[low_bits:]),
                bank.write.mask.eq(write.mask),
                bank.write.data.eq(write.data),
                bank.read.en.eq(read.en),
                bank.read.addr.eq(read.addr[low_bits:] + (number < read.addr[:low_bits])),
            ]
        with m.If(read.en):
            m.d.sync += first.eq(read.addr)
        entries = data.View(data.ArrayLayout(self.width, len(banks)), Cat(bank.read.data for bank in banks))
        window = data.View(data.ArrayLayout(self.width, self.window), read.data)
        m.d.comb += [window[offset].eq(entries[(first + offset)[:low_bits]]) for offset in range(self.window)]
        m.d.comb += [write.ready.eq(1), read.ready.eq(1)]
        probes(self, banks=banks, first=first)
        return m


def _extend_to_int32(values: Value, count: int) -> Value:
    """Return `count` int8 or int32 values, which `values` holds side by side, sign-extended to int32."""
    size = len(values) // count
    lanes = data.View(data.ArrayLayout(size, count), values)
    elements = (lanes[i] for i in range(count))
    return Cat(Cat(value, value[-1].replicate(32 - size)) for value in elements)


class WriteArbiter(wiring.Component):
    """Arbitrate between VECTOR and LOAD at the write port of a scratchpad; VECTOR has priority.

    Parameters
    ----------
    bits, width, grain : width of the scratchpad's addresses, of its entries and of its grains, in bits.
    parts : number of parts of an entry. VECTOR writes one at a time; the lowest bits of its addresses select it.

    Members
    -------
    vector, load : In(WritePort)
    write : Out(WritePort)      To the scratchpad, which is always ready.
    """

    def __init__(self, bits: int, width: int, grain: int, parts: int = 1) -> None:
        self.part_bits, part = (parts - 1).bit_length(), width // parts
        super().__init__({
            "vector": In(WritePort(bits + self.part_bits, part, part)), "load": In(WritePort(bits, width, grain)),
            "write": Out(WritePort(bits, width, grain)),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        vector, load, write, low_bits = self.vector, self.load, self.write, self.part_bits
        part = vector.addr[:low_bits]
        m.d.comb += [
            vector.ready.eq(1),
            load.ready.eq(~vector.en),
            write.en.eq(vector.en | load.en),
            write.addr.eq(Mux(vector.en, vector.addr[low_bits:], load.addr)),
            write.data.eq(Mux(vector.en, vector.data.replicate(1 << low_bits), load.data)),
        ]
        grains = len(write.mask) >> low_bits
        masks = data.View(data.ArrayLayout(grains, 1 << low_bits), write.mask)
        with m.If(vector.en):
            m.d.comb += masks[part].eq(vector.mask.replicate(grains))
        with m.Else():
            m.d.comb += write.mask.eq(load.mask)
        return m


class AccScratchpad(wiring.Component):
    """The accumulators, in two banks selected by the top address bit, each with one write and one read port.

    At each port of a bank, GEMM has priority over VECTOR, and VECTOR over LOAD; units that use different banks do not
    wait for each other. A read sees the writes of earlier cycles.

    Parameters
    ----------
    cfg : Config

    Members
    -------
    gemm_read, vector_read : In(ReadPort)       Data is valid for one cycle only.
    gemm_write : In(WritePort)
    load_write : In(WritePort)     Writes int32 if the Config has `int32`, else int8 that are extended to int32.
    vector_write : In(WritePort)   Only if the Config has `int32`.
    """

    def __init__(self, cfg: Config) -> None:
        self._pad = pad = scratchpads(cfg)["acc"]
        super().__init__({f"{unit}_read": In(read_port(pad)) for unit in pad.readers}
                         | {f"{unit}_write": In(write_port(pad)) for unit in pad.writers}
                         | {"load_write": In(load_port(cfg, pad))})  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        pad = self._pad
        banks = [Scratchpad(pad.bank_depth, pad.width, pad.grain) for _ in range(pad.banks)]
        m.submodules.bank0, m.submodules.bank1 = banks

        for side, units, bank_ports in (
            ("read", pad.readers, [bank.read for bank in banks]),
            ("write", pad.writers, [bank.write for bank in banks]),
        ):
            ports = [getattr(self, f"{unit}_{side}") for unit in units]
            for number, bank_port in enumerate(bank_ports):
                wants = Signal(len(ports), name=f"{side}{number}_wants")
                m.d.comb += [wants[i].eq(port.en & (port.addr[-1] == number)) for i, port in enumerate(ports)]
                m.d.comb += bank_port.en.eq(wants.any())
                for i, port in enumerate(ports):
                    # Without a request the bank's port shows the first unit's address: no multiplexer toggles in vain.
                    with m.If(wants[i] & ~wants[:i].any()) if i else nullcontext():
                        m.d.comb += bank_port.addr.eq(port.addr[:-1])
                        if side == "write":
                            m.d.comb += [
                                bank_port.mask.eq(port.mask),
                                bank_port.data.eq(_extend_to_int32(port.data, len(port.mask))),
                            ]
                    with m.If(port.addr[-1] == number):
                        m.d.comb += port.ready.eq(~wants[:i].any() if i else 1)

        bank_data = [bank.read.data for bank in banks]
        for unit in pad.readers:
            port, bank = getattr(self, f"{unit}_read"), Signal(name=f"{unit}_bank")
            m.d.sync += bank.eq(port.addr[-1])
            m.d.comb += port.data.eq(Mux(bank, bank_data[1], bank_data[0]))
        probes(self, banks=banks)
        return m
