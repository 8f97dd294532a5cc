"""Print docs/configs.md from the declarations of Config: `python -m celosia.hw.spec.config_doc > docs/configs.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from celosia.hw.spec.config import PRESETS, Config, describe_limits, field_specs
from celosia.hw.spec.scratchpads import scratchpads

HEAD = """\
# Configs

A Config holds the parameters of the accelerator that a user chooses. Commands take it as the name of a preset, or as a
TOML or JSON file. A file need not list all fields: those that it leaves out have the defaults of the table below, not
the values of `pynq`. To start from `pynq`, write it to a file and change that:

    celosia configs                         # list the presets
    celosia configs pynq > mine.toml        # write one to change

To compare Configs, list the values of some fields. This command compiles a model for each combination, and prints its
cycles and its FPGA resources:

    celosia sweep model.onnx --set inp_depth=1024,4096 --set bus_bytes=8,16

DSP blocks and block RAM follow from the Config. LUTs and flip-flops are counts of Yosys if `celosia bitstream report`
has counted the Config. Else they are estimates; [bitstreams.md](bitstreams.md) says how good they are.

`python -m celosia.hw.spec.config_doc` prints this page from `hw/spec/config.py`; do not edit it. LOAD, GEMM and the
scratchpads (`inp`, `wgt`, ...) are in the [glossary](glossary.md#the-accelerator).
"""
"""Text before the table of fields."""

RULES = """\
Some fields restrict each other. `block_in` and `block_out` differ by a factor of 8 at most, `forward` needs
`block_in` ≥ `block_out`, and `residual_cycles` is at most batch · block_out. `softmax` and `norm` need `batch = 1`. The
error for a Config that breaks a rule names the field, its value, and what is possible.
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
    sizes = [{pad.name: _kilobytes(pad.bytes) for pad in scratchpads(cfg).values()} for cfg in PRESETS.values()]
    for name in sizes[0]:
        yield f"| {name}, kB | {' | '.join(size.get(name, '-') for size in sizes)} |"
    yield ""


def _kilobytes(size: int) -> str:
    """Spell a number of bytes in kB: whole from 100 on, else with up to three digits.

    >>> _kilobytes(512), _kilobytes(4 << 20)
    ('0.5', '4,096')
    """
    return f"{size / 1024:,.0f}" if size >= 100 << 10 else f"{size / 1024:.3g}"


def _value(value: object) -> str:
    """Spell a field's value as the tables do: true or false, numbers with thousands separators."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    print(config_markdown(), end="")
