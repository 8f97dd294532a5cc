"""Fused operators of onnxruntime (com.microsoft), which its optimiser and exporters put in place of several of ONNX's.

Each is built of the operators that it replaces; operator fusion then puts them into one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, call, select, wrap
from celosia.compiler.ops.normalisation import epsilon, layer_norm
from celosia.compiler.ops.quantized import quantize
from celosia.compiler.ops.registry import F32, OPS, Array, Node, op, reshaped
from celosia.compiler.program.op_spec import Kind


def build_operator(
    node: Node, name: str, *inputs: Tensor | None, values: Sequence[Array | None] = (), **attrs: Any
) -> Tensor:
    """Build operator `name` as a part of `node`, and return its first output.

    values: arrays of those inputs that are constant; () for none. attrs: attributes of the operator.
    """
    constants = tuple(values) or (None,) * len(inputs)
    outputs = OPS[name](Node(name, attrs, inputs, constants, 1, 21, node.name))
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def transpose_axes(node: Node, x: Tensor, perm: Sequence[int]) -> Tensor:
    """Return x with its axes in the order `perm`."""
    return build_operator(node, "Transpose", x, perm=list(perm))


def add_operand(node: Node, x: Tensor, operand: str) -> Tensor:
    """Return x plus an operand of `node`; x where that is left out."""
    return build_operator(node, "Add", x, node.input(operand)) if node.has(operand) else x


def scale_tensor(x: Tensor, factor: float) -> Tensor:
    """Return x times `factor`; x itself for a factor of 1."""
    return x if factor == 1 else T.compute(x.shape, lambda *i: x[i] * factor, "scaled")


def apply_activation(node: Node, x: Tensor, names: Sequence[str]) -> Tensor:
    """Apply the activation function that the attribute `activation` of `node` names, if any.

    names: of the function's parameters where each has an attribute activation_<name>; else activation_params lists
    their values.
    """
    kind = node.attrs.get("activation", "")
    if not kind:
        return x
    parameters = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Clip": ("min", "max")}.get(kind, ())
    parameter_values = node.attrs.get("activation_params")
    values = (
        list(parameter_values)
        if parameter_values is not None
        else [node.attrs[f"activation_{name}"] for name in names[: len(parameters)]]
    )
    if kind == "Clip":
        low, high = (float(v) for v in values)
        return T.compute(x.shape, lambda *i: call("clamp", x[i], wrap(low, x.dtype), wrap(high, x.dtype)), "clip")
    attrs: dict[str, Any] = {name: float(value) for name, value in zip(parameters, values)}
    return build_operator(node, kind, x, **attrs)


# Products ----------------------------------------------------------------------------------------------------------


@op(
    "FusedMatMul", "TransposeMatMul", kind=Kind.OPAQUE, domain="com.microsoft", variant_of="MatMul", operands="a b",
)  # fmt: skip
def fused_matmul(node: Node) -> Tensor:
    """Build FusedMatMul: alpha * a @ b; attributes say whether batches or matrices are transposed first."""
    sides = []
    for name in "AB":
        x = node.input(name.lower())
        axes = list(range(len(x.shape)))
        if node.attrs.get(f"transBatch{name}", 0):
            axes = [*axes[1:-1], axes[0], axes[-1]]
        if node.attrs.get(f"trans{name}", 0) and len(axes) > 1:
            axes = [*axes[:-2], axes[-1], axes[-2]]
        sides.append(transpose_axes(node, x, axes) if axes != sorted(axes) else x)
    return scale_tensor(build_operator(node, "MatMul", *sides), float(node.attrs.get("alpha", 1.0)))


@op("FusedGemm", kind=Kind.OPAQUE, domain="com.microsoft", variant_of="Gemm", operands="a b c:bias?")
def fused_gemm(node: Node) -> Tensor:
    """Build FusedGemm: Gemm, then the activation function that an attribute names."""
    attrs = {name: node.attrs[name] for name in ("alpha", "beta", "transA", "transB") if name in node.attrs}
    return apply_activation(node, build_operator(node, "Gemm", *node.inputs, **attrs), ("alpha", "beta"))


@op("FusedConv", kind=Kind.OPAQUE, domain="com.microsoft", variant_of="Conv", operands="x w:weights b:bias? z?")
def fused_conv(node: Node) -> Tensor:
    """Build FusedConv: Conv, the sum with the optional tensor z, then the activation function of an attribute."""
    attrs = {name: value for name, value in node.attrs.items() if not name.startswith("activation")}
    y = build_operator(node, "Conv", *(node.optional(name) for name in ("x", "w", "b")), **attrs)
    return apply_activation(node, add_operand(node, y, "z"), ())


@op(
    "DynamicQuantizeMatMul", kind=Kind.OPAQUE, domain="com.microsoft", variant_of="MatMul",
    operands="a b b_scale b_zero_point? bias:bias?",
)  # fmt: skip
def dynamic_quantize_matmul(node: Node) -> Tensor:
    """Build DynamicQuantizeMatMul: quantise `a` by its own range, multiply it by the bytes b, and scale to float32."""
    a = node.input("a")
    quantised = OPS["DynamicQuantizeLinear"](Node("DynamicQuantizeLinear", {}, (a,), (None,), 3, 21, node.name))
    assert not isinstance(quantised, Tensor)
    x, scale, zero = quantised
    b, b_scale, b_zero, bias = (node.optional(name) for name in ("b", "b_scale", "b_zero_point", "bias"))
    constants = (None, node.value("b"), None, None, None, node.value("b_zero_point"), None)
    return build_operator(node, "MatMulIntegerToFloat", x, b, scale, b_scale, zero, b_zero, bias, values=constants)


@op("MatMulInteger16", kind=Kind.OPAQUE, domain="com.microsoft", variant_of="MatMul", operands="a b")
def matmul_integer16(node: Node) -> Tensor:
    """Build MatMulInteger16: products of int16 with int32 sums."""
    int32_factors = [
        T.compute(x.shape, lambda *i, x=x: x[i].astype("int32"), "wide") for x in (node.input("a"), node.input("b"))
    ]
    return build_operator(node, "MatMul", *int32_factors)


BYTES_OF_BLOCKS = {2: (32, 64, 128), 4: (16, 32, 64, 128, 256), 8: (16, 32, 64, 128, 256)}
"""Bits of a weight -> block sizes for which onnxruntime on x86-64 multiplies bytes at accuracy_level 4.

The accelerator takes only these (graph/block_sums.py): for others onnxruntime computes floats, to which no integer sums
are equal.
"""


def block_quantisation(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return two tensors [..., blocks] float32 by which blocks of `size` along the last axis of x become int8.

    They are the largest magnitude of each block, and 127 divided by it, the factor that quantises its elements. The
    factor is 0 where the magnitude is so small that the block counts as zeros.
    """
    last, k = x.shape[-1] - 1, T.reduce_axis(size, "k")

    def magnitude(*i: Expr) -> Expr:
        return T.max(call("abs", x[(*i[:-1], T.minimum(i[-1] * size + k, last))].astype(F32)), k)

    largest = T.compute((*x.shape[:-1], -(-x.shape[-1] // size)), magnitude, "largest")
    least, zero = wrap(2.0**-120, F32), wrap(0, F32)  # for smaller magnitudes the quotient may be infinite
    steps = T.compute(largest.shape, lambda *i: select(least < largest[i], wrap(127, F32) / largest[i], zero), "steps")
    return largest, steps


@op("RoundBlocks", kind=Kind.OPAQUE, domain="celosia", operands="x")
def round_blocks(node: Node) -> Tensor:
    """Build our RoundBlocks: round x [..., K] to multiples of 1/127 of the largest magnitude of its block; float32.

    That is how onnxruntime's products of bytes round activations before they multiply.
    """
    x, size = node.input(0), int(node.attrs["block_size"])
    largest, steps = block_quantisation(x, size)

    def body(*i: Expr) -> Expr:
        block = (*i[:-1], i[-1] // size)
        return call("round_even", x[i].astype(F32) * steps[block]) * (largest[block] / 127.0)

    return T.compute(x.shape, body, "rounded")


@op(
    "MatMulNBits", kind=Kind.OPAQUE, rounded_once=True, domain="com.microsoft",
    operands="a b:weights scales zero_points? g_idx? bias:bias?",
)  # fmt: skip
def matmul_nbits(node: Node) -> Tensor:
    """Build MatMulNBits: x times weights [N, K] of 2, 4 or 8 bits with a scale and zero point per block.

    A byte holds several weights, the first in the lowest bits. At accuracy_level 4 x is rounded to bytes by blocks
    where onnxruntime does so: with packed zero points and constant weights, which the importer ensures
    (graph/onnxruntime_rules/low_precision.py). Sums in float32 then equal those in integers but for the
    rounding of the sum.
    """
    x, packed, scales = node.input("a"), node.input("b"), node.input("scales")
    zeros = node.optional("zero_points")
    are_packed = zeros is None or zeros.dtype == "uint8"
    if why := _n_bits_complaint(node, are_packed):
        raise node.fail(why)
    bits, size, inner, n = (int(node.attrs.get(name, 4)) for name in ("bits", "block_size", "K", "N"))
    blocks, numbers_in_byte = -(-inner // size), 8 // bits
    row, zero_row = packed.size // n, -(-blocks // numbers_in_byte)

    def number(source: Tensor, first: Expr, k: Expr) -> Expr:
        """Return number k of those packed into the bytes of `source` from byte `first` on."""
        byte = source.flat(first + k // numbers_in_byte).astype("int32")
        return byte if bits == 8 else (byte >> (k % numbers_in_byte).astype("int32") * bits) & ((1 << bits) - 1)

    def weight(k: Expr, j: Expr) -> Expr:
        """Return the dequantised weight of row k and column j."""
        block = k // size
        if zeros is None:
            zero: Expr = wrap(float(1 << (bits - 1)), F32)
        elif are_packed:
            zero = number(zeros, j * zero_row, block).astype(F32)
        else:
            zero = zeros.flat(j * blocks + block).astype(F32)
        return (number(packed, j * row, k).astype(F32) - zero) * scales.flat(j * blocks + block).astype(F32)

    if int(node.attrs.get("accuracy_level", 0)) == 4 and size in BYTES_OF_BLOCKS[bits] and are_packed:
        x = build_operator(node, "RoundBlocks", x, block_size=size)
    y = build_operator(node, "MatMul", x, T.compute((inner, n), weight, "weights"))
    return add_operand(node, y, "bias")


def _n_bits_complaint(node: Node, are_zeros_packed: bool) -> str:
    """Return a clause that says why a MatMulNBits cannot be built, "" where it can.

    are_zeros_packed: zero points, if any, are packed integers like the weights, not floats.
    """
    bits, size = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 0))
    inner, n = int(node.attrs.get("K", 0)), int(node.attrs.get("N", 0))
    if bits not in BYTES_OF_BLOCKS or node.has("g_idx"):
        return (
            f"weights of {bits} bits; 2, 4 and 8 are known" if not node.has("g_idx") else "an order of groups (g_idx)"
        )
    if size < 16 or size & size - 1 or inner < 1 or n < 1:
        return f"block_size {size}, K {inner}, N {n}; give a power of two from 16 on, and sizes of a matrix"
    if node.input("b").dtype != "uint8":
        return f"weights are {node.input('b').dtype}; give uint8, which holds several of them"
    blocks = -(-inner // size)
    zeros = -(-blocks * bits // 8) if are_zeros_packed else blocks
    for name, contents, expected in (
        ("b", "bytes", blocks * size * bits // 8),
        ("scales", "scales", blocks),
        ("zero_points", "zero points", zeros),
    ):
        actual = node.input(name).size if node.has(name) else n * expected
        if actual != n * expected:
            return f"{actual} {contents} for {blocks} blocks of {size} in each of {n} columns; give {n * expected}"
    dims = list(node.input("a").shape)
    return "" if dims[-1:] == [inner] else f"K is {inner} and x {dims}; let x end in K"


FLOATS_OF_4_BITS = (
    (0, 5.208333333e-3, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4, 0, -5.208333333e-3, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6,
     -1 / 4),
    (-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1),
)  # fmt: skip
"""Values of the codes 0 to 15 of bitsandbytes, by `quant_type`: FP4, then NF4."""


@op("MatMulBnb4", kind=Kind.OPAQUE, rounded_once=True, domain="com.microsoft", operands="a b:weights absmax")
def matmul_bnb4(node: Node) -> Tensor:
    """Build MatMulBnb4: x times weights [N, K] of 4-bit floats, two in a byte, the first in its high bits.

    Each block of consecutive weights has a scale, its largest magnitude.
    """
    x, packed, largest = (node.input(name) for name in ("a", "b", "absmax"))
    size, inner, n, kind = (int(node.attrs.get(name, 0)) for name in ("block_size", "K", "N", "quant_type"))
    if kind not in (0, 1) or size not in (16, 32, 64, 128, 256) or not int(node.attrs.get("transB", 1)):
        raise node.fail(
            f"quant_type {kind}, block_size {size}, transB {node.attrs.get('transB', 1)}; give quant_type 0 or 1, "
            "block_size 16, 32, 64, 128 or 256, and transB 1"
        )
    expected = (-(-inner * n // 2), -(-inner * n // size))
    if (packed.size, largest.size) != expected or packed.dtype != "uint8" or x.shape[-1:] != (inner,):
        raise node.fail(
            f"{packed.size} {packed.dtype} and {largest.size} scales for x {list(x.shape)}, K {inner} and N {n}; give "
            f"{expected[0]} uint8 and {expected[1]} scales, and let x end in K"
        )
    table = T.constant(np.array(FLOATS_OF_4_BITS[kind], np.float32), "floats")

    def weight(k: Expr, j: Expr) -> Expr:
        position = j * inner + k
        byte = packed.flat(position // 2).astype(INDEX)
        code = select(T.equal(position % 2, 0), byte >> 4, byte & 15)
        return table[code] * largest.flat(position // size).astype(F32)

    return build_operator(node, "MatMul", x, T.compute((inner, n), weight, "weights"))


@op(
    "ConvTransposeWithDynamicPads", kind=Kind.OPAQUE, domain="com.microsoft", variant_of="ConvTranspose",
    operands="x w:weights pads? b:bias?",
)  # fmt: skip
def conv_transpose_with_pads(node: Node) -> Tensor:
    """Build ConvTransposeWithDynamicPads: a ConvTranspose whose pads are a constant input."""
    attrs = dict(node.attrs)
    if node.has("pads"):
        attrs["pads"] = [int(pad) for pad in node.constant("pads").reshape(-1)]
    return build_operator(node, "ConvTranspose", node.input("x"), node.input("w"), node.optional("b"), **attrs)


# Normalisation -----------------------------------------------------------------------------------------------------


@op("SimplifiedLayerNormalization", kind=Kind.OPAQUE, domain="com.microsoft", operands="x scale:weights")
def simplified_layer_normalization(node: Node) -> list[Tensor]:
    """Build SimplifiedLayerNormalization: division by the root mean square, without a mean."""
    x = node.input(0)
    return _rms_norm_and_inverse(node, x, node.input("scale"), node.axis(-1, len(x.shape)))[: node.outputs]


@op(
    "SkipSimplifiedLayerNormalization", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="input skip gamma:weights bias:bias?",
)  # fmt: skip
def skip_simplified_layer_normalization(node: Node) -> list[Tensor]:
    """Build SkipSimplifiedLayerNormalization: SimplifiedLayerNormalization of input + skip + bias.

    Output 2 is the inverse root mean square, output 3 the sum.
    """
    tensors = [node.input(name) for name in ("input", "skip", "bias") if name != "bias" or node.has(name)]
    total = node.elementwise(lambda *v: sum(v[1:], v[0]), *tensors)
    y, inverse = _rms_norm_and_inverse(node, total, node.input("gamma"), len(total.shape) - 1)
    return [y, inverse, inverse, total][: node.outputs]


def _rms_norm_and_inverse(node: Node, x: Tensor, scale: Tensor, axis: int) -> list[Tensor]:
    """Return RMSNormalization of x over the axes from `axis` on, and the inverse root mean square, a second output."""
    y = build_operator(node, "RMSNormalization", x, scale, axis=axis, epsilon=epsilon(node))
    eps, count = epsilon(node), prod(x.shape[axis:])
    squares = build_operator(node, "Mul", x, x)
    axes = np.arange(axis, len(x.shape))
    total = build_operator(node, "ReduceSum", squares, T.constant(axes, "axes"), values=(None, axes), keepdims=1)
    inverse = T.compute(
        total.shape, lambda *i: wrap(1, x.dtype) / call("sqrt", total[i] / float(count) + eps), "inverse"
    )
    return [y, inverse]


@op(
    "EmbedLayerNormalization", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="input_ids segment_ids? word_embedding position_embedding segment_embedding? gamma:weights beta:bias "
    "mask? position_ids?",
)  # fmt: skip
def embed_layer_normalization(node: Node) -> list[Tensor]:
    """Build EmbedLayerNormalization: LayerNormalization of the sum of word, position and segment embeddings.

    Further outputs: the sum of the mask of each sample, and the sum of the embeddings.
    """
    tables = [node.optional(f"{name}_embedding") for name in ("word", "position", "segment")]
    beta, mask, position_ids = (node.optional(name) for name in ("beta", "mask", "position_ids"))
    return _embed_and_normalise(node, tables, node.input("gamma"), beta, mask, position_ids)


@op(
    "QEmbedLayerNormalization", kind=Kind.OPAQUE, domain="com.microsoft",
    operands="input_ids segment_ids? word_embedding_quant position_embedding_quant segment_embedding? "
    "gamma_quant:weights beta_quant:bias mask? word_embedding_scale position_embedding_scale segment_embedding_scale? "
    "gamma_scale beta_scale word_embedding_zero_point position_embedding_zero_point segment_embedding_zero_point? "
    "gamma_zero_point beta_zero_point",
)  # fmt: skip
def quantised_embed_layer_normalization(node: Node) -> list[Tensor]:
    """Build QEmbedLayerNormalization: EmbedLayerNormalization of quantised tables, which are dequantised first."""

    def dequantised(name: str, bytes_name: str) -> Tensor | None:
        """Return an operand in float32; None where it is left out. name: of its scale and zero point."""
        if not node.has(bytes_name):
            return None
        x, zero = node.input(bytes_name), node.scalar(f"{name}_zero_point", "int32")
        scale = node.scalar(f"{name}_scale", F32)
        return T.compute(x.shape, lambda *i: (x[i].astype("int32") - zero).astype(F32) * scale, "real")

    words, positions = (dequantised(f"{name}_embedding", f"{name}_embedding_quant") for name in ("word", "position"))
    segments = dequantised("segment_embedding", "segment_embedding")
    gamma, beta = (dequantised(name, f"{name}_quant") for name in ("gamma", "beta"))
    if gamma is None:
        raise node.fail("gamma is missing")
    return _embed_and_normalise(node, [words, positions, segments], gamma, beta, node.optional("mask"), None)


def _embed_and_normalise(
    node: Node, tables: list[Tensor | None], gamma: Tensor, beta: Tensor | None, mask: Tensor | None,
    position_ids: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Look up and add the embeddings of words, positions and segments, then normalise the sum.

    tables: word, position and segment embeddings. position_ids: of each word, [1 or B, S]; None: 0, 1, 2, ... Returns
    the outputs of EmbedLayerNormalization. Raises Unsupported without the first two tables.
    """
    ids, segments = node.input("input_ids"), node.optional("segment_ids")
    words, positions, kinds = tables
    if words is None or positions is None:
        raise node.fail("an embedding is missing")

    def embedding(b: Expr, s: Expr, h: Expr) -> Expr:
        """Return element h of the sum of the embeddings of word s in sample b."""
        position = (
            s if position_ids is None else position_ids[(0 if position_ids.shape[0] == 1 else b), s].astype(INDEX)
        )
        word = words[T.clip(ids[b, s].astype(INDEX), 0, words.shape[0] - 1), h]
        total = word + positions[T.clip(position, 0, positions.shape[0] - 1), h]
        if segments is None or kinds is None:
            return total
        return total + kinds[T.clip(segments[b, s].astype(INDEX), 0, kinds.shape[0] - 1), h]

    total = T.compute((*ids.shape, words.shape[1]), embedding, "embedding")
    y = layer_norm(node, total, 2, gamma, beta)[0]
    k = T.reduce_axis(ids.shape[1], "k")
    counts = T.compute(
        (ids.shape[0],),
        lambda b: wrap(0, "int32") if mask is None else T.sum(mask[b, k].astype("int32"), k),
        "mask_sum",
    )
    return [y, counts, total][: node.outputs]


# Others ------------------------------------------------------------------------------------------------------------


@op(
    "QLinearWhere", kind=Kind.OPAQUE, domain="com.microsoft", variant_of="Where",
    operands="condition<.> x<T> x_scale x_zero_point y<T> y_scale y_zero_point z_scale z_zero_point<T>",
)  # fmt: skip
def qlinear_where(node: Node) -> Tensor:
    """Build QLinearWhere: select elements of x or y, whose scales may differ, and requantise them."""
    kind = node.input("x").dtype
    scale, zero = node.scalar("z_scale", F32), node.scalar("z_zero_point", kind)

    def dequantised(element: Expr, name: str) -> Expr:
        shifted = element.astype("int32") - node.scalar(f"{name}_zero_point", "int32")
        return shifted.astype(F32) * node.scalar(f"{name}_scale", F32)

    def selected(c: Expr, x: Expr, y: Expr) -> Expr:
        return quantize(select(c, dequantised(x, "x"), dequantised(y, "y")), scale, zero, kind)

    return node.elementwise(selected, node.input("condition"), node.input("x"), node.input("y"))


@op("NhwcMaxPool", kind=Kind.OPAQUE, domain="com.microsoft", operands="x")
def nhwc_max_pool(node: Node) -> Tensor:
    """Build NhwcMaxPool: max pooling of bytes whose channels are the last axis."""
    rank = len(node.input(0).shape)
    x = transpose_axes(node, node.input(0), (0, rank - 1, *range(1, rank - 1)))
    return transpose_axes(node, build_operator(node, "MaxPool", x, **node.attrs), (0, *range(2, rank), 1))


@op("ExpandDims", kind=Kind.OPAQUE, domain="com.microsoft", operands="x axis")
def expand_dims(node: Node) -> Tensor:
    """Build ExpandDims: insert an axis of size 1. Raises Unsupported where the axis is no constant."""
    x, axis = node.input(0), int(node.constant("axis").reshape(()))
    axis = axis if axis >= 0 else axis + len(x.shape) + 1
    return reshaped(x, (*x.shape[:axis], 1, *x.shape[axis:]))


@op("CDist", kind=Kind.OPAQUE, domain="com.microsoft", operands="a b")
def pairwise_distances(node: Node) -> Tensor:
    """Build CDist: Euclidean distances, or their squares, of all pairs of rows: [rows of a, rows of b]."""
    a, b = node.input("a"), node.input("b")
    k = T.reduce_axis(a.shape[1], "k")

    def squares(i: Expr, j: Expr) -> Expr:
        d = a[i, k] - b[j, k]
        return T.sum(d * d, k)

    total = T.compute((a.shape[0], b.shape[0]), squares, "squares")
    if node.attrs.get("metric", "sqeuclidean") == "sqeuclidean":
        return total
    return T.compute(total.shape, lambda *i: call("sqrt", total[i]), "distances")


@op("UnfoldTensor", kind=Kind.OPAQUE, domain="com.microsoft", operands="input")
def unfold(node: Node) -> Tensor:
    """Build UnfoldTensor: windows of `size` elements along axis `dim`, `step` apart.

    The elements of a window are a new last axis.
    """
    x = node.input(0)
    dim, size, step = node.attrs.get("dim", -1) % len(x.shape), int(node.attrs["size"]), int(node.attrs.get("step", 1))
    shape = (*x.shape[:dim], (x.shape[dim] - size) // step + 1, *x.shape[dim + 1 :], size)
    return T.compute(shape, lambda *i: x[(*i[:dim], i[dim] * step + i[-1], *i[dim + 1 : -1])], "unfold")


@op("SampleOp", kind=Kind.OPAQUE, domain="com.microsoft", operands="x")
def sample(node: Node) -> Tensor:
    """Build SampleOp, onnxruntime's example operator, which is the identity."""
    return build_operator(node, "Identity", node.input(0))
