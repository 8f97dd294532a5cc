"""QDQ patterns to integer operators, so that both ONNX forms of quantised models become one.

    x8 = QuantizeLinear(x)   xf = DequantizeLinear(x8)
    yf = Conv(xf, DequantizeLinear(w8), DequantizeLinear(b32))      ->  y8 = QLinearConv(x8, ..., w8, ..., b32)
    y8 = QuantizeLinear(yf)

The integer operators are ONNX's (QLinearConv, QLinearMatMul), onnxruntime's (QGemm, QLinearAdd, ...), and three of
our own in domain "celosia": `Table` (y = table[x], any function of one 8-bit tensor), `QLinearMean` (mean over rows and
columns) and `QLinearConvTranspose`, which onnxruntime computes in float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph import chain
from celosia.compiler.graph.dead import drop_unused
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    attributes_of,
    constant,
    is_op,
    new_constant,
    only_use,
    shape,
)
from celosia.compiler.program.host.op import DOMAINS

MOVING_OPS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose")
"""Operators that only move elements, and that change places with QuantizeLinear before anything else happens."""
CHOOSING_OPS = (
    "Slice", "Split", "Gather", "GatherElements", "GatherND", "DepthToSpace", "SpaceToDepth", "Expand", "Tile",
    "Resize", "Upsample", "Pad", "MaxPool",
)  # fmt: skip
"""Those of which an element of the result is one of the operand's, or a constant: they change places with
DequantizeLinear. `_moved` says which uses of them do."""
UNARY_OPS = tuple(numerics.UNARY)
PER_CHANNEL_OPSET = 13
"""The first opset whose QuantizeLinear has an axis."""


@dataclass(frozen=True)
class Quantised:
    """An 8-bit (or int32, for a bias) tensor and what its integers mean: real = (value - zero) * scale."""

    value: ir.Value
    scale: NDArray[np.float32]
    zero: NDArray[Any]
    scale_value: ir.Value
    zero_value: ir.Value | None
    axis: int

    @property
    def scalar(self) -> bool:
        return self.scale.size == 1 and self.zero.size == 1

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.zero.dtype


@dataclass(frozen=True)
class Product:
    """x * w + bias, of bytes and int32. last: the operator that makes it, that of the product or of the addition."""

    x: Quantised
    w: Quantised
    bias: ir.Value | None
    last: ir.Node


def dequantised(value: ir.Value | None) -> Quantised | None:
    """What `value` is the DequantizeLinear of, where scale and zero point are constants."""
    node = value.producer() if value is not None else None
    return _quantised(node, node.inputs[0]) if is_op(node, "DequantizeLinear") else None  # type: ignore[union-attr]


def quantised(value: ir.Value) -> Quantised | None:
    """The QuantizeLinear that alone uses `value`, where scale and zero point are scalar constants."""
    node = only_use(value)
    if not is_op(node, "QuantizeLinear") or node.inputs[0] is not value:  # type: ignore[union-attr]
        return None
    found = _quantised(node, node.outputs[0])  # type: ignore[union-attr]
    return found if found is not None and found.scalar and found.dtype in (np.int8, np.uint8) else None


def _quantised(node: ir.Node | None, value: ir.Value | None) -> Quantised | None:
    if node is None or value is None or attribute(node, "block_size", 0):
        return None
    scale = constant(node.inputs[1])
    if scale is None or scale.dtype != np.float32:
        return None
    zero_value = node.inputs[2] if len(node.inputs) > 2 else None
    if zero_value is None:
        kind = value.dtype
        if node.op_type == "QuantizeLinear" and node.attributes.get("output_dtype") is not None:
            return None
        zero: NDArray[Any] | None = np.zeros(scale.shape, np.uint8 if kind is None else kind.numpy())
    else:
        zero = constant(zero_value)
    if zero is None or zero.dtype not in (np.int8, np.uint8, np.int32):
        return None
    return Quantised(value, scale, zero, node.inputs[1], zero_value, attribute(node, "axis", 1))  # type: ignore[arg-type]


class Integerise:
    """Replaces QDQ patterns in `graph` by integer operators. Run `run` once; it repeats until nothing changes."""

    def __init__(self, model: ir.Model) -> None:
        self.model, self.graph = model, model.graph

    def run(self) -> None:
        self._repeat(self._commute)
        self._repeat(lambda node: self._rewrite(node) or self._quantised_product(node))
        self._repeat(lambda node: self._choose(node) or self._join(node) or self._rewrite(node))
        self._repeat(self._float_product)

    def _repeat(self, rule: Callable[[ir.Node], bool]) -> None:
        while any([node.graph is not None and rule(node) for node in list(self.graph)]):
            drop_unused(self.graph)

    # Quantise and dequantise commute with operators that only move elements ------------------------------------

    def _commute(self, node: ir.Node) -> bool:
        if not node.inputs or not node.outputs:
            return False
        if is_op(node, *MOVING_OPS):
            return self._sink(node) or self._hoist(node)
        return is_op(node, *CHOOSING_OPS) and self._hoist(node)

    def _choose(self, node: ir.Node) -> bool:
        """The same for what stands behind operators on floats, once it is clear which these are."""
        sinks = is_op(node, *CHOOSING_OPS) and not is_op(node, "MaxPool") and len(node.outputs) == 1
        return (sinks and self._sink(node)) or self._commute(node)

    def _sink(self, node: ir.Node) -> bool:
        """moving(float) -> QuantizeLinear   becomes   QuantizeLinear -> moving(8 bit)."""
        x, q = node.inputs[0], quantised(node.outputs[0])
        operands = None if q is None else self._moved(node, q)
        if q is None or x is None or operands is None or constant(x) is not None:
            return False
        old = q.value.producer()
        assert old is not None
        fresh = self._like(old, [x, *old.inputs[1:]], q.value, x.shape, f"{x.name}_quantised_{node.name}")
        self._replace(old, node.op_type, [fresh, *operands], node.domain, dict(node.attributes))
        return True

    def _hoist(self, node: ir.Node) -> bool:
        """DequantizeLinear -> moving(float)   becomes   moving(8 bit) -> DequantizeLinear."""
        q = dequantised(node.inputs[0])
        if q is None or node.inputs[0].is_graph_output():  # type: ignore[union-attr]
            return False
        old, operands = node.inputs[0].producer(), self._moved(node, q, exact=True)  # type: ignore[union-attr]
        if operands is None:
            return False
        assert old is not None
        if not q.scalar:
            return self._turn(node, q, old)
        kept, attrs = list(node.outputs), list(node.attributes.values())
        made = [ir.Value(name=f"{q.value.name}_{y.name}", shape=y.shape, type=q.value.type) for y in kept]
        moved = ir.Node(node.domain, node.op_type, [q.value, *operands], attrs, outputs=made, name=node.name)
        self.graph.insert_before(node, moved)
        for y, y8 in zip(kept, made):
            out = ir.Value(name=None, shape=y.shape, type=y.type)
            inputs, given = [y8, *old.inputs[1:]], list(old.attributes.values())
            self.graph.insert_before(node, ir.Node(old.domain, old.op_type, inputs, given, outputs=[out]))
            self._take_over(y, out)
        self.graph.remove(node, safe=True)
        return True

    def _turn(self, node: ir.Node, q: Quantised, old: ir.Node) -> bool:
        """DequantizeLinear of weights by channel -> Transpose   becomes   DequantizeLinear of other weights."""
        weights = constant(q.value)
        if weights is None or node.op_type != "Transpose":
            return False
        perm = attribute(node, "perm", range(weights.ndim)[::-1])
        fresh = new_constant(self.graph, f"{q.value.name}_{node.name}", weights.transpose(perm))
        attrs = {attr.name: attr for attr in attributes(axis=list(perm).index(q.axis % weights.ndim))}
        inputs = [fresh, *old.inputs[1:]]
        self._replace(node, "DequantizeLinear", inputs, old.domain, dict(old.attributes) | attrs)
        return True

    def _moved(self, node: ir.Node, q: Quantised, exact: bool = False) -> list[ir.Value | None] | None:
        """What `node` takes beside its operand where it moves the bytes of `q`; None where it cannot.

        exact: a constant that it puts between them must be one that bytes can be.
        """
        rest = list(node.inputs[1:])
        if q.dtype not in (np.int8, np.uint8) and not is_op(node, *MOVING_OPS):
            return None
        match node.op_type:
            case "MaxPool" if len(node.outputs) > 1 or not np.all(q.scale > 0):
                return None
            case "Resize" | "Upsample" if attribute(node, "mode", "nearest") not in ("nearest", b"nearest"):
                return None
            case "Resize" if attribute(node, "coordinate_transformation_mode") == "tf_crop_and_resize":
                return None
            case "Pad" if attribute(node, "mode", "constant") == "constant":
                return self._padding(node, q, exact)
        return rest

    def _padding(self, node: ir.Node, q: Quantised, exact: bool) -> list[ir.Value | None] | None:
        """The inputs of a Pad with a constant as a byte of `q`."""
        if "pads" in node.attributes or len(node.inputs) < 2:  # before version 11
            return None
        given = node.inputs[2] if len(node.inputs) > 2 else None
        value = np.zeros(1, np.float32) if given is None else constant(given)
        if value is None or value.dtype != np.float32 or value.size != 1 or np.any(np.isnan(value)):
            return None
        real, scale, zero = value.reshape(-1)[0], q.scale.reshape(-1)[0], np.float32(q.zero.reshape(-1)[0])
        info = np.iinfo(q.dtype)
        byte = np.clip(np.rint(real / scale) + zero, info.min, info.max)
        if exact and (byte - zero) * scale != real:
            return None
        fill = new_constant(self.graph, f"{node.name}_fill", np.array(byte, q.dtype))
        return [node.inputs[1], fill, *node.inputs[3:]]

    def _join(self, node: ir.Node) -> bool:
        """Concat of parts of which some are quantised: the others are quantised, too, or all leave with one scale."""
        if not is_op(node, "Concat"):
            return False
        parts, y = [self._activation(value) for value in node.inputs], quantised(node.outputs[0])
        known = [part for part in parts if part is not None]
        if not known:
            return False
        attrs = dict(node.attributes)
        if y is not None:
            old = y.value.producer()
            assert old is not None
            values = [
                self._like(old, [x, *old.inputs[1:]], y.value, x.shape, f"{x.name}_quantised_{node.name}_{number}")
                for number, x in enumerate(node.inputs) if x is not None
            ]  # fmt: skip
            self._replace(old, "Concat", values, "", attrs)
            return True
        first, same = known[0], len(known) == len(parts)
        if not same or any(part.dtype != first.dtype or not _same_meaning(part, first) for part in known):
            return False
        last = node.inputs[0].producer()  # type: ignore[union-attr]
        assert last is not None
        dims = node.outputs[0].shape
        name = f"{node.outputs[0].name}_{node.name}_bytes"
        fresh = self._like(node, [part.value for part in known], first.value, dims, name)
        self._replace(node, "DequantizeLinear", [fresh, *last.inputs[1:]], last.domain, dict(last.attributes))
        return True

    def _like(self, node: ir.Node, inputs: list[Any], typed: ir.Value, dims: Any, name: str) -> ir.Value:
        """A new node in front of `node` with its operator and attributes; its output has the type of `typed`."""
        out = ir.Value(name=name, shape=ir.Shape(list(dims)) if dims is not None else None, type=typed.type)
        fresh = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=[out], name=name)
        self.graph.insert_before(node, fresh)
        return out

    def _replace(self, node: ir.Node, op: str, inputs: list[Any], domain: str, attrs: dict[str, ir.Attr]) -> None:
        """Put an operator in the place of `node`, with its outputs."""
        out = ir.Value(name=None, shape=node.outputs[0].shape, type=node.outputs[0].type)
        fresh = ir.Node(domain, op, inputs, list(attrs.values()), outputs=[out], name=node.name)
        self.graph.insert_before(node, fresh)
        self._take_over(node.outputs[0], out)
        self.graph.remove(node, safe=True)

    def _take_over(self, old: ir.Value, new: ir.Value) -> None:
        """`new` is used, named and returned in the place of `old`."""
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        name, old.name = old.name, None
        new.name = name

    # One rule for each operator --------------------------------------------------------------------------------

    def _rewrite(self, node: ir.Node) -> bool:
        if node.domain not in DOMAINS or len(node.outputs) != 1:
            return False
        if self._reads_outside(node):
            return False
        rule = _RULES.get(node.op_type)
        y = quantised(node.outputs[0]) if rule is not None or node.op_type in chain.OPS else None
        return y is not None and ((rule is not None and rule(self, node, y)) or self._chain(node, y))

    def _reads_outside(self, node: ir.Node) -> bool:
        """Whether `node`, in a body, reads a DequantizeLinear outside of it: onnxruntime computes floats there."""
        makers = [value.producer() for value in node.inputs if value is not None]
        return any(is_op(maker, "DequantizeLinear") and maker.graph is not self.graph for maker in makers)  # type: ignore[union-attr]

    def _emit(
        self, y: Quantised, domain: str, op: str, inputs: Sequence[ir.Value | None], source: ir.Node, **attrs: Any
    ) -> bool:
        """An integer operator that produces `y` in the place of `source` and its QuantizeLinear."""
        quantise = y.value.producer()
        assert quantise is not None
        dims = y.value.shape if y.value.shape is not None else source.outputs[0].shape
        out = ir.Value(name=None, shape=dims, type=ir.TensorType(ir.DataType.from_numpy(y.dtype)))
        fresh = ir.Node(domain, op, inputs, attributes(**attrs), outputs=[out], name=source.name)
        self.graph.insert_before(quantise, fresh)
        self._take_over(y.value, out)
        self.graph.remove(quantise, safe=True)
        return True

    def _parameters(self, q: Quantised) -> list[ir.Value]:
        """Scale and zero point of `q` as inputs of an integer operator."""
        zero = q.zero_value or new_constant(self.graph, f"{q.value.name}_zero", q.zero.reshape(q.scale.shape))
        return [q.scale_value, zero]

    def _operand(self, q: Quantised) -> list[ir.Value]:
        return [q.value, *self._parameters(q)]

    def _activation(self, value: ir.Value | None) -> Quantised | None:
        """A dequantised 8-bit tensor with one scale, not a constant."""
        q = dequantised(value)
        if q is None or not q.scalar or q.dtype not in (np.int8, np.uint8) or constant(q.value) is not None:
            return None
        return q

    def _conv(self, node: ir.Node, y: Quantised) -> bool:
        x, w = self._activation(node.inputs[0]), dequantised(node.inputs[1])
        if x is None or w is None or w.dtype not in (np.int8, np.uint8) or (not w.scalar and w.axis != 0):
            return False
        return self._convolve(node, "", "QLinearConv", x, w, y)

    def _conv_transpose(self, node: ir.Node, y: Quantised) -> bool:
        """onnxruntime has no integer operator for it."""
        x, w = self._activation(node.inputs[0]), dequantised(node.inputs[1])
        if x is None or x.dtype != y.dtype or w is None or w.dtype != np.int8 or np.any(w.zero):
            return False
        group, dims = attribute(node, "group", 1), w.value.shape or (0, 0)
        of_outputs = 1 if group == 1 else 0 if group == dims[0] and dims[1] == 1 else None  # the axis of w
        if constant(w.value) is None or not (w.scalar or w.axis == of_outputs):
            return False
        return self._convolve(node, "celosia", "QLinearConvTranspose", x, w, y)

    def _convolve(self, node: ir.Node, domain: str, op: str, x: Quantised, w: Quantised, y: Quantised) -> bool:
        given = node.inputs[2] if len(node.inputs) > 2 else None
        bias = self._bias(given, x, w, to_bytes=True)
        if given is not None and bias is None:
            return False
        inputs = [*self._operand(x), *self._operand(w), *self._parameters(y), bias]
        return self._emit(y, domain, op, inputs, node, **attributes_of(node))

    def _product(self, node: ir.Node, to_bytes: bool) -> Product | None:
        """What the Gemm or MatMul `node` computes, where integer operators compute the same. to_bytes: if its result
        is quantised.
        """
        x, w = self._activation(node.inputs[0]), dequantised(node.inputs[1])
        if x is None or w is None or w.dtype not in (np.int8, np.uint8) or self._reads_outside(node):
            return None
        rank, trans_b = len(w.value.shape or (0,)), attribute(node, "transB", 0)
        if not w.scalar and (constant(w.value) is None or w.axis % rank != rank - (2 if trans_b else 1)):
            return None
        if node.op_type == "MatMul":
            add = only_use(node.outputs[0])
            other = next((v for v in add.inputs if v is not node.outputs[0]), None) if is_op(add, "Add") else None  # type: ignore[union-attr]
            bias = self._bias(other, x, w, to_bytes)
            return Product(x, w, bias, node if bias is None or add is None else add)
        if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
            return None
        given = node.inputs[2] if len(node.inputs) > 2 else None
        bias = self._bias(given, x, w, to_bytes)
        return None if given is not None and bias is None else Product(x, w, bias, node)

    def _bias(self, value: ir.Value | None, x: Quantised, w: Quantised, to_bytes: bool) -> ir.Value | None:
        """A bias as int32 in the steps in which products are added, one for each column.

        One that is a float constant is rounded to such steps only where the result is quantised, as onnxruntime does.
        """
        b = dequantised(value)
        if b is not None:
            fits = b.dtype == np.int32 and not np.any(b.zero) and _bias_scale_fits(b.scale, x.scale, w.scale)
            return self._row(b.value) if fits else None
        given, step = constant(value), x.scale.reshape(()) * w.scale
        if not to_bytes or given is None or given.dtype != np.float32 or given.ndim != 1:
            return None
        if step.size not in (1, given.size) or not np.all(np.abs(steps := np.rint(given / step)) < 2.0**31):
            return None
        return new_constant(self.graph, f"{value.name}_int32", steps.astype(np.int32))  # type: ignore[union-attr]

    def _row(self, value: ir.Value) -> ir.Value | None:
        """A bias of rank 1; None for one that is no row."""
        dims, array = shape(value), constant(value)
        if dims is None or len(dims) == 1:
            return value if dims is not None else None
        if array is None or len(dims) != 2 or dims[0] != 1:
            return None
        return new_constant(self.graph, f"{value.name}_row", array[0])

    def _quantised_product(self, node: ir.Node) -> bool:
        """Gemm, MatMul, and MatMul -> Add of a bias: QGemm or QLinearMatMul. Unlike onnxruntime's, our QGemm takes a
        left operand of any rank.
        """
        product = self._product(node, to_bytes=True) if is_op(node, "Gemm", "MatMul") else None
        y = quantised(product.last.outputs[0]) if product is not None else None
        if product is None or y is None:
            return False
        x, w = self._operand(product.x), self._operand(product.w)
        if node.op_type == "MatMul" and product.bias is None:
            return self._emit(y, "", "QLinearMatMul", [*x, *w, *self._parameters(y)], product.last)
        attrs = {"transB": attribute(node, "transB", 0), "alpha": 1.0}
        inputs = [*x, *w, product.bias, *self._parameters(y)]
        return self._emit(y, "com.microsoft", "QGemm", inputs, product.last, **attrs)

    def _float_product(self, node: ir.Node) -> bool:
        """The same where the result stays float: QGemm without an output's scale, or MatMulIntegerToFloat."""
        product = self._product(node, to_bytes=False) if is_op(node, "Gemm", "MatMul") else None
        if product is None:
            return False
        (x, sx, zx), (w, sw, zw) = self._operand(product.x), self._operand(product.w)
        inputs: list[ir.Value | None]
        if node.op_type == "MatMul" and product.bias is None:
            op, inputs, attrs = "MatMulIntegerToFloat", [x, w, sx, sw, zx, zw], attributes()
        else:
            op, inputs = "QGemm", [x, sx, zx, w, sw, zw, product.bias]
            attrs = attributes(transB=attribute(node, "transB", 0), alpha=1.0)
        self._replace(product.last, op, inputs, "com.microsoft", {attr.name: attr for attr in attrs})
        return True

    def _binary(self, node: ir.Node, y: Quantised) -> bool:
        a, b = dequantised(node.inputs[0]), dequantised(node.inputs[1])
        if a is None or b is None or not (a.scalar and b.scalar) or not a.dtype == b.dtype == y.dtype:
            return False
        if constant(a.value) is not None and constant(b.value) is not None:
            return False
        inputs = [*self._operand(a), *self._operand(b), *self._parameters(y)]
        return self._emit(y, "com.microsoft", f"QLinear{node.op_type}", inputs, node)

    def _pool_average(self, node: ir.Node, y: Quantised) -> bool:
        x = self._activation(node.inputs[0])
        if x is None or x.dtype != y.dtype:
            return False
        inputs = [*self._operand(x), *self._parameters(y)]
        return self._emit(y, "com.microsoft", f"QLinear{node.op_type}", inputs, node, **attributes_of(node))

    def _mean(self, node: ir.Node, y: Quantised) -> bool:
        x = self._activation(node.inputs[0])
        dims = shape(node.inputs[0]) if node.inputs[0] is not None else None
        if x is None or x.dtype != y.dtype or dims is None or len(dims) != 4:
            return False
        axes = attribute(node, "axes")
        if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
            given = constant(node.inputs[1])
            axes = None if given is None else given.tolist()
        if axes is None or sorted(axis % 4 for axis in axes) != [2, 3]:
            return False
        inputs = [*self._operand(x), *self._parameters(y)]
        if attribute(node, "keepdims", 1):
            return self._emit(y, "celosia", "QLinearMean", inputs, node)
        image = ir.Value(
            name=f"{y.value.name}_image",
            shape=ir.Shape((*dims[:2], 1, 1)),
            type=ir.TensorType(ir.DataType.from_numpy(y.dtype)),
        )
        mean = ir.Node("celosia", "QLinearMean", inputs, outputs=[image], name=f"{node.name}_image")
        self.graph.insert_before(node, mean)
        return self._emit(y, "", "Flatten", [image], node, axis=1)

    def _concat(self, node: ir.Node, y: Quantised) -> bool:
        parts = [self._activation(value) for value in node.inputs]
        if any(part is None or part.dtype != y.dtype for part in parts):
            return False
        inputs = [*self._parameters(y), *(value for part in parts for value in self._operand(part))]  # type: ignore[arg-type]
        return self._emit(y, "com.microsoft", "QLinearConcat", inputs, node, axis=attribute(node, "axis"))

    def _softmax(self, node: ir.Node, y: Quantised) -> bool:
        x = self._activation(node.inputs[0])
        if x is None or x.dtype != y.dtype:
            return False
        opset = self.graph.opset_imports.get("", 13)
        axis = attribute(node, "axis", -1 if opset >= 13 else 1)
        inputs = [*self._operand(x), *self._parameters(y)]
        return self._emit(y, "com.microsoft", "QLinearSoftmax", inputs, node, axis=axis, opset=opset)

    def _unary(self, node: ir.Node, y: Quantised) -> bool:
        x = self._activation(node.inputs[0])
        arguments = _scalar_arguments(node)
        if x is None and arguments is not None and node.op_type in ("Relu", "Clip"):
            return self._clamp(node, y, arguments)
        if x is None or x.dtype != y.dtype or arguments is None:
            return False
        table = numerics.unary_table(node.op_type, arguments, *_meaning(x), *_meaning(y), y.dtype)
        return self._table(node, x, y, table)

    def _chain(self, node: ir.Node, y: Quantised) -> bool:
        """Float operators that together are a function of one 8-bit tensor."""
        found = chain.function_of(node.outputs[0], _scalar_arguments)
        x = self._activation(found[0]) if found is not None else None
        if found is None or x is None or x.dtype != y.dtype or shape(x.value) != shape(node.outputs[0]):
            return False
        return self._table(node, x, y, numerics.unary_table(found[1], {}, *_meaning(x), *_meaning(y), y.dtype))

    def _clamp(self, node: ir.Node, y: Quantised, arguments: dict[str, float]) -> bool:
        """float operator -> Relu -> QuantizeLinear   becomes   float operator -> QuantizeLinear -> Table.

        Both orders give the same bytes, because rounding never swaps two numbers. Where saturation implies the clamp,
        no table is needed.
        """
        x, quantise = node.inputs[0], y.value.producer()
        if x is None or x.producer() is None or only_use(x) is not node or is_op(x.producer(), "DequantizeLinear"):
            return False
        assert quantise is not None
        table = numerics.unary_table(node.op_type, arguments, *_meaning(y), *_meaning(y), y.dtype)
        if np.array_equal(table, np.arange(-128, 128)):
            quantise.replace_input_with(0, x)
            return True
        early = self._like(quantise, [x, *quantise.inputs[1:]], y.value, x.shape, f"{y.value.name}_unclamped")
        return self._table(node, replace(y, value=early), y, table)

    def _table(self, node: ir.Node, x: Quantised, y: Quantised, table: NDArray[Any]) -> bool:
        name = new_constant(self.graph, f"{node.name or y.value.name}_table", table)
        return self._emit(y, "celosia", "Table", [x.value, name], node, function=node.op_type)

    def _requantise(self, node: ir.Node, y: Quantised) -> bool:
        """DequantizeLinear -> QuantizeLinear is a table too."""
        x = self._activation(node.outputs[0])
        if x is None or node.outputs[0].is_graph_output():
            return False
        if x.dtype == y.dtype and _same_meaning(x, y):
            quantise = y.value.producer()
            assert quantise is not None
            if y.value.is_graph_output() and (x.value.producer() is None or x.value.producer().graph is not self.graph):  # type: ignore[union-attr]
                return False  # what comes from outside keeps its name
            name = y.value.name if y.value.is_graph_output() else None
            ir.convenience.replace_all_uses_with(y.value, x.value, replace_graph_outputs=True)
            self.graph.remove(quantise, safe=True)
            if name is not None:
                x.value.name = name
            return True
        if x.dtype != y.dtype:
            return False
        return self._table(node, x, y, numerics.unary_table("Identity", {}, *_meaning(x), *_meaning(y), y.dtype))


def _bias_scale_fits(b: NDArray[Any], x: NDArray[Any], w: NDArray[Any]) -> bool:
    """Whether an int32 bias is in steps of x_scale * w_scale, as the integer operators take it."""
    expected = x.reshape(-1).astype(np.float64) * w.reshape(-1).astype(np.float64)
    if expected.size not in (1, b.size) and b.size != 1:
        return False
    return bool(np.allclose(b.reshape(-1).astype(np.float64), expected, rtol=1e-5, atol=0))


def _meaning(q: Quantised) -> tuple[float, int]:
    """Scale and zero point of a tensor that has one of each."""
    return float(q.scale.item()), int(q.zero.item())


_ARGUMENT_NAMES = {"Clip": ("min", "max")}


def _scalar_arguments(node: ir.Node) -> dict[str, float] | None:
    """Attributes and constant scalar inputs of a unary operator by name, or None where they are not numbers."""
    arguments = {name: attribute(node, name) for name in node.attributes}
    for name, value in zip(_ARGUMENT_NAMES.get(node.op_type, ()), node.inputs[1:]):
        if value is not None:
            array = constant(value)
            if array is None or array.size != 1:
                return None
            arguments[name] = float(array.item())
    if node.op_type == "Gelu" and arguments.pop("approximate", "none") != "none":
        return None
    return arguments if all(isinstance(value, (int, float)) for value in arguments.values()) else None


def _same_meaning(x: Quantised, y: Quantised) -> bool:
    return bool(np.array_equal(x.scale.ravel(), y.scale.ravel()) and np.array_equal(x.zero.ravel(), y.zero.ravel()))


_RULES: dict[str, Callable[[Integerise, ir.Node, Quantised], bool]] = {
    "Conv": Integerise._conv,
    "ConvTranspose": Integerise._conv_transpose,
    "Add": Integerise._binary,
    "Mul": Integerise._binary,
    "GlobalAveragePool": Integerise._pool_average,
    "AveragePool": Integerise._pool_average,
    "ReduceMean": Integerise._mean,
    "Concat": Integerise._concat,
    "Softmax": Integerise._softmax,
    "DequantizeLinear": Integerise._requantise,
    **{op: Integerise._unary for op in UNARY_OPS},
}
QUANTISABLE = frozenset((*_RULES, *CHOOSING_OPS, "Gemm", "MatMul", "BatchNormalization")) - {
    "DequantizeLinear",
    "Softmax",
}
"""Float operators that become layers, or parts of layers, where their operands and results are quantised."""
