"""Operators of ai.onnx.ml on rows of features give onnxruntime's results for random attributes and rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import celosia

Array = NDArray[Any]
ROWS, FEATURES, CLASSES = 7, 5, 3
RNG = np.random.default_rng(3)


def weights(*shape: int) -> list[float]:
    return [float(value) for value in np.float32(RNG.normal(size=shape)).reshape(-1)]


def random_trees(count: int, depth: int, kind: str, outputs: list[int]) -> dict[str, Any]:
    """Draw complete binary trees of random splits, whose leaves have a weight for each of `outputs`."""
    modes = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT"]
    names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids",
             "missing_value_tracks_true")  # fmt: skip
    nodes: dict[str, list[Any]] = {f"nodes_{name}": [] for name in names}
    leaves: dict[str, list[Any]] = {f"{kind}_{name}": [] for name in ("treeids", "nodeids", "ids", "weights")}
    for tree in range(count):
        inner = 2**depth - 1
        for number in range(2 * inner + 1):
            is_leaf = number >= inner
            row = (
                tree, number, 0 if is_leaf else int(RNG.integers(FEATURES)),
                "LEAF" if is_leaf else modes[tree % len(modes)], 0.0 if is_leaf else float(np.float32(RNG.normal())),
                0 if is_leaf else 2 * number + 1, 0 if is_leaf else 2 * number + 2, int(RNG.integers(2)),
            )  # fmt: skip
            for name, value in zip(names, row, strict=True):
                nodes[f"nodes_{name}"].append(value)
            for output in outputs if is_leaf else ():
                leaf_row = tree, number, output, float(np.float32(RNG.normal()))
                for name, value in zip(("treeids", "nodeids", "ids", "weights"), leaf_row, strict=True):
                    leaves[f"{kind}_{name}"].append(value)
    return nodes | leaves


def classifier(kind: str, labels: dict[str, Any], transform: str, ids: list[int]) -> tuple[str, dict[str, Any]]:
    trees = random_trees(4, 3, "class", ids)
    if kind == "probabilities":
        trees["class_weights"] = [abs(weight) / 8 for weight in trees["class_weights"]]
    return "TreeEnsembleClassifier", trees | labels | {"post_transform": transform}


INTEGERS = {"classlabels_int64s": [4, 2, 9]}
WORDS = {"classlabels_strings": ["no", "maybe", "yes"]}
TWO = {"classlabels_int64s": [5, 8]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "scaler": ("Scaler", {"offset": weights(FEATURES), "scale": weights(FEATURES)}),
    "scaler-one-number": ("Scaler", {"offset": [0.5], "scale": [3.0]}),
    "imputer": ("Imputer", {"imputed_value_floats": weights(FEATURES), "replaced_value_float": float("nan")}),
    "imputer-number": ("Imputer", {"imputed_value_floats": [7.0], "replaced_value_float": 1.0}),
    "normalizer-max": ("Normalizer", {"norm": "MAX"}),
    "normalizer-l1": ("Normalizer", {"norm": "L1"}),
    "normalizer-l2": ("Normalizer", {"norm": "L2"}),
    "one-hot": ("OneHotEncoder", {"cats_int64s": [0, 1, -2]}),
    "regressor": ("LinearRegressor", {"coefficients": weights(2, FEATURES), "intercepts": weights(2), "targets": 2}),
    "trees": ("TreeEnsembleRegressor", random_trees(5, 3, "target", [0, 1]) | {"n_targets": 2}),
    "trees-mean": (
        "TreeEnsembleRegressor",
        random_trees(3, 2, "target", [0]) | {"n_targets": 1, "aggregate_function": "AVERAGE", "base_values": [0.5]},
    ),
    "trees-largest": (
        "TreeEnsembleRegressor", random_trees(3, 2, "target", [0]) | {"n_targets": 1, "aggregate_function": "MAX"},
    ),
    **{
        f"classifier-{transform}-{number}": (
            "LinearClassifier",
            {"coefficients": weights(CLASSES, FEATURES), "intercepts": weights(CLASSES), "post_transform": transform,
             **({"classlabels_ints": [4, 2, 9]} if number else WORDS)},
        )
        for transform in ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO") for number in (0, 1)
    },
    **{
        f"classifier-of-two-{transform}": (
            "LinearClassifier",
            {"coefficients": weights(1, FEATURES), "intercepts": weights(1), "post_transform": transform,
             "classlabels_ints": [5, 8]},
        )
        for transform in ("NONE", "LOGISTIC")
    },
    "forest": classifier("", INTEGERS, "SOFTMAX", [0, 1, 2]),
    "forest-words": classifier("probabilities", WORDS, "NONE", [0, 1, 2]),
    **{
        f"forest-of-two-{kind}-{transform}-{number}": classifier(kind, TWO, transform, [number])
        for kind in ("probabilities", "") for transform in ("NONE", "LOGISTIC", "SOFTMAX") for number in (0, 1)
    },
}  # fmt: skip


def model_of(op: str, attributes: dict[str, Any], dtype: int, rows: Array) -> onnx.ModelProto:
    """Return a model of one operator, with the output types that onnxruntime defines."""
    outputs = ["label", "scores"] if "Classifier" in op else ["y"]
    node = helper.make_node(op, ["x"], outputs, domain="ai.onnx.ml", **attributes)
    kinds = [TensorProto.STRING if "classlabels_strings" in attributes else TensorProto.INT64, TensorProto.FLOAT]
    kinds = kinds if len(outputs) == 2 else [TensorProto.FLOAT]
    graph = helper.make_graph(
        [node], "rows", [helper.make_tensor_value_info("x", dtype, rows.shape)],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(outputs, kinds, strict=True)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


FLOATS_ALONE = "LinearRegressor", "TreeEnsembleRegressor"
"""Operators that onnxruntime has for floats alone."""


@pytest.mark.parametrize(
    "name, dtype",
    [(name, "float32") for name in CASES] + [(name, "int64") for name in CASES if CASES[name][0] not in FLOATS_ALONE],
)
def test_rows_are_those_of_onnxruntime(name: str, dtype: str) -> None:
    op, attributes = CASES[name]
    rows = np.asarray(2 * RNG.normal(size=(ROWS, FEATURES)), dtype)
    rows[0], rows[1, 0] = 0, 1
    if name == "imputer" and dtype == "float32":
        rows[2, 3] = np.nan
    if op == "Imputer" and dtype == "int64":
        attributes = {"imputed_value_int64s": [6], "replaced_value_int64": 1}
    model = model_of(op, attributes, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), rows)
    if op == "Imputer" and dtype == "int64":
        model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    expected = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = celosia.Runtime(celosia.compile(model)).run({"x": rows}).outputs
    for output, value in zip(expected.get_outputs(), expected.run(None, {"x": rows}), strict=True):
        if np.asarray(value).dtype.kind == "f":
            np.testing.assert_allclose(results[output.name], value, rtol=1e-5, atol=1e-6)
        else:
            assert results[output.name].tolist() == np.asarray(value).tolist()


def test_features_of_several_operands_are_joined() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
        g (float[3, 2] a, float[3, 4] b) => (float[3, 6] y)
        { y = ai.onnx.ml.FeatureVectorizer <inputdimensions = [2, 4]> (a, b) }
    """)
    feed = {"a": RNG.normal(size=(3, 2)).astype(np.float32), "b": RNG.normal(size=(3, 4)).astype(np.float32)}
    results = celosia.Runtime(celosia.compile(model)).run(feed).outputs["y"]
    assert np.array_equal(results, np.concatenate([feed["a"], feed["b"]], axis=1))
