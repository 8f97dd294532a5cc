"""Float weights and biases between quantised tensors become integers, as onnxruntime makes them.

    x = DequantizeLinear(x8, sx, zx)          x = DequantizeLinear(x8, sx, zx)
    y = Conv(x, w, b)                   ->    y = Conv(x, DequantizeLinear(w8, sw, zw), DequantizeLinear(b32, sx * sw))
    y8 = QuantizeLinear(y, sy, zy)            y8 = QuantizeLinear(y, sy, zy)

w8 has one scale and zero point, of the range of w, and b32 = round(b / (sx * sw)). So for Gemm, ConvTranspose, and
MatMul to which a bias is added, also with Relu and Clip before QuantizeLinear; and for a Conv with BatchNormalization,
Mul and Add of constants behind it, which become part of its weights first. Models have such weights where a quantiser
was told to leave an operator out. This is part of what the model means: it happens before all passes, which are
compared with what it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike, NDArray

from celosia.compiler.graph.onnxruntime_rules.propagation import is_passed_on, is_quantised, maker, only_reader, origin
from celosia.compiler.graph.operands import operand, quantisation, set_operand, spec_of
from celosia.compiler.graph.simplify.batchnorm import along_outputs, is_training
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
from celosia.compiler.program.op_spec import Role

OVERFLOW = -(2.0**31)
"""The integer that onnxruntime has of a bias that no int32 holds, also of a large one: what x86 converts floats to."""
ABSORBED = {"Conv": ("BatchNormalization", "Add", "Mul"), "ConvTranspose": ("BatchNormalization",)}


@dataclass(frozen=True)
class _Product:
    """node: what multiplies what `source` dequantises by weights. last: what adds the bias, its input `place`.
    absorbed: what becomes part of the weights and bias, in order."""

    node: ir.Node
    source: ir.Node
    last: ir.Node
    place: int
    absorbed: tuple[ir.Node, ...]

    @property
    def bias(self) -> ir.Value | None:
        return self.last.inputs[self.place] if len(self.last.inputs) > self.place else None


def quantise_weights(model: ir.Model, kind: DTypeLike = np.float32) -> None:
    """Change `model`: constants of type `kind` become integers behind DequantizeLinear. Of float16, which onnxruntime
    then computes in float32, these are biases alone."""
    found = [product for node in model.graph if (product := _product(node)) is not None]
    fold_producers(model, (v for each in found for v in (each.node.inputs[1], each.bias, quantisation(each.source)[0])))
    for product in found:
        _quantise(model.graph, product, np.dtype(kind))


def _product(node: ir.Node) -> _Product | None:
    """That of `node`, where it is between quantised tensors."""
    last, flat = node, True
    if is_op(node, "MatMul"):
        add = only_reader(node) if is_passed_on(node) else None
        if add is None or not is_op(add, "Add") or len(shape(node.inputs[1]) or ()) != 2:  # type: ignore[arg-type]
            return None
        last, place = add, int(maker(add.inputs[0]) is node)
        flat = node.inputs[0] is not None and len(node.inputs[0].shape or ()) == 2
    elif is_op(node, "Conv", "ConvTranspose", "Gemm"):
        place = spec_of(node).having(Role.BIAS)[0]
    else:
        return None
    source = maker(node.inputs[0])
    source = origin(source.inputs[0] if source is not None and _pads(source, node) else node.inputs[0])
    absorbed = _absorbed(node)
    if source is None or not is_op(source, "DequantizeLinear") or not _is_quantised((last, *absorbed)[-1], flat):
        return None
    return _Product(node, source, last, place, absorbed)


def _pads(pad: ir.Node, node: ir.Node) -> bool:
    """Whether `pad` puts zeros around the images of a Conv alone, which could do so itself."""
    if not is_op(pad, "Pad") or not is_op(node, "Conv") or operand(pad, "axes") is not None:
        return False
    pads, value = constant(operand(pad, "pads")), operand(pad, "constant_value")
    fill = np.zeros(1) if value is None else constant(value)
    if pads is None or np.any(pads < 0) or np.any(pads.reshape(2, -1)[:, :2]) or fill is None or np.any(fill):
        return False
    explicit = attribute(node, "auto_pad", "NOTSET") in ("NOTSET", b"NOTSET")
    return explicit and attribute(pad, "mode", "constant") in ("constant", b"constant") and is_passed_on(pad)


def _absorbed(node: ir.Node) -> tuple[ir.Node, ...]:
    """Return the nodes behind a Conv that only scale and shift its channels by constants; behind a ConvTranspose only
    BatchNormalization."""
    found: list[ir.Node] = []
    last, w = node, shape(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    while is_op(node, "Conv", "ConvTranspose") and w is not None and is_passed_on(last):
        after = only_reader(last)
        channels = w[0] if is_op(node, "Conv") else w[1] * attribute(node, "group", 1)
        of_channels = (channels, *(1 for _ in w[2:]))
        if after is None or not _is_affine(after, last, of_channels) or not is_op(after, *ABSORBED[node.op_type]):
            break
        found.append(after)
        last = after
    return tuple(found)


def _is_affine(after: ir.Node, node: ir.Node, of_channels: tuple[int, ...]) -> bool:
    """of_channels: the shape of what has an element for each channel of an image."""
    if maker(after.inputs[0]) is not node or len(after.outputs) > 1:
        return False
    given = [constant(value) for value in after.inputs[1:]]
    if any(array is None or array.dtype != np.float32 for array in given):
        return False
    shapes = [array.shape for array in given if array is not None]
    if is_op(after, "BatchNormalization"):
        return all(each == of_channels[:1] for each in shapes) and not is_training(after)
    scalar = [()] if is_op(after, "Mul") else []
    return is_op(after, "Add", "Mul") and shapes[0] in (of_channels, (1, *of_channels), *scalar)


def _absorb(graph: ir.Graph, product: _Product) -> bool:
    """Compute weights and bias anew, in float32 and onnxruntime's order; False where they are no constants."""
    node = product.node
    w, b = constant(node.inputs[1]), constant(product.bias)
    if w is None or w.dtype != np.float32 or (product.bias is not None and (b is None or b.ndim != 1)):
        return False
    for after in product.absorbed:
        numbers = [constant(value).reshape(-1) for value in after.inputs[1:]]  # type: ignore[union-attr]
        if is_op(after, "BatchNormalization"):
            scale, offset, mean, variance = numbers
            scale = scale / np.sqrt(variance + np.float32(attribute(after, "epsilon", 1e-5)))
            w, b = (
                w * along_outputs(node, scale, w),
                offset - mean * scale if b is None else (b - mean) * scale + offset,
            )
        elif is_op(after, "Mul"):
            w, b = w * along_outputs(node, numbers[0], w), None if b is None else b * numbers[0]
        else:
            b = numbers[0] if b is None else b + numbers[0]
    set_operand(node, "w", new_constant(graph, f"{node.name}_absorbed", w))
    if b is not None:
        set_operand(node, "b", new_constant(graph, f"{node.name}_absorbed_bias", b))
    for after in product.absorbed:
        replace_keeping_name(after, node.outputs[0])
    return True


def _quantise(graph: ir.Graph, product: _Product, kind: np.dtype[Any]) -> None:
    if product.absorbed and not _absorb(graph, product):
        return
    node, last, given = product.node, product.last, product.bias
    scale, bias = constant(quantisation(product.source)[0]), constant(given)
    if scale is not None and (scale.dtype != kind or scale.size != 1):
        return
    if given is None and last is not node:
        return
    if given is not None and (bias is None or bias.dtype != kind or bias.ndim != 1):
        return
    if last is not node and bias is not None and bias.shape != (shape(node.inputs[1]) or ())[-1:]:  # type: ignore[arg-type]
        return
    found = _weights(node, bias)
    if found is None or found[1].dtype != kind:
        return
    w8, w_scale, w_zero = found
    if constant(node.inputs[1]) is not None:
        name = f"{node.name}_weights"
        arrays: dict[str, NDArray[Any] | None] = {f"{name}_int8": w8, f"{name}_scale": w_scale, f"{name}_zero": w_zero}
        node.replace_input_with(1, _dequantised(graph, node, arrays))
    if bias is not None and scale is not None:  # of a scale that comes at run time weights alone become integers
        step = scale.reshape(()).astype(np.float32) * w_scale.astype(np.float32)
        axis = {"axis": 0} if step.ndim else {}
        arrays = {f"{node.name}_bias_int32": in_steps(bias, step), f"{node.name}_bias_scale": step}
        value = _dequantised(graph, last, arrays, **axis)
        if kind != np.float32:
            to = ir.DataType.from_numpy(kind)
            out = ir.Value(name=None, shape=value.shape, type=ir.TensorType(to))
            graph.insert_before(last, ir.Node("", "Cast", [value], attributes(to=to.value), outputs=[out]))
            value = out
        last.replace_input_with(product.place, value)


def in_steps(bias: NDArray[Any], step: NDArray[np.float32]) -> NDArray[np.int32]:
    """A bias of float32 or float16 as onnxruntime adds it to products of bytes whose scales' product is `step`. It
    rounds the quotient in the bias's own type, so that float16 overflows."""
    with np.errstate(all="ignore"):
        steps = np.rint((bias.astype(np.float32) / step).astype(bias.dtype)).astype(np.float32)
    return np.where(np.abs(steps) < 2.0**31, steps, OVERFLOW).astype(np.int32)


def _is_quantised(node: ir.Node, flat: bool) -> bool:
    """Whether the result of `node` goes to QuantizeLinear alone, where it is `flat` through Relu and Clip perhaps:
    of other products onnxruntime makes a Gemm between two Reshapes, which only QuantizeLinear changes places with."""
    while flat and (user := only_reader(node)) is not None and is_op(user, "Relu", "Clip"):
        node = user
    return is_quantised(node)


def _weights(
    node: ir.Node, bias: NDArray[np.float32] | None
) -> tuple[NDArray[np.int8] | None, NDArray[np.float32], NDArray[np.int8] | None] | None:
    """Weights as integers where they are floats, their scales and zero point. None where they stay what they are."""
    source = maker(node.inputs[1])
    if not is_op(source, "DequantizeLinear"):
        w = constant(node.inputs[1])
        return None if w is None or w.dtype != np.float32 or not w.size else _in_bytes(w)
    assert source is not None
    scale = constant(source.inputs[1])
    if scale is None or bias is None or scale.dtype != bias.dtype or is_op(node, "MatMul"):
        return None
    if scale.size == 1:
        return None, scale.reshape(()), None
    rank = len(shape(node.inputs[1]) or (0,))  # type: ignore[arg-type]
    expected = 0 if not is_op(node, "Gemm") or attribute(node, "transB", 0) else 1
    if (
        scale.shape != bias.shape
        or attribute(source, "block_size", 0)
        or attribute(source, "axis", 1) % rank != expected
    ):
        return None
    return None, scale, None


def _in_bytes(w: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int8]]:
    """`w` as int8, of one scale and zero point, with which its range, to which 0 belongs, covers all bytes."""
    low, high = min(w.min(), np.float32(0)), max(w.max(), np.float32(0))
    scale = np.float32(1) if low == high else np.float32((high - low) / np.float32(255))
    zero = np.rint(np.clip(np.float32(-128) - low / scale, -128, 127)).astype(np.int8)
    steps = np.rint(w / scale) + np.float32(zero)
    return np.clip(steps, -128, 127).astype(np.int8), np.array(scale), np.array(zero)


def _dequantised(graph: ir.Graph, before: ir.Node, arrays: Mapping[str, NDArray[Any] | None], **attrs: int) -> ir.Value:
    """The DequantizeLinear of constants, by name: integers, scale and perhaps zero point."""
    values = [new_constant(graph, name, array) for name, array in arrays.items() if array is not None]
    out = ir.Value(name=None, shape=values[0].shape, type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node("", "DequantizeLinear", values, attributes(**attrs), outputs=[out])
    graph.insert_before(before, node)
    return out
