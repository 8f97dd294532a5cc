"""Apply changes that exporters make without effect on the results: names, constants, identities, open sizes."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from fuzz.models.net import Array, Draw

HOSTILE = (".shape", "_zero", "_table", "_weights", "_bias", "_int32", ".0", "@xy", "_quantised_", ":", "/", " ", "_1",
           "_cut", "é")  # fmt: skip
"""Endings that tools, and our compiler, append to names of tensors."""


def habits(draw: Draw, model: onnx.ModelProto, feeds: list[dict[str, Array]], may_open: bool) -> list[dict[str, Array]]:
    """Change `model` in place, and return the feeds by its new names.

    may_open: the model accepts any number of samples, so its first size may become open.
    """
    if draw.chance(0.4):
        _name_nodes(draw, model)
    if draw.chance(0.2):
        feeds = _name_tensors(draw, model, feeds)
    if draw.chance(0.2):
        _constant_nodes(draw, model)
    elif draw.chance(0.15):
        _constants_as_inputs(draw, model)
    if draw.chance(0.25):
        _wires(draw, model)
    firsts = {value.type.tensor_type.shape.dim[0].dim_value for value in model.graph.input if _rank(value)}
    if may_open and len(firsts) == 1 and draw.chance(0.3):
        for value in (*model.graph.input, *model.graph.output):
            if _rank(value) and value.type.tensor_type.shape.dim[0].dim_value in firsts:
                value.type.tensor_type.shape.dim[0].dim_param = "n"
        del model.graph.value_info[:]
    return feeds


def _rank(value: onnx.ValueInfoProto) -> int:
    return len(value.type.tensor_type.shape.dim)


def _name_nodes(draw: Draw, model: onnx.ModelProto) -> None:
    kind, names = draw.choice(("none", "same", "hostile")), list(_tensors(model))
    for node in model.graph.node:
        node.name = {"none": "", "same": "node", "hostile": draw.choice(names) + draw.choice(HOSTILE)}[kind]


def _tensors(model: onnx.ModelProto) -> dict[str, None]:
    """Return the names of all tensors, in order; the models have no subgraphs."""
    graph = model.graph
    names = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    return dict.fromkeys(name for name in (*names, *(out for node in graph.node for out in node.output)) if name)


def _name_tensors(draw: Draw, model: onnx.ModelProto, feeds: list[dict[str, Array]]) -> list[dict[str, Array]]:
    """Rename all tensors: a new name is another tensor's name plus an ending that a tool might append."""
    new: dict[str, str] = {}
    for number, name in enumerate(_tensors(model)):
        stem = draw.choice([*new.values(), f"{number}", "x"])[:30]
        fresh = stem + draw.choice(HOSTILE)
        new[name] = fresh if fresh not in new.values() else f"{fresh}{number}"
    graph = model.graph
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = new.get(value.name, value.name)
    return [{new[name]: array for name, array in feed.items()} for feed in feeds]


def _constant_nodes(draw: Draw, model: onnx.ModelProto) -> None:
    """Turn some initialisers into Constant nodes."""
    graph = model.graph
    chosen = [tensor for tensor in graph.initializer if draw.chance(0.6)]
    rest = [tensor for tensor in graph.initializer if tensor not in chosen]
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in chosen]
    all_nodes = [*nodes, *graph.node]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(all_nodes), graph.initializer.extend(rest)


def _constants_as_inputs(draw: Draw, model: onnx.ModelProto) -> None:
    """Declare some initialisers as inputs, too, as before IR version 4: as defaults that a user may override.

    Scales and zero points stay constants, because onnxruntime has no integer operators for variable ones.
    """
    known = {value.name for value in model.graph.input}
    known |= {name for node in model.graph.node if "Linear" in node.op_type for name in node.input[1:]}
    for tensor in model.graph.initializer:
        if tensor.name not in known and draw.chance(0.5):
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def _wires(draw: Draw, model: onnx.ModelProto) -> None:
    """Insert Identity, Dropout, and Cast to the same type between operators."""
    graph = model.graph
    inferred = onnx.shape_inference.infer_shapes(model).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*inferred.input, *inferred.value_info)}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for place, name in enumerate(node.input):
            kind = kinds.get(name, TensorProto.UNDEFINED)
            if not draw.chance(0.15) or kind == TensorProto.UNDEFINED:
                continue
            ops = ["Identity", "Cast"] + ["Dropout"] * (kind == TensorProto.FLOAT)
            op, out = draw.choice(ops), f"wire_{len(nodes)}_{place}"
            nodes.append(helper.make_node(op, [name], [out], **({"to": kind} if op == "Cast" else {})))
            node.input[place] = out
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
