"""`celosia flash` refuses wrong bitstreams before it changes anything, and loads right ones, here and over ssh."""

from __future__ import annotations

import hashlib
import shutil
import struct
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerator import Accelerator, Memory
from fake_board import FakeBoard, serving
from typer.testing import CliRunner

from celosia.driver.board import board_device as board
from celosia.driver.board import flash
from celosia.driver.board.board_device import BoardDevice
from celosia.driver.board.lock import hold_lock_file
from celosia.driver.cli import app
from celosia.hw.boards.board import Board
from celosia.hw.boards.boards import BOARDS
from celosia.hw.manifest import BitHeader, Manifest, ManifestError
from celosia.hw.sources import sources_identity
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.regs import MAGIC, REGISTERS
from celosia.sim.device import DeviceError

BOARD = BOARDS["pynq-z1"]
TINY = PRESETS["tiny"]


def bit_bytes(part: str, data: bytes = b"\xff" * 100) -> bytes:
    """Return a .bit file as Vivado writes it."""
    fields = (
        b"system_wrapper;UserID=0XFFFFFFFF;Version=2024.1\0",
        part.encode() + b"\0",
        b"2026/01/02\0",
        b"03:04:05\0",
    )
    head = bytes.fromhex("0009 0ff0 0ff0 0ff0 0ff0 00 0001".replace(" ", ""))
    for key, text in zip(b"abcd", fields):
        head += struct.pack(">BH", key, len(text)) + text
    return head + struct.pack(">BI", ord("e"), len(data)) + data


def bitstream(folder: Path, board: Board = BOARD, cfg: Config = TINY, part: str = "7z020clg400") -> Path:
    path = folder / "design.bit"
    path.write_bytes(bit_bytes(part))
    path.with_suffix(".hwh").write_text("<handoff/>")
    digests = [hashlib.sha256(path.with_suffix(e).read_bytes()).hexdigest() for e in (".bit", ".hwh")]
    manifest = Manifest(
        board.name, board.part, cfg.to_dict(), cfg.digest, "0" * 32, 100, board.address, "0.1.0", "Vivado 2024.1",
        "0.1", *digests,
    )  # fmt: skip
    path.with_suffix(".json").write_text(manifest.to_json())
    return path


@pytest.mark.parametrize(
    ("part", "device", "fits"),
    [
        ("7z020clg400", "xc7z020clg400-1", True),
        ("7z020clg484", "xc7z020clg400-1", False),
        ("7z010clg400", "xc7z020clg400-1", False),
        ("xczu3eg-sbva484-1-e", "xczu3eg-sbva484-1-i", True),
        ("xczu7ev-ffvc1156-2-e", "xczu3eg-sbva484-1-i", False),
    ],
)
def test_header(tmp_path: Path, part: str, device: str, fits: bool) -> None:
    path = bitstream(tmp_path, part=part)
    header = BitHeader.read(path)
    assert (header.design, header.part, header.date, header.time) == ("system_wrapper", part, "2026/01/02", "03:04:05")
    assert path.read_bytes()[header.offset :] == b"\xff" * header.length
    assert header.is_for(device) == fits


def test_damaged_files(tmp_path: Path) -> None:
    path = bitstream(tmp_path)
    sound = path.read_bytes()
    assert flash.check_bitstream(path, "pynq-z1", BOARD.part).identity == TINY.identity
    for size in range(len(sound)):
        path.write_bytes(sound[:size])
        with pytest.raises(ManifestError, match=r"is damaged|is not a bitstream"):
            flash.check_bitstream(path, "pynq-z1", BOARD.part)
    path.write_bytes(sound[:-1] + b"\0")
    with pytest.raises(ManifestError, match=r"design\.bit.*damaged"):
        flash.check_bitstream(path, "pynq-z1", BOARD.part)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"part": "7z010clg400"}, r"is for 7z010clg400, and pynq-z1 has xc7z020clg400-1"),
        ({"board": BOARDS["pynq-z2"]}, r"was made for pynq-z2, not for pynq-z1"),
        ({"board": replace(BOARDS["zcu104"], name="pynq-z1")}, r"its manifest says .*one is of another build"),
    ],
)
def test_a_wrong_part_or_board(tmp_path: Path, how: dict[str, object], message: str) -> None:
    path = bitstream(tmp_path, **how)  # type: ignore[arg-type]
    with pytest.raises(ManifestError, match=message):
        flash.check_bitstream(path, "pynq-z1", BOARD.part)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 100_000, '{"board": 1}', "\xff", '{"config_digest": "x"}'],
    ids=lambda text: text[:9] or "empty",
)
def test_manifests_that_are_none(tmp_path: Path, text: str) -> None:
    path = bitstream(tmp_path)
    path.with_suffix(".json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ManifestError, match="is not the manifest of a bitstream"):
        flash.check_bitstream(path, "pynq-z1", BOARD.part)
    path.with_suffix(".json").unlink()
    with pytest.raises(ManifestError, match="cannot read the manifest"):
        flash.check_bitstream(path, "pynq-z1", BOARD.part)


class Clocks:
    """PYNQ's clocks: the nearest frequency that an integer divider of the PLL gives."""

    def __init__(self, pll: float) -> None:
        self.pll, self.divisor = pll, 1

    @property
    def fclk0_mhz(self) -> float:
        return self.pll / self.divisor

    @fclk0_mhz.setter
    def fclk0_mhz(self, mhz: float) -> None:
        self.divisor = min(range(1, 64), key=lambda divisor: abs(self.pll / divisor - mhz))


@pytest.mark.parametrize(
    ("pll", "mhz", "found"), [(1000, 100, 100), (1499.985, 150, 149.9985), (1600, 210, 200), (1000, 300, 250)]
)
def test_clock(pll: float, mhz: int, found: float) -> None:
    """The clock is never faster than Vivado's timing allows, whatever the PLL of the boot image is."""
    assert flash._set_clock(Clocks(pll), mhz) == pytest.approx(found)
    with pytest.raises(RuntimeError, match="10 MHz"):
        flash._set_clock(Clocks(1000), 10)


@pytest.mark.parametrize(("pll", "mhz"), [(1000, 112), (999.99, 111), (1000, 120)])
def test_a_clock_of_which_another_is_made_stays(pll: float, mhz: int) -> None:
    clocks = Clocks(pll)
    clocks.divisor = 9
    assert flash._require_unchanged_clock(clocks, mhz) == pytest.approx(pll / 9) and clocks.divisor == 9
    for other in (100, 130):
        with pytest.raises(RuntimeError, match=rf"111\.11.* MHz.*{other}"):
            flash._require_unchanged_clock(clocks, other)


@pytest.mark.parametrize("change", [{"block_in": 8}, {"block_in": 12}, {"block_in": []}, {"colour": 1}])
def test_a_manifest_of_another_config(tmp_path: Path, change: dict[str, object]) -> None:
    path = bitstream(tmp_path)
    manifest = Manifest.load(path.with_suffix(".json"))
    other = replace(manifest, config=manifest.config | change)
    path.with_suffix(".json").write_text(other.to_json())
    with pytest.raises(ManifestError, match=r"json.*(config_digest|block_in|colour)"):
        flash.check_bitstream(path, "pynq-z1", BOARD.part)


def test_on_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"magic": MAGIC, "identity": TINY.identity, "sources": sources_identity()}
    values = {REGISTERS[name].offset: value for name, value in answers.items()}
    loaded: list[str] = []
    package = SimpleNamespace(
        Overlay=loaded.append, Clocks=Clocks(1200),
        MMIO=lambda base, size: SimpleNamespace(read=lambda offset: values[offset]),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynq", package)
    monkeypatch.setattr(board, "LOCKS", tmp_path)
    path = bitstream(tmp_path)
    manifest = flash.check_bitstream(path, "pynq-z1", BOARD.part)
    done = CliRunner().invoke(app, ["flash", str(path), "--board", "pynq-z1"])
    assert done.exit_code == 0 and "accelerator tiny" in done.output and "at 100 MHz" in done.output
    assert loaded == [str(path)]
    values[REGISTERS["sources"].offset] ^= 1
    with pytest.raises(DeviceError, match=r"hardware sources \(\w{8}\)"):
        flash.load(str(path), manifest)
    values[REGISTERS["identity"].offset] = 1
    with pytest.raises(DeviceError, match="Config 00000001"):
        flash.load(str(path), manifest)
    values[REGISTERS["magic"].offset] = 0
    with pytest.raises(DeviceError, match=r"accelerator.*0x43c00000"):
        flash.load(str(path), manifest)
    package.Overlay = {}.__getitem__
    with pytest.raises(DeviceError, match=r"PYNQ.*KeyError.*root"):
        flash.load(str(path), manifest)
    package.Overlay = loaded.append
    package.Clocks.pll = 7000
    with pytest.raises(DeviceError, match=r"PYNQ.*clock.*100 MHz"):
        flash.load(str(path), manifest)
    monkeypatch.setitem(sys.modules, "pynq", None)
    done = CliRunner().invoke(app, ["flash", str(path), "--board", "pynq-z1"])
    assert done.exit_code == 3 and "pynq on the board itself" in done.output.replace("\n", " ")


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Accelerator, list[str], SimpleNamespace]:
    """Return an accelerator in the middle of a long run, a log of calls to PYNQ, and the package `pynq`."""
    accelerator, asked = Accelerator(TINY, length=10**9), []
    device = BoardDevice(TINY, accelerator, Memory(0x1000))
    device.allocate(4096)
    with pytest.raises(DeviceError, match="no end within"):
        device.run(0, 1, 10**5)

    def mmio(base: int, size: int) -> Accelerator:
        asked.append(f"map {base:x}")
        return accelerator

    def overlay(path: str) -> None:
        asked.append("configure while busy" if accelerator.started is not None or accelerator.stuck else "configure")

    parts = {"celosia": {"phys_addr": 0x4000_0000}, "interrupts": {"phys_addr": 0x43C1_0000}}
    package = SimpleNamespace(Overlay=overlay, Clocks=Clocks(1200), MMIO=mmio, PL=SimpleNamespace(ip_dict=parts))
    monkeypatch.setitem(sys.modules, "pynq", package)
    monkeypatch.setattr(board, "LOCKS", tmp_path)
    monkeypatch.setattr(board, "FPGA_STATE", tmp_path / "state")
    monkeypatch.setattr(board, "SETTLE_SECONDS", 0.05)
    return accelerator, asked, package


RuntimeBase = tuple[Accelerator, list[str], SimpleNamespace]


def test_a_run_is_ended_before_the_fpga_is_configured(tmp_path: Path, running: RuntimeBase) -> None:
    accelerator, asked, _ = running
    manifest = Manifest.load(bitstream(tmp_path).with_suffix(".json"))
    assert accelerator.started is not None
    assert flash.load("design.bit", manifest) == 100
    assert asked == ["map 40000000", "configure", "map 43c00000"] and accelerator.aborts == 1
    assert flash.load("design.bit", manifest) == 100 and accelerator.aborts == 1


def test_an_accelerator_that_does_not_become_idle(tmp_path: Path, running: RuntimeBase) -> None:
    """If the loaded accelerator waits for memory for ever, the FPGA keeps its design."""
    accelerator, asked, _ = running
    manifest = Manifest.load(bitstream(tmp_path).with_suffix(".json"))
    accelerator.stuck = True
    words = r"^the accelerator that is loaded now does not become idle: it waits for memory \(status 0x606\); restart"
    with pytest.raises(DeviceError, match=words):
        flash.load("design.bit", manifest)
    assert asked == ["map 40000000"]


@pytest.mark.parametrize("loaded", ["nothing", "unknown", "another design", "no accelerator"])
def test_registers_that_are_not_there_are_not_read(tmp_path: Path, running: RuntimeBase, loaded: str) -> None:
    """Registers that the loaded design lacks are not read, which would stop the processor."""
    accelerator, asked, package = running
    manifest = Manifest.load(bitstream(tmp_path).with_suffix(".json"))
    if loaded == "nothing":
        board.FPGA_STATE.write_text("unknown\n")
    elif loaded == "unknown":
        del package.PL
    elif loaded == "another design":
        del package.PL.ip_dict["celosia"]
    else:
        accelerator.values["magic"] = 0
        package.Overlay = lambda path: accelerator.values.update(magic=MAGIC)
    flash.load("design.bit", manifest)
    assert accelerator.aborts == 0
    assert ("map 40000000" in asked) == (loaded == "no accelerator")


def test_nothing_is_loaded_while_another_process_runs(
    tmp_path: Path, running: RuntimeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, asked, _ = running
    monkeypatch.setattr(board, "hold_lock_file", partial(hold_lock_file, patience=0.05))
    manifest = Manifest.load(bitstream(tmp_path).with_suffix(".json"))
    words = r"^the accelerator at 0x43c00000 is in use: process \d+ has held it since"
    with board.board_lock(manifest.address), pytest.raises(DeviceError, match=words):
        flash.load("design.bit", manifest)
    assert asked == [] and accelerator.started is not None


@pytest.mark.skipif(shutil.which("ssh") is None, reason="could not find 'ssh', OpenSSH's client, which reaches boards")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flashing works over ssh, and finds another Config's bitstream: the FPGA there always has the RTL of `tiny`."""
    from celosia.sim.rtl.build import build_library

    path = bitstream(tmp_path)
    with serving(FakeBoard(tmp_path, build_library(TINY)), tmp_path, monkeypatch) as board:
        done = CliRunner().invoke(app, ["flash", str(path), "--board", "pynq-z1", "--host", "board"])
        assert done.exit_code == 0, done.output
        names = {file.suffix for file in (board.home / "celosia").iterdir()}
        assert names == {".bit", ".hwh", ".pyz"}
        bitstream(tmp_path, cfg=PRESETS["pynq"])
        done = CliRunner().invoke(app, ["flash", str(path), "--board", "pynq-z1", "--host", "board"])
        assert done.exit_code == 3 and "has Config" in done.output
