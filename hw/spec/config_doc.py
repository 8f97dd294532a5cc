"""Prints docs/configs.md from the Config: `python -m celosia.hw.spec.config_doc > docs/configs.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from celosia.hw.spec.config import PRESETS, Config, limits
from celosia.hw.spec.scratchpads import scratchpads

FIELDS = {
    "batch": (
        "images in a step of gemm",
        "as many arrays, vector lanes and bytes of inp, acc, vin and out: it pays with as many images at once",
    ),
    "block_in": (
        "input channels in a step of gemm",
        "multipliers; entries of inp and wgt grow with it; layers of fewer channels leave rows of the array idle",
    ),
    "block_out": (
        "output channels in a step of gemm",
        "multipliers and vector lanes; entries of wgt, acc, vin, out and par grow with it",
    ),
    "bus_bytes": (
        "width of the AXI4 data bus",
        "aligners and queues of load, store and fetch; no board's port moves more than its memory: 8 on a Zynq-7000, "
        "16 on an UltraScale+",
    ),
    "inp_depth": ("entries of inp: activations for gemm", "block RAM; too few, and activations are loaded again"),
    "wgt_depth": ("entries of wgt: weights", "block RAM, the widest entries; too few, and weights are loaded again"),
    "acc_depth": ("entries of acc: int32 sums, in two banks", "block RAM; bounds the tile of outputs"),
    "vin_depth": ("entries of vin: the vector unit's operands", "block RAM; bounds residuals and depthwise tiles"),
    "out_depth": ("entries of out: results to be stored", "block RAM; bounds the tile of outputs"),
    "par_depth": ("entries of par: bias, multiplier and shift of channels", "LUTs or block RAM, 64 bits a channel"),
    "lut_count": ("tables of 256 bytes", "LUTs or block RAM in each lane"),
    "queue_depth": ("instructions waiting in front of each unit", "LUTs: the bits of an instruction each"),
    "token_bits": ("width of each semaphore between two units", "a few LUTs"),
    "packed": (
        "two products share a multiplication of 25 x 8 bits",
        "half of the array's DSP blocks on devices of Xilinx; false for others",
    ),
    "taps": (
        "entries of vin that the vector unit multiplies and adds in a cycle; 0: none",
        "multipliers in each lane, half of them in LUTs; depthwise convolutions run beside gemm, not in it",
    ),
    "tap_depth": ("entries of the scratchpad of their weights", "block RAM, only with taps"),
    "forward": (
        "the vector unit writes inp and vin, too",
        "285 LUTs of `pynq`; layers of a block keep their intermediates on chip",
    ),
    "residual_cycles": (
        "cycles that an entry with a residual takes",
        "saves hardware: 2 is 3,366 LUTs and 16 DSP blocks less of `pynq`, and half the rate of residual additions",
    ),
    "ports": (
        "read ports to memory; the second is for weights and parameters",
        "a lane of LOAD, and a port of the board; pays where activations and weights are wanted at once",
    ),
    "trace_depth": (
        "starts and ends of instructions that are kept of a run; 0: none",
        "block RAM, two blocks for 1,024 events; `celosia run --trace` writes the timeline of a board",
    ),
    "alu": (
        "the vector unit has ADD, MAX, MIN and SHR, and reductions by MIN",
        "with `int32` 250 LUTs a lane (1,018 of `tiny`); for kernels written by hand: no compiled program uses them",
    ),
    "int32": (
        "the vector unit writes acc, too, and LOAD brings int32 there, not int8 alone",
        "with `alu`, as above; likewise",
    ),
    "pump": (
        "products that a DSP block makes in a cycle, in a clock of twice the rate",
        "2: half of the array's DSP blocks, for flip-flops, on devices of Xilinx; others take no notice",
    ),
    "softmax": (
        "elements of a softmax that the vector unit adds up, and divides, in a cycle, up to block_out / 4, with "
        "taps = 2 and more block_out / 2; 0: none",
        "each an adder of floats and a divider, 775 LUTs, and a block RAM: 4 are 4,196 LUTs of `pynq`; with half of "
        "block_out attention alone is bound by its products; without, softmax runs on the CPU",
    ),
    "weight_bits": (
        "4, 2 or 1: LOAD expands weights of so many bits on their way to wgt, by one of 16 codebooks for each 32 of "
        "them; 8: it does not",
        "half a block RAM for each byte of the bus, and LUTs, 290 of `pynq` with 4; layers whose weights are such take "
        "33/64, 17/64 or 9/64 of the bus and of DRAM",
    ),
    "sums": (
        "the vector unit has BYTE: int32 sums leave it as they are, a byte at a time",
        "10 LUTs a lane, 160 of `pynq`; "
        "MatMulNBits at accuracy_level 4 runs on the accelerator, its float epilogue on the CPU",
    ),
    "norm": (
        "lanes of a LayerNorm or RMSNorm that the vector unit squares and adds up in a cycle, up to block_out; 0: none",
        "squares, sums and a root beside the vector unit's lanes, and 67 LUTs in each of these: 8 are 3,945 LUTs of "
        "`pynq` and no DSP block; a row takes `block_out / norm` cycles an entry, 32 at least, before its results; "
        "without, norms run on the CPU",
    ),
}
"""For each field what it is, and what it costs or brings."""

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
    notes = {name: f"  # {what}: {limits(name)}" for name, (what, _) in FIELDS.items()}
    return "".join(f"{line:<{width}}{notes.get(line.split()[0], '')}".rstrip() + "\n" for line in lines)


def _fields() -> Iterator[str]:
    yield "| field | what | default | limits | what it costs, and what it brings |"
    yield "|---|---|---|---|---|"
    for field in dataclasses.fields(Config):
        if field.name in FIELDS:
            what, cost = FIELDS[field.name]
            yield f"| `{field.name}` | {what} | {_value(field.default)} | {limits(field.name)} | {cost} |"
    yield ""


def _presets() -> Iterator[str]:
    names = [field.name for field in dataclasses.fields(Config) if field.name in FIELDS]
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
