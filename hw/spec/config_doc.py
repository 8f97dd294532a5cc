"""Print docs/configs.md from the declarations of Config: `python -m celosia.hw.spec.config_doc > docs/configs.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from celosia.hw.spec.config import PRESETS, Config, describe_limits, field_specs
from celosia.hw.spec.scratchpads import scratchpads

HEAD = """\
# Configs

A Config holds the parameters of the accelerator that a user chooses. It comes from a preset's name or a TOML or JSON
file:
`celosia configs` lists the presets, `celosia configs pynq > mine.toml` writes one to change, and

    celosia sweep model.onnx --set inp_depth=1024,4096 --set bus_bytes=8,16

compiles a model for each combination and prints its cycles and its FPGA resources. DSP blocks and block RAM follow from
the Config. LUTs and flip-flops are estimates ([bitstreams.md](bitstreams.md) says how good they are), or the counts of
`celosia bitstream report`. Printed from `hw/spec/config.py` by
`python -m celosia.hw.spec.config_doc`; do not edit.
"""
"""Text before the table of fields."""

RULES = """\
Together: `block_in` and `block_out` differ by a factor of 8 at most; `forward` needs `block_in` ≥ `block_out`;
`residual_cycles` is at most batch · block_out. A Config that breaks a rule is refused with the field, its value, and
what is possible.
"""
"""Text after the table of fields."""


def config_markdown() -> str:
    """Return the text of docs/configs.md: a table of fields, the rules between fields, and a table of presets."""
    return "\n".join([HEAD, *_field_table(), RULES, "## Presets\n", *_preset_table()])


def commented_toml(cfg: Config) -> str:
    """Return a TOML text that `Config.load` reads; a comment behind each field tells its meaning and limits."""
    lines = cfg.to_toml().splitlines()
    width = max(map(len, lines))
    comments = {name: f"  # {spec.meaning}: {describe_limits(name)}" for name, spec in field_specs().items()}
    return "".join(f"{line:<{width}}{comments.get(line.split()[0], '')}".rstrip() + "\n" for line in lines)


def _field_table() -> Iterator[str]:
    """Yield the lines of the table of fields: meaning, default, limits and cost of each."""
    yield "| field | meaning | default | limits | cost and benefit |"
    yield "|---|---|---|---|---|"
    for field in dataclasses.fields(Config):
        if spec := field_specs().get(field.name):
            values = f"{_value(field.default)} | {describe_limits(field.name)}"
            yield f"| `{field.name}` | {spec.meaning} | {values} | {spec.cost} |"
    yield ""


def _preset_table() -> Iterator[str]:
    """Yield the lines of the table of presets, one column for each: fields, multiplications, sizes of scratchpads."""
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
    """Spell a field's value as the tables do: true or false, numbers with thousands separators."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    print(config_markdown(), end="")
