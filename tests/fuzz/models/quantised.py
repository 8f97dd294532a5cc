"""Quantise a float network with onnxruntime's quantiser, in all its formats."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from celosia.driver.workstation.oracle import OracleError
from fuzz.models.net import Array, Draw

onnxruntime.set_default_logger_severity(4)  # silences the quantiser's own sessions
FORMS = ("qdq", "qoperator", "dynamic")
VNNI = (
    any("vnni" in line for line in Path("/proc/cpuinfo").read_text().splitlines()) if Path("/proc").exists() else False
)
"""True if the CPU has VNNI. Without it, onnxruntime's products of uint8 and 8-bit weights saturate."""


class _Samples(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, feeds: Sequence[dict[str, Array]]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        return next(self.feeds, None)


def quantised(draw: Draw, model: onnx.ModelProto, feeds: Sequence[dict[str, Array]], form: str) -> onnx.ModelProto:
    """Quantise `model` in one of FORMS, calibrated with `feeds`. Raise OracleError if the quantiser fails."""
    per_channel, reduce_range = draw.chance(), draw.chance(0.2)
    weights = draw.choice((QuantType.QInt8, QuantType.QInt8, QuantType.QUInt8))
    ops = ["MatMul"] if draw.chance(0.1) else None
    excluded = [node.name for node in model.graph.node if draw.chance(0.1)] if draw.chance(0.2) else []
    options: dict[str, Any] = {"WeightSymmetric": draw.chance(0.7)}
    with tempfile.TemporaryDirectory() as folder, _silent():
        path = Path(folder) / "quantised.onnx"
        try:
            if form == "dynamic":
                quantize_dynamic(
                    model, path, ops, per_channel, reduce_range or not VNNI, weights, nodes_to_exclude=excluded,
                    extra_options=options | {"MatMulConstBOnly": draw.chance()},
                )  # fmt: skip
                return onnx.load(path)
            activations = _activations(draw, form)
            options |= _options(draw, form)
            quantize_static(
                model, path, _Samples(feeds), QuantFormat.QDQ if form == "qdq" else QuantFormat.QOperator, ops,
                per_channel, reduce_range or (not VNNI and activations != QuantType.QInt8), activations, weights,
                nodes_to_exclude=excluded, calibrate_method=CalibrationMethod.MinMax, extra_options=options,
            )  # fmt: skip
        except Exception as error:  # the quantiser raises many classes
            raise OracleError(f"onnxruntime cannot quantise the model: {error}") from None
        return onnx.load(path)


def _activations(draw: Draw, form: str) -> QuantType:
    kinds = [QuantType.QInt8, QuantType.QUInt8] * 3
    return draw.choice([*kinds, QuantType.QInt16, QuantType.QUInt16] if form == "qdq" else kinds)


def _options(draw: Draw, form: str) -> dict[str, Any]:
    flags = {"ActivationSymmetric": 0.4, "ForceQuantizeNoInputCheck": 0.2, "MatMulConstBOnly": 0.3}
    if form == "qdq":
        flags |= {
            "AddQDQPairToWeight": 0.15, "DedicatedQDQPair": 0.2, "QDQKeepRemovableActivations": 0.2,
            "QuantizeBias": 0.85, "UseQDQContribOps": 0.15,
        }  # fmt: skip
    return {name: draw.chance(share) for name, share in flags.items()}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress the quantiser's warnings."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
