"""The boards that Celosia knows, with the source of each number, and memory models by name."""

from __future__ import annotations

import re
from pathlib import Path

from celosia.hw.boards.board import Board, BoardError
from celosia.hw.boards.board_file import read_board
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.boards.memory import IDEAL, ZYNQ_HP, Dram, MemoryModel
from celosia.hw.spec.config import PRESETS, did_you_mean

_DDR3 = Dram(16, 1050, 7800, 260)
"""DRAM of the PYNQ-Z1 and -Z2: 16 bits at 525 MHz (Digilent, PYNQ-Z1 reference manual; TUL, PYNQ-Z2 user manual and
board files): 2.1 GB/s. One chip of 4 Gbit: JESD79-3, tREFI and tRFC."""
_LPDDR4 = Dram(32, 1066, 3904, 280)
"""DRAM of the Ultra96-V2: 32 bits at 533 MHz (Avnet's board files: LPDDR4_1066): 4.3 GB/s. Channels of 8 Gbit,
refreshed as a whole: JESD209-4, tREFI and tRFCab."""

BOARDS = {
    board.name: board
    for board in (
        # Pins: Digilent, PYNQ-Z1 reference manual. Clock of both: the timing estimate (bitstreams/timing.py) allows it.
        Board(
            "pynq-z1", "xc7z020clg400-1", FPGAS["xc7z020"], PRESETS["pynq"], 100, _DDR3,
            "pynq-z1", ("R14", "P14", "N16"), "LVCMOS33",
        ),
        # Pins: TUL, master XDC of the PYNQ-Z2.
        Board(
            "pynq-z2", "xc7z020clg400-1", FPGAS["xc7z020"], PRESETS["pynq"], 100, _DDR3,
            "pynq-z2", ("R14", "P14", "N16"), "LVCMOS33",
        ),
        # Part and pins: Avnet, Ultra96-V2 hardware user's guide. The FPGA drives only the two lights of the radio.
        # "ultra96" is Vivado's name of the predecessor. Clock: a target without a source.
        Board(
            "ultra96", "xczu3eg-sbva484-1-i", FPGAS["xczu3eg"], PRESETS["ultra96"], 150, _LPDDR4,
            "ultra96v2", ("A9", "B9"), "LVCMOS18",
        ),
        # Part and pins: AMD, UG1267. DRAM: 64 bits at 1067 MHz (AMD's board files: DDR4_2133P, though the device may
        # have DDR4-2400): 17.1 GB/s; chips of 4 Gbit: JESD79-4, tREFI and tRFC1. Clock: a target without a source.
        Board(
            "zcu104", "xczu7ev-ffvc1156-2-e", FPGAS["xczu7ev"], PRESETS["zcu104"], 200, Dram(64, 2133, 7800, 260),
            "zcu104", ("D5", "D6", "A5"), "LVCMOS33",
        ),
        # Part: AMD, DS987. DRAM: 64 bits, 2400 MT/s (DS987): 19.2 GB/s; chips of 8 Gbit (AMD's board files, kv260_som):
        # JESD79-4, tREFI and tRFC1. No light is known that the FPGA drives. Clock: a target without a source.
        Board(
            "kv260", "xck26-sfvc784-2LV-c", FPGAS["xck26"], PRESETS["ultra96"], 200, Dram(64, 2400, 7800, 350),
            "kv260_som",
        ),
        # Part, pins and DRAM: AMD's PYNQ image for it (github.com/Xilinx/AUP-ZU3: base/constraints/base.xdc, the first
        # white lights, and the processors' settings: 32 bits, DDR4_2400T): 9.6 GB/s; chips of 16 Gbit: JESD79-4, tREFI
        # and tRFC1. The boards of 4 GB and 8 GB differ here only in the name of their board files.
        # Clock: a target without a source.
        Board(
            "aup-zu3", "xczu3eg-sfvc784-2-e", FPGAS["xczu3eg"], PRESETS["ultra96"], 200, Dram(32, 2400, 7800, 550),
            "aup-zu3-8gb", ("AF5", "AE7", "AH2"), "LVCMOS12",
        ),
    )
}  # fmt: skip
"""Supported boards by name."""
MEMORY_MODELS = {model.name: model for model in (ZYNQ_HP, IDEAL, *(board.memory for board in BOARDS.values()))}
"""Memory models that `--memory` takes by name: two generic ones, and one of each board."""


def find_board(source: str | Path | Board) -> Board:
    """Return the board that `source` names: a key of BOARDS, the path of a .toml file (docs/boards.md), or a Board.

    BoardError if there is none, or the file is wrong.
    """
    if isinstance(source, Board):
        return source
    text = str(source)
    if text in BOARDS:
        return BOARDS[text]
    if not is_board_file(text):
        raise BoardError(
            f"there is no board {text!r}{did_you_mean(text, BOARDS)}; take one of {', '.join(BOARDS)}, or a .toml file "
            "of your own"
        )
    board = read_board(Path(text))
    if board.name in MEMORY_MODELS:
        raise BoardError(f"board file {text}: name {board.name!r} is taken by Celosia; give it another")
    return board


def is_board_file(name: str) -> bool:
    """Return whether a user's text for a board is the path of a file, not the name of a board."""
    return name.endswith(".toml")


# Memory ----------------------------------------------------------------------------------------------------------


def memory_model(memory: MemoryModel | str) -> MemoryModel:
    """Return the memory model that `memory` stands for: a name, a board's .toml file, a model's `str`, or a model.

    ValueError if there is no such model, BoardError if the file is wrong.
    """
    if isinstance(memory, MemoryModel):
        return memory
    return find_board(memory).memory if is_board_file(memory) else parse_memory_model(memory)


def parse_memory_model(text: str) -> MemoryModel:
    """Return the memory model of a text: a name in MEMORY_MODELS, or the `str` of a model. ValueError for other texts.

    Unlike `memory_model` it reads no file, so that texts from untrusted files are safe.

    >>> model = BOARDS["ultra96"].memory
    >>> parse_memory_model("ultra96") == parse_memory_model(str(model)) == model
    True
    """
    if text in MEMORY_MODELS:
        return MEMORY_MODELS[text]
    if match := re.fullmatch(r"([\w.-]+) \((\w+=[\d.]{1,12}(?:, \w+=[\d.]{1,12})*)\)", text, re.ASCII):
        fields = dict(field.split("=") for field in match[2].split(", "))
        try:
            numbers = {name: float(value) if name == "stall" else int(value) for name, value in fields.items()}
            return MemoryModel(match[1], **numbers)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass  # a field or a number that no MemoryModel has
    *others, last = MEMORY_MODELS
    hint = did_you_mean(text, MEMORY_MODELS)
    raise ValueError(
        f"there is no memory model {text!r}{hint}; take {', '.join(others)} or {last}, or a board's .toml file"
    )


def memory_model_text(memory: MemoryModel) -> str:
    """Return the shortest text from which `parse_memory_model` rebuilds `memory`: its name, or all of its values."""
    return memory.name if MEMORY_MODELS.get(memory.name) == memory else str(memory)


def clock_of_report(text: str | None) -> int:
    """Return the clock in MHz of the memory model whose text a report holds; that of ZYNQ_HP if it holds none."""
    try:
        return parse_memory_model(text or "").clock_mhz
    except ValueError:
        return ZYNQ_HP.clock_mhz
