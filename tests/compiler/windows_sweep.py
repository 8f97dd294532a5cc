"""Compare celosia.compiler.program.host.shape_rules with onnxruntime on random attributes; count the differences.

    python -m tests.compiler.windows_sweep --count 10000 --whole 1000

Each case is one operator. Its output by the windows' numbers and plain numpy is compared with onnxruntime's; with
--whole, that of a compiled model, too, whose integer operators the functional simulator runs (Config tiny).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from celosia.compiler.compile import ModelError
from celosia.compiler.compile import compile as compile_model
from celosia.compiler.program.host.op import HostError
from celosia.compiler.program.host.shape_rules import (
    TransposedWindows,
    WindowError,
    Windows,
    transposed_windows,
    windows,
)
from celosia.driver.runtime import Runtime

from ..oracle import opened

Array = NDArray[Any]
CONVOLUTIONS = ("Conv", "ConvInteger", "QLinearConv")
TRANSPOSED = ("ConvTranspose", "MaxUnpool")
POOLS = ("MaxPool", "AveragePool", "QLinearAveragePool", "LpPool", "NhwcMaxPool")
OPERATORS = (*CONVOLUTIONS, *TRANSPOSED, *POOLS, "Col2Im")
OURS = ("a window of", "an output of")
"""Beginnings of sentences with which only Celosia refuses: windows larger than their input, outputs without elements.
"""


@dataclass(frozen=True)
class Case:
    """One operator with its input `x` and constants. kernel: the kernel's size if the constants define it."""

    op: str
    attrs: dict[str, Any]
    size: tuple[int, ...]
    x: Array
    constants: list[Array] = field(default_factory=list)
    kernel: tuple[int, ...] | None = None
    opset: int = 21
    outputs: int = 1

    def __str__(self) -> str:
        return f"{self.op} (opset {self.opset}, {self.x.dtype}) of {self.size}, kernel {self.kernel}: {self.attrs}"

    def model(self) -> onnx.ModelProto:
        """Return a model of this operator."""
        names = [f"c{number}" for number in range(len(self.constants))]
        outputs = [f"y{number}" for number in range(self.outputs)]
        domain = "com.microsoft" if self.op in ("QLinearAveragePool", "NhwcMaxPool") else ""
        node = helper.make_node(self.op, ["x", *names], outputs, domain=domain, **self.attrs)
        kind = helper.np_dtype_to_tensor_dtype(self.x.dtype)
        kinds = [TensorProto.INT32 if self.op == "ConvInteger" else kind, TensorProto.INT64]
        graph = helper.make_graph(
            [node], self.op, [helper.make_tensor_value_info("x", kind, self.x.shape)],
            [helper.make_tensor_value_info(name, element_type, None) for name, element_type in zip(outputs, kinds)],
            [numpy_helper.from_array(array, name) for array, name in zip(self.constants, names)],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


# Random cases ----------------------------------------------------------------------------------------------------


def random_case(rng: np.random.Generator, op: str) -> Case:
    """Draw attributes, most of which onnxruntime accepts."""
    n = int(rng.integers(1, 4 if op != "Col2Im" else 3))
    size, kernel = _ints(rng, 1, 8, n), _ints(rng, 1, 5, n)
    opset = int(rng.choice({"AveragePool": [11, 18, 19, 22], "LpPool": [18, 22], "MaxPool": [12, 22]}.get(op, [21])))
    attrs: dict[str, Any] = {}
    if rng.random() < 0.8:
        attrs["strides"] = list(_ints(rng, 1, 5, n))
    auto = str(rng.choice(["", "", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if auto and op not in ("MaxUnpool", "Col2Im"):
        attrs["auto_pad"] = auto
    if auto in ("", "NOTSET") and rng.random() < 0.7:
        attrs["pads"] = [int(rng.integers(0, k)) for k in (*kernel, *kernel)]
    dilates = n > 1 or op != "Col2Im"  # onnxruntime lets dilated windows of one dimension run into the next channel
    dilates &= op not in ("QLinearAveragePool", "MaxUnpool") and not (op == "AveragePool" and opset < 19)
    if dilates and rng.random() < 0.4 and not (auto.startswith("SAME") and op in CONVOLUTIONS):
        attrs["dilations"] = list(_ints(rng, 1, 4, n))
    if op in POOLS and rng.random() < 0.5:
        attrs["ceil_mode"] = 1
    if op.endswith("AveragePool") and rng.random() < 0.6:
        attrs["count_include_pad"] = 1
    if op in (*POOLS, "MaxUnpool"):
        attrs["kernel_shape"] = list(kernel)
    return _MADE.get(op, _pool)(rng, op, attrs, size, kernel, opset)


def _ints(rng: np.random.Generator, low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(int(value) for value in rng.integers(low, high, count))


def _bytes(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def _pool(rng: np.random.Generator, op: str, attrs: dict[str, Any], size: Any, kernel: Any, opset: int) -> Case:
    byte, shape = rng.choice([np.int8, np.uint8]), (2, 3, *size)
    x = _bytes(rng, byte, *shape)
    if op == "QLinearAveragePool":
        one, zeros = np.float32(rng.choice([0.5, 1.0])), _bytes(rng, byte, 2)
        return Case(op, attrs, size, x, [np.float32(1), zeros[0], one, zeros[1]])
    if op == "NhwcMaxPool":
        return Case(op, attrs, size, np.moveaxis(x, 1, -1).copy())
    if op == "LpPool":
        attrs["p"] = int(rng.integers(1, 3))
    if op == "MaxPool" and rng.random() < 0.3:
        attrs["storage_order"] = int(rng.integers(2))
        return Case(op, attrs, size, x.astype(np.float32) if rng.random() < 0.5 else x, [], None, opset, 2)
    in_bytes = op == "MaxPool" and rng.random() < 0.6
    return Case(op, attrs, size, x if in_bytes else x.astype(np.float32), [], None, opset)


def _convolution(rng: np.random.Generator, op: str, attrs: dict[str, Any], size: Any, kernel: Any, opset: int) -> Case:
    x, w = _bytes(rng, np.uint8, 1, 3, *size), rng.integers(-3, 4, (2, 3, *kernel)).astype(np.int8)
    if op == "Conv":
        return Case(op, attrs, size, x.astype(np.float32), [w.astype(np.float32)], kernel)
    if op == "ConvInteger":
        return Case(op, attrs, size, x, [w], kernel)
    one, zeros = np.float32(1), _bytes(rng, np.uint8, 2)
    return Case(op, attrs, size, x, [one, zeros[0], w, one, np.int8(0), np.float32(16), zeros[1]], kernel)


def _transposed(rng: np.random.Generator, op: str, attrs: dict[str, Any], size: Any, kernel: Any, opset: int) -> Case:
    x, w = rng.integers(-9, 10, (1, 3, *size)), rng.integers(-3, 4, (3, 2, *kernel))
    stride, dilation = (attrs.get(name, [1] * len(size)) for name in ("strides", "dilations"))
    if rng.random() < 0.4:
        attrs["output_padding"] = [int(rng.integers(0, max(pair))) for pair in zip(stride, dilation)]
    if "pads" not in attrs and rng.random() < 0.3:
        full = transposed_windows({**attrs, "auto_pad": "NOTSET"}, size, kernel).out
        attrs["output_shape"] = [max(1, end - int(rng.integers(0, s))) for end, s in zip(full, stride)]
    return Case(op, attrs, size, x.astype(np.float32), [w.astype(np.float32)], kernel)


def _unpool(rng: np.random.Generator, op: str, attrs: dict[str, Any], size: Any, kernel: Any, opset: int) -> Case:
    try:
        room = 6 * int(np.prod(transposed_windows(attrs, size).out))
    except WindowError:
        room = 1
    x = rng.integers(1, 99, (2, 3, *size)).astype(np.float32)
    places = rng.permutation(max(room, x.size))[: x.size]
    return Case(op, attrs, size, x, [np.minimum(places, room - 1).reshape(x.shape).astype(np.int64)])


def _columns(rng: np.random.Generator, op: str, attrs: dict[str, Any], size: Any, kernel: Any, opset: int) -> Case:
    try:
        count = int(np.prod(windows(op, attrs, size, kernel).out))
    except WindowError:
        count = 1
    x = rng.integers(-9, 10, (2, 3 * int(np.prod(kernel)), count)).astype(np.float32)
    return Case(op, attrs, size, x, [np.array(size, np.int64), np.array(kernel, np.int64)], kernel)


_MADE: dict[str, Callable[..., Case]] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution), "ConvTranspose": _transposed, "MaxUnpool": _unpool, "Col2Im": _columns,
}  # fmt: skip


# Three ways to compute them --------------------------------------------------------------------------------------


def by_onnxruntime(case: Case) -> list[Array] | None:
    """Return onnxruntime's outputs, or None if it refuses the model."""
    try:
        session = opened(case.model(), optimised=False)
        return list(session.run(None, {"x": case.x}))
    except Exception:  # onnxruntime raises several unrelated classes
        return None


def by_windows(case: Case) -> list[Array]:
    """Return the outputs as sums and maxima over the elements that `windows` returns. Raises WindowError."""
    if case.op in TRANSPOSED:
        transposed = transposed_windows(case.attrs, case.size, case.kernel)
        return [_spread_out(case, transposed)] if case.op == "ConvTranspose" else [_unpooled(case, transposed)]
    geometry = windows(case.op, case.attrs, case.size, case.kernel)
    if case.op == "Col2Im":
        return [_from_columns(case, geometry)]
    if case.op in CONVOLUTIONS:
        return [_convolved(case, geometry)]
    x = np.moveaxis(case.x, -1, 1) if case.op == "NhwcMaxPool" else case.x
    y = _pooled(case, geometry, x)
    return [np.moveaxis(y[0], 1, -1), *y[1:]] if case.op == "NhwcMaxPool" else y


def by_compiler(case: Case, accelerator: bool = True) -> list[Array]:
    """Return the outputs of the compiled model.

    Raises ModelError if the compiler refuses the model, and HostError if the host runtime does.
    """
    program = compile_model(case.model(), "tiny", accelerator=accelerator)
    return list(Runtime(program).run({"x": case.x}).outputs.values())


def by_cpu(case: Case) -> list[Array]:
    """Return the outputs of the compiled model without the accelerator."""
    return by_compiler(case, accelerator=False)


def _places(geometry: Windows, at: Sequence[int]) -> list[list[int]]:
    """Return, for each axis, the elements of the input that the window at `at` covers."""
    return [[t for t in geometry.taps(axis, o) if 0 <= t < geometry.size[axis]] for axis, o in enumerate(at)]


def _pooled(case: Case, geometry: Windows, x: Array) -> list[Array]:
    n, lead = len(case.size), x.shape[:2]
    y, indices = np.zeros((*lead, *geometry.out)), np.zeros((*lead, *geometry.out), np.int64)
    empty = float(np.finfo(np.float32).min) if x.dtype == np.float32 else np.iinfo(x.dtype).min
    numbers = np.arange(x[0, 0].size)
    by_columns = case.attrs.get("storage_order", 0)
    numbers = numbers.reshape(case.size[::-1]).T if by_columns else numbers.reshape(case.size)
    for at in np.ndindex(*geometry.out):
        places = _places(geometry, at)
        window = x[(slice(None), slice(None), *np.ix_(*places))].reshape(*lead, -1).astype(np.float64)
        counted = np.prod([geometry.divisors(axis)[o] for axis, o in enumerate(at)])
        here = (..., *at)
        if case.op == "LpPool":
            y[here] = (np.abs(window) ** case.attrs["p"]).sum(-1) ** (1 / case.attrs["p"])
        elif case.op == "AveragePool":
            y[here] = window.sum(-1) / max(counted, 1)
        elif case.op == "QLinearAveragePool":
            _, zero_x, scale, zero_y = (array.astype(np.float32) for array in case.constants)
            total = (window - zero_x).sum(-1).astype(np.float32)
            rounded = np.rint(total / max(counted, 1) / scale + zero_y)
            if geometry.is_global:
                rounded = np.rint(total * (1 / (scale * np.float32(counted)))) + zero_y
            info = np.iinfo(x.dtype)
            y[here] = np.clip(rounded, info.min, info.max)
        else:
            y[here] = window.max(-1, initial=empty)
            chosen = numbers[np.ix_(*places)].reshape(-1)
            indices[here] = chosen[window.argmax(-1)] if chosen.size else -sum(numbers.strides) // numbers.itemsize
    indices += np.arange(lead[0] * lead[1]).reshape(*lead, *[1] * n) * numbers.size
    return [y.astype(x.dtype), indices][: case.outputs]


def _convolved(case: Case, geometry: Windows) -> Array:
    x, w = case.x.astype(np.float64), case.constants[2 if case.op == "QLinearConv" else 0].astype(np.float64)
    if case.op == "QLinearConv":
        x -= float(case.constants[1])
    y = np.zeros((len(x), len(w), *geometry.out))
    for at, tap in ((at, tap) for at in np.ndindex(*geometry.out) for tap in np.ndindex(*w.shape[2:])):
        place = [geometry.taps(axis, o)[k] for axis, (o, k) in enumerate(zip(at, tap))]
        if all(0 <= p < size for p, size in zip(place, case.size)):
            y[(..., *at)] += x[(..., *place)] @ w[(..., *tap)].T
    if case.op != "QLinearConv":
        return y.astype(np.int32 if case.op == "ConvInteger" else np.float32)
    return np.clip(np.rint(y / 16) + float(case.constants[6]), 0, 255).astype(np.uint8)


def _spread_out(case: Case, to: TransposedWindows) -> Array:
    w = case.constants[0]
    y = np.zeros((len(case.x), w.shape[1], *to.out), np.float32)
    for at, tap in ((at, tap) for at in np.ndindex(*case.size) for tap in np.ndindex(*w.shape[2:])):
        place = [i * s + k * d - b for i, s, k, d, b in zip(at, to.stride, tap, to.dilation, to.before)]
        if all(0 <= p < size for p, size in zip(place, to.out)):
            y[(..., *place)] += case.x[(..., *at)] @ w[(..., *tap)]
    return y


def _unpooled(case: Case, to: TransposedWindows) -> Array:
    y = np.zeros(case.x.shape[:2] + to.out, np.float32)
    y.reshape(-1)[case.constants[0].reshape(-1)] = case.x.reshape(-1)
    return y


def _from_columns(case: Case, geometry: Windows) -> Array:
    x = case.x.reshape(len(case.x), 3, *geometry.kernel, *geometry.out)
    y = np.zeros((len(x), 3, *case.size), np.float32)
    for at, tap in ((at, tap) for at in np.ndindex(*geometry.out) for tap in np.ndindex(*geometry.kernel)):
        place = [geometry.taps(axis, o)[k] for axis, (o, k) in enumerate(zip(at, tap))]
        if all(0 <= p < size for p, size in zip(place, case.size)):
            y[(..., *place)] += x[(..., *tap, *at)]
    return y


Way = Callable[[Case], list[Array]]

# Comparison ------------------------------------------------------------------------------------------------------


def compare(case: Case, way: Way) -> str:
    """Return "equal", "both refuse", "it refuses" (only onnxruntime), "we refuse ...", or "different ..."."""
    expected = by_onnxruntime(case)
    try:
        outputs = way(case)
    except (WindowError, ModelError, HostError) as error:
        return "both refuse" if expected is None else f"we refuse: {error}"
    if expected is None:
        return "it refuses"
    step = 1 if way is by_compiler and case.op == "QLinearAveragePool" else 0  # ties: docs/numerics.md
    for a, b in zip(outputs, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"different: {a.dtype}{a.shape} for {b.dtype}{b.shape}"
        if not (np.allclose(a, b, rtol=1e-5, atol=1e-4) if a.dtype == np.float32 else _near(a, b, step)):
            return f"different: {np.count_nonzero(a != b)} of {a.size} elements"
    return "equal"


def _near(a: Array, b: Array, step: int) -> bool:
    return bool(np.all(np.abs(a.astype(np.int64) - b.astype(np.int64)) <= step))


def cases(count: int, seed: int, operators: Sequence[str] = OPERATORS) -> Iterator[Case]:
    """Yield `count` random cases."""
    rng = np.random.default_rng(seed)
    return (random_case(rng, operators[number % len(operators)]) for number in range(count))


def sweep(all_: Iterator[Case], way: Way = by_windows) -> tuple[Counter[str], list[str]]:
    """Compare all cases. Returns how often each verdict occurred, and the failures.

    Failures are differences, and cases that only Celosia refuses without a known reason.
    """
    counts, wrong = Counter[str](), []
    for case in all_:
        verdict = compare(case, way)
        kind, _, why = verdict.partition(": ")
        counts[f"{case.op}: {kind}"] += 1
        if kind == "different" or (kind == "we refuse" and not any(reason in why for reason in OURS)):
            wrong.append(f"{case}: {verdict}")
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--whole", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, count, way in (
        ("windows", args.count, by_windows), ("compiled", args.whole, by_compiler), ("on the CPU", args.whole, by_cpu),
    ):  # fmt: skip
        counts, wrong = sweep(cases(count, args.seed), way)
        print(name, *(f"  {kind:40} {count}" for kind, count in sorted(counts.items())), *wrong, sep="\n")


if __name__ == "__main__":
    main()
