"""Meaning of layers as random scalars of the integers modulo 2^64: one for each piece of each output.

A *piece* is what LOAD and STORE move, [batch][group] of an activation. It is represented by a random number, its
symbol; weights by a random linear hash, so that the sum of a convolution is a sum of products of scalars. The result of
a vector operation is no linear function of that sum, and neither is its scalar. Nothing here knows of tiles, rings or
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
"""Numbers modulo 2^64 that stand for pieces, weights or parameters."""


class Operation(NamedTuple):
    """The operation of a vector instruction, without the fields that have no effect; None where it does not do a thing.

    offset: added to each A. reduce: how a window of more than one A is combined. binary: (operation with B, what is
    added to B, B itself if it is a number). zero_point: added after requantising. clip: least and greatest result.
    table: its bytes. residual: factors of v and of B, constant, shift, least and greatest result. int8: whether the
    result is int8. rows: for a softmax (contents of exp, elements of a row), for a norm ((whether the mean is
    subtracted, epsilon), elements of a row); B then identifies the row, see `Symbols.row_of`.
    """

    offset: int = 0
    reduce: int | None = None
    binary: tuple[int, int, int | None] | None = None
    zero_point: int | None = None
    clip: tuple[int, int] | None = None
    table: Hashable = None
    residual: tuple[int, int, int, int, int, int] | None = None
    int8: bool = True
    rows: tuple[Hashable, int] | None = None

    @property
    def constant(self) -> int | None:
        """The result if the clip leaves only one number, whatever the operands are; else None."""
        if self.clip is None or self.clip[0] < self.clip[1] or self.table is not None or self.residual is not None:
            return None
        return self.clip[1]


class Symbols:
    """The random scalars (symbols) of one verification; equal contents always have the same symbol.

    The seed is fixed: the compiler does not use it, and an error can be reproduced.

    known: content -> symbol. lanes: factors of weights, [group out, group in]. bias: corrects `weights` for its
    unsigned bytes. a, b: factors of the operands of a vector instruction; odd, so that multiplication is injective.
    factors: of `result`. rows: factors of the pieces of activations in a piece of wgt, for each output channel of a
    group.
    """

    def __init__(self, cfg: Config, seed: int = 0x5EED) -> None:
        self.cfg = cfg
        self.random = np.random.PCG64(seed)
        self.known: dict[Hashable, np.uint64] = {}
        self.lanes = self.fresh(cfg.group * cfg.group).reshape(cfg.group, cfg.group)
        self.bias = np.uint64(128 * sum(self.lanes.reshape(-1).tolist()) & (1 << 64) - 1)
        self.a, self.b = (np.uint64(value | 1) for value in self.fresh(2).tolist())
        self.factors = self.fresh(3) | np.uint64(1)
        self.rows = self.fresh(cfg.group) | np.uint64(1)

    def fresh(self, count: int) -> Scalars:
        """Return `count` new random numbers."""
        numbers: Scalars = self.random.random_raw(count)
        return numbers

    def symbol(self, *content: Hashable) -> np.uint64:
        """Return the symbol of `content`; a new random number the first time."""
        if content not in self.known:
            self.known[content] = np.uint64(self.random.random_raw())
        return self.known[content]

    def padding(self, value: int) -> np.uint64:
        """Return the symbol of a piece of padding with this value."""
        return self.symbol("padding", value)

    def weights(self, tiles: NDArray[np.uint8]) -> Scalars:
        """Return scalars [...] of weights [..., group of outputs, group of inputs] uint8.

        They are linear in the signed weights: sums of products with one input are equal if the sums of weights are, and
        weights of zero add nothing.
        """
        biased = np.ascontiguousarray(tiles).reshape(-1, self.lanes.size) ^ np.uint8(0x80)  # weight + 128, at least 0
        scalars: Scalars = np.einsum("tw,w->t", biased, self.lanes.reshape(-1)) - self.bias
        return scalars.reshape(tiles.shape[:-2])

    def identity(self) -> np.uint64:
        """Return the scalar of weights that are an identity matrix of the channels of a group."""
        group = self.cfg.group
        return np.uint64(self.weights(np.eye(group, dtype=np.uint8)).item())

    def entries(self, pieces: Scalars) -> Scalars:
        """Return scalars [...] of weights whose outputs are pieces of activations, [..., group]."""
        scalars: Scalars = pieces @ self.rows
        return scalars

    def taps(self, rows: NDArray[np.uint8]) -> Scalars:
        """Return scalars [...] of depthwise weights `rows`, [..., group] uint8: of matrices with them on the
        diagonal."""
        signed = rows.view(np.int8).astype(np.int64).view(np.uint64)
        scalars: Scalars = np.einsum("...g,g->...", signed, self.lanes.diagonal())
        return scalars

    def result(self, operation: Operation, operands: Scalars) -> Scalars:
        """Return the scalars of the results of `operation`. operands: the sums of the scalars of its operands.

        Different sums have different results, unrelated like new random numbers. A constant result has the symbol of
        padding with that number.
        """
        if operation.constant is not None:
            return np.full(operands.shape, self.padding(operation.constant), np.uint64)
        total = operands + self.symbol("operation", operation)
        for factor in self.factors:
            total ^= total >> np.uint64(32)
            total *= factor
        mixed: Scalars = total ^ total >> np.uint64(32)
        return mixed

    def row_of(self, x: Scalars, count: int) -> Scalars:
        """Return operand B of a softmax or norm for rows `x`, [..., groups], of `count` elements.

        It is different for each row and for each group in a row. Groups beyond the last element do not count.
        """
        groups = -(-count // self.cfg.group)
        names = np.array([self.symbol("group", number) | np.uint64(1) for number in range(x.shape[-1])], np.uint64)
        row: Scalars = (x[..., :groups] * names[:groups]).sum(axis=-1, keepdims=True)
        return row * self.b + names

    def parameters(self, entries: NDArray[np.uint64]) -> Scalars:
        """Return scalars [pieces] of parameters, [pieces, group] uint64."""
        return np.array([self.symbol("parameters", row.tobytes()) for row in entries], np.uint64)


class Operands(NamedTuple):
    """The operation of a layer and its operands, each [batches, groups, height, width] or of length 1 in some axis.

    several: operations that replace `operation`; each makes as many output groups as A has, one set after the other.
    """

    operation: Operation
    a: Scalars
    b: Scalars | None
    parameters: Scalars | None
    several: tuple[Operation, ...] = ()

    def result(self, symbols: Symbols) -> Scalars:
        """Return the scalars of the output."""
        total = self.a * symbols.a
        if self.parameters is not None:
            total += self.parameters
        if self.b is not None:
            total += self.b * symbols.b
        results = [symbols.result(operation, total) for operation in self.several or (self.operation,)]
        return np.concatenate(results, axis=1)

    def at_position(self, position: tuple[int, int, int, int]) -> tuple[Operation, tuple[int, int, int, int]]:
        """Return the operation that makes the output at `position`, and the position of its operand A."""
        if not self.several:
            return self.operation, position
        number, group = divmod(position[1], self.a.shape[1])
        return self.several[number], (position[0], group, *position[2:])


Pieces = dict[Storage, Scalars]
"""The scalars of each storage, [pieces]."""


def storage_grid(cfg: Config, pieces: Scalars, act: Activation) -> Scalars:
    """Return the pieces of the storage of `act` as [batches, groups of the storage, rows, columns]."""
    shape = act.batches(cfg), act.storage_groups, act.pixels.rows, act.pixels.columns
    return pieces[: act.size(cfg) // cfg.piece_bytes].reshape(shape)


def pieces_of(cfg: Config, pieces: Scalars, act: Activation) -> Scalars:
    """Return a view of the pieces of `act` in those of its storage, [batches, groups, height, width]."""
    return storage_grid(cfg, pieces, act)[:, *act.cut(cfg)]


def layers_of(layer: Layer) -> tuple[Layer, ...]:
    """Return the layers of a block; for another layer, itself."""
    return layer.layers or (layer,)


def pieces_inside(symbols: Symbols, pieces: Pieces, layer: Layer) -> Pieces:
    """Return `pieces` with the scalars of the activations inside a block added."""
    inside = dict(pieces)
    for inner in layers_of(layer)[:-1]:
        inside[inner.y.storage] = symbols.fresh(inner.y.size(symbols.cfg) // symbols.cfg.piece_bytes)
        pieces_of(symbols.cfg, inside[inner.y.storage], inner.y)[...] = operands(symbols, inside, inner).result(symbols)
    return inside


def operands(symbols: Symbols, pieces: Pieces, layer: Layer) -> Operands:
    """Return the meaning of `layer`: operation and operands for every piece of its y."""
    if layer.is_block:
        return operands(symbols, pieces_inside(symbols, pieces, layer), layer.layers[-1])
    cfg = symbols.cfg
    x, b, parameters = pieces_of(cfg, pieces[layer.x.storage], layer.x), None, None
    a, epilogue, requantise = x, layer.epilogue, layer.parameters(cfg)
    operation = Operation(clip=epilogue.clip)
    if layer.softmax is not None:
        return _softmax_operands(symbols, x, layer, layer.softmax)
    if layer.gemm is not None:
        a = _convolution_sums(symbols, x, layer, layer.gemm)
        if layer.gemm.sum_bytes:
            bytes_ = [operation._replace(binary=(BinaryOp.BYTE, 0, number)) for number in range(layer.gemm.sum_bytes)]
            return Operands(operation, a, None, None, tuple(bytes_))
    if layer.product is not None:
        a = _product_sums(symbols, x, pieces, layer, layer.product)
    if layer.reduce:
        a = _windows(x, layer.window, layer.y, symbols.padding(layer.pad_value)).sum(axis=(4, 5))
        if layer.sums_on_gemm:
            a *= symbols.identity()
        elif layer.window.kernel != (1, 1):
            operation = operation._replace(reduce={"max": ReduceOp.MAX, "sum": ReduceOp.ADD}[layer.reduce])
    if (multiply := layer.multiply) is not None:
        b = pieces_of(cfg, pieces[multiply.b.storage], multiply.b)
        operation = operation._replace(offset=multiply.x_offset, binary=(BinaryOp.MUL, multiply.b_offset, None))
    if (norm := layer.norm) is not None:
        b = symbols.row_of(x.transpose(0, 2, 3, 1), layer.row_length).transpose(0, 3, 1, 2)
        rows = (norm.centre, norm.epsilon), layer.row_length
        operation = operation._replace(offset=norm.offset, rows=rows)
    if requantise is not None:
        operation = operation._replace(zero_point=requantise.zero_point)
        entries = _parameters(cfg, requantise)
        if layer.sums_on_gemm:
            entries = entries[:1]  # its groups of channels are alike
        parameters = symbols.parameters(entries)[None, :, None, None]
        if layer.product is not None:
            parameters = np.tile(parameters, (1, layer.heads, 1, 1))
    if epilogue.table is not None:
        operation = operation._replace(table=epilogue.table.astype(np.int8).tobytes())
    if epilogue.residual is not None:
        r = epilogue.residual
        b = pieces_of(cfg, pieces[r.operand.storage], r.operand)
        operation = operation._replace(residual=(r.scale_v, r.scale_b, r.scale_c, r.shift, r.lo, r.hi))
    return Operands(operation, a, b, parameters)


def terms(
    symbols: Symbols, pieces: Pieces, layer: Layer, means: Operands, position: tuple[int, int, int, int]
) -> Iterator[tuple[int, int | None]]:
    """Yield the terms of operand A of `layer` at `position`: (input piece, weights or None if it is not multiplied).

    means: the meaning of the layer.
    """
    batch, group, row, column = position
    if layer.gemm is None and layer.product is None and not layer.reduce:
        yield int(means.a[position]), None
        return
    x = pieces_of(symbols.cfg, pieces[layer.x.storage], layer.x)
    if layer.product is not None:
        factors = _product_weights(symbols, pieces, layer, layer.product)
        head, group = divmod(group, factors.shape[1])
        window = np.split(_product_windows(symbols, x, layer, layer.product)[batch, :, row, column], layer.heads)[head]
        yield from zip(window.reshape(-1).tolist(), factors[head, group].reshape(-1).tolist())
        return
    window = _windows(x, layer.window, layer.y, symbols.padding(layer.pad_value))[batch, :, row, column]
    if layer.gemm is None:
        weight = int(symbols.identity()) if layer.sums_on_gemm else None
        yield from ((value, weight) for value in window[group].reshape(-1).tolist())
        return
    first, weights = group_weights(symbols, layer.gemm)
    input_groups = np.minimum(first[group] + np.arange(weights.shape[1]), x.shape[1] - 1)
    products = zip(window[input_groups].reshape(-1).tolist(), weights[group].reshape(-1).tolist(), strict=True)
    yield from ((value, weight) for value, weight in products if weight)


def _parameters(cfg: Config, r: Requantise) -> NDArray[np.uint64]:
    """Return the parameters of the vector unit, [groups, group], zero beyond the last channel."""
    channels = len(r.bias)
    entries = np.zeros(-(-channels // cfg.group) * cfg.group, np.uint64)
    for name, part in PAR_FIELDS.items():
        value = getattr(r, name).astype(np.int64) & (1 << part.width) - 1
        entries[:channels] |= value.astype(np.uint64) << np.uint64(part.offset)
    return entries.reshape(-1, cfg.group)


def _windows(x: Scalars, w: Window, y: Activation, padding: np.uint64) -> Scalars:
    """Return the pieces of x in the window of each position of y, [batches, groups, height, width, *kernel]."""
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


def _convolution_sums(symbols: Symbols, x: Scalars, layer: Layer, gemm: Gemm) -> Scalars:
    """Return the sums of a convolution, [batches, groups of y, height, width]."""
    first, weights = group_weights(symbols, gemm)
    windows = _windows(x, layer.window, layer.y, symbols.padding(layer.pad_value))
    batches, _, height, width = windows.shape[:4]
    if gemm.groups == 1:
        terms = windows.transpose(0, 2, 3, 1, 4, 5).reshape(batches * height * width, -1)
        sums: Scalars = np.einsum("gk,pk->gp", weights.reshape(len(weights), -1), terms)
        return sums.reshape(-1, batches, height, width).transpose(1, 0, 2, 3)
    total = np.zeros((batches, len(weights), height, width), np.uint64)
    for step in range(weights.shape[1]):
        groups = np.minimum(first + step, x.shape[1] - 1)  # beyond the last, weights are zero
        total += np.einsum("ngyxrs,grs->ngyx", windows[:, groups], weights[:, step])
    return total


def _product_sums(symbols: Symbols, x: Scalars, pieces: Pieces, layer: Layer, product: ActivationGemm) -> Scalars:
    """Return the sums of a product of two activations, [1, groups of y, 1, width]."""
    windows = np.stack(np.split(_product_windows(symbols, x, layer, product)[0, :, 0], layer.heads))
    weights = _product_weights(symbols, pieces, layer, product)
    if (missing := weights.shape[2] - windows.shape[1]) > 0:
        zeros = np.full((len(windows), missing, *windows.shape[2:]), symbols.padding(0))
        windows = np.concatenate([windows, zeros], axis=1)
    sums: Scalars = np.einsum("hgkr,hkprs->hgp", weights, windows)
    return sums.reshape(1, -1, 1, sums.shape[-1])


def _softmax_operands(symbols: Symbols, x: Scalars, layer: Layer, softmax: Softmax) -> Operands:
    """Return the meaning of a softmax, for all groups that hold elements."""
    rows = np.stack(np.split(x.transpose(0, 2, 3, 1), layer.heads, axis=3), axis=3)
    b = symbols.row_of(rows, layer.row_length).reshape(*rows.shape[:3], -1).transpose(0, 3, 1, 2)
    powers = softmax.powers.astype(np.float32).tobytes(), layer.row_length
    return Operands(Operation(zero_point=softmax.zero_point, clip=layer.epilogue.clip, rows=powers), x, b, None)


def _product_windows(symbols: Symbols, x: Scalars, layer: Layer, product: ActivationGemm) -> Scalars:
    """Return the pieces of x for each position of y, as `_windows` does: once for each pad of w, and once for w."""
    repeated = x.repeat(len(product.w_pads) + 1, axis=2)
    return _windows(repeated, product.window, layer.y, symbols.padding(product.pad_value))


def _product_weights(symbols: Symbols, pieces: Pieces, layer: Layer, product: ActivationGemm) -> Scalars:
    """Return what the windows of x are multiplied by, [heads, groups of y, input groups, terms]: padding of w, then w.

    Groups beyond the last of w that fill an entry repeat it, unless their weights are 0, see
    `LayerLowering.lower_product`.
    """
    cfg, padded, heads = symbols.cfg, len(product.w_pads), layer.heads
    w = pieces_of(cfg, pieces[product.w.storage], product.w)[0, :, 0]
    outs = layer.y.groups(cfg) // heads
    w_entries = symbols.entries(w[:, : outs * cfg.group].reshape(heads, -1, outs, cfg.group)).transpose(0, 2, 1)
    factors = np.empty((*w_entries.shape, product.window.kernel[0]), np.uint64)
    for place, pad in enumerate(product.w_pads):
        factors[..., place] = symbols.entries(np.full(cfg.group, symbols.padding(pad)))
    factors[..., padded:] = w_entries[..., None]
    groups = factors.shape[2]
    is_zero = not product.w_offset and layer.x.groups(cfg) // heads % cfg.inp_pieces > 0
    missing = 0 if is_zero else -groups % cfg.inp_pieces
    return factors.repeat([1] * (groups - 1) + [1 + missing], axis=2) if missing else factors


def group_weights(symbols: Symbols, gemm: Gemm) -> tuple[NDArray[np.int64], Scalars]:
    """Return the first input group of each output group, and the scalars of weights from that group on.

    The scalars are [groups of y, input groups, kernel height, kernel width]; zero where channels do not meet.
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
    return first, symbols.weights(np.ascontiguousarray(tiles).view(np.uint8))
