"""python -m sweep [--count 500] [--seed 0]: random models with branches, rewritten at random, against onnxruntime.

Run with PYTHONPATH=tests/compiler/superoptimise. Exit code 1 where a byte differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

import numpy as np
import onnx
from quantised_models import Quantised

from celosia.compiler.superoptimise.compare_outputs import difference
from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.matching import Match, NotTaken, matches, rewrite
from celosia.compiler.superoptimise.operators.definition import Unwritable
from celosia.compiler.superoptimise.optimise import graph_of
from celosia.compiler.superoptimise.price import INFEASIBLE
from celosia.compiler.superoptimise.proofs import generated_rules
from celosia.compiler.superoptimise.rules import RULES
from celosia.compiler.superoptimise.search import RuleSearch
from celosia.compiler.superoptimise.writing import AlgebraWriter
from celosia.driver.host.oracle import open_model

STEPS = 4
EVERY = (*RULES, *generated_rules())
SCALES, ZEROS = (0.04, 0.05, 0.06), (-128, -128, 0)


class RandomModel:
    """x, and tensors that are made of one another. channels, sizes: of each tensor."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        shape = (1, self.random.choice([4, 8, 16]), self.random.choice([8, 10, 12]), 8)
        self.made = Quantised(shape, self.random.random() < 0.6, seed)
        self.channels, self.sizes = {"x": shape[1]}, {"x": shape[2:]}
        self.pool = ["x"]

    def build(self) -> onnx.ModelProto:
        """The model, which returns what nothing reads."""
        kinds = [
            self.convolutions,
            self.convolutions,
            self.convolutions,
            self.joined,
            self.largest,
            self.average,
            self.cut,
            self.function,
            self.added,
        ]
        for _ in range(self.random.randint(4, 9)):
            self.random.choice(kinds)(self.random.choice(self.pool[-4:]))
        read = {name for node in self.made.nodes for name in node.input}
        return self.made.model(*([each for each in self.pool if each not in read and each != "x"] or [self.pool[-1]]))

    def keep(self, name: str, channels: int, size: tuple[int, ...]) -> None:
        """A tensor that others may read."""
        self.channels[name], self.sizes[name] = channels, size
        self.pool.append(name)

    def convolutions(self, x: str) -> None:
        """One to three of one input."""
        r = self.random
        for _ in range(r.randint(1, 3)):
            kernel, outputs = r.choice([1, 1, 3]), r.choice([4, 8, 12])
            stride = r.choice([1, 1, 1, 2]) if min(self.sizes[x]) >= 6 else 1
            group = r.choice([1, 1, 2, 4]) if self.channels[x] % 4 == 0 else 1
            dilation = r.choice([1, 2, 3]) if stride == 1 else 1
            y = self.made.conv(
                x,
                self.channels[x],
                outputs,
                r.choice(SCALES),
                r.choice(ZEROS),
                kernel,
                strides=[stride] * 2,
                group=group,
                dilations=[dilation] * 2,
                pads=[dilation * (kernel // 2)] * 4,
            )
            self.keep(y, outputs, tuple((s + 2 * (kernel // 2) - kernel) // stride + 1 for s in self.sizes[x]))

    def joined(self, x: str) -> None:
        """A Concat of what has the same scale."""
        alike = [
            each
            for each in self.pool
            if self.sizes[each] == self.sizes[x] and self.made.meant[each] == self.made.meant[x]
        ]
        parts = [self.random.choice(alike) for _ in range(self.random.randint(2, 3))]
        self.keep(self.made.both("Concat", parts, axis=1), sum(self.channels[p] for p in parts), self.sizes[x])

    def largest(self, x: str) -> None:
        """A MaxPool."""
        y = self.made.both("MaxPool", [x], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
        self.keep(y, self.channels[x], self.sizes[x])

    def average(self, x: str) -> None:
        """An AveragePool, or onnxruntime's of bytes, of one or two sizes of window, to the same scale or another."""
        r, m = self.random, self.made
        pads = r.choice([[1] * 4, [0] * 4]) if min(self.sizes[x]) > 4 else [1] * 4
        counted = r.choice([0, 0, 1])
        y = m.averaged(x, r.choice([*SCALES, m.meant[x][0]]), r.choice(ZEROS), pads, counted)
        self.keep(y, self.channels[x], tuple(size - 2 + 2 * pads[0] for size in self.sizes[x]))

    def cut(self, x: str) -> None:
        """A Split."""
        if self.channels[x] < 2:
            return
        first = self.random.randint(1, self.channels[x] - 1)
        lengths = [first, self.channels[x] - first]
        y = self.made.node("Split", [x, self.made.constant(lengths, np.int64)], axis=1)
        self.made.nodes[-1].output.append(f"{y}_rest")
        for name, length in zip((y, f"{y}_rest"), lengths):
            self.made.meant[name] = self.made.meant[x]
            self.keep(name, length, self.sizes[x])

    def function(self, x: str) -> None:
        """Of single bytes."""
        op = self.random.choice(["Relu", "Sigmoid", "LeakyRelu"])
        floats = self.made.node(op, [self.made.floats(x)])
        self.keep(self.made.quantised(floats, 0.06, self.random.choice(ZEROS)), self.channels[x], self.sizes[x])

    def added(self, x: str) -> None:
        """An Add of what has the same shape."""
        alike = [
            each for each in self.pool if (self.sizes[each], self.channels[each]) == (self.sizes[x], self.channels[x])
        ]
        floats = self.made.node("Add", [self.made.floats(x), self.made.floats(self.random.choice(alike))])
        self.keep(self.made.quantised(floats, 0.07, 3), self.channels[x], self.sizes[x])


def rewritings(seed: int) -> tuple[str, list[str]]:
    """(how a random model differs after random steps, the rules of these)."""
    model, choose = RandomModel(seed).build(), random.Random(seed)
    tidier = RuleSearch(RULES, lambda each: INFEASIBLE, lambda a, b: None, 0)
    graph = tidier.tidy(graph_of(model))[0]
    steps: list[str] = []
    for _ in range(STEPS):
        by_rule = [(each, found) for each in EVERY if not each.tidy and (found := list(matches(each, graph)))]
        choose.shuffle(by_rule)
        for rule, found in by_rule:
            made = _taken(tidier, graph, choose.choice(found), model)
            if made is not None:
                graph = made
                steps.append(rule.name)
                break
    return difference(model, AlgebraWriter(graph, model).write(), open_model), steps


def _taken(tidier: RuleSearch, graph: BytesGraph, match: Match, model: onnx.ModelProto) -> BytesGraph | None:
    try:
        made = tidier.tidy(rewrite(graph, match))[0]
        AlgebraWriter(made, model).write()
    except (NotTaken, Unwritable, ValueError):
        return None
    return made


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    taken: Counter[str] = Counter()
    wrong = 0
    for seed in range(options.seed, options.seed + options.count):
        why, steps = rewritings(seed)
        taken.update(steps)
        if why:
            wrong += 1
            print(f"seed {seed}: {why} after {', '.join(steps)}")
    generated = sum(count for name, count in taken.items() if name in {rule.name for rule in generated_rules()})
    told = f"{sum(taken.values())} steps by {len(taken)} rules, {generated} of them by generated ones"
    print(f"{options.count} models, {wrong} differ; {told}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
