"""Operators of ai.onnx.ml on rows of features: scaling, imputing, encoding, linear models and ensembles of trees.

Results are those of onnxruntime: floats, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.host.op import HostOp, host

Array = NDArray[Any]
ML = "ai.onnx.ml"


def _texts(op: HostOp, name: str) -> list[str]:
    """Return the strings of the attribute `name`; [] where it is left out."""
    values = np.asarray(op.attr(name, [])).reshape(-1).tolist()
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]


def _floats(op: HostOp, name: str) -> Array:
    """Return the numbers of the attribute `name` as float32; none where it is left out."""
    return np.asarray(op.attr(name, []), np.float32).reshape(-1)


# Features -------------------------------------------------------------------------------------------------------------


@host("Scaler", domain=ML, shaped_as="Cast")
def scaler(op: HostOp, x: Array) -> Array:
    """Compute (x - offset) * scale, with one number for all features or one for each."""
    offset, scale = op.attr("offset", [0.0]), op.attr("scale", [1.0])
    return (x.astype(np.float32) - np.asarray(offset, np.float32)) * np.asarray(scale, np.float32)


@host("Imputer", domain=ML, shaped_as="Identity")
def imputer(op: HostOp, x: Array) -> Array:
    """Replace the missing value, which may be NaN, by a number for all features or one for each."""
    if x.dtype.kind == "f":
        missing, imputed = op.attr("replaced_value_float", 0.0), op.attr("imputed_value_floats", [])
        is_missing = np.isnan(x) if math.isnan(missing) else x == np.float32(missing)
    else:
        imputed = op.attr("imputed_value_int64s", [])
        is_missing = x == op.attr("replaced_value_int64", 0)
    return np.where(is_missing, np.asarray(imputed, x.dtype), x)


@host("Normalizer", domain=ML, shaped_as="Cast")
def normalizer(op: HostOp, x: Array) -> Array:
    """Divide each row by its largest element, the sum of its magnitudes, or its length; rows of zero stay."""
    x = x.astype(np.float32)
    norms: dict[str, Callable[[Array], Array]] = {
        "MAX": lambda rows: rows.max(axis=-1, keepdims=True),
        "L1": lambda rows: np.abs(rows).sum(axis=-1, keepdims=True),
        "L2": lambda rows: np.sqrt(np.square(rows).sum(axis=-1, keepdims=True)),
    }
    (name,) = _texts(op, "norm") or ["MAX"]
    if name not in norms:
        raise op.fail(f"norm {name!r}; MAX, L1 and L2 exist")
    norm = norms[name](x)
    return np.asarray(x / np.where(norm == 0, np.float32(1), norm))


@host("OneHotEncoder", domain=ML)
def one_hot_encoder(op: HostOp, x: Array) -> Array:
    """Return for each element 1 at the position of its category, and 0 at the others: [..., categories]."""
    categories: list[Any] = _texts(op, "cats_strings") if x.dtype.kind in "OUS" else op.attr("cats_int64s", [])
    elements = x if x.dtype.kind in "OUS" else x.astype(np.int64)
    encoded = np.stack([np.asarray(elements == category) for category in categories], axis=-1)
    if not op.attr("zeros", 1) and not encoded.any(axis=-1).all():
        raise op.fail("an element is none of its categories")
    return encoded.astype(np.float32)


@host("FeatureVectorizer", domain=ML)
def feature_vectorizer(op: HostOp, *parts: Array) -> Array:
    """Join the features of all operands as float32; each is cut or filled up with zeros to its size."""
    sizes, joined = op.attr("inputdimensions", []), []
    for part, size in zip(parts, sizes, strict=True):
        rows = part.reshape(len(part), -1)[:, :size].astype(np.float32)
        joined.append(np.pad(rows, ((0, 0), (0, size - rows.shape[1]))))
    return np.concatenate(joined, axis=1)


# Scores and labels ----------------------------------------------------------------------------------------------------


def _transformed(op: HostOp, scores: Array) -> Array:
    """Apply the attribute post_transform to the scores of each row."""
    (name,) = _texts(op, "post_transform") or ["NONE"]
    match name:
        case "NONE":
            return scores
        case "LOGISTIC":
            return np.asarray(1 / (1 + np.exp(-scores)))
        case "SOFTMAX" | "SOFTMAX_ZERO":
            exp = np.exp(scores - scores.max(axis=1, keepdims=True))
            if name == "SOFTMAX_ZERO":  # a score of zero stays zero
                exp = np.where(np.abs(scores) > 1e-7, exp, np.float32(0))
            total = exp.sum(axis=1, keepdims=True)
            return np.asarray(exp / np.where(total == 0, np.float32(1), total))
    raise op.fail(f"post_transform {name!r}; NONE, LOGISTIC, SOFTMAX and SOFTMAX_ZERO exist here")


def _labels(op: HostOp) -> Array:
    """Return the label of each class: strings, or int64."""
    if names := _texts(op, "classlabels_strings"):
        return np.asarray(names, object)
    integers = op.attr("classlabels_ints")  # as LinearClassifier calls them
    return np.asarray(op.attr("classlabels_int64s", []) if integers is None else integers, np.int64)


def _both_scores(op: HostOp, score: Array, is_probability: bool) -> Array:
    """Return the scores [rows, 2] of two classes of which only the second has one, [rows, 1].

    Only the post_transform LOGISTIC is applied, as in onnxruntime.
    """
    if "LOGISTIC" in _texts(op, "post_transform"):
        score, is_probability = _transformed(op, score), True
    first = np.float32(1) - score if is_probability else -score
    return np.concatenate([first, score], axis=1).astype(np.float32)


@host("LinearRegressor", domain=ML)
def linear_regressor(op: HostOp, x: Array) -> Array:
    """Multiply rows by the coefficients of each target, and add intercepts: [rows, targets]."""
    coefficients = _floats(op, "coefficients").reshape(op.attr("targets", 1), -1)
    intercepts = _floats(op, "intercepts")
    scores = x.reshape(-1, coefficients.shape[1]).astype(np.float32) @ coefficients.T
    return _transformed(op, scores + intercepts if intercepts.size else scores).astype(np.float32)


@host("LinearClassifier", domain=ML)
def linear_classifier(op: HostOp, x: Array) -> tuple[Array, Array]:
    """Return the label of the class with the largest score for each row, and the scores of all classes."""
    intercepts = _floats(op, "intercepts")
    x = x.reshape(1, -1) if x.ndim == 1 else x
    coefficients = _floats(op, "coefficients").reshape(-1, x.shape[1])
    scores = x.astype(np.float32) @ coefficients.T
    scores = scores + intercepts if intercepts.size else scores
    if scores.shape[1] == 1 and len(_labels(op)) == 2:
        return _labels(op)[(scores[:, 0] > 0).astype(np.int64)], _both_scores(op, scores, True)
    return _labels(op)[scores.argmax(axis=1)], _transformed(op, scores).astype(np.float32)


# Trees ----------------------------------------------------------------------------------------------------------------


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "BRANCH_LEQ": np.less_equal, "BRANCH_LT": np.less, "BRANCH_GTE": np.greater_equal, "BRANCH_GT": np.greater,
    "BRANCH_EQ": np.equal, "BRANCH_NEQ": np.not_equal,
}  # fmt: skip
"""Mode of a node -> how it compares a feature with its value; the mode LEAF has none."""


def _leaves(op: HostOp, x: Array) -> tuple[dict[tuple[int, int], int], Array]:
    """Descend all trees: (tree, node) -> its number, and the number of the leaf of each row in each tree.

    All rows step down at once, in each tree.
    """
    trees, ids = (np.asarray(op.attr(f"nodes_{name}", []), np.int64) for name in ("treeids", "nodeids"))
    numbers = {key: number for number, key in enumerate(zip(trees.tolist(), ids.tolist(), strict=True))}
    modes = np.asarray(_texts(op, "nodes_modes"))
    features = np.asarray(op.attr("nodes_featureids", []), np.int64)
    values = np.asarray(op.attr("nodes_values", []), x.dtype)
    missing = np.asarray(op.attr("nodes_missing_value_tracks_true", None) or np.zeros(len(ids)), bool)
    children = [
        np.array([numbers.get((tree, child), 0) for tree, child in zip(trees.tolist(), op.attr(name, []), strict=True)])
        for name in ("nodes_falsenodeids", "nodes_truenodeids")
    ]
    known = [*COMPARISONS, "LEAF"]
    if unknown := set(modes.tolist()) - set(known):
        raise op.fail(f"nodes_modes {sorted(unknown)[0]!r}; {', '.join(known)} exist")
    roots = [int(np.flatnonzero(trees == tree)[0]) for tree in dict.fromkeys(trees.tolist())]
    at = np.tile(np.array(roots), (len(x), 1))
    for _ in range(len(ids)):  # no path is longer
        inner = modes[at] != "LEAF"
        if not inner.any():
            break
        feature = np.take_along_axis(x, features[at], axis=1)
        goes_true = np.zeros(at.shape, bool)
        for mode, compare in COMPARISONS.items():
            goes_true |= (modes[at] == mode) & compare(feature, values[at])
        goes_true |= missing[at] & np.isnan(feature)
        at = np.where(inner, np.where(goes_true, children[1][at], children[0][at]), at)
    return numbers, at


def _tree_weights(op: HostOp, x: Array, kind: str, targets: int) -> tuple[Array, Array]:
    """Return for each row the weights of its leaves, [rows, trees, targets], and where leaves have one.

    kind: the attributes' prefix, "target" or "class".
    """
    numbers, at = _leaves(op, x)
    weights, has_weight = np.zeros((len(numbers), targets), np.float32), np.zeros((len(numbers), targets), bool)
    names = (f"{kind}_treeids", f"{kind}_nodeids", f"{kind}_ids")
    tree, node, target = (np.asarray(op.attr(name, []), np.int64).tolist() for name in names)
    for key, number, weight in zip(zip(tree, node, strict=True), target, _floats(op, f"{kind}_weights"), strict=True):
        weights[numbers[key], number] += weight
        has_weight[numbers[key], number] = True
    return weights[at], has_weight[at]


@host("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(op: HostOp, x: Array) -> Array:
    """Aggregate for each row the weights of the leaves that all trees select: [rows, targets]."""
    x = x if x.dtype.kind == "f" else x.astype(np.float32)
    weights, present = _tree_weights(op, x, "target", op.attr("n_targets", 1))
    (name,) = _texts(op, "aggregate_function") or ["SUM"]
    match name:
        case "SUM":
            out = weights.sum(axis=1)
        case "AVERAGE":
            out = weights.sum(axis=1) / np.float32(weights.shape[1])
        case "MIN" | "MAX":
            sign = np.float32(-1 if name == "MIN" else 1)
            best = np.where(present, sign * weights, np.float32(-np.inf)).max(axis=1)
            out = np.where(present.any(axis=1), sign * best, np.float32(0))
        case _:
            raise op.fail(f"aggregate_function {name!r}; SUM, AVERAGE, MIN and MAX exist")
    base = _floats(op, "base_values")
    return _transformed(op, out + base if base.size else out).astype(np.float32)


@host("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(op: HostOp, x: Array) -> tuple[Array, Array]:
    """Return the label of the class with the largest sum of weights for each row, and the scores of all classes."""
    x = x if x.dtype.kind == "f" else x.astype(np.float32)
    classes, base = len(_labels(op)), _floats(op, "base_values")
    weights, _ = _tree_weights(op, x, "class", classes)
    scores = weights.sum(axis=1)
    scores = scores + base if base.size == classes else scores
    used = sorted(set(np.asarray(op.attr("class_ids", [])).reshape(-1).tolist()))
    if classes != 2 or len(used) != 1:
        return _labels(op)[scores.argmax(axis=1)], _transformed(op, scores).astype(np.float32)
    score = scores[:, used] + base if base.size == 1 else scores[:, used]  # one score decides between two classes
    are_probabilities = bool(np.all(_floats(op, "class_weights") >= 0))
    labels = _labels(op)[(score[:, 0] > np.float32(0.5 if are_probabilities else 0)).astype(np.int64)]
    if used == [0]:
        return labels, _both_scores(op, score, are_probabilities)
    return labels, _transformed(op, scores).astype(np.float32)


MODES = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
"""Modes 0 to 5 of a node of a tree: how it compares a feature with its split value."""
BRANCH_MEMBER = 6
"""Mode of a node that tests whether a feature is in a set."""


@host("TreeEnsemble", domain=ML)
def tree_ensemble(op: HostOp, x: Array) -> Array:
    """Aggregate the leaves that all trees select for each row of `x`: [rows, targets]."""
    a = op.attrs
    targets = op.attr("n_targets", 1)
    rows: list[list[list[float]]] = []
    sets: list[list[float]] = [[]]
    for value in np.asarray(op.attr("membership_values", [])).reshape(-1).tolist():
        if value != value:
            sets.append([])
        else:
            sets[-1].append(value)
    members = iter(sets)
    modes, splits = a["nodes_modes"].tolist(), a["nodes_splits"]
    member_of = [next(members) if mode == BRANCH_MEMBER else [] for mode in modes]

    def leaf(row: Array, node: int) -> int:
        """Descend from a root to the leaf that `row` selects."""
        while True:
            value = row[a["nodes_featureids"][node]]
            if value != value and "nodes_missing_value_tracks_true" in a and a["nodes_missing_value_tracks_true"][node]:
                is_true = True
            elif modes[node] == BRANCH_MEMBER:
                is_true = float(value) in member_of[node]
            else:
                is_true = bool(MODES[modes[node]](value, splits[node]))
            branch = "true" if is_true else "false"
            child = a[f"nodes_{branch}nodeids"][node]
            if a[f"nodes_{branch}leafs"][node]:
                return int(child)
            node = child

    for row in x:  # for each target the weights of the leaves that the trees select
        weights: list[list[float]] = [[] for _ in range(targets)]
        for root in a["tree_roots"]:
            leaf_node = leaf(row, root)
            weights[a["leaf_targetids"][leaf_node]].append(float(a["leaf_weights"][leaf_node]))
        rows.append(weights)
    reduce = (np.sum, np.mean, np.min, np.max)[{1: 0, 0: 1, 2: 2, 3: 3}[op.attr("aggregate_function", 1)]]
    out = np.array([[reduce(values) if values else 0.0 for values in weights] for weights in rows], x.dtype)
    match op.attr("post_transform", 0):
        case 0:
            return out
        case 1:
            exp = np.exp(out - out.max(axis=1, keepdims=True))
            return np.asarray((exp / exp.sum(axis=1, keepdims=True)).astype(x.dtype))
        case 2:
            return np.asarray((1 / (1 + np.exp(-out))).astype(x.dtype))
    raise op.fail(f"post_transform {op.attr('post_transform')}")
