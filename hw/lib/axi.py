"""AXI4 and AXI4-Lite ports, and the streams through which fetch and LOAD share AXI4's read channel.

A member `m_axi: Out(Axi4(...))` of the top becomes Verilog ports `m_axi__awaddr`, ...: the names that
`AxiBus.from_prefix(dut, "m_axi_")` of cocotbext-axi looks for; likewise `s_axil: In(AxiLite(...))`.
Everything is AXI3-safe: bursts are INCR, at most 16 full-width beats, all with ID 0, so that responses come in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

ADDR_BITS = 40
"""Width of a byte address on the memory ports."""
ID_BITS = 1
"""Width of AXI's transaction IDs, all of which are 0."""

CACHE_NORMAL = 0b0011
"""Value of awcache and arcache: bufferable, and may be merged with other accesses on its way."""
BURST_INCR = 0b01
"""Value of awburst and arburst: each beat has the next address."""
RESP_OKAY = 0b00
"""Value of rresp and bresp for an access without an error."""


def _address_members(prefix: str, addr_bits: int) -> dict[str, wiring.Member]:
    """Return the members of an address channel of AXI4, AR or AW, as the manager sees them."""
    return {
        f"{prefix}id": Out(ID_BITS),
        f"{prefix}addr": Out(addr_bits),
        f"{prefix}len": Out(8),
        f"{prefix}size": Out(3),
        f"{prefix}burst": Out(2),
        f"{prefix}cache": Out(4),
        f"{prefix}prot": Out(3),
        f"{prefix}valid": Out(1),
        f"{prefix}ready": In(1),
    }


class Axi4Read(wiring.Signature):
    """The manager's side of AXI4's channels AR and R."""

    def __init__(self, bus_bytes: int, addr_bits: int = ADDR_BITS) -> None:
        super().__init__({
            **_address_members("ar", addr_bits),
            "rid": In(ID_BITS), "rdata": In(8 * bus_bytes), "rresp": In(2), "rlast": In(1), "rvalid": In(1),
            "rready": Out(1),
        })  # fmt: skip


class Axi4Write(wiring.Signature):
    """The manager's side of AXI4's channels AW, W and B."""

    def __init__(self, bus_bytes: int, addr_bits: int = ADDR_BITS) -> None:
        super().__init__({
            **_address_members("aw", addr_bits),
            "wdata": Out(8 * bus_bytes), "wstrb": Out(bus_bytes), "wlast": Out(1), "wvalid": Out(1), "wready": In(1),
            "bid": In(ID_BITS), "bresp": In(2), "bvalid": In(1), "bready": Out(1),
        })  # fmt: skip


class Axi4(wiring.Signature):
    """The manager's side of AXI4. Its read and write channels are members of their own, as different parts use them."""

    def __init__(self, bus_bytes: int, addr_bits: int = ADDR_BITS) -> None:
        super().__init__({"write": Out(Axi4Write(bus_bytes, addr_bits)), "read": Out(Axi4Read(bus_bytes, addr_bits))})

    def flatten(self, obj: Any) -> Iterator[tuple[tuple[str | int, ...], wiring.Member, Any]]:
        """Yield the members without `read` and `write` in their paths, so that Verilog ports have AXI's names."""
        for path, member, port in super().flatten(obj):
            yield path[1:], member, port


class AxiLite(wiring.Signature):
    """The manager's side of AXI4-Lite, 32 bits of data; a register file has `In(AxiLite(...))`."""

    def __init__(self, addr_bits: int) -> None:
        super().__init__({
            "awaddr": Out(addr_bits), "awprot": Out(3), "awvalid": Out(1), "awready": In(1),
            "wdata": Out(32), "wstrb": Out(4), "wvalid": Out(1), "wready": In(1),
            "bresp": In(2), "bvalid": In(1), "bready": Out(1),
            "araddr": Out(addr_bits), "arprot": Out(3), "arvalid": Out(1), "arready": In(1),
            "rdata": In(32), "rresp": In(2), "rvalid": In(1), "rready": Out(1),
        })  # fmt: skip


# From the AXI read channel to its clients ----------------------------------------------------------------

burst_layout = data.StructLayout({"addr": ADDR_BITS, "len": 4})
"""A legal AXI burst: `len + 1` beats from absolute byte address `addr`, a multiple of the bus' bytes."""


def response_layout(bus_bytes: int) -> data.StructLayout:
    """Return the layout of a beat of read data.

    error: the memory answered SLVERR or DECERR. last: it is the last beat of its burst.
    """
    return data.StructLayout({"data": 8 * bus_bytes, "error": 1, "last": 1})


class ReadBus(wiring.Signature):
    """A client's side of the read channel that `ReadMux` shares out: bursts go out, their beats come back in order."""

    def __init__(self, bus_bytes: int) -> None:
        super().__init__({
            "request": Out(stream.Signature(burst_layout)),
            "response": In(stream.Signature(response_layout(bus_bytes))),
        })  # fmt: skip
