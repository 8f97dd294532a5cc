"""Quantise decoders: models that take tokens and caches of earlier ones, and predict the next token."""

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
"""Names that exporters give to what all decoders take and return."""
CACHES = "past"
"""Beginning of the names of caches: past_key_values.0.key, past_key_self_0, past_0."""
EPSILON = 1e-12
"""Epsilon of SKIPS that have none."""
PRODUCTS = ("MatMul", "Gemm")
"""The operators that `operators="products"` quantises."""


def is_decoder(inputs: Iterable[Input]) -> bool:
    """Whether a model takes a cache: floats of four or five axes, whose name begins with CACHES."""
    return any(_is_cache(tensor) for tensor in inputs)


def _is_cache(tensor: Input) -> bool:
    return tensor.name.startswith(CACHES) and tensor.dtype.kind == "f" and len(tensor.shape) in (4, 5)


# Samples --------------------------------------------------------------------------------------------------------


def complete_decoder_samples(source: str, arrays: Mapping[str, Array], inputs: Sequence[Input]) -> dict[str, Array]:
    """Return `arrays` of samples, with missing inputs of a decoder besides TOKENS [n, steps] filled in.

    Caches float [n, heads, past, size] are of no earlier tokens, MASK int64 [n, past + steps] is all ones, POSITIONS
    int64 [n, steps] count from past. Nothing is made where it is not one axis of each cache that is open, besides the
    batch. where: what errors name. CalibrationError where sizes contradict each other.
    """
    completed_arrays, tokens, caches = (
        dict(arrays),
        arrays.get(TOKENS),
        [tensor for tensor in inputs if _is_cache(tensor)],
    )
    axes = {cache.name: [k for k, size in enumerate(cache.shape) if k and size is None] for cache in caches}
    if tokens is None or tokens.ndim < 2 or any(len(open_ones) != 1 for open_ones in axes.values()):
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
    kinds = {tensor.name: tensor.dtype for tensor in inputs}
    if MASK in kinds:
        mask = completed_arrays.setdefault(MASK, np.ones((count, total), kinds[MASK]))
        if mask.shape[-1:] != (total,):
            raise CalibrationError(
                f"{source}: {MASK} is for {mask.shape[-1]} tokens, but {past} are of caches and {total - past} are new"
            )
    if POSITIONS in kinds:
        completed_arrays.setdefault(POSITIONS, np.tile(np.arange(past, total, dtype=kinds[POSITIONS]), (count, 1)))
    return completed_arrays


# Choice of operators ----------------------------------------------------------------------------------------------


def quantised_products(model: onnx.ModelProto) -> list[str]:
    """Names of PRODUCTS, of Adds that add a bias to one of them, and of Muls by which one gates another for products
    alone, as in SwiGLU. Every node of `model` has a name."""
    constants = {tensor.name for tensor in model.graph.initializer}
    readers: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    ends = {value.name for value in model.graph.output}
    of: dict[str, str] = {}
    """The product of whose result alone a tensor is made, element by element."""
    fused = []
    for node in model.graph.node:
        varying = [name for name in node.input if name and name not in constants]
        sources = {of.get(name, "") for name in varying}
        gates = node.op_type == "Mul" and len(sources) == len(varying) == 2 and "" not in sources
        only_in_products = readers.get(node.output[0], set()) <= {*PRODUCTS} and node.output[0] not in ends
        bias = node.op_type == "Add" and constants.intersection(node.input) and sources <= {*varying}
        if node.op_type in PRODUCTS or (gates and only_in_products) or (bias and "" not in sources):
            fused.append(node.name)
            of[node.output[0]] = node.output[0]
        elif op_spec(node.op_type).kind is Kind.INJECTIVE and len(sources) == 1:
            of[node.output[0]] = sources.pop()
    return fused


SKIPS = {"SkipSimplifiedLayerNormalization": 3, "SkipLayerNormalization": 4}
"""Norms of sums, and which of their inputs is a bias that is added, too. The first two are added, those of the norm
follow."""


def separate_residual_sums(model: onnx.ModelProto) -> onnx.ModelProto:
    """Separate the residual stream's sums from the norms that hold them. `model` is changed.

    y, _, _, sum = SkipLayerNormalization(x, skip, scale)
        ->      sum = Add(x, skip)      y = LayerNormalization(sum, scale)
    """
    writer = GraphWriter(model.graph, "sum")
    for node in model.graph.node:
        statistics = [name for name in node.output[1:3] if name]
        if node.op_type not in SKIPS or statistics:
            writer.nodes.append(node)
            continue
        x, skip, *later_inputs = node.input
        bias = later_inputs[SKIPS[node.op_type] - 2 :]
        called = [*node.output, "", "", ""][3]
        if any(bias):
            x, skip = writer.op("Add", x, skip), bias[0]
        total = writer.op("Add", x, skip, called=called)
        epsilon = next((attribute.f for attribute in node.attribute if attribute.name == "epsilon"), EPSILON)
        scales = later_inputs[: SKIPS[node.op_type] - 2]
        kind = node.op_type.removeprefix("Skip")
        writer.op(kind, total, *scales, called=node.output[0], axis=-1, epsilon=epsilon)
    writer.close()
    return model


def isolate_quantised_products(model: onnx.ModelProto, products: Collection[str]) -> onnx.ModelProto:
    """Let only `products` read tensors from elsewhere quantised. `model` is changed.

        x = Concat(past, new)                       present = Concat(past, new)
        present = Dequantize(Quantize(x))     ->    y = Dequantize(Quantize(present))
        scores = MatMul(..., present)               scores = MatMul(..., y)

    The quantiser writes the left one: the cache, or a residual that is an operand, too, would lose what it rounds.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {value.name for value in graph.output}
    for leaves in [node for node in graph.node if node.op_type == "DequantizeLinear"]:
        enters = makers.get(leaves.input[0])
        if enters is None or (enters.input[0] in makers and makers[enters.input[0]].name in products):
            continue
        if leaves.output[0] in outputs:
            name = leaves.output[0]
            _rename_tensors(graph, {enters.input[0]: name, name: f"{name}_DequantizeLinear_Output"})
            makers = {name: node for node in graph.node for name in node.output}
        for node in graph.node:
            if node.name not in products:
                names = [enters.input[0] if name == leaves.output[0] else name for name in node.input]
                node.input[:] = names
    return model


def _rename_tensors(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename tensors, all at once; inputs and outputs of the graph keep their names."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


# Perplexity -----------------------------------------------------------------------------------------------------


def token_surprise(logits: Array, sample: Mapping[str, Array]) -> tuple[float, int]:
    """Return the sum of -ln p of the tokens that come next, and the number of these tokens.

    logits: float [batch, steps, vocabulary] for the inputs TOKENS [batch, steps]; the next tokens are TOKENS shifted by
    one. Tokens that MASK [batch, total] hides are not counted.
    """
    tokens = sample[TOKENS]
    is_real = sample[MASK][:, -tokens.shape[1] :] != 0 if MASK in sample else np.ones(tokens.shape, bool)
    counted = is_real[:, :-1] & is_real[:, 1:]
    rows = logits[:, :-1].astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    picked = np.take_along_axis(rows, tokens[:, 1:, None], -1)[..., 0] - np.log(np.exp(rows).sum(-1))
    return -float(picked[counted].sum()), int(counted.sum())


def perplexity(logits: Iterable[Array], samples: Iterable[Mapping[str, Array]]) -> float | None:
    """Perplexity of all samples' next tokens: exp of the mean of -ln p; None where no token has a next one."""
    sums = [token_surprise(model_logits, sample) for model_logits, sample in zip(logits, samples)]
    count = sum(number for _, number in sums)
    return float(np.exp(sum(total for total, _ in sums) / count)) if count else None
