"""Decoders may have attention and its cache in one operator, as onnxruntime-genai writes them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.decoders import DecoderNetwork as Network
from benchmarks.decoders import quantised
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from thorough import some
from typer.testing import CliRunner

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.driver.cli import app
from celosia.driver.generate.decoder import Decoder
from celosia.hw.spec.config import PRESETS

from ..oracle import opened

Array = NDArray[Any]
GPT = Network(heads=2, inner=16, wide=48, layers=2, vocabulary=30, most=40, fused=True)
LLAMA = Network(heads=4, groups=2, inner=16, wide=40, layers=2, vocabulary=25, most=64, rotary=True, fused=True, seed=2)
WIDE = replace(LLAMA, inner=32, layers=1)
ONE = replace(LLAMA, layers=1)
Change = Callable[[onnx.GraphProto], None]


def fused(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type in ("GroupQueryAttention", "MultiHeadAttention")]


def having(**attributes: Any) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        for node in fused(graph):
            kept = [each for each in node.attribute if each.name not in attributes]
            del node.attribute[:]
            node.attribute.extend([*kept, *(helper.make_attribute(*each) for each in attributes.items())])

    return change


def packed(graph: onnx.GraphProto) -> None:
    """Compute queries, keys and values by one product."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in fused(graph):
        products = [product for product in graph.node if product.output[0] in node.input[:3]]
        joined_weights = np.hstack([numpy_helper.to_array(weights[product.input[1]]) for product in products])
        graph.initializer.append(numpy_helper.from_array(joined_weights, f"{node.name}_whole"))
        bias = np.random.default_rng(4).normal(size=joined_weights.shape[1]).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(bias, f"{node.name}_bias"))
        products[0].input[1], y = f"{node.name}_whole", products[0].output[0]
        products[0].output[0] = f"{y}_product"
        biased = helper.make_node("Add", [f"{y}_product", f"{node.name}_bias"], [y])
        graph.node.insert(list(graph.node).index(products[0]) + 1, biased)
        for product in products[1:]:
            graph.node.remove(product)
        node.input[1:3] = ["", ""]


def skipping(graph: onnx.GraphProto) -> None:
    """Fuse the sums of the residual stream with the normalisations after them."""
    makers = {name: node for node in graph.node for name in node.output}
    for norm in [node for node in graph.node if node.op_type == "SimplifiedLayerNormalization"]:
        added = makers[norm.input[0]]
        if added.op_type != "Add":
            continue
        norm.op_type, norm.domain = "SkipSimplifiedLayerNormalization", "com.microsoft"
        norm.output.extend(["", "", added.output[0]])
        norm.input[:] = [*added.input, norm.input[1]]
        del norm.attribute[:]
        norm.attribute.append(helper.make_attribute("epsilon", 1e-6))
        graph.node.remove(added)


def half_turned(graph: onnx.GraphProto) -> None:
    """Rotate only half of each head's elements."""
    for name in fused(graph)[0].input[7:9]:
        (tensor,) = (constant for constant in graph.initializer if constant.name == name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[:, ::2].copy(), name))


def biased(graph: onnx.GraphProto) -> None:
    """Add a bias of heads and columns to the scores, as ALiBi does."""
    slopes = numpy_helper.from_array(np.float32([0.1, 0.2, 0.3, 0.4]).reshape(1, 4, 1, 1), "slopes")
    bias_nodes = [
        helper.make_node("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT),
        helper.make_node("CumSum", ["seen", "one"], ["columns"]),
        helper.make_node("Unsqueeze", ["columns", "axes"], ["wide"]),
        helper.make_node("Mul", ["wide", "slopes"], ["bias_row"]),
        helper.make_node("Expand", ["bias_row", "rows"], ["bias"]),
    ]
    steps = [
        helper.make_node("Shape", ["input_ids"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "place"], ["steps"]),
        helper.make_node("Concat", ["ones", "steps", "ones_behind"], ["rows"], axis=0),
    ]
    constants = {"one": np.int64(1), "axes": np.int64([1, 2]), "place": np.int64([1]), "ones": np.int64([1, 1]),
                 "ones_behind": np.int64([1])}  # fmt: skip
    graph.initializer.extend([slopes, *(numpy_helper.from_array(np.array(v), k) for k, v in constants.items())])
    for node in reversed([*steps, *bias_nodes]):
        graph.node.insert(0, node)
    for node in fused(graph):
        node.input.extend(["", "bias"])


def placed(graph: onnx.GraphProto) -> None:
    """Make the positions of tokens an input."""
    graph.input.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, [1, "steps"]))
    for node in fused(graph):
        node.input.append("position_ids")


def turned_before(graph: onnx.GraphProto) -> None:
    """Rotate queries and keys by separate operators."""
    for node in fused(graph):
        for number in (0, 1):
            x, y = node.input[number], f"{node.name}_turned_{number}"
            turn = helper.make_node(
                "RotaryEmbedding", [x, "position_ids", *node.input[7:9]], [y], domain="com.microsoft"
            )
            graph.node.insert(list(graph.node).index(node), turn)
            node.input[number] = y


def in_heads(graph: onnx.GraphProto) -> None:
    """Replace the operator by a causal MultiHeadAttention with a bias and a mask of keys."""
    heads = helper.get_node_attr_value(fused(graph)[0], "num_heads")
    bias = np.random.default_rng(3).normal(size=3 * heads * GPT.inner).astype(np.float32)
    graph.initializer.append(numpy_helper.from_array(bias, "bias"))
    graph.node.insert(0, helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.INT32))
    for node in fused(graph):
        node.op_type = "MultiHeadAttention"
        node.input[:] = [*node.input[:3], "bias", "mask", "", *node.input[3:5]]
        del node.attribute[:]
        node.attribute.extend([helper.make_attribute("num_heads", heads), helper.make_attribute("unidirectional", 1)])


def unbiased(graph: onnx.GraphProto) -> None:
    for node in fused(graph):
        node.input[3] = ""


def last_alone(graph: onnx.GraphProto) -> None:
    """Return the logits of the last token only."""
    (head,) = (node for node in graph.node if node.output[0] == graph.node[-1].input[0])
    for name, value in (("from", -1), ("to", np.iinfo(np.int64).max), ("along", 1)):
        graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    last = helper.make_node("Slice", [head.input[0], "from", "to", "along"], ["last_row"])
    graph.node.insert(len(graph.node) - 2, last)
    head.input[0] = "last_row"
    graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1


def changed(network: Network, *changes: Change) -> onnx.ModelProto:
    model = network.model()
    for change in changes:
        change(model.graph)
    return model


class Growing:
    """onnxruntime, which runs the unchanged model with a growing cache."""

    def __init__(self, model: onnx.ModelProto | Path, network: Network) -> None:
        self.session, self.seen = opened(model, int8=True), 0
        self.asked = [each.name for each in self.session.get_inputs()]
        self.caches = {name: array[:, :, :0] for name, array in network.feed(1, 1, 0).items() if "past" in name}

    def feed(self, tokens: list[int]) -> Array:
        """Run tokens and return the logits of the last one."""
        total = self.seen + len(tokens)
        given = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, total), np.int64),
                 "position_ids": np.arange(self.seen, total)[None]}  # fmt: skip
        names = [each.name for each in self.session.get_outputs()]
        given = {name: array for name, array in given.items() if name in self.asked}
        found = dict(zip(names, self.session.run(names, given | self.caches)))
        self.seen = total
        self.caches = {name: found[name.replace("past_key_values", "present")] for name in self.caches}
        logits: Array = found["logits"][0, -1]
        return logits


CHANGES = {
    "learned positions": (GPT, ()), "turned": (ONE, ()), "packed": (ONE, (packed,)),
    "neighbours": (ONE, (having(rotary_interleaved=1), placed)), "half": (WIDE, (half_turned,)),
    "half of neighbours": (WIDE, (half_turned, having(rotary_interleaved=1))),
    "window": (ONE, (having(local_window_size=4),)), "capped": (ONE, (having(softcap=2.0, scale=0.5),)),
    "biased": (ONE, (biased,)), "heads of their own": (GPT, (in_heads,)),
    "heads of their own, turned": (replace(ONE, groups=4), (placed, turned_before, in_heads)),
    "the last alone": (ONE, (last_alone,)),
}  # fmt: skip


@pytest.mark.parametrize("name", some(CHANGES, CHANGES.keys() - {"half of neighbours", "heads of their own"}))
def test_logits_are_onnxruntimes(name: str) -> None:
    """Logits equal onnxruntime's up to roundings, for a prompt in pieces and tokens after it."""
    network, changes = CHANGES[name]
    model = changed(network, *changes)
    oracle, tokens = Growing(model, network), np.random.default_rng(1).integers(0, 25, 9).tolist()
    with Decoder(model, config="tiny", length=16, chunk=4, check=False) as decoder:
        session = decoder.session()
        for chunk in (tokens, [3], [7], [1, 2]):
            np.testing.assert_allclose(session.feed(chunk), oracle.feed(chunk), rtol=1e-4, atol=2e-5)


IN_BYTES = replace(LLAMA, inner=32, wide=48, layers=1)
CASES = [
    ("products", IN_BYTES, (), 5), ("all", IN_BYTES, (packed, skipping), 1),
    ("rotary", replace(IN_BYTES, groups=4), (placed, turned_before, in_heads, unbiased), 4),
]  # fmt: skip


@pytest.mark.parametrize(("operators", "network", "changes", "launches"), some(CASES, CASES[:1]))
def test_quantised_they_are_plain(
    operators: str, network: Network, changes: tuple[Change, ...], launches: int, tmp_path: Path
) -> None:  # fmt: skip
    """Quantised decoders compute attention by products of bytes with caches of bytes, and give onnxruntime's logits."""
    onnx.save(changed(network, *changes), tmp_path / "float.onnx")
    tokens, path = np.random.default_rng(0).integers(0, 25, (4, 8)), tmp_path / "int8.onnx"
    report = celosia.quantize(tmp_path / "float.onnx", {"input_ids": tokens}, path, operators=operators, config="tiny")
    assert report["accelerator"]["macs_accelerator"] == report["accelerator"]["macs_total"] > 0
    cfg = replace(PRESETS["pynq"], forward=False, softmax=4, norm=8)
    with Decoder(path, config=cfg, length=8, chunk=4, rounding="correct", check=False) as decoder:
        session, oracle = decoder.session(), Growing(path, network)
        for given in ([1, 2, 3, 4], [5]):
            np.testing.assert_array_equal(session.feed(given), oracle.feed(given))
        assert len(decoder.program().launches) == launches
        assert {each.dtype for each in decoder.program().inputs if "past" in each.name} == {"int8"}


def test_quantised_around_attention(tmp_path: Path) -> None:
    """A decoder quantised by onnxruntime's tools, with float attention, gives onnxruntime's logits bit by bit."""
    path = quantised(IN_BYTES, tmp_path, past=10)
    with Decoder(path, "functional", config="pynq", length=12, chunk=4, check=False) as decoder:
        session, oracle = decoder.session(), Growing(path, IN_BYTES)
        for given in ([1, 2, 3, 4, 5], [6], [7]):
            np.testing.assert_array_equal(session.feed(given), oracle.feed(given))


def test_compiled_for_given_sizes() -> None:
    """`celosia.compile` runs the fused operator on the CPU."""
    model = changed(ONE, packed, skipping)
    feed = ONE.feed(2, 3, seed=0)
    program = celosia.compile(model, "tiny", shapes={name: array.shape for name, array in feed.items()})
    found, session = celosia.Runtime(program).run(feed).outputs, opened(model)
    for value, expected in zip(session.get_outputs(), session.run(None, feed)):
        np.testing.assert_allclose(found[value.name], expected, rtol=1e-4, atol=1e-5)


# What cannot be run step by step ----------------------------------------------------------------------------------


def with_input(number: int, name: str) -> Change:
    def change(graph: onnx.GraphProto) -> None:
        for node in fused(graph):
            node.input.extend([""] * (number + 1 - len(node.input)))
            node.input[number] = name

    return change


def counting_from_one(graph: onnx.GraphProto) -> None:
    """Plant a fault: pass the number of tokens in place of the position of the last one."""
    (last,) = (node for node in graph.node if node.op_type == "Sub")
    last.op_type = "Identity"
    del last.input[1]


def of_an_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("lengths_mask", TensorProto.INT32, [1]))
    with_input(5, "lengths_mask")(graph)


def computed(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, helper.make_node("Identity", ["c1"], ["angles"]))
    with_input(7, "angles")(graph)


def cut(graph: onnx.GraphProto) -> None:
    """Copy the cache before it is read."""
    name = "past_key_values.0.key"
    graph.node.insert(0, helper.make_node("Identity", [name], ["later"]))
    fused(graph)[0].input[3] = "later"


REFUSED = {
    "a sink": (having(smooth_softmax=1), "has smooth_softmax = 1, which cannot be run step by step"),
    "sinks of heads": (with_input(11, "c0"), "takes 'c0', which cannot be run step by step"),
    "all see all": (having(causal=0), "has causal = 0, which"),
    "other heads": (having(kv_num_heads=4), "has 4 heads of queries, and its cache 2 of keys"),
    "lengths": (counting_from_one, "which is not the last place of the mask 'attention_mask'"),
    "lengths of the user": (of_an_input, "one input for the mask|which is not the last place"),
    "angles that are computed": (computed, "turns by 'angles', which is no constant"),
    "angles of other heads": (with_input(8, "c0"), "both must be"),
    "a cache that is cut": (cut, "has a cache 'later', which is no input"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_is_refused(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        Decoder(changed(ONE, change))


def test_opsets_without_what_plain_operators_need() -> None:
    model = ONE.model()
    model.opset_import[0].version = 12
    with pytest.raises(ModelError, match=r"opset 13.*12"):
        Decoder(model)


def test_a_sequence_has_the_places_of_the_table(tmp_path: Path) -> None:
    onnx.save(ONE.model(), tmp_path / "decoder.onnx")
    assert Decoder(tmp_path / "decoder.onnx").length == ONE.most
    own = changed(replace(ONE, groups=4), placed, turned_before, in_heads)
    assert Decoder(own).length == ONE.most
    line = f"generate {tmp_path / 'decoder.onnx'} --config tiny --quiet --no-check -n 3 "
    refused = CliRunner().invoke(app, shlex.split(line + "--ids 1,2 --length 65"))
    assert refused.exit_code == 1 and "positions for 64 tokens, not for 65" in " ".join(refused.stderr.split())
    done = CliRunner().invoke(app, shlex.split(line + "--ids 1,2 --length 8"))
    assert done.exit_code == 0 and len(done.stdout.split()) == 5
