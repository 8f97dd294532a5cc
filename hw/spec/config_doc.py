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

REWORDED = {
    "bytes of inp, acc, vin and out grow with it; pays where as many images run at once": (
        "bytes of inp, acc, vin and out grow with it; it pays if that many images run at the same time"
    ),
    "multipliers; entries of inp and wgt grow with it; layers of fewer channels": (
        "multipliers and entries of inp and wgt grow with it; layers with fewer channels"
    ),
    "multipliers and vector lanes; entries of": "multipliers, vector lanes, and entries of",
    "aligners and queues of load, store and fetch; no board's port moves more than its memory: 8 on a Zynq-7000, 16 on "
    "an UltraScale+": (
        "aligners and queues of load, store and fetch grow with it; a board's memory port has 8 bytes on a Zynq-7000 "
        "and 16 on an UltraScale+; a wider bus is for simulation"
    ),
    "block RAM; too few, and activations are loaded again": (
        "costs block RAM; with too few entries, activations are loaded more than once"
    ),
    "block RAM, the widest entries; too few, and weights are loaded again": (
        "costs block RAM, more for each entry than other scratchpads; with too few entries, weights are loaded more "
        "than once"
    ),
    "block RAM; bounds": "costs block RAM; limits the size of",
    "LUTs or block RAM, 64 bits a channel": "costs LUTs or block RAM, 64 bits for each channel of an entry",
    "LUTs or block RAM in each lane": "costs LUTs or block RAM in each lane of the vector unit",
    "LUTs: the bits of an instruction each": "costs LUTs, in which each place holds a whole instruction",
    "a few LUTs": "costs a few LUTs",
    "multipliers in each lane, half": "costs multipliers in each lane, half",
    "block RAM, only with taps": "costs block RAM if `taps` is not 0",
    "285 LUTs of `pynq`": "costs 285 LUTs on `pynq`",
    "saves hardware: 2 is 3,366 LUTs and 16 DSP blocks less of `pynq`, and half the rate": (
        "2 saves 3,366 LUTs and 16 DSP blocks on `pynq`, and halves the rate"
    ),
    "a second channel of LOAD, and a port of the board; pays where": (
        "2 costs a second channel of LOAD and a memory port of the board; it pays if"
    ),
    "two block RAMs for 1,024": "costs two block RAMs for 1,024",
    "with `int32` 250 LUTs a lane (1,018 of `tiny`)": "costs, with `int32`, 250 LUTs a lane (1,018 on `tiny`)",
    "LUTs, see `alu`": "costs LUTs, see `alu`",
    "for each element a float adder and a divider, 775 LUTs, and a block RAM: 4 are 4,196 LUTs of `pynq`; with": (
        "each element costs a float adder and a divider, 775 LUTs, and a block RAM; 4 cost 4,196 LUTs on `pynq`; with"
    ),
    "with 0 softmax runs": "with 0, softmax runs",
    "half a block RAM for each byte of the bus, and LUTs, 290 of `pynq` with 4": (
        "costs half a block RAM for each byte of the bus, and LUTs: 290 on `pynq` with 4"
    ),
    "10 LUTs a lane, 160 of `pynq`; MatMulNBits": "costs 10 LUTs a lane, 160 on `pynq`; with it, MatMulNBits",
    "squarers, adders and a square root, and 67 LUTs in each lane of the vector unit: 8 are 3,945 LUTs of `pynq` and "
    "no DSP block; before its results a row takes `block_out / norm` cycles an entry, 32 at least; with 0 norms run": (
        "costs squarers, adders, a square root, and 67 LUTs in each lane of the vector unit; 8 cost 3,945 LUTs and no "
        "DSP block on `pynq`; the sums of a row take `block_out / norm` cycles an entry, and at least 32 cycles; with "
        "0, norms run"
    ),
}
"""Words of the declared costs, and the words that the page has in their place.

The digest of the hardware covers the strings of the declarations. Their words therefore change only together with the
hardware: a driver would refuse a bitstream that differs from its sources in words alone.
"""


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
            cost = spec.cost
            for declared, printed in REWORDED.items():
                cost = cost.replace(declared, printed)
            yield f"| `{field.name}` | {spec.meaning} | {values} | {cost} |"
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
