"""Caches stay in the accelerator's memory between runs: only new rows are written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.decoders import DecoderNetwork as Network
from benchmarks.decoders import quantised
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import tries

import celosia
from celosia.compiler.program import Pack, Program, ProgramError
from celosia.compiler.program.check_program import check
from celosia.compiler.program.model import FormInfo, LaunchStep, pack_activation
from celosia.driver.generate.decoder import Decoder
from celosia.driver.run import resident
from celosia.driver.run.resident import addresses_of_rows
from celosia.hw.spec.config import PRESETS
from celosia.sim.device import DeviceError
from celosia.sim.functional.fsim import FunctionalDevice

GPT = Network(heads=2, inner=16, wide=48, layers=1, vocabulary=30, most=64)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised(GPT, tmp_path_factory.mktemp("gpt"), past=20)


@settings(max_examples=tries(150), deadline=None)
@given(
    st.sampled_from(["tiny", "pynq"]), st.sampled_from(["rows", "columns"]), st.booleans(), st.integers(1, 3),
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 2), st.data(),
)  # fmt: skip
def test_some_rows_are_written_where_all_would_be(
    config: str, fold: str, inverted: bool, count: int, rows: int, columns: int, room: int, data: st.DataObject
) -> None:
    cfg = PRESETS[config]
    of_channels, of_pixels = (columns, rows) if fold == "rows" else (rows, columns)
    groups = count * (-(-of_channels // cfg.group) + (room if fold == "columns" else 0))
    form = FormInfo(
        (1, groups * cfg.group, 1, of_pixels + (room if fold == "rows" else 0)), fold, pad=3, inverted=inverted
    )
    pack = Pack("x", form, 64, groups, "x")
    random = np.random.default_rng(rows * 100 + columns)
    before, after = (random.integers(-128, 128, (1, count, rows, columns)).astype(np.int8) for _ in range(2))
    start = data.draw(st.integers(0, rows - 1))
    some = range(start, data.draw(st.integers(start + 1, rows)))
    kept = np.ones(rows, bool)
    kept[some.start : some.stop] = False
    after[:, :, kept] = before[:, :, kept]
    memory = np.zeros(64 + 2 * groups * cfg.group * form.dims[3], np.uint8)
    expected = memory.copy()
    for dram, writes in (
        (
            memory,
            [(64, pack_activation(cfg, form.arrange(before), groups)), *addresses_of_rows(cfg, pack, after, some)],
        ),
        (expected, [(64, pack_activation(cfg, form.arrange(after), groups))]),
    ):
        for address, data_ in writes:
            dram[address : address + len(data_)] = data_
    np.testing.assert_array_equal(memory, expected)


class CountingDevice(FunctionalDevice):
    """Counts the bytes that are written; runs fail while `failing` is set."""

    written, failing = 0, False

    def write(self, addr: int, data: Any) -> None:
        self.written += data.nbytes
        super().write(addr, data)

    def run(self, *args: Any, **named: Any) -> Any:
        if self.failing:
            raise DeviceError("planted")
        return super().run(*args, **named)


def test_a_step_writes_the_rows_that_are_new(gpt: Path) -> None:
    device = CountingDevice(PRESETS["pynq"])
    with Decoder(gpt, device, length=64) as decoder:
        session, written = decoder.session(), []
        for token in range(6):
            before = device.written
            session.feed([token])
            written.append(device.written - before)
        caches = 2 * GPT.layers * GPT.channels * 64
        assert written[0] > caches
        assert max(written[1:]) < caches / 2
        before, device.failing = device.written, True
        with pytest.raises(DeviceError, match="planted"):
            session.feed([1])
        device.failing = False
        expected = decoder.session().feed([*session.tokens, 1])
        np.testing.assert_array_equal(session.feed([1]), expected)


def test_a_stream_forgets_what_lies_there(gpt: Path) -> None:
    """A stream uses several memories, so that the next step writes whole caches again."""
    with Decoder(gpt, length=64) as decoder:
        program = decoder.program()
    caches = {pack.cache for launch in program.launches for pack in launch.pack if pack.cache}
    zeros = {tensor.name: np.zeros(tensor.shape, tensor.dtype) for tensor in program.inputs}
    ones = zeros | {name: np.ones_like(zeros[name]) for name in caches}
    runtime, unchanged = celosia.Runtime(program), dict.fromkeys(caches, range(0))
    assert len(list(runtime.run_each([ones] * 4))) == 4
    found, expected = runtime.run_on(zeros, unchanged).outputs, celosia.Runtime(program).run(zeros).outputs
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_rows_that_are_not_written_are_missed(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of tokens find a planted fault: new rows are not written."""
    with Decoder(gpt, length=64) as decoder:
        tokens = list(decoder.session().generate([1, 2], 12))
        monkeypatch.setattr(resident, "addresses_of_rows", lambda *given: iter(()))
        assert list(decoder.session().generate([1, 2], 12)) != tokens


def test_a_program_whose_cache_is_none(gpt: Path, tmp_path: Path) -> None:
    with Decoder(gpt, length=64) as decoder:
        program = decoder.program()
    program.save(tmp_path / "step.celosia")
    check(Program.load(tmp_path / "step.celosia"))
    for number, step in enumerate(program.steps):
        if isinstance(step, LaunchStep) and any(pack.cache for pack in step.pack):
            packs = tuple(replace(pack, cache="input_ids") if pack.cache else pack for pack in step.pack)
            program.steps[number] = replace(step, pack=packs)
    with pytest.raises(ProgramError, match=r"does not begin with.*'input_ids'"):
        check(program)
