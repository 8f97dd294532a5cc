"""Compiled layers of any shape and place compute numpy's results on accelerators of any size.

Each example is also verified (see `Network.check`), and runs in a DRAM full of noise.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from thorough import tries

from celosia.compiler.expr.nodes import Const, Tensor
from celosia.compiler.launch.image import LayerErrors
from celosia.compiler.layer import Activation, ActivationGemm, Layer, TilingError, Window
from celosia.compiler.tensorize import plan
from celosia.compiler.tensorize.instruction import Dim, Limit, LinearForm, MoveInstruction, coalesce
from celosia.compiler.tensorize.space import Tiling, Workload, candidates, why_not
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode

from .layers import CONFIGS, Builder, Network, builders, requantise, windows

Number = Callable[[int, int], int]


def bounded(examples: int) -> settings:
    return settings(max_examples=tries(examples), deadline=None, suppress_health_check=list(HealthCheck))


def _numbers(data: st.DataObject) -> Number:
    return lambda low, high: data.draw(st.integers(low, high))


def _fits(window: Window, height: int, width: int) -> bool:
    top, left, bottom, right = window.pads
    return height + top + bottom >= window.reach(0) and width + left + right >= window.reach(1)


def _check(net: Network) -> None:
    """Call `Network.check`; a layer may be refused only because the scratchpads are too small."""
    try:
        net.check()
    except LayerErrors as error:
        assert all(reason.startswith(REFUSALS) for reason in error.reasons.values()), error
        assume(False)


REFUSALS = (
    "no tile of ",
    "one output pixel's operands do not fit",
    "padding above or below a strided kernel of one row",
    "a tile that lies in the padding alone",
)


@bounded(75)
@given(builders(), windows(), st.data())
def test_convolution(b: Builder, window: Window, data: st.DataObject) -> None:
    number = _numbers(data)
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    x = b.host_input(number(1, 3), groups * number(1, 24), number(1, 17), number(1, 17), number(0, 2), number(0, 2))
    assume(_fits(window, x.height, x.width))
    b.conv(x, window, groups * number(1, 24), groups)
    _check(b.net)


@bounded(60)
@given(builders(), windows(), st.data())
def test_depthwise_convolution(b: Builder, window: Window, data: st.DataObject) -> None:
    number = _numbers(data)
    channels = number(1, 40)
    x = b.host_input(number(1, 3), channels, number(1, 17), number(1, 17), number(0, 2), number(0, 2))
    assume(_fits(window, x.height, x.width))
    b.conv(x, window, channels * number(1, 2), channels)
    _check(b.net)


@bounded(40)
@given(builders(), st.data())
def test_matrix_of_many_rows(b: Builder, data: st.DataObject) -> None:
    number = _numbers(data)
    x = b.host_input(number(1, 120), number(1, 80), 1, 1, number(0, 2), number(0, 2))
    y = b.conv(x, Window((1, 1)), number(1, 100))
    if number(0, 1):
        b.map(y)
    _check(b.net)


@bounded(75)
@given(builders(), windows(), st.booleans(), st.data())
def test_pooling(b: Builder, window: Window, largest: bool, data: st.DataObject) -> None:
    number = _numbers(data)
    x = b.host_input(number(1, 3), number(1, 40), number(1, 17), number(1, 17), number(0, 2), number(0, 2))
    assume(_fits(window, x.height, x.width))
    b.pool(x, window, largest)
    _check(b.net)


@bounded(30)
@given(builders(), st.data())
def test_map(b: Builder, data: st.DataObject) -> None:
    number = _numbers(data)
    images, height, width = (number(1, 40), 1, 1) if number(0, 3) == 0 else (number(1, 4), number(1, 17), number(1, 17))
    shape = (images, number(1, 40), height, width)
    x = b.host_input(*shape, number(0, 2), number(0, 2))
    b.map(x, b.host_input(*shape, number(0, 2), number(0, 2)) if number(0, 1) else None)
    _check(b.net)


@bounded(40)
@given(builders(), st.data())
def test_multiply(b: Builder, data: st.DataObject) -> None:
    number = _numbers(data)
    images, channels, height, width = number(1, 5), number(1, 40), number(1, 17), number(1, 17)
    x = b.host_input(images, channels, height, width, number(0, 2), number(0, 2))
    pixel = (1, 1) if number(0, 1) else (height, width)
    b.multiply(x, b.host_input(images, channels, *pixel, number(0, 2), number(0, 2)))
    _check(b.net)


SQUARE = ["tiny", "pynq", "small-buffers", "4x4-tight", "4x4-tokens2"]
"""Those where neighbouring pixels of a channel group are an entry of wgt."""


@bounded(30)
@given(builders(SQUARE), st.data())
def test_product_of_two_activations(b: Builder, data: st.DataObject) -> None:
    """Either operand of a product may be a layer's output, or a part of a storage."""
    number, group, block = _numbers(data), b.cfg.group, b.cfg.block_out
    inner, rows, channels = group * number(1, 6), number(1, 40), number(1, 40)

    def operand(columns: int) -> Activation:
        x = b.host_input(1, inner, 1, columns, number(0, 2), number(0, 2))
        return b.conv(x, Window((1, 1)), inner) if number(0, 1) else x

    b.product(operand(rows), operand(-(-channels // block) * block), channels)
    _check(b.net)


def test_a_product_needs_a_batch_of_one() -> None:
    b = Builder(Network(CONFIGS["batch2"]), st.DrawFn, np.random.default_rng(0))  # type: ignore[arg-type]
    x, y = b.host_input(1, 8, 1, 8), Activation.alone(b.cfg, "y", 1, 8, 1, 8)
    scale = requantise(b.rng, 8, 1000)
    product = ActivationGemm(b.host_input(1, 8, 1, 8), 0, 0)
    b.net.launches[0].append(Layer("", x, y, product=product, requantise=scale))
    with pytest.raises(LayerErrors, match="two activations needs batch = 1"):
        b.net.build()


@bounded(60)
@given(builders(), st.data())
def test_network_in_several_launches(b: Builder, data: st.DataObject) -> None:
    """Layers read any earlier activation, memory is reused, and launches follow each other."""
    number = _numbers(data)
    known = [b.host_input(number(1, 2), number(1, 20), number(4, 12), number(4, 12))]
    for _ in range(number(2, 7)):
        x = data.draw(st.sampled_from(known))
        twins = [
            act for act in known
            if (act.images, act.channels, act.height, act.width) == (x.images, x.channels, x.height, x.width)
        ]  # fmt: skip
        kind = number(0, 5)
        if kind <= 1:
            known.append(b.conv(x, Window((1, 1)) if kind else Window((3, 3), pads=(1, 1, 1, 1)), number(1, 20)))
        elif kind == 2:
            known.append(b.conv(x, Window((3, 3), pads=(1, 1, 1, 1)), x.channels, x.channels))
        elif kind == 3:
            known.append(b.pool(x, Window((3, 3), (2, 2), pads=(1, 1, 1, 1)), bool(number(0, 1))))
        elif kind == 4:
            known.append(b.map(x, data.draw(st.sampled_from(twins))))
        else:
            known.append(b.multiply(x, data.draw(st.sampled_from(twins))))
        if number(0, 3) == 0:
            b.net.launches.append([])
    _check(b.net)


@bounded(40)
@given(builders(), st.data())
def test_concatenation_is_free(b: Builder, data: st.DataObject) -> None:
    """Layers write parts of one storage, which the next layer reads as one activation."""
    number, cfg = _numbers(data), b.cfg
    x = b.host_input(number(1, 3), number(1, 20), number(2, 9), number(2, 9))
    channels = [cfg.group * number(1, 5) for _ in range(number(1, 3))] + [number(1, 20)]
    total = sum(channels)
    whole, offset = Activation.alone(cfg, "whole", x.images, total, x.height, x.width), 0
    for count in channels:
        y = Activation(f"t{len(b.net.layers)}", x.images, count, x.height, x.width, whole.storage, offset)
        b.conv(x, Window((1, 1)), count, y=y)
        offset += -(-count // cfg.group)
    window = data.draw(st.sampled_from([Window((1, 1)), Window((2, 2), (2, 2)), Window((3, 3), pads=(1, 1, 1, 1))]))
    assume(_fits(window, x.height, x.width))
    if number(0, 1):
        b.conv(whole, window, number(1, 20))
    else:
        b.pool(whole, window, bool(number(0, 1)))
    _check(b.net)


@bounded(60)
@given(builders(), windows(), st.sampled_from(["weights", "input", "split", "pieces"]), st.data())
def test_every_tiling_computes_the_same(b: Builder, window: Window, order: str, data: st.DataObject) -> None:
    """Any tiling that fits the scratchpads, of each loop order, computes the same result."""
    number = _numbers(data)
    groups = 1 if order != "weights" else number(1, 2)
    x = b.host_input(number(1, 2), groups * number(1, 40), number(1, 12), number(1, 12))
    assume(_fits(window, x.height, x.width))
    b.conv(x, window, groups * number(1, 40), groups)

    def choose_any(cfg: Config, workload: Workload, *_: bool) -> Tiling:
        points = [point for point in candidates(cfg, workload) if point.order == order]
        assume(points)
        point = data.draw(st.sampled_from(points))
        assert why_not(cfg, workload, point) is None
        return point

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "choose", choose_any)
        _check(b.net)


# Transfers ------------------------------------------------------------------------------------------------


@bounded(100)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40), st.integers(1, 30)), max_size=4))
def test_coalesced_dimensions_visit_the_same_pieces(given_dims: list[tuple[int, int, int]]) -> None:
    piece = 8
    dims = [Dim(count, piece * dram, sram) for count, dram, sram in given_dims]
    try:
        merged = coalesce(dims, piece)
    except TilingError:
        assert sum(dim.count > 1 for dim in dims) >= 3
        return
    assert len(merged) == 3
    assert merged[0].dram == piece or merged[0].count == 1
    assert _visited(merged) == _visited(dims)


def _visited(dims: list[Dim]) -> list[tuple[int, int]]:
    """Return (byte in DRAM, piece in the scratchpad) of each step, sorted."""
    places = [(0, 0)]
    for dim in dims:
        places = [(dram + i * dim.dram, sram + i * dim.sram) for dram, sram in places for i in range(dim.count)]
    return sorted(places)


def test_neighbours_become_one_row() -> None:
    image = [Dim(3, 4 * 5 * 8, 20), Dim(4, 5 * 8, 5), Dim(5, 8, 1)]
    assert coalesce(image, 8) == [Dim(60, 8, 1), Dim(1, 0, 0), Dim(1, 0, 0)]
    spaced = [Dim(3, 4 * 5 * 8, 20), Dim(4, 5 * 8, 5), Dim(3, 8, 1)]
    assert coalesce(spaced, 8) == [Dim(3, 8, 1), Dim(12, 40, 5), Dim(1, 0, 0)]
    column = [Dim(4, 40, 1)]
    assert coalesce(column, 8) == [Dim(1, 8, 1), Dim(4, 40, 1), Dim(1, 0, 0)]


def test_a_block_of_four_dimensions_is_refused() -> None:
    with pytest.raises(TilingError, match="block of 2x2x2x2 pieces"):
        coalesce([Dim(2, 8, 1), Dim(2, 40, 3), Dim(2, 200, 9), Dim(2, 900, 27)], 8)
    with pytest.raises(TilingError, match="a block of 1x5000x1 pieces"):
        coalesce([Dim(5000, 40, 1)], 8)


@pytest.mark.parametrize("opcode", [Opcode.LOAD, Opcode.STORE])
def test_a_part_of_a_block_that_is_no_transfer_refuses_the_tile(opcode: Opcode) -> None:
    """A tile is refused if it covers three of four iterations in a block whose dimensions do not merge."""
    dims = (Dim(2, 900, 27), Dim(4, 200, 9), Dim(2, 40, 3), Dim(2, 8, 1))
    near, far = Tensor("near", (99,), "int8"), Tensor("far", (9000,), "int8")
    bound = Limit(1, LinearForm(3), 1, lower=False)
    move = MoveInstruction(
        opcode,
        {},
        near,
        far,
        1,
        LinearForm(0),
        LinearForm(0),
        dims,
        {},
        (bound,),
        Const(0, "int8"),
        8,
        ((LinearForm(0), 8999),),
    )
    with pytest.raises(TilingError):
        move.check({})
