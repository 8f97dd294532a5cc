"""Word the error of a program that does not compute what its layers mean: which instruction, which output, and why.

It may be slow: the launch is run again up to the store that is wrong, then up to the vector instruction that made what
it stores, each time recording which instruction wrote what. At last the terms of one sum are compared. If one of them
is wrong and was made by a layer inside a block, the same starts again with the vector instruction that made it.
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
    pieces_inside,
    pieces_of,
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
"""A term of a sum: an input piece, and the weights that it is multiplied by; None if it is not multiplied."""


class ReadTerm(NamedTuple):
    """A term that an instruction `by` read and added to a sum, and the scratchpad and its piece that it was read
    from."""

    term: Term
    by: Decoded
    memory: str
    piece: int


class LayerPlace(NamedTuple):
    """A layer of the launch by its number; inner: if it is a block, the number of a layer in it."""

    layer: int
    inner: int


def explain(state: Provenance, number: int, run: Run, stream: list[Decoded], wrong: WrongStore) -> ProvenanceError:
    """Build the error for a wrong or missing store in launch `number`."""
    return _Diagnosis(state, number, run, stream).explain(wrong)


class _Diagnosis:
    """Finds the instruction that causes a wrong or missing store, and words the error.

    inside: by number of a block, the pieces of all storages and of the activations inside it.
    """

    def __init__(self, state: Provenance, number: int, run: Run, stream: list[Decoded]) -> None:
        self.state, self.number, self.run, self.stream = state, number, run, stream
        self.cfg, self.symbols = state.cfg, state.symbols
        self.inside: dict[int, Pieces] = {}

    def explain(self, wrong: WrongStore) -> ProvenanceError:
        """Build the error for a wrong or missing store."""
        if wrong.index < 0:
            return self._explain_missing(wrong.layer)
        return self._explain_store(self.stream[wrong.index], wrong.layer)

    def error(self, rule: Meaning, i: Decoded, layer: int, what: str, inner: int | None = None) -> ProvenanceError:
        """Build the error of instruction `i` of `layer`, which breaks `rule` as `what` says.

        inner: the number of the layer inside a block, if it is known.
        """
        wrong_layer = self.run.layers[layer]
        name = f"layer {layer} {wrong_layer.name!r}"
        if wrong_layer.is_block and inner is not None:
            name += f", in it layer {inner} {wrong_layer.layers[inner].name!r}"
        return ProvenanceError(rule, self.number, i.index, f"({i.unit.name}, {name}) {what}")

    # Layers -----------------------------------------------------------------------------------------------------

    def _every_layer(self) -> Iterator[LayerPlace]:
        """Yield all layers of the launch, those inside blocks too."""
        for number, layer in enumerate(self.run.layers):
            yield from (LayerPlace(number, inner) for inner in range(len(layers_of(layer))))

    def _last_of(self, layer: int) -> LayerPlace:
        """Return the layer that makes the output of `layer`: itself, or the last one in a block."""
        return LayerPlace(layer, len(layers_of(self.run.layers[layer])) - 1)

    def _layer_at(self, at: LayerPlace) -> Layer:
        """Return the layer at this place of the launch."""
        return layers_of(self.run.layers[at.layer])[at.inner]

    def _pieces(self, layer: int) -> Pieces:
        """Return the pieces of all storages, and those of the activations inside block `layer`."""
        if layer not in self.inside:
            self.inside[layer] = pieces_inside(self.symbols, self.state.pieces, self.run.layers[layer])
        return self.inside[layer]

    def _operands(self, at: LayerPlace) -> Operands:
        """Return the meaning of the layer at this place."""
        return operands(self.symbols, self._pieces(at.layer), self._layer_at(at))

    # Running again ----------------------------------------------------------------------------------------------

    def _new_machine(self) -> SymbolicMachine:
        """Return a machine at the begin of the launch."""
        self.state.dram[...] = self.state.before
        return SymbolicMachine(self.state, self.number, self.run)

    def _replay(self, stop: int) -> tuple[SymbolicMachine, dict[str, NDArray[np.int64]]]:
        """Return the machine before instruction `stop`, and for each piece of each scratchpad its last writer, or
        -1."""
        machine = self._new_machine()
        writers = {name: np.full(entries * pieces, -1) for name, (entries, pieces) in sizes(self.cfg).items()}
        for i in self.stream[:stop]:
            machine.step(i)
            for memory, _, places, write in i.touches:
                if write:
                    places.view(writers[memory])[...] = i.index
        return machine, writers

    # Stores -----------------------------------------------------------------------------------------------------

    def _explain_missing(self, layer: int) -> ProvenanceError:
        """Build the error for a layer that does not store all of its output."""
        machine, _ = self._replay(len(self.stream))
        unstored = machine.to_store(layer)
        stores = [i for i in self.stream if i.opcode == Opcode.STORE and self.run.layer_of[i.index] == layer]
        at = _position_text(self._position(layer, int(unstored.argmax())))
        what = f"is the last store, and nothing has stored {at} of the output"
        if not stores:
            what = "ends a launch that stores nothing of this layer"
        return self.error(Meaning.ONCE, (stores or self.stream)[-1], layer, what)

    def _position(self, layer: int, piece: int) -> Position:
        """Return the position in y of a piece of its storage."""
        y = self.run.layers[layer].y
        pixels = y.pixels
        shape = y.batches(self.cfg), y.storage_groups, pixels.rows, pixels.columns
        batch, group, row, column = np.unravel_index(piece, shape)
        place = (int(row) - pixels.top) // pixels.down, (int(column) - pixels.left) // pixels.across
        return int(batch), int(group) - y.group_offset, *place

    def _explain_store(self, i: Decoded, layer: int) -> ProvenanceError:
        """Build the error for STORE `i`, which stores a wrong piece, or a piece in a wrong place."""
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
            return self.error(Meaning.ONCE, i, layer, f"stores {_position_text(position)} of its output a second time")
        last = self._last_of(layer)
        for other in self._every_layer():
            result = self._operands(other).result(self.symbols)
            if (result == value).any():
                at = _position_text(_first_position(result == value))
                source = "" if other == last else f" of layer {other.layer} {self._layer_at(other).name!r}"
                what = f"stores as {_position_text(position)} of its output what is {at}{source}"
                return self.error(Meaning.PLACE, i, layer, what)
        writer = int(writers["out"][entry])
        if writer < 0:
            return self.error(
                Meaning.OPERAND, i, layer, f"stores as {_position_text(position)} what nothing has written"
            )
        return self._explain_vector(self.stream[writer], last, position, entry)

    # Vector instructions ----------------------------------------------------------------------------------------

    def _explain_vector(self, i: Decoded, of: LayerPlace, position: Position, piece: int) -> ProvenanceError:
        """Build the error for VECTOR `i`, which wrote `piece` of a scratchpad that was stored as `position` of a
        layer's y."""
        f, outs = i.fields, self.cfg.out_pieces
        machine, _ = self._replay(i.index)
        n, y, x, q = (int(v) for v in np.argwhere(indices(f["dst_base"] * outs, self._loop_dims(i, "dst")) == piece)[0])
        means, at = self._operands(of), f"for {_position_text(position)} of its output"

        def error(rule: Meaning, what: str) -> ProvenanceError:
            """Build the error for this output."""
            return self.error(rule, i, of.layer, f"{what} {at}", of.inner)

        def read(memory: Scalars, operand: str) -> int:
            """Return the scalar of `operand` that the instruction read for this output."""
            dims = self._loop_dims(i, operand)
            return int(memory[f[f"{operand}_base"] * outs + sum(v * dims[d][1] for d, v in enumerate((n, y, x, q)))])

        does = softmax_of(self.cfg, f, machine.exp) if f.get("softmax") else operation_of(self.cfg, f, machine.lut)
        operation, position = means.at_position(position)
        if does != operation:
            return error(Meaning.OPERATION, _difference_text(does, operation))
        if means.parameters is not None and read(machine.par, "par") != _value_at(means.parameters, position):
            return error(Meaning.PARAMETERS, "scales with other parameters")
        if means.b is not None and f["b_source"] == BSource.VIN:
            b, meant = read(machine.vin, "b"), _value_at(means.b, position)
            if b != meant:
                return error(Meaning.OPERAND, f"takes {self._describe(b)} as B instead of {self._describe(meant)}")
        return self._explain_terms(i, of, position, self._read_terms(machine, i, (n, y, x, q)), means)

    def _read_terms(self, machine: SymbolicMachine, i: Decoded, step: Position) -> list[ReadTerm]:
        """Return the terms that VECTOR `i` reads as A in `step`: values of its loops n, y, x, and piece.

        machine: in the state before `i`.
        """
        f, outs, taps = i.fields, self.cfg.out_pieces, self.cfg.taps
        n, y, x, q = step
        window = tuple((f[e], f[s] * outs) for e, s in loop_fields("a", ("r", "s")))
        if f["taps"]:
            window = *window, (taps, outs)
        places = indices(f["a_base"] * outs, (*self._loop_dims(i, "a")[:3], (outs, 1), *window))[n, y, x, q].reshape(-1)
        if f["a_source"] == ASource.ACC:
            return [term for piece in places.tolist() for term in self._accumulated_terms(piece, i)]
        if not f["taps"]:
            return [ReadTerm((int(machine.vin[piece]), None), i, "vin", piece) for piece in places.tolist()]
        entries = tuple((f[e], f[s] * taps * outs) for e, s in loop_fields("tap", TAP_LOOPS))
        rows = indices(f["tap_base"] * taps * outs, (*entries, (taps, outs), (outs, 1)))[n, :, :, :, q].reshape(-1)
        read = zip(places.tolist(), machine.tap[rows].tolist(), strict=True)
        return [ReadTerm((int(machine.vin[piece]), weight), i, "vin", piece) for piece, weight in read if weight]

    def _loop_dims(self, i: Decoded, operand: str) -> Dims:
        """Return (extent, stride in pieces) of the loops n, y, x over `operand`, and of the pieces of an entry."""
        outs = self.cfg.out_pieces
        loops = tuple((i.fields[e], i.fields[s] * outs) for e, s in loop_fields(operand, OUTER_LOOPS))
        return (*loops, (outs, 1))

    # Terms ------------------------------------------------------------------------------------------------------

    def _accumulated_terms(self, accumulator: int, reader: Decoded) -> list[ReadTerm]:
        """Return the terms that a piece of acc is the sum of when instruction `reader` reads it."""
        machine, held = self._new_machine(), list[ReadTerm]()
        for i in self.stream[: reader.index]:
            writes = any(
                memory == "acc" and write and (places.view(np.arange(places.end)) == accumulator).any()
                for memory, _, places, write in i.touches
            )
            if writes and i.opcode == Opcode.GEMM:
                held = (held if i.fields["accumulate"] else []) + list(self._gemm_terms(machine, i, accumulator))
            machine.step(i)
            if writes and i.opcode != Opcode.GEMM:
                held = [ReadTerm((int(machine.acc[accumulator]), None), i, "acc", accumulator)]
        return held

    def _gemm_terms(self, machine: SymbolicMachine, i: Decoded, accumulator: int) -> Iterator[ReadTerm]:
        """Yield the terms that GEMM `i` adds to a piece of acc, without those whose weights are zero."""
        f, ins, outs = i.fields, self.cfg.inp_pieces, self.cfg.out_pieces
        tile = ins * outs
        reduction = tuple(f[f"extent_{loop}"] for loop in "krs")
        for n, y, x, q in np.argwhere(indices(f["acc_base"] * outs, self._loop_dims(i, "acc")) == accumulator).tolist():
            inp = (f["inp_base"] + n * f["inp_n"] + y * f["inp_y"] + x * f["inp_x"]) * ins
            wgt = (f["wgt_base"] + n * f["wgt_n"] + y * f["wgt_y"] + x * f["wgt_x"]) * tile + q
            left = tuple((e, f[f"inp_{loop}"] * ins) for loop, e in zip("krs", reduction, strict=True))
            right = tuple((e, f[f"wgt_{loop}"] * tile) for loop, e in zip("krs", reduction, strict=True))
            places = indices(inp, (*left, (ins, 1))).reshape(-1).tolist()
            weights = machine.wgt[indices(wgt, (*right, (ins, outs)))].reshape(-1).tolist()
            yield from (
                ReadTerm((int(machine.inp[piece]), weight), i, "inp", piece)
                for piece, weight in zip(places, weights, strict=True) if weight
            )  # fmt: skip

    def _explain_terms(
        self, i: Decoded, of: LayerPlace, position: Position, held: list[ReadTerm], means: Operands
    ) -> ProvenanceError:
        """Build the error from the terms `held` that VECTOR `i` reads as A and those that the layer means."""
        meant = list(terms(self.symbols, self._pieces(of.layer), self._layer_at(of), means, position))
        has, wants = Counter(content.term for content in held), Counter(meant)
        extra, lacking = list((has - wants).elements()), list((wants - has).elements())
        by, maker = held[-1].by if held else i, None
        wrong = next((content for content in held if content.term in extra), None)
        if wrong is not None:
            by, maker = wrong.by, self._writer_of(wrong)
            # The error names it first, and with it the term that should have its weights.
            extra.sort(key=lambda term: term != wrong.term)
            lacking.sort(key=lambda term: term[1] != wrong.term[1])
            inside = self._find_inside_block(of.layer, lacking[0][0]) if lacking else None
            if maker is not None and inside is not None and self._describe_known(wrong.term[0]) is None:
                return self._explain_vector(maker, *inside, wrong.piece)
        rule = Meaning.TERMS if by.opcode == Opcode.GEMM or by.fields.get("taps") else Meaning.OPERAND
        what = self._term_words(extra, lacking, len(meant), position, maker)
        return self.error(rule, by, of.layer, what, of.inner)

    def _writer_of(self, held: ReadTerm) -> Decoded | None:
        """Return the vector instruction that wrote the piece that a term was read from; None if another one did."""
        if held.memory == "acc":
            return None
        _, writers = self._replay(held.by.index)
        index = int(writers[held.memory][held.piece])
        return self.stream[index] if index >= 0 and self.stream[index].opcode == Opcode.VECTOR else None

    def _find_inside_block(self, layer: int, value: int) -> tuple[LayerPlace, Position] | None:
        """Return the layer inside block `layer` that should make the piece `value`, and where in its y; None if none
        does."""
        for number, inner in enumerate(layers_of(self.run.layers[layer])[:-1]):
            equal = pieces_of(self.cfg, self._pieces(layer)[inner.y.storage], inner.y) == value
            if equal.any():
                return LayerPlace(layer, number), _first_position(equal)
        return None

    def _term_words(
        self, extra: list[Term], lacking: list[Term], count: int, position: Position, maker: Decoded | None
    ) -> str:
        """Word the difference between terms: `extra` were read, `lacking` were not, of `count` that the layer means.

        maker: the vector instruction that made the first of `extra`.
        """
        at = f"for {_position_text(position)} of its output"
        if not extra and not lacking:
            return f"computes something else {at}"
        if extra and lacking:
            if sorted(a for a, _ in extra) == sorted(a for a, _ in lacking):
                return f"multiplies {self._describe(extra[0][0])} by other weights {at}"
            return f"takes {self._describe(extra[0][0], maker)} instead of {self._describe(lacking[0][0])} {at}"
        if lacking:
            return f"leaves out {len(lacking)} of {count} terms {at}, the first with {self._describe(lacking[0][0])}"
        return f"takes {len(extra)} terms too many {at}, the first with {self._describe(extra[0][0], maker)}"

    def _describe(self, value: int, maker: Decoded | None = None) -> str:
        """Return words for what a scalar stands for. maker: the VECTOR that made it, if one did."""
        unknown = "what nothing has written" if maker is None else f"what instruction {maker.index} has made"
        return self._describe_known(value) or unknown

    def _describe_known(self, value: int) -> str | None:
        """Return words for the activation or padding that a scalar stands for; None if it belongs to no layer."""
        for at, act in self._activations():
            held = pieces_of(self.cfg, self._pieces(at)[act.storage], act)
            if (held == value).any():
                return f"{_position_text(_first_position(held == value))} of {act.name!r}"
        for storage, pieces in self.state.pieces.items():
            if (pieces == value).any():
                return f"piece {int((pieces == value).argmax())} of the memory of {storage.name!r}"
        key: Hashable = next((key for key, symbol in self.symbols.known.items() if symbol == value), None)
        if isinstance(key, tuple) and key[0] == "padding":
            return f"padding of {key[1]}"
        return None

    def _activations(self) -> Iterator[tuple[int, Activation]]:
        """Yield the activations that layers read and write, inside blocks too, each with the number of its layer."""
        for number, layer in enumerate(self.run.layers):
            for inner in layers_of(layer):
                yield from ((number, act) for act in (inner.y, *inner.inputs()))


def _first_position(mask: NDArray[np.bool_]) -> Position:
    """Return the first position at which `mask` is True."""
    batch, group, row, column = (int(v) for v in np.argwhere(mask)[0])
    return batch, group, row, column


def _position_text(position: Position) -> str:
    """Return a position in words."""
    batch, group, row, column = position
    return f"image batch {batch}, channel group {group}, row {row}, column {column}"


def _value_at(values: Scalars, position: Position) -> int:
    """Return the element of `values` at `position`; axes of length 1 broadcast."""
    return int(values[tuple(0 if size == 1 else v for size, v in zip(values.shape, position, strict=True))])


def _difference_text(does: Operation, means: Operation) -> str:
    """Return in words the first difference between the operation of an instruction and that of its layer."""
    name, actual, meant = next(
        (name, a, b) for name, a, b in zip(Operation._fields, does, means, strict=True) if a != b
    )  # fmt: skip
    if name == "table" and actual is not None and meant is not None:
        return "looks up another table"
    if name == "table":
        return "looks up no table" if actual is None else "looks up a table"
    return f"has {name.replace('_', ' ')} {_value_text(actual)} instead of {_value_text(meant)}"


def _value_text(value: object) -> str:
    """Return a field's value in words."""
    return "none" if value is None else str(value)
