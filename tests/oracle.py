"""Open sessions of onnxruntime, whose results are the expected ones in all tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import onnx
import pytest

from celosia.driver.workstation.oracle import EXACT, adds_in_16_bits

ort = pytest.importorskip("onnxruntime")


def opened(
    model: onnx.ModelProto | bytes | str | Path, *, int8: bool = False, optimised: bool = True,
    without: Sequence[str] = (), save: Path | None = None, **entries: str,
) -> ort.InferenceSession:  # fmt: skip
    """Open a session of onnxruntime with one thread, which prints no messages.

    int8: QDQ patterns become integer operators. optimised: False runs the graph without optimisations.
    without: names of optimisations to leave out. save: path for the optimised model. entries: more session settings.
    """
    settings = {
        f"session.{name}": value for name, value in (({"qdqisint8allowed": "1"} if int8 else {}) | entries).items()
    }
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model

    def session(settings: dict[str, str]) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        for name, value in settings.items():
            options.add_session_config_entry(name, value)
        if not optimised:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if save is not None:
            options.optimized_model_filepath = str(save)
        return ort.InferenceSession(
            data, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
        )

    if adds_in_16_bits():
        with suppress(Exception):  # onnxruntime has no exact kernels for a model with int8 activations
            return session(settings | {EXACT: "1"})
    return session(settings)
