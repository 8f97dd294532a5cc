"""Compare many random models with onnxruntime; prints JSON, and continues after a difference or an error.

python tests/cosim/many_models.py --seeds 1,2 --models 250
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from agreement import CONFIGS, ONE_STEP, Array, compare, expected, feed_of
from small_models import Builder, detector, models, twins

from celosia.sim.functional.fsim import FunctionalDevice

NETWORKS = {"detector": detector, "twins": twins}


@dataclass
class Count:
    """Counts of compared models. failures: Config, seed, number of the model, and the fault."""

    models: int = 0
    programs: int = 0
    launches: int = 0
    bytes: int = 0
    different: int = 0
    float_outputs: int = 0
    steps: float = 0
    failures: list[str] = field(default_factory=list)

    def add(self, label: str, b: Builder) -> None:
        """Compile and run the model of `b` for every Config, and compare with onnxruntime."""
        model = b.model()
        self.run(label, b, expected(model, feed_of(model)))

    def run(self, label: str, b: Builder, wanted: Sequence[Array]) -> None:
        """Compile and run the model of `b` for every Config, and compare with `wanted`, onnxruntime's outputs."""
        self.models += 1
        for config in CONFIGS:
            try:
                self._compare(f"{label} on {config}", config, b, wanted)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                why = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {error}"
                self.failures.append(f"{label} on {config}: {why}")
            self.programs += 1

    def _compare(self, label: str, config: str, b: Builder, wanted: Sequence[Array]) -> None:
        result = compare(b, FunctionalDevice(CONFIGS[config]), wanted)
        self.launches += len(result.program.launches)
        self.bytes += result.bytes
        self.different += sum(result.different.values())
        self.float_outputs += len(result.steps)
        self.steps = max(self.steps, *result.steps.values(), 0)
        if result.different or any(gap > ONE_STEP for gap in result.steps.values()):
            self.failures.append(f"{label}: {result.different} bytes, {result.steps} steps differ")


def random_models(count: Count, number: int, models_of_each: int) -> None:
    drawn = 0

    @seed(number)
    @settings(
        max_examples=models_of_each, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(b=models())
    def try_model(b: Builder) -> None:
        nonlocal drawn
        drawn += 1
        count.add(f"seed {number}, model {drawn}", b)

    try_model()


def networks(count: Count, name: str) -> None:
    """Compare a network in both forms, with and without names."""
    for form in ("qdq", "qoperator"):
        for names in ("none", "same", "hostile"):
            for number in range(2):
                b = Builder(form, np.int8, seed=number)
                b.node_names, b.hostile_tensors, b.shared = names, names == "hostile", bool(number)
                NETWORKS[name](b)
                count.add(f"{name}, {form}, names {names}, {number}", b)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="1", help="of the random models, with commas between")
    parser.add_argument("--models", type=int, default=250, help="of each seed")
    parser.add_argument("--network", choices=NETWORKS, help="instead of random models")
    args = parser.parse_args()
    count = Count()
    if args.network:
        networks(count, args.network)
    else:
        for number in args.seeds.split(","):
            random_models(count, int(number), args.models)
    print(json.dumps(asdict(count)))


if __name__ == "__main__":
    main()
