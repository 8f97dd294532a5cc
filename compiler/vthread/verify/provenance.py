"""Provenance: check that each store puts the right piece of the right version of a tensor in its place.

The launches are run in program order, which `order.py` has shown to be what the machine does, but not on bytes: one
scalar, an integer modulo 2^64, stands for a piece [batch][group] of an activation, and one for the weights between two
channel groups. Pieces that the host packs are fresh random numbers, as is memory that nobody has written. GEMM adds
products, and so do the taps of VECTOR. VECTOR adds multiples of its operands and a number that stands for what it does
to them, and passes the sum through a bijection (`Symbols.result`), so that another sum becomes a number that has
nothing to do with it. Each piece stored is compared with what the layer means (`meaning.py`), and is then a fresh
random number. So each layer stands alone, and its sums are polynomials of degree three in numbers that are random to
it.

Inside of a block nothing is stored, and a layer reads what VECTOR has made. That is as good as fresh numbers, which is
what the bijection is for: two pieces are equal where they came about in the same way, and unrelated where not. Were
VECTOR linear, f(u) + f(v) would pass for f(u + w) + f(v - w), whatever the random numbers are: a term in the wrong one
of two sums whose results meet equal weights in the next layer.

Two different polynomials have equal values with a probability below 2^-40. All coefficients of their difference are
multiples of 2^v, and one is of no higher power; they are differences of weights, so v is at most 7 where a sum is
wrong in one term, and grows by one with each doubling of how often that term is wrong. For the product of two random
numbers modulo 2^64 the lemma of Schwartz and Zippel, applied to each power of 2 in turn, gives (64-v)/2 * 2^(v-64):
here 2^-52. A wrong stream stores a wrong piece, or none where one is due, and passes only if every comparison does. In
a block, a wrong sum may also look right because a piece of it equals another one, of those in it and of those meant,
by an accident one layer before. With n of them that is n times as probable: after a depthwise convolution of 5x5 and a
1x1 of 240 channel groups, whose n are 50 and 480, 2^-52 has become less than 2^-36.

(J. T. Schwartz, "Fast probabilistic algorithms for verification of polynomial identities", J. ACM 27, 1980; R. Zippel,
"Probabilistic algorithms for sparse polynomials", EUROSAM 1979; the hash is the multilinear one of M. N. Wegman and
J. L. Carter, "New hash functions and their use in authentication and set equality", JCSS 22, 1981. That the bijection
is as good as a random one is assumed, as it is of the generator of the random numbers.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, partial
from math import gcd

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Activation, Layer, Storage
from celosia.compiler.vthread.verify.decode import (
    Decoded,
    Dims,
    Fields,
    VerifyError,
    destination,
    has_padding,
    loop_fields,
    padded_block,
    reach,
    repeats,
)
from celosia.compiler.vthread.verify.meaning import Operands, Operation, Pieces, Scalars, Symbols, operands, pieces_of
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    OUTER_LOOPS,
    ASource,
    BinaryOp,
    BSource,
    Buffer,
    Destination,
    Opcode,
    ReduceOp,
    element_bytes,
)
from celosia.hw.spec.packing import nibble_weights
from celosia.hw.spec.scratchpads import depths, scratchpads
from celosia.sim.functional.unpacking import expand_packs

UNKNOWN = -129
"""In place of an int8 of a codebook that is not known to be a constant."""


class Meaning(StrEnum):
    """A property that every program must have; its value completes the sentence of an error."""

    PLACE = "every store puts pieces of its layer's output where they belong"
    ONCE = "every piece of an output is stored exactly once"
    OPERATION = "every vector instruction does what its layer means"
    PARAMETERS = "every output is scaled with its own parameters"
    OPERAND = "every vector instruction reads what its layer means"
    TERMS = "every sum has each of its terms exactly once"
    TAKEN = "what the host takes is what the layers made"


class ProvenanceError(VerifyError):
    """Raised for a stream that does not compute what its layers mean. launch: its number. rule: one of Meaning."""

    def __init__(self, rule: Meaning, launch: int, index: int, what: str) -> None:
        super().__init__(rule, index, f"of launch {launch} {what}")
        self.launch = launch


@dataclass(frozen=True)
class Run:
    """One launch: the instructions, the layers that they mean, and what the host does around them.

    code: [count, instruction_bytes] uint8. layers: those of the launch; a block stores its y only. layer_of: [count],
    the number in `layers` of the layer of each instruction; only that of a store counts, and is checked. packed:
    storages that the host fills before the launch. taken: storages that the host reads after it.
    """

    code: NDArray[np.uint8]
    layers: Sequence[Layer]
    layer_of: NDArray[np.int32]
    packed: set[Storage] = field(default_factory=set)
    taken: set[Storage] = field(default_factory=set)


class Provenance:
    """The state of DRAM between launches, as scalars.

    addresses: DRAM address of each storage of activations, all below constants_address. constants: the bytes from there
    on. layers: those of all launches.

    pieces: what each storage should hold. makers: by storage, the activations that layers have stored. granule: bytes
    that each element of `dram` stands for. before: `dram` as it was when the launch began. tiles: weights by address,
    count and codebooks. sizes: number of pieces of each storage.
    """

    def __init__(
        self, cfg: Config, addresses: Mapping[Storage, int], constants_address: int, constants: NDArray[np.uint8],
        layers: Sequence[Layer],
    ) -> None:  # fmt: skip
        self.cfg, self.addresses, self.base, self.constants = cfg, addresses, constants_address, constants
        self.symbols = Symbols(cfg)
        self.piece_bytes = cfg.piece_bytes
        self.pieces: Pieces = {}
        self.makers: dict[Storage, list[Activation]] = {}
        self.granule = gcd(cfg.piece_bytes, *addresses.values())
        self.dram = self.before = self.symbols.fresh(constants_address // self.granule + 1)
        self.tiles: dict[tuple[int, int, bytes], Scalars] = {}
        self.sizes: dict[Storage, int] = {}
        for act in (act for layer in layers for act in (*layer.inputs(), layer.y)):
            self.sizes[act.storage] = max(self.sizes.get(act.storage, 0), act.size(cfg) // cfg.piece_bytes)
        for storage, size in self.sizes.items():
            self.pieces[storage] = self.symbols.fresh(size)

    def check(self, number: int, run: Run, stream: list[Decoded]) -> None:
        """Run launch `number` on scalars; its instructions have passed every `Rule`. Raises WrongStore,
        ProvenanceError."""
        for storage in (storage for storage in self.sizes if storage in run.packed):
            size = self.sizes[storage]
            self.pieces[storage] = self.symbols.fresh(size)
            self.write(self.addresses[storage], ((size, self.cfg.piece_bytes),), self.pieces[storage])
        self.before = self.dram.copy()
        machine = SymbolicMachine(self, number, run)
        for i in stream:
            machine.step(i)
        machine.check_finished()
        for layer in run.layers:
            self.makers.setdefault(layer.y.storage, []).append(layer.y)
        self._check_taken(number, run, stream)

    def _check_taken(self, number: int, run: Run, stream: list[Decoded]) -> None:
        """Raise ProvenanceError if the host reads an activation that was overwritten."""
        for storage in (storage for storage in self.sizes if storage in run.taken):
            for act in self.makers.get(storage, ()):
                content = self.read(self.addresses[storage], ((self.sizes[storage], self.cfg.piece_bytes),))
                if not np.array_equal(
                    pieces_of(self.cfg, content, act), pieces_of(self.cfg, self.pieces[storage], act)
                ):
                    what = f"is the last before the host takes {act.name!r}, which something else has overwritten"
                    raise ProvenanceError(Meaning.TAKEN, number, len(stream) - 1, what)

    # DRAM -------------------------------------------------------------------------------------------------------

    def read(self, address: int, dims: Dims) -> Scalars:
        """Return the pieces at `address` plus strides `dims` in bytes; new random numbers where no whole piece was
        stored."""
        shape = tuple(extent for extent, _ in dims)
        size, granule = self.piece_bytes, self.granule
        end = address + reach(dims) + size
        if end > self.base or address % granule or any(stride % granule for extent, stride in dims if extent > 1):
            return self.symbols.fresh(int(np.prod(shape))).reshape(shape)
        places = tuple((extent, stride // granule) for extent, stride in dims)
        values = view(self.dram, address // granule, places)
        if size == granule:
            return values
        is_whole = np.ones(shape, np.bool_)
        for part_of_piece in range(1, size // granule):
            rest = view(self.dram, address // granule + part_of_piece, places)
            is_whole &= rest == values + np.uint64(part_of_piece)
        return np.where(is_whole, values, self.symbols.fresh(values.size).reshape(shape))

    def write(self, address: int, dims: Dims, values: Scalars) -> None:
        """Write pieces. One of several granules holds consecutive numbers, so that `read` notices if its halves
        differ."""
        granule = self.granule
        places = tuple((extent, stride // granule) for extent, stride in dims)
        for part_of_piece in range(self.piece_bytes // granule):
            target = view(self.dram, address // granule + part_of_piece, places)
            target[...] = values + np.uint64(part_of_piece) if part_of_piece else values

    def bytes_at(self, address: int, size: int) -> NDArray[np.uint8] | None:
        """Return `size` bytes of constants at `address`; None if some of them are no constants."""
        first = address - self.base
        return self.constants[first : first + size] if 0 <= first <= len(self.constants) - size else None

    def weights(self, address: int, count: int, book: NDArray[np.int16] | None = None) -> Scalars:
        """Return scalars [count, out pieces] of the pieces of wgt from `address`.

        book: the codebooks that expand packed weights; None if they are not packed.
        """
        key = address, count, b"" if book is None else book.tobytes()
        if key not in self.tiles:
            cfg = self.cfg
            data = self.bytes_at(address, count * element_bytes(cfg, Buffer.WGT, expand=book is not None))
            if book is not None and data is not None:
                values = expand_packs(cfg, data, book)
                data = None if (values == UNKNOWN).any() else values.astype(np.int8).view(np.uint8)
            if data is None:
                self.tiles[key] = self.symbols.fresh(count * cfg.out_pieces).reshape(count, cfg.out_pieces)
            else:
                self.tiles[key] = self.symbols.weights(data.reshape(count, cfg.out_pieces, cfg.group, cfg.group))
        return self.tiles[key]

    def taps(self, address: int, count: int) -> Scalars:
        """Return scalars [count, taps, out pieces] of the tap entries from `address`."""
        cfg, (slots, _) = self.cfg, scratchpads(self.cfg)["tap"].shape
        data = self.bytes_at(address, count * slots * self.cfg.block_out)
        if data is None:
            return self.symbols.fresh(count * cfg.taps * cfg.out_pieces).reshape(count, cfg.taps, cfg.out_pieces)
        return self.symbols.taps(data.reshape(count, slots, cfg.out_pieces, cfg.group)[:, : cfg.taps])

    def parameters(self, address: int, count: int) -> Scalars:
        """Return scalars [count, out pieces] of the parameter entries from `address`."""
        data = self.bytes_at(address, count * 8 * self.cfg.block_out)
        if data is None:
            return self.symbols.fresh(count * self.cfg.out_pieces).reshape(count, -1)
        entries = np.ascontiguousarray(data).view(np.uint64).reshape(-1, self.cfg.group)
        return self.symbols.parameters(entries).reshape(count, -1)


class WrongStore(Exception):
    """Raised if the store `index` is wrong, or, with index < 0, if layer `layer` has not stored a piece.

    diagnosis.py makes a ProvenanceError of it.
    """

    def __init__(self, index: int, layer: int) -> None:
        super().__init__(index, layer)
        self.index, self.layer = index, layer


def view(array: Scalars, base: int, dims: Dims) -> Scalars:
    """Return a view of the one-dimensional `array` with shape and strides of `dims`, from element `base` on."""
    shape, strides = _layout(dims)
    return np.ndarray(shape, np.uint64, array, 8 * base, strides)


@lru_cache(1 << 12)
def _layout(dims: Dims) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides in bytes of a view; cached, since many instructions share them."""
    return tuple(extent for extent, _ in dims), tuple(8 * stride for _, stride in dims)


class SymbolicMachine:
    """The scratchpads of one launch, as scalars, and what is still to be stored.

    inp, acc, vin, out: by piece. wgt: by (entry, in piece, out piece). par: by (entry, out piece). tap: by (entry, tap,
    out piece). lut, exp, book: contents. ins, outs: pieces of an entry of inp and of out. wanted: by layer, the scalar
    that must still be stored in each piece of the storage of y; 0 where nothing is to be stored.
    """

    def __init__(self, state: Provenance, number: int, run: Run) -> None:
        cfg = state.cfg
        self.state, self.cfg, self.number, self.run, self.symbols = state, cfg, number, run, state.symbols
        self.ins, self.outs = cfg.inp_pieces, cfg.out_pieces
        fresh = self.symbols.fresh
        depth = depths(cfg)
        self.inp = fresh(depth["inp"] * self.ins)
        self.wgt = fresh(depth["wgt"] * self.ins * self.outs)
        self.acc, self.vin, self.out = (fresh(depth[name] * self.outs) for name in ("acc", "vin", "out"))
        self.par = fresh(depth["par"] * self.outs)
        self.tap = fresh(depth.get("tap", 0) * cfg.taps * self.outs)
        self.lut: list[object] = [("noise", slot) for slot in range(depth["lut"])]
        self.exp = fresh(depth.get("exp", 0) // 2).view(np.uint32)
        self.book = np.full((depth.get("book", 0), nibble_weights(cfg)), UNKNOWN, np.int16)
        self.pads = {"inp": self.inp, "acc": self.acc, "vin": self.vin, "out": self.out}
        self.wanted: dict[int, Scalars] = {}
        self.steps = {
            Opcode.LOAD: self._load, Opcode.GEMM: self._gemm, Opcode.VECTOR: self._vector, Opcode.STORE: self._store
        }  # fmt: skip

    def step(self, i: Decoded) -> None:
        """Run one instruction. Raises WrongStore."""
        self.steps[i.opcode](i)

    def check_finished(self) -> None:
        """Raise WrongStore if a piece of an output has not been stored."""
        for layer in range(len(self.run.layers)):
            if self.to_store(layer).any():
                raise WrongStore(-1, layer)

    def operands(self, layer: int) -> Operands:
        """Return the meaning of layer `layer` of the launch."""
        return operands(self.symbols, self.state.pieces, self.run.layers[layer])

    def to_store(self, layer: int) -> Scalars:
        """Return `wanted` of `layer`, one number for each piece of its storage."""
        if layer not in self.wanted:
            y = self.run.layers[layer].y
            wanted = np.zeros(self.state.sizes[y.storage], np.uint64)
            pieces_of(self.cfg, wanted, y)[...] = self.operands(layer).result(self.symbols)
            self.wanted[layer] = wanted
        return self.wanted[layer]

    # LOAD -------------------------------------------------------------------------------------------------------

    def _load(self, i: Decoded) -> None:
        """Run a LOAD on symbols."""
        f, buffer = i.fields, i.fields["buffer"]
        if buffer == Buffer.WGT and (f["dram_addr"] < self.state.base or has_padding(f)):
            self._load_entries(f)
        elif buffer == Buffer.WGT:
            contents = partial(self.state.weights, book=self.book if f.get("expand") else None)
            self._load_rows(f, self.wgt, self.outs, contents)
        elif buffer == Buffer.PAR:
            self._load_rows(f, self.par, self.outs, self.state.parameters)
        elif buffer == Buffer.TAP:
            self._load_rows(f, self.tap, self.cfg.taps * self.outs, self.state.taps)
        elif buffer == Buffer.LUT:
            self._load_tables(f)
        elif buffer == Buffer.EXP:
            self._load_powers(f)
        elif buffer == Buffer.BOOK:
            self._load_book(f)
        else:
            self._load_pieces(f, self.pads[Buffer(buffer).name.lower()])

    def _load_rows(self, f: Fields, target: Scalars, width: int, contents: object) -> None:
        """Load rows of constants into `target`. contents: gives their scalars by (address, count). width: of an
        entry."""
        assert callable(contents)
        count = f["x_size"]
        for z in range(f["z_size"]):
            for y in range(f["y_size"]):
                row = contents(f["dram_addr"] + z * f["dram_z"] + y * f["dram_y"], count)
                first = f["sram_base"] + z * f["sram_z"] + y * f["sram_y"]
                view(target, first * width, ((count, f["sram_x"] * width), (width, 1)))[...] = row.reshape(count, width)

    def _load_powers(self, f: Fields) -> None:
        """Load rows of float32 into exp; new random numbers where they are no constants."""
        for z, y in np.ndindex(f["z_size"], f["y_size"]):
            data = self.state.bytes_at(f["dram_addr"] + z * f["dram_z"] + y * f["dram_y"], 4 * f["x_size"])
            noise = self.symbols.fresh(f["x_size"]).astype(np.uint32)
            first = f["sram_base"] + z * f["sram_z"] + y * f["sram_y"]
            places = first + np.arange(f["x_size"]) * f["sram_x"]
            self.exp[places] = noise if data is None else np.ascontiguousarray(data).view(np.uint32)

    def _load_book(self, f: Fields) -> None:
        """Load rows of codebook entries into book; UNKNOWN where they are no constants or have padding."""
        weights = self.book.shape[1]
        for z, y in np.ndindex(f["z_size"], f["y_size"]):
            data = self.state.bytes_at(f["dram_addr"] + z * f["dram_z"] + y * f["dram_y"], weights * f["x_size"])
            first = f["sram_base"] + z * f["sram_z"] + y * f["sram_y"]
            places = first + np.arange(f["x_size"]) * f["sram_x"]
            self.book[places] = UNKNOWN if data is None else data.view(np.int8).reshape(-1, weights)
        if has_padding(f):
            self.book[:] = UNKNOWN

    def _load_entries(self, f: Fields) -> None:
        """Load pieces of activations into wgt, whose pieces then hold one input group of `block_out` pixels."""
        size, outs, group = self.state.piece_bytes, self.outs, self.cfg.group
        loops = *((extent, step * outs) for extent, step in padded_block(f)), (outs, 1)
        places = view(self.wgt, f["sram_base"] * outs, loops)
        rows = (f["z_size"], f["dram_z"]), (f["y_size"], f["dram_y"]), (f["x_size"], outs * group * size)
        blocks = *rows, (outs, group * size), (group, size)
        top, left = f["pad_top"], f["pad_left"]
        padding = np.full(group, self.symbols.padding(f["pad_value"]))
        places[...] = self.symbols.entries(padding) if f["pad_value"] else 0  # weights of zero add nothing
        read = self.symbols.entries(self.state.read(f["dram_addr"], blocks))
        places[:, top : top + f["y_size"], left : left + f["x_size"]] = read

    def _load_tables(self, f: Fields) -> None:
        """Load tables into lut, as their bytes."""
        for z, y, x in np.ndindex(f["z_size"], f["y_size"], f["x_size"]):
            address = f["dram_addr"] + z * f["dram_z"] + y * f["dram_y"] + 256 * x
            data = self.state.bytes_at(address, 256)
            slot = f["sram_base"] + z * f["sram_z"] + y * f["sram_y"] + x * f["sram_x"]
            self.lut[slot] = ("noise", address) if data is None else data.tobytes()

    def _load_pieces(self, f: Fields, target: Scalars) -> None:
        """Load pieces of activations, with padding."""
        size = self.state.piece_bytes
        rows = f["y_size"], f["dram_y"]
        places = view(target, f["sram_base"], padded_block(f))
        if f["buffer"] == Buffer.ACC and not f["widen"]:  # int32 from DRAM, which no layer does
            places[...] = self.symbols.fresh(places.size).reshape(places.shape)
            return
        values = self.state.read(f["dram_addr"], ((f["z_size"], f["dram_z"]), rows, (f["x_size"], size)))
        if places.shape == values.shape:
            places[...] = values
            return
        top, left = f["pad_top"], f["pad_left"]
        places[...] = self.symbols.padding(f["pad_value"])
        places[:, top : top + f["y_size"], left : left + f["x_size"]] = values

    # GEMM -------------------------------------------------------------------------------------------------------

    def _gemm(self, i: Decoded) -> None:
        """Run a GEMM on symbols."""
        f, ins, outs = i.fields, self.ins, self.outs
        n, y, x = f["extent_n"], f["extent_y"], f["extent_x"]
        k, r, s = f["extent_k"], f["extent_r"], f["extent_s"]
        taps = ((k, f["inp_k"] * ins), (r, f["inp_r"] * ins), (s, f["inp_s"] * ins), (ins, 1))
        pixels = ((y, f["inp_y"] * ins), (x, f["inp_x"] * ins))
        tile = ins * outs
        blocks = (n, f["wgt_n"] * tile), (outs, 1)
        steps = (k, f["wgt_k"] * tile), (r, f["wgt_r"] * tile), (s, f["wgt_s"] * tile), (ins, outs)
        depth = k * r * s * ins
        if (f["wgt_y"] and y > 1) or (f["wgt_x"] and x > 1):  # other weights for each pixel, which no layer has
            total = self.symbols.fresh(n * outs * y * x)
        elif n == 1 or not f["inp_n"]:
            left = view(self.inp, f["inp_base"] * ins, (*pixels, *taps)).reshape(y * x, depth)
            right = view(self.wgt, f["wgt_base"] * tile, (*blocks, *steps)).reshape(n * outs, depth)
            total = np.einsum("mk,pk->mp", right, left)
        else:
            inputs = view(self.inp, f["inp_base"] * ins, ((n, f["inp_n"] * ins), *pixels, *taps)).reshape(
                n, y * x, depth
            )
            tiles = view(self.wgt, f["wgt_base"] * tile, (*blocks, *steps)).reshape(n, outs, depth)
            total = np.einsum("nqk,npk->nqp", tiles, inputs)
        self._accumulate(f, total.reshape(n, outs, y, x))

    def _accumulate(self, f: Fields, total: Scalars) -> None:
        """Write `total`, [n, out pieces, y, x], to acc, or add it if GEMM accumulates."""
        outs = self.outs
        n, y, x = ((f[extent], f[stride] * outs) for extent, stride in loop_fields("acc", OUTER_LOOPS))
        dims = n, (outs, 1), y, x
        target = view(self.acc, f["acc_base"] * outs, dims)
        if not f["accumulate"]:
            target[...] = total
        elif repeats(dims):  # several sums into one accumulator, which no layer has
            target[...] = self.symbols.fresh(target.size).reshape(target.shape)
        else:
            target += total

    # VECTOR -----------------------------------------------------------------------------------------------------

    def _vector(self, i: Decoded) -> None:
        """Run a VECTOR on symbols."""
        f, outs = i.fields, self.outs
        if f.get("softmax"):
            self._run_softmax(f)
            return
        operation, a = operation_of(self.cfg, f, self.lut), self._operand_a(f)
        total = a * self.symbols.a
        if operation.rows is not None:
            total += self._row_operands(a, operation.rows[1]) * self.symbols.b
        if f["requantise"]:
            total += view(self.par, f["par_base"] * outs, self._loop_dims(f, "par"))
        if operation.residual is not None or (operation.binary is not None and operation.binary[2] is None):
            total += view(self.vin, f["b_base"] * outs, self._loop_dims(f, "b")) * self.symbols.b
        target = view(self.pads[destination(f)], f["dst_base"] * outs, self._loop_dims(f, "dst"))
        target[...] = self.symbols.result(operation, total)

    def _row_operands(self, a: Scalars, count: int) -> Scalars:
        """Return operand B of a norm of rows of `a`, [n, y, x, out pieces], of `count` elements each."""
        rows = a.transpose(1, 2, 0, 3)
        b = self.symbols.row_of(rows.reshape(*rows.shape[:2], -1), count)
        return b.reshape(rows.shape).transpose(2, 0, 1, 3)

    def _run_softmax(self, f: Fields) -> None:
        """Run a softmax on symbols; a row is n x [block_out / group] pieces at each x."""
        outs, operation = self.outs, softmax_of(self.cfg, f, self.exp)
        x = view(self.vin, f["a_base"] * outs, self._loop_dims(f, "a")).transpose(1, 2, 0, 3)
        rows = x.reshape(*x.shape[:2], -1)  # y, x, groups
        assert operation.rows is not None
        count = operation.rows[1]
        total = rows * self.symbols.a + self.symbols.row_of(rows, count) * self.symbols.b
        results = self.symbols.result(operation, total)
        low, high = f["clip_lo"], f["clip_hi"]
        results[..., -(-count // self.cfg.group) :] = self.symbols.padding(min(max(f["zero_point"], low), high))
        target = view(self.pads[destination(f)], f["dst_base"] * outs, self._loop_dims(f, "dst"))
        target[...] = results.reshape(x.shape).transpose(2, 0, 1, 3)

    def _operand_a(self, f: Fields) -> Scalars:
        """Return operand A of a VECTOR, [n, y, x, out pieces]."""
        outs, taps = self.outs, self.cfg.taps
        memory = self.acc if f["a_source"] == ASource.ACC else self.vin
        dims, r, s = self._loop_dims(f, "a"), f["extent_r"], f["extent_s"]
        window = (r, f["a_r"] * outs), (s, f["a_s"] * outs)
        if not f["taps"]:
            a = view(memory, f["a_base"] * outs, (*dims, *window))
            return a.sum(axis=(4, 5)) if r * s > 1 else a[..., 0, 0]
        entry = taps * outs
        steps = (f["extent_n"], f["tap_n"] * entry), (r, f["tap_r"] * entry), (s, f["tap_s"] * entry)
        weights = view(self.tap, f["tap_base"] * entry, (*steps, (taps, outs), (outs, 1)))
        a = view(memory, f["a_base"] * outs, (*dims, *window, (taps, outs)))
        total: Scalars = np.einsum("nyxqrst,nrstq->nyxq", a, weights)
        return total

    def _loop_dims(self, f: Fields, operand: str) -> Dims:
        """Return (extent, stride in pieces) of the loops n, y, x over `operand`, and of the pieces of an entry."""
        (en, sn), (ey, sy), (ex, sx) = loop_fields(operand, OUTER_LOOPS)
        outs = self.outs
        return (f[en], f[sn] * outs), (f[ey], f[sy] * outs), (f[ex], f[sx] * outs), (outs, 1)

    # STORE ------------------------------------------------------------------------------------------------------

    def _store(self, i: Decoded) -> None:
        """Check a STORE against what its layer means, and write to DRAM what should be there. Raises WrongStore."""
        f, layer = i.fields, int(self.run.layer_of[i.index])
        if not 0 <= layer < len(self.run.layers):
            raise WrongStore(i.index, layer)
        storage = self.run.layers[layer].y.storage
        wanted, places = self.to_store(layer), store_places(self.cfg, f, self.state.addresses[storage])
        if places is None or places[0] < 0 or places[0] + reach(places[1]) >= len(wanted):
            raise WrongStore(i.index, layer)
        stored = view(self.out, f["sram_base"], padded_block(f))
        due = view(wanted, *places)
        if not (stored == due).all():
            raise WrongStore(i.index, layer)
        due[...] = 0
        bytes_per_step = (f["z_size"], f["dram_z"]), (f["y_size"], f["dram_y"]), (f["x_size"], self.state.piece_bytes)
        values = view(self.state.pieces[storage], *places)
        self.state.write(f["dram_addr"], bytes_per_step, values)


def indices(base: int, dims: Dims) -> NDArray[np.int64]:
    """Return the array of base + sum of index * stride, in the shape of the extents of `dims`."""
    total = np.full((1,) * len(dims), base, np.int64)
    for axis, (extent, stride) in enumerate(dims):
        total = total + (np.arange(extent) * stride).reshape([-1 if other == axis else 1 for other in range(len(dims))])
    return total


def store_places(cfg: Config, f: Fields, address: int) -> tuple[int, Dims] | None:
    """Return (base, dims) of the pieces that a STORE writes, from the storage at `address` on; None if not whole
    pieces."""
    size = cfg.piece_bytes
    first = f["dram_addr"] - address
    z, y = f["dram_z"] if f["z_size"] > 1 else 0, f["dram_y"] if f["y_size"] > 1 else 0
    if first % size or z % size or y % size:
        return None
    return first // size, ((f["z_size"], z // size), (f["y_size"], y // size), (f["x_size"], 1))


def softmax_of(cfg: Config, f: Fields, powers: NDArray[np.uint32]) -> Operation:
    """Decode the operation of a VECTOR with softmax. powers: the contents of exp."""
    rows = powers.tobytes(), f["extent_n"] * cfg.block_out - f["imm"]
    return Operation(zero_point=f["zero_point"], clip=(f["clip_lo"], f["clip_hi"]), rows=rows)


def operation_of(cfg: Config, f: Fields, tables: Sequence[object]) -> Operation:
    """Decode the operation of a VECTOR instruction. tables: the contents of lut."""
    binary = residual = zero_point = clip = table = reduce = rows = None
    int8 = f["destination"] != Destination.ACC
    if f["extent_r"] * f["extent_s"] > 1 and not (f["taps"] and f["reduce_op"] == ReduceOp.ADD):
        reduce = f["reduce_op"]  # a sum of taps is a sum of products as those of GEMM are
    if f["binary_op"] != BinaryOp.NONE:
        binary = f["binary_op"], f["b_offset"], f["imm"] if f["b_source"] == BSource.IMM else None
    if f["requantise"]:
        zero_point = f["zero_point"]
    if f["requantise"] or f["lookup"] or f["rescale_add"] or int8:
        clip = f["clip_lo"], f["clip_hi"]
    if f["lookup"]:
        table = tables[f["table"]]
    if f["rescale_add"]:
        residual = f["scale_v"], f["scale_b"], f["scale_c"], f["scale_shift"], f["add_lo"], f["add_hi"]
    if f.get("norm"):
        rows = (bool(f["centre"]), f["scale_c"]), f["extent_n"] * cfg.block_out - f["imm"]
    return Operation(f["a_offset"], reduce, binary, zero_point, clip, table, residual, int8, rows)
