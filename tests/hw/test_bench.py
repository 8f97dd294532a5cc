"""Plant faults that the test bench itself must notice."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import bench
import cocotb
import numpy as np
import pytest
from amaranth import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

pytestmark = pytest.mark.rtl


class Buffer(wiring.Component):
    """A register between two streams, with a fault: none, "lets go" of valid, or "changes" the waiting payload."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        super().__init__({"i": In(stream.Signature(8)), "o": Out(stream.Signature(8))})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        full = Signal()
        age = Signal(2)
        word = Signal(8)
        faulty = age == 2
        m.d.comb += [
            self.i.ready.eq(~full | self.o.ready),
            self.o.valid.eq(full & ~faulty if self.fault == "lets go" else full),
            self.o.payload.eq(Mux(faulty, ~word, word) if self.fault == "changes" else word),
        ]
        m.d.sync += age.eq(age + (full & (age != 3)))
        with m.If(self.i.ready):
            m.d.sync += [full.eq(self.i.valid), word.eq(self.i.payload), age.eq(0)]
        return m


def test_icarus() -> None:
    bench.run(partial(Buffer), __file__, only=["passes_on"], sim="icarus")
    with pytest.raises(pytest.fail.Exception, match="o: payload changed from"):
        bench.run(partial(Buffer, "changes"), __file__, only=["passes_on"], sim="icarus")


@pytest.mark.parametrize("name", ["2, 2 to 16", "2, 8 to 4"])
def test_tests_do_not_share_a_folder(name: str) -> None:
    """Tests whose parameters begin alike have different folders; else workers would remove each other's files."""
    assert bench.running_test().endswith(f"test_tests_do_not_share_a_folder[{name}]")
    others = {bench.run_dir(bench.running_test().replace(name, other)) for other in ("2", "2, 8 to 16", "2, 8")}
    assert len(others | {bench.run_dir(bench.running_test())}) == 4


def test_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct component passes. Its waveform contains the signals inside it, and pytest's summary names the file."""
    monkeypatch.setenv("CELOSIA_WAVES", "1")
    bench.run(partial(Buffer), __file__, only=["passes_on"], sim="verilator")
    name, path = bench.WAVES.pop()
    assert name.endswith("test_bench.py::test_waves")
    text = path.read_text()
    assert all(f" {signal} " in text for signal in ("i__payload", "o__valid", "word"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [("lets go", "o: valid fell before the payload was accepted"), ("changes", "o: payload changed from")],
)
def test_a_broken_handshake_fails(fault: str, message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=message):
        bench.run(partial(Buffer, fault), __file__, only=["passes_on"])


def test_a_hang_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="not finished after 50 cycles"):
        bench.run(partial(Buffer), __file__, only=["waits_for_ever"])


def test_a_loop_that_never_ends_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELOSIA_TEST_SECONDS", "4")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)it took more than 4 s .*in never_waits"):
        bench.run(partial(Buffer), __file__, only=["never_waits"])


def test_an_unknown_test_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="no cocotb test ran of does_not_exist"):
        bench.run(partial(Buffer), __file__, only=["passes_on", "does_not_exist"])


def test_the_example_of_the_documents_is_a_test() -> None:
    """The page docs/cocotb.md shows test_example.py from its first import on."""
    example = Path(__file__).with_name("test_example.py").read_text(encoding="utf-8")
    document = (bench.ROOT / "docs" / "cocotb.md").read_text(encoding="utf-8")
    assert example[example.index("import random") :] in document


def test_pack() -> None:
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4) - 5
    words = bench.pack(array)
    assert words[0] & 0xFFFFFFFF == 2**32 - 5
    assert (bench.unpack(words, array) == array).all()


@cocotb.test()
async def passes_on(dut):
    sent = list(range(100))
    await bench.start(dut, streams=["i", "o"])
    cocotb.start_soon(bench.stream_put(dut, "i", sent, pause=0.3))
    assert await bench.stream_get(dut, "o", len(sent), pause=0.7) == sent


@cocotb.test()
async def never_waits(dut):
    while True:  # no cycle passes
        time.sleep(0.01)


@cocotb.test()
async def waits_for_ever(dut):
    await bench.start(dut, timeout=50)
    await bench.stream_get(dut, "o", 1)
