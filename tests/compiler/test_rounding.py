"""Normalisations in integers under rounding="correct" round the real results, as sim/functional/norm.py does."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.compose
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import celosia
from celosia.compiler import expr as T
from celosia.compiler import numerics
from celosia.compiler.compile import ModelError
from celosia.compiler.cpu.kernels import compile_function
from celosia.compiler.expr.schedule import create_schedule
from celosia.compiler.program import Program, ProgramError
from celosia.compiler.selfcheck.check_rewriting import RewriteError
from celosia.driver.accuracy.compare import compare
from celosia.hw.spec.config import PRESETS
from celosia.sim.functional.norm import inverse_root, normalise_rows

from ..oracle import opened

SX, SY = 0.05, 0.03


def norm_model(
    op: str, shape: tuple[int, ...], dtype: str = "int8", zero: int = 0, gamma: Any = None, beta: Any = None,
    epsilon: float = 1e-5, axis: int = -1, sx: float = SX, sy: float = SY,
) -> onnx.ModelProto:  # fmt: skip
    """Return a model that dequantises x, normalises it and quantises y. gamma, beta: None means random values."""
    random, kind = np.random.default_rng(shape[-1]), getattr(TensorProto, dtype.upper())
    rows = {"gamma": np.exp(0.3 * random.normal(size=shape[-1])), "beta": 0.4 * random.normal(size=shape[-1])}
    rows |= {name: row for name, row in (("gamma", gamma), ("beta", beta)) if row is not None}
    numbers = {"sx": np.float32(sx), "sy": np.float32(sy), "z": np.array(zero, dtype)}
    numbers |= {
        name: np.clip(row, *((0.2, 9) if gamma is None and name == "gamma" else (-99, 99)))
        for name, row in rows.items()
    }
    constants = [
        numpy_helper.from_array(np.asarray(array, array.dtype if name in "sxsyz" else np.float32), name)
        for name, array in numbers.items()
    ]
    operands = ["a", "gamma", "beta"] if op == "LayerNormalization" else ["a", "gamma"]
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "sx", "z"], ["a"]),
        helper.make_node(op, operands, ["b"], "norm", axis=axis, epsilon=epsilon),
        helper.make_node("QuantizeLinear", ["b", "sy", "z"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, kind, shape) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    opset = 23 if op == "RMSNormalization" else 17
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def real(model: onnx.ModelProto, x: NDArray[Any], epsilon: float = 1e-5) -> NDArray[np.float64]:
    """Return the real result in quantisation steps, before rounding and without the zero point."""
    constants = {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer}
    u = (x - constants["z"]) * constants["sx"]
    centred = u - u.mean(-1, keepdims=True) if model.graph.node[1].op_type == "LayerNormalization" else u
    z = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(epsilon))
    offset = constants["beta"] if len(model.graph.node[1].input) == 3 else 0
    return np.asarray((z * constants["gamma"] + offset) / constants["sy"])


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0) -> NDArray[Any]:
    """Draw bytes like activations; some rows are constant, have one outlier, or hold only extremes."""
    random, info = np.random.default_rng(seed), np.iinfo(dtype)
    middle = (info.max + info.min + 1) // 2
    x = np.clip(np.rint(random.normal(size=shape) * 40) + middle, info.min, info.max).reshape(-1, shape[-1])
    for row, value in enumerate((info.min, middle, info.max)):
        x[row] = value
        x[row + 3] = value
        x[row + 3, 0] = middle + 5
    x[6, ::2], x[6, 1::2] = info.min, info.max
    return x.reshape(shape).astype(dtype)


NORMS = [
    ("LayerNormalization", (9, 32), "int8", 0), ("LayerNormalization", (3, 5, 384), "uint8", 117),
    ("RMSNormalization", (9, 2048), "int8", -7), ("SimplifiedLayerNormalization", (2, 7, 33), "uint8", 128),
    ("LayerNormalization", (40, 3), "uint8", 0), ("LayerNormalization", (9, 1), "int8", 3),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shape", "dtype", "zero"), NORMS)
def test_results_are_the_real_ones_rounded(op: str, shape: tuple[int, ...], dtype: str, zero: int) -> None:
    """Results are the rounded real ones, except near ties, and equal those of sim/functional/norm.py."""
    model, x = norm_model(op, shape, dtype, zero), drawn(shape, dtype)
    program = celosia.compile(model, rounding="correct")
    assert [row["op"] for row in program.placements] == ["QLinearNorm"]
    y = celosia.Runtime(program).run({"x": x}).outputs["y"].astype(np.int64)
    feed = {constant.name: numpy_helper.to_array(constant) for constant in model.graph.initializer}
    beta = feed["beta"] if op == "LayerNormalization" else np.zeros_like(feed["beta"])
    result = numerics.norm_constants(feed["gamma"], beta, SX, SY, 1e-5)
    assert result.error_bound <= 2.0**-14
    steps, info = real(model, x), np.iinfo(dtype)
    for off, side in ((-result.error_bound, np.maximum), (result.error_bound, np.minimum)):
        bound = np.clip(np.rint(steps + off) + zero, info.min, info.max)
        np.testing.assert_array_equal(side(y, bound), y, err_msg=f"beyond {off}")
    flip = 128 * (dtype == "uint8")
    stored = (x.astype(np.int64) - flip).astype(np.int8).reshape(-1, shape[-1])
    v = normalise_rows(stored, shape[-1], flip - zero, op == "LayerNormalization", result.epsilon)
    own = numerics.requantize(v, result.bias, *numerics.scale_to_multiplier(result.scale), zero - flip)
    np.testing.assert_array_equal(y, own.astype(np.int64).reshape(shape) + flip)


@pytest.mark.parametrize("name", ["", "norm"])
def test_names_of_norms_do_not_matter(name: str) -> None:
    """Two norms of one input keep their own scales and offsets, whether their nodes have no name or the same one."""
    x, ends = drawn((9, 32), "int8"), np.linspace(0.5, 2, 32)
    single = [norm_model("LayerNormalization", x.shape, gamma=gamma, beta=gamma - 1) for gamma in (ends, ends[::-1])]
    both = onnx.compose.merge_models(
        *(onnx.compose.add_prefix(model, prefix, rename_inputs=True) for model, prefix in zip(single, "pq")), io_map=[]
    )
    for node in both.graph.node:
        node.name = name
    expected = [
        celosia.Runtime(celosia.compile(model, rounding="correct")).run({"x": x}).outputs["y"] for model in single
    ]
    assert not np.array_equal(*expected)
    for cfg in (PRESETS["tiny"], replace(PRESETS["tiny"], norm=4)):
        program = celosia.compile(both, config=cfg, rounding="correct")
        assert [row["op"] for row in program.placements] == ["QLinearNorm"] * 2
        assert sum(len(launch.layers) for launch in program.launches) == (2 if cfg.norm else 0)
        outputs = celosia.Runtime(program, "functional").run({"px": x, "qx": x}).outputs
        np.testing.assert_array_equal([outputs["py"], outputs["qy"]], expected)


def test_results_beside_onnxruntimes() -> None:
    """Results differ from onnxruntime's by at most one step, in at most 1e-5 of the values."""
    for op in ("LayerNormalization", "SimplifiedLayerNormalization"):
        model = norm_model(op, (3000, 384))
        x = drawn((3000, 384), "int8", 1)
        (expected,) = opened(model, int8=True).run(None, {"x": x})
        output = celosia.Runtime(celosia.compile(model, rounding="correct", check=False)).run({"x": x}).outputs["y"]
        apart = np.abs(output.astype(np.int64) - expected)
        assert apart.max() <= 1 and apart.sum() <= 1e-5 * x.size


def test_the_functions_of_integers() -> None:
    """The kernel's integer functions equal numpy's, as scalars and in vectors."""
    random = np.random.default_rng(0)
    x = random.integers(1 << 30, 1 << 32, 1003)
    squares = random.integers(1 << 15, 1 << 16, 500) ** 2  # their roots are integers, or nearly
    x[:1000] = np.clip(np.concatenate([squares, squares - 1]), 1 << 30, None)
    x[-3:] = 0, 1 << 30, (1 << 32) - 1
    far = np.concatenate([1 << np.arange(63), (1 << np.arange(63)) - 1, [-1, 0]])
    for name, values, own in (
        ("inverse_root", x, inverse_root),
        ("leading_zeros", far, lambda v: [64 - int(element).bit_length() if element >= 0 else 0 for element in v]),
    ):
        operand = T.placeholder(values.shape, "int64", "x")
        y = T.compute(values.shape, lambda i, name=name, operand=operand: T.call(name, operand[i]), "y")
        for wide in (False, True):
            schedule = create_schedule(y)
            if wide:
                schedule[y].vectorize(schedule[y].split(schedule[y].order[0], 8, "peel")[1])
            function = T.lower(schedule, [operand])
            for output in (T.interpret(function, values)[0], compile_function(function)(values)[0]):
                np.testing.assert_array_equal(output, own(values))


# What stays ---------------------------------------------------------------------------------------------------------

SOME = (8, 24)
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "a scale of 0": ({"gamma": np.array([1.0] * 23 + [0.0])}, "the scale of channel 23 is 0, and multipliers"),
    "a scale below 0": ({"gamma": np.array([-1.0] * 24)}, "the scale of channel 0 is -1, and multipliers"),
    "a large offset": ({"beta": np.array([99.0] * 24)}, "an offset of 99 for steps of"),
    "no number": ({"beta": np.array([np.nan] * 24)}, "not finite"),
    "a large epsilon": ({"epsilon": 1e9}, "epsilon is 1e[+]09 for steps of 0.05"),
    "two axes": ({"axis": 0}, "along the last axis"),
    "a column for a scale": ({"shape": (24, 24), "gamma": np.full((24, 1), 0.5)}, "no rows, as those are"),
    "a result of tiny steps": ({"sy": 1e-45}, "integers do not hold"),
    "a result without steps": ({"sy": 0.0}, "a step of the result is 0, and must be positive"),
    "steps backwards": ({"sx": -0.05}, "a step of the input is -0.05, and must be positive"),
    "steps that are no number": ({"sx": np.nan}, "a step of the input is nan"),
    "epsilon without end": ({"epsilon": np.inf}, "epsilon is inf"),
    "a long row": ({"shape": (2, 2049)}, "rows of 2049 elements; sums are for 2048"),
}


BESIDE = ("a column for a scale", "steps backwards")
"""Of these, which would be other numbers, the bytes are compared with onnxruntime's."""


@pytest.mark.parametrize("name", REASONS)
def test_what_stays_says_why(name: str) -> None:
    change, reason = REASONS[name]
    model = norm_model("LayerNormalization", **({"shape": SOME} | change))
    if name == "two axes":
        for constant in model.graph.initializer:
            if constant.name in ("gamma", "beta"):
                constant.CopyFrom(numpy_helper.from_array(np.ones(SOME, np.float32), constant.name))
    program = celosia.compile(model, rounding="correct")
    (row,) = (row for row in program.placements if row["op"] == "LayerNormalization")
    assert row["place"] == "cpu"
    assert re.search(reason, row["reason"]), row["reason"]
    if name in BESIDE:
        x = drawn(tuple(each.dim_value for each in model.graph.input[0].type.tensor_type.shape.dim), "int8")
        (expected,) = opened(model, int8=True).run(None, {"x": x})
        np.testing.assert_array_equal(celosia.Runtime(program).run({"x": x}).outputs["y"], expected)


def test_onnxruntimes_bytes_are_the_default() -> None:
    model = norm_model("LayerNormalization", SOME)
    program = celosia.compile(model)
    (reason,) = [row["reason"] for row in program.placements if row["op"] == "LayerNormalization"]
    assert 'rounding="correct" makes it integers' in reason and program.rounding == "onnxruntime"
    with pytest.raises(ModelError, match=r"'corect'.*'correct'.*onnxruntime"):
        celosia.compile(model, rounding="corect")


# Programs -----------------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Any) -> Path:
    """Return a copy of a Program with a changed manifest and a valid checksum."""
    target = path.with_suffix(".changed")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        manifest = json.loads(old.read("manifest.json"))
        change(manifest)
        text = json.dumps(manifest).encode()
        for name in old.namelist():
            data = {"manifest.json": text, "manifest.sha256": hashlib.sha256(text).hexdigest().encode()}
            new.writestr(name, data.get(name) or old.read(name))
    return target


def test_a_program_says_how_it_rounds(tmp_path: Path) -> None:
    program = celosia.compile(norm_model("LayerNormalization", SOME), rounding="correct")
    path = tmp_path / "norm.celosia"
    program.save(path)
    assert Program.load(path).rounding == "correct"
    assert Program.load(rewritten(path, lambda manifest: manifest.pop("rounding"))).rounding == "onnxruntime"
    with pytest.raises(ProgramError, match="it rounds in a way that"):
        Program.load(rewritten(path, lambda manifest: manifest.update(rounding="up")))
    results = [celosia.Runtime(each).run({"x": drawn(SOME, "int8")}) for each in (program, Program.load(path))]
    np.testing.assert_array_equal(*(each.outputs["y"] for each in results))
    assert results[1].report["rounding"] == "correct"


def test_compare_counts_what_is_rounded_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compare` does not count differences of one step from onnxruntime's rounding; it counts those of two."""
    path = tmp_path / "norm.onnx"
    onnx.save(norm_model("LayerNormalization", SOME), path)
    x = {"x": drawn(SOME, "int8")}
    report = compare(path, x, rounding="correct")
    assert report["rounding"] == "correct" and report["rounded"] == {"values": 192, "apart": 0, "sums": 0, "behind": 0}
    own = numerics.norm_constants
    for steps, different in ((0.6, 0), (2.2, 1)):

        def moved(gamma: Any, beta: Any, sx: float, sy: float, epsilon: float, steps: float = steps) -> Any:
            return own(gamma, beta + np.float32(steps * sy), sx, sy, epsilon)

        monkeypatch.setattr(numerics, "norm_constants", moved)
        report = compare(path, x, rounding="correct", check=False)
        assert report["different"] == different and (report["first"] is None) == (not different)
        assert report["rounded"]["apart"] > 40


def test_wrong_integers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check finds wrong integers of a norm, since it knows the norm from the imported graph."""
    own = numerics.norm_constants
    monkeypatch.setattr(
        numerics, "norm_constants", lambda gamma, beta, sx, sy, eps: own(gamma, beta, sx, sy * 1.02, eps)
    )
    with pytest.raises(RewriteError, match="after the pass 'integer'"):
        celosia.compile(norm_model("LayerNormalization", SOME), rounding="correct")


ADD = """
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
g ({dtype}[1, 16, 4, 64] a, {dtype}[1, 16, 4, 64] b) => ({dtype}[1, 16, 4, 64] y)
<float s = {{{scales[0]}}}, float t = {{{scales[1]}}}, float u = {{{scales[2]}}}, {dtype} z = {{{zero}}}>
{{ y = com.microsoft.QLinearAdd(a, s, z, b, t, z, u, z) }}
"""


@pytest.mark.parametrize(("dtype", "zero"), [("int8", 3), ("uint8", 131)])
def test_sums_without_exact_integers_are_rounded_correctly(dtype: str, zero: int) -> None:
    """Residual adds without exact integers round correctly on the accelerator and on the CPU.

    onnxruntime's floats give other bytes for only a few pairs.
    """
    random = np.random.default_rng(4)
    while True:
        scales = tuple(float(scale) for scale in random.uniform(0.01, 0.1, 3).astype(np.float32))
        sa, sb, sy = scales
        if numerics.fit_rescale_add(sa, zero, sb, zero, sy, zero, dtype) is None:
            break
    model = onnx.parser.parse_model(ADD.format(dtype=dtype, zero=zero, scales=scales))
    every = np.arange(256, dtype=np.uint8).view(dtype)
    pairs = np.repeat(every, 256)[::16].reshape(1, 16, 4, 64), np.tile(every[::16], 256).reshape(1, 16, 4, 64)
    feed = dict(zip("ab", pairs))
    program = celosia.compile(model, rounding="correct")
    assert program.placements[0]["place"] == "accelerator"
    output = celosia.Runtime(program).run(feed).outputs["y"].astype(np.int64)
    a, b = (operand.astype(np.float64) - zero for operand in pairs)
    exact, info = (a * sa + b * sb) / sy, np.iinfo(dtype)
    far = np.abs(exact - np.floor(exact) - 0.5) > 2.0**-14
    np.testing.assert_array_equal(output[far], np.clip(np.rint(exact) + zero, info.min, info.max)[far])
    other = celosia.compile(model, accelerator=False, rounding="correct")
    np.testing.assert_array_equal(celosia.Runtime(other).run(feed).outputs["y"], output)
    plain = celosia.compile(model)
    assert plain.placements[0]["place"] == "cpu" and "no integers give onnxruntime's" in plain.placements[0]["reason"]
