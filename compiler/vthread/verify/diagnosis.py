"""The sentence for a program that does not compute what its layers mean: which instruction, which output, and why.

It may be slow: the launch is run again as far as the store that is wrong, then as far as the vector instruction that
made what it stores, each time remembering who wrote what; at last the terms of one accumulator are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import inputs
from celosia.compiler.vthread.verify.decode import Decoded, Dims, loop_fields, padded_block, reach, sizes
from celosia.compiler.vthread.verify.meaning import Operands, Operation, Scalars, part, terms
from celosia.compiler.vthread.verify.provenance import (
    Machine,
    Meaning,
    Mismatch,
    Provenance,
    ProvenanceError,
    Run,
    indices,
    operation_of,
    store_places,
)
from celosia.hw.isa import OUTER_LOOPS, ASource, BSource, Opcode

Position = tuple[int, int, int, int]
"""Batch, channel group, row and column."""
Term = tuple[int, int | None]
"""An input piece and the weights that it meets, None where it is taken as it is."""


def explain(state: Provenance, number: int, run: Run, stream: list[Decoded], found: Mismatch) -> ProvenanceError:
    """The error for what `found` says of launch `number`."""
    return _Diagnosis(state, number, run, stream).explain(found)


class _Diagnosis:
    def __init__(self, state: Provenance, number: int, run: Run, stream: list[Decoded]) -> None:
        self.state, self.number, self.run, self.stream = state, number, run, stream
        self.cfg, self.symbols = state.cfg, state.symbols

    def explain(self, found: Mismatch) -> ProvenanceError:
        if found.index < 0:
            return self._missing(found.layer)
        return self._store(self.stream[found.index], found.layer)

    def error(self, rule: Meaning, i: Decoded, layer: int, what: str) -> ProvenanceError:
        name = f"layer {layer} {self.run.layers[layer].name!r}"
        return ProvenanceError(rule, self.number, i.index, f"({i.unit.name}, {name}) {what}")

    # Running again ----------------------------------------------------------------------------------------------

    def _machine(self) -> Machine:
        self.state.dram[...] = self.state.before
        return Machine(self.state, self.number, self.run)

    def _replay(self, stop: int) -> tuple[Machine, dict[str, NDArray[np.int64]]]:
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
        shape = y.batches(self.cfg), y.storage_groups, y.height, y.width
        batch, group, row, column = np.unravel_index(piece, shape)
        return int(batch), int(group) - y.group_offset, int(row), int(column)

    def _store(self, i: Decoded, layer: int) -> ProvenanceError:
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
        for other in range(len(self.run.layers)):
            result = machine.operands(other).result(self.symbols)
            if (result == value).any():
                at = _words(_first(result == value))
                of = "" if other == layer else f" of layer {other} {self.run.layers[other].name!r}"
                what = f"stores as {_words(position)} of its output what is {at}{of}"
                return self.error(Meaning.PLACE, i, layer, what)
        writer = int(writers["out"][entry])
        if writer < 0:
            return self.error(Meaning.OPERAND, i, layer, f"stores as {_words(position)} what nothing has written")
        return self._vector(self.stream[writer], layer, position, entry)

    # Vector instructions ----------------------------------------------------------------------------------------

    def _vector(self, i: Decoded, layer: int, position: Position, entry: int) -> ProvenanceError:
        """What is wrong with `i`, which wrote piece `entry` of out, to become `position` of y."""
        f, outs = i.fields, self.cfg.out_pieces
        machine, _ = self._replay(i.index)
        n, y, x, q = (int(v) for v in np.argwhere(indices(f["dst_base"] * outs, self._dims(i, "dst")) == entry)[0])
        means, at = machine.operands(layer), f"for {_words(position)} of its output"
        does = operation_of(f, machine.lut)
        if does != means.operation:
            return self.error(Meaning.OPERATION, i, layer, f"{_difference(does, means.operation)} {at}")

        def read(memory: Scalars, operand: str) -> int:
            dims = self._dims(i, operand)
            return int(memory[f[f"{operand}_base"] * outs + sum(v * dims[d][1] for d, v in enumerate((n, y, x, q)))])

        if means.parameters is not None and read(machine.par, "par") != _at(means.parameters, position):
            return self.error(Meaning.PARAMETERS, i, layer, f"scales with other parameters {at}")
        if means.b is not None and f["b_source"] == BSource.VIN:
            b, meant = read(machine.vin, "b"), _at(means.b, position)
            if b != meant:
                what = f"takes {self._name(b)} as B instead of {self._name(meant)} {at}"
                return self.error(Meaning.OPERAND, i, layer, what)
        dims = (*self._dims(i, "a")[:3], *((f[e], f[s] * outs) for e, s in loop_fields("a", ("r", "s"))), (outs, 1))
        window = indices(f["a_base"] * outs, dims)[n, y, x, :, :, q].reshape(-1)
        if f["a_source"] == ASource.VIN:
            held: list[tuple[Term, Decoded]] = [((int(value), None), i) for value in machine.vin[window]]
        else:
            held = [term for a in window for term in self._terms_of(int(a), i)]
        return self._terms(i, layer, position, held, means)

    def _dims(self, i: Decoded, operand: str) -> Dims:
        outs = self.cfg.out_pieces
        loops = tuple((i.fields[e], i.fields[s] * outs) for e, s in loop_fields(operand, OUTER_LOOPS))
        return (*loops, (outs, 1))

    # Terms ------------------------------------------------------------------------------------------------------

    def _terms_of(self, accumulator: int, reader: Decoded) -> list[tuple[Term, Decoded]]:
        """The terms of a piece of acc when `reader` comes, and the instruction that added each."""
        machine, held = self._machine(), list[tuple[Term, Decoded]]()
        for i in self.stream[: reader.index]:
            writes = any(
                memory == "acc" and write and (places.of(np.arange(places.end)) == accumulator).any()
                for memory, _, places, write in i.touches
            )
            if writes and i.opcode == Opcode.GEMM:
                held = (held if i.fields["accumulate"] else []) + list(self._products(machine, i, accumulator))
            machine.step(i)
            if writes and i.opcode != Opcode.GEMM:
                held = [((int(machine.acc[accumulator]), None), i)]
        return held

    def _products(self, machine: Machine, i: Decoded, accumulator: int) -> Iterator[tuple[Term, Decoded]]:
        """The terms that GEMM `i` adds to a piece of acc, those whose weights are zero left out."""
        f, ins, outs = i.fields, self.cfg.inp_pieces, self.cfg.out_pieces
        tile = ins * outs
        reduction = tuple(f[f"extent_{loop}"] for loop in "krs")
        for n, y, x, q in np.argwhere(indices(f["acc_base"] * outs, self._dims(i, "acc")) == accumulator).tolist():
            inp = (f["inp_base"] + n * f["inp_n"] + y * f["inp_y"] + x * f["inp_x"]) * ins
            wgt = (f["wgt_base"] + n * f["wgt_n"] + y * f["wgt_y"] + x * f["wgt_x"]) * tile + q * ins
            left = tuple((e, f[f"inp_{loop}"] * ins) for loop, e in zip("krs", reduction, strict=True))
            right = tuple((e, f[f"wgt_{loop}"] * tile) for loop, e in zip("krs", reduction, strict=True))
            inputs = machine.inp[indices(inp, (*left, (ins, 1)))].reshape(-1).tolist()
            weights = machine.wgt[indices(wgt, (*right, (ins, 1)))].reshape(-1).tolist()
            yield from (((a, w), i) for a, w in zip(inputs, weights, strict=True) if w)

    def _terms(
        self, i: Decoded, layer: int, position: Position, held: list[tuple[Term, Decoded]], means: Operands
    ) -> ProvenanceError:
        """How the terms that vector instruction `i` reads as A differ from those that the layer means."""
        meant = list(terms(self.symbols, self.state.pieces, self.run.layers[layer], means, position))
        has, wants = Counter(term for term, _ in held), Counter(meant)
        extra, lacking = list((has - wants).elements()), list((wants - has).elements())
        guilty = next((by for term, by in held if term in extra), held[-1][1] if held else i)
        rule = Meaning.TERMS if guilty.opcode == Opcode.GEMM else Meaning.OPERAND
        return self.error(rule, guilty, layer, self._term_words(extra, lacking, len(meant), position))

    def _term_words(self, extra: list[Term], lacking: list[Term], count: int, position: Position) -> str:
        at = f"for {_words(position)} of its output"
        if not extra and not lacking:
            return f"computes something else {at}"
        if extra and lacking:
            if sorted(a for a, _ in extra) == sorted(a for a, _ in lacking):
                return f"multiplies {self._name(extra[0][0])} by other weights {at}"
            return f"takes {self._name(extra[0][0])} instead of {self._name(lacking[0][0])} {at}"
        if lacking:
            return f"leaves out {len(lacking)} of {count} terms {at}, the first with {self._name(lacking[0][0])}"
        return f"takes {len(extra)} terms too many {at}, the first with {self._name(extra[0][0])}"

    def _name(self, value: int) -> str:
        """What a scalar stands for."""
        for act in (act for layer in self.run.layers for act in (layer.y, *inputs(layer))):
            held = part(self.cfg, self.state.pieces[act.storage], act)
            if (held == value).any():
                return f"{_words(_first(held == value))} of {act.name!r}"
        for storage, pieces in self.state.pieces.items():
            if (pieces == value).any():
                return f"piece {int((pieces == value).argmax())} of the memory of {storage.name!r}"
        key: Hashable = next((key for key, symbol in self.symbols.known.items() if symbol == value), None)
        if isinstance(key, tuple) and key[0] == "padding":
            return f"padding of {key[1]}"
        return "what nothing has written"


def _first(found: NDArray[np.bool_]) -> Position:
    """Where `found` is True first."""
    batch, group, row, column = (int(v) for v in np.argwhere(found)[0])
    return batch, group, row, column


def _words(position: Position) -> str:
    batch, group, row, column = position
    return f"image batch {batch}, channel group {group}, row {row}, column {column}"


def _at(values: Scalars, position: Position) -> int:
    """The element of `values`, whose axes of length 1 serve all positions."""
    return int(values[tuple(0 if size == 1 else v for size, v in zip(values.shape, position, strict=True))])


def _difference(does: Operation, means: Operation) -> str:
    name, found, meant = next(
        (name, a, b) for name, a, b in zip(Operation._fields, does, means, strict=True) if a != b
    )  # fmt: skip
    if name == "table" and found is not None and meant is not None:
        return "looks up another table"
    if name == "table":
        return "looks up no table" if found is None else "looks up a table"
    return f"has {name.replace('_', ' ')} {_plain(found)} instead of {_plain(meant)}"


def _plain(value: object) -> str:
    return "none" if value is None else str(value)
