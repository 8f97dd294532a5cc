"""Programs for the tests of report pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from small_models import Builder

import celosia
from celosia.compiler.program import LaunchStep, Program
from celosia.hw.spec.config import Config


def compiled(cfg: Config, names: str = "own") -> Program:
    """Compile a residual around a depthwise convolution, a pooling, a product, and a Softmax, which runs on the CPU."""
    b = Builder("qdq", np.int8, seed=2)
    b.node_names = names
    x = b.conv(b.input([1, 3, 12, 12]), 16, (3, 3), pads=(1, 1, 1, 1))
    y = b.conv(x, 16, (3, 3), pads=(1, 1, 1, 1), group=16)
    x = b.binary("Add", b.conv(y, 16, (1, 1)), x)
    b.output(b.matmul(b.flatten(b.global_average(x)), 10))
    return celosia.compile(b.model(), cfg, check=False)


HOSTILE = (
    "</script><script>window.hacked=1</script>", "", "<img src=x onerror=window.hacked=1>", "\"'`${window.hacked=1}",
    "x" * 5000, "same", "same", "$$\\frac{1}{0}$$", "@name{safe} @what",
    "\\u003c &lt; &amp; \u202e \U0001f600 \n tab\t",
)  # fmt: skip


def hostile(program: Program) -> Program:
    """Return the Program with hostile names of layers, operators, inputs, outputs, and of itself."""
    number = iter(range(1 << 20))

    def name() -> str:
        return HOSTILE[next(number) % len(HOSTILE)]

    def renamed(step: Any) -> Any:
        if isinstance(step, LaunchStep):
            layers = tuple(dataclasses.replace(layer, name=name(), what=name()) for layer in step.layers)
            return dataclasses.replace(step, layers=layers)
        nodes = tuple(dataclasses.replace(node, name=name(), op=name(), reason=name()) for node in step.nodes)
        return dataclasses.replace(step, nodes=nodes)

    tensors = {"outputs": tuple(dataclasses.replace(output, name=name()) for output in program.outputs)}
    return dataclasses.replace(program, name=HOSTILE[0], steps=[renamed(step) for step in program.steps], **tensors)
