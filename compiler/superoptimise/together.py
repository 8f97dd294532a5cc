"""Which of many steps to take at once: those that change different operations and save most together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

SECONDS = 10.0
"""For one integer program; what it has found until then is taken."""


def chosen(gains: Sequence[float], changed: Sequence[frozenset[Hashable]]) -> list[int]:
    """Numbers of the steps whose `gains` have the largest sum, of which no two have something in `changed` in common.

    Needs scipy.

    >>> chosen([5, 4, 3], [frozenset("ab"), frozenset("a"), frozenset("b")])
    [1, 2]
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if not gains:
        return []
    rows: dict[Hashable, int] = {}
    places = [(rows.setdefault(each, len(rows)), step) for step, of in enumerate(changed) for each in of]
    at = tuple(np.array(places, np.int64).reshape(-1, 2).T)
    matrix = csr_array((np.ones(len(places)), at), shape=(max(len(rows), 1), len(gains)))
    found = milp(
        -np.asarray(gains, np.float64), integrality=np.ones(len(gains)), bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, ub=1), options={"time_limit": SECONDS},
    )  # fmt: skip
    return [] if found.x is None else np.flatnonzero(found.x > 0.5).tolist()


def apart(gains: Sequence[float], changed: Sequence[frozenset[Hashable]]) -> list[int]:
    """The same, roughly and at once: the largest first, then each that has nothing in common with those before it.

    >>> apart([5, 4, 3], [frozenset("ab"), frozenset("a"), frozenset("b")])
    [0]
    """
    taken: set[Hashable] = set()
    found = []
    for step in sorted(range(len(gains)), key=lambda step: -gains[step]):
        if not taken & changed[step]:
            taken |= changed[step]
            found.append(step)
    return found
