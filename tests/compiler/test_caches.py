"""Products of two activations read caches to which rows are appended, and keys and values that heads share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from benchmarks.decoders import DecoderNetwork, quantised
from numpy.typing import NDArray
from thorough import some

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.select import concatenation, elementwise, matrices, movement
from celosia.compiler.graph.select.placement import Placement
from celosia.compiler.layer import StridedView
from celosia.compiler.program import Program
from celosia.compiler.selfcheck.check_launches import SelfCheckError
from celosia.compiler.vthread.verify.provenance import ProvenanceError
from celosia.driver.generate.roles import find_roles
from celosia.driver.generate.stepping import Stepping, rewrite_to_return_new_rows
from celosia.hw.spec.config import PRESETS, Config

from ..oracle import opened

NETWORKS = {
    "own heads": DecoderNetwork(heads=2, inner=16, wide=32, layers=1, vocabulary=16, most=64),
    "shared by three": DecoderNetwork(
        heads=6, groups=2, inner=16, wide=32, layers=1, vocabulary=16, most=64, rotary=True, seed=1
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stepping]:
    """Return each network as the generator compiles it, with caches of bytes."""
    results = {}
    for name, network in NETWORKS.items():
        proto = onnx.load(quantised(network, tmp_path_factory.mktemp("decoder"), past=20))
        results[name] = rewrite_to_return_new_rows(proto, find_roles(proto))
        assert set(results[name].dtypes.values()) == {"int8"}
    return results


def fed(network: DecoderNetwork, new: int, past: int) -> dict[str, NDArray[Any]]:
    random, feed = np.random.default_rng(past), network.feed(new, past, past + new)
    return {
        name: random.integers(-128, 128, array.shape).astype(np.int8) if array.dtype.kind == "f" else array
        for name, array in feed.items()
    }


def compiled(step: Stepping, feed: dict[str, NDArray[Any]], config: str | Config = "pynq") -> Program:
    shapes = {name: array.shape for name, array in feed.items()}
    return celosia.compile(step.proto, config, shapes=shapes, caches=list(step.dtypes))


STEPS = [("pynq", 1, 15), ("pynq", 1, 16), ("pynq", 5, 12), ("tiny", 2, 1), ("tiny", 1, 31), ("ultra96", 3, 6)]


CASES = [(name, *step) for name in NETWORKS for step in STEPS]
QUICK = [("own heads", "pynq", 1, 16), ("own heads", "tiny", 2, 1), ("shared by three", "pynq", 5, 12)]


@pytest.mark.parametrize(("name", "config", "new", "past"), some(CASES, QUICK))
def test_all_outputs_are_onnxruntimes(name: str, config: str, new: int, past: int, steps: dict[str, Stepping]) -> None:
    """All outputs have onnxruntime's bytes.

    The oracle runs the rewritten model; test_generate.py tests the rewriting.
    """
    feed = fed(NETWORKS[name], new, past)
    oracle = opened(steps[name].proto, int8=True)
    names = [output.name for output in oracle.get_outputs()]
    expected = dict(zip(names, oracle.run(names, feed)))
    outputs = celosia.Runtime(compiled(steps[name], feed, config), "functional").run(feed).outputs
    for output in names:
        np.testing.assert_array_equal(outputs[output], expected[output])


SHARED = replace(NETWORKS["own heads"], heads=6, groups=2)
TURNED = replace(NETWORKS["shared by three"], inner=32)
IN_BYTES = [
    (NETWORKS["own heads"], 1, 15, 3, 2), (SHARED, 1, 31, 3, 2), (NETWORKS["shared by three"], 1, 16, 4, 2),
    (TURNED, 4, 29, 3, 2),
]  # fmt: skip
"""Networks whose softmax is one of bytes, tokens and rows of the cache, launches, and values that are turned."""


@pytest.mark.parametrize(("network", "new", "past", "launches", "turned"), some(IN_BYTES, [IN_BYTES[0], *IN_BYTES[2:]]))
def test_masks_and_softmax_of_bytes(
    network: DecoderNetwork, new: int, past: int, launches: int, turned: int, tmp_path: Path
) -> None:
    """Attention with its cache is one launch, except for rotary positions whose halves do not fill channel groups.

    Values are transposed once for all heads that share them.
    """
    proto = onnx.load(quantised(network, tmp_path, past=20, attention=True))
    step = rewrite_to_return_new_rows(proto, find_roles(proto))
    feed = fed(network, new, past)
    feed["attention_mask"][0, past // 2 : past] = 0
    program = compiled(step, feed, replace(PRESETS["pynq"], softmax=4))
    names = [output.name for output in program.outputs]
    for name, expected in zip(names, opened(step.proto, int8=True).run(names, feed)):
        np.testing.assert_array_equal(celosia.Runtime(program, "functional").run(feed).outputs[name], expected)
    layers = [layer.what for launch in program.launches for layer in launch.layers]
    assert (len(program.launches), sum(what.startswith("matrix turned") for what in layers)) == (launches, turned)
    assert sum("softmax" in what for what in layers) == network.heads
    assert program.macs_accelerator == program.macs_total


@pytest.mark.parametrize("network", some([NETWORKS["own heads"], TURNED], [NETWORKS["own heads"]]))
def test_a_step_in_bytes_is_one_launch(network: DecoderNetwork, tmp_path: Path) -> None:
    """A step from embeddings, which the host gathers as rows, to logits is one launch; the CPU computes norms in
    integers."""
    proto = onnx.load(quantised(network, tmp_path, past=20, attention=True, norms=True))
    step, feed = rewrite_to_return_new_rows(proto, find_roles(proto)), fed(network, 1, 15)
    shapes = {name: array.shape for name, array in feed.items()}
    given: dict[str, Any] = {"shapes": shapes, "caches": list(step.dtypes), "rounding": "correct"}
    program = celosia.compile(step.proto, replace(PRESETS["pynq"], softmax=4, norm=8), **given)
    (launch,) = program.launches
    assert sum(layer.op == "Norm" for layer in launch.layers) == 2 * network.layers + 1
    on_the_cpu = celosia.compile(step.proto, accelerator=False, check=False, **given)
    expected = celosia.Runtime(on_the_cpu, "functional").run(feed).outputs
    for name, output in celosia.Runtime(program, "functional").run(feed).outputs.items():
        np.testing.assert_array_equal(output, expected[name])


def other_steps(*args: Any, scale_b: int, **others: int) -> Any:
    return partial(*args, scale_b=scale_b // 2, **others)


def first_half(node: ir.Node, sizes: list[range]) -> list[tuple[int, range]]:
    return [(3, range(sizes[3].stop // 2))]


JOIN_COLUMNS = concatenation._join_columns


def in_other_places(p: Placement, node: ir.Node, parts: list[ir.Value]) -> bool:
    return JOIN_COLUMNS(p, node, parts[::-1])


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (elementwise, "partial", other_steps), (movement, "_cut_axes", first_half),
        (concatenation, "_join_columns", in_other_places),
    ],
)  # fmt: skip
def test_wrong_masks_and_halves_are_found(
    module: ModuleType, name: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = onnx.load(quantised(TURNED, tmp_path, past=20, attention=True))
    step = rewrite_to_return_new_rows(proto, find_roles(proto))
    monkeypatch.setattr(module, name, fault)
    with pytest.raises((ProvenanceError, SelfCheckError)):
        compiled(step, fed(TURNED, 1, 15), replace(PRESETS["pynq"], softmax=4))


def test_nothing_is_copied_or_repeated(steps: dict[str, Stepping]) -> None:
    """One layer loads and appends only the new row of keys; each head's product reads the keys of its group."""
    own, shared = (compiled(steps[name], fed(NETWORKS[name], 1, 31)) for name in NETWORKS)
    layers = [layer for launch in own.launches for layer in launch.layers]
    assert [layer.bytes_loaded for layer in layers if layer.name.startswith("Concat")] == [2 * 16]
    packed = [pack for launch in own.launches for pack in launch.pack if pack.cache]
    assert sorted((pack.cache.split(".")[-1], pack.form.fold) for pack in packed) == [
        ("key", "rows"), ("value", "columns"),
    ]  # fmt: skip
    packed = [pack for launch in shared.launches for pack in launch.pack if pack.cache]
    assert [pack.groups for pack in packed] == [2, 4]  # of 16 channels: two groups of keys, and of 32 rows of values
    free = [row["op"] for row in shared.placements if row["reason"] == "part of the products that read it"]
    assert sorted(free) == ["Expand", "Expand", "Reshape", "Reshape", "Transpose", "Unsqueeze", "Unsqueeze"]
    assert shared.macs_accelerator == shared.macs_total


def shifted(*args: int) -> StridedView:
    return replace(StridedView(*args), left=0)


def of_the_next(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(value: Any) -> Any:
        source, times, fold = right(value)
        return source, max(times - 1, 1), fold

    return wrong


def test_rows_in_a_wrong_place_are_found(steps: dict[str, Stepping], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concatenation, "StridedView", shifted)
    with pytest.raises((ProvenanceError, SelfCheckError)):
        compiled(steps["own heads"], fed(NETWORKS["own heads"], 1, 15))


def test_keys_of_another_group_are_found(steps: dict[str, Stepping], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "shared_operand", of_the_next(matrices.shared_operand))
    with pytest.raises((ProvenanceError, SelfCheckError)):
        compiled(steps["shared by three"], fed(NETWORKS["shared by three"], 1, 15))


def test_a_cache_that_is_no_input(steps: dict[str, Stepping]) -> None:
    feed = fed(NETWORKS["own heads"], 1, 15)
    shapes = {name: array.shape for name, array in feed.items()}
    with pytest.raises(ModelError, match=r"'past_key_values\.0\.keys'.*did you mean"):
        celosia.compile(steps["own heads"].proto, shapes=shapes, caches=["past_key_values.0.keys"])


JOINED = """
<ir_version: 8, opset_import: ["" : 17]>
g (int8[1, 1, 16, 16] past, int8[1, 1, 16, 16] other, int8[1, 2, 4, 16] q) => (int8[1, 2, 4, 16] y)
<float s = {0.05}, float t = {0.5}, int8 z = {0}>
{ v = Concat<axis = 1>(past, other) y = QLinearMatMul(q, s, z, v, s, z, t, z) }
"""


def test_rows_of_a_cache_are_those_of_its_concatenation_along_rows_alone() -> None:
    """A cache of two joined heads is not treated as rows to append, since the other head may change in any row."""
    model = onnx.parser.parse_model(JOINED)
    program = celosia.compile(model, "pynq", caches=["past"])
    assert program.launches and not any(pack.cache for launch in program.launches for pack in launch.pack)


CHAINED = """
<ir_version: 8, opset_import: ["" : 17]>
g (int8[1, 1, 4, 16] x, int8[1, 1, 7, 16] past, int8[1, 1, 9, 16] older) => (int8[1, 1, 4, 20] y)
<int8[16, 16] w = {%s}, float s = {0.05}, float t = {0.5}, int8 z = {0}>
{ k = QLinearMatMul(x, s, z, w, s, z, s, z)
  recent = Concat<axis = 2>(past, k) all = Concat<axis = 2>(older, recent)
  turned = Transpose<perm = [0, 1, 3, 2]>(all) y = QLinearMatMul(x, s, z, turned, s, z, t, z) }
"""


def test_rows_are_appended_to_what_has_others_behind_them() -> None:
    weights = np.random.default_rng(0).integers(-127, 128, 256)
    model = onnx.parser.parse_model(CHAINED % ", ".join(map(str, weights)))
    random = np.random.default_rng(1)
    feed = {
        name: random.integers(-128, 128, (1, 1, rows, 16)).astype(np.int8)
        for name, rows in (("x", 4), ("past", 7), ("older", 9))
    }
    (expected,) = opened(model).run(None, feed)
    (output,) = celosia.Runtime(celosia.compile(model, "pynq"), "functional").run(feed).outputs.values()
    np.testing.assert_array_equal(output, expected)


def test_two_tensors_made_of_each_other_many_times() -> None:
    """The search for the final readers of a tensor does not follow all of exponentially many paths."""
    sums = "\n".join(
        f"{y}{n + 1} = com.microsoft.{op}(a{n}, s, z, b{n}, s, z, s, z)"
        for n in range(30) for y, op in (("a", "QLinearMul"), ("b", "QLinearAdd"))
    )  # fmt: skip
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (int8[1, 16, 2, 2] a0, int8[1, 16, 2, 2] b0) '
        f"=> (int8[1, 16, 2, 2] a30) <float s = {{0.02}}, int8 z = {{0}}> {{ {sums} }}"
    )
    assert len(celosia.compile(model, "tiny", check=False).launches) == 1
