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
from pathlib import Path
from typing import Any

import numpy as np

import celosia
from benchmarks.gain import cycles
from benchmarks.rows import ROOT, Request, Row, judged, skipped
from celosia.cache import cache_folder
from celosia.driver.host.oracle import open_session
from celosia.hw.spec.config import Config

NETWORKS = ROOT / "tests" / "compiler" / "transformer_family.py"
ENGINES: dict[str, dict[str, int]] = {"": {}, "softmax": {"softmax": 8}, "softmax, norm": {"softmax": 8, "norm": 8}}
"""Name of an accelerator -> the fields in which it differs from the Config that is asked for."""
ROUNDINGS = ("onnxruntime", "correct")
SMALL_LAUNCHES = 1
"""Launches of a network of which every operator runs on the accelerator."""


def rows(asked: Request) -> Iterator[Row]:
    """Yield a row for each network, and one of the reasons for more than one launch."""
    command = "python -m benchmarks family"
    try:
        family = _family()
    except ImportError as reason:
        yield skipped("family", "transformers as users write them", command, reason)
        return
    base, reasons = Config.load(asked.preset), Counter[str]()
    for name in asked.models or family.VARIANTS:
        asked.say(f"{name}: exporting and quantising")
        path = _quantised(family, name)
        (feed,) = family.feeds(family.VARIANTS[name], 1, seed=7)
        expected = open_session(path).run(None, feed)
        details: dict[str, Any] = {"config": base.name}
        for engines, fields in ENGINES.items():
            for rounding in ROUNDINGS:
                asked.say(f"{name}: {engines or 'no engines'}, {rounding}")
                program = celosia.compile(path, replace(base, **fields), rounding=rounding, check=False)
                outputs = celosia.Runtime(program, device="functional").run(feed).outputs
                key = f"{engines or 'plain'}{'' if rounding == ROUNDINGS[0] else ', rounded'}"
                apart = sum(
                    int(np.count_nonzero(a != b)) for a, b in zip(outputs.values(), expected, strict=True)
                )
                details[key] = f"{len(program.launches)}"
                details[f"{key} cycles"], details[f"{key} apart"] = cycles(program, asked.memory), apart
                left = _blocking(program)
                details[f"{key} reasons"] = left
        reasons.update(left)
        yield _row(name, command, details)
    yield Row("family/reasons", "why operators of networks with engines stay on the CPU", "", _listed(reasons), None, command)


def _family() -> Any:
    """Import the networks. Raises ImportError without PyTorch."""
    sys.path.append(str(NETWORKS.parent))
    import transformer_family

    return transformer_family


def _quantised(family: Any, name: str) -> Path:
    """Return the quantised model, from the cache if the networks have not changed since."""
    digest = hashlib.sha256(NETWORKS.read_bytes()).hexdigest()[:16]
    path = cache_folder() / "family" / digest / f"{name}.onnx"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = family.build(name, Path(folder))
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(made, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return path


