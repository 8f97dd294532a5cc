"""Parts of quantising that are for decoders: missing inputs of samples, the choice of products, perplexity."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Kind
from celosia.driver.data.calibration import CalibrationError, Input
from celosia.driver.generate.writer import GraphWriter

Array = NDArray[Any]
TOKENS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
"""Names that exporters give to inputs and outputs of all decoders."""
CACHES = "past"
"""Beginning of the names of caches: past_key_values.0.key, past_key_self_0, past_0."""
EPSILON = 1e-12
"""Epsilon of operators in SKIP_NORMS that have no such attribute."""
PRODUCTS = ("MatMul", "Gemm")
"""The operators that `operators="products"` quantises."""


def is_decoder(inputs: Iterable[Input]) -> bool:
    """Whether a model takes a cache: floats of four or five axes, whose name begins with CACHES."""
    return any(_is_cache(tensor) for tensor in inputs)


def _is_cache(tensor: Input) -> bool:
    """Whether an input is a cache of keys or values."""
    return tensor.name.startswith(CACHES) and tensor.dtype.kind == "f" and len(tensor.shape) in (4, 5)


# Samples --------------------------------------------------------------------------------------------------------


def complete_decoder_samples(source: str, arrays: Mapping[str, Array], inputs: Sequence[Input]) -> dict[str, Array]:
    """Return `arrays` of samples, with missing inputs of a decoder besides TOKENS [n, steps] filled in.

    Caches float [n, heads, past, size] are empty, MASK int64 [n, past + steps] is all ones, POSITIONS int64 [n, steps]
    count from past. Nothing is filled in unless each cache has exactly one open axis besides the batch. source: name of
    the samples in errors. CalibrationError where sizes contradict each other.
    """
    completed_arrays, tokens = dict(arrays), arrays.get(TOKENS)
    caches = [tensor for tensor in inputs if _is_cache(tensor)]
    axes = {cache.name: [k for k, size in enumerate(cache.shape) if k and size is None] for cache in caches}
    if tokens is None or tokens.ndim < 2 or any(len(open_axes) != 1 for open_axes in axes.values()):
        return completed_arrays
    past = 0
    for cache in caches:
        (axis,) = axes[cache.name]
        if cache.name not in completed_arrays:
            sizes = [0 if k == axis else size or 1 for k, size in enumerate(cache.shape)]
            completed_arrays[cache.name] = np.zeros((len(tokens), *sizes), cache.dtype)
        elif completed_arrays[cache.name].ndim >= len(cache.shape):
            past = completed_arrays[cache.name].shape[axis - len(cache.shape)]
    count, total = len(tokens), past + tokens.shape[-1]
    dtypes = {tensor.name: tensor.dtype for tensor in inputs}
    if MASK in dtypes:
        mask = completed_arrays.setdefault(MASK, np.ones((count, total), dtypes[MASK]))
        if mask.shape[-1:] != (total,):
            raise CalibrationError(
                f"{source}: {MASK} is for {mask.shape[-1]} tokens, but {past} are of caches and {total - past} are new"
            )
    if POSITIONS in dtypes:
        completed_arrays.setdefault(POSITIONS, np.tile(np.arange(past, total, dtype=dtypes[POSITIONS]), (count, 1)))
    return completed_arrays


# Choice of operators ----------------------------------------------------------------------------------------------


def quantised_products(model: onnx.ModelProto) -> list[str]:
    """Return the names of nodes that are quantised with products. Every node of `model` has a name.

    They are PRODUCTS; each Add of a bias to a product; and each Mul by which one product gates another, as in SwiGLU,
    if only products read it.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    readers: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    model_outputs = {value.name for value in model.graph.output}
    product_of: dict[str, str] = {}  # the result of a product that a tensor is an element-wise function of
    names = []
    for node in model.graph.node:
        operands = [name for name in node.input if name and name not in constants]
        products = {product_of.get(name, "") for name in operands}
        is_gate = node.op_type == "Mul" and len(products) == len(operands) == 2 and "" not in products
        is_read_by_products_only = (
            readers.get(node.output[0], set()) <= {*PRODUCTS} and node.output[0] not in model_outputs
        )
        is_bias_sum = node.op_type == "Add" and constants.intersection(node.input) and products <= {*operands}
        if node.op_type in PRODUCTS or (is_gate and is_read_by_products_only) or (is_bias_sum and "" not in products):
            names.append(node.name)
            product_of[node.output[0]] = node.output[0]
        elif op_spec(node.op_type).kind is Kind.INJECTIVE and len(products) == 1:
            product_of[node.output[0]] = products.pop()
    return names


SKIP_NORMS = {"SkipSimplifiedLayerNormalization": 3, "SkipLayerNormalization": 4}
"""onnxruntime's norms of a sum of their first two inputs, with the number of the input that is a bias, added as well.
The inputs between are the norm's."""


def separate_residual_sums(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change `model`: split norms that add the residual stream first into an Add and a norm, which can be quantised.

    y, _, _, sum = SkipLayerNormalization(x, skip, scale)
        ->      sum = Add(x, skip)      y = LayerNormalization(sum, scale)
    """
    writer = GraphWriter(model.graph, "sum")
    for node in model.graph.node:
        statistics = [name for name in node.output[1:3] if name]
        if node.op_type not in SKIP_NORMS or statistics:
            writer.nodes.append(node)
            continue
        x, skip, *norm_inputs = node.input
        bias = norm_inputs[SKIP_NORMS[node.op_type] - 2 :]
        sum_name = [*node.output, "", "", ""][3]
        if any(bias):
            x, skip = writer.op("Add", x, skip), bias[0]
        sum_tensor = writer.op("Add", x, skip, called=sum_name)
        epsilon = next((attribute.f for attribute in node.attribute if attribute.name == "epsilon"), EPSILON)
        scales = norm_inputs[: SKIP_NORMS[node.op_type] - 2]
        kind = node.op_type.removeprefix("Skip")
        writer.op(kind, sum_tensor, *scales, called=node.output[0], axis=-1, epsilon=epsilon)
    writer.close()
    return model


def isolate_quantised_products(model: onnx.ModelProto, products: Collection[str]) -> onnx.ModelProto:
    """Change a QDQ model: nodes other than `products` read float tensors instead of dequantised ones.

        x = Concat(past, new)                       present = Concat(past, new)
        present = Dequantize(Quantize(x))     ->    y = Dequantize(Quantize(present))
        scores = MatMul(..., present)               scores = MatMul(..., y)

    The quantiser writes the left form, in which a cache or residual that a product reads, too, is rounded for all
    readers. Results of `products` stay quantised.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {value.name for value in graph.output}
    for dequantize in [node for node in graph.node if node.op_type == "DequantizeLinear"]:
        quantize = makers.get(dequantize.input[0])
        if quantize is None or (quantize.input[0] in makers and makers[quantize.input[0]].name in products):
            continue
        if dequantize.output[0] in outputs:
            name = dequantize.output[0]
            _rename_tensors(graph, {quantize.input[0]: name, name: f"{name}_DequantizeLinear_Output"})
            makers = {name: node for node in graph.node for name in node.output}
        for node in graph.node:
            if node.name not in products:
                names = [quantize.input[0] if name == dequantize.output[0] else name for name in node.input]
                node.input[:] = names
    return model


def _rename_tensors(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename tensors wherever nodes read or write them, all at once. names: new name by old name."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


# Perplexity -----------------------------------------------------------------------------------------------------


def token_surprise(logits: Array, sample: Mapping[str, Array]) -> tuple[float, int]:
    """Return the sum of -ln p over the tokens that the model should predict, and the number of these tokens.

    logits: float [batch, steps, vocabulary] for the inputs TOKENS [batch, steps]; the next tokens are TOKENS shifted by
    one. Tokens that MASK [batch, total] hides are not counted.
    """
    tokens = sample[TOKENS]
    is_real = sample[MASK][:, -tokens.shape[1] :] != 0 if MASK in sample else np.ones(tokens.shape, bool)
    is_scored = is_real[:, :-1] & is_real[:, 1:]
    rows = logits[:, :-1].astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    log_probabilities = np.take_along_axis(rows, tokens[:, 1:, None], -1)[..., 0] - np.log(np.exp(rows).sum(-1))
    return -float(log_probabilities[is_scored].sum()), int(is_scored.sum())


def perplexity(logits: Iterable[Array], samples: Iterable[Mapping[str, Array]]) -> float | None:
    """Return the perplexity of all samples: exp of the mean of -ln p of next tokens; None where there are no next
    tokens."""
    sums = [token_surprise(model_logits, sample) for model_logits, sample in zip(logits, samples)]
    count = sum(number for _, number in sums)
    return float(np.exp(sum(total for total, _ in sums) / count)) if count else None
