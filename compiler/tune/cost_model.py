"""Cost model: predicts the cost of a point as the analytical estimate, corrected by what measurements have shown.

The logarithm of measured over estimated cost (or over the bound, where that is higher) is learned from features of
points: by ridge regression in numpy, or by gradient-boosted trees where xgboost is installed (`pip install
"celosia[tune]"`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from celosia.compiler.tune.search_space import Floats, SearchSpace
from celosia.compiler.tune.tuner_options import LEARNER_NAMES

Learner = Callable[[Floats, Floats], Callable[[Floats], Floats]]
"""Function that fits features [samples, features] to targets [samples]; it returns a function that predicts targets."""
RIDGE_PENALTY = 3.0
"""Shrinkage of ridge regression, for features of unit variance."""


class MissingLearner(ImportError):
    """xgboost is not installed; the message tells how to install it."""


def ridge(features: Floats, targets: Floats) -> Callable[[Floats], Floats]:
    """Fit a linear function of the features and their squares by ridge regression; a Learner."""
    wide = _with_squares(features)
    middle, scale = wide.mean(0), wide.std(0) + 1e-6
    x, mean = (wide - middle) / scale, targets.mean()
    weights = np.linalg.solve(x.T @ x + RIDGE_PENALTY * np.eye(x.shape[1]), x.T @ (targets - mean))
    low, high = targets.min() - np.ptp(targets), targets.max() + np.ptp(targets)  # limits of extrapolation
    return lambda others: np.clip((_with_squares(others) - middle) / scale @ weights + mean, low, high)


def _with_squares(features: Floats) -> Floats:
    """Return [samples, 2 * features]: the features, then their squares."""
    return np.concatenate([features, features**2], axis=1)


def trees(features: Floats, targets: Floats, rank: bool = False) -> Callable[[Floats], Floats]:
    """Fit gradient-boosted trees; a Learner. Raises MissingLearner.

    rank: learn only the order of targets, which `benchmarks/tune.py` compares with learning their values.
    """
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
"""Name -> learner; the first is the default."""


class CostModel:
    """Predicts costs of points, learning from the trials of all spaces of one tuning.

    features, targets: of each trial. A target is the logarithm of measured over estimated cost.
    """

    def __init__(self, learner: Learner = ridge) -> None:
        self.learner = learner
        self.features: list[Floats] = []
        self.targets: list[float] = []
        self._predict: Callable[[Floats], Floats] | None = None

    def learn(self, space: SearchSpace, index: int, cost: float) -> None:
        """Add a trial: the measured cost of point `index` of `space`."""
        self.features.append(space.features[index])
        self.targets.append(float(np.log(cost / space.base[index])))
        self._predict = None

    def expected(self, space: SearchSpace) -> Floats:
        """Return the expected cost of each point of `space`; the estimate itself before two trials are known."""
        if len(self.targets) < 2:
            return space.base
        if self._predict is None:
            self._predict = self.learner(np.array(self.features), np.array(self.targets))
        return np.asarray(space.base * np.exp(self._predict(space.features)))
