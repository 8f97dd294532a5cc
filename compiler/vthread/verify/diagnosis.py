"""The sentence for a program that does not compute what its layers mean: which instruction, which output, and why.

It may be slow: the launch is run again as far as the store that is wrong, then as far as the vector instruction that
made what it stores, each time remembering who wrote what; at last the terms of one sum are compared. Where one of them
is what a layer inside of a block has made, and wrong, the same begins again with the vector instruction that made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Activation, Layer
from celosia.compiler.vthread.verify.decode import Decoded, Dims, loop_fields, padded_block, reach, sizes
from celosia.compiler.vthread.verify.meaning import (
    Operands,
    Operation,
    Pieces,
    Scalars,
    layers_of,
    operands,
    part,
    pieces_inside,
    terms,
)
from celosia.compiler.vthread.verify.provenance import (
    Meaning,
    Provenance,
    ProvenanceError,
    Run,
    SymbolicMachine,
    WrongStore,
    indices,
    operation_of,
    softmax_of,
    store_places,
)
from celosia.hw.spec.isa import OUTER_LOOPS, TAP_LOOPS, ASource, BSource, Opcode

Position = tuple[int, int, int, int]
"""Batch, channel group, row and column."""
Term = tuple[int, int | None]
"""An input piece and the weights that it meets, None where it is taken as it is."""


class Held(NamedTuple):
    """A term of a sum, the instruction that added it, and the scratchpad and its piece from which it was read."""

    term: Term
    by: Decoded
    memory: str
    piece: int


class Where(NamedTuple):
    """A layer of the launch; in a block, which of the block's."""

    layer: int
    inner: int


def explain(state: Provenance, number: int, run: Run, stream: list[Decoded], found: WrongStore) -> ProvenanceError:
    """Build the error for a wrong store in launch `number`."""
    return _Diagnosis(state, number, run, stream).explain(found)


class _Diagnosis:
    """Find the instruction that is to blame for a wrong or missing store, and word the error."""

    def __init__(self, state: Provenance, number: int, run: Run, stream: list[Decoded]) -> None:
        self.state, self.number, self.run, self.stream = state, number, run, stream
        self.cfg, self.symbols = state.cfg, state.symbols
        self.inside: dict[int, Pieces] = {}

    def explain(self, found: WrongStore) -> ProvenanceError:
        """Build the error for a wrong store."""
        if found.index < 0:
            return self._missing(found.layer)
        return self._store(self.stream[found.index], found.layer)

    def error(self, rule: Meaning, i: Decoded, layer: int, what: str, inner: int | None = None) -> ProvenanceError:
        """inner: the layer in question of a block, where that is known."""
        of = self.run.layers[layer]
        name = f"layer {layer} {of.name!r}"
        if of.is_block and inner is not None:
            name += f", in it layer {inner} {of.layers[inner].name!r}"
        return ProvenanceError(rule, self.number, i.index, f"({i.unit.name}, {name}) {what}")

    # Layers -----------------------------------------------------------------------------------------------------

    def _every_layer(self) -> Iterator[Where]:
        """Generate all layers of the launch, those inside of blocks as well."""
        for number, layer in enumerate(self.run.layers):
            yield from (Where(number, inner) for inner in range(len(layers_of(layer))))

    def _last(self, layer: int) -> Where:
        return Where(layer, len(layers_of(self.run.layers[layer])) - 1)

    def _layer(self, at: Where) -> Layer:
        return layers_of(self.run.layers[at.layer])[at.inner]

    def _pieces(self, layer: int) -> Pieces:
        """Pieces of all storages, those of what `layer` makes inside too."""
        if layer not in self.inside:
            self.inside[layer] = pieces_inside(self.symbols, self.state.pieces, self.run.layers[layer])
        return self.inside[layer]

    def _operands(self, at: Where) -> Operands:
        return operands(self.symbols, self._pieces(at.layer), self._layer(at))

    # Running again ----------------------------------------------------------------------------------------------

    def _machine(self) -> SymbolicMachine:
        self.state.dram[...] = self.state.before
        return SymbolicMachine(self.state, self.number, self.run)

    def _replay(self, stop: int) -> tuple[SymbolicMachine, dict[str, NDArray[np.int64]]]:
        """The machine before instruction `stop`, and for each piece of each scratchpad who wrote it last, or -1."""
        machine = self._machine()
        writers = {name: np.full(entries * pieces, -1) for name, (entries, pieces) in sizes(self.cfg).items()}
        for i in self.stream[:stop]:
            machine.step(i)
            for memory, _, places, write in i.touches:
                if write:
                    places.of(writers[memory])[...] = i.index
        return machine, writers

    # Stores -----------------------------------------------------------------------------------------------------

    def _missing(self, layer: int) -> ProvenanceError:
        """Build the error for a layer that does not store all of its output."""
        machine, _ = self._replay(len(self.stream))
        left = machine.to_store(layer)
        stores = [i for i in self.stream if i.opcode == Opcode.STORE and self.run.layer_of[i.index] == layer]
        at = _words(self._position(layer, int(left.argmax())))
        what = f"is the last store, and nothing has stored {at} of the output"
        if not stores:
            what = "ends a launch that stores nothing of this layer"
        return self.error(Meaning.ONCE, (stores or self.stream)[-1], layer, what)

    def _position(self, layer: int, piece: int) -> Position:
        """A piece of the storage of y, relative to y."""
        y = self.run.layers[layer].y
        pixels = y.pixels
        shape = y.batches(self.cfg), y.storage_groups, pixels.rows, pixels.columns
        batch, group, row, column = np.unravel_index(piece, shape)
        place = (int(row) - pixels.top) // pixels.down, (int(column) - pixels.left) // pixels.across
        return int(batch), int(group) - y.group_offset, *place

    def _store(self, i: Decoded, layer: int) -> ProvenanceError:
        """Build the error for STORE `i` of a wrong piece, or to a wrong place."""
        f = i.fields
        if not 0 <= layer < len(self.run.layers):
            return ProvenanceError(Meaning.PLACE, self.number, i.index, f"(STORE) belongs to layer {layer}, of none")
        y = self.run.layers[layer].y
        machine, writers = self._replay(i.index)
        wanted, places = machine.to_store(layer), store_places(self.cfg, f, self.state.addresses[y.storage])
        if places is None:
            return self.error(Meaning.PLACE, i, layer, "stores between the pieces of its output")
        if places[0] < 0 or places[0] + reach(places[1]) >= len(wanted):
            return self.error(Meaning.PLACE, i, layer, "stores outside the memory of its output")
        pieces = indices(*places).reshape(-1)
        entries = indices(f["sram_base"], padded_block(f)).reshape(-1)
        bad = int((machine.out[entries] != wanted[pieces]).argmax())
        piece, entry = int(pieces[bad]), int(entries[bad])
        position, value = self._position(layer, piece), int(machine.out[entry])
        if not 0 <= position[1] < y.groups(self.cfg):
            return self.error(Meaning.PLACE, i, layer, "stores in a part of the memory that is not its output's")
        if not wanted[piece]:
            return self.error(Meaning.ONCE, i, layer, f"stores {_words(position)} of its output a second time")
        last = self._last(layer)
        for other in self._every_layer():
            result = self._operands(other).result(self.symbols)
            if (result == value).any():
                at = _words(_first(result == value))
                of = "" if other == last else f" of layer {other.layer} {self._layer(other).name!r}"
                what = f"stores as {_words(position)} of its output what is {at}{of}"
                return self.error(Meaning.PLACE, i, layer, what)
        writer = int(writers["out"][entry])
        if writer < 0:
            return self.error(Meaning.OPERAND, i, layer, f"stores as {_words(position)} what nothing has written")
        return self._vector(self.stream[writer], last, position, entry)

    # Vector instructions ----------------------------------------------------------------------------------------

    def _vector(self, i: Decoded, of: Where, position: Position, piece: int) -> ProvenanceError:
        """Diagnose VECTOR `i`, which wrote `piece` of a scratchpad that was stored as `position` of a layer's y."""
        f, outs = i.fields, self.cfg.out_pieces
        machine, _ = self._replay(i.index)
        n, y, x, q = (int(v) for v in np.argwhere(indices(f["dst_base"] * outs, self._dims(i, "dst")) == piece)[0])
        means, at = self._operands(of), f"for {_words(position)} of its output"

        def error(rule: Meaning, what: str) -> ProvenanceError:
            return self.error(rule, i, of.layer, f"{what} {at}", of.inner)

        def read(memory: Scalars, operand: str) -> int:
            dims = self._dims(i, operand)
            return int(memory[f[f"{operand}_base"] * outs + sum(v * dims[d][1] for d, v in enumerate((n, y, x, q)))])

        does = softmax_of(self.cfg, f, machine.exp) if f.get("softmax") else operation_of(self.cfg, f, machine.lut)
        operation, position = means.of(position)
        if does != operation:
            return error(Meaning.OPERATION, _difference(does, operation))
        if means.parameters is not None and read(machine.par, "par") != _at(means.parameters, position):
            return error(Meaning.PARAMETERS, "scales with other parameters")
        if means.b is not None and f["b_source"] == BSource.VIN:
            b, meant = read(machine.vin, "b"), _at(means.b, position)
            if b != meant:
                return error(Meaning.OPERAND, f"takes {self._name(b)} as B instead of {self._name(meant)}")
        return self._terms(i, of, position, self._held(machine, i, (n, y, x, q)), means)

    def _held(self, machine: SymbolicMachine, i: Decoded, step: Position) -> list[Held]:
        """The contents that VECTOR `i`, at which `machine` is, reads as A in `step`: loops n, y, x, and piece."""
        f, outs, taps = i.fields, self.cfg.out_pieces, self.cfg.taps
        n, y, x, q = step
        window = tuple((f[e], f[s] * outs) for e, s in loop_fields("a", ("r", "s")))
        if f["taps"]:
            window = *window, (taps, outs)
        places = indices(f["a_base"] * outs, (*self._dims(i, "a")[:3], (outs, 1), *window))[n, y, x, q].reshape(-1)
        if f["a_source"] == ASource.ACC:
            return [held for piece in places.tolist() for held in self._added(piece, i)]
        if not f["taps"]:
            return [Held((int(machine.vin[piece]), None), i, "vin", piece) for piece in places.tolist()]
        entries = tuple((f[e], f[s] * taps * outs) for e, s in loop_fields("tap", TAP_LOOPS))
        rows = indices(f["tap_base"] * taps * outs, (*entries, (taps, outs), (outs, 1)))[n, :, :, :, q].reshape(-1)
        read = zip(places.tolist(), machine.tap[rows].tolist(), strict=True)
        return [Held((int(machine.vin[piece]), weight), i, "vin", piece) for piece, weight in read if weight]

    def _dims(self, i: Decoded, operand: str) -> Dims:
        outs = self.cfg.out_pieces
        loops = tuple((i.fields[e], i.fields[s] * outs) for e, s in loop_fields(operand, OUTER_LOOPS))
        return (*loops, (outs, 1))

    # Terms ------------------------------------------------------------------------------------------------------

    def _added(self, accumulator: int, reader: Decoded) -> list[Held]:
        """The terms of a piece of acc when `reader` comes."""
        machine, held = self._machine(), list[Held]()
        for i in self.stream[: reader.index]:
            writes = any(
                memory == "acc" and write and (places.of(np.arange(places.end)) == accumulator).any()
                for memory, _, places, write in i.touches
            )
            if writes and i.opcode == Opcode.GEMM:
                held = (held if i.fields["accumulate"] else []) + list(self._products(machine, i, accumulator))
            machine.step(i)
            if writes and i.opcode != Opcode.GEMM:
                held = [Held((int(machine.acc[accumulator]), None), i, "acc", accumulator)]
        return held

    def _products(self, machine: SymbolicMachine, i: Decoded, accumulator: int) -> Iterator[Held]:
        """The terms that GEMM `i` adds to a piece of acc, those whose weights are zero left out."""
        f, ins, outs = i.fields, self.cfg.inp_pieces, self.cfg.out_pieces
        tile = ins * outs
        reduction = tuple(f[f"extent_{loop}"] for loop in "krs")
        for n, y, x, q in np.argwhere(indices(f["acc_base"] * outs, self._dims(i, "acc")) == accumulator).tolist():
            inp = (f["inp_base"] + n * f["inp_n"] + y * f["inp_y"] + x * f["inp_x"]) * ins
            wgt = (f["wgt_base"] + n * f["wgt_n"] + y * f["wgt_y"] + x * f["wgt_x"]) * tile + q * ins
            left = tuple((e, f[f"inp_{loop}"] * ins) for loop, e in zip("krs", reduction, strict=True))
            right = tuple((e, f[f"wgt_{loop}"] * tile) for loop, e in zip("krs", reduction, strict=True))
            places = indices(inp, (*left, (ins, 1))).reshape(-1).tolist()
            weights = machine.wgt[indices(wgt, (*right, (ins, 1)))].reshape(-1).tolist()
            yield from (
                Held((int(machine.inp[piece]), weight), i, "inp", piece)
                for piece, weight in zip(places, weights, strict=True) if weight
            )  # fmt: skip

    def _terms(self, i: Decoded, of: Where, position: Position, held: list[Held], means: Operands) -> ProvenanceError:
        """Compare the terms that VECTOR `i` reads as A with those that the layer means."""
        meant = list(terms(self.symbols, self._pieces(of.layer), self._layer(of), means, position))
        has, wants = Counter(content.term for content in held), Counter(meant)
        extra, lacking = list((has - wants).elements()), list((wants - has).elements())
        by, maker = held[-1].by if held else i, None
        wrong = next((content for content in held if content.term in extra), None)
        if wrong is not None:
            by, maker = wrong.by, self._maker(wrong)
            # The error names it first, and beside it the term that should meet the same weights.
            extra.sort(key=lambda term: term != wrong.term)
            lacking.sort(key=lambda term: term[1] != wrong.term[1])
            inside = self._made_inside(of.layer, lacking[0][0]) if lacking else None
            if maker is not None and inside is not None and self._known(wrong.term[0]) is None:
                return self._vector(maker, *inside, wrong.piece)
        rule = Meaning.TERMS if by.opcode == Opcode.GEMM or by.fields.get("taps") else Meaning.OPERAND
        what = self._term_words(extra, lacking, len(meant), position, maker)
        return self.error(rule, by, of.layer, what, of.inner)

    def _maker(self, held: Held) -> Decoded | None:
        """The vector instruction that wrote what a term was read from, if it was one."""
        if held.memory == "acc":
            return None
        _, writers = self._replay(held.by.index)
        index = int(writers[held.memory][held.piece])
        return self.stream[index] if index >= 0 and self.stream[index].opcode == Opcode.VECTOR else None

    def _made_inside(self, layer: int, value: int) -> tuple[Where, Position] | None:
        """The layer inside of a block that is meant to make the piece `value`, and where in its y."""
        for number, inner in enumerate(layers_of(self.run.layers[layer])[:-1]):
            equal = part(self.cfg, self._pieces(layer)[inner.y.storage], inner.y) == value
            if equal.any():
                return Where(layer, number), _first(equal)
        return None

    def _term_words(
        self, extra: list[Term], lacking: list[Term], count: int, position: Position, maker: Decoded | None
    ) -> str:
        """maker: the vector instruction that made the first of `extra`."""
        at = f"for {_words(position)} of its output"
        if not extra and not lacking:
            return f"computes something else {at}"
        if extra and lacking:
            if sorted(a for a, _ in extra) == sorted(a for a, _ in lacking):
                return f"multiplies {self._name(extra[0][0])} by other weights {at}"
            return f"takes {self._name(extra[0][0], maker)} instead of {self._name(lacking[0][0])} {at}"
        if lacking:
            return f"leaves out {len(lacking)} of {count} terms {at}, the first with {self._name(lacking[0][0])}"
        return f"takes {len(extra)} terms too many {at}, the first with {self._name(extra[0][0], maker)}"

    def _name(self, value: int, maker: Decoded | None = None) -> str:
        """Name the content of a scalar in words. maker: the VECTOR that made it, if one did."""
        unknown = "what nothing has written" if maker is None else f"what instruction {maker.index} has made"
        return self._known(value) or unknown

    def _known(self, value: int) -> str | None:
        """Name the activation or padding of a scalar, None where it belongs to no layer."""
        for at, act in self._activations():
            held = part(self.cfg, self._pieces(at)[act.storage], act)
            if (held == value).any():
                return f"{_words(_first(held == value))} of {act.name!r}"
        for storage, pieces in self.state.pieces.items():
            if (pieces == value).any():
                return f"piece {int((pieces == value).argmax())} of the memory of {storage.name!r}"
        key: Hashable = next((key for key, symbol in self.symbols.known.items() if symbol == value), None)
        if isinstance(key, tuple) and key[0] == "padding":
            return f"padding of {key[1]}"
        return None

    def _activations(self) -> Iterator[tuple[int, Activation]]:
        """Generate the activations that layers read and write, inside of blocks as well, each with its layer."""
        for number, layer in enumerate(self.run.layers):
            for inner in layers_of(layer):
                yield from ((number, act) for act in (inner.y, *inner.inputs()))


def _first(mask: NDArray[np.bool_]) -> Position:
    """The first position at which `mask` is True."""
    batch, group, row, column = (int(v) for v in np.argwhere(mask)[0])
    return batch, group, row, column


def _words(position: Position) -> str:
    batch, group, row, column = position
    return f"image batch {batch}, channel group {group}, row {row}, column {column}"


def _at(values: Scalars, position: Position) -> int:
    """The element of `values`, whose axes of length 1 serve all positions."""
    return int(values[tuple(0 if size == 1 else v for size, v in zip(values.shape, position, strict=True))])


def _difference(does: Operation, means: Operation) -> str:
    """Word the first field in which an operation differs from the layer's."""
    name, actual, meant = next(
        (name, a, b) for name, a, b in zip(Operation._fields, does, means, strict=True) if a != b
    )  # fmt: skip
    if name == "table" and actual is not None and meant is not None:
        return "looks up another table"
    if name == "table":
        return "looks up no table" if actual is None else "looks up a table"
    return f"has {name.replace('_', ' ')} {_plain(actual)} instead of {_plain(meant)}"


def _plain(value: object) -> str:
    return "none" if value is None else str(value)
