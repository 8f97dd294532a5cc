"""One model of a campaign, with inputs, and how it is compiled."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.hw.spec.config import Config

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """kind: what drew it, as "qdq". feeds: inputs by name, for one run each. accelerator: of `celosia.compile`."""

    kind: str
    model: onnx.ModelProto
    feeds: tuple[dict[str, Array], ...]
    config: Config
    accelerator: bool = True

    def with_model(self, model: onnx.ModelProto) -> Case:
        """Another model, with those of the inputs that it has."""
        names = {value.name for value in model.graph.input}
        feeds = tuple({name: array for name, array in feed.items() if name in names} for feed in self.feeds)
        return replace(self, model=model, feeds=feeds)

    def save(self, stem: Path) -> None:
        """Write `stem`.onnx, `stem`.npz (the inputs, as "run-number") and `stem`.json (Config)."""
        onnx.save(self.model, _beside(stem, ".onnx"))
        numbers = {value.name: number for number, value in enumerate(self.model.graph.input)}
        arrays = {
            f"{run}-{numbers[name]}": array for run, feed in enumerate(self.feeds) for name, array in feed.items()
        }
        np.savez(_beside(stem, ".npz"), **arrays)  # type: ignore[arg-type]
        about = {
            "kind": self.kind, "accelerator": self.accelerator, "runs": len(self.feeds),
            "config": self.config.to_dict(),
        }  # fmt: skip
        _beside(stem, ".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(stem: Path) -> Case:
        """The case that was written to files whose names begin with `stem`."""
        about = json.loads(_beside(stem, ".json").read_text(encoding="utf-8"))
        model = onnx.load(_beside(stem, ".onnx"))
        feeds: list[dict[str, Array]] = [{} for _ in range(about["runs"])]
        with np.load(_beside(stem, ".npz")) as arrays:
            for key in arrays:
                run, number = map(int, key.split("-"))
                feeds[run][model.graph.input[number].name] = arrays[key]
        return Case(about["kind"], model, tuple(feeds), Config.from_dict(about["config"]), about["accelerator"])


def _beside(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)
