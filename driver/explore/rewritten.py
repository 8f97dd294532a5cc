"""Models that `celosia optimise` has rewritten first, for the Config that a board's preset has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from celosia.compiler.program.files import replacing
from celosia.driver.explore.records import ExploreError
from celosia.driver.explore.subject import ExploredModel
from celosia.hw.config import Config


def rewritten(
    models: str | Path | Sequence[str | Path], cfg: Config, seconds: float, folder: str | Path | None,
    progress: Callable[[str], None],
) -> Sequence[str | Path]:  # fmt: skip
    """Files with the models after a search of so many seconds each, in `folder`, where the next run finds them; for 0
    seconds the models themselves.

    ExploreError without a folder; else what `optimise` raises, and OutputError."""
    given = [models] if isinstance(models, (str, Path)) else list(models)
    if not seconds:
        return given
    from celosia.driver.optimise import optimise

    if folder is None:
        raise ExploreError("models that are optimised first are written to the folder of points; give one")
    found: list[str | Path] = []
    for path in given:
        subject = ExploredModel.of(path)
        told = hashlib.sha256(f"{subject.digest} {cfg.digest} {seconds:g}".encode()).hexdigest()[:12]
        made = Path(folder) / "optimised" / told / f"{subject.name}.onnx"
        if not made.exists():
            progress(f"optimising {subject.name}")
            model = optimise(path, cfg, budget=seconds).model
            made.parent.mkdir(parents=True, exist_ok=True)
            with replacing(made) as temporary:
                temporary.write_bytes(model.SerializeToString(deterministic=True))
        found.append(made)
    return found
