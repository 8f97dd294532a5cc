"""Boards of the table and boards in TOML files work, and a wrong board gives one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from celosia.hw.boards.board import NUMBER_LIMITS, PROCESSORS, Board, BoardError, device_of
from celosia.hw.boards.boards import (
    BOARDS,
    MEMORY_MODELS,
    clock_of_report,
    find_board,
    memory_model,
    memory_model_text,
    parse_memory_model,
)
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.boards.memory import IDEAL, ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import PRESETS, Config

OWN = """
part = "xc7z010clg400-1"
config = "tiny"
clock_mhz = 80
lights = ["M14"]
light_standard = "LVCMOS33"

[device]
lut = 17_600
ff = 35_200
dsp = 80
ram = 60

[dram]
bits = 32
megatransfers = 1066
refresh_every_ns = 7800
refresh_ns = 260
"""


def written(folder: Path, text: str = OWN, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_each_board_goes_through_a_file(board: Board, tmp_path: Path) -> None:
    read = find_board(written(tmp_path, board.to_toml()))
    assert read == replace(board, name="mine") and read.digest != board.digest
    assert read.memory == replace(board.memory, name="mine")
    strange = Config(block_in=8, block_out=8, name="strange")
    changed = replace(board, name="mine", config=strange, device=replace(board.device, lut=7))
    assert find_board(written(tmp_path, changed.to_toml())) == changed


def test_a_board_of_ones_own(tmp_path: Path) -> None:
    board = find_board(str(written(tmp_path)))
    assert (board.name, board.device.name, board.processor, board.machine) == ("mine", "xc7z010", "zynq", "armv7l")
    assert board.device.synth == FPGAS["xc7z020"].synth and board.device.dsp == 80
    assert board.config == PRESETS["tiny"] and board.pins() == {"busy": "M14"} and board.board_files == ""
    assert board.memory.bytes_per_cycle == 4 * 1066 // 80 and board.memory.clock_mhz == 80
    assert find_board(written(tmp_path, f'name = "other"\n{OWN}')).name == "other"


def test_its_config_is_a_file_beside_it_or_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boards").mkdir()
    (tmp_path / "boards" / "small.toml").write_text("block_in = 8\nblock_out = 8\n")
    path = written(tmp_path / "boards", OWN.replace('"tiny"', '"small.toml"'))
    monkeypatch.chdir(tmp_path)
    assert find_board(path).config == Config(block_in=8, block_out=8) and find_board(path).config.name == "small"
    table = OWN.replace('config = "tiny"\n', "") + "[config]\nblock_in = 8\nblock_out = 8\n"
    assert find_board(written(tmp_path, table)).config == Config(block_in=8, block_out=8)


def test_parts() -> None:
    for part, device in {
        "xc7z007sclg225-1": "xc7z007s", "xc7z020clg484-1": "xc7z020", "xa7z020clg400-1I": "xa7z020",
        "xczu3teg-sfvd784-1-e": "xczu3teg", "xczu9eg-ffvb1156-2-i": "xczu9eg", "xczu48dr-ffvg1517-2-e": "xczu48dr",
        "xck24-ubva530-2LV-c": "xck24", "xck26-sfvc784-2LV-c": "xck26", "xczu3eg-sbva484-1L-i": "xczu3eg",
    }.items():  # fmt: skip
        assert device_of(part) == device
    for board in BOARDS.values():
        assert FPGAS[board.device.name] is board.device and PROCESSORS[board.processor].synth == board.device.synth


HUGE = "1" * 5000
HEXADECIMAL = "0x" + "f" * 5000
WRONG = {
    'part = "xc7a35tcpg236-1"': "part cannot be 'xc7a35tcpg236-1'; it is a Zynq-7000, Zynq UltraScale",
    'part = "xc7z020"': "part cannot be 'xc7z020'; it is .* the whole name",
    "part = 7": "part cannot be 7;",
    'part = "xc7z010clg400-1 [exec touch pwned]"': "part cannot be ",
    "part = ": "is not valid TOML: .*; docs/boards.md has an example",
    'config = "pnyq"': "config: no preset is called 'pnyq' \\(did you mean 'pynq'\\?\\)",
    'config = "gone.toml"': "config: cannot read Config file .*gone.toml: No such file",
    "config = 7": "config cannot be 7; it is the name of a preset, a file, or a table",
    'clok_mhz = 80\nconfig = "tiny"': r"no field 'clok_mhz' \(did you mean 'clock_mhz'\?\); known are name, part",
    "clock_mhz = 9": "clock_mhz cannot be 9; it is a whole number from 10 to 500",
    "clock_mhz = true": "clock_mhz cannot be True; it is a whole number",
    "clock_mhz = 80.5": "clock_mhz cannot be 80.5; it is a whole number",
    'clock_mhz = "fast"': "clock_mhz cannot be 'fast'; it is a whole number",
    "clock_mhz = 1979-05-27": "clock_mhz cannot be datetime.date.*; it is a whole number",
    f"clock_mhz = {HUGE}": "is not valid TOML: a number has thousands of digits",
    f"clock_mhz = {HEXADECIMAL}": "is not valid TOML: a number has more than 40 digits",
    "clock_mhz = 10000000000000000000000000000000": "clock_mhz cannot be 10000",
    'lights = "M14"': "lights cannot be 'M14'; it is a list of pins",
    'lights = ["M14", "M14"]': "lights cannot have 'M14'; it takes different pins",
    'lights = ["m14;"]': "lights cannot have 'm14;'",
    'lights = ["A1", "A2", "A3", "A4"]': "lights cannot be 4 pins; it takes up to 3",
    'light_standard = ""': "light_standard is missing, without which lights have no voltage",
    'light_standard = "LVCMOS33} [exit]"': "light_standard cannot be 'LVCMOS33}.*; it is an I/O standard",
    "light_standard = 3": "light_standard cannot be 3;",
    'board_files = "a}b"\nconfig = "tiny"': "board_files cannot be 'a}b'; it is the name in Vivado's board part",
    'name = "a/b"\nconfig = "tiny"': "name cannot be 'a/b'; it is letters, digits, points and dashes",
    'name = "zcu104"\nconfig = "tiny"': "name 'zcu104' is taken by Celosia; give it another",
    'name = "ideal"\nconfig = "tiny"': "name 'ideal' is taken",
    "lut = 0": "device.lut cannot be 0; it is a whole number from 1 to 100,000,000",
    "lutt = 1": r"there is no field 'device.lutt' \(did you mean 'lut'\?\); known are lut, ff, dsp, ram",
    "dsp = 80\nram = 60\nuram = 8": "there is no field 'device.uram'",
    "bits = 20": "dram.bits cannot be 20; it is a multiple of 8",
    "bits = 8": "dram.bits cannot be 8; it is a whole number from 16 to 128",
    "megatransfers = 0": "dram.megatransfers cannot be 0",
    "refresh_ns = 4000": "dram.refresh_ns cannot be 4000; it is at most half of refresh_every_ns, 7800",
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG, ids=lambda line: line[:24])
def test_a_wrong_board_is_one_sentence(line: str, tmp_path: Path) -> None:
    first = line.split("=")[0].strip()
    field = {"clok_mhz": "config", "board_files": "config", "name": "config", "lutt": "lut"}.get(first, first)
    rows = [line if row.startswith(f"{field} =") else row for row in OWN.splitlines()]
    if "\n" in line and first == "dsp":
        rows.remove("ram = 60")
    assert line in rows
    with pytest.raises(BoardError, match=WRONG[line]) as caught:
        find_board(written(tmp_path, "\n".join(rows)))
    message = str(caught.value)
    assert message.startswith(f"board file {tmp_path}/mine.toml") and len(message) < 600 and "\n" not in message


@pytest.mark.parametrize("field", ["part", "config", "clock_mhz", "lut", "ram", "bits", "refresh_ns"])
def test_what_is_missing_is_named(field: str, tmp_path: Path) -> None:
    text = "\n".join(row for row in OWN.splitlines() if not row.startswith(f"{field} ="))
    with pytest.raises(BoardError, match=rf"mine.toml: (device\.|dram\.)?{field} "):
        find_board(written(tmp_path, text))


def test_tables_that_are_missing_or_none(tmp_path: Path) -> None:
    top, device, dram = OWN.partition("[device]")[0], "[device]" + OWN.split("[device]")[1], OWN.split("\n[dram]")[1]
    with pytest.raises(BoardError, match=r"dram.*docs/boards\.md"):
        find_board(written(tmp_path, (top + device).partition("[dram]")[0]))
    with pytest.raises(BoardError, match=r"\[device\].*xc7z010"):
        find_board(written(tmp_path, f"{top}\n[dram]{dram}"))
    with pytest.raises(BoardError, match=r"dram.*5.*\[dram\].*bits, megatransfers"):
        find_board(written(tmp_path, f"dram = 5\n{top}{device}".partition("[dram]")[0]))
    known = find_board(written(tmp_path, f"{top}\n[dram]{dram}".replace("xc7z010", "xc7z020")))
    assert known.device is FPGAS["xc7z020"]


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BoardError, match=r"board file .*gone\.toml.*No such file"):
        find_board(tmp_path / "gone.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(BoardError, match=r"board file .*Is a directory"):
        find_board(tmp_path / "folder.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name in ("bytes.toml", "deep.toml"):
        (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)
        with pytest.raises(BoardError, match=rf"board file .*{name}.*TOML"):
            find_board(tmp_path / name)
    with pytest.raises(BoardError, match=r"'kv26'.*'kv260'.*\.toml"):
        find_board("kv26")


@pytest.mark.parametrize("name", NUMBER_LIMITS)
def test_numbers_have_both_ends(name: str) -> None:
    """Each number of a board has a lower and an upper limit; numbers that limit each other are not set to them."""
    board, (part, _, field) = BOARDS["kv260"], name.rpartition(".")

    def board_with(value: int) -> Board:
        if part:
            return replace(board, **{part: replace(getattr(board, part), **{field: value})})
        return replace(board, **{field: value})

    low, high = NUMBER_LIMITS[name]
    for value in (low, high) if "refresh" not in name else ():
        assert board_with(value).memory.bytes_per_cycle >= 1
    for value in (low - 1, high + 1, -(10**5000)):
        with pytest.raises(BoardError, match=f"{name} "):
            board_with(value)


# Memory -----------------------------------------------------------------------------------------------------------


def test_the_memory_of_ones_own_board(tmp_path: Path) -> None:
    path = written(tmp_path)
    mine = find_board(path).memory
    assert memory_model(str(path)) == mine and memory_model(mine) is mine
    assert (
        parse_memory_model(memory_model_text(mine)) == parse_memory_model(str(mine)) == mine
        and clock_of_report(str(mine)) == 80
    )
    with pytest.raises(ValueError, match="there is no memory model"):
        parse_memory_model(str(path))  # a text from elsewhere must not name a file


@pytest.mark.parametrize("model", MEMORY_MODELS.values(), ids=MEMORY_MODELS)
def test_models_are_found_by_what_they_say(model: MemoryModel) -> None:
    assert memory_model_text(model) == model.name and parse_memory_model(model.name) is model
    assert parse_memory_model(str(model)) == model and clock_of_report(str(model)) == model.clock_mhz


@pytest.mark.parametrize(
    "text", ["", "ddr9", "a (b=1)", "a (clock_mhz=0)", "a (clock_mhz=1.5)", f"a (clock_mhz={HUGE})", "a ()", "ideal ("]
)
def test_texts_that_tell_of_none(text: str) -> None:
    with pytest.raises(ValueError, match="there is no memory model") as caught:
        parse_memory_model(text)
    assert clock_of_report(text) == ZYNQ_HP.clock_mhz == clock_of_report(None) and IDEAL.name in str(caught.value)
