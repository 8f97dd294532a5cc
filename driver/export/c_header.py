"""Write celosia_hardware.h for the C runtime: register offsets, error codes, and how long the host waits."""

from __future__ import annotations

from celosia.driver.board import board_device as board
from celosia.driver.run.program_runtime import CYCLES_PER_INSTRUCTION
from celosia.hw.spec import regs
from celosia.hw.spec.regs import ERROR_TEXT, REGISTERS

HEADER = "celosia_hardware.h"
"""Name of the header."""
_REGISTER_CONSTANTS = (
    "MAGIC", "CONTROL_START", "CONTROL_ABORT", "STATUS_BUSY", "STATUS_DONE", "STATUS_STUCK", "STATUS_ERROR_SHIFT",
)  # fmt: skip
"""Constants of `hw/spec/regs.py` that the runtime uses."""


def header_text() -> str:
    """Return the text of HEADER, with the values that the Python driver uses."""
    clock = int(board.CLOCK_HZ)
    times = {
        "CLOCK_HZ": clock,
        "SETTLE_CYCLES": int(board.SETTLE_SECONDS * clock),
        "WATCHDOG_CYCLES": board.WATCHDOG_CYCLES,
        "LEASE_CYCLES": board.LEASE_CYCLES,
        "CYCLES_PER_INSTRUCTION": CYCLES_PER_INSTRUCTION,
        "POLL_MICROSECONDS": int(board.POLL_SECONDS * 1e6),
        "INTERRUPT_MICROSECONDS": int(board.INTERRUPT_SECONDS * 1e6),
    }
    offsets = {f"REG_{name.upper()}": register.offset for name, register in REGISTERS.items()}
    codes = {f"ERROR_{error.name}": int(error) for error in ERROR_TEXT}
    texts = [f'    case CELOSIA_ERROR_{error.name}: return "{text}"; \\' for error, text in ERROR_TEXT.items()]
    lines = [
        "/* Registers, errors and times of the hardware. Written by `celosia export`. */",
        "#ifndef CELOSIA_HARDWARE_H",
        "#define CELOSIA_HARDWARE_H",
        "",
        *_define_lines(offsets),
        "",
        *_define_lines({name: int(getattr(regs, name)) for name in _REGISTER_CONSTANTS}),
        "",
        *_define_lines(times),
        "",
        *_define_lines(codes),
        "",
        "#define CELOSIA_HARDWARE_TEXTS \\",
        '    case 0: return "done"; \\',
        *texts,
        "",
        "#endif",
    ]
    return "\n".join(lines) + "\n"


def _define_lines(values: dict[str, int]) -> list[str]:
    """Return a #define for each value, by name without the prefix CELOSIA_."""
    return [f"#define CELOSIA_{name} {value:#x}u" for name, value in values.items()]
