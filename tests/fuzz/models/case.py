"""A random model of a campaign, with its inputs and options of the compilation."""

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
    """A model to compile and run.

    kind: how it was drawn, such as "qdq". feeds: inputs by name, for one run each. accelerator: of `celosia.compile`.
    """

    kind: str
    model: onnx.ModelProto
    feeds: tuple[dict[str, Array], ...]
    config: Config
    accelerator: bool = True

    def with_model(self, model: onnx.ModelProto) -> Case:
        """Return the case with another model, and those of the inputs that this model has."""
        names = {value.name for value in model.graph.input}
        feeds = tuple({name: array for name, array in feed.items() if name in names} for feed in self.feeds)
        return replace(self, model=model, feeds=feeds)

    def save(self, stem: Path) -> None:
        """Write `stem`.onnx, `stem`.npz (the inputs, as "run-number") and `stem`.json (Config)."""
        onnx.save(self.model, _with_ending(stem, ".onnx"))
        numbers = {value.name: number for number, value in enumerate(self.model.graph.input)}
        arrays = {
            f"{run}-{numbers[name]}": array for run, feed in enumerate(self.feeds) for name, array in feed.items()
        }
        np.savez(_with_ending(stem, ".npz"), **arrays)  # type: ignore[arg-type]
        about = {
            "kind": self.kind, "accelerator": self.accelerator, "runs": len(self.feeds),
            "config": self.config.to_dict(),
        }  # fmt: skip
        _with_ending(stem, ".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(stem: Path) -> Case:
        """Read the case from files whose names begin with `stem`."""
        about = json.loads(_with_ending(stem, ".json").read_text(encoding="utf-8"))
        model = onnx.load(_with_ending(stem, ".onnx"))
        feeds: list[dict[str, Array]] = [{} for _ in range(about["runs"])]
        with np.load(_with_ending(stem, ".npz")) as arrays:
            for key in arrays:
                run, number = map(int, key.split("-"))
                feeds[run][model.graph.input[number].name] = arrays[key]
        return Case(about["kind"], model, tuple(feeds), Config.from_dict(about["config"]), about["accelerator"])


def _with_ending(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)
