"""Rows of `family`: launches, bytes and cycles of the small networks of tests/compiler/transformer_family.py.

Each is compiled for three accelerators and the two roundings of normalisations, runs once, and is compared with
onnxruntime. A last row lists why operators stay on the CPU, sorted by the launches in whose way they are.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import celosia
from benchmarks.gain import cycles
from benchmarks.rows import ROOT, Request, Row, different, judged, skipped
from celosia.cache import cache_folder
from celosia.driver.workstation.oracle import open_session
from celosia.hw.spec.config import Config

NETWORKS = ROOT / "tests" / "compiler" / "transformer_family.py"
ENGINES: dict[str, dict[str, Any]] = {
    "no engine": {}, "softmax": {"softmax": 8}, "softmax and norm": {"softmax": 8, "norm": 8}
}  # fmt: skip
"""Name of an accelerator -> the fields in which it differs from the Config that is asked for."""
ROUNDINGS = ("onnxruntime", "correct")
REASONS = 12
"""Reasons that are listed, those in the way of most launches."""


def rows(asked: Request) -> Iterator[Row]:
    """Yield a row for each network, and one of the reasons why operators of networks with several launches stay on the
    CPU."""
    command = "python -m benchmarks family"
    try:
        family = _family()
    except ImportError as reason:
        yield skipped("family", "transformers as users write them", command, reason)
        return
    base, launches_of = Config.load(asked.preset), Counter[str]()
    for name in asked.models or family.VARIANTS:
        asked.say(f"{name}: exporting and quantising")
        path = _quantised(family, name)
        (feed,) = family.feeds(family.VARIANTS[name], 1, seed=7)
        expected = open_session(path).run(None, feed)
        details: dict[str, Any] = {"config": base.name, "different": 0}
        for engines, rounding in product(ENGINES, ROUNDINGS):
            asked.say(f"{name}: {engines}, {rounding}")
            program = celosia.compile(path, replace(base, **ENGINES[engines]), rounding=rounding, check=False)
            outputs = celosia.Runtime(program, device="functional").run(feed).outputs.values()
            apart = sum(map(different, outputs, expected))
            key = f"{engines}, {rounding}"
            details[key] = f"{len(program.launches)} launches, {cycles(program, asked.memory):,} cycles"
            if rounding == ROUNDINGS[0]:
                details["different"] += apart
            causes = {row["reason"].split(";")[0] for row in program.placements if row["place"] == "cpu"}
        details["launches"] = len(program.launches)
        for cause in causes:
            launches_of[cause] += len(program.launches) - 1
        target = "launches <= 1, different <= 0"
        command_of = f"{command} --models {name}"
        yield judged(f"family/{name}", f"{name}, with engines and correct rounding", command_of, details, target)
    listed = "; ".join(f"{count}: {reason}" for reason, count in launches_of.most_common(REASONS) if count)
    yield Row("family/reasons", "launches beyond the first, by reason on the CPU", "", listed, None, command)


def _family() -> Any:
    """Import the networks. Raises ImportError without PyTorch."""
    sys.path.append(str(NETWORKS.parent))
    return import_module(NETWORKS.stem)


def _quantised(family: Any, name: str) -> Path:
    """Return the quantised model, from the cache if the networks have not changed since."""
    digest = hashlib.sha256(NETWORKS.read_bytes()).hexdigest()[:16]
    path = cache_folder() / "family" / digest / f"{name}.onnx"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            quantised = family.build(name, Path(folder))
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(quantised, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return path
