"""Run a case here and under onnxruntime, and judge the difference.

If all outputs have onnxruntime's bits, they are equal. Otherwise the model is *cut*: onnxruntime gets our values of all
quantised tensors, too. So each stretch between two quantised tensors is compared alone, with equal inputs, and a
difference in one layer cannot hide or excuse one in a later layer.

- Floats may differ by the effect of rounding, which is measured for each tensor under onnxruntime without
  optimisations: all float inputs, constants and dequantised tensors move by one unit in the last place, up or down at
  random. ONNX's reference computes the exact result in doubles, from which onnxruntime's own formula differs, too. A
  result is right if it is within both differences together of onnxruntime's result, or of the exact one.
- Integers must be onnxruntime's, except for the steps that `exclusions.py` allows.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import InputError, Program
from celosia.compiler.program.host.op import HostError
from celosia.driver.runtime import Runtime
from celosia.driver.workstation.oracle import OracleError, expose_tensors, open_session, run_session
from fuzz.models.case import Case
from fuzz.models.exact import OPERATORS, in_doubles, wide_of
from fuzz.models.exclusions import excuse
from fuzz.models.moved import moved_feed, with_moved_constants, with_moved_dequantised, with_rounded_biases
from fuzz.models.net import value_info

Array = NDArray[Any]
EQUAL, DOCUMENTED, WRONG, REFUSED, CRASHED, UNCOUNTED = (
    "equal", "documented", "wrong", "refused", "crashed", "onnxruntime refuses",
)  # fmt: skip
VERDICTS = (EQUAL, DOCUMENTED, WRONG, REFUSED, CRASHED, UNCOUNTED)
FINDINGS = (WRONG, REFUSED, CRASHED)
SENTENCES = (ModelError, HostError, InputError)
"""Errors that refuse a model with one sentence."""
QUANTISED = (np.int8, np.uint8, np.int16, np.uint16)
VARIANTS = 4
"""Number of draws of moved inputs and constants."""
SIGNS = 32
"""Number of draws that show whether rounding decides a sign; enough that both signs occur."""
MARGIN = 16
"""Factor on the largest difference of the few draws; actual rounding may exceed each of them."""
LEAST = 2.0**-21
"""Difference that is always allowed, as a share of a tensor's largest magnitude: four units in the last place."""
LIKENESS = 2.0**-10
"""Share of a tensor's largest magnitude. Where onnxruntime is farther from the exact result, it computes another
function."""
MOVING = ("MaxPool", "NhwcMaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that onnxruntime exchanges with a following QuantizeLinear."""
CUT = "_cut"
FINITE, PLUS, MINUS, NONE = range(4)
"""Kinds of floats: finite, the two infinities, and NaN."""


@dataclass(frozen=True)
class Gap:
    """A tensor that differs from onnxruntime's.

    operators: those of the stretch that computes it. steps: largest difference of quantised values, or 0 for other
    types.
    maker: the operator that made it in onnxruntime's optimised graph. tie: rounding alone moves the quantised values
    across a tie.
    """

    name: str
    operators: tuple[str, ...]
    why: str
    steps: int = 0
    maker: str = ""
    tie: bool = False


@dataclass(frozen=True)
class Verdict:
    """The result of a case.

    what: one of VERDICTS. why: one line. operators: those that may have the fault.
    exclusions: names of the exclusions that explain the differences.
    """

    what: str
    why: str = ""
    operators: tuple[str, ...] = ()
    exclusions: tuple[str, ...] = ()


def judge(case: Case) -> Verdict:
    """Compile and run the case, here and under onnxruntime, and return the verdict. Exceptions become verdicts, too."""
    try:
        reference = open_session(case.model, threads=1)
        expected = [run_session(reference, feed) for feed in case.feeds]
    except OracleError as error:
        return Verdict(UNCOUNTED, str(error))
    try:
        outputs = _ours(case, ())
        if all(_same(a[name], b[name]) for a, b in zip(outputs, expected) for name in b):
            return Verdict(EQUAL)
        gaps = [gap for feed, output in zip(case.feeds, outputs) for gap in _gaps(case, feed, output)]
    except SENTENCES as error:
        return Verdict(REFUSED, str(error), _operators(case.model))
    except Exception as error:
        return _crash(case, error)
    if not gaps:
        return Verdict(EQUAL)
    excused = [(gap, excuse(gap.maker, gap.steps, gap.tie)) for gap in gaps]
    if wrong := [gap for gap, exclusion in excused if exclusion is None]:
        return Verdict(WRONG, f"{wrong[0].name}: {wrong[0].why}", wrong[0].operators)
    return Verdict(DOCUMENTED, exclusions=tuple(sorted({each.name for _, each in excused if each is not None})))


def _ours(case: Case, keep: str | Sequence[str]) -> list[dict[str, Any]]:
    """Compile and run the case here. Return the outputs of each run, with the tensors that `keep` names."""
    program = _compiled(case, keep)
    with Runtime(program, threads=1) as runtime:
        results = [runtime.run(feed, trace=False) for feed in case.feeds]
    return [{**result.outputs, **result.tensors} for result in results]


def _compiled(case: Case, keep: str | Sequence[str]) -> Program:
    """Compile the case for open sizes; if that is impossible, for the sizes of the inputs."""
    compile_ = partial(celosia.compile, case.model, case.config, accelerator=case.accelerator, keep=keep)
    is_open = any(dim.HasField("dim_param") for value in case.model.graph.input for dim in _dims(value))
    if not (is_open and keep):
        try:
            return compile_()
        except ModelError:
            if not is_open:
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


def _same(actual: Any, expected: Any) -> bool:
    return not _difference(actual, expected)


def _difference(actual: Any, expected: Any) -> str:
    """Describe the first difference in bits, where all NaNs are equal; return "" if there is none."""
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return "the number of elements of a sequence"
        return next(filter(None, map(_difference, actual, expected)), "")
    if expected is None or actual is None:
        return "" if expected is actual else "an optional's presence"
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, not {list(expected.shape)}"
    if actual.dtype != expected.dtype and expected.dtype.kind not in "OSU":
        return f"type {actual.dtype}, not {expected.dtype}"
    return _elements(actual, expected, _equal(actual, expected))


def _equal(actual: Array, expected: Array) -> Array:
    same: Array = np.equal(actual, expected)
    return same if expected.dtype.kind not in "fcV" else same | ((actual != actual) & (expected != expected))


def _elements(actual: Array, expected: Array, same: Array) -> str:
    if np.all(same):
        return ""
    place = int(np.argmin(np.reshape(same, -1)))
    got, want = actual.reshape(-1)[place], expected.reshape(-1)[place]
    return f"{np.count_nonzero(~same)} of {same.size} differ, the first is {got}, not {want}"


def _gaps(case: Case, feed: Mapping[str, Array], outputs: Mapping[str, Any]) -> list[Gap]:
    """Return the tensors that differ if every stretch gets our own quantised tensors."""
    (values,) = _ours(replace(case, feeds=(dict(feed),)), "all")
    cut = Cut(case.model, values)
    cut_feed = dict(feed) | {inside: values[name] for name, inside in cut.names.items()}
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "optimised.onnx"
        try:
            expected = run_session(open_session(cut.model, threads=1, save=saved), cut_feed)
        except OracleError:  # without QDQ patterns onnxruntime may lack the operator
            return [Gap(name, cut.operators(name), "onnxruntime runs no part of the model alone") for name in outputs]
        optimised = onnx.load(saved)
    gaps = []
    neighbourhood = Neighbourhood(cut.model, cut_feed, optimised)
    by_ties: dict[str, float] | None = None
    for name, want in expected.items():
        if why := _difference(values[name], want):
            gaps += neighbourhood.gap(name, values[name], want, why, cut.operators(name))
        if name in outputs and (why := _difference(outputs[name], values[name])):
            if by_ties is None:  # without `keep`, a byte may round the other way and change everything behind it
                by_ties = _moved_by_ties(case.model, feed, values, neighbourhood)
            output_gaps = neighbourhood.gap(
                name, outputs[name], values[name], why, cut.operators(name), by_ties.get(name, 0.0)
            )
            gaps += [replace(gap, why=f"without keeping tensors {gap.why}") for gap in output_gaps]
    return gaps


def _moved_by_ties(
    model: onnx.ModelProto, feed: Mapping[str, Array], values: Mapping[str, Any], near: Neighbourhood
) -> dict[str, float]:
    """Return how far float outputs move if values next to a tie are quantised to its other side.

    The result is a distance by name of the output, summed over the quantised tensors.
    """
    moved: dict[str, float] = {}
    for name in near.quantisers:
        other = near.other_side(name, values[name]) if name in values else None
        if other is None:
            continue
        cut = Cut(model, {name: values[name]})
        try:
            here, there = (
                run_session(open_session(cut.model, threads=1), dict(feed) | {cut.names[name]: side})
                for side in (values[name], other)
            )
        except OracleError:
            continue
        for output, array in here.items():
            if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.shape == there[output].shape:
                largest = float(np.max(_distance(array, there[output]), initial=0.0))
                moved[output] = moved.get(output, 0.0) + largest
    return moved


class Cut:
    """`model`, in which readers of a quantised tensor of `values` read a new input instead.

    names: the new input of each such tensor. The inputs of DynamicQuantizeLinear are cut, too, because its result
    depends on all elements at once. A Concat follows each new input, because onnxruntime computes float16 operators
    differently if they read inputs of the model.
    """

    def __init__(self, model: onnx.ModelProto, values: Mapping[str, Any]) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        graph = self.model.graph
        self.makers = {name: node for node in graph.node for name in node.output if name}
        dynamic = {node.input[0] for node in graph.node if node.op_type == "DynamicQuantizeLinear"}
        self.names = {
            name: f"{name}{CUT}{number}" for number, (name, node) in enumerate(self.makers.items())
            if isinstance(value := values.get(name), np.ndarray)
            and ((value.dtype in QUANTISED and node.op_type != "DynamicQuantizeLinear") or name in dynamic)
        }  # fmt: skip
        known = {value.name for value in graph.output}
        for name, inside in self.names.items():
            graph.input.append(value_info(inside, values[name]))
            if name not in known:
                graph.output.append(value_info(name, values[name]))
        behind = {name: f"{inside}_behind" for name, inside in self.names.items() if np.ndim(values[name])}
        for node in graph.node:
            for place, name in enumerate(node.input):
                node.input[place] = behind.get(name, self.names.get(name, name))
        first = [helper.make_node("Concat", [self.names[name]], [held], axis=0) for name, held in behind.items()]
        nodes = [*first, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)

    def nodes(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that compute `name` from inputs and cut tensors, the last one first."""
        waiting, result = [name], []
        while waiting:
            node = self.makers.get(waiting.pop())
            if node is not None and node not in result:
                result.append(node)
                waiting += [operand for operand in node.input if operand]
        return result

    def operators(self, name: str) -> tuple[str, ...]:
        """Return the sorted kinds of the operators between the cut and tensor `name`."""
        return tuple(sorted({node.op_type for node in self.nodes(name)}))


class Neighbourhood:
    """Measure how far rounding moves the tensors of `model`. optimised: the graph that onnxruntime makes of it."""

    def __init__(self, model: onnx.ModelProto, feed: Mapping[str, Array], optimised: onnx.ModelProto) -> None:
        self.model, self.feed = with_rounded_biases(model, optimised), feed
        self.makers = {name: node for node in optimised.graph.node for name in node.output}
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.quantisers = {
            node.output[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"
        }  # fmt: skip

    @cached_property
    def near(self) -> list[dict[str, Any]]:
        """Return all tensors, unmoved and moved; none if onnxruntime cannot run the model without integer operators."""
        return self._drawn(VARIANTS)

    def _drawn(self, count: int) -> list[dict[str, Any]]:
        plain, rng = expose_tensors(self.model), np.random.default_rng(0)
        try:
            draws = [run_session(open_session(plain, "DISABLE_ALL", threads=1), self.feed)]
            for _ in range(count):
                feed = moved_feed(plain, self.feed, rng)
                moved_model = with_moved_dequantised(with_moved_constants(plain, rng), draws[0], rng)
                draws.append(run_session(open_session(moved_model, "DISABLE_ALL", threads=1), feed))
        except OracleError:
            return []
        return draws

    def gap(
        self, name: str, found: Any, expected: Any, why: str, operators: tuple[str, ...], more: float = 0.0
    ) -> list[Gap]:  # fmt: skip
        """Return a gap if a tensor differs by more than rounding explains.

        more: a further difference of floats that is allowed.
        """
        if not isinstance(expected, np.ndarray) or found.shape != expected.shape or found.dtype != expected.dtype:
            return [Gap(name, operators, why)]
        if expected.dtype.kind == "f":
            allowed = self._allowed(name, expected) + more
            same: Array = _equal(found, expected) | (_distance(found, expected) <= allowed)
            if np.any(of_other_kind := _kind(found) != _kind(expected)):
                same = same | (of_other_kind & self._undefined(name, found))
            if not np.all(same) and (exact := self._exact(name)) is not None and exact.shape == found.shape:
                same |= _of_rounding(expected, exact) & (_distance(found, exact) <= allowed)
            why = _elements(found, expected, same)
            return [Gap(name, operators, f"{why}, where rounding explains {allowed:.3g}")] if why else []
        if expected.dtype not in QUANTISED:
            return [Gap(name, operators, why)]
        steps = np.abs(found.astype(np.int64) - expected.astype(np.int64))
        if name in self.quantisers and np.any(steps > 1):  # NaN may become any integer
            steps[self._is_anything(self.quantisers[name].input[0], steps > 1)] = 0
            if not np.any(steps):
                return []
        return [Gap(name, operators, why, int(steps.max()), self._maker(name), self._is_tie(name, steps))]

    def _maker(self, name: str) -> str:
        """Return the operator that computed the elements of `name`, before operators that only move them."""
        node = self.makers[name]
        while node.op_type in MOVING and node.input[0] in self.makers:
            node = self.makers[node.input[0]]
        return str(node.op_type)

    def _allowed(self, name: str, expected: Array) -> float:
        wide = expected.astype(np.float64)
        finite = np.isfinite(wide)
        spread = 0.0
        for draw in self.near:
            if draw[name].shape == expected.shape:
                with np.errstate(invalid="ignore"):
                    moved = np.abs(draw[name].astype(np.float64) - wide)[finite]
                spread = max(spread, float(np.nanmax(moved, initial=0.0)))
        formula_error = 0.0
        if (exact := self._exact(name)) is not None and exact.shape == expected.shape:
            formula_error = float(np.max(_distance(wide, exact), initial=0.0, where=_of_rounding(wide, exact)))
        return MARGIN * spread + formula_error + LEAST * float(np.max(np.abs(wide[finite]), initial=0.0))

    def _undefined(self, name: str, found: Array) -> Array:
        """Mark elements for which rounding decides whether a result exists, such as a root of a sum that cancels.

        The kind of `found` must occur among moved results, or be NaN between both infinities, as in a quotient of two
        zeros.
        """
        drawn_kinds = [_kind(draw[name]) for draw in self._drawn(SIGNS) if draw[name].shape == found.shape]
        kinds, kind = np.array(drawn_kinds or [_kind(found)]), _kind(found)
        several = (kinds != kinds[0]).any(axis=0)
        between = (kinds == PLUS).any(axis=0) & (kinds == MINUS).any(axis=0) & (kind == NONE)
        return np.asarray(several & ((kinds == kind).any(axis=0) | between))

    def _is_anything(self, name: str, where: Array) -> Array:
        """Mark elements of the floats `name` within mask `where` that are NaN or infinite, depending on rounding."""
        if not self.near or name not in self.near[0] or self.near[0][name].shape != where.shape:
            return np.zeros(where.shape, bool)
        real = self.near[0][name]
        if real.dtype.kind != "f" or not np.any(where & ~np.isfinite(real)):
            return np.zeros(where.shape, bool)
        kinds = np.array([_kind(draw[name]) for draw in self._drawn(SIGNS)])
        return np.asarray(where & (kinds != FINITE).all(axis=0) & (kinds != kinds[0]).any(axis=0))

    def _exact(self, name: str) -> Array | None:
        """Compute a tensor by ONNX's reference in double precision; return None if it lacks an operator."""
        model = in_doubles(self.model)
        used = {name}
        nodes: list[onnx.NodeProto] = []
        for node in reversed(model.graph.node):
            if used.intersection(node.output):
                nodes.insert(0, node)
                used.update(node.input)
        model.graph.CopyFrom(
            onnx.helper.make_graph(
                nodes, "stretch", [value for value in model.graph.input if value.name in used],
                [value for value in model.graph.output if value.name == name],
                [tensor for tensor in model.graph.initializer if tensor.name in used],
            )
        )  # fmt: skip
        feed = {input_name: wide_of(array) for input_name, array in self.feed.items() if input_name in used}
        try:
            with np.errstate(all="ignore"):
                (exact,) = ReferenceEvaluator(model, new_ops=OPERATORS).run([name], feed)
        except Exception:  # the reference raises any class for operators that it lacks, or lacks in doubles
            return None
        return np.asarray(exact)

    def _is_tie(self, name: str, steps: Array) -> bool:
        """Return True if rounding moves the quantised floats across a tie wherever `steps` is not 0."""
        ties = self._ties(name)
        return ties is not None and bool(np.all(ties[1][steps > 0]))

    def other_side(self, name: str, quantised: Array) -> Array | None:
        """Return `quantised` with each element next to a tie on the tie's other side, or None without such elements."""
        ties = self._ties(name)
        if ties is None or not np.any(ties[1]):
            return None
        positions, is_tie = ties
        values, node = self._known(), self.quantisers[name]
        zero = values[node.input[2]].astype(np.int64) if len(node.input) > 2 else 0
        integers, limits = quantised.astype(np.int64), np.iinfo(quantised.dtype)
        other = np.where(is_tie, integers + np.where(positions > integers - zero, 1, -1), integers)
        return np.clip(other, limits.min, limits.max).astype(quantised.dtype)

    def _known(self) -> dict[str, Array]:
        """Return constants, inputs and computed tensors by name; constants may be outputs of Constant nodes, too."""
        return self.constants | dict(self.feed) | self.near[0]

    def _ties(self, name: str) -> tuple[Array, Array] | None:
        """Return the floats that become `name`, in steps, and a mask of those that rounding moves across a tie.

        Return None if the tensor has several scales, or none.
        """
        node = self.quantisers.get(name)
        if node is None or not self.near or node.input[0] not in self.near[0]:
            return None  # inputs of the model that are quantised already have no ties
        values = self._known()
        real, scale = values[node.input[0]], values[node.input[1]]
        if scale.size != 1:
            return None
        step = float(scale.reshape(()))
        positions = real.astype(np.float64) / step
        allowed = self._allowed(node.input[0], real) / step + 2.0**-23 * np.abs(positions)
        with np.errstate(invalid="ignore"):
            return positions, np.abs(
                positions - np.floor(positions) - 0.5
            ) <= allowed  # includes the rounding of the division


def _kind(array: Array) -> Array:
    """Return FINITE, PLUS, MINUS or NONE for each element."""
    return np.where(np.isfinite(array), FINITE, np.where(np.isnan(array), NONE, np.where(array > 0, PLUS, MINUS)))


def _distance(a: Array, b: Array) -> Array:
    with np.errstate(invalid="ignore"):
        distance: Array = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return distance


def _of_rounding(expected: Array, exact: Array) -> Array:
    """Mark elements for which onnxruntime's result is near the exact one, so that both compute the same function."""
    near: Array = _distance(expected, exact) <= LIKENESS * np.max(np.abs(exact), initial=0.0)
    return near
