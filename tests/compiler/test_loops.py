"""The loops of a layer, run by the interpreter before they become instructions, compute the layer's meaning.

Data in DRAM has the layout that the computation states (`DramPlace`), with noise in unused channels.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from thorough import tries

from celosia.compiler import expr as T
from celosia.compiler.layer import Activation, Layer, TilingError, Window
from celosia.compiler.program.model import pack_activation, unpack_activation
from celosia.compiler.tensorize.computation import DramPlace, LayerComputation
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.space import ORDERS, candidates
from celosia.hw.spec.config import Config

from .layers import Builder, Int8, builders, meaning, windows

LARGEST = 8_000
"""Multiplications, with those of padding, up to which the interpreter is quick."""
NAMES = ["small-buffers", "4x4-tight", "batch2", "4x8", "batch2-4x8"]
SETTINGS = settings(max_examples=tries(8), deadline=None, suppress_health_check=list(HealthCheck))


def in_dram(cfg: Config, act: Activation, values: Int8 | None) -> NDArray[np.uint8]:
    """Return the storage of `act` as bytes, with `values` in its channel groups and noise around them."""
    rng = np.random.default_rng(0)
    storage = rng.integers(0, 256, act.size(cfg), np.uint8).reshape(act.batches(cfg), act.storage_groups, -1)
    if values is not None:
        data = pack_activation(cfg, values, act.groups(cfg)).reshape(act.batches(cfg), act.groups(cfg), -1)
        storage[:, act.group_offset : act.group_offset + act.groups(cfg)] = data
    return storage.reshape(-1)


def view(memory: NDArray[np.uint8], tensor: T.Tensor, place: DramPlace) -> NDArray[np.generic]:
    """Return the tensor at `place` in memory. Raises IndexError if the tensor exceeds the memory."""
    item = tensor.nbytes // max(tensor.size, 1)
    last = place.offset + sum((n - 1) * step for n, step in zip(tensor.shape, place.strides)) + item
    if last > memory.size:
        raise IndexError(f"{tensor.name} ends at byte {last} of {memory.size}")
    data = memory[place.offset : memory.size - (memory.size - place.offset) % item].view(tensor.dtype)
    return np.lib.stride_tricks.as_strided(data, tensor.shape, place.strides)


def run(
    cfg: Config, layer: Layer, d: LayerComputation, function: T.Function, memory: dict[int, NDArray[np.uint8]]
) -> None:
    """Run the loops of one computation. memory: bytes by the id of a storage or blob."""
    T.verify(function)
    arrays = []
    for tensor, declared in zip(d.inputs, function.inputs, strict=True):
        home = d.places[tensor].home
        block = home if isinstance(home, np.ndarray) else memory[id(home)]
        arrays.append(np.ascontiguousarray(view(block, declared, d.places[tensor])))
    (result,) = T.interpret(function, *arrays, scalars=d.scalars)
    target = view(memory[id(layer.y.storage)], d.y, d.places[d.y])
    target[...] = result


def check(cfg: Config, layer: Layer, given_: dict[Activation, Int8], data: st.DataObject, order: str) -> None:
    planner = Planner(cfg)
    memory = {id(act.storage): in_dram(cfg, act, given_[act]) for act in layer.inputs()}
    memory[id(layer.y.storage)] = before = in_dram(cfg, layer.y, None)
    untouched = before.copy()
    try:
        computations = lower_layer(cfg, layer)
    except TilingError:
        assume(False)
        return
    for d in computations:
        points = [point for point in candidates(cfg, d.workload) if point.order == order]
        assume(points)
        decisions = data.draw(st.sampled_from(points))
        try:
            run(cfg, layer, d, planner.loops(d, decisions).function, memory)
        except TilingError:
            assume(False)
    act = layer.y
    shape = (act.images, act.channels, act.height, act.width)
    result = unpack_activation(cfg, memory[id(act.storage)], shape, act.storage_groups, act.group_offset)
    np.testing.assert_array_equal(result, meaning(layer, dict(given_)))
    groups = slice(act.group_offset, act.group_offset + act.groups(cfg))
    one, other = (m.reshape(act.batches(cfg), act.storage_groups, -1).copy() for m in (before, untouched))
    one[:, groups] = other[:, groups] = 0
    np.testing.assert_array_equal(one, other, "other channels of the storage")


def small(b: Builder, data: st.DataObject, groups: int = 1, size: int = 4, least: int = 1) -> Activation:
    number = st.integers
    images, channels = data.draw(number(1, 2)), groups * data.draw(number(least, least + 8))
    height, width = data.draw(number(1, size)), data.draw(number(1, size))
    return b.host_input(images, channels, height, width, data.draw(number(0, 1)), data.draw(number(0, 1)))


def fits(window: Window, x: Activation) -> bool:
    top, left, bottom, right = window.pads
    return x.height + top + bottom >= window.reach(0) and x.width + left + right >= window.reach(1)


@pytest.mark.parametrize("order", [order for order in ORDERS if order not in ("rows", "block")])
@SETTINGS
@given(builders(NAMES), windows(3), st.data())
def test_convolution(order: str, b: Builder, window: Window, data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([1, 1, 2])) if order == "weights" else 1
    x = small(b, data, groups, least=9 if order == "split" else 1)  # with several input blocks to split
    assume(fits(window, x))
    y = b.conv(x, window, groups * data.draw(st.integers(1, 9)), groups)
    size = y.images * y.height * y.width * (y.channels + 7) * (x.channels + 7) * window.kernel[0] * window.kernel[1]
    assume(size < LARGEST)
    check(b.cfg, b.net.layers[0], b.net.host_inputs, data, order)


@SETTINGS
@given(builders(NAMES), windows(3), st.booleans(), st.data())
def test_pooling(b: Builder, window: Window, largest: bool, data: st.DataObject) -> None:
    x = small(b, data)
    assume(fits(window, x))
    b.pool(x, window, largest)
    check(b.cfg, b.net.layers[0], b.net.host_inputs, data, "rows")


@SETTINGS
@given(builders(NAMES), st.sampled_from(["table", "add", "multiply", "scale", "matrix"]), st.data())
def test_elementwise(b: Builder, kind: str, data: st.DataObject) -> None:
    x = small(b, data, size=1 if kind == "matrix" else 4)
    same = (x.images, x.channels, x.height, x.width)
    if kind in ("table", "matrix"):
        b.map(x)
    elif kind == "add":
        b.map(x, b.host_input(*same))
    else:
        b.multiply(x, b.host_input(*same[:2], *(same[2:] if kind == "multiply" else (1, 1))))
    check(b.cfg, b.net.layers[0], b.net.host_inputs, data, "rows")
