"""Predict the cost of a point: the estimate, times what measurements have shown of the estimate's errors.

The logarithm of measured over estimated (or over the bound, where that is higher) is learned from features of points:
by ridge regression in numpy, or by gradient-boosted trees where xgboost is installed (`pip install "celosia[tune]"`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from celosia.compiler.tune.choices import LEARNER_NAMES
from celosia.compiler.tune.points import Floats, Searched

Learner = Callable[[Floats, Floats], Callable[[Floats], Floats]]
"""Features [samples, features] and targets [samples] to what predicts targets."""
SHRINK = 3.0
"""Shrinkage of ridge regression, for features of unit variance."""


class MissingLearner(ImportError):
    """xgboost is not installed; the message says how it is."""


def ridge(features: Floats, targets: Floats) -> Callable[[Floats], Floats]:
    """A linear function of the features and their squares, small where samples are few."""
    wide = _with_squares(features)
    middle, scale = wide.mean(0), wide.std(0) + 1e-6
    x, mean = (wide - middle) / scale, targets.mean()
    weights = np.linalg.solve(x.T @ x + SHRINK * np.eye(x.shape[1]), x.T @ (targets - mean))
    low, high = targets.min() - np.ptp(targets), targets.max() + np.ptp(targets)  # no belief in what is far away
    return lambda others: np.clip((_with_squares(others) - middle) / scale @ weights + mean, low, high)


def _with_squares(features: Floats) -> Floats:
    return np.concatenate([features, features**2], axis=1)


def trees(features: Floats, targets: Floats, rank: bool = False) -> Callable[[Floats], Floats]:
    """Gradient-boosted trees. rank: learn the order alone. MissingLearner."""
    try:
        xgboost: Any = importlib.import_module("xgboost")
    except ImportError:
        raise MissingLearner('boosted trees need xgboost: pip install "celosia[tune]"') from None
    options: dict[str, Any] = {"max_depth": 4, "eta": 0.2, "nthread": 1, "seed": 0, "min_child_weight": 1}
    if rank:  # its default pairs are poor
        options |= {"objective": "rank:pairwise", "lambdarank_pair_method": "mean"}
        options |= {"lambdarank_num_pair_per_sample": 16, "lambdarank_normalization": False}
        data = xgboost.DMatrix(features, -targets, qid=np.zeros(len(targets), np.int64))
    else:
        data = xgboost.DMatrix(features, targets)
    booster = xgboost.train(options, data, num_boost_round=120)
    sign = -1.0 if rank else 1.0
    return lambda others: sign * booster.predict(xgboost.DMatrix(others)).astype(np.float64)


LEARNERS: dict[str, Learner] = dict(zip(LEARNER_NAMES, (ridge, trees), strict=True))


class CostModel:
    """Learns from the trials of all spaces that it is told of; those of one Config, to begin with."""

    def __init__(self, learner: Learner = ridge) -> None:
        self.learner = learner
        self.features: list[Floats] = []
        self.targets: list[float] = []
        self._predict: Callable[[Floats], Floats] | None = None

    def learn(self, space: Searched, number: int, cost: float) -> None:
        """Takes in what point `number` of `space` costs."""
        self.features.append(space.features[number])
        self.targets.append(float(np.log(cost / space.base[number])))
        self._predict = None

    def expected(self, space: Searched) -> Floats:
        """The cost of each point of `space`."""
        if len(self.targets) < 2:
            return space.base
        if self._predict is None:
            self._predict = self.learner(np.array(self.features), np.array(self.targets))
        return np.asarray(space.base * np.exp(self._predict(space.features)))
