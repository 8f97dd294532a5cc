"""Replace QDQ patterns by integer operators, so that both ONNX forms of quantised models become one.

    x8 = QuantizeLinear(x)   xf = DequantizeLinear(x8)
    yf = Conv(xf, DequantizeLinear(w8), DequantizeLinear(b32))      ->  y8 = QLinearConv(x8, ..., w8, ..., b32)
    y8 = QuantizeLinear(yf)

The integer operators are ONNX's (QLinearConv, QLinearMatMul), onnxruntime's (QGemm, QLinearAdd, ...), and four of our
own in domain "celosia": `Table` (y = table[x], any function of one 8-bit tensor), `QLinearMean` (mean over rows and
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
from celosia.compiler.graph.onnxruntime_rules.propagation import is_quantised, last_superfluous_bound
from celosia.compiler.graph.onnxruntime_rules.weights_and_biases import quantise_bias
from celosia.compiler.graph.operands import MODEL_WEIGHTS, operand
from celosia.compiler.graph.qdq import (
    Product,
    Quantised,
    activation,
    adds_bias,
    dequantised,
    have_same_parameters,
    quantised,
    scale_and_zero,
)
from celosia.compiler.graph.quantized.commute import (
    CHOOSING_OPS,
    IN_FLOATS,
    MAXIMA,
    Commute,
    reduced_axes,
    reduces_images,
)
from celosia.compiler.graph.quantized.exact_products import (
    ADVICE,
    PRODUCTS,
    ROUNDED,
    ROUNDED_NOTE,
    dequantised_product,
    scaled_mean,
)
from celosia.compiler.graph.quantized.rounded import CENTRED, NORMS, WHY, factors_of_floats, norm_operands
from celosia.compiler.graph.quantized.tables import (
    ELEMENTWISE_OPS,
    code_of,
    function_of,
    function_of_node,
    table_attributes,
)
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
from celosia.compiler.program.host.op import DOMAINS, HostError
from celosia.compiler.program.op_spec import arrange_operands, quantised_form

PER_CHANNEL_OPSET = 13
"""The first opset whose QuantizeLinear has an axis."""


class Integerise(Commute):
    """Replaces QDQ patterns in `graph` by integer operators. Call `run` once.

    Methods that take a node are rules: they return whether they changed the graph.

    correctly: also replace operators of floats whose integers round correctly, but not always as onnxruntime's floats:
    normalisations (rounded.py) and products (exact_products.py).
    """

    def __init__(self, model: ir.Model, correctly: bool = False) -> None:
        super().__init__(model)
        self.correctly = correctly
        self._rounding_products: set[tuple[ir.Node, ir.Value]] = set()
        """Products, with their quantised results, that integers do not compute exactly."""

    def run(self) -> None:
        """Apply all rules, in four rounds, each until nothing changes.

        First maxima of images become poolings, and elements move as bytes. Then operators on bytes become integer
        operators. Then it is clear which others compute floats, and quantisation moves through the operators behind
        these. Last come products whose result stays float.
        """
        # QLinearSoftmax gives other bytes than floats do, so it replaces Softmax only where onnxruntime uses it.
        self._softmaxes_in_integers = {
            node for node in self.graph if is_op(node, "Softmax") and is_quantised(last_superfluous_bound(node))
        }
        self._repeat(self._pool_maxima)
        self._repeat(self._commute)
        self._repeat(lambda node: self._rewrite_quantised_product(node) or self._rewrite(node))
        self._repeat(lambda node: self._commute_late(node) or self._quantise_parts(node) or self._rewrite(node))
        self._repeat(self._rewrite_float_product)

    def _repeat(self, rule: Callable[[ir.Node], bool]) -> None:
        """Apply a rule to all nodes until it changes none; drop unused nodes in between."""
        while any([node.graph is not None and rule(node) for node in list(self.graph)]):
            drop_unused(self.graph)

    # One rule for each operator --------------------------------------------------------------------------------

    def _rewrite(self, node: ir.Node) -> bool:
        """Replace `node` and its QuantizeLinear by an integer operator (_RULES).

        If there is none, or onnxruntime computes floats here, they become a table if they end a chain of functions.
        """
        if node.domain not in DOMAINS or len(node.outputs) != 1:
            return False
        if self._reads_outer_dequantise(node):
            return False
        rule = _RULES.get(node.op_type)
        may_rewrite = rule is not None or node.op_type in ELEMENTWISE_OPS or is_op(node, *PRODUCTS)
        y = quantised(node.outputs[0]) if may_rewrite else None
        quantise = None if y is None else y.value.producer()
        if y is None:
            return False
        if quantise is not None and IN_FLOATS in quantise.meta and node.op_type != "DequantizeLinear":
            rule = None  # onnxruntime computes floats here; only what has the bytes of floats may replace it
        return (
            (rule is not None and rule(self, node, y))
            or self._rewrite_exact_product(node, y)
            or (is_op(node, "Mul") and self._rewrite_scaled_mean(node, y))
            or self._rewrite_chain(node, y)
        )

    def _reads_outer_dequantise(self, node: ir.Node) -> bool:
        """Return whether `node`, in a body, reads a DequantizeLinear outside of it.

        onnxruntime computes floats there.
        """
        producers = [value.producer() for value in node.inputs if value is not None]
        return any(is_op(producer, "DequantizeLinear") and producer.graph is not self.graph for producer in producers)  # type: ignore[union-attr]

    def _replace_by(
        self, y: Quantised, domain: str, op: str, inputs: Sequence[ir.Value | None], source: ir.Node, **attrs: Any
    ) -> bool:
        """Replace `source` and its QuantizeLinear by an integer operator whose result is `y`. Returns True."""
        quantise = y.value.producer()
        assert quantise is not None
        dims = y.value.shape if y.value.shape is not None else source.outputs[0].shape
        out = ir.Value(name=None, shape=dims, type=ir.TensorType(ir.DataType.from_numpy(y.dtype)))
        new_node = ir.Node(domain, op, inputs, attributes(**attrs), outputs=[out], name=source.name)
        if note := source.meta.get(ROUNDED, quantise.meta.get(ROUNDED)):
            new_node.meta[ROUNDED] = note
        self.graph.insert_before(quantise, new_node)
        self._take_over(y.value, out)
        self.graph.remove(quantise, safe=True)
        return True

    def _parameters(self, q: Quantised) -> list[ir.Value]:
        """Return scale and zero point of `q` as inputs of an integer operator."""
        zero = q.zero_value or new_constant(self.graph, f"{q.value.name}_zero", q.zero.reshape(q.scale.shape))
        return [q.scale_value, zero]

    def _quantised_inputs(self, q: Quantised) -> list[ir.Value]:
        """Return integers, scale and zero point of `q` as inputs of an integer operator."""
        return [q.value, *self._parameters(q)]

    def _replace_by_form(
        self, op: str, operands: Sequence[Quantised], y: Quantised, source: ir.Node, bias: ir.Value | None = None,
        domain: str | None = None, **attrs: Any,
    ) -> bool:  # fmt: skip
        """Replace `source` by the quantised form of the float operator `op`, as `_replace_by` does.

        domain: "celosia" for our own operator of the form's name, which takes other attributes; None for the form's
        domain.
        """
        form = quantised_form(op)
        inputs = arrange_operands(form, [self._quantised_inputs(x) for x in operands], self._parameters(y), bias)
        return self._replace_by(y, op_spec(form).domain if domain is None else domain, form, inputs, source, **attrs)

    def _rewrite_conv(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a Conv of bytes with weights by one scale or one for each output channel."""
        x, w = activation(operand(node, "x")), dequantised(operand(node, "w"))
        if x is None or w is None or (not w.scalar and w.axis != 0) or not _multiplies_bytes(x, w, y):
            return False
        return self._replace_convolution(node, x, w, y)

    def _rewrite_conv_transpose(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a ConvTranspose of bytes by constant int8 weights; onnxruntime has no integer operator for it."""
        x, w = activation(operand(node, "x")), dequantised(operand(node, "w"))
        if x is None or x.dtype != y.dtype or w is None or w.dtype != np.int8 or np.any(w.zero):
            return False
        group, dims = attribute(node, "group", 1), w.value.shape or (0, 0)
        output_axis = 1 if group == 1 else 0 if group == dims[0] and dims[1] == 1 else None  # of w
        if constant(w.value) is None or not (w.scalar or w.axis == output_axis):
            return False
        return self._replace_convolution(node, x, w, y)

    def _replace_convolution(self, node: ir.Node, x: Quantised, w: Quantised, y: Quantised) -> bool:
        """Replace a convolution of `x` by `w` whose bias, if any, can be an int32 in steps of the products."""
        bias_operand = operand(node, "b")
        bias = self._bias_in_steps(bias_operand, x, w, to_bytes=True)
        if bias_operand is not None and bias is None:
            return False
        return self._replace_by_form(node.op_type, [x, w], y, node, bias, **attributes_of(node))

    def _find_product(self, node: ir.Node, to_bytes: bool) -> Product | None:
        """Return the operands of a Gemm or MatMul, with the bias of an Add behind it, if integer operators can compute
        it.

        to_bytes: its result is quantised.
        """
        x, w = activation(operand(node, "a")), dequantised(operand(node, "b"))
        if x is None or w is None or self._reads_outer_dequantise(node) or not _multiplies_bytes(x, w):
            return None
        rank, trans_b = len(w.value.shape or (0,)), attribute(node, "transB", 0)
        if not w.scalar and (constant(w.value) is None or w.axis % rank != rank - (2 if trans_b else 1)):
            return None
        if node.op_type == "MatMul":
            add = only_use(node.outputs[0])
            addend = next((v for v in add.inputs if v is not node.outputs[0]), None) if is_op(add, "Add") else None  # type: ignore[union-attr]
            bias = self._bias_in_steps(addend, x, w, to_bytes) if adds_bias(node, addend) else None
            return Product(x, w, bias, node if bias is None or add is None else add)
        if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
            return None
        c = operand(node, "c")
        bias = self._bias_in_steps(c, x, w, to_bytes)
        return None if c is not None and bias is None else Product(x, w, bias, node)

    def _bias_in_steps(self, value: ir.Value | None, x: Quantised, w: Quantised, to_bytes: bool) -> ir.Value | None:
        """Return a bias as int32 in steps of x_scale * w_scale, in which products are summed; None if it is none.

        A float constant is rounded to such steps only if the result is quantised, as onnxruntime does.
        """
        b = dequantised(value)
        if b is not None:
            fits = b.dtype == np.int32 and not np.any(b.zero) and _bias_scale_fits(b.scale, x.scale, w.scale)
            return self._flatten_bias(b.value) if fits else None
        array, step = constant(value), x.scale.reshape(()) * w.scale
        if not to_bytes or array is None or array.dtype != np.float32 or array.ndim != 1:
            return None
        if step.size not in (1, array.size):
            return None
        return new_constant(self.graph, f"{value.name}_int32", quantise_bias(array, step))  # type: ignore[union-attr]

    def _flatten_bias(self, value: ir.Value) -> ir.Value:
        """Return a bias whose leading axes have size 1 as a constant of rank 1; others as they are."""
        dims, array = shape(value), constant(value)
        if array is None or dims is None or len(dims) == 1 or array.size != prod(dims[-1:]):
            return value
        return new_constant(self.graph, f"{value.name}_row", array.reshape(-1))

    def _rewrite_quantised_product(self, node: ir.Node) -> bool:
        """Replace Gemm, MatMul, or MatMul -> Add of a bias, by QGemm or QLinearMatMul.

        Unlike onnxruntime's, our QGemm takes a left operand of any rank.
        """
        product = self._find_product(node, to_bytes=True) if is_op(node, "Gemm", "MatMul") else None
        y = quantised(product.last.outputs[0]) if product is not None else None
        if product is None or y is None or not _multiplies_bytes(product.x, product.w, y):
            return False
        operands = [product.x, product.w]
        if node.op_type == "MatMul" and product.bias is None:
            return self._replace_by_form("MatMul", operands, y, product.last)
        attrs = {"transB": attribute(node, "transB", 0), "alpha": 1.0}
        return self._replace_by_form("Gemm", operands, y, product.last, product.bias, **attrs)

    def _rewrite_exact_product(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a product that onnxruntime computes in floats by one of integers, if no sum of the floats can round.

        Such are those with a bias of int8, or with a result of another type than its operand.
        """
        product = None if self._reads_outer_dequantise(node) else dequantised_product(node)
        if product is None or (product.node, y.value) in self._rounding_products:
            return False
        source, is_exact = product.node, True
        try:
            fitted = product.fit(y)
        except numerics.RoundingError as reason:
            source.meta[WHY], is_exact = f"{reason}; {ADVICE}", False
            if not self.correctly:
                self._rounding_products.add((source, y.value))
                return False
            try:
                fitted = product.fit(y, nearest=True)
            except numerics.RoundingError:
                return False
        name = derived_name(self.graph, f"{source.name or y.value.name}_exact")
        arrays = {
            "bias": fitted.bias, "w_scale": fitted.w_scale, "y_zero": np.array(fitted.zero_point, y.dtype),
            "w_zero": np.array(np.broadcast_to(product.w.zero.reshape(-1), fitted.w_scale.shape)),
        }  # fmt: skip
        if not is_exact:
            node.meta.setdefault(ROUNDED, ROUNDED_NOTE)
        bias, w_scale, y_zero, w_zero = (new_constant(self.graph, f"{name}_{part}", a) for part, a in arrays.items())
        w = replace(product.w, scale=fitted.w_scale, zero=arrays["w_zero"], scale_value=w_scale, zero_value=w_zero)
        result = replace(y, zero=arrays["y_zero"], zero_value=y_zero)
        if is_op(source, "Conv", "ConvTranspose"):
            self._replace_by_form(source.op_type, [product.x, w], result, node, bias, **attributes_of(source))
        else:
            attrs = {"transB": attribute(source, "transB", 0), "alpha": 1.0}
            self._replace_by_form("Gemm", [product.x, w], result, node, bias, **attrs)
        return True

    def _rewrite_scaled_mean(self, node: ir.Node, y: Quantised) -> bool:
        """Replace GlobalAveragePool -> Mul by a constant by an average of bytes, if both round alike."""
        scaled = scaled_mean(node, y)
        if scaled is None:
            return False
        pool, x, x_scale = scaled
        name = derived_name(self.graph, f"{pool.name or y.value.name}_scale")
        x = replace(x, scale=x_scale, scale_value=new_constant(self.graph, name, x_scale))
        return self._replace_by_form(pool.op_type, [x], y, node)

    def _rewrite_float_product(self, node: ir.Node) -> bool:
        """Replace a product whose result stays float by QGemm without an output scale, or by MatMulIntegerToFloat."""
        product = self._find_product(node, to_bytes=False) if is_op(node, "Gemm", "MatMul") else None
        if product is None:
            return False
        if node.op_type == "MatMul" and product.bias is None:
            op, attrs = "MatMulIntegerToFloat", attributes()
        else:
            op, attrs = quantised_form("Gemm"), attributes(transB=attribute(node, "transB", 0), alpha=1.0)
        inputs = arrange_operands(
            op, [self._quantised_inputs(product.x), self._quantised_inputs(product.w)], bias=product.bias
        )
        self._replace_node(product.last, op, inputs, op_spec(op).domain, {attr.name: attr for attr in attrs})
        return True

    def _rewrite_binary(self, node: ir.Node, y: Quantised) -> bool:
        """Replace an Add, Mul or the like of two 8-bit tensors by its quantised form."""
        pair = _byte_operands(node, y)
        if pair is not None:
            return self._replace_by_form(node.op_type, pair, y, node)
        operands = [activation(value) for value in node.inputs]
        known = [q for q in operands if q is not None]
        if len(known) < 2:
            return False
        # The operands have different types, so onnxruntime adds or multiplies floats. A table changes the type.
        pair = _with_type(known[0], y.dtype), _with_type(known[1], y.dtype)
        factors = factors_of_floats(node.op_type, *pair, y)
        if factors is None and not self.correctly:
            return False
        typed = [self._change_type(node, old, new) for old, new in zip(known, pair)]
        attrs: dict[str, Any] = {"domain": "celosia", "factors": factors} if factors else {}
        return self._replace_by_form(node.op_type, typed, y, node, **attrs)

    def _change_type(self, before: ir.Node, x: Quantised, typed: Quantised) -> Quantised:
        """Insert a table that changes the type of `x` to that of `typed`, which has the same real values."""
        if x.dtype == typed.dtype:
            return x
        name = derived_name(self.graph, f"{x.value.name}_{typed.dtype}")
        table = new_constant(self.graph, f"{name}_table", np.arange(-128, 128).astype(np.int8))
        attrs = table_attributes("Cast", *(ir.DataType.from_numpy(q.dtype) for q in (x, typed)))
        out = ir.Value(name=name, shape=x.value.shape, type=ir.TensorType(ir.DataType.from_numpy(typed.dtype)))
        self.graph.insert_before(before, ir.Node("celosia", "Table", [x.value, table], attrs, outputs=[out], name=name))
        return replace(typed, value=out, zero_value=new_constant(self.graph, f"{name}_zero", typed.zero))

    def _rewrite_average_pool(self, node: ir.Node, y: Quantised) -> bool:
        """Replace an average pooling of bytes by its quantised form."""
        x = activation(node.inputs[0])
        if x is None or x.dtype != y.dtype:
            return False
        return self._replace_by_form(node.op_type, [x], y, node, **attributes_of(node))

    def _rewrite_mean(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a ReduceMean over rows and columns by QLinearMean, with a Flatten if it drops these axes."""
        x = activation(node.inputs[0])
        dims = shape(node.inputs[0]) if node.inputs[0] is not None else None
        if x is None or x.dtype != y.dtype or dims is None:
            return False
        if reduced_axes(node) == [len(dims) - 2] and len(dims) == 3:
            return self._rewrite_mean_of_rows(node, x, y, dims)
        if len(dims) != 4:
            return False
        if not reduces_images(node):
            return False
        if not 0 < numerics.mean_scale(scale_and_zero(x)[0], scale_and_zero(y)[0], 1) < np.inf:
            return False
        if attribute(node, "keepdims", 1):
            return self._replace_by_form(node.op_type, [x], y, node)
        form = quantised_form(node.op_type)
        inputs = arrange_operands(form, [self._quantised_inputs(x)], self._parameters(y))
        image = ir.Value(
            name=derived_name(self.graph, f"{y.value.name}_image"),
            shape=ir.Shape((*dims[:2], 1, 1)),
            type=ir.TensorType(ir.DataType.from_numpy(y.dtype)),
        )
        mean = ir.Node(op_spec(form).domain, form, inputs, outputs=[image], name=f"{node.name}_image")
        self.graph.insert_before(node, mean)
        return self._replace_by(y, "", "Flatten", [image], node, axis=1)

    def _rewrite_mean_of_rows(self, node: ir.Node, x: Quantised, y: Quantised, dims: tuple[int, ...]) -> bool:
        """Replace the mean over the rows of matrices, such as tokens, by QLinearMean of images of one row.

        Floats may round such a mean to the other side of a tie. Unless correct rounding is asked for, the mean becomes
        one of integers only if that cannot happen.
        """
        sx, zero = scale_and_zero(x)
        stored = int(zero) - 128 * (x.dtype == np.uint8)
        if not self.correctly and not numerics.average_is_exact(sx, stored, scale_and_zero(y)[0], dims[-2]):
            return False
        if not 0 < numerics.mean_scale(sx, scale_and_zero(y)[0], 1) < np.inf:
            return False
        name, (count, rows, columns) = derived_name(self.graph, f"{node.name or y.value.name}_rows"), dims
        swapped = self._insert_bytes(
            node, "", "Transpose", [x.value], y, f"{name}_swapped", (count, columns, rows), perm=(0, 2, 1)
        )
        size = new_constant(self.graph, f"{name}_image_shape", np.array((count, columns, 1, rows), np.int64))
        image = self._insert_bytes(node, "", "Reshape", [swapped, size], y, f"{name}_image", (count, columns, 1, rows))
        form = quantised_form(node.op_type)
        inputs = arrange_operands(form, [self._quantised_inputs(replace(x, value=image))], self._parameters(y))
        mean = self._insert_bytes(node, op_spec(form).domain, form, inputs, y, f"{name}_mean", (count, columns, 1, 1))
        target = new_constant(self.graph, f"{name}_shape", np.array(shape(y.value) or shape(node.outputs[0]), np.int64))
        return self._replace_by(y, "", "Reshape", [mean, target], node)

    def _rewrite_concat(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a Concat of bytes of any scales by QLinearConcat."""
        parts = [activation(value) for value in node.inputs]
        if any(part is None or part.dtype != y.dtype for part in parts):
            return False
        known = [part for part in parts if part is not None]
        return self._replace_by_form(node.op_type, known, y, node, axis=attribute(node, "axis"))

    def _rewrite_softmax(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a Softmax where onnxruntime does, as `run` determined before any operator moved."""
        x = activation(node.inputs[0])
        if x is None or x.dtype != y.dtype or node not in self._softmaxes_in_integers:
            return False
        opset = self.graph.opset_imports.get("", 13)
        axis = attribute(node, "axis", -1 if opset >= 13 else 1)
        return self._replace_by_form(node.op_type, [x], y, node, axis=axis, opset=opset)

    def _rewrite_norm(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a normalisation by QLinearNorm, if it was asked for and its operands allow it."""
        operands = norm_operands(self.graph, node, y) if self.correctly else None
        if operands is None:
            return False
        inputs = [*self._quantised_inputs(operands[0]), *operands[1], *self._parameters(y)]
        return self._replace_by(y, "celosia", "QLinearNorm", inputs, node, centre=int(node.op_type == CENTRED))

    def _rewrite_chain(self, node: ir.Node, y: Quantised) -> bool:
        """Replace operators that together are a function of one 8-bit tensor by a table."""
        chain = function_of(node.outputs[0])
        x = activation(chain[0]) if chain is not None else None
        if chain is None or x is None or shape(x.value) != shape(node.outputs[0]):
            return False
        try:
            table = numerics.unary_table(chain[1], *scale_and_zero(x), *scale_and_zero(y), x.dtype, y.dtype)
        except HostError:  # an operator that has no kernel for these types or attributes
            return False
        return self._replace_by_table(node, x, y, table)

    def _rewrite_mask(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a Where of a constant condition, a number, and a function of one 8-bit tensor, by a table and a sum.

        The sum adds so much where the number is chosen that the result leaves the range of bytes. It is cut off at the
        number, which must be the least or the greatest byte that the table has.
        """
        condition, *branches = (constant(value) for value in node.inputs)
        numbers = [array for array in branches if array is not None and array.size == 1]
        dims = shape(node.outputs[0])
        if condition is None or len(numbers) != 1 or dims is None or np.isnan(numbers[0]).any():
            return False
        is_first = branches[0] is numbers[0]
        chosen = condition if is_first else ~condition
        value = node.inputs[2 if is_first else 1]
        chain = function_of(value)
        x = activation(chain[0]) if chain is not None else None
        if chain is None or x is None or value is None or shape(value) != dims or shape(x.value) != dims:
            return False
        if x.dtype != y.dtype or not np.all(np.isfinite((*scale_and_zero(x), *scale_and_zero(y)))):
            return False
        try:
            table = numerics.unary_table(chain[1], *scale_and_zero(x), *scale_and_zero(y), x.dtype, y.dtype)
        except HostError:
            return False
        number = numerics.unary_table(
            lambda v: np.full_like(v, numbers[0].reshape(())), *scale_and_zero(x), *scale_and_zero(y), y.dtype
        )
        code, name = int(number[0]), derived_name(self.graph, f"{node.name or y.value.name}_mask")
        if code <= table.min():
            factors = [1, -255, 0, 0, code, 127]
        elif code >= table.max():
            factors = [1, 255, 0, 0, -128, code]
        else:
            return False
        zero_code = 0 if y.dtype == np.int8 else 128
        mask = new_constant(self.graph, f"{name}_constant", (zero_code + chosen.astype(np.int64)).astype(y.dtype))
        entries = new_constant(self.graph, f"{name}_table", table)
        unmasked = self._insert_bytes(
            node, "celosia", "Table", [x.value, entries], y, f"{name}_unmasked", function="Where"
        )
        return self._replace_by_form(
            "Add", [replace(y, value=unmasked), replace(y, value=mask)], y, node, domain="celosia", factors=factors
        )

    def _rewrite_prelu(self, node: ir.Node, y: Quantised) -> bool:
        """Replace a PRelu with a slope for each channel by a sum of two functions, of which one is zero.

        x >= 0: a table of x. x < 0: a depthwise convolution, whose weight for each channel is the sign of the slope. It
        must be zero for x >= 0: either its operand is cut off above zero or, as this is faster, its result if no slope
        is negative.
        """
        x, slopes = activation(operand(node, "x")), _channel_slopes(node)
        if x is None or x.dtype != y.dtype or slopes is None:
            return False
        (sx, zx), (sy, zy) = scale_and_zero(x), scale_and_zero(y)
        scales = numerics.fit_slopes(slopes, sx, zx, sy, zy, y.dtype)
        if scales is None:
            return False
        name, channels = derived_name(self.graph, f"{node.name or y.value.name}_slopes"), len(slopes)
        weights = np.sign(slopes).astype(np.int8).reshape(channels, 1, 1, 1)
        w = [
            new_constant(self.graph, f"{name}_{part}", array)
            for part, array in (("w", weights), ("w_scale", scales), ("w_zero", np.zeros(channels, np.int8)))
        ]

        def insert_table(operand_value: ir.Value, part: str, entries: NDArray[Any]) -> ir.Value:
            inputs = [operand_value, new_constant(self.graph, f"{name}_{part}_table", entries.astype(np.int8))]
            return self._insert_bytes(node, "celosia", "Table", inputs, y, f"{name}_{part}", function=part)

        def insert_convolution(operand_value: ir.Value) -> ir.Value:
            form, dims = quantised_form("Conv"), shape(node.outputs[0])
            assert dims is not None
            image = (*dims[:2], *(1,) * (4 - len(dims)), *dims[2:])
            operand_value = reshape(operand_value, image, "image")
            x_inputs = self._quantised_inputs(replace(x, value=operand_value))
            inputs = arrange_operands(form, [x_inputs, w], self._parameters(y))
            domain = op_spec(form).domain
            below = self._insert_bytes(node, domain, form, inputs, y, f"{name}_below", image, group=channels)
            below.producer().meta[MODEL_WEIGHTS] = 0  # type: ignore[union-attr]
            return reshape(below, dims, "below_shaped")

        def reshape(value: ir.Value, dims: tuple[int, ...], part: str) -> ir.Value:
            if len(node.outputs[0].shape or ()) == 4:
                return value
            inputs = [value, new_constant(self.graph, f"{name}_{part}_shape", np.array(dims, np.int64))]
            return self._insert_bytes(node, "", "Reshape", inputs, y, f"{name}_{part}", dims)

        cut_off = [np.minimum(np.arange(-128, 128), code_of(np.asarray(zero, y.dtype))) for zero in (zx, zy)]
        above = numerics.unary_table(lambda v: np.maximum(v, np.float32(0)), sx, zx, sy, zy, y.dtype)
        if np.any(slopes < 0):
            below = insert_convolution(insert_table(x.value, "negative", cut_off[0]))
        else:
            below = insert_table(insert_convolution(x.value), "negative", cut_off[1])
        parts = below, insert_table(x.value, "positive", above)
        return self._replace_by_form("Add", [replace(y, value=part) for part in parts], y, node)

    def _insert_bytes(
        self, before: ir.Node, domain: str, op: str, inputs: Sequence[ir.Value | None], y: Quantised, name: str,
        dims: tuple[int, ...] | None = None, **attrs: Any,
    ) -> ir.Value:  # fmt: skip
        """Insert a node whose output has the type of `y` and the shape `dims`; return the output.

        dims: None for the shape of the result of `before`.
        """
        kind = ir.TensorType(ir.DataType.from_numpy(y.dtype))
        out = ir.Value(name=name, shape=before.outputs[0].shape if dims is None else ir.Shape(dims), type=kind)
        self.graph.insert_before(before, ir.Node(domain, op, inputs, attributes(**attrs), outputs=[out], name=name))
        return out

    def _clamp_after_quantising(self, node: ir.Node, y: Quantised) -> bool:
        """Rewrite float operator -> Relu or Clip -> QuantizeLinear as float operator -> QuantizeLinear -> Table.

        Both orders give the same bytes, because rounding keeps the order of numbers. If saturation implies the clamp,
        no table is needed. If it does not, onnxruntime adds and multiplies floats, even of bytes (rounded.py).
        """
        x, quantise = node.inputs[0], y.value.producer()
        if x is None or x.producer() is None or only_use(x) is not node or is_op(x.producer(), "DequantizeLinear"):
            return False
        clamp = function_of_node(node)
        if clamp is None:
            return False
        assert quantise is not None
        table = numerics.unary_table(clamp, *scale_and_zero(y), *scale_and_zero(y), y.dtype)
        if np.array_equal(table, np.arange(-128, 128)):
            quantise.replace_input_with(0, x)
            return True
        producer = x.producer()
        pair = _byte_operands(producer, y) if is_op(producer, *numerics.BINARY) else None
        factors = None if pair is None else factors_of_floats(producer.op_type, *pair, y)  # type: ignore[union-attr]
        if pair is not None and factors is None and not self.correctly:
            return False
        unclamped = self._insert_like(
            quantise, [x, *quantise.inputs[1:]], y.value, x.shape, f"{y.value.name}_unclamped"
        )
        self._replace_by_table(node, replace(y, value=unclamped), y, table)
        if factors and pair is not None and producer is not None:
            self._replace_by_form(
                producer.op_type, pair, replace(y, value=unclamped), producer, domain="celosia", factors=factors
            )
        return True

    def _replace_by_table(self, node: ir.Node, x: Quantised, y: Quantised, table: NDArray[Any]) -> bool:
        """Replace `node` and its QuantizeLinear by a Table of `x`."""
        name = new_constant(self.graph, f"{node.name or y.value.name}_table", table)
        attrs = table_attributes(node.op_type, *(ir.DataType.from_numpy(q.dtype) for q in (x, y)))
        return self._replace_by(y, "celosia", "Table", [x.value, name], node, **{a.name: a.value for a in attrs})

    def _rewrite_requantisation(self, node: ir.Node, y: Quantised) -> bool:
        """Replace DequantizeLinear -> QuantizeLinear by a table, or by nothing if both have the same parameters."""
        x = activation(node.outputs[0])
        if x is None or node.outputs[0].is_graph_output():
            return False
        if x.dtype == y.dtype and have_same_parameters(x, y):
            quantise = y.value.producer()
            assert quantise is not None
            if y.value.is_graph_output() and (x.value.producer() is None or x.value.producer().graph is not self.graph):  # type: ignore[union-attr]
                return False  # an input or outer value cannot take the output's name
            name = y.value.name if y.value.is_graph_output() else None
            ir.convenience.replace_all_uses_with(y.value, x.value, replace_graph_outputs=True)
            self.graph.remove(quantise, safe=True)
            if name is not None:
                x.value.name = name
            return True
        table = numerics.unary_table(lambda v: v, *scale_and_zero(x), *scale_and_zero(y), x.dtype, y.dtype)
        return self._replace_by_table(node, x, y, table)


def _multiplies_bytes(x: Quantised, w: Quantised, y: Quantised | None = None) -> bool:
    """Return whether onnxruntime multiplies bytes of these types; else it multiplies floats, which differ next to ties.

    Results must have the type of x, and weights of an int8 x must be int8.
    """
    if w.dtype not in (np.int8, np.uint8) or (y is not None and x.dtype != y.dtype):
        return False
    return bool(x.dtype == np.uint8 or w.dtype == np.int8)


def _with_type(x: Quantised, dtype: np.dtype[Any]) -> Quantised:
    """Return `x` as if it were of another 8-bit type, with bytes and zero point moved by 128."""
    zero = x.zero.astype(np.int64) - int(np.iinfo(x.dtype).min) + int(np.iinfo(dtype).min)
    return replace(x, zero=zero.astype(dtype))


def _byte_operands(node: ir.Node | None, y: Quantised) -> tuple[Quantised, Quantised] | None:
    """Return both operands of `node` if they are 8-bit tensors of the type of `y`, with one scale each.

    None for others, and if both are constant.
    """
    assert node is not None
    a, b = dequantised(node.inputs[0]), dequantised(node.inputs[1])
    if a is None or b is None or not (a.scalar and b.scalar) or not a.dtype == b.dtype == y.dtype:
        return None
    return None if constant(a.value) is not None and constant(b.value) is not None else (a, b)


def _bias_scale_fits(b: NDArray[Any], x: NDArray[Any], w: NDArray[Any]) -> bool:
    """Return whether an int32 bias is in steps of x_scale * w_scale, as integer operators take it."""
    expected = x.reshape(-1).astype(np.float64) * w.reshape(-1).astype(np.float64)
    if expected.size not in (1, b.size) and b.size != 1:
        return False
    return bool(np.allclose(b.reshape(-1).astype(np.float64), expected, rtol=1e-5, atol=0))


_RULES: dict[str, Callable[[Integerise, ir.Node, Quantised], bool]] = {
    "Conv": Integerise._rewrite_conv,
    "ConvTranspose": Integerise._rewrite_conv_transpose,
    **dict.fromkeys(numerics.BINARY, Integerise._rewrite_binary),
    "GlobalAveragePool": Integerise._rewrite_average_pool,
    "AveragePool": Integerise._rewrite_average_pool,
    "ReduceMean": Integerise._rewrite_mean,
    "Concat": Integerise._rewrite_concat,
    "Softmax": Integerise._rewrite_softmax,
    "DequantizeLinear": Integerise._rewrite_requantisation,
    **dict.fromkeys(NORMS, Integerise._rewrite_norm),
    **dict.fromkeys(("Relu", "Clip"), Integerise._clamp_after_quantising),
    "PRelu": Integerise._rewrite_prelu,
    "Where": Integerise._rewrite_mask,
}
"""Float operator -> rule (node, its quantised result) that replaces it; Gemm and MatMul have rules of their own."""
ONLY_SOMETIMES = ("PRelu", "Where")
"""Operators that become integer operators with constants of some shapes only."""
QUANTISABLE = frozenset((*_RULES, *CHOOSING_OPS, *MAXIMA, "Gemm", "MatMul", "BatchNormalization")) - {
    "DequantizeLinear",
    "Softmax",
    *NORMS,
    *ONLY_SOMETIMES,
}
"""Float operators that become layers, or parts of layers, if their operands and results are quantised."""


def is_function_of_one(node: ir.Node) -> bool:
    """Return whether an element-wise operator is a function of one tensor, which becomes a table between bytes.

    Its other operands are constants of one element, or the slopes of a PRelu, one for each channel.
    """
    varying = {value for value in node.inputs if value is not None and constant(value) is None}
    if is_op(node, "PRelu") and _channel_slopes(node) is not None:
        return True
    scalars = [value for value in node.inputs if value is not None and value not in varying]
    return is_op(node, *ELEMENTWISE_OPS) and len(varying) == 1 and all(constant(v).size == 1 for v in scalars)  # type: ignore[union-attr]


def _channel_slopes(node: ir.Node) -> NDArray[np.float32] | None:
    """Return the slopes [C] of a PRelu of [N, C, ...] if they are constant and differ by channels alone."""
    value, dims = operand(node, "slope"), shape(node.outputs[0])
    array, q = constant(value), dequantised(value)
    if array is None and q is not None and q.scalar and constant(q.value) is not None:
        array = numerics.dequantize_linear(constant(q.value), *scale_and_zero(q))  # type: ignore[arg-type]
    if array is None or array.dtype != np.float32 or dims is None or shape(node.inputs[0]) != dims:  # type: ignore[arg-type]
        return None
    if len(dims) not in (2, 3, 4) or array.ndim > len(dims) or dims[1] == 1:
        return None
    padded = array.reshape((1,) * (len(dims) - array.ndim) + array.shape)
    return padded.reshape(-1) if padded.shape == (1, dims[1], *(1,) * (len(dims) - 2)) else None
