"""A case on both sides, and its verdict.

Where all outputs are onnxruntime's, bit for bit, they are equal. Else the model is *cut*: our own values of all
quantised tensors go into onnxruntime, too, so that each stretch between two of them is compared alone, with equal
inputs, and a step in one layer cannot hide, or excuse, what a later one makes of it.

- Floats may differ by what rounding does. How much that is for a tensor is measured under onnxruntime: all float inputs
  and constants, and what is dequantised, move by one unit in the last place, up or down at random, and optimisations
  are left out; and ONNX's reference computes the exact result in doubles, from which onnxruntime's own formula is some
  way off. Within both together of onnxruntime's result is right, and so is within them of the exact one.
- Integers must be onnxruntime's, but for the steps that `exclusions.py` allows.
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
from celosia.driver.host.oracle import OracleError, expose_tensors, open_session, run_session
from celosia.driver.runtime import Runtime
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
"""What a model that cannot be run ends in, with one sentence."""
QUANTISED = (np.int8, np.uint8, np.int16, np.uint16)
VARIANTS = 4
"""Draws of moved inputs and constants."""
SIGNS = 32
"""Draws that tell whether rounding decides a sign: each of its two sides should be among them."""
MARGIN = 16
"""By which the largest of so few draws is multiplied: rounding is one draw more, of another kind."""
LEAST = 2.0**-21
"""Of a tensor's largest magnitude: four units in the last place, which few operations may take."""
LIKENESS = 2.0**-10
"""Of a tensor's largest magnitude: where onnxruntime is farther from the exact result, it means something else."""
MOVING = ("MaxPool", "NhwcMaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators with which onnxruntime's QuantizeLinear changes places."""
CUT = "_cut"
FINITE, PLUS, MINUS, NONE = range(4)
"""Kinds of floats: finite ones, both infinities, and those that are no number."""


@dataclass(frozen=True)
class Gap:
    """A tensor that differs. operators: of the stretch that makes it. steps: of quantised ones, the largest
    difference; 0 where it is not counted in steps. maker: the operator that made it in onnxruntime's optimised graph.
    tie: whether rounding alone moves what was quantised across a tie."""

    name: str
    operators: tuple[str, ...]
    why: str
    steps: int = 0
    maker: str = ""
    tie: bool = False


@dataclass(frozen=True)
class Verdict:
    """why: one line. operators: where the fault is. exclusions: the names of those that explain what differs."""

    what: str
    why: str = ""
    operators: tuple[str, ...] = ()
    exclusions: tuple[str, ...] = ()


def judge(case: Case) -> Verdict:
    """Compiles and runs the case, here and under onnxruntime. Raises nothing but what ends a process."""
    try:
        reference = open_session(case.model, threads=1)
        expected = [run_session(reference, feed) for feed in case.feeds]
    except OracleError as error:
        return Verdict(UNCOUNTED, str(error))
    try:
        found = _ours(case, ())
        if all(_same(a[name], b[name]) for a, b in zip(found, expected) for name in b):
            return Verdict(EQUAL)
        gaps = [gap for feed, got in zip(case.feeds, found) for gap in _gaps(case, feed, got)]
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
    """Outputs of each run, and what is kept."""
    program = _compiled(case, keep)
    with Runtime(program, threads=1) as runtime:
        results = [runtime.run(feed, trace=False) for feed in case.feeds]
    return [{**result.outputs, **result.tensors} for result in results]


def _compiled(case: Case, keep: str | Sequence[str]) -> Program:
    """For sizes that the model leaves open, or where they must be known, for those of the inputs."""
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


def _same(found: Any, expected: Any) -> bool:
    return not _difference(found, expected)


def _difference(found: Any, expected: Any) -> str:
    """Describe the difference, bit for bit, but that one NaN is as good as another; "" for none."""
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


def _gaps(case: Case, feed: Mapping[str, Array], outputs: Mapping[str, Any]) -> list[Gap]:
    """Tensors that differ where every stretch gets our own quantised tensors."""
    (values,) = _ours(replace(case, feeds=(dict(feed),)), "all")
    cut = Cut(case.model, values)
    given = dict(feed) | {inside: values[name] for name, inside in cut.names.items()}
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "optimised.onnx"
        try:
            wanted = run_session(open_session(cut.model, threads=1, save=saved), given)
        except OracleError:  # what is only right where it is an integer operator
            return [Gap(name, cut.operators(name), "onnxruntime runs no part of the model alone") for name in outputs]
        optimised = onnx.load(saved)
    gaps = []
    near = Neighbourhood(cut.model, given, optimised)
    by_ties: dict[str, float] | None = None
    for name, want in wanted.items():
        if why := _difference(values[name], want):
            gaps += near.gap(name, values[name], want, why, cut.operators(name))
        if name in outputs and (why := _difference(outputs[name], values[name])):
            if by_ties is None:  # one byte that rounds the other way without keeping moves all that follows
                by_ties = _moved_by_ties(case.model, feed, values, near)
            left = near.gap(name, outputs[name], values[name], why, cut.operators(name), by_ties.get(name, 0.0))
            gaps += [replace(gap, why=f"without keeping tensors {gap.why}") for gap in left]
    return gaps


def _moved_by_ties(
    model: onnx.ModelProto, feed: Mapping[str, Array], values: Mapping[str, Any], near: Neighbourhood
) -> dict[str, float]:
    """How far outputs move where what lies next to a tie is quantised to its other side, tensor by tensor."""
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
        for each, array in here.items():
            if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.shape == there[each].shape:
                most = float(np.max(_distance(array, there[each]), initial=0.0))
                moved[each] = moved.get(each, 0.0) + most
    return moved


class Cut:
    """`model` where what reads a quantised tensor of `values` reads an input of its own instead.

    names: of those tensors, and of their inputs. The inputs of DynamicQuantizeLinear are cut, too, as its result
    depends on all elements at once. An operator stands behind each input, since onnxruntime computes float16 operators
    that read nothing but inputs in another way.
    """

    def __init__(self, model: onnx.ModelProto, values: Mapping[str, Any]) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        graph = self.model.graph
        self.made = {name: node for node in graph.node for name in node.output if name}
        dynamic = {node.input[0] for node in graph.node if node.op_type == "DynamicQuantizeLinear"}
        self.names = {
            name: f"{name}{CUT}{number}" for number, (name, node) in enumerate(self.made.items())
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
        """Those that make `name` from inputs and cut tensors, the last one first."""
        waiting, found = [name], []
        while waiting:
            node = self.made.get(waiting.pop())
            if node is not None and node not in found:
                found.append(node)
                waiting += [each for each in node.input if each]
        return found

    def operators(self, name: str) -> tuple[str, ...]:
        """Kinds of the operators that lead to tensor `name` from the cut, sorted."""
        return tuple(sorted({node.op_type for node in self.nodes(name)}))


class Neighbourhood:
    """How far rounding moves the tensors of `model`. optimised: the graph that onnxruntime makes of it."""

    def __init__(self, model: onnx.ModelProto, feed: Mapping[str, Array], optimised: onnx.ModelProto) -> None:
        self.model, self.feed = with_rounded_biases(model, optimised), feed
        self.makers = {name: node for node in optimised.graph.node for name in node.output}
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.quantisers = {
            node.output[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"
        }  # fmt: skip

    @cached_property
    def near(self) -> list[dict[str, Any]]:
        """All tensors, as they are and as they are moved; none where onnxruntime needs its integer operators."""
        return self._drawn(VARIANTS)

    def _drawn(self, count: int) -> list[dict[str, Any]]:
        plain, rng = expose_tensors(self.model), np.random.default_rng(0)
        try:
            found = [run_session(open_session(plain, "DISABLE_ALL", threads=1), self.feed)]
            for _ in range(count):
                feed = moved_feed(plain, self.feed, rng)
                near = with_moved_dequantised(with_moved_constants(plain, rng), found[0], rng)
                found.append(run_session(open_session(near, "DISABLE_ALL", threads=1), feed))
        except OracleError:
            return []
        return found

    def gap(
        self, name: str, found: Any, expected: Any, why: str, operators: tuple[str, ...], more: float = 0.0
    ) -> list[Gap]:  # fmt: skip
        """Judge a tensor: a gap where it differs more than rounding explains, and `more` where it is a float."""
        if not isinstance(expected, np.ndarray) or found.shape != expected.shape or found.dtype != expected.dtype:
            return [Gap(name, operators, why)]
        if expected.dtype.kind == "f":
            allowed = self._allowed(name, expected) + more
            same: Array = _equal(found, expected) | (_distance(found, expected) <= allowed)
            if np.any(one := _kind(found) != _kind(expected)):
                same = same | (one & self._undefined(name, found))
            if not np.all(same) and (exact := self._exact(name)) is not None and exact.shape == found.shape:
                same |= _of_rounding(expected, exact) & (_distance(found, exact) <= allowed)
            why = _elements(found, expected, same)
            return [Gap(name, operators, f"{why}, where rounding explains {allowed:.3g}")] if why else []
        if expected.dtype not in QUANTISED:
            return [Gap(name, operators, why)]
        steps = np.abs(found.astype(np.int64) - expected.astype(np.int64))
        if name in self.quantisers and np.any(steps > 1):  # what is no number becomes any
            steps[self._is_anything(self.quantisers[name].input[0], steps > 1)] = 0
            if not np.any(steps):
                return []
        return [Gap(name, operators, why, int(steps.max()), self._maker(name), self._is_tie(name, steps))]

    def _maker(self, name: str) -> str:
        """The operator that made the elements of `name`, which others may have moved."""
        node = self.makers[name]
        while node.op_type in MOVING and node.input[0] in self.makers:
            node = self.makers[node.input[0]]
        return str(node.op_type)

    def _allowed(self, name: str, expected: Array) -> float:
        wide = expected.astype(np.float64)
        finite = np.isfinite(wide)
        spread = 0.0
        for each in self.near:
            if each[name].shape == expected.shape:
                with np.errstate(invalid="ignore"):
                    moved = np.abs(each[name].astype(np.float64) - wide)[finite]
                spread = max(spread, float(np.nanmax(moved, initial=0.0)))
        own = 0.0
        if (exact := self._exact(name)) is not None and exact.shape == expected.shape:
            own = float(np.max(_distance(wide, exact), initial=0.0, where=_of_rounding(wide, exact)))
        return MARGIN * spread + own + LEAST * float(np.max(np.abs(wide[finite]), initial=0.0))

    def _undefined(self, name: str, found: Array) -> Array:
        """Elements that rounding moves to where there is no result, or from there, as roots of what cancels, and to
        what is `found`: some kind of number, or none between two signs of infinity, as a quotient of two zeros."""
        near = [_kind(each[name]) for each in self._drawn(SIGNS) if each[name].shape == found.shape]
        kinds, kind = np.array(near or [_kind(found)]), _kind(found)
        several = (kinds != kinds[0]).any(axis=0)
        between = (kinds == PLUS).any(axis=0) & (kinds == MINUS).any(axis=0) & (kind == NONE)
        return np.asarray(several & ((kinds == kind).any(axis=0) | between))

    def _is_anything(self, name: str, where: Array) -> Array:
        """Elements of the floats `name`, among those `where` asks for, that rounding makes no number, or infinite."""
        if not self.near or name not in self.near[0] or self.near[0][name].shape != where.shape:
            return np.zeros(where.shape, bool)
        real = self.near[0][name]
        if real.dtype.kind != "f" or not np.any(where & ~np.isfinite(real)):
            return np.zeros(where.shape, bool)
        kinds = np.array([_kind(each[name]) for each in self._drawn(SIGNS)])
        return np.asarray(where & (kinds != FINITE).all(axis=0) & (kinds != kinds[0]).any(axis=0))

    def _exact(self, name: str) -> Array | None:
        """Compute a tensor by ONNX's reference in double precision; None where it cannot."""
        model = in_doubles(self.model)
        wanted = {name}
        nodes: list[onnx.NodeProto] = []
        for node in reversed(model.graph.node):
            if wanted.intersection(node.output):
                nodes.insert(0, node)
                wanted.update(node.input)
        model.graph.CopyFrom(
            onnx.helper.make_graph(
                nodes, "stretch", [value for value in model.graph.input if value.name in wanted],
                [value for value in model.graph.output if value.name == name],
                [tensor for tensor in model.graph.initializer if tensor.name in wanted],
            )
        )  # fmt: skip
        feed = {each: wide_of(array) for each, array in self.feed.items() if each in wanted}
        try:
            with np.errstate(all="ignore"):
                (exact,) = ReferenceEvaluator(model, new_ops=OPERATORS).run([name], feed)
        except Exception:  # of any class: operators that it has not, or not in doubles
            return None
        return np.asarray(exact)

    def _is_tie(self, name: str, steps: Array) -> bool:
        """Whether rounding moves the floats that were quantised across a tie, wherever there are steps."""
        ties = self._ties(name)
        return ties is not None and bool(np.all(ties[1][steps > 0]))

    def other_side(self, name: str, quantised: Array) -> Array | None:
        """`quantised`, each element next to a tie on its other side; None where there are none."""
        ties = self._ties(name)
        if ties is None or not np.any(ties[1]):
            return None
        at, where = ties
        known, node = self._known(), self.quantisers[name]
        zero = known[node.input[2]].astype(np.int64) if len(node.input) > 2 else 0
        whole, limits = quantised.astype(np.int64), np.iinfo(quantised.dtype)
        other = np.where(where, whole + np.where(at > whole - zero, 1, -1), whole)
        return np.clip(other, limits.min, limits.max).astype(quantised.dtype)

    def _known(self) -> dict[str, Array]:
        """Constants, inputs, and what is computed: constants may be operators, too."""
        return self.constants | dict(self.feed) | self.near[0]

    def _ties(self, name: str) -> tuple[Array, Array] | None:
        """(Floats that become `name`, in steps; whether rounding moves them across a tie); None where it has several
        scales, or none."""
        node = self.quantisers.get(name)
        if node is None or not self.near or node.input[0] not in self.near[0]:
            return None  # also where an input is quantised: it is what it is
        known = self._known()
        real, scale = known[node.input[0]], known[node.input[1]]
        if scale.size != 1:
            return None
        step = float(scale.reshape(()))
        at = real.astype(np.float64) / step
        allowed = self._allowed(node.input[0], real) / step + 2.0**-23 * np.abs(at)
        with np.errstate(invalid="ignore"):
            return at, np.abs(at - np.floor(at) - 0.5) <= allowed  # what the division rounds is part of it


def _kind(array: Array) -> Array:
    """FINITE, PLUS or MINUS for infinities, or NONE, of each element."""
    return np.where(np.isfinite(array), FINITE, np.where(np.isnan(array), NONE, np.where(array > 0, PLUS, MINUS)))


def _distance(a: Array, b: Array) -> Array:
    with np.errstate(invalid="ignore"):
        distance: Array = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return distance


def _of_rounding(expected: Array, exact: Array) -> Array:
    """Where onnxruntime's result is so near to the exact one that it means the same."""
    near: Array = _distance(expected, exact) <= LIKENESS * np.max(np.abs(exact), initial=0.0)
    return near
