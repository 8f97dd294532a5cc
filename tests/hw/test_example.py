"""The example of docs/cocotb.md: a unit, a model too simple to be wrong, and a test that they are equal."""

from __future__ import annotations

import random
from functools import partial

import bench
import cocotb
import pytest
from amaranth import Module, Mux
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

pytestmark = pytest.mark.rtl


class Clamp(wiring.Component):
    """The numbers of stream `i`, none above `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__({"i": In(stream.Signature(8)), "o": Out(stream.Signature(8))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += self.i.ready.eq(~self.o.valid | self.o.ready)
        with m.If(self.i.ready):
            m.d.sync += self.o.valid.eq(self.i.valid)
            m.d.sync += self.o.payload.eq(Mux(self.i.payload > self.limit, self.limit, self.i.payload))
        return m


@pytest.mark.parametrize("limit", [0, 100])
def test_clamp(limit: int) -> None:
    bench.run(partial(Clamp, limit), __file__, params={"limit": limit})


@cocotb.test()
@cocotb.parametrize(pause=[0.0, 0.5])
async def equals_min(dut, pause):
    await bench.start(dut, streams=["i", "o"])
    sent = [random.getrandbits(8) for _ in range(200)]
    cocotb.start_soon(bench.stream_put(dut, "i", sent, pause))
    assert await bench.stream_get(dut, "o", len(sent), pause) == [min(x, bench.params()["limit"]) for x in sent]
