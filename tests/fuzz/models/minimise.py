"""Shrink the case of a finding, as long as the finding stays.

Nodes are removed, and their results become inputs. Outputs, runs and attributes are removed. Axes become short, numbers
round, names plain, and the Config `tiny`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from celosia.driver.workstation.oracle import OracleError, expose_tensors, open_session, run_session
from celosia.hw.spec.config import PRESETS
from fuzz.models.case import Case
from fuzz.models.judge import CRASHED, REFUSED, Verdict, judge
from fuzz.models.net import Array, value_info

TRIES = 250
"""Maximum number of smaller cases that are judged for one finding."""


@dataclass(frozen=True)
class Minimised:
    case: Case
    verdict: Verdict
    tries: int

    @property
    def signature(self) -> str:
        """Return a text that is equal for findings of one cause: verdict, operators with attributes, and message."""
        nodes = sorted({_text(node) for node in self.case.model.graph.node})
        words = _words(self.verdict) if self.verdict.what in (CRASHED, REFUSED) else ""
        return f"{self.verdict.what}: {', '.join(nodes)}" + (f": {words}" if words else "")


def _text(node: onnx.NodeProto) -> str:
    return f"{node.op_type}({', '.join(sorted(attr.name for attr in node.attribute))})"


def _words(verdict: Verdict) -> str:
    """Return the message of a verdict without names and numbers."""
    return re.sub(r"'[^']*'|\([^)]*\)|\[[^]]*\]|-?[\d.]+(e-?\d+)?", "#", verdict.why.split("\n")[0])[:120]


def cause(verdict: Verdict) -> str:
    """Return a text that groups findings before they are minimised."""
    return f"{verdict.what} {_words(verdict) if verdict.what in (CRASHED, REFUSED) else verdict.operators}"


def minimise(case: Case, original: Verdict, judge_: Callable[[Case], Verdict] = judge, tries: int = TRIES) -> Minimised:
    """Return a smaller case with the same verdict; crashes and refusals must keep their message.

    found: the verdict of `case`. tries: maximum number of smaller cases that are judged.
    """
    best, verdict, used = case, original, 0

    def persists(smaller: Case) -> bool:
        nonlocal best, verdict, used
        used += 1
        new_verdict = judge_(smaller)
        if new_verdict.what != original.what or (
            original.what in (CRASHED, REFUSED) and _words(new_verdict) != _words(original)
        ):
            return False
        best, verdict = smaller, new_verdict
        return True

    moved = True
    while moved and used < tries:
        moved = False
        for step in STEPS:
            # After each success, repeat the step on the smaller case.
            again = True
            while again and used < tries:
                again = any(persists(smaller) for smaller in itertools.islice(step(best), tries - used))
                moved = moved or again
    return Minimised(best, verdict, used)


# Steps: each yields cases that are smaller in one place ------------------------------------------------------------


def _fewer_runs(case: Case) -> Iterator[Case]:
    if len(case.feeds) > 1:
        yield from (replace(case, feeds=(feed,)) for feed in case.feeds)


def _plain_config(case: Case) -> Iterator[Case]:
    if case.config != PRESETS["tiny"]:
        yield replace(case, config=PRESETS["tiny"])
    if case.accelerator:
        yield replace(case, accelerator=False)


def _fewer_outputs(case: Case) -> Iterator[Case]:
    outputs = list(case.model.graph.output)
    if len(outputs) > 1:
        for kept in outputs:
            yield _pruned(case, outputs=[kept])
        for dropped in outputs:
            yield _pruned(case, outputs=[value for value in outputs if value is not dropped])


def _earlier_outputs(case: Case) -> Iterator[Case]:
    """Yield cases that return the results of a node in the middle, without the nodes behind it."""
    values = _values(case)
    for node in case.model.graph.node:
        named = [name for name in node.output if isinstance(values[0].get(name), np.ndarray)]
        if named and {*named} != {value.name for value in case.model.graph.output}:
            yield _pruned(case, outputs=[value_info(name, values[0][name]) for name in named])


def _later_inputs(case: Case) -> Iterator[Case]:
    """Yield cases without one node, whose results become inputs."""
    values = _values(case)
    for node in reversed(case.model.graph.node):
        results = [name for name in node.output if isinstance(values[0].get(name), np.ndarray)]
        outputs = {value.name for value in case.model.graph.output}
        if len(case.model.graph.node) == 1 or outputs.intersection(results) or not results:
            continue
        smaller = _copy(case)
        graph = smaller.model.graph
        remaining = [other for other in graph.node if other.output != node.output]
        del graph.node[:]
        graph.node.extend(remaining)
        graph.input.extend(value_info(name, values[0][name]) for name in results)
        feeds = tuple(
            {**feed, **{name: tensors[name] for name in results}} for feed, tensors in zip(case.feeds, values)
        )
        yield _pruned(replace(smaller, feeds=feeds))


def _wires(case: Case) -> Iterator[Case]:
    """Yield cases without one node, whose readers read its first input instead."""
    outputs = {value.name for value in case.model.graph.output}
    for number, node in enumerate(case.model.graph.node):
        if len(node.output) != 1 or node.output[0] in outputs or not node.input or not node.input[0]:
            continue
        smaller = _copy(case)
        del smaller.model.graph.node[number]
        for other in smaller.model.graph.node:
            other.input[:] = [node.input[0] if name == node.output[0] else name for name in other.input]
        yield _pruned(smaller)


def _fewer_attributes(case: Case) -> Iterator[Case]:
    for number, node in enumerate(case.model.graph.node):
        for place in range(len(node.attribute)):
            smaller = _copy(case)
            del smaller.model.graph.node[number].attribute[place]
            yield _pruned(smaller)


def _plain_attributes(case: Case) -> Iterator[Case]:
    """Yield cases in which one number in a list becomes 0 or 1."""
    for number, node in enumerate(case.model.graph.node):
        for place, attr in enumerate(node.attribute):
            for at, old in enumerate(attr.ints):
                for new in (0, 1):
                    if old > new:
                        smaller = _copy(case)
                        smaller.model.graph.node[number].attribute[place].ints[at] = new
                        yield _pruned(smaller)


def _shorter_axes(case: Case) -> Iterator[Case]:
    """Yield cases in which all axes of one size become shorter, in inputs and constants."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in case.model.graph.initializer}
    arrays = {**case.feeds[0], **constants}
    for size in sorted({n for array in arrays.values() for n in array.shape if n > 1}, reverse=True):
        for fewer in sorted({1, size // 2, size - 1}):
            for names in (list(arrays), list(case.feeds[0]), *([name] for name in arrays)):
                yield _cut_axes(case, constants, size, fewer, set(names))


def _cut_axes(case: Case, constants: dict[str, Array], size: int, fewer: int, names: set[str]) -> Case:
    def cut(name: str, array: Array) -> Array:
        return array[tuple(slice(fewer) if n == size else slice(None) for n in array.shape)] if name in names else array

    smaller = _copy(case)
    graph = smaller.model.graph
    for tensor in graph.initializer:
        shortened = np.ascontiguousarray(cut(tensor.name, constants[tensor.name]))
        tensor.CopyFrom(numpy_helper.from_array(shortened, tensor.name))
    feeds = tuple({name: np.ascontiguousarray(cut(name, array)) for name, array in feed.items()} for feed in case.feeds)
    inputs = [
        value_info(value.name, feeds[0][value.name]) if value.name in feeds[0] else value for value in graph.input
    ]
    del graph.input[:]
    graph.input.extend(inputs)
    return _pruned(replace(smaller, feeds=feeds))


def _rounder_numbers(case: Case) -> Iterator[Case]:
    for digits in (0, 1, 2):
        feeds = tuple(
            {name: np.round(array, digits) if array.dtype.kind == "f" else array for name, array in feed.items()}
            for feed in case.feeds
        )
        if any(not np.array_equal(a[name], b[name]) for a, b in zip(feeds, case.feeds) for name in a):
            yield replace(case, feeds=feeds)


def _plain_names(case: Case) -> Iterator[Case]:
    graph = case.model.graph
    names = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    names += [name for node in graph.node for name in node.output if name]
    new = {name: f"t{number}" for number, name in enumerate(dict.fromkeys(names))}
    if all(name == new[name] for name in new) and not any(node.name for node in graph.node):
        return
    smaller = _copy(case)
    for node in smaller.model.graph.node:
        node.name = ""
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in (*smaller.model.graph.input, *smaller.model.graph.output, *smaller.model.graph.initializer):
        value.name = new[value.name]
    yield replace(smaller, feeds=tuple({new[name]: array for name, array in feed.items()} for feed in case.feeds))


STEPS: tuple[Callable[[Case], Iterator[Case]], ...] = (
    _fewer_runs, _fewer_outputs, _earlier_outputs, _later_inputs, _wires, _plain_config, _fewer_attributes,
    _plain_attributes, _shorter_axes, _rounder_numbers, _plain_names,
)  # fmt: skip


# Pieces ------------------------------------------------------------------------------------------------------------


def _copy(case: Case) -> Case:
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    return replace(case, model=model)


def _values(case: Case) -> list[dict[str, Array]]:
    """Return all tensors of each run under onnxruntime; empty dictionaries if it does not run the model."""
    try:
        session = open_session(expose_tensors(case.model), "DISABLE_ALL", threads=1)
        return [run_session(session, feed) for feed in case.feeds]
    except OracleError:
        return [{} for _ in case.feeds]


def _pruned(case: Case, outputs: list[onnx.ValueInfoProto] | None = None) -> Case:
    """Return the case without nodes that no output needs, and without shapes of tensors, which may have changed."""
    smaller = _copy(case)
    graph = smaller.model.graph
    kept_outputs = list(graph.output) if outputs is None else outputs
    used = {value.name for value in kept_outputs}
    nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if used.intersection(node.output):
            nodes.insert(0, node)
            used.update(node.input)
            used.update(name for attr in node.attribute for inner in attr.g.node for name in inner.input)
    new = [helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, None) for value in kept_outputs]
    inputs = [value for value in graph.input if value.name in used]
    constants = [tensor for tensor in graph.initializer if tensor.name in used]
    for field, values in (
        (graph.node, nodes), (graph.output, new), (graph.input, inputs), (graph.initializer, constants),
        (graph.value_info, []),
    ):  # fmt: skip
        copies = [type(value)() for value in values]
        for copy, value in zip(copies, values):
            copy.CopyFrom(value)
        del field[:]
        field.extend(copies)
    return smaller.with_model(smaller.model)
