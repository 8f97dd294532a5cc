"""Small valid models, and mutations of them: each changes one thing at random.

`mutated(name, kinds, seed)` returns the bytes of a mutated model and inputs for it.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from driver_models import floats, quantised
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper, numpy_helper

sys.path.append(str(Path(__file__).parent.parent / "compiler"))

from onnx_nodes import cases
from small_models import HOSTILE

Array = NDArray[Any]
MAX_BYTES = 20_000
"""Size limit of seeds: larger ones take long and test nothing new."""
INTS = (0, 1, -1, 2, 3, 7, 255, -128, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e-45, 1e38, -3.4e38)
TEXTS = ("", "a\0b", "ä", "NOTSET", "SAME_UPPER", "VALID", "reflect", "linear", "cubic", "nosuch", "x" * 5000)
DTYPES = tuple(range(0, 27))
Seed = tuple[onnx.ModelProto, dict[str, Any]]


@functools.cache
def seeds() -> dict[str, Seed]:
    """Return models and inputs by name: quantised networks, control flow, and the node tests of ONNX."""
    rng = np.random.default_rng(0)
    image = {"input_1": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)}
    pair = {name: rng.normal(size=(2, 3)).astype(np.float32) for name in "ab"}
    models: dict[str, Seed] = {
        "qdq": (quantised(), image),
        "qdq_uint8": (quantised(np.uint8), image),
        "qoperator": (quantised(form="qoperator"), image),
        "floats": (floats(), pair),
    }
    for name, case in cases("node").items():
        if case.model is None or not case.data_sets or case.model.ByteSize() > MAX_BYTES:
            continue
        names = [value.name for value in case.model.graph.input]
        models[name] = (case.model, dict(zip(names, case.data_sets[0][0])))
    return models


# Pieces of a model ----------------------------------------------------------------------------------------------


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph and those inside its nodes."""
    yield graph
    for node in graph.node:
        for attr in node.attribute:
            for inner in (*([attr.g] if attr.HasField("g") else ()), *attr.graphs):
                yield from graphs(inner)


def _graph(model: onnx.ModelProto, rng: random.Random) -> onnx.GraphProto:
    return rng.choice(list(graphs(model.graph)))


def _node(model: onnx.ModelProto, rng: random.Random) -> onnx.NodeProto:
    holders = [*graphs(model.graph), *model.functions]
    return rng.choice([node for holder in holders for node in holder.node])


def _attribute(model: onnx.ModelProto, rng: random.Random) -> AttributeProto:
    return rng.choice(list(_node_with_attributes(model, rng).attribute))


def _node_with_attributes(model: onnx.ModelProto, rng: random.Random) -> onnx.NodeProto:
    holders = [*graphs(model.graph), *model.functions]
    return rng.choice([node for holder in holders for node in holder.node if node.attribute])


def _tensor(model: onnx.ModelProto, rng: random.Random) -> TensorProto:
    tensors = [tensor for graph in graphs(model.graph) for tensor in graph.initializer]
    tensors += [attr.t for graph in graphs(model.graph) for node in graph.node for attr in node.attribute
              if attr.HasField("t")]  # fmt: skip
    return rng.choice(tensors)


def _names(graph: onnx.GraphProto) -> list[str]:
    names = [value.name for value in (*graph.input, *graph.output)] + [t.name for t in graph.initializer]
    return [*names, *(name for node in graph.node for name in (*node.input, *node.output)), "", "nowhere"]


def _value(model: onnx.ModelProto, rng: random.Random) -> onnx.ValueInfoProto:
    return rng.choice([v for g in graphs(model.graph) for v in (*g.input, *g.output, *g.value_info)])


# Mutations ------------------------------------------------------------------------------------------------------


def swap_nodes(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Exchange two nodes."""
    nodes = _graph(model, rng).node
    a, b = rng.sample(range(len(nodes)), 2)
    first = onnx.NodeProto()
    first.CopyFrom(nodes[a])
    nodes[a].CopyFrom(nodes[b])
    nodes[b].CopyFrom(first)


def repeat_node(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Append a copy of a node, most often with other outputs."""
    graph = _graph(model, rng)
    node = graph.node.add()
    node.CopyFrom(rng.choice(graph.node[:-1]))
    if rng.random() < 0.7:
        for k, name in enumerate(node.output):
            node.output[k] = f"{name}_again"


def delete_node(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Remove a node."""
    nodes = _graph(model, rng).node
    del nodes[rng.randrange(len(nodes))]


def change_operator(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Change the operator of a node, perhaps to an unknown one."""
    node = _node(model, rng)
    known = sorted({(n.op_type, n.domain) for m, _ in seeds().values() for n in m.graph.node})
    node.op_type, node.domain = rng.choice([*known, ("NoSuch", ""), (node.op_type, "nowhere"), ("", ""), ("Loop", "")])


def rewire(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Replace an input or output of a node by another tensor."""
    graph = _graph(model, rng)
    node = rng.choice(graph.node)
    names = node.input if node.input and rng.random() < 0.8 else node.output
    names[rng.randrange(len(names))] = rng.choice(_names(graph))


def cut_inputs(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Remove or append an input of a node."""
    names = _node(model, rng).input
    if rng.random() < 0.5:
        del names[rng.randrange(len(names))]
    else:
        names.append(rng.choice(_names(model.graph)))


def cut_outputs(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Remove or append an output of a node."""
    names = _node(model, rng).output
    if rng.random() < 0.5:
        del names[rng.randrange(len(names))]
    else:
        names.append(rng.choice(["", "another", *names]))


def drop_attribute(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Remove an attribute."""
    attrs = _node_with_attributes(model, rng).attribute
    del attrs[rng.randrange(len(attrs))]


def change_attribute(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Change the value of an attribute."""
    attr = _attribute(model, rng)
    ints, reals = INTS if rng.random() < 0.5 else (0, 1, 2, 3, -1), FLOATS
    match attr.type:
        case AttributeProto.INT:
            attr.i = rng.choice(ints)
        case AttributeProto.FLOAT:
            attr.f = rng.choice(reals)
        case AttributeProto.STRING:
            attr.s = rng.choice([*(text.encode() for text in TEXTS), b"\xff\xfe"])
        case AttributeProto.INTS:
            _change_list(attr.ints, ints, rng)
        case AttributeProto.FLOATS:
            _change_list(attr.floats, reals, rng)
        case AttributeProto.STRINGS:
            _change_list(attr.strings, [text.encode() for text in TEXTS], rng)
        case _:
            attr.name = rng.choice(["value", "body", "nosuch", attr.name.upper()])


def _change_list(values: Any, choices: Any, rng: random.Random) -> None:
    """Change, append or remove an element, or replace all elements."""
    kind = rng.randrange(4)
    if kind == 0 and values:
        values[rng.randrange(len(values))] = rng.choice(choices)
    elif kind == 1:
        values.append(rng.choice(choices))
    elif kind == 2 and values:
        del values[rng.randrange(len(values))]
    else:
        new = [rng.choice(choices) for _ in range(rng.choice([0, 1, len(values), 1000]))]
        del values[:]
        values.extend(new)


def add_attribute(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Append an attribute with a random name and value."""
    node = _node(model, rng)
    names = [
        "axis",
        "axes",
        "perm",
        "to",
        "dtype",
        "shape",
        "group",
        "pads",
        "strides",
        "dilations",
        "auto_pad",
        "mode",
    ]
    with contextlib.suppress(onnx.defs.SchemaError):
        names += list(onnx.defs.get_schema(node.op_type, node.domain).attributes)
    value: Any = rng.choice([rng.choice(INTS), rng.choice(FLOATS), rng.choice(TEXTS), [rng.choice(INTS)] * 2, [1.0]])
    if isinstance(value, str) and not value:
        value = b""
    node.attribute.append(helper.make_attribute(rng.choice(names), value))


def change_type(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Change the element type of a tensor."""
    _value(model, rng).type.tensor_type.elem_type = rng.choice(DTYPES)


def change_dims(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Remove, append or change a size of a tensor."""
    shape = _value(model, rng).type.tensor_type.shape
    kind = rng.randrange(5)
    if kind == 0 and shape.dim:
        del shape.dim[rng.randrange(len(shape.dim))]
    elif kind == 1:
        shape.dim.add().dim_value = rng.choice(INTS)
    elif kind == 2 and shape.dim:
        rng.choice(shape.dim).dim_param = "n"
    elif shape.dim:
        rng.choice(shape.dim).dim_value = rng.choice(INTS) if kind == 3 else rng.choice((0, 1, 2, 3, 5))


def change_tensor(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Change type, sizes, bytes or values of a constant."""
    tensor = _tensor(model, rng)
    match rng.randrange(6):
        case 0:
            tensor.data_type = rng.choice(DTYPES)
        case 1:
            _change_list(tensor.dims, INTS, rng)
        case 2:
            tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
        case 3:
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            place = rng.choice(["nowhere.bin", "../../etc/passwd", "/etc/passwd", "", "a\0b", "."])
            tensor.external_data.append(onnx.StringStringEntryProto(key="location", value=place))
        case _:
            tensor.CopyFrom(numpy_helper.from_array(_changed(numpy_helper.to_array(tensor), rng), tensor.name))


def change_input(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Change a value in an array that the model takes; the model stays."""
    name = rng.choice(sorted(inputs))
    inputs[name] = _changed(inputs[name], rng)


def _changed(value: Any, rng: random.Random) -> Any:
    """Return an array with another element, other elements, or another shape."""
    if not isinstance(value, np.ndarray):
        return value
    array = np.array(value)
    if array.dtype.kind in "OSU":
        array = array.astype(object)
        array[...] = rng.choice(TEXTS)
        return array
    choices = INTS if array.dtype.kind in "iub" else FLOATS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = np.array(rng.choice(choices), np.int64 if choices is INTS else np.float64).astype(array.dtype)
    match rng.randrange(4):
        case 0 | 1 if array.size:
            array.reshape(-1)[rng.randrange(array.size)] = new
        case 2:
            array[...] = new
        case _:
            array = np.resize(array, rng.choice([(), (0,), (1,), (2, 2), array.shape[1:], (*array.shape, 1)]))
    return array


def fix_input(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Turn an input into a constant, so that operators on it are folded."""
    known = [name for name, value in inputs.items() if isinstance(value, np.ndarray) and value.dtype.kind != "O"]
    name = rng.choice(known)
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(inputs[name]), name))
    if rng.random() < 0.7:
        others = [value for value in model.graph.input if value.name != name]
        del model.graph.input[:]
        model.graph.input.extend(others)


def change_border(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Remove, repeat or rename an input or output of a graph."""
    graph = _graph(model, rng)
    values = rng.choice([graph.input, graph.output])
    match rng.randrange(4):
        case 0:
            del values[rng.randrange(len(values))]
        case 1:
            values.append(rng.choice(values))
        case 2:
            rng.choice(values).name = rng.choice(_names(graph))
        case _:
            new = values.add()
            new.CopyFrom(rng.choice(values[:-1]))
            new.name = rng.choice(_names(graph))


def change_version(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Change the IR version or an opset."""
    match rng.randrange(4):
        case 0:
            model.ir_version = rng.choice([0, 1, 3, 4, 8, 10, 13, 99, -1])
        case 1:
            del model.opset_import[rng.randrange(len(model.opset_import))]
        case _:
            rng.choice(model.opset_import).version = rng.choice([*range(0, 28), -1, 2**40])


def wrap_in_loop(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Make the graph the body of an If, whose condition is an input."""
    branch = onnx.GraphProto()
    branch.CopyFrom(model.graph)
    del branch.input[:]
    outputs = [value.name for value in model.graph.output]
    node = helper.make_node("If", ["condition_in"], outputs, name="outside", then_branch=branch, else_branch=branch)
    del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
    model.graph.node.append(node)
    model.graph.input.append(helper.make_tensor_value_info("condition_in", TensorProto.BOOL, [1]))
    inputs["condition_in"] = np.array([True])


def name_nodes(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Give nodes no names, equal names, or names of tensors with suffixes that the compiler might use."""
    kind = rng.choice(["none", "same", "hostile"])
    for graph in graphs(model.graph):
        names = [name for name in _names(graph) if name]
        for node in graph.node:
            node.name = {"none": "", "same": "node", "hostile": rng.choice(names) + rng.choice(HOSTILE)}[kind]


def rename_value(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Rename an inner tensor, wherever it is read, to a name that the compiler might use for another one."""
    border = {value.name for value in (*model.graph.input, *model.graph.output)}
    names = sorted({name for graph in graphs(model.graph) for name in _names(graph)} - {"", "nowhere"})
    old, new = rng.choice([name for name in names if name not in border]), rng.choice(names) + rng.choice(HOSTILE)
    for graph in graphs(model.graph):
        for names_of in (*(node.input for node in graph.node), *(node.output for node in graph.node)):
            names_of[:] = [new if name == old else name for name in names_of]
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = new if value.name == old else value.name


def share_constants(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Replace equal constants by one."""
    first: dict[bytes, str] = {}
    other: dict[str, str] = {}
    for tensor in model.graph.initializer:
        content = onnx.TensorProto()
        content.CopyFrom(tensor)
        content.name = ""
        other[tensor.name] = first.setdefault(content.SerializeToString(deterministic=True), tensor.name)
    for graph in graphs(model.graph):
        for node in graph.node:
            node.input[:] = [other.get(name, name) for name in node.input]


def be_careless(model: onnx.ModelProto, inputs: dict[str, Any], rng: random.Random) -> None:
    """Apply a mutation that onnxruntime tolerates.

    Outputs lack types, imports are missing, nodes are in any order, or constants occur twice.
    """
    graph = model.graph
    kind = rng.choice(["type", "shape", "imports", "order", "constants", "ir_version"])
    if kind == "type":
        rng.choice(graph.output).ClearField("type")
    elif kind == "shape":
        rng.choice(graph.output).type.tensor_type.ClearField("shape")
    elif kind == "imports":
        del model.opset_import[rng.randrange(len(model.opset_import))]
    elif kind == "order":
        order = rng.sample(list(graph.node), len(graph.node))
        del graph.node[:]
        graph.node.extend(order)
    elif kind == "constants":
        graph.initializer.append(rng.choice(graph.initializer))
    else:
        model.ir_version = rng.choice([0, 1, 2, 3, 4])


Mutation = Callable[[onnx.ModelProto, dict[str, Any], random.Random], None]
MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        swap_nodes, repeat_node, delete_node, change_operator, rewire, cut_inputs, cut_outputs, drop_attribute,
        change_attribute, add_attribute, change_type, change_dims, change_tensor, change_input, fix_input,
        change_border, change_version, wrap_in_loop, name_nodes, rename_value, share_constants, be_careless,
    )
}  # fmt: skip
BYTES = "bytes"
"""The mutation that changes arbitrary bytes of the file."""


def mutated(name: str, kinds: list[str], seed: int) -> tuple[bytes, dict[str, Any]]:
    """Return the seed `name` after mutations of these kinds, as a file's content, and inputs for it.

    A mutation that does not apply, such as one of an attribute if there is none, changes nothing.
    """
    rng = random.Random(seed)
    original, original_inputs = seeds()[name]
    model = onnx.ModelProto()
    model.CopyFrom(original)
    inputs = dict(original_inputs)
    for kind in kinds:
        if kind == BYTES:
            continue
        try:
            MUTATIONS[kind](model, inputs, rng)
        except Exception:  # nothing to change, or a value that the proto refuses
            continue
    content = bytearray(model.SerializeToString())
    for _ in range(kinds.count(BYTES)):
        place = rng.randrange(len(content)) if content else 0
        if rng.random() < 0.5 and content:
            content[place] ^= 1 << rng.randrange(8)
        else:
            del content[place : place + rng.randrange(1, 4)]
    return bytes(content), inputs
