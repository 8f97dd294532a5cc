"""Multiplexer of two clients on one AXI read channel."""

from __future__ import annotations

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.dae_pipeline.fifo import StreamFifo
from celosia.hw.lib.axi import BURST_INCR, CACHE_NORMAL, RESP_OKAY, Axi4Read, ReadBus, burst_layout
from celosia.hw.lib.probes import probes
from celosia.hw.lib.signals import Reg


class ReadMux(wiring.Component):
    """Arbitrate between `fetch` and `load` on an AXI read channel, and return each beat to the client of its burst.

    fetch has priority, but after a burst of fetch a waiting load gets one.

    Parameters
    ----------
    bus_bytes : int         Bytes of a beat.
    outstanding : int       Largest number of bursts under way at once.

    Members
    -------
    fetch, load : In(ReadBus)   The two clients.
    axi : Out(Axi4Read)     The read channels.
    read_beat : Out(1)      A beat is received in this cycle (counter `read_beats`).
    idle : Out(1)           No burst is under way.
    """

    def __init__(self, bus_bytes: int, outstanding: int = 16) -> None:
        self._bus_bytes, self._outstanding = bus_bytes, outstanding
        super().__init__({
            "fetch": In(ReadBus(bus_bytes)),
            "load": In(ReadBus(bus_bytes)),
            "axi": Out(Axi4Read(bus_bytes)),
            "read_beat": Out(1),
            "idle": Out(1),
        })  # fmt: skip

    def elaborate(self, platform: object) -> Module:
        m = Module()
        axi, fetch, load = self.axi, self.fetch, self.load
        m.submodules.owners = owners = StreamFifo(1, self._outstanding)

        # The selected burst is held in a register until AXI accepts it.
        load_next = Signal()
        pick_load = Signal()
        ask = Signal()
        may_ask = (~axi.arvalid | axi.arready) & owners.i.ready
        burst = Reg(burst_layout)
        m.d.comb += [
            pick_load.eq(load.request.valid & (load_next | ~fetch.request.valid)),
            ask.eq(may_ask & (load.request.valid | fetch.request.valid)),
            load.request.ready.eq(may_ask & pick_load),
            fetch.request.ready.eq(may_ask & ~pick_load),
            owners.i.valid.eq(ask),
            owners.i.payload.eq(pick_load),
        ]
        with m.If(~axi.arvalid | axi.arready):
            m.d.sync += axi.arvalid.eq(ask)
        with m.If(ask):
            m.d.sync += load_next.eq(~pick_load)
            m.d.sync += burst.eq(Mux(pick_load, load.request.payload, fetch.request.payload))
        m.d.comb += [
            axi.araddr.eq(burst.addr),
            axi.arlen.eq(burst.len),
            axi.arsize.eq((self._bus_bytes - 1).bit_length()),
            axi.arburst.eq(BURST_INCR),
            axi.arcache.eq(CACHE_NORMAL),
        ]

        for client, owner in ((fetch, 0), (load, 1)):
            m.d.comb += [
                client.response.valid.eq(axi.rvalid & owners.o.valid & (owners.o.payload == owner)),
                client.response.payload.data.eq(axi.rdata),
                client.response.payload.error.eq(axi.rresp != RESP_OKAY),
                client.response.payload.last.eq(axi.rlast),
            ]
        m.d.comb += [
            axi.rready.eq(owners.o.valid & Mux(owners.o.payload, load.response.ready, fetch.response.ready)),
            self.read_beat.eq(axi.rvalid & axi.rready),
            owners.o.ready.eq(self.read_beat & axi.rlast),
            self.idle.eq(~axi.arvalid & ~owners.o.valid),
        ]
        probes(self, owners=owners, load_next=load_next, ask=ask, burst=burst)
        return m
