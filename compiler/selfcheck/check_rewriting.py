"""The second check: compare tensors of the compiled model with those of the imported model, to find wrong rewriting.

The compiled model is computed in *units*: an operator of the accelerator, by operator_results.py (the first check shows
that launches give the same), or a step of the CPU, by its kernel as it runs in the Program. Each tensor that a unit
makes and that the imported model has, too, is compared with the imported model's operators (imported_model.py). Both
start from equal values of the nearest tensors before it that both models have. Quantised tensors among these get random
values, as after fifty computed layers little but noise would be left to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.operands import operand, product_names, product_operands, quantisation
from celosia.compiler.graph.select import Partition
from celosia.compiler.graph.values import attribute, attributes_of, captured, constant, dtype_name, is_op, shape
from celosia.compiler.numerics.tables import largest_power
from celosia.compiler.ops import Unsupported, op_spec
from celosia.compiler.program import BodySteps, CpuStep, HostStep, Program
from celosia.compiler.program.dtypes import is_float, numpy_dtype
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.kernel import host
from celosia.compiler.program.host.op import HostError, RunnableBody
from celosia.compiler.program.host.shape_rules import WindowError, windows
from celosia.compiler.program.op_spec import Role
from celosia.compiler.selfcheck.check_launches import CheckFailed, SelfCheckError, random_image
from celosia.compiler.selfcheck.imported_model import (
    Bounds,
    NotComputable,
    Original,
    difference_beyond_rounding,
    difference_from_bounds,
)
from celosia.compiler.selfcheck.operator_results import CachedResults, codes, is_concat, read_by
from celosia.compiler.target import compiling_for
from celosia.sim.functional.fsim import one_blas_thread

Array = NDArray[Any]
Values = Mapping[str, Any]
TRIES = 3
"""Number of random inputs on all of which a wrong tensor must differ, as one comparison of floats may fall on an
edge.
"""


class RewriteError(SelfCheckError):
    """A tensor of the compiled model that differs from the imported model. `tensor`: its name. `after`: the pass that
    changed it, "" for what comes after all passes.
    """

    def __init__(self, tensor: str, what: str, after: str) -> None:
        where = f"after the pass {after!r}" if after else "after all passes, where it is placed or its kernel is made"
        RuntimeError.__init__(self, f"tensor {tensor!r} differs from the model's own operators {where}: {what}")
        self.tensor, self.after, self.layer = tensor, after, tensor


@dataclass(frozen=True)
class Unit:
    """A part of the compiled model that stands for the operators `nodes`. run: computes the outputs from the inputs by
    name.
    """

    nodes: tuple[ir.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[Values], Sequence[Any]]


@dataclass(frozen=True)
class ComparedTensors:
    """Number of tensors that were compared, and of those left out.

    Left out are random ones, those of weights that stay in files, and those of operators that refuse random inputs.
    """

    tensors: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class _Without:
    """The value numbers of `shared` except for those in `removed`."""

    shared: Container[int]
    removed: set[int]

    def __contains__(self, number: object) -> bool:
        return number in self.shared and number not in self.removed


@dataclass
class Comparison:
    """Both models on one random input.

    constants: values that units read beside tensors. held: codes of quantised tensors by name, which launches had in
    the first check; they are used where `seed` is 0, all others are random.
    """

    original: Original
    units: Sequence[Unit]
    constants: Values
    held: Values
    seed: int = 0

    def __post_init__(self) -> None:
        self.makers = {name: unit for unit in reversed(self.units) for name in unit.outputs if name}
        number = self.original.number
        self.shared = {number[name]: name for name in reversed(self.makers) if number.get(name) in self.original.makers}
        self.values: dict[int, Any] = {}
        """Values of tensors that both models have. They may be dropped at any time: they are computed again then."""

    def targets(self) -> list[str]:
        """Return the names of the tensors to compare, in the order of the model."""
        return [self.shared[tensor] for tensor in sorted(self.shared) if not self._is_untouched(self.shared[tensor])]

    def last_uses(self, targets: Sequence[str]) -> dict[int, int]:
        """Return the position in `targets` of the last comparison that needs the value of a tensor, by its number."""
        last: dict[int, int] = {}
        for position, name in enumerate(targets):
            try:
                waiting = list(self._common_inputs(name)[0])
            except Exception:  # the comparison raises it again
                continue
            while waiting:
                number = waiting.pop()
                if number not in last and not self._is_drawn(number):  # computed now, and kept for later comparisons
                    waiting += self.original.stops(number, _Without(self.shared, {number}))
                last[number] = position
        return last

    def _is_untouched(self, name: str) -> bool:
        """Return whether the unit that makes `name` is an unchanged operator of the imported model, which need not be
        compared.
        """
        nodes, original = self.makers[name].nodes, self.original.makers[self.original.number[name]]
        if len(nodes) != 1 or _operator_key(nodes[0]) != _operator_key(original) or captured(original):
            return False
        return all(map(_is_same_tensor, nodes[0].inputs, original.inputs))

    def keep(self, numbers: Container[int]) -> None:
        """Drop the values of all tensors but these."""
        self.values = {number: value for number, value in self.values.items() if number in numbers}

    def difference(self, name: str) -> str:
        """Describe how the tensor `name` differs between both models; "" where it does not. Raises NotComputable."""
        number = self.original.number[name]
        start, order = self._common_inputs(name)
        inputs = {tensor: self._value(tensor) for tensor in start}
        nodes = [node for unit in order for node in unit.nodes]
        slack = max(map(_allowed_steps, nodes), default=0.0)
        known = {tensor: (value, value) for tensor, value in inputs.items()}
        low, high = self.original.compute(number, known, slack)
        self._require_alike(nodes, known, (low, high))
        try:
            computed = self._compute_by_units(name, order, inputs)
        except (HostError, Unsupported, ValueError) as error:
            return f"it cannot be computed: {error}"
        difference = difference_from_bounds(computed, low, high)
        if difference and isinstance(low, np.ndarray) and low.dtype.kind == "f" and np.shape(computed) == low.shape:
            difference = difference_beyond_rounding(self.original, number, inputs, (low, high), computed)
        if difference and self.original.is_vague(known):
            raise NotComputable
        return difference

    def _require_alike(self, nodes: Sequence[ir.Node], known: Mapping[int, Any], last: Bounds) -> None:
        """Raise NotComputable where integer operators are documented to differ from the floats that they replace.

        nodes: operators of the units. known: bounds of the imported model's tensors. last: bounds of the compared
        tensor.
        """
        if any(map(_is_other_function, nodes)):
            raise NotComputable
        converts = any(is_op(node, "Table", "QLinearAdd", "QLinearMul") for node in nodes)
        for x, scale in self.original.quantised(known):  # NaN and huge floats become other integers on other processors
            with np.errstate(all="ignore"):
                if np.any(np.isnan(x)) or (converts and np.any(np.abs(x) >= 2.0**31 * float(np.min(scale)))):
                    raise NotComputable
        for out in (node.outputs[0] for node in nodes if is_op(node, "QLinearSoftmax")):
            largest = known.get(self.original.number.get(out.name or "", -1), last)[1]
            if out.dtype == ir.DataType.UINT8 and np.any(largest == 255):
                raise NotComputable  # 256 may wrap to 0, as in onnxruntime

    def _common_inputs(self, name: str) -> tuple[set[int], list[Unit]]:
        """Return the nearest tensors that determine `name` in both models, and the units in between. Raises
        NotComputable.

        A tensor that one model bypasses cannot be a starting point. Such tensors are removed, the last one first, until
        both models start from the same ones: a kernel may recompute what another unit makes, duplicates may be merged,
        f(x, t(x)) may be g(x), and a wrong program reads what it should not. In the end the model's inputs remain.
        """
        number, inputs = self.original.number[name], self.original.inputs
        candidates = _Without(self.shared, {number})
        while True:
            start = self.original.stops(number, candidates)
            order, extra_inputs = self._units_from(name, start)
            inner = [tensor for tensor in start if tensor not in inputs]
            read = {self.original.number.get(tensor) for unit in order for tensor in unit.inputs if tensor}
            unread = self.original.stops(number, candidates, of_shapes=False) - read
            if not (extra_inputs or unread) or not inner:
                return start | {self.original.number[tensor] for tensor in extra_inputs}, order
            removed = [max(unread.intersection(inner), default=max(inner))]
            if not extra_inputs and unread.isdisjoint(inner):  # only one side reads some inputs: drop what needs them
                removed = [
                    tensor for tensor in inner if not unread.isdisjoint(self.original.stops(tensor, {}))
                ] or removed
            candidates.removed.update(removed)

    # The model's side ------------------------------------------------------------------------------------------

    def _value(self, number: int) -> Any:
        """Return the value of a tensor that both models start from: random bytes where it is quantised, else as the
        imported model computes it.
        """
        waiting = [number]
        while waiting:
            current = waiting[-1]
            if current not in self.values and (value := self._drawn_value(current)) is not None:
                self.values[current] = value
            if current in self.values:
                waiting.pop()
                continue
            stops = self.original.stops(current, _Without(self.shared, {current}))
            if missing := [stop for stop in stops if stop not in self.values]:
                waiting += missing
                continue
            self.values[current] = self.original.compute(current, {stop: (self.values[stop],) * 2 for stop in stops})[1]
        return self.values[number]

    def _drawn_value(self, number: int) -> Any:
        """Return a value that is drawn rather than computed; None where the tensor must be computed."""
        if not self._is_drawn(number):
            return None
        rng = np.random.default_rng((self.seed, number))
        if number in self.original.inputs:
            return _random_input(self.original.inputs[number], rng)
        value = self._original_value(number)
        held_codes = self.held.get(self.shared[number]) if self.seed == 0 else None
        return _random_bytes(value, rng) if held_codes is None else _bytes_of_codes(held_codes, value)

    def _is_drawn(self, number: int) -> bool:
        """Return whether the value of a tensor is drawn rather than computed: inputs, and bytes that are quantised.

        Results of tables are computed: they may lack some bytes, and two tables may be merged because of the first
        one's range.
        """
        if number in self.original.inputs:
            return True
        name, node = self.shared[number], self.original.makers[number]
        makers = [maker for maker in self.makers[name].nodes if name in {out.name for out in maker.outputs}]
        if any(is_op(maker, "Table") for maker in makers) or not _is_byte_tensor(self._original_value(number)):
            return False
        return name in self.held or node.op_type.startswith("Q")

    def _original_value(self, number: int) -> ir.Value:
        """Return the tensor with that number in the imported model."""
        outputs = self.original.makers[number].outputs
        return next(out for out in outputs if self.original.number.get(out.name or "") == number)

    # The compiler's side ---------------------------------------------------------------------------------------

    def _units_from(self, name: str, start: Collection[int]) -> tuple[list[Unit], set[str]]:
        """Return the units that make `name` from the tensors `start`, in order, and the model inputs that they read
        besides. NotComputable where a unit reads something that nothing makes.
        """
        order: list[Unit] = []
        extra_inputs: set[str] = set()
        done: set[int] = set()
        waiting = [(self.makers[name], False)]
        while waiting:
            unit, is_ready = waiting.pop()
            if id(unit) in done:
                continue
            if is_ready:
                done.add(id(unit))
                order.append(unit)
                continue
            waiting.append((unit, True))
            for name in filter(None, unit.inputs):
                if self.original.number.get(name) in start or name in self.constants:
                    continue
                if name in self.makers:
                    waiting.append((self.makers[name], False))
                elif self.original.number.get(name) in self.original.inputs:
                    extra_inputs.add(name)
                else:
                    raise NotComputable
        return order, extra_inputs

    def _compute_by_units(self, name: str, order: Sequence[Unit], inputs: Mapping[int, Any]) -> Any:
        """Compute the tensor `name` by the compiled model's units."""
        computed: dict[str, Any] = {}
        number = self.original.number
        last_reads = {name: position for position, unit in enumerate(order) for name in unit.inputs}
        for position, unit in enumerate(order):
            values = {
                name: inputs[number[name]] if number.get(name) in inputs
                else self.constants[name] if name in self.constants else computed[name]
                for name in unit.inputs if name
            }  # fmt: skip
            computed.update(zip(unit.outputs, unit.run(values)))
            for read in unit.inputs:
                if last_reads[read] == position and read != name:
                    computed.pop(read, None)
        return computed[name]


def check_rewriting(
    original: Original, units: Sequence[Unit], constants: Values, held: Values, after: str = ""
) -> ComparedTensors:
    """Compare the tensors of `units` with `original`. RewriteError for a tensor that differs on all TRIES random
    inputs. CheckFailed for an error of the check itself. after: the pass that ran last, where more passes are to come.
    """
    tries = [Comparison(original, units, constants, held, seed) for seed in range(TRIES)]
    targets, left_out = tries[0].targets(), 0
    last_uses = tries[0].last_uses(targets)
    failure: Exception | None = None
    with compiling_for(None), one_blas_thread():  # it runs here, whatever the program is for
        for position, name in enumerate(targets):
            try:
                difference = tries[0].difference(name)
                if difference and all(again.difference(name) for again in tries[1:]):
                    raise RewriteError(name, difference, after)
            except NotComputable:
                left_out += 1
            except (RewriteError, MemoryError):
                raise
            except Exception as error:  # a fault of the check: another tensor may still show one of the Program
                failure = failure or error
            tries[0].keep({number for number, last in last_uses.items() if last > position})
            for again in tries[1:]:
                again.keep(())
    if failure is not None:
        raise CheckFailed(failure) from failure
    return ComparedTensors(len(targets) - left_out, left_out)


def check_pass(original: Original, after: str, model: ir.Model) -> None:
    """Run `check_rewriting` on the graph after a pass, operator by operator."""
    units = [operator_unit(node, model.graph.opset_imports) for node in model.graph]
    constants = {name: constant(value) for name, value in model.graph.initializers.items()}
    check_rewriting(original, units, constants, {}, after)


# Units -----------------------------------------------------------------------------------------------------------


def units_of(program: Program, graph: ir.Graph, selection: Partition, computed: CachedResults) -> list[Unit]:
    """Return the units of `program`: its CPU steps, and operators of the accelerator. computed: results of the latter
    from the first check, to be used again. For another processor, CPU operators are computed by the host runtime.
    """
    by_name = {out.name: node for node in graph for out in node.outputs}
    if not all(kernel.host == host() for kernel in program.kernels):  # the Program is for another processor
        return [
            operator_unit(node, graph.opset_imports) if node in selection.cpu else _accelerator_unit(node, computed)
            for node in graph
        ]
    units = []
    for step in program.steps:
        if isinstance(step, HostStep):
            node = by_name[next(filter(None, step.outputs))]
            unit = operator_unit(node, graph.opset_imports)
            units.append(replace(unit, run=partial(_run_host_step, program, step)) if step.bodies else unit)
        elif isinstance(step, CpuStep):
            infos = {info.name for info in step.nodes}
            units.append(_kernel_unit(program, step, tuple(node for node in graph if node.name in infos)))
    return units + [_accelerator_unit(node, computed) for node in graph if node not in selection.cpu]


def operator_unit(node: ir.Node, opsets: Mapping[str, int]) -> Unit:
    """Return `node` as a unit that the host runtime computes."""
    op = parse(ir.serde.serialize_node(node), opsets)
    read = tuple(value.name or "" for value in (*node.inputs, *captured(node)) if value is not None)
    return Unit((node,), read, op.outputs, lambda values: execute(op, values))


def _kernel_unit(program: Program, step: CpuStep, nodes: tuple[ir.Node, ...]) -> Unit:
    """Return a CPU step as a unit that runs its kernel; a step without a kernel is a change of shape."""
    return Unit(nodes, step.inputs, step.outputs, partial(_run_cpu_step, program, step))


def _run_cpu_step(program: Program, step: CpuStep, values: Values) -> Sequence[Any]:
    """Run the kernel of a step, or change the shape of its input; return its outputs."""
    arrays = [np.asarray(values[name]) for name in step.inputs if name]
    if step.kernel is None:
        return [arrays[0].reshape(program.tensors[step.outputs[0]].shape)]
    return program.kernels[step.kernel](*arrays)


def _run_host_step(program: Program, step: HostStep, values: Values) -> Sequence[Any]:
    """Run a step of the host runtime with the steps of its subgraphs; return its outputs."""

    def run_body(body: BodySteps, inputs: Sequence[Any]) -> list[Any]:
        """Run the steps of a subgraph, and return its outputs."""
        inner = {**program.constants, **values, **dict(zip(body.inputs, inputs))}
        for inner_step in body.steps:
            if isinstance(inner_step, CpuStep):
                results = _run_cpu_step(program, inner_step, inner)
            else:
                results = _run_host_step(program, inner_step, inner)
            inner.update(zip(inner_step.outputs, results))
        return [inner[name] for name in body.outputs]

    return execute(
        step.op, values,
        compiled={body.attribute: RunnableBody(partial(run_body, body), body.types) for body in step.bodies},
    )  # fmt: skip


def _accelerator_unit(node: ir.Node, computed: CachedResults) -> Unit:
    """Return an operator of the accelerator, or a view of its result, as a unit."""
    operands = read_by(node)

    def run(values: Values) -> Sequence[Any]:
        """Compute all outputs of the operator from bytes."""
        constants = [constant(value) for value in operands]
        arrays = [
            codes(np.asarray(values[value.name or ""]) if array is None else array)
            for value, array in zip(operands, constants)
        ]
        if is_concat(node):
            parts = [computed.compute(node, [part], number) for number, part in enumerate(arrays)]
            results = [np.concatenate(parts, axis=attribute(node, "axis", 1))]
        else:
            results = [computed.compute(node, arrays, output=output) for output in range(len(node.outputs))]
        return [_bytes_of_codes(result.reshape(shape(out) or ()), out) for result, out in zip(results, node.outputs)]

    varying = [value for value in operands if constant(value) is None]
    inputs, outputs = (tuple(value.name or "" for value in values) for values in (varying, node.outputs))
    return Unit((node,), inputs, outputs, run)


def _operator_key(node: ir.Node) -> Any:
    """Return a key that is equal for equal operators that read and write tensors of equal names.

    By it, operators that no pass has changed are left out of the comparison.
    """
    attributes = sorted((name, repr(attr.value)) for name, attr in node.attributes.items())
    domain = "" if node.domain == "ai.onnx" else node.domain
    inputs, outputs = [value and value.name for value in node.inputs], [value.name for value in node.outputs]
    return domain, node.op_type, attributes, inputs, outputs


def _is_same_tensor(value: ir.Value | None, original: ir.Value | None) -> bool:
    """Return whether two tensors of one name have equal elements, where they are constant: a pass may change these."""
    if value is None or original is None or value.const_value is original.const_value:
        return True
    a, b = constant(value), constant(original)
    return a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b)


# Random tensors --------------------------------------------------------------------------------------------------


def _is_byte_tensor(value: ir.Value) -> bool:
    """Return whether a tensor has bytes and a known shape, so that random ones can be drawn for it."""
    return value.dtype in (ir.DataType.INT8, ir.DataType.UINT8) and shape(value) is not None


def _bytes_of_codes(data: Array, value: ir.Value) -> Array:
    """Convert codes to int8 or uint8, as `value` has."""
    array = np.asarray(data, order="C")  # scalars stay scalars
    return (array ^ np.uint8(0x80)).view(np.int8) if value.dtype == ir.DataType.INT8 else array


def _random_bytes(value: ir.Value, rng: np.random.Generator) -> Array:
    """Draw random bytes for a tensor, of its type and shape."""
    dims = shape(value) or ()
    image = dims if len(dims) == 4 else (int(np.prod(dims[:1])), int(np.prod(dims[1:])), 1, 1)
    data = random_image(rng, (image[0], image[1], image[2], image[3]), 0).reshape(dims)
    return _bytes_of_codes(data.view(np.uint8) ^ np.uint8(0x80), value)


def _random_input(value: ir.Value, rng: np.random.Generator) -> Any:
    """Draw an input of the model: bytes, floats, or 0 and 1 for other integers, as most are indices. Raises
    NotComputable.

    Floats that are quantised first are drawn near the middle of quantisation steps, so that rounding does not decide.
    """
    dims = shape(value)
    if not isinstance(value.type, ir.TensorType) or dims is None or value.dtype in (None, ir.DataType.STRING):
        raise NotComputable
    if _is_byte_tensor(value):
        return _random_bytes(value, rng)
    kind = numpy_dtype(dtype_name(value))
    if kind.kind in "iub":
        return rng.integers(0, 2, dims).astype(kind)
    values = rng.standard_normal(dims)
    for node in (use.node for use in value.uses()):
        of_scale, of_zero = quantisation(node) if is_op(node, "QuantizeLinear") else (None, None)
        scale = constant(of_scale) if of_scale is not None and node.inputs[0] is value else None
        if scale is not None and scale.size == 1:
            zero = constant(of_zero)
            quantised = numpy_dtype(dtype_name(node.outputs[0]))
            if is_float(quantised):
                steps = rng.uniform(-1, 1, dims) * float(ml_dtypes.finfo(quantised).max)
            else:
                limits = ml_dtypes.iinfo(quantised)
                steps = rng.integers(int(limits.min), int(limits.max), dims, endpoint=True).astype(np.float64)
                steps += rng.uniform(-0.4, 0.4, dims)
                steps -= 0 if zero is None else int(zero.reshape(-1)[0])
            values = float(scale.reshape(-1)[0]) * steps
            break
    with np.errstate(over="ignore"):
        return values.astype(kind)


# Comparing -------------------------------------------------------------------------------------------------------


def _adds_bias(node: ir.Node) -> bool:
    """Return whether the operator multiplies bytes and can add an int32 bias, to which the model's float bias is
    rounded. The node itself may have no bias.
    """
    spec = op_spec(node.op_type)
    return bool(spec.variant_of and spec.inputs_with_role(Role.BIAS) and spec.scale_input is not None)


def _may_wrap(node: ir.Node) -> bool:
    """Return whether products and bias may overflow int32, as where onnxruntime clips a bias to -2^31."""
    if not _adds_bias(node):
        return False
    _, w, bias = (constant(value) for value in product_operands(node))
    if w is None or bias is None or not bias.size:
        return False
    return bool(np.max(np.abs(bias.astype(np.int64))) + (w.size // bias.size << 16) >= 2**31)


def _allowed_steps(node: ir.Node) -> float:
    """Return the number of steps by which an integer operator may differ from the floats that it replaces, beside
    rounding.
    """
    if is_op(node, "QLinearSoftmax"):
        return 1.0  # its table is scaled by the whole part of 1 / scale
    if not _adds_bias(node) or product_operands(node)[2] is None:
        return 0.0
    names = *product_names(node.op_type)[:2], "y"
    x, w, y = (constant(operand(node, f"{name}_scale")) for name in names)
    if x is None or w is None or y is None:
        return 0.0
    with np.errstate(all="ignore"):
        return float(0.5 * np.max(x) * np.max(w) / np.min(y))  # half a step of the bias, in steps of y


def _is_other_function(node: ir.Node) -> bool:
    """Return whether onnxruntime's integer operator is another function than the float operators that it replaces: an
    overflowing softmax, an average with other divisors, or sums that wrap.
    """
    spec = op_spec(node.op_type)
    if is_op(node, "QLinearSoftmax"):  # where the largest power of a row, times 1 / scale, is infinite
        scale, dims = constant(operand(node, "y_scale")), shape(node.outputs[0])
        if scale is None or dims is None:
            return False
        count = dims[attribute(node, "axis", -1)]
        return bool(largest_power(count) * np.floor(1 / float(scale.item())) >= np.finfo(np.float32).max)
    if spec.windows and spec.weights_input is None and node.inputs[0] is not None:
        # a quantised average counts what lies beyond the padding, too
        dims, attrs = shape(node.inputs[0]), attributes_of(node)
        if dims is None:
            return False
        size = dims[1:-1] if attrs.get("channels_last") else dims[2:]
        try:
            quantised, floating = (windows(op, attrs, size) for op in (node.op_type, spec.variant_of))
        except WindowError:
            return True
        return any(quantised.divisors(axis) != floating.divisors(axis) for axis in range(len(size)))
    return _may_wrap(node)
