"""An e-graph: tensors as classes of operations that all make them, and the cheapest graph, by an integer program.

    y made by  convolve(x, w)  or  slice(convolve(x, w and v), 0, 8)
    z made by  convolve(x, v)  or  slice(convolve(x, w and v), 8, 16)

Graphs that rules make of each other call the same tensor by the same name: what makes it in one of them does in all.
So alternatives of different steps are combined as none of the steps did. Costs of operations are added up, which is
what such a program can minimise: what the timing model says of operations beside each other is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from celosia.compiler.superoptimise.graph import BytesGraph, GraphOp
from celosia.compiler.superoptimise.together import SECONDS


@dataclass
class TensorClasses:
    """graph: of all tensors that are known, with the operations of the first graph. makers: of each tensor, in the
    order in which they came."""

    graph: BytesGraph
    makers: dict[str, dict[GraphOp, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add(self.graph)

    def add(self, graph: BytesGraph) -> None:
        """What makes its tensors there."""
        constants, kinds = {**self.graph.constants, **graph.constants}, {**self.graph.kinds, **graph.kinds}
        self.graph = replace(self.graph, constants=constants, kinds=kinds, _names=self.graph._names)
        for each in graph.operations:
            for name in filter(None, each.outputs):
                self.makers.setdefault(name, {})[each] = None

    def cheapest(self, cost: Callable[[BytesGraph, GraphOp], float]) -> BytesGraph | None:
        """The graph whose operations cost least in sum; None where none was found in time. Needs scipy."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        operations = list(dict.fromkeys(each for makers in self.makers.values() for each in makers))
        numbers = {each: number for number, each in enumerate(operations)}
        orders = {name: len(operations) + number for number, name in enumerate(self.makers)}
        width = len(operations) + len(orders)
        rows: list[dict[int, float]] = []
        least: list[float] = []

        def ask(row: dict[int, float], at_least: float) -> None:
            rows.append(row)
            least.append(at_least)

        for name in filter(self.makers.__contains__, self.graph.outputs):
            ask({numbers[each]: 1.0 for each in self.makers[name]}, 1)
        for each, number in numbers.items():
            for name in set(filter(self.makers.__contains__, each.inputs)):
                ask({number: -1.0} | {numbers[maker]: 1.0 for maker in self.makers[name]}, 0)
                for made in filter(None, each.outputs):  # behind what it reads, where it is taken
                    if made == name:
                        ask({number: -1.0}, 0)
                    else:
                        ask({orders[made]: 1.0, orders[name]: -1.0, number: -2.0}, 1 / len(orders) - 2)
        costs = np.array([cost(self._with(each), each) for each in operations] + [0.0] * len(orders))
        whole = np.array([1] * len(operations) + [0] * len(orders))
        found = milp(
            costs, integrality=whole, bounds=Bounds(0, 1), options={"time_limit": SECONDS},
            constraints=LinearConstraint(_matrix(rows, width), lb=np.array(least)),
        )  # fmt: skip
        if found.x is None:
            return None
        return self.graph.ordered([each for each, taken in zip(operations, found.x) if taken > 0.5])

    def _with(self, each: GraphOp) -> BytesGraph:
        """A graph of `each` and the product that it requantises."""
        before = [maker for name in each.inputs[:1] for maker in self.makers.get(name, ()) if each.op == "requantise"]
        return replace(self.graph, operations=(*before[:1], each), outputs=each.outputs)


def _matrix(rows: list[dict[int, float]], width: int) -> object:
    from scipy.sparse import csr_array

    places = [(row, column, value) for row, each in enumerate(rows) for column, value in each.items()]
    at, columns, values = zip(*places)
    return csr_array((values, (at, columns)), shape=(len(rows), width))
