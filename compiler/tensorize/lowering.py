"""Lower layers to tensor expressions over activations in blocks of channels.

All layers take the same path: their input, padded, in a scratchpad; sums of products in `acc`, where GEMM multiplies;
`out`, one pass of the vector unit; `y` in DRAM. This file chooses the lowering for a layer or block; layer_lowering.py,
row_lowering.py and attention_lowering.py make the tensors. templates.py gives the expressions their loops.

A grouped convolution is one computation for each run of output blocks whose input blocks advance evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from celosia.compiler.layer import Layer, TilingError
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.attention_lowering import lower_attention
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.computation import BlockStage, LayerComputation, window_of
from celosia.compiler.tensorize.layer_lowering import LayerLowering
from celosia.compiler.tensorize.row_lowering import RowLowering
from celosia.compiler.tensorize.space import Workload
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import depths


def lower_layer(cfg: Config, layer: Layer) -> list[LayerComputation]:
    """Lower `layer` to computations that together make its output. Raises TilingError if the accelerator cannot."""
    return list(_generate_computations(cfg, layer))


def _generate_computations(cfg: Config, layer: Layer) -> Iterator[LayerComputation]:
    """Yield the computations of `layer`: one, or one for each run of a grouped convolution (`pack.weight_runs`)."""
    if layer.is_block:
        yield _lower_block(cfg, layer)
        return
    matrix = _is_matrix(layer)
    if layer.gemm is not None and not layer.is_depthwise(cfg):
        stored = pack.stored_weights(cfg, layer.gemm)
        for run in pack.weight_runs(cfg, layer.gemm):
            yield LayerLowering(cfg, layer, matrix, run.first, run.blocks).lower_convolution(run, stored)
        return
    blocks = pack.blocks(layer.y.channels, cfg.block_out)
    if layer.works_on_rows:
        yield RowLowering(cfg, layer, matrix, 0, blocks).lower_rows()
    elif layer.product is not None:
        yield LayerLowering(cfg, layer, matrix, 0, blocks).lower_product(layer.product)
    else:
        yield LayerLowering(cfg, layer, matrix, 0, blocks).lower_vector_layer()


def _lower_block(cfg: Config, block: Layer) -> LayerComputation:
    """Lower a block of layers: attention, a convolution with maps, or a chain. Raises TilingError."""
    if block.layers[0].product is not None:
        return lower_attention(cfg, block)
    return _lower_with_maps(cfg, block) if block.layers[-1].is_map else _lower_chain(cfg, block)


def _is_matrix(layer: Layer) -> bool:
    """Whether the layer works on matrices whose rows are images of one pixel, which are then computed as one row of
    pixels."""
    return all(act.height * act.width == 1 for act in (layer.x, layer.y)) and window_of(layer).pointwise


def _lower_with_maps(cfg: Config, block: Layer) -> LayerComputation:
    """Lower a convolution and the maps after it, whose vector passes follow in each of its tiles.

    Raises TilingError if they use more tables than fit scratchpad lut.
    """
    conv, *maps = block.layers
    room = depths(cfg)["lut"]
    if sum(layer.epilogue.table is not None for layer in block.layers) > room:
        raise TilingError(f"a tile looks up in more tables than the {room} of lut_count")
    assert conv.gemm is not None
    matrix, blocks = _is_matrix(conv), pack.blocks(conv.y.channels, cfg.block_out)
    (run,) = pack.weight_runs(cfg, conv.gemm)
    lowering = LayerLowering(cfg, conv, matrix, 0, blocks)
    on_chip = lowering.make_input("inp", run.inputs, conv.pad_value)
    stage, workload = lowering.make_gemm_stage(on_chip, run, pack.stored_weights(cfg, conv.gemm))
    stages = [stage]
    for number, following in enumerate(maps, 1):
        to = LayerLowering(cfg, following, matrix, 0, blocks, str(number), lowering)
        stages[-1] = replace(stages[-1], vector=replace(stages[-1].vector, to="vin"))
        result_on_chip = lowering.make_pass_result(stages[-1], to)
        stages.append(to.make_following_stage(result_on_chip))
        lowering = to
    out = lowering.make_pass_result(stages[-1])
    workload = replace(workload, behind=tuple(layer.epilogue.residual is not None for layer in maps))
    y = lowering.make_output(out)
    return LayerComputation(workload, tuple(stages), out, y, tuple(lowering.inputs), lowering.places, lowering.scalars)


def _lower_chain(cfg: Config, block: Layer) -> LayerComputation:
    """Lower a chain of convolutions and poolings: each vector pass but the last writes the next layer's input on
    chip."""
    lowerings: list[LayerLowering] = []
    for number, layer in enumerate(block.layers):
        blocks = pack.blocks(layer.y.channels, cfg.block_out)
        lowerings.append(LayerLowering(cfg, layer, False, 0, blocks, str(number), lowerings[-1] if lowerings else None))
    lowering = lowerings[0]
    on_chip = lowering.make_input(lowering.scope, lowering.input_blocks, block.layers[0].pad_value)
    stages: list[BlockStage] = []
    workloads: list[Workload] = []
    for number, lowering in enumerate(lowerings):
        stage, workload = lowering.make_stage(on_chip)
        stages.append(stage)
        workloads.append(workload)
        if number + 1 < len(lowerings):
            to = lowerings[number + 1]
            stages[-1] = replace(stage, vector=replace(stage.vector, to=to.scope, padded=to.has_padding))
            on_chip = lowering.make_pass_result(stages[-1], to)
    out = lowering.make_pass_result(stages[-1])
    y = lowering.make_output(out)
    return LayerComputation(
        BlockWorkload(tuple(workloads), block.cuts),
        tuple(stages),
        out,
        y,
        tuple(lowering.inputs),
        lowering.places,
        lowering.scalars,
    )
