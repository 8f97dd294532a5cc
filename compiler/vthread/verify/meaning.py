"""The meaning of layers as random scalars of the integers modulo 2^64: one for each piece of each output.

A *piece* is what LOAD and STORE move, [batch][group] of an activation. It is represented by a random number, its
symbol; weights by a random linear hash, so that the sum of a convolution is a sum of products of scalars. What a vector
operation makes of that is no linear function of it, and neither is its scalar. Nothing here knows of tiles, rings or
tokens: everything follows from the dataclasses of `layer.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Activation, ActivationGemm, Gemm, Layer, Requantise, Softmax, Storage, Window
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import BinaryOp, ReduceOp
from celosia.hw.spec.scratchpads import PAR_FIELDS

Scalars = NDArray[np.uint64]


class Operation(NamedTuple):
    """Operation of a vector instruction on its operands, without those of its fields that have no effect."""

    offset: int = 0
    """Added to each A."""
    reduce: int | None = None
    """How a window of more than one A is combined."""
    binary: tuple[int, int, int | None] | None = None
    """Operation with B, what is added to B, and B itself where it is a number."""
    zero_point: int | None = None
    """Added after requantising."""
    clip: tuple[int, int] | None = None
    table: Hashable = None
    """The bytes of the table."""
    residual: tuple[int, int, int, int, int, int] | None = None
    """Factors of v and of B, constant, shift, smallest and largest result."""
    int8: bool = True
    rows: tuple[Hashable, int] | None = None
    """For a softmax or norm: the contents of exp, or whether the mean is taken off, and epsilon; and the elements of a
    row; B is what rows are, see `Symbols.row_of`."""

    @property
    def constant(self) -> int | None:
        """The result where it is one number whatever the operands, because the clip leaves no other."""
        if self.clip is None or self.clip[0] < self.clip[1] or self.table is not None or self.residual is not None:
            return None
        return self.clip[1]


class Symbols:
    """The random scalars of one verification; the same content always has the same one.

    The seed is fixed: who makes the instructions knows nothing of it, and a refusal can be repeated.
    """

    def __init__(self, cfg: Config, seed: int = 0x5EED) -> None:
        self.cfg = cfg
        self.random = np.random.PCG64(seed)
        self.known: dict[Hashable, np.uint64] = {}
        self.lanes = self.fresh(cfg.group * cfg.group).reshape(cfg.group, cfg.group)
        """Factors of weights [group out][group in]."""
        self.bias = np.uint64(128 * sum(self.lanes.reshape(-1).tolist()) & (1 << 64) - 1)
        self.a, self.b = (np.uint64(value | 1) for value in self.fresh(2).tolist())
        """Factors of the operands of a vector instruction; odd, so that products keep what they multiply."""
        self.factors = self.fresh(3) | np.uint64(1)
        """Factors of `result`."""
        self.rows = self.fresh(cfg.block_out) | np.uint64(1)
        """Factors of the pieces of activations that lie in an entry of wgt, one for each output channel."""

    def fresh(self, count: int) -> Scalars:
        """`count` random numbers."""
        numbers: Scalars = self.random.random_raw(count)
        return numbers

    def of(self, *content: Hashable) -> np.uint64:
        """The symbol of `content`."""
        if content not in self.known:
            self.known[content] = np.uint64(self.random.random_raw())
        return self.known[content]

    def padding(self, value: int) -> np.uint64:
        """Contents of a piece of padding with this value."""
        return self.of("padding", value)

    def weights(self, tiles: NDArray[np.uint8]) -> Scalars:
        """Scalars [tiles, out pieces, in pieces] of `tiles` [tiles, out pieces, group, in pieces, group] uint8.

        Linear in the signed weights, so that sums of products with one input are equal where their weights' sums are,
        and weights of zero add nothing.
        """
        count, outs, _, ins, _ = tiles.shape
        biased = np.ascontiguousarray(tiles).reshape(-1) ^ np.uint8(0x80)  # weight + 128, which is not negative
        if outs == ins == 1:
            sums: Scalars = np.einsum("tw,w->t", biased.reshape(count, -1), self.lanes.reshape(-1))
        else:
            sums = np.einsum("togiw,gw->toi", biased.reshape(tiles.shape), self.lanes)
        scalars: Scalars = sums - self.bias
        return scalars.reshape(count, outs, ins)

    def entries(self, pieces: Scalars) -> Scalars:
        """Scalars [...] of entries of wgt that are pieces of activations, [..., block_out]."""
        scalars: Scalars = pieces @ self.rows
        return scalars

    def taps(self, rows: NDArray[np.uint8]) -> Scalars:
        """Scalars [...] of `rows` [..., group] uint8: those of weights that have them on their diagonal."""
        signed = rows.view(np.int8).astype(np.int64).view(np.uint64)
        scalars: Scalars = np.einsum("...g,g->...", signed, self.lanes.diagonal())
        return scalars

    def result(self, operation: Operation, operands: Scalars) -> Scalars:
        """The scalars of what `operation` makes of its operands, the scalars of which are summed up in `operands`.

        Different sums have different results, which have no more to do with each other than fresh random numbers have.
        A constant is what padding with it is.
        """
        if operation.constant is not None:
            return np.full(operands.shape, self.padding(operation.constant), np.uint64)
        total = operands + self.of("operation", operation)
        for factor in self.factors:
            total ^= total >> np.uint64(32)
            total *= factor
        mixed: Scalars = total ^ total >> np.uint64(32)
        return mixed

    def row_of(self, x: Scalars, count: int) -> Scalars:
        """B of a softmax or norm of rows of `count` elements: x [..., groups], in their order, of which those beyond
        have none.

        It tells rows, and groups within a row, from all others.
        """
        groups = -(-count // self.cfg.group)
        names = np.array([self.of("group", number) | np.uint64(1) for number in range(x.shape[-1])], np.uint64)
        row: Scalars = (x[..., :groups] * names[:groups]).sum(axis=-1, keepdims=True)
        return row * self.b + names

    def parameters(self, entries: NDArray[np.uint64]) -> Scalars:
        """Scalars [pieces] of parameters [pieces, group] uint64."""
        return np.array([self.of("parameters", row.tobytes()) for row in entries], np.uint64)


class Operands(NamedTuple):
    """The operands of a layer's vector operation, each [batches, groups, height, width] or of length 1 there. several:
    in place of `operation`, those that make an output of all groups each, one behind the other."""

    operation: Operation
    a: Scalars
    b: Scalars | None
    parameters: Scalars | None
    several: tuple[Operation, ...] = ()

    def result(self, symbols: Symbols) -> Scalars:
        """The scalars of the output."""
        total = self.a * symbols.a
        if self.parameters is not None:
            total += self.parameters
        if self.b is not None:
            total += self.b * symbols.b
        results = [symbols.result(operation, total) for operation in self.several or (self.operation,)]
        return np.concatenate(results, axis=1)

    def of(self, position: tuple[int, int, int, int]) -> tuple[Operation, tuple[int, int, int, int]]:
        """The operation of the output at `position`, and the position of its operand A."""
        if not self.several:
            return self.operation, position
        number, group = divmod(position[1], self.a.shape[1])
        return self.several[number], (position[0], group, *position[2:])


Pieces = dict[Storage, Scalars]
"""The symbols of each storage, [pieces]."""


def blocked(cfg: Config, pieces: Scalars, act: Activation) -> Scalars:
    """The pieces of the storage of `act` as [batches, groups of the storage, rows, columns]."""
    shape = act.batches(cfg), act.storage_groups, act.pixels.rows, act.pixels.columns
    return pieces[: act.size(cfg) // cfg.piece_bytes].reshape(shape)


def part(cfg: Config, pieces: Scalars, act: Activation) -> Scalars:
    """A view of the pieces of `act` alone, [batches, groups, height, width]."""
    return blocked(cfg, pieces, act)[:, *act.cut(cfg)]


def layers_of(layer: Layer) -> tuple[Layer, ...]:
    """The layers of a block; any other layer alone."""
    return layer.layers or (layer,)


def pieces_inside(symbols: Symbols, pieces: Pieces, layer: Layer) -> Pieces:
    """Extend `pieces` by the meanings of the activations inside a block."""
    inside = dict(pieces)
    for inner in layers_of(layer)[:-1]:
        inside[inner.y.storage] = symbols.fresh(inner.y.size(symbols.cfg) // symbols.cfg.piece_bytes)
        part(symbols.cfg, inside[inner.y.storage], inner.y)[...] = operands(symbols, inside, inner).result(symbols)
    return inside


def operands(symbols: Symbols, pieces: Pieces, layer: Layer) -> Operands:
    """The meaning of `layer`: operands and operation for every piece of its y."""
    if layer.is_block:
        return operands(symbols, pieces_inside(symbols, pieces, layer), layer.layers[-1])
    cfg = symbols.cfg
    x, b, parameters = part(cfg, pieces[layer.x.storage], layer.x), None, None
    a, epilogue, requantise = x, layer.epilogue, layer.parameters(cfg)
    operation = Operation(clip=epilogue.clip)
    if layer.softmax is not None:
        return _softmax(symbols, x, layer, layer.softmax)
    if layer.gemm is not None:
        a = _convolution(symbols, x, layer, layer.gemm)
        if layer.gemm.sum_bytes:
            bytes_ = [operation._replace(binary=(BinaryOp.BYTE, 0, number)) for number in range(layer.gemm.sum_bytes)]
            return Operands(operation, a, None, None, tuple(bytes_))
    if layer.product is not None:
        a = _product(symbols, x, pieces, layer, layer.product)
    if layer.reduce:
        a = _windows(x, layer.window, layer.y, symbols.padding(layer.pad_value)).sum(axis=(4, 5))
        if layer.window.kernel != (1, 1):
            operation = operation._replace(reduce={"max": ReduceOp.MAX, "sum": ReduceOp.ADD}[layer.reduce])
    if (multiply := layer.multiply) is not None:
        b = part(cfg, pieces[multiply.b.storage], multiply.b)
        operation = operation._replace(offset=multiply.x_offset, binary=(BinaryOp.MUL, multiply.b_offset, None))
    if (norm := layer.norm) is not None:
        b = symbols.row_of(x.transpose(0, 2, 3, 1), layer.row_length).transpose(0, 3, 1, 2)
        rows = (norm.centre, norm.epsilon), layer.row_length
        operation = operation._replace(offset=norm.offset, rows=rows)
    if requantise is not None:
        operation = operation._replace(zero_point=requantise.zero_point)
        parameters = symbols.parameters(_parameters(cfg, requantise))[None, :, None, None]
        if layer.product is not None:
            parameters = np.tile(parameters, (1, layer.heads, 1, 1))
    if epilogue.table is not None:
        operation = operation._replace(table=epilogue.table.astype(np.int8).tobytes())
    if epilogue.residual is not None:
        r = epilogue.residual
        b = part(cfg, pieces[r.operand.storage], r.operand)
        operation = operation._replace(residual=(r.scale_v, r.scale_b, r.scale_c, r.shift, r.lo, r.hi))
    return Operands(operation, a, b, parameters)


def terms(
    symbols: Symbols, pieces: Pieces, layer: Layer, means: Operands, position: tuple[int, int, int, int]
) -> Iterator[tuple[int, int | None]]:
    """Generate the terms of operand A of `layer` at `position`: (input piece, weights), None where not multiplied."""
    batch, group, row, column = position
    if layer.gemm is None and layer.product is None and not layer.reduce:
        yield int(means.a[position]), None
        return
    x = part(symbols.cfg, pieces[layer.x.storage], layer.x)
    if layer.product is not None:
        factors = _factors(symbols, pieces, layer, layer.product)
        head, group = divmod(group, factors.shape[1])
        window = np.split(_rows_of(symbols, x, layer, layer.product)[batch, :, row, column], layer.heads)[head]
        yield from zip(window.reshape(-1).tolist(), factors[head, group].reshape(-1).tolist())
        return
    window = _windows(x, layer.window, layer.y, symbols.padding(layer.pad_value))[batch, :, row, column]
    if layer.gemm is None:
        yield from ((value, None) for value in window[group].reshape(-1).tolist())
        return
    first, weights = packed_weights(symbols, layer.gemm)
    taken = np.minimum(first[group] + np.arange(weights.shape[1]), x.shape[1] - 1)
    products = zip(window[taken].reshape(-1).tolist(), weights[group].reshape(-1).tolist(), strict=True)
    yield from ((value, weight) for value, weight in products if weight)


def _parameters(cfg: Config, r: Requantise) -> NDArray[np.uint64]:
    """[groups, group] entries of the vector unit's parameters, zero beyond the last channel."""
    channels = len(r.bias)
    entries = np.zeros(-(-channels // cfg.group) * cfg.group, np.uint64)
    for name, part in PAR_FIELDS.items():
        value = getattr(r, name).astype(np.int64) & (1 << part.width) - 1
        entries[:channels] |= value.astype(np.uint64) << np.uint64(part.offset)
    return entries.reshape(-1, cfg.group)


def _windows(x: Scalars, w: Window, y: Activation, padding: np.uint64) -> Scalars:
    """The pieces under the window of each position of y, [batches, groups, height, width, kernel height, kernel
    width]."""
    heights = (y.height - 1) * w.strides[0] + w.reach(0)
    widths = (y.width - 1) * w.strides[1] + w.reach(1)
    top, left = w.pads[:2]
    inside = x[:, :, : heights - top, : widths - left]
    if (top, left) == (0, 0) and inside.shape[2:] == (heights, widths):
        padded = inside
    else:
        padded = np.full((*x.shape[:2], heights, widths), padding, np.uint64)
        padded[:, :, top : top + inside.shape[2], left : left + inside.shape[3]] = inside
    n, c, h, v = padded.strides
    shape = (*x.shape[:2], y.height, y.width, *w.kernel)
    strides = (n, c, h * w.strides[0], v * w.strides[1], h * w.dilations[0], v * w.dilations[1])
    return np.lib.stride_tricks.as_strided(padded, shape, strides, writeable=False)


def _convolution(symbols: Symbols, x: Scalars, layer: Layer, gemm: Gemm) -> Scalars:
    """The sums of `layer`, [batches, groups of y, height, width]."""
    first, weights = packed_weights(symbols, gemm)
    windows = _windows(x, layer.window, layer.y, symbols.padding(layer.pad_value))
    batches, _, height, width = windows.shape[:4]
    if gemm.groups == 1:
        terms = windows.transpose(0, 2, 3, 1, 4, 5).reshape(batches * height * width, -1)
        sums: Scalars = np.einsum("gk,pk->gp", weights.reshape(len(weights), -1), terms)
        return sums.reshape(-1, batches, height, width).transpose(1, 0, 2, 3)
    total = np.zeros((batches, len(weights), height, width), np.uint64)
    for step in range(weights.shape[1]):
        groups = np.minimum(first + step, x.shape[1] - 1)  # beyond the last, weights are zero
        taken = windows[:, groups]
        total += np.einsum("ngyxrs,grs->ngyx", taken, weights[:, step])
    return total


def _product(symbols: Symbols, x: Scalars, pieces: Pieces, layer: Layer, product: ActivationGemm) -> Scalars:
    """The sums of `layer`, [1, groups of y, 1, width]."""
    windows = np.stack(np.split(_rows_of(symbols, x, layer, product)[0, :, 0], layer.heads))
    sums: Scalars = np.einsum("hgkr,hkprs->hgp", _factors(symbols, pieces, layer, product), windows)
    return sums.reshape(1, -1, 1, sums.shape[-1])


def _softmax(symbols: Symbols, x: Scalars, layer: Layer, softmax: Softmax) -> Operands:
    """The meaning of a softmax, of all groups that hold elements."""
    rows = np.stack(np.split(x.transpose(0, 2, 3, 1), layer.heads, axis=3), axis=3)
    b = symbols.row_of(rows, layer.row_length).reshape(*rows.shape[:3], -1).transpose(0, 3, 1, 2)
    powers = softmax.powers.astype(np.float32).tobytes(), layer.row_length
    return Operands(Operation(zero_point=softmax.zero_point, clip=layer.epilogue.clip, rows=powers), x, b, None)


def _rows_of(symbols: Symbols, x: Scalars, layer: Layer, product: ActivationGemm) -> Scalars:
    """The pieces of x for each position of y, as from `_windows`: x once for each pad of w, and once for w."""
    repeated = x.repeat(len(product.w_pads) + 1, axis=2)
    return _windows(repeated, product.window, layer.y, symbols.padding(product.pad_value))


def _factors(symbols: Symbols, pieces: Pieces, layer: Layer, product: ActivationGemm) -> Scalars:
    """The factors of the windows of x, [heads, groups of y, input groups, terms]: the padding of w, then w."""
    cfg, padded, heads = symbols.cfg, len(product.w_pads), layer.heads
    w = part(cfg, pieces[product.w.storage], product.w)[0, :, 0]
    outs = layer.y.groups(cfg) // heads
    own = symbols.entries(w[:, : outs * cfg.block_out].reshape(heads, -1, outs, cfg.block_out)).transpose(0, 2, 1)
    factors = np.empty((*own.shape, product.window.kernel[0]), np.uint64)
    for place, pad in enumerate(product.w_pads):
        factors[..., place] = symbols.entries(np.full(cfg.block_out, symbols.padding(pad)))
    factors[..., padded:] = own[..., None]
    return factors


def packed_weights(symbols: Symbols, gemm: Gemm) -> tuple[NDArray[np.int64], Scalars]:
    """The first input group of each output group, and the weights of it and those after it.

    Weights: [groups of y, input groups, kernel height, kernel width]; zero where channels do not meet.
    """
    group = symbols.cfg.group
    out, group_in, *kernel = gemm.weights.shape
    outs = -(-out // group)
    channels = np.arange(out) // (out // gemm.groups) * group_in  # first input channel of each output channel
    first = channels[::group] // group
    last = channels[np.minimum(np.arange(outs) * group + group, out) - 1] + group_in - 1
    ins = int((last // group - first).max()) + 1
    dense = np.zeros((outs * group, ins * group, *kernel), np.int8)
    if gemm.groups == 1:
        dense[:out, :group_in] = gemm.weights
    else:
        start = channels - np.repeat(first, group)[:out] * group
        dense[np.arange(out)[:, None], start[:, None] + np.arange(group_in)] = gemm.weights
    tiles = dense.reshape(outs, group, ins, group, *kernel).transpose(0, 2, 4, 5, 1, 3)
    tiles = np.ascontiguousarray(tiles).view(np.uint8).reshape(-1, 1, group, 1, group)
    return first, symbols.weights(tiles).reshape(outs, ins, *kernel)
