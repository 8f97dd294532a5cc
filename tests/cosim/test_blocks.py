"""Blocks of layers keep intermediate tensors on chip, and every byte is onnxruntime's for all cuts and tilings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulators import rtl_device
from small_models import Builder, Tensor
from thorough import some, tries

import celosia
from celosia.compiler import lowering
from celosia.compiler.graph.select import LayerAssignment, Partition
from celosia.compiler.launch import blocks
from celosia.compiler.launch.blocks import form_blocks
from celosia.compiler.launch.image import build
from celosia.compiler.layer import Layer, TilingError
from celosia.compiler.program import Program
from celosia.compiler.tensorize import block_space, tiles
from celosia.compiler.tensorize.block_space import BlockWorkload, Group
from celosia.compiler.tensorize.plan import DecisionsError, Planner, SchedulePolicy, collect_tilings
from celosia.compiler.tensorize.space import Tiling, parts
from celosia.compiler.vthread.pipeline import Ring
from celosia.compiler.vthread.verify import VerifyError
from celosia.hw.spec.config import PRESETS, Config
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.timing import predict

pytest.importorskip("onnxruntime")

from agreement import check

SMALL = dict(inp_depth=512, wgt_depth=256, acc_depth=512, vin_depth=512, out_depth=256, par_depth=32)
CONFIGS = {
    "tiny": PRESETS["tiny"],
    "pynq": PRESETS["pynq"],
    "8x4": Config(block_in=8, block_out=4, batch=2, bus_bytes=16, **SMALL, taps=2, tap_depth=32, forward=True),
    "8x8, 5 taps": Config(block_in=8, block_out=8, **SMALL, taps=5, tap_depth=64, forward=True, residual_cycles=4),
    "8x8, no taps": Config(block_in=8, block_out=8, bus_bytes=4, **SMALL, forward=True),
}


def inverted(
    b: Builder, x: Tensor, wide: int, out: int, kernel: tuple[int, int] = (3, 3), strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int, int, int] = (1, 1, 1, 1), dilations: tuple[int, int] = (1, 1), add: bool = False,
) -> Tensor:  # fmt: skip
    """Add a 1x1, a depthwise and a 1x1 convolution, and perhaps the addition of the input."""
    y = b.conv(x, wide, (1, 1), activation="Relu")
    y = b.conv(b.conv(y, wide, kernel, strides, pads, dilations, group=wide, activation="Relu"), out, (1, 1))
    return b.binary("Add", y, x) if add else y


def bottleneck(b: Builder, x: Tensor, narrow: int) -> Tensor:
    """Add a 1x1, a 3x3 and a 1x1 convolution, and the addition of the input."""
    y = b.conv(b.conv(x, narrow, (1, 1), activation="Relu"), narrow, (3, 3), (1, 1), (1, 1, 1, 1), activation="Relu")
    return b.binary("Add", b.conv(y, x.shape[1], (1, 1)), x)


def separable(b: Builder, x: Tensor, out: int, strides: tuple[int, int] = (1, 1)) -> Tensor:
    y = b.conv(x, x.shape[1], (3, 3), strides, (1, 1, 1, 1), group=x.shape[1], activation="Relu")
    return b.conv(y, out, (1, 1), activation="Relu")


CHAINS: dict[str, Callable[[Builder, Tensor], Tensor]] = {
    "inverted residual": lambda b, x: inverted(b, x, 24, 12, add=True),
    "strided": lambda b, x: inverted(b, x, 20, 9, strides=(2, 2)),
    "5x5": lambda b, x: inverted(b, x, 24, 12, (5, 5), pads=(2, 2, 2, 2), add=True),
    "4x2, dilated, uneven pads": lambda b, x: inverted(b, x, 16, 5, (4, 2), (1, 2), (1, 0, 2, 1), (1, 2)),
    "1x3, strided": lambda b, x: inverted(b, x, 16, 5, (1, 3), (2, 1), (0, 1, 0, 1)),
    "no pads": lambda b, x: inverted(b, x, 16, 5, pads=(0, 0, 0, 0)),
    "bottleneck": lambda b, x: bottleneck(b, x, 8),
    "two separable": lambda b, x: separable(b, separable(b, x, 20, (2, 2)), 9),
    "two depthwise": lambda b, x: separable(
        b, b.conv(x, 12, (3, 3), (1, 1), (1, 1, 1, 1), group=12, activation="Relu"), 9
    ),
    "ends in depthwise": lambda b, x: b.conv(
        b.conv(x, 20, (1, 1), activation="Relu"), 20, (3, 3), (1, 1), (1, 1, 1, 1), group=20
    ),
    "3x3, 3x3": lambda b, x: b.conv(
        b.conv(x, 10, (3, 3), (1, 1), (1, 1, 1, 1), activation="Relu"), 7, (3, 3), (2, 2), (0, 1, 1, 0)
    ),
    "max pooling at the end": lambda b, x: b.max_pool(
        b.conv(x, 20, (3, 3), (1, 1), (1, 1, 1, 1)), (3, 3), (2, 2), (1, 1, 1, 1)
    ),
    "max pooling between": lambda b, x: b.conv(
        b.max_pool(b.conv(x, 20, (1, 1)), (2, 3), (2, 1), (0, 1, 0, 1)), 9, (3, 3), (1, 1), (1, 1, 1, 1)
    ),
    "average at the end": lambda b, x: b.global_average(b.conv(x, 36, (1, 1), activation="Relu")),
    "table between": lambda b, x: b.conv(b.unary(b.conv(x, 20, (1, 1)), "Sigmoid"), 9, (1, 1)),
}


def model(chain: str, size: tuple[int, int] = (11, 9), dtype: Any = np.int8, images: int = 1) -> Builder:
    """Return a model with `chain` on 12 channels that a convolution computes."""
    b = Builder("qdq", dtype, seed=3)
    x = b.conv(b.input([images, 5, *size]), 12, (1, 1))
    b.output(CHAINS[chain](b, x))
    return b


def compiled(b: Builder, cfg: Config) -> Program:
    """Compile and run a model on the checking device, and compare it with onnxruntime.

    The verifier and the self-check run during the compilation.
    """
    return check(b, FunctionalDevice(cfg, checking=True))


def block_layers(program: Program) -> list[Any]:
    return [layer for launch in program.launches for layer in launch.layers if layer.op == "Block"]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int], tuple[int, ...]]], None]]:
    """Return a function that replaces the compiler's cuts of chains by a function of their length."""

    def patch(cut_places: Callable[[int], tuple[int, ...]]) -> None:
        def parts(self: Any, chain: list[Any]) -> list[blocks._Segment]:
            bounds = pairwise((0, *cut_places(len(chain)), len(chain)))
            return [blocks._Segment(tuple(chain[a:b])) for a, b in bounds]

        monkeypatch.setattr(blocks._ChainPartitioner, "cut", parts)

    yield patch


# The compiler's choice, and all other choices -------------------------------------------------------------------------


CHAINS_ONLY_HERE = [
    (chain, [*CONFIGS][number % len(CONFIGS)])
    for number, chain in enumerate(CHAINS)
    if chain in ("no pads", "two depthwise", "3x3, 3x3", "table between") or "at the end" in chain
]
"""Chains that no test below has, each with another Config."""


@pytest.mark.parametrize(("chain", "name"), some(product(CHAINS, CONFIGS), CHAINS_ONLY_HERE))
def test_chains(chain: str, name: str) -> None:
    compiled(
        model(chain, dtype=np.uint8 if chain == "strided" else np.int8, images=1 + (chain == "5x5")), CONFIGS[name]
    )


ON_RTL = ("inverted residual", "max pooling between")


@pytest.mark.rtl
def test_chains_on_rtl(cut: Callable[..., None]) -> None:
    cut(lambda length: ())
    with closing(rtl_device(CONFIGS["tiny"])) as device:
        assert all(block_layers(check(model(chain), device)) for chain in ON_RTL)


@pytest.mark.parametrize(
    ("chain", "name"),
    some(
        product(["inverted residual", "bottleneck", "two separable", "strided"], ["tiny", "8x4", "8x8, 5 taps"]),
        [("bottleneck", "8x4")],
    ),
)
def test_every_way_to_cut(chain: str, name: str, cut: Callable[..., None]) -> None:
    block_counts, lengths, tried = set(), set(), set()

    def places(length: int, count: int, first: int) -> tuple[int, ...]:
        lengths.add(length)
        return next(islice(combinations(range(1, length), min(count, length - 1)), first, None), ())

    for count, first in product(range(3), range(4)):
        cuts = tuple(places(length, count, first) for length in sorted(lengths))
        if not lengths or cuts not in tried:  # cuts differ only for long chains
            cut(partial(places, count=count, first=first))
            block_counts.add(len(block_layers(compiled(model(chain), CONFIGS[name]))))
            tried.add(tuple(places(length, count, first) for length in sorted(lengths)))
    assert len(block_counts) > 1


def cycles(program: Program) -> int:
    return int(celosia.driver.run.explain.estimate(program)["cycles"])


LONGER = [("bottleneck", "8x4"), ("ends in depthwise", "pynq"), ("1x3, strided", "ultra96")]
"""Chains that once became blocks although these take longer, because cycles were estimated or counted twice."""
CHOSEN = [("inverted residual", "8x8, 5 taps"), ("strided", "pynq"), ("ends in depthwise", "ultra96"), *LONGER]
LYING = [("two separable", "tiny", True), ("ends in depthwise", "8x4", True)]


@pytest.mark.parametrize(
    ("chain", "name", "lying"),
    some([*((*each, False) for each in CHOSEN), *LYING], [*((*each, False) for each in LONGER), LYING[1]]),
)
def test_no_block_takes_longer_than_its_layers(
    chain: str, name: str, lying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the timing model, the whole network is never slower with blocks, even if the estimates of blocks are wrong."""
    right = blocks.estimated_cycles
    if lying:
        lie = lambda cfg, p: 1.0 if isinstance(p, BlockWorkload) and len(p.layers) > 1 else right(cfg, p)  # noqa: E731
        monkeypatch.setattr(blocks, "estimated_cycles", lie)
    cfg = CONFIGS.get(name) or PRESETS[name]
    program = celosia.compile(model(chain).model(), cfg, records="none", check=False)
    monkeypatch.setattr(blocks, "_find_chains", lambda *arguments: iter(()))
    apart = celosia.compile(model(chain).model(), cfg, records="none", check=False)
    assert not block_layers(apart) and cycles(program) <= cycles(apart)


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[LayerAssignment], list[LayerAssignment], Planner]]:
    """Record, for each compilation, its single layers, the layers with blocks, and the planner."""
    recorded: list[tuple[list[LayerAssignment], list[LayerAssignment], Planner]] = []

    def watched(cfg: Config, selection: Partition, planner: Planner, *rest: Any) -> SchedulePolicy:
        apart = list(selection.choices)
        policy = form_blocks(cfg, selection, planner, *rest)
        recorded.append((apart, selection.choices, planner.with_policy(policy)))
        return policy

    monkeypatch.setattr(lowering, "form_blocks", watched)
    return recorded


def time_of(planner: Planner, layers: list[Layer]) -> int:
    """Return the cycles of `layers` in their own program."""
    if not layers:
        return 0
    read, written = {act.storage for layer in layers for act in layer.inputs()}, {layer.y.storage for layer in layers}
    image = build(planner.cfg, [layers], [read - written], [{layers[-1].y.storage}], planner, cold=False)
    return predict(planner.cfg, image.code(image.launches[0]).tobytes()).cycles


@pytest.mark.parametrize("name", some(["tiny", "pynq", "8x4", "8x8, 5 taps", "ultra96", "zcu104"], ["tiny", "8x4"]))
@settings(max_examples=tries(3), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_cycles_of_blocks_are_measured(name: str, data: st.DataObject, formed: list[Any]) -> None:
    """A block's cycles in the report are those of its own program behind the layer before; no block is slower."""
    cfg = CONFIGS.get(name) or PRESETS[name]
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    b = Builder("qdq", np.int8, seed=3)
    x = b.conv(b.input([1, 5, number(5, 12), number(5, 12)]), number(4, 24), (1, 1))
    for _ in range(number(1, 4)):
        group, kernel = (x.shape[1] if number(0, 1) else 1), number(0, 1) * 2 + 1
        around, out = (kernel // 2,) * 4, x.shape[1] if group > 1 else number(4, 24)
        x = b.conv(x, out, (kernel, kernel), (1, 1), around, group=group, activation="Relu")
    b.output(x)
    program = celosia.compile(b.model(), cfg, records="none", check=False)
    choices, run, planner = formed[-1]
    makers = {choice.layer.y.storage: choice.layer for choice in choices}
    for block in block_layers(program):
        alone = [choice.layer for choice in choices if {node.name for node in choice.nodes} <= set(block.nodes)]
        before = [makers[alone[0].x.storage]] if alone[0].x.storage in makers else []
        start = time_of(planner, before)
        (together,) = (choice.layer for choice in run if choice.layer.name == block.name)
        assert block.cycles_together == time_of(planner, [*before, together]) - start
        assert block.cycles_apart == time_of(planner, [*before, *alone]) - start
        assert block.cycles_together <= block.cycles_apart


def test_a_block_says_what_it_and_its_layers_take() -> None:
    """The report has the cycles of a block and of its layers alone, as the timing model predicts them."""
    program = celosia.compile(model("inverted residual").model(), CONFIGS["tiny"], records="none")
    (block,) = block_layers(program)
    report = celosia.driver.run.explain.estimate(program)
    (row,) = (row for row in report["layers"] if row["name"] == block.name)
    assert row["cycles_apart"] > row["cycles_together"] == pytest.approx(row["cycles"], rel=0.1)


def test_intermediates_do_not_reach_dram(cut: Callable[..., None]) -> None:
    cut(lambda length: ())
    program = compiled(model("inverted residual"), PRESETS["pynq"])
    [block] = block_layers(program)
    [launch] = program.launches
    assert len(block.nodes) >= 3 and block.bytes_kept == 2 * 32 * 11 * 9 and block.bytes_stored == 16 * 11 * 9
    assert block.cycles_apart > 0 and block.cycles_together > 0
    # Memory holds the packed x and the outputs of two layers, and no intermediate tensors.
    assert program.image_address <= 4096 * -(-(3 * 16 * 11 * 9) // 4096)
    assert launch.layers[-1] is block


def test_a_result_that_is_read_twice_reaches_dram(cut: Callable[..., None]) -> None:
    cut(lambda length: ())
    b = Builder("qdq", np.int8, seed=3)
    x = b.conv(b.input([1, 5, 9, 7]), 12, (1, 1))
    y = b.conv(x, 12, (3, 3), (1, 1), (1, 1, 1, 1), group=12)
    b.output(y)
    b.output(b.conv(y, 5, (1, 1)))
    compiled(b, PRESETS["tiny"])
    b = Builder("qdq", np.int8, seed=3)
    x = b.conv(b.input([1, 5, 9, 7]), 12, (1, 1))
    b.output(b.binary("Add", b.conv(x, 12, (3, 3), (1, 1), (1, 1, 1, 1)), x))
    assert not block_layers(compiled(b, PRESETS["tiny"]))


# Points of the space --------------------------------------------------------------------------------------------------


def largest(cfg: Config, p: Group) -> list[Tiling]:
    """Return, for each x, y and k, the point with the largest n that fits."""
    sizes = product(parts(p.columns)[:3], parts(p.rows), parts(max(p.last.in_blocks, 1)))
    points_that_fit = []
    for x, y, k in sizes:
        beats = p.layers[0].input_rows(y) * p.layers[0].input_columns(x) * cfg.piece_bytes // cfg.bus_bytes
        points = (Tiling(n, y, x, k, "block", part=max(1, 1024 // beats)) for n in parts(p.last.out_blocks))
        points_that_fit += [d for d in points if block_space.why_not(cfg, p, d) is None][:1]
    return points_that_fit


@pytest.mark.parametrize(
    ("chain", "name"),
    some(
        product(
            ["inverted residual", "4x2, dilated, uneven pads", "bottleneck", "ends in depthwise"],
            ["tiny", "8x4", "8x8, 5 taps"],
        ),
        [("4x2, dilated, uneven pads", "8x4")],
    ),
)
def test_random_points(chain: str, name: str, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cut(lambda length: ())
    rng = np.random.default_rng(len(chain))
    choices = 0

    def choose(cfg: Config, p: BlockWorkload) -> Tiling:
        nonlocal choices
        chosen = []
        for group in p.groups:
            points = list(block_space.candidates(cfg, group))
            assert points == largest(cfg, group)
            if not points:
                raise TilingError("nothing fits")
            chosen.append(points[rng.integers(len(points))])
            assert block_space.why_not(cfg, group, chosen[-1]) is None
        choices += 1
        assert block_space.estimate(cfg, p, Tiling.of_groups(chosen)) > 0
        return Tiling.of_groups(chosen)

    monkeypatch.setattr(block_space, "choose", choose)
    for _ in range(2):
        program = compiled(model(chain, (13, 12)), CONFIGS[name])
    assert choices >= 2 or not block_layers(program)


@pytest.mark.parametrize("name", some(CONFIGS, ["tiny"]))
def test_what_is_no_point_says_why(name: str) -> None:
    cfg = CONFIGS[name]
    workloads: list[BlockWorkload] = []
    original = block_space.choose

    def choose(cfg: Config, p: BlockWorkload) -> Tiling:
        workloads.append(p)
        return original(cfg, p)

    block_space.choose = choose  # type: ignore[assignment]
    try:
        celosia.compile(model("bottleneck").model(), cfg)
    finally:
        block_space.choose = original
    assert workloads
    for p in [group for workload in workloads for group in workload.groups]:
        for d in (
            Tiling(1, 1, 1, 1, "input"), Tiling(0, 1, 1, 1, "block"), Tiling(1, 1, 1, 1, "block", ahead=-1),
            Tiling(p.last.out_blocks, 1 << 13, 1, 1, "block"), Tiling(1, 1, 1, 1 << 12, "block"),
        ):  # fmt: skip
            why = block_space.why_not(cfg, p, d)
            assert why and "\n" not in why


def test_a_block_that_finds_no_room_is_cut(cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cut(lambda length: ())
    assert block_layers(compiled(model("inverted residual"), PRESETS["tiny"]))
    monkeypatch.setattr(Ring, "reserve", lambda self, size, owner: None)
    program = compiled(model("inverted residual"), PRESETS["tiny"])
    assert not block_layers(program) and program.macs_accelerator == program.macs_total


# Whole images on chip between groups ------------------------------------------------------------------------------


def spotter(b: Builder, x: Tensor) -> Tensor:
    """Add the layers of a keyword spotter: a dense convolution, two separable ones, an average."""
    x = b.conv(x, 20, (3, 3), (2, 1), (1, 1, 1, 1), activation="Relu")
    return b.global_average(separable(b, separable(b, x, 20), 9))


LONG: dict[str, Callable[[Builder, Tensor], Tensor]] = {
    "spotter": spotter,
    "three separable": lambda b, x: separable(b, separable(b, separable(b, x, 20, (2, 2)), 16), 9),
    "dense": lambda b, x: bottleneck(b, b.conv(x, 9, (3, 3), (1, 1), (0, 1, 1, 0)), 8),
    "pooled": lambda b, x: b.conv(CHAINS["max pooling between"](b, x), 7, (1, 1), activation="Relu"),
    "uneven": lambda b, x: inverted(b, inverted(b, x, 16, 5, (1, 3), (2, 1), (0, 1, 0, 1)), 16, 6, (4, 2),
                                    (1, 2), (1, 0, 2, 1), (1, 2)),
}  # fmt: skip


CHAINS_TO_CUT = [("spotter", "tiny"), ("uneven", "8x8, no taps")]
"""Chains and Configs of `test_every_cut` in `make test`."""
ROOM = dict(inp_depth=2048, wgt_depth=512, acc_depth=2048, vin_depth=2048, out_depth=512, par_depth=128)
ROOMY = {name: replace(cfg, **ROOM, tap_depth=256 if cfg.taps else cfg.tap_depth) for name, cfg in CONFIGS.items()}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that makes each chain one block, cut into groups at `where(length)`.

    rng: draws the tiles, if given.
    """

    def patch(where: Callable[[int], tuple[int, ...]], rng: np.random.Generator | None = None) -> None:
        def parts(self: Any, chain: list[Any]) -> list[blocks._Segment]:
            return [blocks._Segment(tuple(chain), where(len(chain)))]

        def choose(cfg: Config, p: BlockWorkload) -> Tiling:
            points = [list(block_space.candidates(cfg, group)) for group in p.groups]
            if not all(points):
                raise TilingError("nothing fits")
            assert rng is not None
            return Tiling.of_groups([group_points[rng.integers(len(group_points))] for group_points in points])

        monkeypatch.setattr(blocks._ChainPartitioner, "cut", parts)
        if rng is not None:
            monkeypatch.setattr(block_space, "choose", choose)

    yield patch


@pytest.mark.parametrize(("chain", "name"), some(product(LONG, CONFIGS), CHAINS_TO_CUT))
def test_every_cut(chain: str, name: str, groups: Callable[..., None]) -> None:
    """A cut before one layer, and cuts before all layers, give the right bytes."""
    block_count = 0
    for number in (1, 2, 4):
        groups(lambda length, n=number: (n,) if n < length else ())
        block_count += len(block_layers(compiled(long_model(chain), ROOMY[name])))
    groups(lambda length: tuple(range(1, length)))
    block_count += len(block_layers(compiled(long_model(chain), ROOMY[name])))
    assert block_count >= (2 if ROOMY[name].taps else 0)


@pytest.mark.parametrize(
    ("chain", "name"),
    some(product(LONG, ["tiny", "8x4", "8x8, 5 taps"]), [("pooled", "tiny")]),
)
def test_random_points_of_groups(chain: str, name: str, groups: Callable[..., None]) -> None:
    rng = np.random.default_rng(len(chain))
    block_count = 0
    for number in range(12):
        if number >= 2 and block_count:
            break
        groups(lambda length: tuple(n for n in range(1, length) if rng.random() < 0.5), rng)
        block_count += len(block_layers(compiled(long_model(chain, images=1 + int(rng.integers(2))), CONFIGS[name])))
    assert block_count or chain == "spotter"  # two images of it do not fit


@pytest.mark.rtl
def test_groups_on_rtl(groups: Callable[..., None]) -> None:
    groups(lambda length: tuple(range(2, length, 2)))
    with closing(rtl_device(CONFIGS["tiny"])) as device:
        assert all(block_layers(check(long_model(chain), device)) for chain in ("three separable", "dense"))


def test_a_tile_that_does_not_wait_is_found(groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    groups(lambda length: tuple(range(2, length, 2)))
    monkeypatch.setattr(tiles._Resident, "is_written", lambda self, entries: True)
    with pytest.raises(VerifyError, match="reads vin entry"):
        celosia.compile(long_model("spotter").model(), PRESETS["pynq"])


def test_the_compiler_keeps_small_images_on_chip() -> None:
    program = compiled(long_model("spotter"), PRESETS["pynq"])
    [block] = block_layers(program)
    assert len(block.parts) > 1 and block.name.count(" | ") == len(block.parts) - 1
    decisions = json.loads(json.dumps(collect_tilings(program)))
    again = celosia.compile(long_model("spotter").model(), "pynq", decisions=decisions)
    assert [b.name for b in block_layers(again)] == [block.name] and np.array_equal(again.image, program.image)


def test_groups_that_find_no_room_are_cut(groups: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    groups(lambda length: tuple(range(2, length, 2)))
    assert block_layers(compiled(long_model("spotter"), PRESETS["pynq"]))
    monkeypatch.setattr(Ring, "place", lambda self, size: None)
    program = compiled(long_model("spotter"), PRESETS["pynq"])
    assert not block_layers(program) and program.macs_accelerator == program.macs_total


def long_model(chain: str, images: int = 1) -> Builder:
    b = Builder("qdq", np.int8, seed=3)
    x = b.conv(b.input([images, 5, 9, 7]), 12, (1, 1))
    b.output(LONG[chain](b, x))
    return b


# Tilings -----------------------------------------------------------------------------------------------------------


def test_decisions_hold_blocks(cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    tested_model = model("inverted residual").model()
    with monkeypatch.context() as patch:
        patch.setattr(blocks._ChainPartitioner, "cut", lambda self, chain: [blocks._Segment(tuple(chain))])
        whole = celosia.compile(tested_model, "tiny")
    [block] = block_layers(whole)
    decisions = json.loads(json.dumps(collect_tilings(whole)))
    again = celosia.compile(tested_model, "tiny", decisions=decisions)
    assert [b.name for b in block_layers(again)] == [block.name] and np.array_equal(again.image, whole.image)
    with monkeypatch.context() as patch:
        patch.setattr(
            blocks._ChainPartitioner, "cut", lambda self, chain: [blocks._Segment((choice,)) for choice in chain]
        )
        apart = celosia.compile(tested_model, "tiny")
    assert not block_layers(apart)
    assert not block_layers(celosia.compile(tested_model, "tiny", decisions=collect_tilings(apart)))
    for part in decisions["layers"][-1]["parts"]:
        part["y"] = 4000
    with pytest.raises(DecisionsError, match=r"cannot be tiled so: y must be between"):
        celosia.compile(tested_model, "tiny", decisions=decisions)


def test_loops_of_a_block_are_one_nest(cut: Callable[..., None]) -> None:
    cut(lambda length: ())
    program = compiled(model("inverted residual"), PRESETS["pynq"])
    [block] = block_layers(program)
    text = str(program.loops[block.parts[0].loops])
    for name in ("gemm(", "vector_acc_requantise_to_vin_padded(", "vector_vin_sum_taps_requantise_to_inp("):
        assert name in text
    assert "store(" in text and "padded_load_vin(" not in text and "workspace" not in text


def test_tiles_that_wait_for_each_other_at_the_end_of_a_stream() -> None:
    """The last tiles of a block make progress; once all had loaded, none could compute, and compilation failed."""
    b = Builder("qdq", np.int8, seed=3)
    x = b.conv(b.input([1, 1, 28, 28]), 8, (5, 5), pads=(2, 2, 2, 2))
    x = b.conv(b.max_pool(x, (2, 2), (2, 2), (0, 0, 0, 0)), 16, (5, 5), pads=(2, 2, 2, 2))
    b.output(b.max_pool(x, (3, 3), (3, 3), (0, 0, 0, 0)), real=True)
    program = celosia.compile(b.model(), "ultra96")
    assert program.macs_accelerator == program.macs_total
