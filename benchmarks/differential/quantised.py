"""What onnxruntime's quantiser makes of a float network, in all its formats."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

from benchmarks.differential.net import Array, Draw


class _Samples(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, feeds: list[dict[str, Array]]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        return next(self.feeds, None)


def quantised(draw: Draw, model: onnx.ModelProto, feeds: list[dict[str, Array]], form: str) -> onnx.ModelProto:
    """form: "qdq", "qoperator" or "dynamic". Raises whatever onnxruntime does where it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantised.onnx"
        logging.disable(logging.WARNING)
        quantize_static(
            model, path, _Samples(feeds), QuantFormat.QDQ, per_channel=draw.chance(), reduce_range=draw.chance(0.2)
        )
        return onnx.load(path)
