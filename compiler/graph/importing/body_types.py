"""Types and shapes of the values in the bodies of If, Loop and Scan.

Kernels rely on shapes, and those that a body declares may be wrong: they are inferred from what the body reads. A state
has the shape of its first value if the body returns that shape; other sizes stay open:

    a, b = Loop(n, true, x: float[2, 3], y: float[1]), body (i, go, s, t):          s, a: float[2, 3]
        more = Identity(go); u = Neg(s); v = Concat(t, t); return more, u, v         t: float[?]
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from celosia.compiler.graph.importing.shape_inference import MAX_LIST_ELEMENTS, infer_with_onnx
from celosia.compiler.graph.shapes import UNKNOWN, Disagreement, infer
from celosia.compiler.graph.values import attribute, captured, constant, shape, subgraphs

DECLARED = "celosia.declared"
"""Key in the meta of a value inside a body: the shape that the model declares for it."""
SCALAR = ir.Shape(())


def type_bodies(model: ir.Model) -> None:
    """Infer types and shapes of all values in bodies, and open shapes of the results of operators with bodies."""
    for node in model.graph:
        if subgraphs(node):
            _type_operator(node, model)


def declared_shape(value: ir.Value) -> ir.Shape | None:
    """Return the shape of a value in a body, or the one that the model declares if none could be inferred."""
    return value.shape if value.shape is not None else value.meta.get(DECLARED)


def _type_operator(node: ir.Node, model: ir.Model) -> None:
    """Type the bodies of `node`, and the shapes of its results that are open.

    Raises Disagreement where the branches of an If make another shape than the model says.
    """
    match node.op_type:
        case "Loop":
            _type_loop(node, model)
        case "Scan":
            _type_scan(node, model)
        case _:
            bodies = subgraphs(node)
            for body in bodies:
                _infer_body(body, node, model)
            for number, out in enumerate(node.outputs):
                results = [body.outputs[number] for body in bodies]
                if all(_kind(result) == _kind(results[0]) for result in results):
                    inferred, known = shape(results[0]), shape(out)
                    if inferred is not None and known is not None and inferred != known:
                        raise Disagreement(f"{out.name!r} is {list(known)}, and its branches make {list(inferred)}")
                    _set_open(out, results[0], results[0].shape)


def _kind(value: ir.Value) -> tuple[object, object]:
    """Return element type and static shape of a value, for comparison."""
    return value.type, shape(value)


def _type_loop(node: ir.Node, model: ir.Model) -> None:
    """Type the body and the final states of a Loop."""
    body = node.attributes["body"].as_graph()
    for value, dtype in zip(body.inputs, (ir.DataType.INT64, ir.DataType.BOOL)):
        value.type, value.shape = ir.TensorType(dtype), SCALAR.copy()
    states = len(body.inputs) - 2
    first_values = node.inputs[len(node.inputs) - states :]
    _type_states(node, body, body.inputs[-states:] if states else (), first_values, body.outputs[1 : 1 + states], model)
    for out, result in zip(node.outputs[states:], body.outputs[1 + states :]):
        _give_declared(result, out, 0)


def _type_scan(node: ir.Node, model: ir.Model) -> None:
    """Type the body and the results of a Scan."""
    body, count = node.attributes["body"].as_graph(), attribute(node, "num_scan_inputs")
    states = len(body.inputs) - count
    in_batches = model.graph.opset_imports.get("", 9) < 9  # lengths of sequences come first, and samples are in front
    first_values = node.inputs[1:] if in_batches else node.inputs
    axes = [0] * count if in_batches else attribute(node, "scan_input_axes") or [0] * count
    lengths = []
    for value, scanned, axis in zip(body.inputs[states:], first_values[states:], axes):
        sizes = None if scanned is None or scanned.shape is None else list(scanned.shape)[in_batches:]
        if sizes is not None and -len(sizes) <= axis < len(sizes):
            lengths.append(sizes.pop(axis))
        value.type = None if scanned is None else scanned.type
        value.shape = None if sizes is None else ir.Shape(sizes)
    _type_states(node, body, body.inputs[:states], first_values[:states], body.outputs[:states], model, in_batches)
    if in_batches:
        return
    out_axes = attribute(node, "scan_output_axes") or [0] * len(body.outputs)
    for out, result, axis in zip(node.outputs[states:], body.outputs[states:], out_axes):
        _give_declared(result, out, axis)
        dims = shape(result)
        if dims is not None and lengths and isinstance(lengths[0], int) and -len(dims) - 1 <= axis <= len(dims):
            position = axis % (len(dims) + 1)
            _set_open(out, result, ir.Shape((*dims[:position], lengths[0], *dims[position:])))


def _type_states(
    node: ir.Node, body: ir.Graph, states: Sequence[ir.Value], first_values: Sequence[ir.Value | None],
    results: Sequence[ir.Value], model: ir.Model, in_batches: bool = False,
) -> None:  # fmt: skip
    """Type a body whose `states` begin as `first_values` and become `results` in each iteration.

    Sizes that an iteration changes, or that cannot be inferred, are open. in_batches: the first values have an axis of
    samples in front.
    """
    for state, first in zip(states, first_values):
        if first is not None:
            state.type = first.type
            state.shape = None if first.shape is None else ir.Shape(list(first.shape)[in_batches:])
    while True:
        _infer_body(body, node, model)
        changed = False
        for state, result in zip(states, results):
            before, after = _sizes(state.shape), _sizes(result.shape)
            kept = None  # where the number of axes differs
            if before is not None and after is not None and len(before) == len(after):
                kept = tuple(size if size == result_size else None for size, result_size in zip(before, after))
            changed |= kept != before
            state.shape = None if kept is None else ir.Shape(kept)
        if not changed:
            break
    for out, state, result in zip(node.outputs, states, results):
        if not in_batches:
            _set_open(out, state if state.type is not None else result, state.shape)


def _sizes(dims: ir.Shape | None) -> tuple[int | None, ...] | None:
    """Return the sizes of a shape, None for open ones."""
    return None if dims is None else tuple(size if isinstance(size, int) else None for size in dims)


def _give_declared(result: ir.Value, out: ir.Value, axis: int) -> None:
    """Note the sizes of `out`, less the axis of the iterations, for a result of a body whose shape is not known.

    A run without iterations returns an empty tensor of these sizes and this type.
    """
    if result.type is None and isinstance(out.type, ir.TensorType):
        result.type = ir.TensorType(out.type.dtype)
    if result.shape is None and out.shape is not None and -len(out.shape) <= axis < len(out.shape):
        sizes = list(out.shape)
        del sizes[axis]
        result.meta.setdefault(DECLARED, ir.Shape(sizes))


def _set_open(out: ir.Value, like: ir.Value, dims: ir.Shape | None) -> None:
    """Set the type and the shape of `out` where they are not known: to the type of `like`, and to `dims`."""
    if out.type is None or out.dtype in UNKNOWN:
        out.type = like.type or out.type
    if shape(out) is None and dims is not None and isinstance(like.type, ir.TensorType):
        out.shape = ir.Shape(dims)


def _infer_body(body: ir.Graph, node: ir.Node, model: ir.Model) -> None:
    """Infer the types and shapes of all values in a `body` of `node` from those of its inputs and of outer values.

    Shapes that the model declares do not count; types count where none can be inferred.
    """
    declared_types = {}
    for inner_node in body.all_nodes():
        for value in inner_node.outputs:
            if value.shape is not None:
                value.meta.setdefault(DECLARED, value.shape)
            declared_types[value] = value.type
            value.shape = None
    values = {value.name: value for inner_node in body for value in inner_node.outputs}
    for value in values.values():
        if isinstance(value.type, ir.TensorType):
            value.type = None
    for info in _inferred_by_onnx(body, captured(node), model):
        if info.name in values:
            value, inferred = values[info.name], ir.serde.deserialize_value_info_proto(info, None)
            value.type, value.shape = value.type or inferred.type, inferred.shape
    for inner_node in body:
        for output in inner_node.outputs:
            output.type = output.type or declared_types[output]
        if subgraphs(inner_node):
            _type_operator(inner_node, model)
        else:
            infer(inner_node, model.graph.opset_imports.get("", 21))


def _inferred_by_onnx(body: ir.Graph, outer: Sequence[ir.Value], model: ir.Model) -> Sequence[onnx.ValueInfoProto]:
    """Return what onnx infers of the values in a `body`, which may read the values `outer`; nothing where it cannot.

    It infers them on a model made of the body, whose inputs are the outer values. Small outer constants go in as
    constants, since shapes may depend on them.
    """
    known = [value for value in outer if value.type is not None]
    small = [value for value in known if (array := constant(value)) is not None and array.size <= MAX_LIST_ELEMENTS]
    graph = ir.serde.serialize_graph(body)
    graph.input.extend(ir.serde.serialize_value(value) for value in known if value not in small)
    graph.initializer.extend(ir.serde.serialize_tensor(value.const_value) for value in small if value.const_value)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    try:
        shaped = infer_with_onnx(proto).graph
    except onnx.shape_inference.InferenceError:
        return []
    return [*shaped.value_info, *shaped.output]
