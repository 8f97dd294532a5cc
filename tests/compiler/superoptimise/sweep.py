"""Rewrite random models with branches at random and compare them with onnxruntime.

python -m sweep [--count 500] [--seed 0]

Run with PYTHONPATH=tests/compiler/superoptimise. Exit code 1 if a byte differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

import numpy as np
import onnx
from quantised_models import Quantised

from celosia.compiler.superoptimise.compare_outputs import compare_on_random_inputs
from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.matching import Match, NotTaken, matches, rewrite
from celosia.compiler.superoptimise.operators.definition import Unwritable
from celosia.compiler.superoptimise.optimise import graph_of
from celosia.compiler.superoptimise.price import INFEASIBLE
from celosia.compiler.superoptimise.proofs import generated_rules
from celosia.compiler.superoptimise.rules import RULES
from celosia.compiler.superoptimise.search import RuleSearch
from celosia.compiler.superoptimise.writing import AlgebraWriter
from celosia.driver.workstation.oracle import open_model

STEPS = 4
EVERY = (*RULES, *generated_rules())
SCALES, ZEROS = (0.04, 0.05, 0.06), (-128, -128, 0)


class RandomModel:
    """A random model in the making: its input x, and tensors that operators compute from earlier tensors.

    channels, sizes: by tensor. pool: the tensors that an operator may read.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        shape = (1, self.random.choice([4, 8, 16]), self.random.choice([8, 10, 12]), 8)
        self.model = Quantised(shape, self.random.random() < 0.6, seed)
        self.channels, self.sizes = {"x": shape[1]}, {"x": shape[2:]}
        self.pool = ["x"]

    def build(self) -> onnx.ModelProto:
        """Return the model; its outputs are the tensors that nothing reads."""
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
        read = {name for node in self.model.nodes for name in node.input}
        return self.model.model(*([name for name in self.pool if name not in read and name != "x"] or [self.pool[-1]]))

    def keep(self, name: str, channels: int, size: tuple[int, ...]) -> None:
        """Add a tensor that later operators may read."""
        self.channels[name], self.sizes[name] = channels, size
        self.pool.append(name)

    def convolutions(self, x: str) -> None:
        """Append one to three convolutions of the same input."""
        r = self.random
        for _ in range(r.randint(1, 3)):
            kernel, outputs = r.choice([1, 1, 3]), r.choice([4, 8, 12])
            stride = r.choice([1, 1, 1, 2]) if min(self.sizes[x]) >= 6 else 1
            group = r.choice([1, 1, 2, 4]) if self.channels[x] % 4 == 0 else 1
            dilation = r.choice([1, 2, 3]) if stride == 1 else 1
            y = self.model.conv(
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
        """Append a Concat of tensors with the same scale."""
        alike = [
            name
            for name in self.pool
            if self.sizes[name] == self.sizes[x] and self.model.parameters[name] == self.model.parameters[x]
        ]
        parts = [self.random.choice(alike) for _ in range(self.random.randint(2, 3))]
        self.keep(
            self.model.byte_operator("Concat", parts, axis=1), sum(self.channels[p] for p in parts), self.sizes[x]
        )

    def largest(self, x: str) -> None:
        """Append a MaxPool."""
        y = self.model.byte_operator("MaxPool", [x], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
        self.keep(y, self.channels[x], self.sizes[x])

    def average(self, x: str) -> None:
        """Append an AveragePool or onnxruntime's QLinearAveragePool, with the same scale or another."""
        r, m = self.random, self.model
        pads = r.choice([[1] * 4, [0] * 4]) if min(self.sizes[x]) > 4 else [1] * 4
        counted = r.choice([0, 0, 1])
        y = m.average_pool(x, r.choice([*SCALES, m.parameters[x][0]]), r.choice(ZEROS), pads, counted)
        self.keep(y, self.channels[x], tuple(size - 2 + 2 * pads[0] for size in self.sizes[x]))

    def cut(self, x: str) -> None:
        """Append a Split."""
        if self.channels[x] < 2:
            return
        first = self.random.randint(1, self.channels[x] - 1)
        lengths = [first, self.channels[x] - first]
        y = self.model.node("Split", [x, self.model.constant(lengths, np.int64)], axis=1)
        self.model.nodes[-1].output.append(f"{y}_rest")
        for name, length in zip((y, f"{y}_rest"), lengths):
            self.model.parameters[name] = self.model.parameters[x]
            self.keep(name, length, self.sizes[x])

    def function(self, x: str) -> None:
        """Append a function of single elements."""
        op = self.random.choice(["Relu", "Sigmoid", "LeakyRelu"])
        floats = self.model.node(op, [self.model.floats(x)])
        self.keep(self.model.quantised(floats, 0.06, self.random.choice(ZEROS)), self.channels[x], self.sizes[x])

    def added(self, x: str) -> None:
        """Append an Add of two tensors of the same shape."""
        alike = [
            name for name in self.pool if (self.sizes[name], self.channels[name]) == (self.sizes[x], self.channels[x])
        ]
        floats = self.model.node("Add", [self.model.floats(x), self.model.floats(self.random.choice(alike))])
        self.keep(self.model.quantised(floats, 0.07, 3), self.channels[x], self.sizes[x])


def rewritings(seed: int) -> tuple[str, list[str]]:
    """Apply random steps to a random model. Returns how its outputs then differ, and the names of the rules."""
    model, choose = RandomModel(seed).build(), random.Random(seed)
    tidier = RuleSearch(RULES, lambda graph: INFEASIBLE, lambda a, b: None, 0)
    graph = tidier.tidy(graph_of(model))[0]
    steps: list[str] = []
    for _ in range(STEPS):
        by_rule = [(rule, places) for rule in EVERY if not rule.tidy and (places := list(matches(rule, graph)))]
        choose.shuffle(by_rule)
        for rule, places in by_rule:
            rewritten = _taken(tidier, graph, choose.choice(places), model)
            if rewritten is not None:
                graph = rewritten
                steps.append(rule.name)
                break
    return compare_on_random_inputs(model, AlgebraWriter(graph, model).write(), open_model), steps


def _taken(tidier: RuleSearch, graph: BytesGraph, match: Match, model: onnx.ModelProto) -> BytesGraph | None:
    """Return the graph after a rewrite and the cleanup rules, or None if the rewrite does not apply."""
    try:
        rewritten = tidier.tidy(rewrite(graph, match))[0]
        AlgebraWriter(rewritten, model).write()
    except (NotTaken, Unwritable, ValueError):
        return None
    return rewritten


def main() -> int:
    """Run the sweep and return the exit code."""
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
    summary = f"{sum(taken.values())} steps by {len(taken)} rules, {generated} of them by generated ones"
    print(f"{options.count} models, {wrong} differ; {summary}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
