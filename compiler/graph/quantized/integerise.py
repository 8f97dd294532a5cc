"""QDQ patterns to integer operators, so that both ONNX forms of quantised models become one.

    x8 = QuantizeLinear(x)   xf = DequantizeLinear(x8)
    yf = Conv(xf, DequantizeLinear(w8), DequantizeLinear(b32))      ->  y8 = QLinearConv(x8, ..., w8, ..., b32)
    y8 = QuantizeLinear(yf)

The integer operators are ONNX's (QLinearConv, QLinearMatMul), onnxruntime's (QGemm, QLinearAdd, ...), and four of
our own in domain "celosia": `Table` (y = table[x], any function of one 8-bit tensor), `QLinearMean` (mean over rows and
columns), and `QLinearConvTranspose` and `QLinearNorm`, which onnxruntime computes in float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.onnxruntime_rules.float_weights import in_steps
from celosia.compiler.graph.onnxruntime_rules.propagation import is_quantised, past_bounds
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.quantized.commute import CHOOSING_OPS, IN_FLOATS, Commute
from celosia.compiler.graph.quantized.float_chain import FOLLOWED_OPS, function_of
from celosia.compiler.graph.quantized.qdq import (
    Product,
    Quantised,
    activation,
    adds_bias,
    dequantised,
    meaning,
    quantised,
    same_meaning,
)
from celosia.compiler.graph.quantized.rounded import CENTRED, NORMS, factors_of_floats, norm_operands
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    attributes_of,
    constant,
    derived_name,
    is_op,
    new_constant,
    only_use,
    shape,
)
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.op import DOMAINS
from celosia.compiler.program.op_spec import arrange, quantised_form

UNARY_OPS = tuple(numerics.UNARY)
PER_CHANNEL_OPSET = 13
"""The first opset whose QuantizeLinear has an axis."""


class Integerise(Commute):
    """Replaces QDQ patterns in `graph` by integer operators. Run `run` once; it repeats until nothing changes.

    norms: those of norms.py, too, whose results are not always onnxruntime's.
    """

    def __init__(self, model: ir.Model, norms: bool = False) -> None:
        super().__init__(model)
        self.norms = norms

    def run(self) -> None:
        """Changes the graph until nothing is left to do."""
        # QLinearSoftmax gives other bytes than floats do: only where onnxruntime itself makes one.
        self._softmaxes_in_integers = {
            node for node in self.graph if is_op(node, "Softmax") and is_quantised(past_bounds(node))
        }
        self._repeat(self._commute)
        self._repeat(lambda node: self._rewrite(node) or self._quantised_product(node))
        self._repeat(lambda node: self._choose(node) or self._join(node) or self._rewrite(node))
        self._repeat(self._float_product)

    def _repeat(self, rule: Callable[[ir.Node], bool]) -> None:
        while any([node.graph is not None and rule(node) for node in list(self.graph)]):
            drop_unused(self.graph)

    # One rule for each operator --------------------------------------------------------------------------------

    def _rewrite(self, node: ir.Node) -> bool:
        if node.domain not in DOMAINS or len(node.outputs) != 1:
            return False
        if self._reads_outside(node):
            return False
        rule = _RULES.get(node.op_type)
        y = quantised(node.outputs[0]) if rule is not None or node.op_type in FOLLOWED_OPS else None
        maker = None if y is None else y.value.producer()
        if maker is not None and IN_FLOATS in maker.meta and node.op_type != "DequantizeLinear":
            rule = None  # functions of one tensor may become tables, which compute what floats do
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

    def _emit_form(
        self, op: str, operands: Sequence[Quantised], y: Quantised, source: ir.Node, bias: ir.Value | None = None,
        domain: str | None = None, **attrs: Any,
    ) -> bool:  # fmt: skip
        """The quantised form of the float operator `op`, as `_emit`. domain: another one than that of the form."""
        form = quantised_form(op)
        inputs = arrange(form, [self._operand(x) for x in operands], self._parameters(y), bias)
        return self._emit(y, op_spec(form).domain if domain is None else domain, form, inputs, source, **attrs)

    def _conv(self, node: ir.Node, y: Quantised) -> bool:
        x, w = activation(operand(node, "x")), dequantised(operand(node, "w"))
        if x is None or w is None or (not w.scalar and w.axis != 0) or not _multiplies_bytes(x, w, y):
            return False
        return self._convolve(node, x, w, y)

    def _conv_transpose(self, node: ir.Node, y: Quantised) -> bool:
        """onnxruntime has no integer operator for it."""
        x, w = activation(operand(node, "x")), dequantised(operand(node, "w"))
        if x is None or x.dtype != y.dtype or w is None or w.dtype != np.int8 or np.any(w.zero):
            return False
        group, dims = attribute(node, "group", 1), w.value.shape or (0, 0)
        of_outputs = 1 if group == 1 else 0 if group == dims[0] and dims[1] == 1 else None  # the axis of w
        if constant(w.value) is None or not (w.scalar or w.axis == of_outputs):
            return False
        return self._convolve(node, x, w, y)

    def _convolve(self, node: ir.Node, x: Quantised, w: Quantised, y: Quantised) -> bool:
        given = operand(node, "b")
        bias = self._bias(given, x, w, to_bytes=True)
        if given is not None and bias is None:
            return False
        return self._emit_form(node.op_type, [x, w], y, node, bias, **attributes_of(node))

    def _product(self, node: ir.Node, to_bytes: bool) -> Product | None:
        """Return the operands of the Gemm or MatMul `node`, if an integer operator computes the same.

        to_bytes: its result is quantised.
        """
        x, w = activation(operand(node, "a")), dequantised(operand(node, "b"))
        if x is None or w is None or self._reads_outside(node) or not _multiplies_bytes(x, w):
            return None
        rank, trans_b = len(w.value.shape or (0,)), attribute(node, "transB", 0)
        if not w.scalar and (constant(w.value) is None or w.axis % rank != rank - (2 if trans_b else 1)):
            return None
        if node.op_type == "MatMul":
            add = only_use(node.outputs[0])
            other = next((v for v in add.inputs if v is not node.outputs[0]), None) if is_op(add, "Add") else None  # type: ignore[union-attr]
            bias = self._bias(other, x, w, to_bytes) if adds_bias(node, other) else None
            return Product(x, w, bias, node if bias is None or add is None else add)
        if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
            return None
        given = operand(node, "c")
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
        if step.size not in (1, given.size):
            return None
        return new_constant(self.graph, f"{value.name}_int32", in_steps(given, step))  # type: ignore[union-attr]

    def _row(self, value: ir.Value) -> ir.Value:
        """A bias, of rank 1 where it is a constant of one row."""
        dims, array = shape(value), constant(value)
        if array is None or dims is None or len(dims) == 1 or array.size != prod(dims[-1:]):
            return value
        return new_constant(self.graph, f"{value.name}_row", array.reshape(-1))

    def _quantised_product(self, node: ir.Node) -> bool:
        """Gemm, MatMul, and MatMul -> Add of a bias: QGemm or QLinearMatMul. Unlike onnxruntime's, our QGemm takes a
        left operand of any rank.
        """
        product = self._product(node, to_bytes=True) if is_op(node, "Gemm", "MatMul") else None
        y = quantised(product.last.outputs[0]) if product is not None else None
        if product is None or y is None or not _multiplies_bytes(product.x, product.w, y):
            return False
        operands = [product.x, product.w]
        if node.op_type == "MatMul" and product.bias is None:
            return self._emit_form("MatMul", operands, y, product.last)
        attrs = {"transB": attribute(node, "transB", 0), "alpha": 1.0}
        return self._emit_form("Gemm", operands, y, product.last, product.bias, **attrs)

    def _float_product(self, node: ir.Node) -> bool:
        """Replace a product whose result stays float: QGemm without an output's scale, or MatMulIntegerToFloat."""
        product = self._product(node, to_bytes=False) if is_op(node, "Gemm", "MatMul") else None
        if product is None:
            return False
        if node.op_type == "MatMul" and product.bias is None:
            op, attrs = "MatMulIntegerToFloat", attributes()
        else:
            op, attrs = quantised_form("Gemm"), attributes(transB=attribute(node, "transB", 0), alpha=1.0)
        inputs = arrange(op, [self._operand(product.x), self._operand(product.w)], bias=product.bias)
        self._replace(product.last, op, inputs, op_spec(op).domain, {attr.name: attr for attr in attrs})
        return True

    def _binary(self, node: ir.Node, y: Quantised) -> bool:
        pair = _pair(node, y)
        return pair is not None and self._emit_form(node.op_type, pair, y, node)

    def _pool_average(self, node: ir.Node, y: Quantised) -> bool:
        x = activation(node.inputs[0])
        if x is None or x.dtype != y.dtype:
            return False
        return self._emit_form(node.op_type, [x], y, node, **attributes_of(node))

    def _mean(self, node: ir.Node, y: Quantised) -> bool:
        x = activation(node.inputs[0])
        dims = shape(node.inputs[0]) if node.inputs[0] is not None else None
        if x is None or x.dtype != y.dtype or dims is None or len(dims) != 4:
            return False
        axes = attribute(node, "axes")
        if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
            given = constant(node.inputs[1])
            axes = None if given is None else given.tolist()
        if axes is None or sorted(axis % 4 for axis in axes) != [2, 3]:
            return False
        if not 0 < numerics.mean_scale(meaning(x)[0], meaning(y)[0], 1) < np.inf:
            return False
        if attribute(node, "keepdims", 1):
            return self._emit_form(node.op_type, [x], y, node)
        form = quantised_form(node.op_type)
        inputs = arrange(form, [self._operand(x)], self._parameters(y))
        image = ir.Value(
            name=derived_name(self.graph, f"{y.value.name}_image"),
            shape=ir.Shape((*dims[:2], 1, 1)),
            type=ir.TensorType(ir.DataType.from_numpy(y.dtype)),
        )
        mean = ir.Node(op_spec(form).domain, form, inputs, outputs=[image], name=f"{node.name}_image")
        self.graph.insert_before(node, mean)
        return self._emit(y, "", "Flatten", [image], node, axis=1)

    def _concat(self, node: ir.Node, y: Quantised) -> bool:
        parts = [activation(value) for value in node.inputs]
        if any(part is None or part.dtype != y.dtype for part in parts):
            return False
        known = [part for part in parts if part is not None]
        return self._emit_form(node.op_type, known, y, node, axis=attribute(node, "axis"))

    def _softmax(self, node: ir.Node, y: Quantised) -> bool:
        """Make a QLinearSoftmax where onnxruntime does, which `run` has found out before any operator moved."""
        x = activation(node.inputs[0])
        if x is None or x.dtype != y.dtype or node not in self._softmaxes_in_integers:
            return False
        opset = self.graph.opset_imports.get("", 13)
        axis = attribute(node, "axis", -1 if opset >= 13 else 1)
        return self._emit_form(node.op_type, [x], y, node, axis=axis, opset=opset)

    def _norm(self, node: ir.Node, y: Quantised) -> bool:
        found = norm_operands(self.graph, node, y) if self.norms else None
        if found is None:
            return False
        inputs = [*self._operand(found[0]), *found[1], *self._parameters(y)]
        return self._emit(y, "celosia", "QLinearNorm", inputs, node, centre=int(node.op_type == CENTRED))

    def _unary(self, node: ir.Node, y: Quantised) -> bool:
        x = activation(node.inputs[0])
        arguments = _scalar_arguments(node)
        if x is None and arguments is not None and node.op_type in ("Relu", "Clip"):
            return self._clamp(node, y, arguments)
        if x is None or x.dtype != y.dtype or arguments is None:
            return False
        table = numerics.unary_table(node.op_type, arguments, *meaning(x), *meaning(y), y.dtype)
        return self._table(node, x, y, table)

    def _chain(self, node: ir.Node, y: Quantised) -> bool:
        """Float operators that together are a function of one 8-bit tensor."""
        found = function_of(node.outputs[0], _scalar_arguments)
        x = activation(found[0]) if found is not None else None
        if found is None or x is None or x.dtype != y.dtype or shape(x.value) != shape(node.outputs[0]):
            return False
        return self._table(node, x, y, numerics.unary_table(found[1], {}, *meaning(x), *meaning(y), y.dtype))

    def _clamp(self, node: ir.Node, y: Quantised, arguments: dict[str, float]) -> bool:
        """float operator -> Relu -> QuantizeLinear   becomes   float operator -> QuantizeLinear -> Table.

        Both orders give the same bytes, because rounding never swaps two numbers. Where saturation implies the clamp,
        no table is needed. Where it does not, onnxruntime adds and multiplies floats, of bytes, too (sums.py).
        """
        x, quantise = node.inputs[0], y.value.producer()
        if x is None or x.producer() is None or only_use(x) is not node or is_op(x.producer(), "DequantizeLinear"):
            return False
        assert quantise is not None
        table = numerics.unary_table(node.op_type, arguments, *meaning(y), *meaning(y), y.dtype)
        if np.array_equal(table, np.arange(-128, 128)):
            quantise.replace_input_with(0, x)
            return True
        made = x.producer()
        pair = _pair(made, y) if is_op(made, *numerics.BINARY) else None
        factors = None if pair is None else factors_of_floats(made.op_type, *pair, y)  # type: ignore[union-attr]
        if pair is not None and factors is None:
            return False
        early = self._like(quantise, [x, *quantise.inputs[1:]], y.value, x.shape, f"{y.value.name}_unclamped")
        self._table(node, replace(y, value=early), y, table)
        if factors and pair is not None and made is not None:
            self._emit_form(made.op_type, pair, replace(y, value=early), made, domain="celosia", factors=factors)
        return True

    def _table(self, node: ir.Node, x: Quantised, y: Quantised, table: NDArray[Any]) -> bool:
        name = new_constant(self.graph, f"{node.name or y.value.name}_table", table)
        return self._emit(y, "celosia", "Table", [x.value, name], node, function=node.op_type)

    def _requantise(self, node: ir.Node, y: Quantised) -> bool:
        """DequantizeLinear -> QuantizeLinear is a table too."""
        x = activation(node.outputs[0])
        if x is None or node.outputs[0].is_graph_output():
            return False
        if x.dtype == y.dtype and same_meaning(x, y):
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
        return self._table(node, x, y, numerics.unary_table("Identity", {}, *meaning(x), *meaning(y), y.dtype))


def _multiplies_bytes(x: Quantised, w: Quantised, y: Quantised | None = None) -> bool:
    """Whether onnxruntime multiplies bytes of these types: results are of the type of x, and weights of an int8 x are
    int8. Otherwise it multiplies floats, which differ next to ties."""
    if w.dtype not in (np.int8, np.uint8) or (y is not None and x.dtype != y.dtype):
        return False
    return bool(x.dtype == np.uint8 or w.dtype == np.int8)


def _pair(node: ir.Node | None, y: Quantised) -> tuple[Quantised, Quantised] | None:
    """The operands of `node`, where they are bytes of the type of `y` with one scale each, and not both constants."""
    assert node is not None
    a, b = dequantised(node.inputs[0]), dequantised(node.inputs[1])
    if a is None or b is None or not (a.scalar and b.scalar) or not a.dtype == b.dtype == y.dtype:
        return None
    return None if constant(a.value) is not None and constant(b.value) is not None else (a, b)


def _bias_scale_fits(b: NDArray[Any], x: NDArray[Any], w: NDArray[Any]) -> bool:
    """Whether an int32 bias is in steps of x_scale * w_scale, as the integer operators take it."""
    expected = x.reshape(-1).astype(np.float64) * w.reshape(-1).astype(np.float64)
    if expected.size not in (1, b.size) and b.size != 1:
        return False
    return bool(np.allclose(b.reshape(-1).astype(np.float64), expected, rtol=1e-5, atol=0))


_ARGUMENT_NAMES = {"Clip": ("min", "max")}


_RULES: dict[str, Callable[[Integerise, ir.Node, Quantised], bool]] = {
    "Conv": Integerise._conv,
    "ConvTranspose": Integerise._conv_transpose,
    **dict.fromkeys(numerics.BINARY, Integerise._binary),
    "GlobalAveragePool": Integerise._pool_average,
    "AveragePool": Integerise._pool_average,
    "ReduceMean": Integerise._mean,
    "Concat": Integerise._concat,
    "Softmax": Integerise._softmax,
    "DequantizeLinear": Integerise._requantise,
    **dict.fromkeys(NORMS, Integerise._norm),
    **{op: Integerise._unary for op in UNARY_OPS},
}
QUANTISABLE = frozenset((*_RULES, *CHOOSING_OPS, "Gemm", "MatMul", "BatchNormalization")) - {
    "DequantizeLinear",
    "Softmax",
    *NORMS,
}
"""Float operators that become layers, or parts of layers, where their operands and results are quantised."""


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
