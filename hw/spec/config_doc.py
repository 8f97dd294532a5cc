"""Prints docs/configs.md from the Config: `python -m celosia.hw.spec.config_doc > docs/configs.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from celosia.hw.spec.config import PRESETS, Config, field_specs, limits
from celosia.hw.spec.scratchpads import scratchpads

HEAD = """\
# Configs

A Config is what a user picks of the accelerator. It comes from a preset's name, or from a TOML or JSON file:
`celosia configs` lists the presets, `celosia configs pynq > mine.toml` writes one to change, and

    celosia sweep model.onnx --set inp_depth=1024,4096 --set bus_bytes=8,16

compiles a model for each of them and prints its cycles and what it takes of an FPGA: DSP blocks and block RAM as they
follow from the Config, LUTs and flip-flops by a model ([bitstreams.md](bitstreams.md) says how good it is), or as
`celosia bitstream report` has counted them. Printed from `hw/spec/config.py` by
`python -m celosia.hw.spec.config_doc`; do not edit.
"""

RULES = """\
Together: `block_in` and `block_out` differ by a factor of 8 at most; `forward` needs `block_in` ≥ `block_out`;
`residual_cycles` is at most batch · block_out. A Config that breaks a rule is refused with the field, its value, and
what is possible.
"""


def config_markdown() -> str:
    """The text of the page."""
    return "\n".join([HEAD, *_fields(), RULES, "## Presets\n", *_presets()])


def commented_toml(cfg: Config) -> str:
    """The Config as a file that `Config.load` reads, each field with what it is and what it may hold."""
    lines = cfg.to_toml().splitlines()
    width = max(map(len, lines))
    notes = {name: f"  # {spec.what}: {limits(name)}" for name, spec in field_specs().items()}
    return "".join(f"{line:<{width}}{notes.get(line.split()[0], '')}".rstrip() + "\n" for line in lines)


def _fields() -> Iterator[str]:
    yield "| field | what | default | limits | what it costs, and what it brings |"
    yield "|---|---|---|---|---|"
    for field in dataclasses.fields(Config):
        if spec := field_specs().get(field.name):
            yield f"| `{field.name}` | {spec.what} | {_value(field.default)} | {limits(field.name)} | {spec.cost} |"
    yield ""


def _presets() -> Iterator[str]:
    names = list(field_specs())
    yield f"| | {' | '.join(f'`{name}`' for name in PRESETS)} |"
    yield f"|---{'|---' * len(PRESETS)}|"
    for name in names:
        yield f"| `{name}` | {' | '.join(_value(getattr(cfg, name)) for cfg in PRESETS.values())} |"
    yield f"| multiplications a cycle | {' | '.join(f'{cfg.macs_per_cycle:,}' for cfg in PRESETS.values())} |"
    sizes = [{pad.name: f"{pad.bytes / 1024:,.3g}" for pad in scratchpads(cfg).values()} for cfg in PRESETS.values()]
    for name in sizes[0]:
        yield f"| {name}, kB | {' | '.join(size.get(name, '-') for size in sizes)} |"
    yield ""


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    print(config_markdown(), end="")
