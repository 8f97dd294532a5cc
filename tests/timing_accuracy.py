"""Compare the timing model's cycles with the RTL's, for random programs on random Configs.

    PYTHONPATH=tests python -m timing_accuracy --configs 40 --programs 25 --seed 1

A program is accurate where the model's cycles differ from the RTL's by at most WITHIN. `python -m benchmarks timing`
records the share of such programs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from programs import TestProgram, random_config, random_program

from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.rtl.rtlsim import RtlDevice
from celosia.sim.timing import predict

WITHIN = 0.03
"""Largest error of an accurate program, as a share of the RTL's cycles."""
LENGTHS = (5, 20, 60, 150, 300)
"""Instructions of a program behind those that fill the scratchpads."""


class Comparison(NamedTuple):
    """Cycles of one program."""

    config: str
    seed: int
    rtl: int
    model: int

    @property
    def error(self) -> float:
        """Return the relative error of the model's cycles; positive if the model predicts too many."""
        return self.model / self.rtl - 1


def timing_program(cfg: Config, seed: int) -> TestProgram:
    """Draw a program with random length, alignment and ranges of fields."""
    rng = random.Random(f"timing {seed}")
    return random_program(
        cfg, rng.getrandbits(48), rng.choice(LENGTHS), rng.choice((None, 1)), rng.choice((0.0, 0.05)),
        rich=rng.random() < 0.5,
    )  # fmt: skip


def compare(
    cfg: Config, device: RtlDevice, seeds: Iterable[int], memory: MemoryModel = ZYNQ_HP
) -> Iterator[Comparison]:
    """Run the programs of `seeds` on the RTL and on the timing model."""
    device.use(memory)
    size = instruction_bytes(cfg)
    for seed in seeds:
        program = timing_program(cfg, seed)
        device.allocate(len(program.image))
        device.write(0, program.loaded())
        counters = device.run(program.instr_addr, len(program.instructions), 10_000_000)
        code = b"".join(word.to_bytes(size, "little") for word in program.words())
        assert counters.cycles is not None
        yield Comparison(cfg.name, seed, counters.cycles, predict(cfg, code, memory, program.instr_addr).cycles)


def summary(comparisons: list[Comparison]) -> dict[str, object]:
    """The share of accurate programs and the least accurate one, as plain data."""
    worst = max(comparisons, key=lambda comparison: abs(comparison.error))
    worst_program = f"program {worst.seed} on {worst.config}, {worst.model:,} cycles for {worst.rtl:,}"
    return {
        "programs": len(comparisons), "configs": len({comparison.config for comparison in comparisons}),
        "within": sum(abs(comparison.error) <= WITHIN for comparison in comparisons) / len(comparisons),
        "worst": f"{worst.error:+.1%}: {worst_program}",
    }  # fmt: skip


def main(
    configs: Annotated[int, typer.Option(min=1, help="Random Configs, each a simulator.")] = 40,
    programs: Annotated[int, typer.Option(min=1, help="Random programs on each.")] = 25,
    seed: Annotated[int, typer.Option(help="Another seed, other Configs and other programs.")] = 1,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Print the share of accurate programs; exit code 1 where it is below 99%."""
    comparisons: list[Comparison] = []
    for number in range(configs):
        cfg = random_config(1000 * seed + number)
        device = RtlDevice(cfg, quiet=True)
        first = 1000 * (1000 * seed + number)
        of_config = list(compare(cfg, device, range(first, first + programs)))
        comparisons += of_config
        worst = max((comparison.error for comparison in of_config), key=abs)
        print(f"{number + 1} of {configs}, {cfg.name}: largest error {worst:+.1%}", flush=True)
    result = summary(comparisons)
    print(f"{result['within']:.2%} of {len(comparisons)} programs within {WITHIN:.0%}; worst {result['worst']}")
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(int(result["within"] < 0.99))


if __name__ == "__main__":
    typer.run(main)
