"""Prove that heads of packs reach the weights behind them, wherever packs begin and end, and select their values.

The tests on the RTL show that rows consist of whole packs, and that a step of an expanded entry writes two places.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from amaranth import Cat, Mux, Signal, Value

from celosia.hw.dae_pipeline.weight_decompressor import CHOICE_BITS, PackHeaderParser, WeightDecompressor
from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import CODEBOOK_ENTRIES, CODEBOOKS, NIBBLE_BITS, nibble_weights, packing
from celosia.hw.spec.pipeline import EXPAND_STAGES
from celosia.hw.spec.regs import Error
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

CONFIGS = {
    "several channels in a chunk": Config(block_in=4, block_out=4, weight_bits=4, wgt_depth=8),
    "a channel in a chunk": Config(block_in=16, block_out=8, weight_bits=2, wgt_depth=8),
    "a channel in several chunks": Config(block_in=32, block_out=4, bus_bytes=4, weight_bits=4, wgt_depth=8),
    "several chunks of heads": Config(block_in=64, block_out=16, bus_bytes=4, weight_bits=4, wgt_depth=8),
    "four weights at once": Config(block_in=4, block_out=8, bus_bytes=4, weight_bits=1, wgt_depth=8),
}


def expanded(cfg: Config) -> Harness:
    """Each byte written is the entry of book that its nibble and its group's codebook select, or the byte that came.

    It is written three cycles later, to the same place. The entry of book holds the last write before the weights came.
    """
    h = Harness()
    dut, p = WeightDecompressor(cfg), packing(cfg)
    inside = h.add(dut)
    lanes, word = p.expansion * p.chunk_bytes, dut.write.data[: 8 * p.chunk_bytes]
    weights = nibble_weights(cfg)
    at = h.constant(range(len(dut.wgt.data) // 8), "at")
    entry = h.constant(range(CODEBOOKS * CODEBOOK_ENTRIES), "entry")
    lane, nibble, held = Signal(range(lanes)), Signal(range(lanes // weights)), Signal(8 * weights)
    asked, byte = Signal(len(entry)), Signal(8)
    h.m.d.comb += [
        lane.eq(at[: len(lane)]),
        nibble.eq(lane // weights),
        asked.eq(Cat(
            word.word_select(nibble, NIBBLE_BITS),
            dut.choices[lane // (lanes // p.chunk_blocks)],
        )),
        byte.eq(Mux(dut.expand, held.word_select(lane % weights, 8), word.word_select(lane % p.chunk_bytes, 8))),
    ]  # fmt: skip
    writes = dut.book.en & dut.book.mask[0] & (dut.book.addr == entry)
    h.m.d.sync += held.eq(Mux(writes, dut.book.data, held))
    h.assume(at < len(dut.wgt.data) // 8)
    h.assume(~(dut.book.en & dut.write.en))

    def later(value: Any, name: str, stages: int = EXPAND_STAGES) -> Any:
        for stage in range(stages):
            value = h.register(value, f"{name}{stage}")
        return value

    known = dut.write.en & (~dut.expand | (asked == entry))
    h.ensure(implies(later(known, "known"), dut.wgt.data.word_select(at, 8) == later(byte, "byte")), "byte")
    h.ensure(dut.wgt.en == later(dut.write.en, "en"), "en")
    begun = later(1, "begun")
    for name in ("addr", "mask"):
        h.ensure(implies(begun, getattr(dut.wgt, name) == later(getattr(dut.write, name), name)), name)
    # Invariants for the induction: each block RAM holds it, or is about to.
    for number in range(lanes // weights // 2):
        comes = inside["fills"] & (inside[f"places.{2 * number}"] == entry)
        h.ensure(implies(comes, inside["word"] == held), f"comes{number}")
        h.ensure(implies(~comes, inside.memory(f"memories.{number}", entry) == held), f"holds{number}")
    return h


def heads(cfg: Config) -> Harness:
    """Any choice in a head is followed from the chunk that brings it to the chunks of its weights.

    Chunks may wait for any time. Other chunks come between packs, not within. A chunk with an error passes and ends the
    run; later chunks do not matter.
    """
    h = Harness()
    dut, p = PackHeaderParser(cfg), packing(cfg)
    inside = h.add(dut)
    ahead, behind = p.chunk_counts
    at, followed = Signal(range(ahead + behind)), h.constant(range(p.blocks), "followed")
    number = at - ahead
    takes, failed = dut.chunk.valid & dut.chunk.ready & dut.packed, Signal()
    error = dut.chunk.payload.error
    h.m.d.sync += failed.eq(failed | (takes & (error != Error.NONE)))
    h.assume(~failed)
    h.m.d.sync += at.eq(Mux(takes, Mux(at == ahead + behind - 1, 0, at + 1), at))
    h.assume(followed < p.blocks)
    h.assume(implies((at != 0) & ~dut.packed, ~dut.rest.ready))
    fits = 2 * p.chunk_bytes  # choices in a chunk
    home, place = followed // fits, followed % fits
    known = Signal(CHOICE_BITS)
    comes = takes & (at == home) & (at < ahead)
    h.m.d.sync += known.eq(Mux(comes, dut.chunk.payload.data.word_select(place, CHOICE_BITS), known))
    is_head = dut.packed & (at < ahead) & (error == Error.NONE)
    h.ensure(dut.rest.valid == (dut.chunk.valid & ~is_head), "rest")
    h.ensure(implies(is_head, dut.chunk.ready), "heads_are_taken")
    h.ensure(implies(~is_head, dut.chunk.ready == dut.rest.ready), "weights_wait")
    same = Value.cast(dut.rest.payload) == Value.cast(dut.chunk.payload)
    h.ensure(implies(dut.rest.valid, same), "weights_as_they_are")
    of_entry = p.weights // p.entries
    for part in range(p.chunk_blocks):
        group = Signal(range(p.blocks), name=f"group{part}")
        h.m.d.comb += group.eq(number[: len(at)] * p.expansion * p.chunk_bytes % of_entry // p.run + part)
        own = dut.rest.valid & dut.packed & (at >= ahead) & (group == followed)
        h.ensure(implies(own, dut.choices[part] == known), f"choice{part}")
    # Invariants that make the proof inductive.
    h.ensure(at < ahead + behind, "inside")
    h.ensure(inside["begins"] == (at < ahead), "begins")
    h.ensure(inside["word"] == Mux(at < ahead, at, 0), "word")
    h.ensure(inside["number"] == Mux(at < ahead, 0, number[: len(at)]), "number")
    for i, word in enumerate(inside["words"]):
        here = (home == i) & (at > i)
        h.ensure(implies(here, word.word_select(place, CHOICE_BITS) == known), f"held{i}")
    return h


FILE = "dae_pipeline/weight_decompressor.py"
for name, cfg in CONFIGS.items():
    prove(
        f"packed weights are expanded, {name}",
        Mutant(FILE, "to.data.eq(word)", "to.data.eq(word + 1)"),
        Mutant(
            FILE,
            "Mux(self.book.en, self.book.addr, entry)",
            "Mux(fills, self.book.addr, entry)",
            near="fills.eq(self.book.en & self.book.mask[0])",
        ),
        Mutant(FILE, "expanded.eq(expand)", "expanded.eq(self.expand)", near="expand.eq(self.expand)"),
        Mutant(FILE, "Mux(expanded, found", "Mux(expand, found", near="expand.eq(self.expand), expanded.eq(expand)"),
        Mutant(FILE, "Cat(packed[i], self.choices", "Cat(packed[i ^ 1], self.choices"),
        *(
            (Mutant(FILE, "self.choices[i * groups // nibbles]", "self.choices[0]"),)
            if packing(cfg).chunk_blocks > 1
            else ()
        ),
        depth=EXPAND_STAGES,
    )(partial(expanded, cfg))
    parts, short = packing(cfg).blocks // packing(cfg).chunk_blocks, sum(packing(cfg).chunk_counts) < 12
    prove(
        f"heads go to their weights, {name}",
        Mutant(FILE, "begins.eq(word != ahead - 1)", "begins.eq(1)"),
        *((Mutant(FILE, "begins.eq(number == behind - 1)", "begins.eq(number == behind - 2)"),) if short else ()),
        Mutant(FILE, "& (self.chunk.payload.error == Error.NONE)", ""),
        Mutant(FILE, "takes = self.packed & begins", "takes = begins"),
        *((Mutant(FILE, "(number % last) >>", "((number + 1) % last) >>"),) if parts > 1 else ()),
        *(
            (Mutant(FILE, "Mux(word == i, self", "Mux(word == 0, self"),)
            if packing(cfg).blocks > 2 * packing(cfg).chunk_bytes
            else ()
        ),
        depth=1,
    )(partial(heads, cfg))
