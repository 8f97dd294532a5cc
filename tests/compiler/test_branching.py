"""Blocks with branches, whose layers move behind convolutions, keep an order in which each layer's inputs exist."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from oracle import opened
from thorough import some

import celosia
from celosia.compiler.launch import order
from celosia.compiler.launch.order import order_layers, overlap_with_convs
from celosia.compiler.launch.overlap import OverlapGroups
from celosia.compiler.layer import Activation, Epilogue, Gemm, Layer, Window
from celosia.compiler.tensorize.plan import Planner
from celosia.hw.spec.config import PRESETS, Config

from .branching import Blocks, random_blocks
from .layers import requantise, residual

CONFIGS = ["pynq", "wide", "ultra96", "tiny"]


def assert_exact(model: onnx.ModelProto, config: str, seed: int = 0) -> None:
    """Assert that the functional simulator gives onnxruntime's bytes; `compile` verifies all reads of instructions."""
    session, rng = opened(model, int8=True), np.random.default_rng(seed)
    feed = {}
    for entry in session.get_inputs():
        dtype = np.int8 if entry.type == "tensor(int8)" else np.uint8
        bounds = np.iinfo(dtype)
        feed[entry.name] = rng.integers(bounds.min, bounds.max + 1, entry.shape).astype(dtype)
    outputs = celosia.Runtime(celosia.compile(model, config, check=False)).run(feed).outputs
    for expected, (name, actual) in zip(session.run(None, feed), outputs.items(), strict=True):
        np.testing.assert_array_equal(actual, expected, f"{name} of blocks {seed} on {config}")


def joined_in_the_middle() -> onnx.ModelProto:
    """Return a C2f block in which the addition and the Concat could each move before an input of the other.

    Its first part is an input of the network; the others are halves of a convolution of 40 channels.
    """
    net = Blocks(0, shared=True, unsigned=False)
    net.inputs[:] = [replace(net.inputs[0], channels=16, rows=8, columns=8)]
    part = net.slice(net.conv(net.inputs[0], 40, 1), 20, 40)
    y = net.add(part, net.conv(net.conv(part, 20, 3), 20, 3))
    other = net.other_input(part, 20)
    return net.ending(net.conv(net.conv(net.concat(other, part, y), 48, 1), 19, 1))


@pytest.mark.parametrize("config", some(CONFIGS, ["pynq"]))
def test_layers_that_depend_on_each_others_places(config: str) -> None:
    assert_exact(joined_in_the_middle(), config)


CASES = [(config, seed) for seed in range(100) for config in CONFIGS]


@pytest.mark.parametrize(("config", "seed"), some(CASES, [("wide", 1), ("tiny", 3)]))
def test_random_blocks(config: str, seed: int) -> None:
    model, kinds = random_blocks(seed)
    assert kinds
    assert_exact(model, config, seed)


class Layers:
    """Random layers of one launch on images of 8 x 8.

    Some layers write parts of a storage that other layers read as a whole.
    """

    def __init__(self, cfg: Config, seed: int) -> None:
        self.cfg, self.rng = cfg, np.random.default_rng(seed)
        self.layers: list[Layer] = []
        self.acts = [self._new(2 * cfg.group)]

    def grow(self, count: int) -> list[Layer]:
        """Add layers until there are at least `count`, and return them in an order in which they can run."""
        while len(self.layers) < count:
            x, kind = self._any(), int(self.rng.integers(5))
            if kind == 0:
                self.acts.append(self._pool(x))
            elif kind < 3:
                self.acts.append(self._conv(x, self._new(self.cfg.group * int(self.rng.integers(1, 4)))))
            elif kind == 3:
                self.acts.append(self._add(x, self._any(x.channels), self._new(x.channels)))
            else:
                self._parts()
        return self.layers

    def _parts(self) -> None:
        """Add layers that write a group of channels each; some of them read groups that others have written."""
        group, count = self.cfg.group, int(self.rng.integers(2, 4))
        storage = self._new(count * group)
        for number in range(count):
            y = storage.region((1, group, 8, 8), number, storage.pixels)
            x = self._any()
            if self.rng.integers(2) and x.channels == group:
                self._add(x, self._any(group), y)
            else:
                self._conv(x, y)
            if self.rng.integers(2):
                self.acts.append(y)
        self.acts.append(storage)

    def _new(self, channels: int) -> Activation:
        return Activation.alone(self.cfg, f"t{len(self.layers)}", 1, channels, 8, 8)

    def _any(self, channels: int = 0) -> Activation:
        """Return an activation; later ones are more likely."""
        acts = [act for act in self.acts if channels in (0, act.channels)]
        return acts[-min(int(self.rng.geometric(0.4)), len(acts))]

    def _put(self, layer: Layer) -> Activation:
        self.layers.append(layer)
        return layer.y

    def _conv(self, x: Activation, y: Activation) -> Activation:
        kernel = (1, 3)[int(self.rng.integers(2))]
        weights = np.ones((y.channels, x.channels, kernel, kernel), np.int8)
        window = Window((kernel, kernel), pads=(kernel // 2,) * 4)
        scale = requantise(self.rng, y.channels, 1000)
        return self._put(Layer(str(len(self.layers)), x, y, window, gemm=Gemm(weights), requantise=scale))

    def _add(self, a: Activation, b: Activation, y: Activation) -> Activation:
        epilogue = Epilogue(residual=residual(self.rng, b))
        return self._put(Layer(str(len(self.layers)), a, y, epilogue=epilogue))

    def _pool(self, x: Activation) -> Activation:
        window = Window((3, 3), pads=(1, 1, 1, 1))
        return self._put(Layer(str(len(self.layers)), x, self._new(x.channels), window, -128, reduce="max"))


def too_early(cfg: Config, layers: list[Layer], numbers: list[int]) -> list[tuple[int, int]]:
    """Return pairs (reader, writer) of layers in which the reader comes before the writer of its input."""
    place = {number: at for at, number in enumerate(numbers)}
    reads = [(reader, act) for reader, layer in enumerate(layers) for act in layer.inputs()]
    return [
        (reader, maker) for reader, act in reads for maker in range(reader)
        if layers[maker].y.overlaps(cfg, act) and place[maker] > place[reader]
    ]  # fmt: skip


def each_host_alone(cfg: Config, planner: Planner, layers: list[Layer]) -> list[int]:
    """Return the order in which each host ignores the others' decisions: the planted fault."""
    links = list(order._find_movable(cfg, planner, layers))
    behind = {
        host: order._fastest_guests(cfg, planner, layers, host, guests)
        for host, guests in order._assign_hosts(cfg, planner, layers, links).items()
    }
    moved = {number for guests in behind.values() for number in guests}
    rest = [number for number in range(len(layers)) if number not in moved]
    return [number for first in rest for number in (first, *behind.get(first, ()))]


@pytest.mark.parametrize("seeds", some([range(12), range(12, 600)], [range(12)]))
def test_no_layer_comes_before_what_it_reads(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer moves before a writer of its input, whatever cycles the hosts' decisions rest on."""
    moved, alone = 0, 0
    for seed in seeds:
        cfg = PRESETS[CONFIGS[seed % len(CONFIGS)]]
        cycles = np.random.default_rng(seed)
        monkeypatch.setattr(order, "timed_cycles", lambda *_, cycles=cycles: cycles.uniform(1e8, 1e9))
        layers, planner = Layers(cfg, seed).grow(24), Planner(cfg)
        numbers, names = overlap_with_convs(cfg, planner, layers)
        assert sorted(numbers) == list(range(len(layers)))
        assert not too_early(cfg, layers, numbers), f"seed {seed}"
        moved += len(names)
        alone += bool(too_early(cfg, layers, each_host_alone(cfg, planner, layers)))
    assert moved > len(seeds) and alone


@pytest.mark.parametrize("seed", range(12))
def test_groups_are_all_layers_in_their_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory plan, instructions and tuner get the same groups: each layer is in one, hosts before guests."""
    cfg, cycles = PRESETS[CONFIGS[seed % len(CONFIGS)]], np.random.default_rng(seed)
    monkeypatch.setattr(order, "timed_cycles", lambda *_: cycles.uniform(1e8, 1e9))
    layers = Layers(cfg, seed).grow(24)
    numbers, names = order_layers(cfg, Planner(cfg), layers)
    overlap = OverlapGroups(cfg, [layers[number] for number in numbers], names)
    assert [n for group in overlap.groups for n in (*group.hosts, *group.guests)] == list(range(len(layers)))
    guests = {layers[numbers[n]].name for group in overlap.groups for n in group.guests}
    assert names <= guests and all(group.wait for group in overlap.groups)
