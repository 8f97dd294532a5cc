"""Compare every tensor of a model with onnxruntime's and with the float model's (`celosia compare`).

The report names the first tensor that differs, and the signal-to-noise ratio that quantisation loses at each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.importer import read, with_inputs_set
from celosia.compiler.graph.importing.dimensions import Shapes, is_quantised
from celosia.compiler.graph.importing.set_inputs import InputValues
from celosia.compiler.graph.quantized.exact_products import PRODUCTS
from celosia.compiler.graph.quantized.rounded import NORMS
from celosia.compiler.ops import op_spec
from celosia.compiler.program import InputError
from celosia.compiler.program.model import ROUNDINGS
from celosia.driver.accuracy.matching import Flow, match_tensors, rename_inputs
from celosia.driver.runtime import Runtime
from celosia.driver.workstation import oracle
from celosia.driver.workstation.specialise import OpenModel, fill_open_sizes
from celosia.driver.workstation.tools import require_tools
from celosia.hw.spec.config import Config

Array = NDArray[Any]
FLOAT_TOLERANCE = 1e-4
"""Float differences up to this share of the tensor's largest magnitude do not count: sums are added in another
order."""


class TensorComparison(dict[str, Any]):
    """Result of `compare`, as plain data with a short display."""

    def __repr__(self) -> str:
        differ = f"{len(self['tensors']):,} tensors, {self['different']:,} differ"
        return f"<TensorComparison of {self['model']}: {differ}; keys: {', '.join(self)}>"


def compare(
    model: str | Path, inputs: Mapping[str, Array], *, float_model: str | Path | None = None,
    config: str | Path | Config = "pynq", device: str = "functional", check: bool = True,
    rounding: str = ROUNDINGS[0], progress: Callable[[str], None] | None = None, shapes: Shapes | None = None,
    set: InputValues | None = None, **options: Any,
) -> TensorComparison:  # fmt: skip
    """Run an ONNX model here and under onnxruntime (with numerics.INT8), and compare all tensors that both compute.

    The Program returns its intermediate tensors (`compile(keep="all")`), so no block keeps them on chip.

    Args:
        model: Path of the ONNX model.
        inputs: One array for each input, by its name. Open sizes of the model are compiled for these arrays.
        float_model: Path of the model before it was quantised. Its tensors are matched by name, by structure or by
            order (see `matching.match_tensors`). None: no comparison with a float model.
        config: Accelerator, as `celosia.compile` takes it.
        device: Name of the device that runs the Program, as `Runtime` takes it.
        check: Compare the Program with the model, as `celosia.compile` does.
        rounding: "onnxruntime", "correct" or "bytes", as `celosia.compile` takes it. With "correct", a normalisation
            may differ by one step, and tensors computed from it by more; with "bytes", any tensor.
        progress: Function that is called with the name of each stage. None: no function is called.
        shapes: Shapes to compile for, by name, of inputs whose sizes a Program may leave open. None: no shape is fixed.
        set: Values of inputs that become constants, as `celosia.compile` takes them; both sides run that model.
        **options: Keyword arguments of the Runtime, for the device.

    Returns:
        A TensorComparison, a dictionary of plain data with these keys:

            - `model`, `float_model`: paths; `float_model` is None without one
            - `config`: fields of the Config
            - `device`: name of the device
            - `oracle`: onnxruntime's version
            - `rounding`: as passed
            - `tensors`: a row for each tensor, in the model's order, with the keys below
            - `different`: number of tensors that differ
            - `first`: the first tensor that differs and whose operands do not differ, or None
            - `rounded`: None, or with rounding="correct" or "bytes" the counts below. None of these count as different
            - `inside`: tensors that only one side computes, as they are inside an integer or fused operator
            - `unmatched`: None without a float model, else the tensors of the "model" and of the "float" model that
              have no counterpart in the other

            A row of `tensors`:

            - `name`, `dtype` and `shape` of the tensor
            - `op` and `node` that compute it
            - `different`: number of elements that differ
            - `largest`: largest difference, in steps of integers, or as a share of the largest float
            - `first`: first difference: index, computed, expected
            - `differs`: whether the tensor differs; for floats, beyond FLOAT_TOLERANCE
            - `float`: name of the float model's tensor, or None
            - `matched`: how that tensor was matched, or None
            - `sqnr_db`: signal-to-noise ratio against that tensor, in decibels
            - `lost_db`: decibels by which that is less than the worst operand's

            The counts of `rounded`:

            - `values`: number of values of normalisations
            - `apart`: number of these that are a step apart from onnxruntime's on the same bytes
            - `sums`: number of values of sums and averages that are a step apart
            - `behind`: number of tensors that have other values because they are computed from these
            - `between`: with rounding="bytes" only, number of tensors that have other values

    Raises:
        ModelError: The model is invalid, or `celosia.compile` does not support it. Its other errors are raised, too.
        ConfigError: The Config is invalid, or there is none of that name.
        InputError: An input does not fit the model, or the float model is quantised.
        OracleError: onnxruntime does not run a model.
        MissingLibrary: onnxruntime is not installed.
        ValueError: There is no device of that name.
        DeviceError: The run ended in an error status. The other errors of `Runtime` are raised, too.

    Examples:
        >>> import celosia
        >>> images, _, _ = celosia.models.demo_images()
        >>> report = compare(celosia.models.demo_model_path(), {"image": images[:1]}, config="tiny")
        >>> sum(row["different"] for row in report["tensors"]), report["first"]
        (0, None)
    """
    say = progress or (lambda stage: None)
    oracle.require_onnxruntime()
    require_tools(device, model)
    source = with_inputs_set(Path(model), set)
    proto = source if isinstance(source, onnx.ModelProto) else read(source)
    _require_float(float_model, model)
    open_model, given_shapes = OpenModel(source), shapes or {}
    sizes = open_model.shapes(inputs) if open_model.open else given_shapes
    shapes = {name: fill_open_sizes(shape, given_shapes.get(name)) for name, shape in sizes.items()}
    program = compile_model(
        source, config, progress=progress, keep="all", check=check, rounding=rounding, shapes=shapes
    )
    with Runtime(program, device, **options) as runtime:
        runtime.open()
        say(f"running on the {device} device")
        tensors = runtime.run(inputs, trace=False).tensors
    say("running under onnxruntime")
    expected = oracle.compute_tensors(source, inputs)
    graph, unmatched = ModelTensors(proto), None
    rows = _compare_tensors(graph, tensors, expected)
    rounded = None
    if rounding != ROUNDINGS[0]:
        rounded = _allow_rounding_differences(graph, rows, {**inputs, **tensors}, rounding == "bytes")
    if float_model is not None:
        say("running the float model")
        unmatched = add_float_comparison(proto, graph, rows, tensors, inputs, with_inputs_set(Path(float_model), set))
    return TensorComparison({
        "model": str(model), "config": program.config.to_dict(), "device": device, "oracle": oracle.version(),
        "float_model": None if float_model is None else str(float_model), "tensors": rows,
        "rounding": rounding, "rounded": rounded, "unmatched": unmatched, **_summarise_rows(graph, rows),
    })  # fmt: skip


def _require_float(float_model: str | Path | None, model: str | Path) -> None:
    """Raise InputError where the float model is quantised itself."""
    if float_model is not None and is_quantised(read(Path(float_model))):
        raise InputError(
            f"{float_model}, given as the float model, is quantised itself; give the model that {model} was made of, "
            "or leave --float out"
        )


def _compare_tensors(
    graph: ModelTensors, computed: Mapping[str, Any], expected: Mapping[str, Array]
) -> list[dict[str, Any]]:
    """Return one row of the report for each tensor that both sides have, in the model's order."""
    return [
        _compare_tensor(graph, name, computed[name], expected[name]) for name in graph.makers
        if name in computed and name in expected and isinstance(computed[name], np.ndarray)
    ]  # fmt: skip


ROUNDED_SUMS = ("Add", "AveragePool", *PRODUCTS)
"""Operators, besides normalisations, whose integer results may differ by one step where a sum lies on a rounding
tie."""


def _allow_rounding_differences(
    graph: ModelTensors, rows: list[dict[str, Any]], computed: Mapping[str, Any], floats_as_bytes: bool
) -> dict[str, int]:
    """Clear `differs` in rows whose values `rounding` lets differ from onnxruntime's, and count these values.

    floats_as_bytes: the Program was compiled with rounding="bytes", which replaces float tensors by bytes, so that any
    tensor may have other values.

    A value one step apart is no difference, nor is any tensor computed from it. A normalisation is compared with
    onnxruntime's result on the accelerator's own input bytes instead. Returns `rounded` of the report (see `compare`).
    """
    compared, allowed = {row["name"]: row for row in rows}, set[str]()
    counts = {"values": 0, "apart": 0, "sums": 0, "behind": 0}
    if floats_as_bytes:
        counts["between"] = sum(row["different"] > 0 for row in rows)
    for row in rows:
        follows_allowed = any(operand in allowed for operand in graph.operands(row["name"], compared))
        recomputed = _recompute_with_onnxruntime(graph, row["name"], computed) if row["op"] in NORMS else None
        if recomputed is not None:
            steps_apart = np.abs(recomputed.astype(np.int64) - computed[row["name"]])
            counts["values"] += recomputed.size
            counts["apart"] += int(np.sum(steps_apart))  # steps: equal to the number of values where `is_allowed`
            is_allowed = floats_as_bytes or int(steps_apart.max(initial=0)) <= 1
        else:
            is_sum = (
                row["op"].removeprefix("QLinear") in ROUNDED_SUMS
                and row["dtype"] in ("int8", "uint8")
                and row["largest"] == 1
            )
            counts["sums"] += row["different"] * (is_sum and not follows_allowed)
            counts["behind"] += row["different"] > 0 and follows_allowed
            is_allowed = follows_allowed or is_sum or floats_as_bytes
        if row["different"] and is_allowed:
            allowed.add(row["name"])
            row["differs"] = False
    return counts


def _recompute_with_onnxruntime(graph: ModelTensors, name: str, computed: Mapping[str, Any]) -> Array | None:
    """Recompute the quantised tensor `name` of a normalisation with onnxruntime from the accelerator's own input bytes.

    It runs a model of DequantizeLinear, the normalisation and QuantizeLinear only. None where `name` is not the result
    of such a sequence.
    """
    quantize, norm = graph.makers[name], graph.maker(name)
    dequantize = graph.makers.get(norm.input[0])
    x = dequantize.input[0] if dequantize is not None and dequantize.op_type == "DequantizeLinear" else ""
    if quantize.op_type != "QuantizeLinear" or dequantize is None or not isinstance(computed.get(x), np.ndarray):
        return None
    constant_nodes = [graph.makers[operand] for operand in norm.input[1:] if operand in graph.makers]
    nodes = [dequantize, *constant_nodes, norm, quantize]
    operands = {operand for node in nodes for operand in node.input}
    input_info, output_info = (
        helper.make_tensor_value_info(
            tensor, helper.np_dtype_to_tensor_dtype(computed[tensor].dtype), computed[tensor].shape
        )
        for tensor in (x, name)
    )
    initializers = [tensor for label, tensor in graph.constants.items() if label in operands and tensor.ByteSize()]
    norm_graph = helper.make_graph(nodes, "alone", [input_info], [output_info], initializers)
    model = helper.make_model(norm_graph, opset_imports=graph.opsets, ir_version=graph.ir_version)
    return oracle.run_session(oracle.open_session(model), {x: computed[x]})[name]


def _summarise_rows(graph: ModelTensors, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `different`, `first` and `inside` of the report (see `compare`).

    The first difference is in a tensor whose own operands do not differ: there the error begins.
    """
    compared = {row["name"]: row for row in rows}
    firsts = (
        row["name"] for row in rows
        if row["differs"] and not any(compared[operand]["differs"] for operand in graph.operands(row["name"], compared))
    )  # fmt: skip
    return {
        "different": sum(row["differs"] for row in rows), "first": next(firsts, None),
        "inside": [name for name in graph.makers if name not in graph.constants and not graph.is_known(name, compared)],
    }  # fmt: skip


class ModelTensors:
    """An ONNX model's tensors with the nodes that compute them, and the real values that quantised integers stand for.

    makers: the node that computes each tensor, by the tensor's name, in the model's order. constants: initializers, by
    name; a tensor that nodes compute from constants has an empty one.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.makers = {name: node for node in proto.graph.node for name in node.output if name}
        self.constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        self.opsets, self.ir_version = proto.opset_import, proto.ir_version
        for name, node in self.makers.items():
            if node.op_type == "Constant" or all(name in self.constants for name in node.input if name):
                self.constants.setdefault(name, onnx.TensorProto())
        self.meanings: dict[str, tuple[str, float, float]] = {}
        """By quantised tensor: the name of the float tensor that it stands for, scale and zero point."""
        self._scaled: dict[str, tuple[float, float]] = {}
        """By result of an integer operator: scale and zero point."""
        for node in proto.graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                scale, zero = self._scalar_constant(node, 1), self._scalar_constant(node, 2)
                real, integers = (node.input[0], node.output[0])[:: 1 if node.op_type == "QuantizeLinear" else -1]
                if scale is not None and zero is not None and (
                    node.op_type == "QuantizeLinear" or integers not in self.meanings
                ):  # fmt: skip
                    self.meanings[integers] = real, scale, zero
            elif (spec := op_spec(node.op_type)).scale_input is not None and spec.zero_point_input is not None:
                scale, zero = (
                    self._scalar_constant(node, spec.scale_input),
                    self._scalar_constant(node, spec.zero_point_input),
                )
                if scale is not None and zero is not None:
                    self._scaled[node.output[0]] = scale, zero

    def _scalar_constant(self, node: onnx.NodeProto, input_number: int) -> float | None:
        """Return the value of the scalar constant that is input number `input_number`; 0 where it is left out.

        None where the input is no constant, or has several elements.
        """
        if len(node.input) <= input_number or not node.input[input_number]:
            return 0.0
        tensor = self.constants.get(node.input[input_number])
        if tensor is None or not tensor.ByteSize():
            return None
        array = numpy_helper.to_array(tensor)
        return float(array.reshape(-1)[0]) if array.size == 1 else None

    def maker(self, name: str) -> onnx.NodeProto:
        """Return the operator that computes `name`; for a result of QuantizeLinear, the operator before that."""
        node = self.makers[name]
        return self.makers.get(node.input[0], node) if node.op_type == "QuantizeLinear" else node

    def operands(self, name: str, known_tensors: Mapping[str, Any]) -> Iterator[str]:
        """Yield the nearest tensors in `known_tensors` from which `name` is computed: operands, or operands of these,
        and so on."""
        pending, visited = list(self.makers[name].input) if name in self.makers else [], {name}
        while pending:
            operand = pending.pop()
            if operand in known_tensors:
                yield operand
            elif operand in self.makers and operand not in visited:
                pending += self.makers[operand].input
            visited.add(operand)

    def is_known(self, name: str, compared: Mapping[str, Any]) -> bool:
        """Whether `name` is in `compared`, or its quantised or dequantised form is; if not, `inside` lists it."""
        return name in compared or any(
            integers in compared and (name == real or integers in self.makers[name].input[:1])
            for integers, (real, _, _) in self.meanings.items()
        )

    def dequantise(self, name: str, array: Array) -> tuple[str, Array] | None:
        """Return (the name of the float tensor that `array` stands for, its values); None for other integers."""
        if array.dtype.kind == "f":
            return name, array.astype(np.float64)
        if name in self.meanings:
            real, scale, zero = self.meanings[name]
        elif name in self._scaled:
            real, (scale, zero) = name, self._scaled[name]
        else:
            return None
        return real, (array.astype(np.float64) - zero) * scale


def _compare_tensor(graph: ModelTensors, name: str, computed: Array, expected: Array) -> dict[str, Any]:
    """Return the row of the report for one tensor (see `compare`)."""
    node = graph.maker(name)
    row = {
        "name": name, "op": node.op_type, "node": node.name,
        "dtype": computed.dtype.name, "shape": list(computed.shape),
        "float": None, "matched": None, "sqnr_db": None, "lost_db": None,
    }  # fmt: skip
    expected = np.asarray(expected)
    if computed.shape != expected.shape or computed.dtype != expected.dtype:
        kind = f"{expected.dtype}{list(expected.shape)}"
        return row | {"different": computed.size, "largest": None, "first": [None, None, kind], "differs": True}
    unequal = (computed != expected) & ~((computed != computed) & (expected != expected))  # NaN is NaN
    unequal_indices = np.argwhere(unequal)
    largest, differs = largest_difference(computed, expected) if len(unequal_indices) else (0.0, False)
    first = None
    if len(unequal_indices):
        index = tuple(int(k) for k in unequal_indices[0])
        first = [list(index), computed[index].item(), expected[index].item()]
    return row | {"different": len(unequal_indices), "largest": largest, "first": first, "differs": differs}


def largest_difference(computed: Array, expected: Array) -> tuple[float | None, bool]:
    """Return (the largest difference, whether it counts as different).

    The difference of floats is a share of the largest expected magnitude and counts above FLOAT_TOLERANCE; that of
    integers is in steps and always counts. It is None where it is not finite, or the values are no numbers. Equal
    infinities do not differ, nor do two NaN.
    """
    if computed.dtype.kind not in "iufb":
        return None, True
    a, b = (array.astype(np.float64) for array in (computed, expected))
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if not (np.isfinite(a[unequal]).all() and np.isfinite(b[unequal]).all()):
        return None, True
    largest = float(np.max(np.abs(a[unequal] - b[unequal]), initial=0.0))
    if computed.dtype.kind != "f" or not largest:
        return largest, computed.dtype.kind != "f"
    scale = float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0))
    return (largest / scale, largest / scale > FLOAT_TOLERANCE) if scale else (None, True)


def add_float_comparison(
    proto: onnx.ModelProto, graph: ModelTensors, rows: list[dict[str, Any]], computed: Mapping[str, Array],
    inputs: Mapping[str, Array], float_model: Path | onnx.ModelProto,
) -> dict[str, list[str]]:  # fmt: skip
    """Fill the columns of `rows` that compare with the float model: `float`, `matched`, `sqnr_db` and `lost_db`.

    computed: the quantised model's tensors by name. Returns the tensors of either model without a counterpart in the
    other, as "model" and "float".
    """
    exact_proto = float_model if isinstance(float_model, onnx.ModelProto) else read(float_model)
    quantised, exact = Flow(proto), Flow(exact_proto)
    float_inputs = rename_inputs(quantised, exact, inputs)
    floats = {**oracle.compute_tensors(float_model, float_inputs, optimised=False), **float_inputs}
    real_values = {
        row["name"]: value
        for row in rows
        if (value := graph.dequantise(row["name"], computed[row["name"]])) is not None
    }
    values = {quantised.source(name): array for name, array in real_values.values()}
    matching = match_tensors(quantised, exact, values, {k: v for k, v in floats.items() if v.dtype.kind == "f"})
    sqnr_db_of: dict[str, float] = dict.fromkeys(inputs, np.inf)
    for row in rows:
        if row["name"] in real_values:
            name, array = real_values[row["name"]]
            row["float"], row["matched"] = matching.counterparts.get(quantised.source(name), (None, None))
            if row["float"] is not None:
                sqnr_db_of[row["name"]] = sqnr(floats[row["float"]], array)
    for row in rows:
        if row["name"] in sqnr_db_of:
            own_sqnr = sqnr_db_of[row["name"]]
            worst_operand = min(
                (sqnr_db_of[operand] for operand in graph.operands(row["name"], sqnr_db_of)), default=np.inf
            )
            row["sqnr_db"] = own_sqnr if np.isfinite(own_sqnr) else None
            row["lost_db"] = worst_operand - own_sqnr if np.isfinite(worst_operand) and np.isfinite(own_sqnr) else None
    return {"model": [name for name in real_values if name not in sqnr_db_of], "float": matching.unmatched}


def sqnr(exact: Array, computed: Array) -> float:
    """Return the signal-to-quantisation-noise ratio in decibels: the power of `exact` over that of the error.

    Infinite where there is no error.

    >>> sqnr(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    20.0
    """
    signal, error = exact.astype(np.float64), exact.astype(np.float64) - computed.astype(np.float64)
    power, lost = float((signal**2).sum()), float((error**2).sum())
    if not lost:
        return np.inf
    return 10 * float(np.log10(power / lost)) if power and lost < np.inf else -np.inf
