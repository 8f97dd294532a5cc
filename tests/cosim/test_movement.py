"""Operators that move bytes stay integers, and run on the accelerator if groups and strides allow it.

The bytes are those of onnxruntime (agreement.py), and one launch computes everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from configs import CONFIGS as SMALL_CONFIGS
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from simulators import rtl_device
from small_models import Builder, Tensor
from thorough import paired, some, tries

import celosia
from celosia.compiler.layer import StridedView
from celosia.compiler.program import Program
from celosia.compiler.selfcheck.check_launches import SelfCheckError
from celosia.compiler.vthread.verify.decode import VerifyError
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import PRESETS
from celosia.sim.functional.fsim import FunctionalDevice

pytest.importorskip("onnxruntime")

from agreement import CONFIGS, check, expected, feed_of

Make = Callable[[Builder, Tensor], Tensor]


def conv(b: Builder, x: Tensor, channels: int = 0) -> Tensor:
    return b.conv(x, channels or x.shape[1], (3, 3), pads=(1, 1, 1, 1))


def c2f(b: Builder, x: Tensor) -> Tensor:
    first, second = b.split(b.conv(x, 64, (1, 1)), [32, 32])
    more = b.binary("Add", second, conv(b, conv(b, second)))
    return b.conv(b.concat([first, second, more], False), 48, (1, 1))


def shifted(b: Builder, x: Tensor) -> Tensor:
    """Concatenate parts of parts, one of them twice."""
    upper, lower = b.split(x, [5, 4], 2)
    left = b.slice(lower, 3, 1, 6)
    return conv(b, b.concat([b.slice(upper, 3, 2, 7), left, left], False, 2))


def even(b: Builder, x: Tensor, axis: int) -> Tensor:
    """Remove the last row or column if their number is odd."""
    return b.slice(x, axis, 0, x.shape[axis] // 2 * 2)


def gather(b: Builder, x: Tensor, axis: int, index: Iterable[int]) -> Tensor:
    chosen = np.array([*index], np.int64)
    shape = (*x.shape[:axis], len(chosen), *x.shape[axis + 1 :])
    return b.move("Gather", x, [shape], [chosen], axis=axis)[0]


def by_columns(b: Builder, x: Tensor) -> Tensor:
    return b.depth_to_space(x, 2, "CRD")


def twice(b: Builder, x: Tensor, make: Make) -> Tensor:
    """Apply `make` to a tensor with another reader, so that the tensor cannot be stored in another order."""
    b.output(conv(b, x))
    return conv(b, make(b, x))


FLOOR = dict(coordinate_transformation_mode="asymmetric", nearest_mode="floor")
ACCELERATED: dict[str, Make] = {
    "Split of channels": lambda b, x: b.concat([conv(b, part) for part in b.split(x, [32, 16])][::-1], False),
    "Slice of channels": lambda b, x: conv(b, b.slice(x, 1, 16, 40)),
    "Slice of rows": lambda b, x: conv(b, b.slice(x, 2, 1, 6)),
    "Slice of every other row": lambda b, x: conv(b, b.slice(x, 2, 1, 100, 2)),
    "Slice of every other column": lambda b, x: conv(b, b.slice(x, 3, 1, 100, 2)),
    "Split of rows": lambda b, x: b.concat([conv(b, part) for part in b.split(x, [4, 5], 2)], False, 2),
    "parts of parts": shifted,
    "nearest, twice": lambda b, x: conv(b, b.nearest(x, (2, 2))),
    "nearest, half as many more": lambda b, x: conv(b, b.nearest(even(b, x, 2), (1.5, 3), **FLOOR)),
    "nearest, half": lambda b, x: conv(b, b.nearest(even(b, x, 2), (0.5, 1), **FLOOR)),
    "Pad": lambda b, x: conv(b, b.pad(x, (0, 0, 1, 2), (0, 0, 3, 0))),
    "DepthToSpace": lambda b, x: conv(b, b.depth_to_space(conv(b, x, 64), 2)),
    "SpaceToDepth": lambda b, x: conv(b, b.space_to_depth(even(b, even(b, x, 2), 3), 2)),
    "Concat of rows": lambda b, x: conv(b, b.concat([x, b.conv(x, 48, (1, 1)), b.slice(x, 2, 2, 5)], False, 2)),
    "Concat of columns": lambda b, x: conv(b, b.concat([b.conv(x, 48, (1, 1)), b.nearest(x, (1, 2))], True, 3)),
    "rows joined": lambda b, x: b.concat([b.reshape(conv(b, x), (2, 48, 63)) for _ in range(2)], False, 2),
    "C2f": c2f,
    "MaxPool, ceil_mode": lambda b, x: conv(b, b.max_pool(x, (3, 2), (2, 2), (0, 0, 0, 1), 1)),
    "AveragePool, padded": lambda b, x: b.average_pool(x, (3, 3), (2, 1), (1, 1, 1, 1)),
    "AveragePool, padding counted": lambda b, x: b.average_pool(x, (3, 3), (2, 1), (1, 1, 1, 1), 1),
    "AveragePool, wide": lambda b, x: b.average_pool(x, (5, 4), (2, 1), (2, 1, 1, 2)),
    "Gather of rows": lambda b, x: conv(b, gather(b, conv(b, x), 2, [0, 2, 4, 1, -2, -1, 3, 3])),
    "Gather of columns": lambda b, x: conv(b, gather(b, conv(b, x), 3, [6, 0, 3, 6, 1])),
    "Gather of groups": lambda b, x: twice(b, conv(b, x), lambda b, y: gather(b, y, 1, [*range(16, 48), *range(12)])),
    "Gather of channels": lambda b, x: conv(b, gather(b, conv(b, x), 1, [*range(48)[::-1], 5, 5])),
    "Gather of channels behind a table": lambda b, x: conv(b, gather(b, b.unary(conv(b, x), "Sigmoid"), 1, [7, -1, 2])),
    "Slice of channels inside a group": lambda b, x: conv(b, b.slice(conv(b, x), 1, 5, 40, 3)),
    "DepthToSpace by columns": lambda b, x: conv(b, by_columns(b, conv(b, x, 64))),
    "Transpose": lambda b, x: conv(b, b.transposed(x)),
    "Slice beside groups, read twice": lambda b, x: twice(b, conv(b, x), lambda b, y: b.slice(y, 1, 5, 40)),
    "DepthToSpace by columns, read twice": lambda b, x: twice(b, conv(b, x, 64), by_columns),
    "Gather of channels, read twice": lambda b, x: twice(b, conv(b, x), lambda b, y: gather(b, y, 1, range(48)[::-1])),
    "ConvTranspose 4, stride 2": lambda b, x: b.conv_transpose(x, 32, (4, 4), (2, 2), (1, 1, 1, 1)),
    "ConvTranspose 2, stride 2": lambda b, x: b.conv_transpose(x, 32, (2, 2), (2, 2), per_channel=False),
    "ConvTranspose, more": lambda b, x: b.conv_transpose(x, 20, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    "ConvTranspose, gaps": lambda b, x: b.conv_transpose(x, 20, (3, 2), (3, 3), more=(1, 0)),
    "ConvTranspose of groups": lambda b, x: b.conv_transpose(x, 32, (3, 3), (2, 1), (0, 1, 1, 0), group=2),
    "ConvTranspose, dilated": lambda b, x: b.conv_transpose(x, 20, (3, 3), (2, 3), (1, 1, 1, 1), dilations=(2, 2)),
}  # fmt: skip
HOST: dict[str, Make] = {
    "Split beside groups": lambda b, x: b.concat(b.split(x, [7, 41])[::-1], False),
    "Slice backwards": lambda b, x: conv(b, b.slice(x, 2, -1, -100, -1)),
    "Pad with the edge": lambda b, x: conv(b, b.pad(x, (0, 0, 1, 2), (0, 0, 3, 0), "edge")),
    "Pad of channels": lambda b, x: conv(b, b.pad(x, (0, 2, 0, 0), (0, 1, 0, 0))),
    "Transpose of channels": lambda b, x: conv(b, b.move("Transpose", x, [(2, 9, 7, 48)], perm=[0, 2, 3, 1])[0]),
    "Transpose, wide": lambda b, x: conv(b, b.transposed(b.nearest(x, (1, 3)))),
    "Gather of images": lambda b, x: conv(b, gather(b, x, 0, [1, 0])),
    "Gather of many rows": lambda b, x: conv(b, gather(b, x, 2, [*range(9)[::-1]] * 2)),
}
BORDERS = {"QuantizeLinear", "DequantizeLinear"}


def model_of(
    make: Make, form: str = "qdq", dtype: type = np.int8, seed: int = 3, rounding: str = "onnxruntime"
) -> Builder:
    """Return a model that applies `make` to an image [2, 48, 9, 7], the result of a convolution."""
    b = Builder(form, dtype, seed)
    b.rounding = rounding
    b.output(make(b, b.conv(b.input([2, 5, 9, 7]), 48, (1, 1))))
    return b


def on_cpu(program: Program) -> list[str]:
    return [row["op"] for row in program.placements if row["place"] == "cpu" and row["op"] not in BORDERS]


def floats_inside(program: Program) -> list[str]:
    """Return the float tensors that are neither inputs nor outputs nor constants."""
    border = {info.name for info in (*program.inputs, *program.outputs)} | set(program.constants)
    return [name for name, info in program.tensors.items() if info.dtype == "float32" and name not in border]


FORMS: dict[str, type] = {"qdq": np.int8, "qoperator": np.uint8}
ON_CONFIGS = ["pynq", "tiny", "batch2-8x4", "4x16"]


def has_form(name: str, form: str) -> bool:
    return form == "qdq" or "ConvTranspose" not in name  # there is no QLinear operator for it


PLACED = [case for case in product(ACCELERATED, ON_CONFIGS, FORMS) if has_form(case[0], case[2])]
IN_TURN = [
    (name, ON_CONFIGS[n % 4], "qoperator" if n // 4 % 2 and has_form(name, "qoperator") else "qdq")
    for n, name in enumerate(ACCELERATED)
]
"""Each case once; Configs and forms alternate."""
SIMILAR_CASES = {
    "Slice of channels", "Slice of rows", "Slice of every other column", "Split of rows", "nearest, twice", "C2f",
    "AveragePool, padding counted", "AveragePool, wide", "Gather of columns", "Gather of channels",
    "DepthToSpace by columns", "Slice beside groups, read twice", "Gather of channels, read twice",
    "ConvTranspose 2, stride 2", "ConvTranspose, more", "rows joined",
}  # fmt: skip
"""Cases that take the paths of other cases, so that `make thorough` has them alone."""


@pytest.mark.parametrize(
    ("name", "config", "form"), some(PLACED, [case for case in IN_TURN if case[0] not in SIMILAR_CASES])
)
def test_on_the_accelerator(name: str, config: str, form: str) -> None:
    rounding = "correct" if name.startswith("AveragePool") else "onnxruntime"
    b = model_of(ACCELERATED[name], form, FORMS[form], rounding=rounding)
    program = check(b, FunctionalDevice(CONFIGS[config]))
    assert on_cpu(program) == [] and len(program.launches) == 1
    assert floats_inside(program) == []


@pytest.mark.parametrize(("name", "form"), paired(HOST, FORMS))
def test_in_bytes_on_the_cpu(name: str, form: str) -> None:
    program = check(model_of(HOST[name], form, FORMS[form]), FunctionalDevice(CONFIGS["pynq"]))
    assert on_cpu(program) and floats_inside(program) == []


WIDE = "8x4-batch2-taps5"
RANDOM_CONFIGS = ["pynq", "8x8", "batch2-8x4"]
"""Names of the Configs of random layers."""


@pytest.mark.rtl
@pytest.mark.parametrize(("config", "turn"), some([*zip(["tiny", WIDE] * 10, range(20))],
                                                  [("tiny", 12)]))  # fmt: skip
def test_on_the_rtl(config: str, turn: int) -> None:
    """Each case runs on one of two Configs of the RTL, in turn; on the functional device it runs on four."""
    device = rtl_device((PRESETS | SMALL_CONFIGS)[config])
    for make in [*ACCELERATED.values()][turn::20]:
        check(model_of(make), device)


@pytest.mark.parametrize("config", some(RANDOM_CONFIGS, ["8x8"]))
@settings(max_examples=tries(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_transposed_convolutions(config: str, data: st.DataObject) -> None:
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    group = data.draw(st.sampled_from([1, 1, 2]))
    kernel, strides, dilations = (
        (number(1, 4), number(1, 4)),
        (number(1, 3), number(1, 3)),
        (number(1, 2), number(1, 2)),
    )
    pads = tuple(number(0, (k - 1) * d) for k, d in zip(kernel * 2, dilations * 2, strict=True))
    more = tuple(number(0, s - 1) for s in strides)
    b = Builder("qdq", np.int8, number(0, 999))
    x = b.conv(b.input([1, 3, number(1, 6), number(1, 6)]), 2 * number(1, 10), (1, 1))
    y = b.conv_transpose(
        x, 2 * number(1, 10), kernel, strides, (pads[0], pads[1], pads[2], pads[3]), (more[0], more[1]), dilations,
        group,
    )  # fmt: skip
    assume(min(y.shape) > 0)
    b.output(y)
    check(b, FunctionalDevice(CONFIGS[config]))


@pytest.mark.parametrize("config", some(RANDOM_CONFIGS, ["batch2-8x4"]))
@settings(max_examples=tries(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_averages(config: str, data: st.DataObject) -> None:
    """Averages have onnxruntime's bytes; with `correct` rounding they differ by a step at most, as on the CPU."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    b = Builder(data.draw(st.sampled_from(["qdq", "qoperator"])), np.int8, number(0, 999))
    b.rounding = data.draw(st.sampled_from(["onnxruntime", "correct"]))
    x = b.conv(b.input([1, 3, number(2, 8), number(2, 8)]), number(1, 20), (1, 1))
    kernel = (number(1, min(4, x.shape[2])), number(1, min(4, x.shape[3])))
    pads = (*(number(0, k - 1) for k in kernel), *(number(0, k - 1) for k in kernel))
    b.output(
        b.average_pool(x, kernel, (number(1, 3), number(1, 3)), (pads[0], pads[1], pads[2], pads[3]), number(0, 1))
    )
    program = check(b, FunctionalDevice(CONFIGS[config]))
    if b.rounding == "correct":
        assert on_cpu(program) == []
        model = b.model()
        alone = celosia.compile(model, CONFIGS[config], rounding="correct", accelerator=False)
        runs = (celosia.Runtime(tested).run(feed_of(model)).outputs for tested in (program, alone))
        assert len({next(iter(outputs.values())).tobytes() for outputs in runs}) == 1


@pytest.mark.parametrize("config", some(RANDOM_CONFIGS, ["pynq"]))
@settings(max_examples=tries(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_choices(config: str, data: st.DataObject) -> None:
    """Rows, columns, channels and blocks of channels are selected by constant indices, with one or several readers."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    b = Builder(data.draw(st.sampled_from(["qdq", "qoperator"])), data.draw(st.sampled_from([np.int8, np.uint8])))
    x = b.conv(b.input([number(1, 2), 3, number(1, 6), number(1, 6)]), 4 * number(1, 10), (1, 1))
    if number(0, 1):
        x = b.unary(x, "Sigmoid")
    if number(0, 2) == 0:
        b.output(b.conv(x, 5, (1, 1)))
    for _ in range(number(1, 2)):
        kind, size = data.draw(st.sampled_from(["gather", "gather", "slice", "depth", "transpose"])), x.shape
        if kind == "gather":
            axis = number(1, 3)
            x = gather(b, x, axis, [number(-size[axis], size[axis] - 1) for _ in range(number(1, 9))])
        elif kind == "slice":
            first = number(0, size[1] - 1)
            x = b.slice(x, 1, first, number(first + 1, size[1]), number(1, 3))
        elif kind == "transpose":
            x = b.transposed(x)
        elif size[1] % 4 == 0:
            x = b.depth_to_space(x, 2, data.draw(st.sampled_from(["CRD", "DCR"])))
    b.output(x)
    check(b, FunctionalDevice(CONFIGS[config]))


# Where scales differ ---------------------------------------------------------------------------------------------


def test_a_change_of_scale_behind_a_slice_is_a_table() -> None:
    b = Builder("qdq", np.int8, 1)
    x = b.conv(b.input([1, 5, 9, 7]), 48, (1, 1))
    y = b.move("Slice", x, [(1, 16, 9, 7)], [np.array([v], np.int64) for v in (16, 32, 1)])[0]
    dequantise = b.real(y)
    b.output(b.quantise(dequantise, y.shape, y.scale * 0.7))
    program = check(b, FunctionalDevice(CONFIGS["pynq"]))
    assert on_cpu(program) == [] and "Table" in {row["op"] for row in program.placements}


def test_padding_that_is_no_byte_stays_as_it_is() -> None:
    """Padding with 0.3 of a step is no byte, so floats are padded if nothing is quantised afterwards."""
    b = Builder("qdq", np.int8, 2)
    x = b.conv(b.input([1, 5, 9, 7]), 16, (1, 1))
    pads = b.constant("pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    y = b.node("Pad", [b.real(x), pads, b.constant("value", 0.3 * x.scale, np.float32)])
    b.outputs.append(onnx.helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, [1, 16, 11, 9]))
    model = b.model()
    (reference,) = expected(model, feed_of(model))
    (output,) = Runtime(celosia.compile(model)).run(feed_of(model)).outputs.values()
    assert np.array_equal(output, reference) and output[0, 0, 0, 0] == np.float32(0.3 * x.scale)


# Faults ----------------------------------------------------------------------------------------------------------


STRIDED_CASES = ["Slice of rows", "DepthToSpace", "Gather of rows", "Concat of rows", "ConvTranspose 4, stride 2"]


@pytest.mark.parametrize("name", some(STRIDED_CASES, ["DepthToSpace", "Gather of rows"]))
def test_a_lattice_in_the_wrong_place_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check finds a strided view at a wrong position, because it compares with the graph."""
    within = StridedView.within

    def shifted(inner: StridedView, outer: StridedView) -> StridedView:
        view = within(inner, outer)
        return replace(view, top=view.top - 1) if view.top % 2 else view

    monkeypatch.setattr(StridedView, "within", shifted)
    with pytest.raises((SelfCheckError, VerifyError)):
        celosia.compile(model_of(ACCELERATED[name]).model(), "tiny")


# A detector ------------------------------------------------------------------------------------------------------


@cache
def detector(folder: Path) -> onnx.ModelProto:
    from benchmarks import networks

    networks.NETWORKS["yolo_64"] = lambda: networks.yolo(64, classes=20)
    networks.write("yolo_64", folder / "yolo.onnx")
    return onnx.load(folder / "yolo.onnx")


@pytest.mark.thorough  # test_tensors.py and test_names.py have a smaller detector
@pytest.mark.parametrize("config", ["pynq", "tiny"])
def test_detector(config: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The accelerator computes a whole detector with onnxruntime's bytes.

    The detector has C2f, SPPF, nearest upsampling, and decoupled heads.
    """
    model = detector(tmp_path_factory.getbasetemp())
    program = celosia.compile(model, CONFIGS[config])
    assert len(program.launches) <= 3
    assert 0.99 <= program.macs_accelerator / program.macs_total <= 1
    for seed in range(tries(3)):
        feed = feed_of(model, seed)
        (reference,) = expected(model, feed)
        (output,) = Runtime(program, FunctionalDevice(CONFIGS[config])).run(feed, trace=False).outputs.values()
        np.testing.assert_array_equal(output, reference)
        assert len(np.unique(reference)) > 50
