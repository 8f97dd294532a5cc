"""Quantise float weights and biases, and give biases the scale of their products, as onnxruntime does.

Both change bytes, and the model means the changed ones, so they are part of the import.

Float weights and biases between quantised tensors become integers (`quantise_weights`). Models have them where a
quantiser was told to leave an operator out.

    x = DequantizeLinear(x8, sx, zx)          x = DequantizeLinear(x8, sx, zx)
    y = Conv(x, w, b)                   ->    y = Conv(x, DequantizeLinear(w8, sw, zw), DequantizeLinear(b32, sx * sw))
    y8 = QuantizeLinear(y, sy, zy)            y8 = QuantizeLinear(y, sy, zy)

w8 has one scale and zero point, from the range of w, and b32 = round(b / (sx * sw)). Also for Gemm, ConvTranspose, and
MatMul with an added bias, with or without Relu and Clip before QuantizeLinear. A Conv first absorbs BatchNormalization,
Mul and Add of constants behind it into its weights.

onnxruntime adds the integers of a bias to the sums, whatever its scale (`rescale_biases`):

    Gemm(DequantizeLinear(x, sx), DequantizeLinear(w, sw), DequantizeLinear(b, sb, zb))
        ->      Gemm(DequantizeLinear(x, sx), DequantizeLinear(w, sw), DequantizeLinear(b, sx * sw))

This holds for a Gemm, and for a MatMul with an added bias, for any sb and zb, where onnxruntime multiplies bytes. It
does so only if x and w have zero points, even if these are 0. For a Conv it holds where sb is nearly sx * sw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike, NDArray

from celosia.compiler.graph.onnxruntime_rules.propagation import (
    has_one_reader,
    is_quantised,
    is_superfluous_bound,
    last_superfluous_bound,
    only_reader,
    producer_before_moves,
    producer_before_wires,
    quantised_result,
    quantiser,
)
from celosia.compiler.graph.operands import operand, quantisation, set_operand, spec_of
from celosia.compiler.graph.qdq import Quantised, adds_bias, dequantised
from celosia.compiler.graph.simplify.convolutions import along_outputs, is_training
from celosia.compiler.graph.simplify.fold import fold_producers
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    constant,
    is_op,
    new_constant,
    replace_keeping_name,
    shape,
)
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Role

# Float weights and biases ---------------------------------------------------------------------------------------------


OVERFLOW = -(2.0**31)
"""The integer that onnxruntime gets for a bias beyond int32, of either sign: x86's result of the conversion."""
ABSORBED = {"Conv": ("BatchNormalization", "Add", "Mul"), "ConvTranspose": ("BatchNormalization",)}
"""Convolution -> the operators behind it that onnxruntime absorbs into its weights."""


@dataclass(frozen=True)
class _Product:
    """A product with float weights or bias between quantised tensors.

    node: the product. source: the DequantizeLinear of its activations. last: the operator that adds the bias, as its
    input number `bias_input`. absorbed: operators that become part of weights and bias, in order.
    """

    node: ir.Node
    source: ir.Node
    last: ir.Node
    bias_input: int
    absorbed: tuple[ir.Node, ...]

    @property
    def bias(self) -> ir.Value | None:
        """The bias; None without one."""
        return self.last.inputs[self.bias_input] if len(self.last.inputs) > self.bias_input else None


def quantise_weights(model: ir.Model, kind: DTypeLike = np.float32) -> None:
    """Quantise float weights and biases of element type `kind` between quantised tensors.

    float16 products are computed in float32 by onnxruntime, so that of these only biases are quantised.
    """
    products = [product for node in model.graph if (product := _find_product(node)) is not None]
    fold_producers(model, (value for p in products for value in (p.node.inputs[1], p.bias, quantisation(p.source)[0])))
    for product in products:
        _quantise_product(model.graph, product, np.dtype(kind))


def _find_product(node: ir.Node) -> _Product | None:
    """Return the product that `node` is, if it lies between quantised tensors; else None."""
    last, is_matrix = node, True
    if is_op(node, "MatMul"):
        add = only_reader(node) if has_one_reader(node) else None
        if add is None or not is_op(add, "Add") or len(shape(node.inputs[1]) or ()) != 2:  # type: ignore[arg-type]
            return None
        last, bias_input = add, int(producer_before_wires(add.inputs[0]) is node)
        is_matrix = node.inputs[0] is not None and len(node.inputs[0].shape or ()) == 2
    elif is_op(node, "Conv", "ConvTranspose", "Gemm"):
        bias_input = spec_of(node).inputs_with_role(Role.BIAS)[0]
    else:
        return None
    source = producer_before_wires(node.inputs[0])
    source = producer_before_moves(source.inputs[0] if source is not None and _pads(source, node) else node.inputs[0])
    absorbed = _absorbable_nodes(node)
    if source is None or not is_op(source, "DequantizeLinear") or not _is_quantised((last, *absorbed)[-1], is_matrix):
        return None
    return _Product(node, source, last, bias_input, absorbed)


def _pads(pad: ir.Node, node: ir.Node) -> bool:
    """Return whether `pad` puts zeros around the images of a Conv alone.

    onnxruntime makes it part of the Conv.
    """
    if not is_op(pad, "Pad") or not is_op(node, "Conv") or operand(pad, "axes") is not None:
        return False
    pads, value = constant(operand(pad, "pads")), operand(pad, "constant_value")
    fill = np.zeros(1) if value is None else constant(value)
    if pads is None or np.any(pads < 0) or np.any(pads.reshape(2, -1)[:, :2]) or fill is None or np.any(fill):
        return False
    explicit = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", b"NOTSET")
    return explicit and attribute(pad, "mode", "constant") in ("constant", b"constant") and has_one_reader(pad)


def _is_quantised(node: ir.Node, is_matrix: bool) -> bool:
    """Return whether the result of `node` goes to a QuantizeLinear alone; for matrices also through Relu and Clip.

    is_matrix: the operands are matrices. Otherwise onnxruntime makes a Gemm between two Reshapes, which Relu and Clip
    cannot pass.
    """
    while is_matrix and (user := only_reader(node)) is not None and is_op(user, "Relu", "Clip"):
        node = user
    return is_quantised(node)


def _absorbable_nodes(node: ir.Node) -> tuple[ir.Node, ...]:
    """Return the operators behind a convolution that onnxruntime absorbs into its weights, in order.

    They scale and shift channels by constants; behind a ConvTranspose only BatchNormalization counts.
    """
    absorbable: list[ir.Node] = []
    last, w = node, shape(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    while is_op(node, "Conv", "ConvTranspose") and w is not None and has_one_reader(last):
        reader = only_reader(last)
        channels = w[0] if is_op(node, "Conv") else w[1] * attribute(node, "group", 1)
        channel_shape = (channels, *(1 for _ in w[2:]))
        if reader is None or not _is_affine(reader, last, channel_shape) or not is_op(reader, *ABSORBED[node.op_type]):
            break
        absorbable.append(reader)
        last = reader
    return tuple(absorbable)


def _is_affine(reader: ir.Node, node: ir.Node, channel_shape: tuple[int, ...]) -> bool:
    """Return whether `reader` scales or shifts the channels of the result of `node` by float32 constants.

    channel_shape: shape of an array with one element for each channel of an image.
    """
    if producer_before_wires(reader.inputs[0]) is not node or len(reader.outputs) > 1:
        return False
    arrays = [constant(value) for value in reader.inputs[1:]]
    if any(array is None or array.dtype != np.float32 for array in arrays):
        return False
    shapes = [array.shape for array in arrays if array is not None]
    if is_op(reader, "BatchNormalization"):
        return all(dims == channel_shape[:1] for dims in shapes) and not is_training(reader)
    scalar = [()] if is_op(reader, "Mul") else []
    return is_op(reader, "Add", "Mul") and shapes[0] in (channel_shape, (1, *channel_shape), *scalar)


def _quantise_product(graph: ir.Graph, product: _Product, kind: np.dtype[Any]) -> None:
    """Quantise the float weights and bias of one product, if scales and shapes allow it."""
    if product.absorbed and not _absorb(graph, product):
        return
    node, last, bias_value = product.node, product.last, product.bias
    scale, bias = constant(quantisation(product.source)[0]), constant(bias_value)
    if scale is not None and (scale.dtype != kind or scale.size != 1):
        return
    if bias_value is None and last is not node:
        return
    if bias_value is not None and (bias is None or bias.dtype != kind or bias.ndim != 1):
        return
    if last is not node and bias is not None and bias.shape != (shape(node.inputs[1]) or ())[-1:]:  # type: ignore[arg-type]
        return
    quantised_weights = _quantised_weights(node, bias)
    if quantised_weights is None or quantised_weights[1].dtype != kind:
        return
    w8, w_scale, w_zero = quantised_weights
    if constant(node.inputs[1]) is not None:
        name = f"{node.name}_weights"
        arrays: dict[str, NDArray[Any] | None] = {f"{name}_int8": w8, f"{name}_scale": w_scale, f"{name}_zero": w_zero}
        node.replace_input_with(1, _insert_dequantise(graph, node, arrays))
    if bias is not None and scale is not None:  # with a scale known at run time only, the bias stays float
        step = scale.reshape(()).astype(np.float32) * w_scale.astype(np.float32)
        axis = {"axis": 0} if step.ndim else {}
        arrays = {f"{node.name}_bias_int32": quantise_bias(bias, step), f"{node.name}_bias_scale": step}
        value = _insert_dequantise(graph, last, arrays, **axis)
        if kind != np.float32:
            to = ir.DataType.from_numpy(kind)
            out = ir.Value(name=None, shape=value.shape, type=ir.TensorType(to))
            graph.insert_before(last, ir.Node("", "Cast", [value], attributes(to=to.value), outputs=[out]))
            value = out
        last.replace_input_with(product.bias_input, value)


def _absorb(graph: ir.Graph, product: _Product) -> bool:
    """Absorb operators into weights and bias, in float32 and onnxruntime's order; return False if these vary."""
    node = product.node
    w, b = constant(node.inputs[1]), constant(product.bias)
    if w is None or w.dtype != np.float32 or (product.bias is not None and (b is None or b.ndim != 1)):
        return False
    for absorbed in product.absorbed:
        parameters = [constant(value).reshape(-1) for value in absorbed.inputs[1:]]  # type: ignore[union-attr]
        if is_op(absorbed, "BatchNormalization"):
            scale, offset, mean, variance = parameters
            scale = scale / np.sqrt(variance + np.float32(attribute(absorbed, "epsilon", 1e-5)))
            w, b = (
                w * along_outputs(node, scale, w),
                offset - mean * scale if b is None else (b - mean) * scale + offset,
            )
        elif is_op(absorbed, "Mul"):
            w, b = w * along_outputs(node, parameters[0], w), None if b is None else b * parameters[0]
        else:
            b = parameters[0] if b is None else b + parameters[0]
    set_operand(node, "w", new_constant(graph, f"{node.name}_absorbed", w))
    if b is not None:
        set_operand(node, "b", new_constant(graph, f"{node.name}_absorbed_bias", b))
    for absorbed in product.absorbed:
        replace_keeping_name(absorbed, node.outputs[0])
    return True


def _quantised_weights(
    node: ir.Node, bias: NDArray[np.float32] | None
) -> tuple[NDArray[np.int8] | None, NDArray[np.float32], NDArray[np.int8] | None] | None:
    """Return (weights as int8, scales, zero point); None if the product is not to be quantised.

    Weights that are quantised already give (None, their scales, None): only the bias is still float then.
    """
    source = producer_before_wires(node.inputs[1])
    if not is_op(source, "DequantizeLinear"):
        w = constant(node.inputs[1])
        return None if w is None or w.dtype != np.float32 or not w.size else _quantise_to_int8(w)
    assert source is not None
    scale = constant(source.inputs[1])
    if scale is None or bias is None or scale.dtype != bias.dtype or is_op(node, "MatMul"):
        return None
    if scale.size == 1:
        return None, scale.reshape(()), None
    rank = len(shape(node.inputs[1]) or (0,))  # type: ignore[arg-type]
    output_axis = 0 if not is_op(node, "Gemm") or attribute(node, "transB", 0) else 1
    if (
        scale.shape != bias.shape
        or attribute(source, "block_size", 0)
        or attribute(source, "axis", 1) % rank != output_axis
    ):
        return None
    return None, scale, None


def _quantise_to_int8(w: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int8]]:
    """Return `w` as int8 with one scale and zero point; its range, extended to include 0, covers all 256 codes."""
    low, high = min(w.min(), np.float32(0)), max(w.max(), np.float32(0))
    scale = np.float32(1) if low == high else np.float32((high - low) / np.float32(255))
    zero = np.rint(np.clip(np.float32(-128) - low / scale, -128, 127)).astype(np.int8)
    steps = np.rint(w / scale) + np.float32(zero)
    return np.clip(steps, -128, 127).astype(np.int8), np.array(scale), np.array(zero)


def quantise_bias(bias: NDArray[Any], step: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return a float bias as the int32 that onnxruntime adds to products of bytes whose scales' product is `step`.

    It rounds the quotient in the bias's own type, so that float16 overflows.
    """
    with np.errstate(all="ignore"):
        steps = np.rint((bias.astype(np.float32) / step).astype(bias.dtype)).astype(np.float32)
    return np.where(np.abs(steps) < 2.0**31, steps, OVERFLOW).astype(np.int32)


def _insert_dequantise(
    graph: ir.Graph, before: ir.Node, arrays: Mapping[str, NDArray[Any] | None], **attrs: int
) -> ir.Value:
    """Insert a DequantizeLinear of constants, given by name: integers, scale and perhaps zero point."""
    values = [new_constant(graph, name, array) for name, array in arrays.items() if array is not None]
    out = ir.Value(name=None, shape=values[0].shape, type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node("", "DequantizeLinear", values, attributes(**attrs), outputs=[out])
    graph.insert_before(before, node)
    return out


# Biases of another scale ----------------------------------------------------------------------------------------------


BIAS_SCALE_TOLERANCE = (0.01, 1e-6)
"""Relative and absolute difference between a Conv's bias scale and sx * sw up to which onnxruntime ignores it.

graph/quantized/integerise.py asks for equal scales (`_bias_scale_fits`).
"""


def rescale_biases(model: ir.Model) -> None:
    """Let biases whose scale onnxruntime ignores be dequantised by the scale of their products."""
    for node in list(model.graph):
        bias_input = _bias_input(node)
        if bias_input is None or len(node.inputs) <= bias_input:
            continue
        product = producer_before_wires(node.inputs[1 - bias_input]) if is_op(node, "Add") else node
        if product is not None and (scale := _new_scale(product, node, node.inputs[bias_input])) is not None:
            _set_bias_scale(node, bias_input, scale)


def _bias_input(node: ir.Node) -> int | None:
    """Return the number of the input of `node` that is a bias onnxruntime may add to products of bytes; else None."""
    if is_op(node, "Conv", "Gemm"):
        is_unscaled = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
        return op_spec(node.op_type).inputs_with_role(Role.BIAS)[0] if is_unscaled else None
    if not is_op(node, "Add"):
        return None
    for number, value in enumerate(node.inputs):
        product, bias = producer_before_wires(value), node.inputs[1 - number]
        if product is not None and is_op(product, "MatMul") and has_one_reader(product) and adds_bias(product, bias):
            return 1 - number
    return None


def _new_scale(product: ir.Node, last: ir.Node, bias: ir.Value | None) -> NDArray[np.float32] | None:
    """Return the scale of the products, if onnxruntime takes `bias` to have it although it has another; else None.

    last: the operator that adds the bias: `product` itself, or an Add behind it.
    """
    x, w, b = (
        _dequantised_operand(product.inputs[0]),
        _dequantised_operand(product.inputs[1]),
        _dequantised_operand(bias, moved=False),
    )
    if x is None or w is None or b is None or not x.scalar or b.dtype != np.int32:
        return None
    if not _is_byte_product(product, last, x, w):
        return None
    step = (x.scale.reshape(()) * w.scale).astype(np.float32).reshape(-1)
    if step.size > 1 and (shape(b.value) or (0,))[-1] != step.size:
        return None
    bias_scale, product_scale, has_zero_point = (
        b.scale.reshape(-1).astype(np.float64),
        step.astype(np.float64),
        bool(np.any(b.zero)),
    )
    fits = bias_scale.size in (1, step.size) or step.size == 1
    if is_op(product, "Conv") and (
        has_zero_point or not fits or not np.allclose(bias_scale, product_scale, *BIAS_SCALE_TOLERANCE)
    ):
        return None
    return step if has_zero_point or not np.array_equal(bias_scale, product_scale) else None


def _dequantised_operand(value: ir.Value | None, moved: bool = True) -> Quantised | None:
    """Return the quantised tensor that `value` dequantises.

    moved: look also behind operators that only move elements, if it has one scale.
    """
    source = producer_before_wires(value)
    if moved and not is_op(source, "DequantizeLinear"):
        source = producer_before_moves(value)
    q = dequantised(source.outputs[0]) if source is not None else None
    return q if q is None or q.scalar or producer_before_wires(value) is source else None


def _is_byte_product(product: ir.Node, last: ir.Node, x: Quantised, w: Quantised) -> bool:
    """Return whether onnxruntime multiplies bytes to make the result of `last`, which is `product` or adds the bias."""
    if x.dtype not in (np.int8, np.uint8) or w.dtype not in (np.int8, x.dtype):
        return False
    if not is_op(product, "Conv") and (x.zero_value is None or w.zero_value is None):
        return False  # a QGemm needs both zero points
    is_matrix = product is last or len(product.inputs[0].shape or ()) == 2  # type: ignore[union-attr]
    end = last_superfluous_bound(last) if is_matrix else last
    if quantiser(end) is not None and (is_matrix or has_one_reader(end)):
        y = quantised_result(end)
        return y is not None and y.dtype == x.dtype
    return not is_op(product, "Conv") and (not is_matrix or _stays_integer(last))


def _stays_integer(node: ir.Node) -> bool:
    """Return whether onnxruntime multiplies bytes for a Gemm whose result stays float.

    It does not if a QuantizeLinear is among several readers, nor before a lone Relu or Clip with one reader, which it
    takes for the end of a product of bytes.
    """
    user = only_reader(node)
    if user is not None and is_op(user, "Relu", "Clip") and has_one_reader(user):
        return False
    return not any(_becomes_bytes(use.node) for use in node.outputs[0].uses())


def _becomes_bytes(reader: ir.Node) -> bool:
    """Return whether `reader` is a QuantizeLinear, or a superfluous bound before one."""
    if not is_op(reader, "Relu", "Clip"):
        return is_op(reader, "QuantizeLinear")
    y = quantised_result(reader) if has_one_reader(reader) else None
    return y is not None and is_superfluous_bound(reader, y)


def _set_bias_scale(node: ir.Node, number: int, step: NDArray[np.float32]) -> None:
    """Let input `number` of `node` dequantise its integers by `step` and without a zero point."""
    bias = node.inputs[number]
    assert bias is not None and node.graph is not None and isinstance(node.graph, ir.Graph)
    source, name = producer_before_wires(bias), f"{bias.name}_in_steps_of_{node.outputs[0].name}"
    assert source is not None
    axis = attributes(axis=len(shape(bias) or (0,)) - 1) if step.size > 1 else []
    scale = new_constant(node.graph, f"{name}_scale", step if axis else step[0])
    out = ir.Value(name=name, shape=bias.shape, type=bias.type)
    dequantise = ir.Node("", "DequantizeLinear", [source.inputs[0], scale], axis, outputs=[out], name=name)
    node.graph.insert_before(node, dequantise)
    node.replace_input_with(number, out)
