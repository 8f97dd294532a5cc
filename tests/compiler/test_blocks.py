"""The verifier accepts correct blocks, which pass tensors on chip, and finds all planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from thorough import paired, tries

from celosia.compiler.layer import Layer, Storage
from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import (
    Meaning,
    ProvenanceError,
    Rule,
    Run,
    VerifyError,
    verify,
    verify_provenance,
)
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, ASource, BSource, Destination, Opcode, ReduceOp, formats
from celosia.hw.spec.scratchpads import scratchpads

from .blocks import CONFIGS, BlockByHand, DepthwiseByHand, Hand, Shape, block_of

SHAPES = {
    "residual": Shape(),
    "stride": Shape(stride=2, height=7),
    "5x5": Shape(kernel=5),
    "equal weights": Shape(2, 2, equal=True),
    "one value": Shape(clip=(9, 5)),
}


@pytest.mark.parametrize(("name", "rows"), paired(CONFIGS, [2, 3, 5]))
@pytest.mark.parametrize(("shape", "ahead"), paired(SHAPES, [False, True]))
def test_a_block_by_hand_is_right_and_passes(name: str, shape: str, rows: int, ahead: bool) -> None:
    hand = BlockByHand(CONFIGS[name], SHAPES[shape], rows, ahead)
    np.testing.assert_array_equal(hand.run(checking=True), hand.expected())
    hand.verify()


WITHOUT_FORWARD = dict(vin_depth=256, taps=3, tap_depth=16)
DEPTHWISE = CONFIGS | {
    "4x8": Config(block_in=4, block_out=8, **WITHOUT_FORWARD),
    "4x16-batch2": Config(batch=2, block_in=4, block_out=16, **WITHOUT_FORWARD),
}


@pytest.mark.parametrize("name", DEPTHWISE)
def test_a_depthwise_convolution_means_the_same_by_taps_as_by_gemm(name: str) -> None:
    hand = DepthwiseByHand(DEPTHWISE[name])
    np.testing.assert_array_equal(hand.run(checking=True), hand.expected())
    hand.verify()


@pytest.mark.parametrize("name", DEPTHWISE)
def test_slots_beyond_the_taps_do_not_matter(name: str) -> None:
    hand = DepthwiseByHand(DEPTHWISE[name])
    slots = _tap_entries(hand).reshape(-1, *scratchpads(hand.cfg)["tap"].shape)
    slots[:, hand.cfg.taps :] = 99
    np.testing.assert_array_equal(hand.run(), hand.expected())
    hand.verify()
    slots[-1, 0, 0] ^= 1
    with pytest.raises(ProvenanceError, match=r"layer 0 'depthwise'\).*other weights"):
        hand.verify()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_whose_clip_leaves_one_value_may_be_written_as_padding_is(name: str) -> None:
    hand = BlockByHand(CONFIGS[name], Shape(clip=(9, 5)))
    for i in hand.roles["wide"]:
        i.fields |= {"requantise": 0, "clip_lo": 5, "a_y": 0, "a_x": 0}
    np.testing.assert_array_equal(hand.run(), hand.expected())
    hand.verify()
    hand.roles["wide"][1].fields |= {"clip_lo": 6, "clip_hi": 6}
    with pytest.raises(ProvenanceError, match=DEEP + r".*padding of 6.*'wide'"):
        hand.verify()


def two_blocks(cfg: Config) -> tuple[BlockByHand, BlockByHand]:
    """Return two blocks with common constants and scratchpads; the second reads the output of the first."""
    first = BlockByHand(cfg)
    x = first.y
    y = replace(x, name="z", storage=Storage("z", x.storage_groups))
    layers = block_of(cfg, Shape()).layers
    *layers, last = replace(layers[0], x=x), layers[1], layers[2]
    add = last.epilogue.residual
    assert add is not None
    epilogue = replace(last.epilogue, residual=replace(add, operand=x))
    block = Layer.block((*layers, replace(last, y=y, epilogue=epilogue)))
    addresses = first.addresses | {y.storage: first.addresses[x.storage] + -(-x.size(cfg) // 64) * 64}
    return first, BlockByHand(cfg, block, 2, True, addresses, first.packed)


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_in_one_launch_and_in_several(name: str) -> None:
    cfg = CONFIGS[name]
    first, second = two_blocks(cfg)
    storages = [hand.y.storage for hand in (first, second)]

    def check() -> None:
        streams = [BlockByHand.codes(hand) for hand in (first, second)]
        runs = [
            Run(code, [hand.layer], np.zeros(len(code), np.int32), packed, taken)
            for code, hand, packed, taken in zip(
                streams, (first, second), ({first.x.storage}, set()), (set(), {storages[1]}), strict=True
            )
        ]
        verify_provenance(cfg, runs, second.addresses, second.base, second.constants)
        both = [StreamInstruction(i.opcode, dict(i.fields), n) for n, h in enumerate((first, second)) for i in h.stream]
        insert_tokens(cfg, both, first.base)
        layer_of = np.array([i.layer for i in both], np.int32)
        run = Run(encode(cfg, both), [first.layer, second.layer], layer_of, {first.x.storage}, set(storages))
        verify_provenance(cfg, [run], second.addresses, second.base, second.constants)

    check()
    second.drop(second.roles["wide"][0])
    with pytest.raises(ProvenanceError, match=r"launch 1 \(VECTOR, layer 0.*1 'to deep'"):
        check()


# Planted faults -------------------------------------------------------------------------------------------

Fault = Callable[[BlockByHand], None]
FAULTS: dict[str, tuple[Fault, set[StrEnum], str]] = {}
WIDE, DEEP, Y = (rf"in it layer {n} 'to {name}'\) " for n, name in enumerate(("wide", "deep", "y")))
"""How the error names the layers of the block."""


def fault(message: str, *rules: StrEnum) -> Callable[[Fault], Fault]:
    """Register a planted fault, with the rules that find it and a pattern of the error message."""

    def plant(function: Fault) -> Fault:
        FAULTS[function.__name__] = function, set(rules), message
        return function

    return plant


def _constants(h: Hand, pad: str) -> int:
    """Return where the last constants of a scratchpad begin in the block's constants."""
    return h.roles[f"load {pad}"][-1].fields["dram_addr"] - h.base


def _tap_entries(h: Hand) -> NDArray[np.uint8]:
    """Return the depthwise weights as a view of the constants, [slices][kernel rows][steps][slots][block_out]."""
    first, entries = _constants(h, "tap"), h.roles["load tap"][0].fields["x_size"]
    steps = -(-3 // h.cfg.taps)
    data = h.constants[first : first + entries * scratchpads(h.cfg)["tap"].entry_bytes]
    return data.reshape(-1, 3, steps, *scratchpads(h.cfg)["tap"].shape)


# Taps.


OTHER_WEIGHTS = DEEP + r"(multiplies .* by other weights|takes padding of 7 instead of .* of 'wide')"
"""The same padding in several places may as well have been taken instead of another piece."""


@fault(OTHER_WEIGHTS, Meaning.TERMS)
def rows_of_taps_in_reverse(h: BlockByHand) -> None:
    entries = _tap_entries(h)
    entries[0] = entries[0, ::-1].copy()


@fault(OTHER_WEIGHTS, Meaning.TERMS)
def two_taps_of_an_entry_swapped(h: BlockByHand) -> None:
    entries = _tap_entries(h)
    entries[..., :2, :] = entries[..., 1::-1, :].copy()


@fault(OTHER_WEIGHTS, Meaning.TERMS)
def one_tap_changed(h: BlockByHand) -> None:
    _tap_entries(h)[1, 0, 0, 0, 2] ^= 0x80


@fault(OTHER_WEIGHTS, Meaning.TERMS)
def taps_of_another_slice(h: BlockByHand) -> None:
    h.roles["taps"][1].fields["tap_base"] += h.kernel * h.steps


@fault(OTHER_WEIGHTS, Meaning.TERMS)
def the_same_taps_for_all_rows(h: BlockByHand) -> None:
    h.roles["taps"][2].fields["tap_r"] = 0


@fault(DEEP + r"leaves out \d+ of \d+ terms", Meaning.TERMS)
def a_row_of_the_kernel_left_out(h: BlockByHand) -> None:
    h.roles["taps"][0].fields["extent_r"] -= 1


@fault(DEEP + "has reduce 1 instead of none", Meaning.OPERATION)
def the_largest_row_of_the_kernel(h: BlockByHand) -> None:
    h.roles["taps"][0].fields["reduce_op"] = ReduceOp.MAX


@fault(Y + "takes .* column 1 of 'deep' instead of .* column 0 of 'deep'", Meaning.TERMS)
def window_a_column_too_far(h: BlockByHand) -> None:
    h.roles["taps"][h.slices].fields["a_base"] += 1


@fault(DEEP + "has reduce 0 instead of none", Meaning.OPERATION)
def no_taps(h: BlockByHand) -> None:
    h.roles["taps"][0].fields["taps"] = 0


# Halo and padding.


@fault(DEEP + r"takes padding of 7 instead of .* of 'wide'", Meaning.TERMS)
def missing_halo_row(h: BlockByHand) -> None:
    """Replace the row of `wide` below the tile by padding."""
    h.roles["wide"][0].fields["extent_y"] -= 1


@fault(DEEP + r"takes padding of 7 instead of .* of 'wide'", Meaning.TERMS)
def missing_halo_row_above_the_second_tile(h: BlockByHand) -> None:
    i = h.roles["wide"][h.slices].fields
    i["extent_y"] -= 1
    i["a_base"] += i["a_y"]
    i["dst_base"] += i["dst_y"]


@fault("reads vin entry 0, which nothing wrote", Rule.WRITTEN)
def padding_not_written(h: BlockByHand) -> None:
    h.drop(h.roles["pad"][0])


@fault(DEEP + r"takes .* of 'wide' instead of padding of 7", Meaning.TERMS)
def padding_not_written_again(h: BlockByHand) -> None:
    """Omit the padding of the shorter last tile, which then finds rows of the tile before."""
    for i in h.roles["pad"][-h.slices :]:
        h.drop(i)


@fault(DEEP + "takes padding of 6 instead of padding of 7", Meaning.TERMS)
def wrong_padding(h: BlockByHand) -> None:
    for i in h.roles["pad"]:
        i.fields |= {"clip_lo": 6, "clip_hi": 6}


@fault(DEEP + r"takes what instruction \d+ has made instead of padding of 7", Meaning.TERMS)
def padding_of_two_values(h: BlockByHand) -> None:
    h.roles["pad"][1].fields["clip_lo"] = 6


@fault(DEEP + r"takes what instruction \d+ has made instead of padding of 7", Meaning.TERMS)
def padding_looked_up(h: BlockByHand) -> None:
    h.roles["pad"][0].fields["lookup"] = 1


# Intermediates.


@fault(DEEP + r"takes .* channel group 0, .* of 'wide' instead of .* channel group 1, .* of 'wide'", Meaning.TERMS)
def intermediate_of_another_slice(h: BlockByHand) -> None:
    h.roles["taps"][1].fields["a_base"] = h.roles["taps"][0].fields["a_base"]


@fault(DEEP + r"takes (.* of 'wide'|padding of 7) instead of .* of 'wide'", Meaning.TERMS)
def intermediate_of_the_tile_before(h: BlockByHand) -> None:
    """Omit the write of a slice: the taps read what the tile before has left in its slot."""
    for role in ("pad", "wide"):
        h.drop(h.roles[role][h.slices + 1])


@fault(Y + r"takes .* of 'deep' instead of .* of 'deep'", Meaning.TERMS)
def result_of_taps_of_the_tile_before(h: BlockByHand) -> None:
    h.drop(h.roles["taps"][-1])


@fault(Y + r"takes .* of 'wide' instead of .* of 'deep'", Meaning.TERMS)
def wrong_slice_of_the_depthwise_convolution_left_out(h: BlockByHand) -> None:
    """Pass `wide` to the last convolution without the depthwise one."""
    wide, taps = h.roles["wide"][0].fields, h.roles["taps"][0].fields
    taps |= wide | {name: taps[name] for name in taps if name.startswith("dst_")}
    taps |= dict(destination=Destination.INP, taps=0, a_source=ASource.ACC, lookup=0, extent_r=1, extent_s=1)
    taps |= {"extent_y": h.tile_rows}


@fault(DEEP + r"multiplies .* of 'wide' by other weights", Meaning.TERMS)
def rows_of_an_intermediate_swapped(h: BlockByHand) -> None:
    """Exchange the first two rows of `wide`."""
    i = h.roles["wide"][0]
    f = i.fields
    f["extent_y"] -= 2
    first, second = (dict(f, extent_y=1, a_base=f["a_base"] + n * f["a_y"]) for n in range(2))
    first["dst_base"] += f["dst_y"]
    f |= {"a_base": f["a_base"] + 2 * f["a_y"], "dst_base": f["dst_base"] + 2 * f["dst_y"]}
    for other in (first, second):
        h.insert_after(i, Opcode.VECTOR, other)


@fault(Y + "takes .* of 'wide' as B instead of .* of 'x'", Meaning.OPERAND)
def residual_of_the_intermediate(h: BlockByHand) -> None:
    h.roles["out"][0].fields["b_base"] = h.roles["wide"][0].fields["dst_base"]


@fault(DEEP + r"takes .* of 'x' instead of .* of 'wide'", Meaning.TERMS)
def load_over_an_intermediate(h: BlockByHand) -> None:
    f = h.roles["load residual"][0].fields
    over = h.roles["wide"][0].fields["dst_base"]
    h.insert_after(h.roles["wide"][0], Opcode.LOAD, f | dict(sram_base=over, x_size=1, y_size=1, z_size=1))


@fault(Y + r"takes .* of 'x' instead of .* of 'deep'", Meaning.TERMS)
def load_over_the_result_of_taps(h: BlockByHand) -> None:
    f = h.roles["load x"][0].fields
    over = h.roles["taps"][h.parts - 1].fields["dst_base"]
    one = dict(sram_base=over, x_size=1, y_size=1, z_size=1)
    h.insert_after(h.roles["taps"][h.parts - 1], Opcode.LOAD, f | one)


@fault(Y + r"takes .* of 'deep' instead of .* of 'deep'", Meaning.TERMS)
def taps_a_place_of_inp_too_far(h: BlockByHand) -> None:
    f = h.roles["taps"][-1].fields
    f["extent_x"] -= 1
    f["dst_base"] += h.parts


# What each layer does.


@fault(WIDE + "scales with other parameters", Meaning.PARAMETERS)
def wrong_parameters_of_the_first_layer(h: BlockByHand) -> None:
    h.roles["wide"][2].fields["par_base"] -= 1


@fault(DEEP + "scales with other parameters", Meaning.PARAMETERS)
def wrong_parameters_of_the_middle_layer(h: BlockByHand) -> None:
    h.roles["taps"][1].fields["par_base"] = h.par[0] + 1


@fault(Y + "scales with other parameters", Meaning.PARAMETERS)
def wrong_parameters_of_the_last_layer(h: BlockByHand) -> None:
    h.roles["out"][0].fields["par_n"] = 0


@fault(WIDE + r"has clip \(-100, 119\) instead of \(-100, 120\)", Meaning.OPERATION)
def wrong_clip_of_the_first_layer(h: BlockByHand) -> None:
    h.roles["wide"][-1].fields["clip_hi"] -= 1


@fault(DEEP + "has zero point", Meaning.OPERATION)
def wrong_zero_point_of_the_middle_layer(h: BlockByHand) -> None:
    h.roles["taps"][-1].fields["zero_point"] ^= 1


@fault(DEEP + "looks up no table", Meaning.OPERATION)
def no_table(h: BlockByHand) -> None:
    h.roles["taps"][-1].fields["lookup"] = 0


@fault(DEEP + "looks up another table", Meaning.OPERATION)
def wrong_table(h: BlockByHand) -> None:
    h.constants[_constants(h, "lut") + 5] ^= 1


@fault(Y + "has residual", Meaning.OPERATION)
def wrong_scale_of_the_residual(h: BlockByHand) -> None:
    h.roles["out"][-1].fields["scale_v"] += 1


@fault(Y + "has residual none instead of", Meaning.OPERATION)
def no_residual(h: BlockByHand) -> None:
    h.roles["out"][-1].fields |= {"rescale_add": 0, "b_source": BSource.IMM}


# Sums.


@fault(WIDE + "multiplies .* of 'x' by other weights", Meaning.TERMS)
def weights_of_another_slice(h: BlockByHand) -> None:
    h.roles["gemm wide"][1].fields["wgt_base"] += h.blocks_in


@fault(WIDE + "takes .* of 'x' instead of .* of 'x'", Meaning.TERMS)
def input_of_the_row_above(h: BlockByHand) -> None:
    for i in h.roles["load x"]:
        if i.fields["dram_addr"] > 0:
            i.fields["dram_addr"] -= h.x.width * h.cfg.piece_bytes


@fault(Y + r"leaves out \d+ of \d+ terms .* of 'deep'", Meaning.TERMS)
def missing_slice_of_the_sum(h: BlockByHand) -> None:
    h.drop(h.roles["gemm y"][1])


@fault(Y + r"takes \d+ terms too many .* of 'deep'", Meaning.TERMS)
def slice_twice(h: BlockByHand) -> None:
    i = h.roles["gemm y"][1]
    h.insert_after(i, Opcode.GEMM, dict(i.fields))


@fault(Y + r"leaves out \d+ of \d+ terms .* of 'deep'", Meaning.TERMS)
def sum_begun_again(h: BlockByHand) -> None:
    h.roles["gemm y"][1].fields["accumulate"] = 0


@fault(Y + r"takes .* of 'deep' instead of .* of 'deep'|multiplies .* of 'deep' by other weights", Meaning.TERMS)
def weights_of_the_sum_of_another_slice(h: BlockByHand) -> None:
    h.roles["gemm y"][0].fields["wgt_base"] += 1


# Stores.


@fault("stores as .* of its output what is .* of layer 0 'to wide'", Meaning.PLACE)
def intermediate_stored(h: BlockByHand) -> None:
    """Store the first layer's result in place of the last layer's."""
    out, wide = h.roles["out"][0], h.roles["wide"][h.slices - 1].fields
    row = dict(wide, destination=Destination.OUT, dst_base=out.fields["dst_base"], extent_y=1, extent_x=1)
    h.insert_after(h.roles["out"][0], Opcode.VECTOR, row)


@fault("stores outside the memory of its output", Meaning.PLACE)
def intermediate_stored_elsewhere(h: BlockByHand) -> None:
    """Store an intermediate tensor in memory reserved for it, though it has no place in DRAM."""
    end = h.base
    h.addresses[h.first.y.storage] = end
    h.base += 4096
    for i in h.stream:
        if i.opcode == Opcode.LOAD and i.fields["dram_addr"] >= end:
            i.fields["dram_addr"] += 4096
    store = h.roles["store"][0]
    h.insert_after(store, Opcode.STORE, store.fields | {"dram_addr": end})


@fault("nothing has stored", Meaning.ONCE)
def lost_store(h: BlockByHand) -> None:
    h.drop(h.roles["store"][-1])


# An instruction that takes what it makes.


@fault("reads an entry of vin that an earlier step of it wrote", Rule.OWN_RESULT)
def vin_from_vin(h: BlockByHand) -> None:
    """Copy entries of vin so that each step reads what the step before has written."""
    f = h.roles["pad"][0].fields
    at = f["dst_base"]
    h.insert_after(h.roles["pad"][0], Opcode.VECTOR, f | dict(a_source=ASource.VIN, a_base=at, a_x=1, dst_base=at + 1))


@fault("reads an entry of vin that an earlier step of it wrote", Rule.OWN_RESULT)
def taps_from_vin_to_vin(h: BlockByHand) -> None:
    f = h.roles["taps"][0].fields
    f |= {"destination": Destination.VIN, "dst_base": f["a_base"] + 1, "dst_x": 1, "dst_y": f["extent_x"]}


@fault("reads an entry of vin that an earlier step of it wrote", Rule.OWN_RESULT)
def residual_from_vin_to_vin(h: BlockByHand) -> None:
    f = h.roles["out"][0].fields
    f |= {"destination": Destination.VIN, "dst_base": f["b_base"] + 1}


# Scratchpads too small.


@fault(r"reaches inp entry 1024 of 1024 with dst|reaches inp entry 256 of 256 with dst", Rule.RANGE)
def beyond_the_end_of_inp(h: BlockByHand) -> None:
    f = h.roles["taps"][0].fields
    f["dst_base"] = h.parts * (h.cfg.inp_depth - h.tile_rows * h.y.width + 1)


@fault(r"reaches vin entry \d+ of \d+ with a", Rule.RANGE)
def taps_beyond_the_end_of_vin(h: BlockByHand) -> None:
    f = h.roles["taps"][0].fields
    last = sum((f[f"extent_{loop}"] - 1) * f[f"a_{loop}"] for loop in "yxrs")
    f["a_base"] = h.cfg.vin_depth - 1 - last


@fault(r"reaches tap entry 64 of 64 with tap", Rule.RANGE)
def beyond_the_end_of_tap(h: BlockByHand) -> None:
    h.roles["taps"][0].fields["tap_base"] = h.cfg.tap_depth - h.steps * h.kernel + 1


@fault("reads tap entry 0, which nothing wrote", Rule.WRITTEN)
def taps_not_loaded(h: BlockByHand) -> None:
    h.drop(h.roles["load tap"][0])


@pytest.mark.parametrize(("planted", "name"), paired(FAULTS, CONFIGS))
def test_planted_faults_are_found(name: str, planted: str) -> None:
    change, rules, message = FAULTS[planted]
    hand = BlockByHand(CONFIGS[name])
    change(hand)
    with pytest.raises(VerifyError, match=message) as caught:
        hand.verify()
    assert caught.value.rule in rules


# A fault that only a result that is no linear function of its operands tells ------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_term_in_the_wrong_sum_of_two_with_equal_weights_is_found(name: str) -> None:
    """The verifier finds a term in the wrong one of two sums with equal weights.

    Each window of the depthwise convolution covers the whole image; f(u) + f(v) is not f(u + w) + f(v - w).
    """
    hand = BlockByHand(CONFIGS[name], Shape(2, 2, equal=True))
    i = hand.roles["gemm wide"][0]
    i.fields["extent_k"] -= 1
    f = i.fields | {"accumulate": 1, "extent_k": 1, "extent_y": 1, "extent_x": 1}
    f["inp_base"] += i.fields["extent_k"] * f["inp_k"]
    f["wgt_base"] += i.fields["extent_k"] * f["wgt_k"]
    for pixel in range(4):
        sums = f["acc_base"] + max(pixel, 1)  # that of pixel 0 is added to pixel 1
        hand.insert_after(i, Opcode.GEMM, f | {"inp_base": f["inp_base"] + pixel, "acc_base": sums})
    assert (hand.run(checking=True) != hand.expected()).any()
    with pytest.raises(ProvenanceError, match=WIDE + r".*\d+ of \d+ terms") as caught:
        hand.verify()
    assert caught.value.rule == Meaning.TERMS


# Order --------------------------------------------------------------------------------------------------------


def without_token(h: BlockByHand, giver: StreamInstruction, taker: StreamInstruction) -> NDArray[np.uint8]:
    """Return the code without the token that `giver` gives to the unit of `taker`."""
    h.codes()
    giver.fields["post"] &= ~(1 << UNIT_OF[taker.opcode])
    taker.fields["wait"] &= ~(1 << UNIT_OF[giver.opcode])
    return encode(h.cfg, h.stream)


@pytest.mark.parametrize("name", CONFIGS)
def test_gemm_must_wait_for_what_vector_writes_to_inp(name: str) -> None:
    hand = BlockByHand(CONFIGS[name])
    code = without_token(hand, hand.roles["taps"][hand.parts - 1], hand.roles["gemm y"][0])
    with pytest.raises(VerifyError, match=r"GEMM\) reads inp entry \d+.*VECTOR"):
        hand.verify(code)


@pytest.mark.parametrize("name", CONFIGS)
def test_vector_must_wait_until_gemm_has_read_inp(name: str) -> None:
    hand = BlockByHand(CONFIGS[name], ahead=True)
    code = without_token(hand, hand.roles["gemm y"][0], hand.roles["taps"][hand.parts])
    with pytest.raises(VerifyError, match=r"VECTOR\) writes inp entry \d+.*GEMM"):
        hand.verify(code)


@pytest.mark.parametrize("name", CONFIGS)
def test_load_must_wait_until_vector_has_read_vin(name: str) -> None:
    hand = BlockByHand(CONFIGS[name])
    hand.codes()
    over = hand.roles["wide"][0].fields["dst_base"]
    f = hand.roles["load residual"][0].fields | dict(sram_base=over, x_size=1, y_size=1, z_size=1, wait=0, post=0)
    hand.insert_after(hand.roles["wide"][0], Opcode.LOAD, f)
    with pytest.raises(VerifyError, match=r"LOAD\) writes vin entry \d+.*VECTOR"):
        hand.verify(encode(hand.cfg, hand.stream))


@pytest.mark.parametrize("name", CONFIGS)
def test_vector_must_wait_for_taps(name: str) -> None:
    hand = BlockByHand(CONFIGS[name])
    late, load = hand.roles["wide"][0], hand.roles["load tap"][0]
    hand.drop(load)
    hand.insert_after(late, Opcode.LOAD, load.fields)
    load = hand.stream[hand.stream.index(late) + 1]
    code = without_token(hand, load, hand.roles["taps"][0])
    with pytest.raises(VerifyError, match=r"VECTOR\) reads tap entry 0.*LOAD"):
        hand.verify(code)


# Any field of any instruction -----------------------------------------------------------------------------------


@settings(max_examples=tries(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_changed_field_is_found_or_changes_nothing(data: st.DataObject) -> None:
    cfg = CONFIGS[data.draw(st.sampled_from(list(CONFIGS)))]
    shape = SHAPES[data.draw(st.sampled_from(list(SHAPES)))]
    hand: Hand
    if data.draw(st.integers(0, 4)):
        hand = BlockByHand(cfg, shape, data.draw(st.integers(2, 5)), data.draw(st.booleans()))
    else:
        hand = DepthwiseByHand(cfg)
    i = data.draw(st.sampled_from(hand.stream))
    fields = [f for f in formats(cfg)[i.opcode].fields if f.name not in ("opcode", "wait", "post")]
    changed = data.draw(st.sampled_from(fields))
    low, high = (
        (-(1 << changed.width - 1), (1 << changed.width - 1) - 1) if changed.signed else (0, (1 << changed.width) - 1)
    )
    old = i.fields.get(changed.name, 0)
    near = [old + step for step in (-64, -8, -4, -2, -1, 1, 2, 4, 8, 64) if low <= old + step <= high]
    i.fields[changed.name] = data.draw(st.sampled_from(near) | st.integers(low, high))
    assume(i.fields[changed.name] != old)
    try:
        verify(cfg, encode(cfg, hand.stream), hand.base + len(hand.constants), (0, hand.base))
    except VerifyError as error:
        if error.rule.name not in ("ORDER", "WRITTEN"):
            return
    try:
        hand.codes()
    except ValueError:  # a load across the end of the activations, for which no tokens can be found
        assume(False)
    try:
        hand.verify()
    except VerifyError:
        return
    np.testing.assert_array_equal(hand.run(), hand.expected())
