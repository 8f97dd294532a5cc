"""A case on both sides, and its verdict.

Where all outputs are onnxruntime's, bit for bit, they are equal. Else the model is *cut*: our own values of all
quantised tensors go into onnxruntime, too, so that each stretch between two of them is compared alone, with equal
inputs, and a step in one layer cannot hide, or excuse, what a later one makes of it.

- Integers must be onnxruntime's, but for the steps that `exclusions.py` allows some operators.
- Floats may differ by what rounding does. How much that is for a tensor is measured under onnxruntime: all float inputs
  and constants move by one unit in the last place, up or down at random, and once more without optimisations.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

import celosia
from benchmarks.differential.case import Case
from benchmarks.differential.exclusions import Exclusion, find
from benchmarks.differential.net import value_info
from celosia.compiler.cpu.runtime.op import HostError
from celosia.compiler.graph.importer import ModelError
from celosia.compiler.program import InputError, Program
from celosia.driver.oracle import OracleError, run, session
from celosia.driver.runtime import Runtime

Array = NDArray[Any]
EQUAL, DOCUMENTED, WRONG, REFUSED, CRASHED, UNCOUNTED = (
    "equal", "documented", "wrong", "refused", "crashed", "onnxruntime refuses",
)  # fmt: skip
VERDICTS = (EQUAL, DOCUMENTED, WRONG, REFUSED, CRASHED, UNCOUNTED)
FINDINGS = (WRONG, REFUSED, CRASHED)
SENTENCES = (ModelError, HostError, InputError)
"""What a model that cannot be run ends in, with one sentence."""
QUANTISED = (np.int8, np.uint8, np.int16, np.uint16)
VARIANTS = 4
"""Draws of moved inputs and constants."""
MARGIN = 8
"""By which the largest of so few draws is multiplied: rounding is one draw more, of another kind."""
LEAST = 2.0**-21
"""Of a tensor's largest magnitude: four units in the last place, which few operations may take."""
CUT = "_cut"


@dataclass(frozen=True)
class Gap:
    """A tensor that differs. operators: of the stretch that makes it. steps: of integers, the largest difference; None
    for floats beyond rounding, and for another shape or type."""

    name: str
    operators: tuple[str, ...]
    why: str
    steps: int | None


@dataclass(frozen=True)
class Verdict:
    """why: one line. operators: where the fault is. exclusions: the names of those that explain what differs."""

    what: str
    why: str = ""
    operators: tuple[str, ...] = ()
    exclusions: tuple[str, ...] = ()


def judge(case: Case) -> Verdict:
    try:
        reference = session(case.model, threads=1)
        expected = [run(reference, feed) for feed in case.feeds]
    except OracleError as error:
        return Verdict(UNCOUNTED, str(error))
    try:
        found = _ours(case, ())
        if all(_same(a[name], b[name]) for a, b in zip(found, expected) for name in b):
            return Verdict(EQUAL)
        gaps = [gap for feed, got, want in zip(case.feeds, found, expected) for gap in _gaps(case, feed, got, want)]
    except SENTENCES as error:
        return Verdict(REFUSED, str(error), _operators(case.model))
    except Exception as error:
        return _crash(case, error)
    if not gaps:
        return Verdict(EQUAL)
    excused = [(gap, _excuse(gap)) for gap in gaps]
    if wrong := [gap for gap, exclusion in excused if exclusion is None]:
        return Verdict(WRONG, f"{wrong[0].name}: {wrong[0].why}", wrong[0].operators)
    return Verdict(DOCUMENTED, exclusions=tuple(sorted({each.name for _, each in excused if each is not None})))


def _ours(case: Case, keep: str | Sequence[str]) -> list[dict[str, Any]]:
    """Outputs of each run, and what is kept."""
    program = _compiled(case, keep)
    with Runtime(program, threads=1) as runtime:
        results = [runtime.run(feed, trace=False) for feed in case.feeds]
    return [{**result.outputs, **result.tensors} for result in results]


def _compiled(case: Case, keep: str | Sequence[str]) -> Program:
    """For sizes that the model leaves open, or where they must be known, for those of the inputs."""
    compile_ = partial(celosia.compile, case.model, case.config, accelerator=case.accelerator, keep=keep)
    try:
        return compile_()
    except ModelError:
        if not any(dim.HasField("dim_param") for value in case.model.graph.input for dim in _dims(value)):
            raise
    return compile_(shapes={name: array.shape for name, array in case.feeds[0].items()})


def _dims(value: onnx.ValueInfoProto) -> Sequence[Any]:
    return list(value.type.tensor_type.shape.dim)


def _crash(case: Case, error: Exception) -> Verdict:
    frames = [f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.name}"
              for frame in traceback.extract_tb(error.__traceback__) if "celosia" in frame.filename]  # fmt: skip
    place = frames[-1] if frames else ""
    return Verdict(CRASHED, f"{type(error).__name__} in {place}: {error}", _operators(case.model))


def _operators(model: onnx.ModelProto) -> tuple[str, ...]:
    return tuple(sorted({node.op_type for node in model.graph.node}))


# Where and how much it differs -----------------------------------------------------------------------------------


def _same(found: Any, expected: Any) -> bool:
    return not _difference(found, expected)


def _difference(found: Any, expected: Any) -> str:
    """What differs, bit for bit, but that one NaN is as good as another; "" where nothing does."""
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return "the number of elements of a sequence"
        return next(filter(None, map(_difference, found, expected)), "")
    if expected is None or found is None:
        return "" if expected is found else "an optional's presence"
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, not {list(expected.shape)}"
    if found.dtype != expected.dtype and expected.dtype.kind not in "OSU":
        return f"type {found.dtype}, not {expected.dtype}"
    return _elements(found, expected, _equal(found, expected))


def _equal(found: Array, expected: Array) -> Array:
    same: Array = np.equal(found, expected)
    return same if expected.dtype.kind not in "fcV" else same | ((found != found) & (expected != expected))


def _elements(found: Array, expected: Array, same: Array) -> str:
    if np.all(same):
        return ""
    place = int(np.argmin(np.reshape(same, -1)))
    got, want = found.reshape(-1)[place], expected.reshape(-1)[place]
    return f"{np.count_nonzero(~same)} of {same.size} differ, the first is {got}, not {want}"


def _gaps(case: Case, feed: Mapping[str, Array], outputs: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Gap]:
    """What differs where every stretch gets our own quantised tensors."""
    one = Case(case.kind, case.model, (dict(feed),), case.config, case.accelerator)
    (values,) = _ours(one, "all")
    for name, value in outputs.items():
        if not _same(values[name], value):
            return [Gap(name, ("keep",), "another value where all tensors are kept", None)]
    cut = Cut(case.model, values)
    given = dict(feed) | {name + CUT: values[name] for name in cut.names}
    wanted = run(session(cut.model, threads=1), given)
    different = {name: why for name, want in wanted.items() if (why := _difference(values[name], want))}
    if not different:
        return []
    near = Neighbourhood(cut.model, given, wanted)
    return [
        Gap(name, cut.operators(name), *left) for name, why in different.items()
        if (left := near.beyond(name, values[name], why))
    ]  # fmt: skip


class Cut:
    """`model` where what reads a quantised tensor of `values` reads an input of its own instead.

    names: of those tensors. So are the inputs of DynamicQuantizeLinear, whose result depends on all elements at once.
    """

    def __init__(self, model: onnx.ModelProto, values: Mapping[str, Any]) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        graph = self.model.graph
        self.made = {name: node for node in graph.node for name in node.output if name}
        dynamic = {node.input[0] for node in graph.node if node.op_type == "DynamicQuantizeLinear"}
        self.names = [
            name for name in self.made
            if isinstance(value := values.get(name), np.ndarray)
            and ((value.dtype in QUANTISED and self.made[name].op_type != "DynamicQuantizeLinear") or name in dynamic)
        ]  # fmt: skip
        known = {value.name for value in graph.output}
        for name in self.names:
            graph.input.append(value_info(name + CUT, values[name]))
            if name not in known:
                graph.output.append(value_info(name, values[name]))
        for node in graph.node:
            for place, name in enumerate(node.input):
                if name in self.names:
                    node.input[place] = name + CUT

    def nodes(self, name: str) -> list[onnx.NodeProto]:
        """Those that make `name` from inputs and cut tensors, the last one first."""
        waiting, found = [name], []
        while waiting:
            node = self.made.get(waiting.pop())
            if node is not None and node not in found:
                found.append(node)
                waiting += [each for each in node.input if each]
        return found

    def operators(self, name: str) -> tuple[str, ...]:
        return tuple(sorted({node.op_type for node in self.nodes(name)}))


class Neighbourhood:
    """How far rounding moves the tensors of `model`."""

    def __init__(self, model: onnx.ModelProto, feed: Mapping[str, Array], expected: Mapping[str, Any]) -> None:
        self.expected = expected
        self.near = [run(session(model, "DISABLE_ALL", threads=1), feed)]
        rng = np.random.default_rng(0)
        for _ in range(VARIANTS):
            moved = {name: _moved(array, rng) for name, array in feed.items()}
            self.near.append(run(session(_with_moved_constants(model, rng), threads=1), moved))

    def beyond(self, name: str, found: Any, why: str) -> tuple[str, int | None] | None:
        """(What differs more than rounding explains, steps of integers); None where nothing does."""
        expected = self.expected[name]
        if not isinstance(expected, np.ndarray) or found.shape != expected.shape or found.dtype != expected.dtype:
            return why, None
        if expected.dtype.kind == "f":
            return self._floats(name, found, expected)
        if expected.dtype in QUANTISED:
            gaps = np.abs(found.astype(np.int64) - expected.astype(np.int64))
            return why, int(gaps.max())
        return why, None

    def _floats(self, name: str, found: Array, expected: Array) -> tuple[str, int | None] | None:
        wide = expected.astype(np.float64)
        finite = np.isfinite(wide)
        spread = 0.0
        for each in self.near:
            if each[name].shape == expected.shape:
                with np.errstate(invalid="ignore"):
                    moved = np.abs(each[name].astype(np.float64) - wide)[finite]
                spread = max(spread, float(np.nanmax(moved, initial=0.0)))
        allowed = MARGIN * spread + LEAST * float(np.max(np.abs(wide[finite]), initial=0.0))
        with np.errstate(invalid="ignore"):
            same = _equal(found, expected) | (np.abs(found.astype(np.float64) - wide) <= allowed)
        why = _elements(found, expected, same)
        return (f"{why}, where rounding explains {allowed:.3g}", None) if why else None


def _moved(array: Array, rng: np.random.Generator) -> Array:
    if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float64):
        return array
    with np.errstate(over="ignore"):
        return np.nextafter(array, np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(array.dtype))


NUMBERS = ("Resize", "Upsample", "Range", "QuantizeLinear", "OneHot", "NonMaxSuppression")
"""Operators with floats beside their operand from which shapes or rounding follow."""


def _with_moved_constants(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    fixed = {name for node in model.graph.node if node.op_type in NUMBERS for name in node.input[1:]}
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    for tensor in moved.graph.initializer:
        if tensor.name not in fixed and tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
            tensor.CopyFrom(numpy_helper.from_array(_moved(numpy_helper.to_array(tensor), rng), tensor.name))
    return moved


def _excuse(gap: Gap) -> Exclusion | None:
    return None if gap.steps is None else find(gap.operators, gap.steps)
