"""Operators with random attributes give onnxruntime's results, with constant and with run-time inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from oracle import opened
from thorough import paired, some

import celosia
from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.shape_rules import broadcast, slice_positions
from celosia.driver.runtime import Runtime

Array = NDArray[Any]
Inputs = Sequence[Array | None]
OPSETS = {"": 21, "com.microsoft": 1}
FLOATS, INTEGERS = (np.float32, np.float64), (np.int32, np.int64)
SPECIAL = np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 1, -1, 1e30])


class Draw:
    """Draws random numbers, sizes and tensors."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def int(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def choose(self, *choices: Any) -> Any:
        return choices[self.int(0, len(choices) - 1)]

    def shape(self, low: int = 1, high: int = 4, empty: float = 0.0) -> tuple[int, ...]:
        return tuple(0 if self.rng.random() < empty else self.int(1, 5) for _ in range(self.int(low, high)))

    def floats(self, *shape: int, kind: Any = np.float32) -> Array:
        return np.asarray(self.rng.standard_normal(shape) * 3).astype(kind)

    def special(self, *shape: int) -> Array:
        """Draw floats of which about 30% are special, such as NaN, infinity or zero."""
        return np.where(self.rng.random(shape) < 0.3, self.rng.choice(SPECIAL, shape), self.floats(*shape))

    def ints(self, *shape: int, kind: Any = np.int64, wide: bool = False) -> Array:
        info = np.iinfo(kind)
        return self.rng.integers(
            *((info.min, info.max) if wide else (max(info.min, -9), 9)), shape, kind, endpoint=True
        )

    def counted(self, axis: int, rank: int) -> int:
        """Return the axis, or the same axis counted from the end."""
        return self.choose(axis, axis - rank)


def one_node(
    op: str, inputs: Inputs, attrs: dict[str, Any], fixed: Sequence[int], outputs: int, opset: int, domain: str
) -> onnx.ModelProto:
    """Return a model of one node. fixed: numbers of the inputs that are constants."""
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(inputs)]
    fed = [(name, x) for k, (name, x) in enumerate(zip(names, inputs)) if x is not None and k not in fixed]
    graph = helper.make_graph(
        [helper.make_node(op, names, [f"o{k}" for k in range(outputs)], domain=domain, **attrs)], "g",
        [helper.make_tensor_value_info(name, _type(x), x.shape) for name, x in fed],
        [onnx.ValueInfoProto(name=f"o{k}") for k in range(outputs)],
        [numpy_helper.from_array(x, f"i{k}") for k, x in enumerate(inputs) if k in fixed and x is not None],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _type(x: Array) -> int:
    return TensorProto.STRING if x.dtype.kind == "O" else helper.np_dtype_to_tensor_dtype(x.dtype)


def by_onnxruntime(model: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    session = opened(model)
    outputs: list[Array] = session.run(None, feed)
    return outputs


def check(
    op: str, inputs: Inputs, attrs: dict[str, Any] | None = None, *, fixed: Sequence[int] = (), outputs: int = 1,
    opset: int = 21, domain: str = "", rtol: float = 0.0, atol: float = 0.0,
) -> None:  # fmt: skip
    """Compare the compiled model and the host operator with onnxruntime.

    Integers must be equal, floats within `rtol` and `atol`.
    """
    model = one_node(op, inputs, attrs or {}, fixed, outputs, opset, domain)
    feed = {f"i{k}": x for k, x in enumerate(inputs) if x is not None and k not in fixed}
    expected = by_onnxruntime(model, feed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = Runtime(celosia.compile(model, "tiny")).run(feed).outputs
        sized = execute(
            parse(model.graph.node[0], {"": opset, "com.microsoft": 1}),
            {f"i{k}": x for k, x in enumerate(inputs) if x is not None},
        )
    label = f"{op} {attrs} of {[x if x is None or x.size < 9 else (x.dtype, x.shape) for x in inputs]}"
    for number, wanted in enumerate(expected):
        for actual in (results[f"o{number}"], np.asarray(sized[number])):
            assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), label
            if wanted.dtype.kind == "f":
                np.testing.assert_allclose(actual, wanted, rtol, atol, err_msg=label)
            else:
                np.testing.assert_array_equal(actual, wanted, err_msg=label)


# Reductions -------------------------------------------------------------------------------------------------------

REDUCTIONS = ("Sum", "SumSquare", "L1", "L2", "LogSum", "LogSumExp", "Max", "Min", "Mean", "Prod")


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions_over_no_axes_reduce_each_element_alone(kind: str) -> None:
    x, none = Draw(0).floats(2, 3), np.zeros(0, np.int64)
    for inputs, fixed in (([x], ()), ([x, None], ()), ([x, none], (1,)), ([x, none], ())):
        check(f"Reduce{kind}", inputs, {"noop_with_empty_axes": 1}, fixed=fixed, rtol=1e-6)


@pytest.mark.parametrize("rounds", some([8, 100], [8]))
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions(kind: str, rounds: int) -> None:
    d = Draw(REDUCTIONS.index(kind))
    for _ in range(rounds):
        shape = d.shape(1, 4)
        x = d.floats(*shape, kind=d.choose(*FLOATS)) if d.int(0, 1) else d.ints(*shape, kind=d.choose(*INTEGERS))
        x = np.abs(x) + 1 if kind == "LogSum" and x.dtype.kind == "f" else x
        axes = [d.counted(int(axis), len(shape)) for axis in d.rng.permutation(len(shape))[: d.int(0, len(shape))]]
        attrs = {"keepdims": d.int(0, 1), "noop_with_empty_axes": d.int(0, 1)}
        check(f"Reduce{kind}", [x, np.array(axes, np.int64)], attrs, fixed=d.choose((), (1,)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), paired(REDUCTIONS, INTEGERS))
def test_reductions_of_integers_saturate(kind: str, dtype: Any) -> None:
    top = np.iinfo(dtype).max
    for row in ([top, 1], [top, top, top], [-top - 1, -1], [7, -2], [-7, 2], [0, 0], [5, 4, 4, 4, 4, 4], [9] * 20):
        check(f"Reduce{kind}", [np.array([row], dtype), np.array([1])], fixed=(1,))


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions_of_nothing(kind: str) -> None:
    for axis in (0, 1):
        check(f"Reduce{kind}", [np.zeros((2, 0), np.float32), np.array([axis])], fixed=(1,))


# Elements in other places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some(range(4), [0]))
def test_slices(seed: int) -> None:
    """Slices may have starts, ends and steps far outside of the tensor, up to the limits of int64."""
    d = Draw(seed)
    for _ in range(25):
        shape = d.shape(1, 3, empty=0.05)
        kind = d.choose(np.int32, np.int64)
        far = (np.iinfo(kind).min, np.iinfo(kind).min + 1, np.iinfo(kind).max, np.iinfo(kind).max - 1)
        axes = d.rng.permutation(len(shape))[: d.int(1, len(shape))]

        def place(axis: int, shape: tuple[int, ...] = shape, far: tuple[int, ...] = far) -> int:
            n = shape[axis]
            return int(d.choose(*far, 0, 1, -1, -2, n - 1, n, n + 1, n + 100, -n, -n - 1, -n - 100))

        starts, ends = ([place(axis) for axis in axes] for _ in range(2))
        steps = [d.choose(1, 1, 2, -1, -1, -2, 3, -3, far[0], far[2]) for _ in axes]
        given = [d.counted(int(axis), len(shape)) for axis in axes]
        lists = [np.array(each, kind) for each in (starts, ends, given, steps)]
        check("Slice", [d.floats(*shape), *lists], fixed=d.choose((), (1, 2, 3, 4)))


def test_what_a_slice_takes_is_numpys_inside_of_the_axis() -> None:
    for n in range(5):
        for step in (-3, -1, 1, 2):
            for start in range(-n, n + 3):
                for end in range(-n - 3, n + 3):
                    assert list(slice_positions(n, start, end, step)) == list(range(n)[start:end:step])


def test_sizes_broadcast_as_numpys_do() -> None:
    d = Draw(3)
    for _ in range(200):
        shapes = [tuple(d.choose(0, 1, 1, 2, 3) for _ in range(d.int(0, 4))) for _ in range(d.int(1, 3))]
        try:
            expected = np.broadcast_shapes(*shapes)
        except ValueError:
            with pytest.raises(ValueError, match="do not broadcast"):
                broadcast(*shapes)
            continue
        assert broadcast(*shapes) == expected


def test_slices_on_the_accelerator() -> None:
    """A Slice whose rows and columns begin before the image gives a view of the same bytes."""
    text = """<ir_version: 9, opset_import: ["" : 17]> g (float[1, 4, 6, 6] x) => (float[1, 4, 5, 5] y)
        <float s = {0.1}, int8 z = {0}, int64[2] a = {-100, 1},
         int64[2] b = {5, 9223372036854775807}, int64[2] c = {2, 3}> {
            q = QuantizeLinear(x, s, z) t = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s, z)
            k = Conv(t, v) l = QuantizeLinear(k, s, z) m = DequantizeLinear(l, s, z) n = Slice(m, a, b, c)
            o = QuantizeLinear(n, s, z) p = DequantizeLinear(o, s, z) r = Conv(p, v) u = QuantizeLinear(r, s, z)
            y = DequantizeLinear(u, s, z) }"""
    model = onnx.parser.parse_model(text)
    d = Draw(0)
    model.graph.initializer.append(numpy_helper.from_array(d.ints(4, 4, 1, 1, kind=np.int8), "w"))
    x = d.floats(1, 4, 6, 6)
    program = celosia.compile(model, "tiny")
    assert {row["place"] for row in program.placements if row["op"] == "Slice"} == {"free"}
    (expected,) = by_onnxruntime(model, {"x": x})
    np.testing.assert_array_equal(Runtime(program)(x), expected)


@pytest.mark.parametrize("rounds", some([8, 60], [8]))
@pytest.mark.parametrize("op", ["Trilu", "CumSum", "OneHot", "Pad", "ScatterElements", "ScatterND", "GatherND"])
def test_moves(op: str, rounds: int) -> None:
    d = Draw(5)
    for _ in range(rounds):
        check(op, *MOVES[op](d))


def _trilu(d: Draw) -> tuple[list[Array], dict[str, Any]]:
    k = d.choose(d.int(-7, 7), 2**63 - 1, -(2**63))
    return [d.floats(*d.shape(2, 3)), np.array(k, np.int64)], {"upper": d.int(0, 1)}


def _cumulative(d: Draw) -> tuple[list[Array], dict[str, Any]]:
    shape = d.shape(1, 3, empty=0.2)
    axis = d.counted(d.int(0, len(shape) - 1), len(shape))
    return [d.ints(*shape), np.array(axis, np.int32)], {"exclusive": d.int(0, 1), "reverse": d.int(0, 1)}


def _one_hot(d: Draw) -> tuple[list[Array], dict[str, Any]]:
    depth, indices = d.int(1, 5), d.ints(*d.shape(1, 3))
    return [indices, np.array(depth), np.float32([2, 5])], {"axis": d.int(-indices.ndim - 1, indices.ndim)}


def _pad(d: Draw) -> tuple[list[Array], dict[str, Any]]:
    x, mode = d.floats(*d.shape(1, 3)), d.choose("constant", "edge", "reflect")
    if mode == "constant":  # which may cut more than there is
        before = [d.int(-6, 4) for _ in x.shape]
        pads = [*before, *(max(d.int(-6, 6), -b - n) for b, n in zip(before, x.shape))]
    else:
        pads = [d.int(0, 3 if mode == "edge" else n - 1) if n > 1 else 0 for n in (*x.shape, *x.shape)]
    return [x, np.array(pads)], {"mode": mode}


def _scatter_elements(d: Draw) -> tuple[list[Array], dict[str, Any]]:
    x = d.floats(*d.shape(1, 3))
    axis = d.int(0, x.ndim - 1)
    indices = np.stack([d.rng.permutation(x.shape[axis]) for _ in range(x.size // x.shape[axis])], -1)
    indices = np.moveaxis(indices.reshape(x.shape[axis], *np.delete(x.shape, axis)), 0, axis)
    attrs = {"axis": axis, "reduction": d.choose("none", "add", "mul", "max", "min")}
    return [x, indices - x.shape[axis] * d.ints(*x.shape, kind=np.int64).clip(0, 1), d.floats(*x.shape)], attrs


def _scatter_nd(d: Draw) -> tuple[list[Array], dict[str, Any]]:
    x, depth = d.floats(*d.shape(1, 3)), 1
    indices = d.rng.integers(-x.shape[0], x.shape[0], (d.int(1, 4), depth))
    return [x, indices, d.floats(len(indices), *x.shape[1:])], {"reduction": d.choose("add", "max", "min")}


def _gather_nd(d: Draw) -> tuple[list[Array], dict[str, Any]]:
    x = d.floats(*d.shape(2, 4))
    depth = d.int(1, x.ndim)
    return [x, np.stack([d.rng.integers(-n, n, (2, 3)) for n in x.shape[:depth]], -1)], {}


MOVES: dict[str, Callable[[Draw], tuple[list[Array], dict[str, Any]]]] = {
    "Trilu": _trilu, "CumSum": _cumulative, "OneHot": _one_hot, "Pad": _pad, "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd, "GatherND": _gather_nd,
}  # fmt: skip


# Elements alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [False, True])
def test_clip_by_nan(constant: bool) -> None:
    for low, high in ((np.nan, 1), (-1, np.nan), (np.nan, np.nan), (1, -1)):
        bounds = [np.array(bound, np.float32) for bound in (low, high)]
        check("Clip", [SPECIAL, *bounds], fixed=(1, 2) if constant else ())


@pytest.mark.parametrize("kind", [*INTEGERS, np.float64, np.int8, np.uint8])
def test_what_is_shrunk_is_a_float_between(kind: Any) -> None:
    d = Draw(2)
    x = d.ints(40, kind=kind) * 90_000_001 if kind in INTEGERS else d.floats(40)
    x = (np.abs(x) if kind is np.uint8 else x).astype(kind)
    for limit, bias in ((0.6, 0.2), (5.0, 3.7), (1.0, 1.0)):
        check("Shrink", [x], {"lambd": limit, "bias": bias})


def test_remainders_of_floats() -> None:
    d = Draw(1)
    x, y = d.special(300), d.special(300)
    check("Mod", [x, y], {"fmod": 1})


def test_the_range_of_nothing() -> None:
    for x in (np.zeros(4), np.full(4, 3.0), np.full(4, -3.0), np.zeros((0, 3))):
        check("DynamicQuantizeLinear", [x.astype(np.float32)], outputs=3)


# Strings ----------------------------------------------------------------------------------------------------------


def strings(*texts: str) -> Array:
    return np.array(texts, object)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.bool_, np.int8, np.uint8, np.int64, np.uint64])
def test_numbers_as_strings(kind: Any) -> None:
    if issubclass(kind, np.floating):
        with np.errstate(over="ignore"):
            known = np.array([0, -0.0, 1, 0.1, 1 / 3, 12345678, 1e8, 1e-5, 1e-4, 1e300, np.nan, np.inf, -np.inf], kind)
        x = np.concatenate([known, Draw(2).floats(50, kind=kind)])
    else:
        x = np.array([0, 1]) if kind is np.bool_ else np.array([np.iinfo(kind).min, 0, 7, np.iinfo(kind).max], kind)
    check("Cast", [x.astype(kind)], {"to": TensorProto.STRING})


@pytest.mark.parametrize("kind", some([1, 11, 10, 6, 7, 2, 3, 12, 13, 9], [1, 10, 7, 2, 9]))
def test_strings_as_numbers(kind: int) -> None:
    """A Cast parses the number at the beginning of a string as C does, and refuses strings that C does not parse."""
    texts = ("1", "-3", "1.5", " 2", "2 ", "1e3", "+5", "300", "-1", "1_0", "1.0", "1,5", "1f", "0x10", "-0", "0.5")
    for text in (*texts, "INF", "-inf", "NaN", "infinity", "", "abc", "99999999999999999999", "1e400", "."):
        model = one_node("Cast", [strings(text)], {"to": kind}, (), 1, 21, "")
        try:
            by_onnxruntime(model, {"i0": strings(text)})
        except Exception:
            with pytest.raises(ValueError, match="Cast"):
                Runtime(celosia.compile(model, "tiny"))(strings(text))
        else:
            check("Cast", [strings(text)], {"to": kind})


@pytest.mark.parametrize(("delimiter", "limit"), paired([None, "", " ", ",", "ab"], [None, -1, 0, 1, 2], 2))
def test_string_split(delimiter: str | None, limit: int | None) -> None:
    attrs = {name: value for name, value in (("delimiter", delimiter), ("maxsplit", limit)) if value is not None}
    for texts in (
        [""], ["  "], [" a  b "], ["a b c"], ["", "a b"], [], ["a,,b", ",", ""], ["\ta\nb\u00a0c"], ["ab", "aab"]
    ):  # fmt: skip
        check("StringSplit", [strings(*texts)], attrs, outputs=2)


# Loops without steps ----------------------------------------------------------------------------------------------

BODIES = {
    "declared": ("float[2, 3] o", "o = Identity(s)"), "of another type": ("int64 o", "o = Identity(i)"),
    "of an open size": ("int64[2, k] o", "o = NonZero(s)"), "undeclared": ("o", "o = Identity(s)"),
    "boolean": ("bool[2, 3] o", "o = Less(s, x)"), "strings": ("string[2, 3] o", "o = Cast<to = 8>(s)"),
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("steps, go", [(0, True), (3, False), (2, True)])
def test_what_a_loop_returns_without_steps(body: str, steps: int, go: bool) -> None:
    declared, made = BODIES[body]
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 17]>
        g (float[2, 3] x, int64 n, bool c) => (y, z) {{
            y, z = Loop(n, c, x) <body = b (int64 i, bool ci, float[2, 3] s) => (bool co, float[2, 3] so, {declared}) {{
                co = Identity(ci) so = Add(s, s) {made} }}> }}""")
    feed = {"x": np.ones((2, 3), np.float32), "n": np.array(steps), "c": np.array(go)}
    results = Runtime(celosia.compile(model, "tiny")).run(feed).outputs
    for name, expected in zip(("y", "z"), by_onnxruntime(model, feed)):
        assert (results[name].dtype, results[name].shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(results[name], expected)


# Empty tensors, and those of many dimensions ----------------------------------------------------------------------


@pytest.mark.parametrize("samples", ["0", "N"])
@pytest.mark.parametrize("first", ["Relu(x)", "MaxPool<kernel_shape = [2, 2]>(x)", "Slice(x, none, none)"])
def test_no_samples(samples: str, first: str) -> None:
    """A run of no samples gives empty outputs, also if the model may mix samples."""
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 17]>
        g (float[{samples}, 3, 8, 8] x) => (y) <int64[1] none = {{0}}>
        {{ a = {first} c = Conv(a, w) p = GlobalAveragePool(c) y = Flatten(p) }}""")
    model.graph.initializer.append(numpy_helper.from_array(Draw(0).floats(4, 3, 3, 3), "w"))
    x = np.zeros((0, 3, 8, 8), np.float32)
    (expected,) = by_onnxruntime(model, {"x": x})
    (actual,) = Runtime(model, config="tiny").run({"x": x}).outputs.values()
    assert actual.shape == expected.shape == (0, 4)


@pytest.mark.parametrize("body", ["y = Relu(x)", "y = Add(x, x)", "y = Expand(x, s)", "y = Transpose(x)"])
@pytest.mark.parametrize("rank", [33, 40, 64])
def test_tensors_of_many_dimensions(rank: int, body: str) -> None:
    dims = [1] * (rank - 2) + [2, 3]
    sizes = ",".join(map(str, dims))
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> g (float[{sizes}] x) => (y)'
        f" <int64[{rank}] s = {{{sizes}}}> {{ {body} }}"
    )
    x = Draw(0).floats(*dims)
    np.testing.assert_array_equal(Runtime(celosia.compile(model, "tiny"))(x), by_onnxruntime(model, {"x": x})[0])


@pytest.mark.parametrize("body", ["y = Relu(x)", "z = Unsqueeze(x, o) y = Squeeze(z, o)"])
def test_tensors_of_too_many_dimensions_are_refused(body: str) -> None:
    sizes = ",".join(["1"] * (65 if "Relu" in body else 64))
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> g (float[{sizes}] x) => (y) <int64[1] o = {{0}}> {{ {body} }}'
    )
    with pytest.raises(ModelError, match=r"65 dimensions.*64"):
        celosia.compile(model, "tiny")


# onnxruntime's own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some(range(8), range(2)))
def test_attention_of_groups(seed: int) -> None:
    """GroupQueryAttention gives onnxruntime's results in first steps and in later ones.

    First steps have samples of any lengths; later ones one or several tokens, with or without room in the cache.
    """
    d = Draw(seed)
    for mode in ("first", "next", "cache", "more"):
        heads, size, batch = d.int(1, 3), d.choose(8, 16, 32), d.int(1, 3)
        attrs: dict[str, Any] = {"num_heads": heads * d.int(1, 3), "kv_num_heads": heads}
        steps, past = (d.int(1, 6), None) if mode == "first" else (1, d.int(3, 6))
        if mode == "more":
            batch, steps = 1, d.int(2, 4)
        total = {"first": steps, "cache": d.int(2, past or 2)}.get(mode, steps + (past or 0))
        ends = [total - 1 if mode in ("next", "more") or not b else d.int(0, total - 1) for b in range(batch)]
        query, width = attrs["num_heads"] * size, heads * size
        packed = bool(d.int(0, 1))
        inputs: list[Array | None] = [None] * 12
        inputs[0] = d.floats(batch, steps, query + 2 * width * packed) / 3
        if not packed:
            inputs[1:3] = [d.floats(batch, steps, width) / 3 for _ in range(2)]
        if past is not None:
            inputs[3:5] = [d.floats(batch, heads, past, size) / 3 for _ in range(2)]
        inputs[5:7] = np.array(ends, np.int32), np.array(d.choose(total, [total]), np.int32)
        if size >= 16 and d.int(0, 1):
            attrs |= {"do_rotary": 1, "rotary_interleaved": d.int(0, 1)}
            half = d.choose(8, size // 2)
            inputs[7:9] = [d.floats(32, half) / 3 for _ in range(2)]
            if d.int(0, 1):
                inputs[9] = d.rng.integers(0, 30, (batch, steps))
        if d.int(0, 1):
            inputs[10] = d.floats(d.choose(1, batch), d.choose(1, attrs["num_heads"]), steps, total)
        match d.int(0, 3):
            case 0:
                attrs["smooth_softmax"] = 1
            case 1:
                inputs[11] = d.floats(attrs["num_heads"])
        if mode != "first" and d.int(0, 1):  # padding that sees no key is undefined
            attrs["local_window_size"] = d.int(1, 5)
        elif d.int(0, 3) == 0:
            attrs["causal"] = 0
        attrs |= d.choose({}, {"softcap": 0.5}, {"scale": 0.3})
        check(
            "GroupQueryAttention", inputs, attrs, outputs=3, fixed=d.choose((), (6,)), domain="com.microsoft",
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize(
    "change, why",
    [
        ({"sliding_window_cache": 1}, "the attribute sliding_window_cache"),
        ({"num_heads": 3}, "3 heads of queries and 2 of keys"),
        ({"total": 9}, "2 steps of 2 samples that end at place 9"),
    ],
)
def test_attention_of_groups_refuses(change: dict[str, int], why: str) -> None:
    d = Draw(0)
    attrs = {"num_heads": 4, "kv_num_heads": 2} | {name: n for name, n in change.items() if name != "total"}
    total = np.array(change.get("total", 2), np.int32)
    inputs = [d.floats(2, 2, 32), d.floats(2, 2, 16), d.floats(2, 2, 16), None, None, np.int32([1, 1]), total]
    with pytest.raises(ModelError, match=why):
        celosia.compile(one_node("GroupQueryAttention", inputs, attrs, (6,), 3, 21, "com.microsoft"), "tiny")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gather_of_blocks_of_bytes(bits: int) -> None:
    d = Draw(bits)
    for _ in range(12):
        rows, width, size = d.int(1, 5), 16 * d.int(1, 5), d.choose(16, 32, 64)
        blocks = -(-width // size)
        zeros = d.rng.integers(0, 256, (rows, -(-blocks * bits // 8))).astype(np.uint8) if d.int(0, 1) else None
        scales = d.floats(rows, blocks, kind=d.choose(np.float16, np.float32))
        indices = d.rng.integers(-rows, rows, d.shape(0, 2)).astype(d.choose(*INTEGERS))
        data = d.rng.integers(0, 256, (rows, width * bits // 8)).astype(np.uint8)
        check(
            "GatherBlockQuantized", [data, indices, scales, zeros], {"bits": bits, "block_size": size},
            fixed=(0, 2) if zeros is None else (0, 2, 3), domain="com.microsoft",
        )  # fmt: skip


@pytest.mark.parametrize("kind, low", [(TensorProto.INT4, -8), (TensorProto.UINT4, 0)])
def test_gather_of_blocks_of_four_bits(kind: int, low: int) -> None:
    """GatherBlockQuantized gathers along and across the blocks; an index outside of the tensor gives zeros."""
    d = Draw(low + 8)
    for _ in range(12):
        shape, gathered, blocked = (d.int(2, 20), d.int(2, 70)), d.int(0, 1), d.int(0, 1)
        parts = [-(-n // 16) if axis == blocked else n for axis, n in enumerate(shape)]
        numbers = {"x": shape, "z": parts} if d.int(0, 1) else {"x": shape}
        node = helper.make_node(
            "GatherBlockQuantized", ["x", "i", "s", *list(numbers)[1:]], ["y"], domain="com.microsoft",
            gather_axis=gathered, quantize_axis=blocked - 2 * d.int(0, 1), block_size=16,
        )  # fmt: skip
        fixed = [
            helper.make_tensor(name, kind, dims, d.rng.integers(low, low + 16, dims).reshape(-1))
            for name, dims in numbers.items()
        ]
        indices = d.rng.integers(-shape[gathered], shape[gathered] + 2, (2, 3))
        graph = helper.make_graph(
            [node], "g", [helper.make_tensor_value_info("i", TensorProto.INT64, indices.shape)],
            [onnx.ValueInfoProto(name="y")], [*fixed, numpy_helper.from_array(d.floats(*parts), "s")],
        )  # fmt: skip
        opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        (expected,) = by_onnxruntime(model, {"i": indices})
        np.testing.assert_array_equal(Runtime(celosia.compile(model, "tiny"))(indices), expected)


def test_what_is_gathered_from_blocks_has_a_shape() -> None:
    """The shape of gathered blocks is known, so that an operator that reads them becomes a kernel."""
    d = Draw(0)
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> g (int64[1, 4] i) => (y)
        { e = com.microsoft.GatherBlockQuantized<block_size = 32>(w, i, s) r = Relu(e) y = MatMul(r, m) }"""
    model = onnx.parser.parse_model(text)
    weights = d.ints(3, 16, kind=np.uint8, wide=True), d.floats(3, 1), d.floats(32, 5)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in zip("wsm", weights))
    program = celosia.compile(model, "tiny")
    assert [type(step).__name__ for step in program.steps] == ["HostStep", "CpuStep"]
    assert program.macs_total == 4 * 32 * 5
    indices = np.array([[0, 2, 1, -1]])
    (expected,) = by_onnxruntime(model, {"i": indices})
    np.testing.assert_allclose(Runtime(program)(indices), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("shape", [(2, 5, 6, 7), (2, 5, 7), (0, 5, 6, 7), (1, 3, 3, 2, 4)])
@pytest.mark.parametrize("last", [0, 1])
def test_averages_of_images_with_channels_last(shape: tuple[int, ...], last: int) -> None:
    x = Draw(1).ints(*shape, kind=np.int8, wide=True)
    parameters = [np.float32(0.1), np.int8(3), np.float32(0.05), np.int8(-7)]
    inputs = [x, *map(np.asarray, parameters)]
    check("QLinearGlobalAveragePool", inputs, {"channels_last": last}, fixed=(1, 2, 3, 4), domain="com.microsoft")


def test_convolutions_and_pooling_with_channels_last() -> None:
    """QLinearConv and QLinearAveragePool compute with channels in the last axis."""
    d = Draw(1)
    s, z = np.asarray(np.float32(0.1)), np.asarray(np.int8(3))
    x, w = d.ints(2, 6, 6, 4, kind=np.int8, wide=True), d.ints(8, 4, 3, 3, kind=np.int8)
    window = {"kernel_shape": [2, 3], "pads": [1, 0, 0, 1]}
    last: dict[str, Any] = {"channels_last": 1}
    check("QLinearAveragePool", [x, s, z, s, z], {**last, **window}, fixed=(1, 2, 3, 4), domain="com.microsoft")
    inputs = [x, s, z, w, s, np.asarray(np.int8(0)), np.asarray(np.float32(3)), z]
    check("QLinearConv", inputs, last, fixed=range(1, 8), domain="com.microsoft")


@pytest.mark.parametrize("kept", [0, 1])
def test_a_mean_is_a_layer_whether_it_keeps_its_dimensions(kept: int) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 17]> g (float[2, 16, 7, 7] x) => (y)
        <float s = {{0.05}}, float t = {{0.02}}, int8 z = {{3}}> {{
            q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z)
            b = ReduceMean<axes = [-1, 2], keepdims = {kept}>(a)
            c = QuantizeLinear(b, t, z) y = DequantizeLinear(c, t, z) }}""")
    program = celosia.compile(model, "tiny")
    assert [row["place"] for row in program.placements if row["op"] == "QLinearMean"] == ["accelerator"]
    x = Draw(0).floats(2, 16, 7, 7)
    actual, (expected,) = Runtime(program)(x), by_onnxruntime(model, {"x": x})
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 0.02 * 1.0001  # a step, where a tie is near
    assert np.mean(actual != expected) < 0.1


@pytest.mark.parametrize("step", [-(2**63), -(2**63) + 1, 2**63 - 1, -(2**32)])
@pytest.mark.parametrize("way", ["initializer", "Constant", "Identity"])
def test_a_step_that_onnx_does_not_survive(step: int, way: str) -> None:
    """Extreme steps of a Slice never reach onnx's shape inference, which would read out of bounds or never end."""
    inputs = [np.ones(1, np.float32), *(np.array([each]) for each in (0, -5, 0, step))]
    model = one_node("Slice", inputs, {}, (1, 2, 3, 4), 1, 21, "")
    if way != "initializer":
        (last,) = [tensor for tensor in model.graph.initializer if tensor.name == "i4"]
        node = helper.make_node("Constant", [], ["i4"], value=last)
        if way == "Identity":
            node, last.name = helper.make_node("Identity", ["far"], ["i4"]), "far"
        else:
            model.graph.initializer.remove(last)
        model.graph.node.insert(0, node)
    sized = one_node("Slice", inputs, {}, (), 1, 21, "")
    (expected,) = by_onnxruntime(sized, {f"i{k}": x for k, x in enumerate(inputs)})
    np.testing.assert_array_equal(Runtime(celosia.compile(model, "tiny"))(inputs[0]), expected)


# What older opsets mean ------------------------------------------------------------------------------------------


def test_largest_over_several_axes_before_opset_13() -> None:
    d = Draw(90)
    for axis in (0, 1, 2, -1, -3):
        for opset in (11, 12, 13):
            check("Hardmax", [np.round(d.floats(2, 3, 4))], {"axis": axis}, opset=opset)


def test_no_axes_squeeze_all() -> None:
    x, none = Draw(91).floats(1, 3, 1), np.zeros(0, np.int64)
    for fixed in ((), (1,)):
        check("Squeeze", [x, none], fixed=fixed, opset=13)


@pytest.mark.parametrize("opset", [7, 10, 12, 13, 22])
def test_masks_of_dropout(opset: int) -> None:
    check("Dropout", [Draw(92).floats(2, 3)], {}, outputs=2, opset=opset)
