"""Rows that are appended to a cache, and keys and values that heads share, as products of two activations read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.decoders import DecoderNetwork, quantised
from numpy.typing import NDArray

import celosia
from celosia.compiler.graph.importer import ModelError
from celosia.compiler.graph.select import matrices
from celosia.compiler.layer import Lattice
from celosia.compiler.program import Program
from celosia.compiler.selfcheck.check import SelfCheckError
from celosia.compiler.vthread.verify.provenance import ProvenanceError
from celosia.driver.generate.roles import roles_of
from celosia.driver.generate.stepping import Stepping, stepping

from ..oracle import opened

NETWORKS = {
    "own heads": DecoderNetwork(heads=2, inner=16, wide=32, layers=1, vocabulary=16, most=64),
    "shared by three": DecoderNetwork(
        heads=6, groups=2, inner=16, wide=32, layers=1, vocabulary=16, most=64, rotary=True, seed=1
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stepping]:
    """Each network as it is compiled: with caches of bytes."""
    made = {}
    for name, network in NETWORKS.items():
        proto = onnx.load(quantised(network, tmp_path_factory.mktemp("decoder"), past=20))
        made[name] = stepping(proto, roles_of(proto))
        assert set(made[name].dtypes.values()) == {"int8"}
    return made


def fed(network: DecoderNetwork, new: int, past: int) -> dict[str, NDArray[Any]]:
    random, feed = np.random.default_rng(past), network.feed(new, past, past + new)
    return {
        name: random.integers(-128, 128, array.shape).astype(np.int8) if array.dtype.kind == "f" else array
        for name, array in feed.items()
    }


def compiled(step: Stepping, feed: dict[str, NDArray[Any]], config: str = "pynq") -> Program:
    shapes = {name: array.shape for name, array in feed.items()}
    return celosia.compile(step.proto, config, shapes=shapes, caches=list(step.dtypes))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("config", "new", "past"),
    [("pynq", 1, 15), ("pynq", 1, 16), ("pynq", 5, 12), ("tiny", 2, 1), ("tiny", 1, 31), ("ultra96", 3, 6)],
)
def test_all_outputs_are_onnxruntimes(name: str, config: str, new: int, past: int, steps: dict[str, Stepping]) -> None:
    """The oracle runs the model that is compiled; test_generate.py compares that with the model as it was."""
    feed = fed(NETWORKS[name], new, past)
    oracle = opened(steps[name].proto, int8=True)
    names = [each.name for each in oracle.get_outputs()]
    expected = dict(zip(names, oracle.run(names, feed)))
    outputs = celosia.Runtime(compiled(steps[name], feed, config), "functional").run(feed).outputs
    for each in names:
        np.testing.assert_array_equal(outputs[each], expected[each])


def test_nothing_is_copied_or_repeated(steps: dict[str, Stepping]) -> None:
    """Keys are appended by a layer that loads the new row alone, and each head's product reads its group's keys."""
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


def shifted(*given: int) -> Lattice:
    return replace(Lattice(*given), left=0)


def of_the_next(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(value: Any) -> Any:
        source, times, fold = right(value)
        return source, max(times - 1, 1), fold

    return wrong


def test_rows_in_a_wrong_place_are_found(steps: dict[str, Stepping], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "Lattice", shifted)
    with pytest.raises((ProvenanceError, SelfCheckError)):
        compiled(steps["own heads"], fed(NETWORKS["own heads"], 1, 15))


def test_keys_of_another_group_are_found(steps: dict[str, Stepping], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "shared_operand", of_the_next(matrices.shared_operand))
    with pytest.raises((ProvenanceError, SelfCheckError)):
        compiled(steps["shared by three"], fed(NETWORKS["shared by three"], 1, 15))


def test_a_cache_that_is_no_input(steps: dict[str, Stepping]) -> None:
    feed = fed(NETWORKS["own heads"], 1, 15)
    shapes = {name: array.shape for name, array in feed.items()}
    with pytest.raises(ModelError, match=r"cache 'past_key_values.0.keys' is no input .did you mean"):
        celosia.compile(steps["own heads"].proto, shapes=shapes, caches=["past_key_values.0.keys"])
