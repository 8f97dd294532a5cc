"""The declared behaviour of each intrinsic equals its instruction in sim/functional/reference.py.

Both sides get scratchpad entries. The interpreter runs the behaviour, `reference` the instruction that the lowering
rule derives from the parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from expressions import PAIR, TALL, TINY, WIDE
from numpy.typing import NDArray

from celosia.compiler import expr as T
from celosia.compiler.expr.lower import lower
from celosia.compiler.expr.nodes import Axis, Tensor, Var, walk
from celosia.compiler.tensorize import intrinsics as hw
from celosia.compiler.tensorize.intrinsic import Compute, Move, TensorIntrinsic
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import Buffer, Destination, Opcode, formats
from celosia.sim.functional import reference

Array = NDArray[Any]
CONFIGS = pytest.mark.parametrize(
    "cfg", [TINY, WIDE, TALL, PAIR, Config(batch=2, block_in=8, block_out=4, bus_bytes=4)],
    ids=["tiny", "8x4", "4x8", "batch2", "batch2-8x4"],
)  # fmt: skip


def declared(cfg: Config, name: str) -> TensorIntrinsic:
    found = hw.declared(cfg)[name]
    assert isinstance(found, TensorIntrinsic)
    return found


def behave(behaviour: Tensor, tiles: dict[str, Array], values: dict[str, float]) -> Array:
    """Interpret a behaviour on these tiles and return the result."""
    inputs = [t for t in T.create_schedule(behaviour).tensors if t.body is None]
    variables = _parameters(behaviour)
    function = lower(behaviour, inputs, "behaviour", variables)
    T.verify(function)
    return T.interpret(function, *(tiles[t.name] for t in inputs), scalars=values)[0]


def _parameters(behaviour: Tensor) -> list[Var]:
    assert behaviour.body is not None
    found = (n for n in walk(behaviour.body) if isinstance(n, Var) and not isinstance(n, Axis))
    return list(dict.fromkeys(found))


def fields(cfg: Config, opcode: Opcode, **chosen: int) -> dict[str, int]:
    """Return all fields of an instruction, as a decoder returns them."""
    form = formats(cfg)[opcode]
    extents = {field.name: 1 for field in form.fields if field.name.startswith("extent_")}
    return form.decode(form.encode(**{**extents, **chosen}))


def parameters(rng: np.random.Generator, cfg: Config, reach: int) -> NDArray[np.uint64]:
    """Draw an entry of par for sums of about `reach`."""
    bias = rng.integers(-reach, reach + 1, cfg.block_out)
    multiplier = rng.integers(1 << 23, 1 << 24, cfg.block_out).astype(np.uint64)
    power = int(np.ceil(np.log2(reach)))
    shift = np.clip(rng.integers(power + 14, power + 20, cfg.block_out), 0, 63).astype(np.uint64)
    low = bias.astype(np.int32).view(np.uint32).astype(np.uint64)
    return low | multiplier << np.uint64(32) | shift << np.uint64(56)


def parameters_of(p: hw.VectorOp, rng: np.random.Generator) -> dict[str, float]:
    low, high = sorted(int(v) for v in rng.integers(-128, 128, 2))
    add_low, add_high = sorted(int(v) for v in rng.integers(-128, 128, 2))
    if rng.random() < 0.3:
        low, high, add_low, add_high = -128, 127, -128, 127
    values: dict[str, float] = {}
    if p.multiply:
        values |= {"a_offset": int(rng.integers(-255, 256)), "b_offset": int(rng.integers(-255, 256))}
    if p.requantise:
        values |= {"zero_point": float(rng.integers(-128, 128)), "lo": float(low), "hi": float(high)}
    else:
        values |= {"clip_lo": low, "clip_hi": high}
    if p.residual:
        shift = int(rng.integers(0, 20))
        scales = (float(rng.integers(-(2 << shift), (2 << shift) + 1)) for _ in range(3))
        values |= dict(zip(("scale_v", "scale_b", "scale_c"), scales))
        values |= {"unit": 2.0**-shift, "add_lo": float(add_low), "add_hi": float(add_high)}
    return values


def windowed(cfg: Config, p: hw.VectorOp, size: int) -> Tensor:
    """Return the behaviour of a pass with its window, on [size] entries of A."""
    intrinsic = declared(cfg, p.name)
    if not p.reduce:
        return intrinsic.behaviour
    shape = hw.tile_shape(cfg, "out")
    window = T.reduce_axis(size, "window")
    tiles = {tile.name: tile for tile in intrinsic.tiles}
    a = T.placeholder((size, *shape), tiles["a"].dtype, "a")
    variables = {v.name: v for v in intrinsic.parameters}

    def element(piece: T.Expr, b: T.Expr, g: T.Expr) -> T.Expr:
        index: dict[str, tuple[Any, ...]] = {"par": (piece * cfg.group + g,), "table": (0,), "a": (window, piece, b, g)}
        get = lambda name: (a if name == "a" else tiles[name])[index.get(name, (piece, b, g))]  # noqa: E731
        return hw.vector_value(p, get, variables.__getitem__, (window,))

    return T.compute(shape, element, "out", axes=("p", "b", "g"))


@CONFIGS
@pytest.mark.parametrize("p", list(hw.vector_ops(Config())), ids=lambda p: p.name)
def test_passes_mean_what_vector_does(cfg: Config, p: hw.VectorOp) -> None:
    rng = np.random.default_rng(len(p.name))
    rule = declared(cfg, p.name).rule
    assert isinstance(rule, Compute) and rule.opcode == Opcode.VECTOR
    for size in (1, 5) if p.reduce else (1,):
        for far in (False, False, False, True):  # once in a while sums far beyond float32's 24 bits
            reach = {"acc": 1 << (30 if far else 12), "vin": 127 * size}[p.source]
            if p.multiply:
                reach = 127
            state = reference.State(cfg)
            shape = (size, *hw.tile_shape(cfg, "out"))
            a = rng.integers(-reach, reach + 1, shape) if p.source == "acc" else rng.integers(-128, 128, shape)
            entries = a.astype(hw.element_type(cfg, p.source))
            b = rng.integers(-128, 128, shape[1:]).astype(np.int8)
            par = parameters(rng, cfg, 1 << 15 if p.multiply else reach)
            table = rng.integers(-128, 128, 256).astype(np.int8)
            getattr(state, p.source)[3 : 3 + size] = entries
            state.vin[9], state.par[1], state.lut[1] = b, par, table
            values = parameters_of(p, rng)
            tiles = {"a": entries if p.reduce else entries[0], "b": b, "par": par, "table": table}
            behaviour = windowed(cfg, p, size)
            assert {v.name for v in _parameters(behaviour)} == set(values)
            expected = behave(behaviour, tiles, values)
            given = {"a_base": 3, "b_base": 9, "par_base": 1, "table": 1, "dst_base": 2}
            given |= {"extent_s": size, "a_s": 1}
            used = {name: given[name] for name in given if _reads(p, name)}
            reference.vector(state, fields(cfg, Opcode.VECTOR, **used, **rule.fields(**values)))
            np.testing.assert_array_equal(state.out[2], expected)
            assert len(np.unique(expected)) > 1 or expected.size < 16 or _narrow(values)


def _reads(p: hw.VectorOp, field: str) -> bool:
    wanted = {"b_base": p.multiply or p.residual, "par_base": p.requantise, "table": p.lookup}
    return wanted.get(field, True)


def _narrow(values: dict[str, float]) -> bool:
    """Return whether clips alone may make all lanes equal."""
    pairs = (("lo", "hi"), ("clip_lo", "clip_hi"), ("add_lo", "add_hi"))
    return any(low in values and values[high] - values[low] < 255 for low, high in pairs)


@CONFIGS
def test_requantise_and_window_max(cfg: Config) -> None:
    rng = np.random.default_rng(0)
    state, shape = reference.State(cfg), hw.tile_shape(cfg, "out")
    state.acc[2] = rng.integers(-5000, 5000, shape)
    state.par[0] = parameters(rng, cfg, 5000)
    intrinsic = declared(cfg, "requantise")
    values = {"zero_point": -7.0, "lo": -100.0, "hi": 90.0}
    assert isinstance(intrinsic.rule, Compute)
    reference.vector(state, fields(cfg, Opcode.VECTOR, a_base=2, **intrinsic.rule.fields(**values)))
    expected = behave(intrinsic.behaviour, {"acc": state.acc[2], "par": state.par[0]}, values)
    np.testing.assert_array_equal(state.out[0], expected)
    largest = declared(cfg, "window_max").rule
    assert isinstance(largest, Compute)
    state.vin[:6] = rng.integers(-128, 128, (6, *shape))
    reference.vector(state, fields(cfg, Opcode.VECTOR, extent_s=6, a_s=1, **largest.fields()))
    np.testing.assert_array_equal(state.out[0], state.vin[:6].max(0))


@CONFIGS
def test_gemm(cfg: Config) -> None:
    rng = np.random.default_rng(0)
    state, intrinsic = reference.State(cfg), declared(cfg, "gemm")
    state.inp[5] = rng.integers(-128, 128, hw.tile_shape(cfg, "inp"))
    state.wgt[7] = rng.integers(-128, 128, hw.tile_shape(cfg, "wgt"))
    expected = behave(intrinsic.behaviour, {"inp": state.inp[5], "wgt": state.wgt[7]}, {})
    given = {"inp_base": 5, "wgt_base": 7, "acc_base": 1}
    reference.gemm(state, fields(cfg, Opcode.GEMM, **given))
    np.testing.assert_array_equal(state.acc[1], expected)
    reference.gemm(state, fields(cfg, Opcode.GEMM, **given, accumulate=1))
    np.testing.assert_array_equal(state.acc[1], 2 * expected)


LOADS = [f"{kind}_{scope}" for kind in ("load", "padded_load") for scope in hw.BUFFERS] + ["widening_load"]


@CONFIGS
@pytest.mark.parametrize("name", LOADS)
def test_loads(cfg: Config, name: str) -> None:
    """A LOAD gives an element of DRAM, or padding."""
    rng = np.random.default_rng(0)
    if name.endswith("_tap"):
        cfg = replace(cfg, taps=3)
    if name.endswith("_exp"):
        cfg = replace(cfg, batch=1, softmax=1)
    if name.endswith("_book"):
        cfg = replace(cfg, weight_bits=4)
    intrinsic = declared(cfg, name)
    dst, src = intrinsic.tiles
    scope, size = intrinsic.scopes["dst"], src.nbytes
    assert isinstance(intrinsic.rule, Move) and intrinsic.rule.opcode == Opcode.LOAD
    dram = rng.integers(0, 256, 256 + 4 * size, np.uint8)
    tile = dram[64 : 64 + size].view(src.dtype).reshape(src.shape)
    block = {"buffer": int(hw.BUFFERS[scope]), "x_size": 1, "y_size": 1, "z_size": 1, "dram_addr": 64, "sram_x": 1}
    block |= intrinsic.rule.fields()
    state = reference.State(cfg)
    padded = name.startswith("padded") and scope in ("inp", "acc", "vin")
    if padded:
        block |= {"pad_left": 1, "pad_value": -5, "sram_base": 1}
    reference.load(state, dram, fields(cfg, Opcode.LOAD, **block))
    found = state.elements(Buffer(block["buffer"])).view()
    for at, inside in ((1, False), (2, True)) if padded else ((0, True),):
        values = {"inside": inside, "pad": -5} if "padded" in name else {}
        if "padded" in name and not padded and scope in ("par", "wgt", "lut"):
            values["pad"] = 0
        expected = behave(intrinsic.behaviour, {"src": tile}, values)
        np.testing.assert_array_equal(found[at], expected.reshape(-1).astype(found.dtype))
    assert dst.dtype == hw.element_type(cfg, scope)


@CONFIGS
def test_store(cfg: Config) -> None:
    rng = np.random.default_rng(0)
    state, intrinsic = reference.State(cfg), declared(cfg, "store")
    state.out[:] = rng.integers(-128, 128, state.out.shape)
    dram = np.zeros(512, np.uint8)
    block = {"x_size": 1, "y_size": 1, "z_size": 1, "dram_addr": 64, "sram_base": 3, "sram_x": 1}
    reference.store(state, dram, fields(cfg, Opcode.STORE, **block))
    tile = state.out.reshape(-1, cfg.batch, cfg.group)[3]
    expected = behave(intrinsic.behaviour, {"src": tile}, {})
    np.testing.assert_array_equal(dram[64 : 64 + expected.size].view(np.int8), expected.reshape(-1))
    assert not dram[:64].any() and not dram[64 + expected.size :].any()


def test_passes_have_names_of_their_own() -> None:
    assert len(list(hw.vector_ops(Config()))) == 16
    full = PRESETS["tiny"]
    names = [p.name for p in hw.vector_ops(full)]
    assert len(set(names)) == len(names) == 64
    for p in hw.vector_ops(full):
        rule = declared(full, p.name).rule
        assert isinstance(rule, Compute)
        fields = rule.fields(**parameters_of(p, np.random.default_rng(0)))
        assert fields["destination"] == Destination[p.to.upper()] and fields.get("taps", 0) == p.taps
