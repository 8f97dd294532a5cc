"""Lower layers to tensor expressions over activations in blocks of channels.

Every layer has the same shape: `near` brings its input, padded, into a scratchpad; a convolution sums products in
`acc`; `out` is one pass of the vector unit; `y` puts the result into DRAM. What differs is written here once, and
templates.py says in which loops it runs.

A grouped convolution is one definition for each run of output blocks whose input blocks advance evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from celosia.compiler.layer import (
    ActivationProduct,
    Block,
    Conv,
    Layer,
    Map,
    Norm,
    Pool,
    Softmax,
    TilingError,
)
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.attention_definer import attention
from celosia.compiler.tensorize.block_space import BlockProblem
from celosia.compiler.tensorize.definer import LayerLowering
from celosia.compiler.tensorize.definition import BlockStage, LayerComputation, depthwise, window_of, zero_point
from celosia.compiler.tensorize.row_definer import RowDefiner
from celosia.compiler.tensorize.space import Problem
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import depths


def define(cfg: Config, layer: Layer) -> list[LayerComputation]:
    """The definitions of `layer`, which together compute it. TilingError where none can."""
    return list(_definitions(cfg, layer))


def _definitions(cfg: Config, layer: Layer) -> Iterator[LayerComputation]:
    if isinstance(layer, Block):
        if isinstance(layer.layers[0], ActivationProduct):
            yield attention(cfg, layer)
            return
        yield _with_maps(cfg, layer) if isinstance(layer.layers[-1], Map) else _chain(cfg, layer)
        return
    matrix = _is_matrix(layer)
    blocks = pack.blocks(layer.y.channels, cfg.block_out)
    if isinstance(layer, Conv) and not depthwise(cfg, layer):
        stored = pack.stored_weights(cfg, layer)
        for run in pack.runs(cfg, layer):
            yield LayerLowering(cfg, layer, matrix, run.first, run.blocks).convolution(layer, run, stored)
        return
    definer = LayerLowering(cfg, layer, matrix, 0, blocks)
    if isinstance(layer, ActivationProduct):
        yield definer.product(layer)
        return
    if isinstance(layer, Conv):
        yield definer.depthwise(layer)
    elif isinstance(layer, Softmax | Norm):
        rows = RowDefiner(cfg, layer, matrix, 0, blocks)
        yield rows.softmax(layer) if isinstance(layer, Softmax) else rows.norm(layer)
    else:
        yield definer.pool(layer) if isinstance(layer, Pool) else definer.map(layer)


def _is_matrix(layer: Layer) -> bool:
    """Whether it works on matrices, images of one pixel."""
    return all(act.height * act.width == 1 for act in (layer.x, layer.y)) and window_of(layer).pointwise


def _with_maps(cfg: Config, block: Block) -> LayerComputation:
    """A convolution and maps, whose passes follow that of the convolution in each tile. TilingError where they look up
    in more tables than there is room for."""
    conv, *maps = block.layers
    room = depths(cfg)["lut"]
    if sum(layer.epilogue.table is not None for layer in block.layers) > room:
        raise TilingError(f"a tile looks up in more tables than the {room} of lut_count")
    assert isinstance(conv, Conv)
    matrix, blocks = _is_matrix(conv), pack.blocks(conv.y.channels, cfg.block_out)
    (run,) = pack.runs(cfg, conv)
    definer = LayerLowering(cfg, conv, matrix, 0, blocks)
    near = definer.near("inp", run.inputs, conv.pad_value)
    level, problem = definer.products(conv, near, run, pack.stored_weights(cfg, conv))
    levels = [definer.added(level, conv.epilogue)]
    layer: Conv | Map = conv
    for number, following in enumerate(maps, 1):
        assert isinstance(following, Map)
        to = LayerLowering(cfg, following, matrix, 0, blocks, str(number), definer)
        levels[-1] = replace(levels[-1], vector=replace(levels[-1].vector, to="vin"))
        handed = definer.vector(levels[-1], layer.epilogue, zero_point(layer), to)
        levels.append(to.behind(following, handed))
        definer, layer = to, following
    out = definer.vector(levels[-1], block.epilogue, zero_point(layer))
    problem = replace(problem, behind=tuple(each.epilogue.residual is not None for each in maps))
    y = definer.result(out)
    return LayerComputation(problem, tuple(levels), out, y, tuple(definer.inputs), definer.places, definer.scalars)


def _chain(cfg: Config, block: Block) -> LayerComputation:
    """A block: each pass but the last writes where the next layer reads."""
    definers: list[LayerLowering] = []
    for number, layer in enumerate(block.layers):
        blocks = pack.blocks(layer.y.channels, cfg.block_out)
        definers.append(LayerLowering(cfg, layer, False, 0, blocks, str(number), definers[-1] if definers else None))
    definer = definers[0]
    layers = [layer for layer in block.layers if isinstance(layer, Conv | Pool)]
    near = definer.near(definer.scope, definer.input_blocks, layers[0].pad_value)
    levels: list[BlockStage] = []
    problems: list[Problem] = []
    for number, (layer, definer) in enumerate(zip(layers, definers)):
        level, problem = definer.level(layer, near)
        levels.append(level)
        problems.append(problem)
        if number + 1 < len(definers):
            to = definers[number + 1]
            levels[-1] = replace(level, vector=replace(level.vector, to=to.scope, padded=to.pads))
            near = definer.vector(levels[-1], layer.epilogue, zero_point(layer), to)
    out = definer.vector(levels[-1], block.epilogue, zero_point(layers[-1]))
    y = definer.result(out)
    return LayerComputation(
        BlockProblem(tuple(problems), block.cuts),
        tuple(levels),
        out,
        y,
        tuple(definer.inputs),
        definer.places,
        definer.scalars,
    )
