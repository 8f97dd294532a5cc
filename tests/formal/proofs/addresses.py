"""Prove that addresses follow the closed form base + sum of index * stride, iteration by iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from amaranth import Const, Mux, Signal, Value
from amaranth.lib import data

from celosia.hw.dae_pipeline import address_generators
from celosia.hw.dae_pipeline.address_generators import DramAddressGenerator, ScratchpadAddressGenerator
from celosia.hw.gemm_core.loops import Loops
from celosia.hw.spec.isa import GEMM_LOOPS, OUTER_LOOPS, TAP_LOOPS, VECTOR_LOOPS
from proofs.declare import Mutant, prove
from proofs.harness import Harness, implies

BITS = 4
"""Bits of an address; sums modulo a power of two do not depend on higher bits."""


class Odometer:
    """The indices of nested loops, the last one innermost, each from 0 to its end.

    ends: the last value of each index.
    """

    def __init__(self, h: Harness, ends: Mapping[str, Value], name: str = "index") -> None:
        self._h, self.ends = h, dict(ends)
        self.index = {loop: Signal(len(end), name=f"{name}_{loop}") for loop, end in self.ends.items()}

    def at_end(self, names: Sequence[str] | None = None) -> Value:
        result: Value = Const(1)
        for loop in self.ends if names is None else names:
            result = result & (self.index[loop] == self.ends[loop])
        return result

    def begins(self, starts: Value) -> None:
        with self._h.m.If(starts):
            self._h.m.d.sync += [index.eq(0) for index in self.index.values()]

    def counts(self, steps: Value) -> None:
        """Advance by one, like the digits of a number in which each digit has its own limit."""
        names = list(self.ends)
        for i, loop in enumerate(names):
            with self._h.m.If(steps & self.at_end(names[i + 1 :])):
                after = Mux(self.at_end([loop]), 0, self.index[loop] + 1)
                self._h.m.d.sync += self.index[loop].eq(after)

    def affine(self, base: Value, strides: Mapping[str, Value]) -> Value:
        """Return base + sum of index * stride, in as many bits as `base` has."""
        bits, total = len(base), base
        for loop, stride in strides.items():
            total = (total + self.index[loop][:bits] * stride[:bits])[:bits]
        return total


class Job:
    """The item that a component accepted last, and whether it still works on it."""

    def __init__(self, h: Harness, accepts: Value, offered: Value, ends: Value, drops: Value | int = 0) -> None:
        shape = offered.shape()
        self.held, self.runs = Signal(shape, name="job"), Signal(name="runs")
        with h.m.If(accepts):
            h.m.d.sync += [self.held.eq(offered), self.runs.eq(1)]
        with h.m.Elif(ends):
            h.m.d.sync += self.runs.eq(0)
        with h.m.If(drops):
            h.m.d.sync += self.runs.eq(0)


def loops(names: Sequence[str], operands: Mapping[str, Sequence[str]], reduction: Sequence[str]) -> Harness:
    """Loops gives exactly every iteration, in order, with its addresses and the flags of its reduction."""
    h = Harness()
    dut = Loops(names, {operand: (BITS, of) for operand, of in operands.items()}, reduction)
    inside = h.add(dut)
    new, step = dut.instr.payload, dut.step.payload
    for loop in names:
        h.assume(new[f"extent_{loop}"] != 0)  # proved of fetch
    accepts, steps = dut.instr.valid & dut.instr.ready, dut.step.valid & dut.step.ready
    held = Signal(dut.fields, name="instruction")
    count = Odometer(h, {loop: held[f"extent_{loop}"] - 1 for loop in names})
    job = Job(h, accepts, Value.cast(new), steps & count.at_end(), dut.halt)
    h.m.d.comb += Value.cast(held).eq(job.held)
    count.counts(steps)
    count.begins(accepts)
    runs = job.runs

    h.ensure(dut.step.valid == (runs & ~dut.halt), "iterations_until_the_last")
    for operand, of in operands.items():
        address = count.affine(held[f"{operand}_base"], {loop: held[f"{operand}_{loop}"] for loop in of})
        h.ensure(implies(runs, step[operand] == address), f"address_of_{operand}")
    begun: Value = Const(1)
    for loop in reduction:
        begun = begun & (count.index[loop] == 0)
    h.ensure(implies(runs, step.first == begun), "first")
    h.ensure(implies(runs, step.last == count.at_end(reduction)), "last")
    h.ensure(implies(runs, step.end == count.at_end()), "end")

    # `ahead` announces the next cycle's step.
    said = {name: h.register(dut.ahead[name], f"said_{name}") for name in ("valid", "last", *operands)}
    h.ensure(implies(dut.step.valid, said["valid"]) & implies(said["valid"], dut.step.valid | dut.halt), "ahead_valid")
    for name in ("last", *operands):
        h.ensure(implies(dut.step.valid, said[name] == step[name]), f"ahead_{name}")

    # Invariants for the induction: each register is a function of the indices.
    h.ensure(inside["busy"] == runs, "busy")
    h.ensure(implies(runs, Value.cast(inside["held"]) == job.held), "held")
    for i, loop in enumerate(names):
        extent, at_last = held[f"extent_{loop}"], count.at_end([loop])
        after = count.at_end(names[i + 1 :])
        facts = {
            "within": count.index[loop] < extent,
            "left": inside[f"left.{i}"] == extent - count.index[loop],
            "at_last": inside["at_last"][i] == at_last,
            "single": inside[f"single.{i}"] == (extent == 1),
            "near": inside[f"near.{i}"] == (extent == count.index[loop] + 2),
            "rise": inside["rise"][i] == after,
            "goes_on": inside["goes_on"][i] == (after & ~at_last),
        }
        for name, fact in facts.items():
            h.ensure(implies(runs, fact), f"{name}_of_{loop}")
    begin = inside["begin"]
    for operand, of in operands.items():
        for i, loop in enumerate(of):
            strides = {outer: held[f"{operand}_{outer}"] for outer in of[: i + 1]}
            began = begin[operand, loop] == count.affine(held[f"{operand}_base"], strides)
            h.ensure(implies(runs, began), f"{operand}_in_{loop}")
    return h


def walker(padded: bool) -> Harness:
    """A ScratchpadAddressGenerator gives each step of each element once, in order.

    An element in the padding has one step, which is marked.
    """
    return walk_of(Harness(), padded).h


@dataclass(frozen=True)
class Walk:
    """A ScratchpadAddressGenerator with the expected state of its walk.

    held: its job, while it `runs`. count: indices of the element, which is in the padding if `outside`. steps: a step
    is taken, which `ends` the element. accepts: it takes a job.
    """

    h: Harness
    dut: ScratchpadAddressGenerator
    held: data.View[data.StructLayout]
    runs: Value
    count: Odometer
    outside: Value
    accepts: Value
    steps: Value
    ends: Value


def walk_of(h: Harness, padded: bool) -> Walk:
    dut = ScratchpadAddressGenerator(BITS, 2, data.StructLayout({"tag": 2}), padded=padded)
    inside = h.add(dut)
    new, step = dut.job.payload, dut.step.payload
    accepts, steps = dut.job.valid & dut.job.ready, dut.step.valid & dut.step.ready
    held = Signal(dut.job.payload.shape(), name="block")
    count = Odometer(h, {axis: held[f"{axis}_end"] for axis in "zyx"})
    part = Signal(2, name="part")

    def is_outside(axis: str) -> Value:
        index = count.index[axis]
        return (index < held[f"{axis}_first"]) | (index >= held[f"{axis}_stop"]) if padded else Const(0)

    outside = is_outside("x") | is_outside("y")
    element_ends = outside | (part == held.step_end)
    ends = element_ends & count.at_end()
    job = Job(h, accepts, Value.cast(new), steps & ends)
    h.m.d.comb += Value.cast(held).eq(job.held)
    count.counts(steps & element_ends)
    count.begins(accepts)
    with h.m.If(accepts | (steps & element_ends)):
        h.m.d.sync += part.eq(0)
    with h.m.Elif(steps):
        h.m.d.sync += part.eq(part + 1)
    runs = job.runs

    h.ensure(dut.step.valid == runs, "steps_until_the_last")
    element = count.affine(held.base, {axis: held[f"{axis}_step"] for axis in "xyz"})
    wanted = {"element": element, "step": part, "outside": outside, "last": ends, "tag": Value.cast(held.tag)}
    for name, value in wanted.items():
        h.ensure(implies(runs, Value.cast(step[name]) == value), f"gives_{name}")

    # Invariants that make the proof inductive.
    h.ensure(implies(runs, Value.cast(inside["job"]) == job.held), "job")
    h.ensure(implies(runs & ~outside, part <= held.step_end), "part")
    h.ensure(implies(runs, inside["step_last"] == (part == held.step_end)), "step_last")
    h.ensure(implies(runs, inside["single_step"] == (held.step_end == 0)), "single_step")
    h.ensure(implies(runs & outside, part == 0), "one_step")
    for name, value in {"outside": outside, "last_step": element_ends, "last": ends}.items():
        h.ensure(implies(runs, inside[name] == value), f"known_{name}")
    for axis in "xyz":
        index, end = count.index[axis], held[f"{axis}_end"]
        facts = {
            "within": index <= end,
            "following": inside[f"{axis}._following"] == (index + 1)[: len(end)],
            "last": inside[f"{axis}.last"] == (index == end),
            "single": inside[f"{axis}._single"] == (end == 0),
        }
        has_borders = padded and axis != "z"
        begins: Value = held[f"{axis}_first"] != 0 if has_borders else Const(0)
        if has_borders:  # sizes are not 0, which is proved of fetch
            h.assume(new[f"{axis}_first"] < new[f"{axis}_stop"])
            h.ensure(implies(runs, held[f"{axis}_first"] < held[f"{axis}_stop"]), f"borders_of_{axis}")
        facts["outside"] = inside[f"{axis}.outside"] == (is_outside(axis) if has_borders else 0)
        facts["begins"] = inside[f"{axis}._begins_outside"] == begins
        for name, fact in facts.items():
            h.ensure(implies(runs, fact), f"{name}_of_{axis}")
    for name, axes in (("plane", "z"), ("row", "zy")):
        began = count.affine(held.base, {axis: held[f"{axis}_step"] for axis in axes})
        h.ensure(implies(runs, inside[name] == began), f"{name}_began")
    return Walk(h, dut, held, runs, count, outside, accepts, steps, element_ends)


def rows(max_shift: int) -> Harness:
    """DramAddressGenerator gives every row, in order; a plane of contiguous rows is one row. DRAM has 256 bytes."""
    return list_of(Harness(), max_shift).h


@dataclass(frozen=True)
class Listing:
    """A DramAddressGenerator with the expected state of its list of rows.

    listed: the block, while it `runs`, after it `begins`. waiting: the next block, if it `waits`; sizes: its x * y.
    planes: rows are whole planes, of `plane_bytes`. count: indices of the row. steps: the row is taken.
    """

    h: Harness
    dut: DramAddressGenerator
    listed: data.View[data.StructLayout]
    waiting: data.View[data.StructLayout]
    runs: Value
    waits: Value
    begins: Value
    steps: Value
    planes: Value
    plane_bytes: Value
    sizes: Value
    count: Odometer


def list_of(h: Harness, max_shift: int) -> Listing:
    with patch.object(address_generators, "OFFSET_BITS", 2 * BITS):
        dut = DramAddressGenerator(max_shift)
        inside = h.add(dut)
    new, row = dut.block.payload, dut.row.payload
    h.assume((new.x_size != 0) & (new.y_size != 0) & (new.z_size != 0) & (new.shift <= max_shift))  # proved of fetch
    shape = new.shape()
    # Two blocks: one that waits, one that is listed.
    waiting, listed = Signal(shape, name="waiting_block"), Signal(shape, name="listed_block")
    waits, runs, planes = Signal(name="waits"), Signal(name="runs"), Signal(name="whole_planes")
    bytes_ = {name: Signal(dut.bytes_bits, name=f"{name}_bytes") for name in ("row", "plane")}
    sizes = Signal(28, name="sizes")
    accepts, steps = dut.block.valid & dut.block.ready, dut.row.valid & dut.row.ready
    count = Odometer(h, {"z": listed.z_size - 1, "y": Mux(planes, 0, listed.y_size - 1)})
    ends = steps & count.at_end()
    begins = waits & (~runs | ends)
    count.counts(steps)
    count.begins(begins)
    with h.m.If(accepts):
        h.m.d.sync += [waits.eq(1), waiting.eq(new), sizes.eq(new.x_size * new.y_size)]
    with h.m.Elif(begins):
        h.m.d.sync += waits.eq(0)
    with h.m.If(begins):
        h.m.d.sync += [
            runs.eq(1),
            listed.eq(waiting),
            planes.eq((waiting.x_size << waiting.shift) == waiting.y_step),
            bytes_["row"].eq(waiting.x_size << waiting.shift),
            bytes_["plane"].eq(sizes << waiting.shift),
        ]
    with h.m.Elif(ends):
        h.m.d.sync += runs.eq(0)

    h.ensure(dut.row.valid == runs, "rows_until_the_last")
    h.ensure(dut.block.ready == ~waits, "takes_the_next")
    offset = count.affine(listed.addr, {"z": listed.z_step, "y": listed.y_step})
    wanted = {"offset": offset, "bytes": Mux(planes, bytes_["plane"], bytes_["row"]), "final": count.at_end()}
    for name, value in wanted.items():
        h.ensure(implies(runs, row[name] == value), f"gives_{name}")
    h.ensure(implies(runs, row.shift == listed.shift), "gives_shift")

    # Invariants that make the proof inductive.
    h.ensure(inside["waiting"] == waits, "waits")
    merged = (waiting.x_size << waiting.shift) == waiting.y_step
    h.ensure(implies(waits, Value.cast(inside["block"]) == Value.cast(waiting)), "block")
    h.ensure(implies(waits, (inside["plane_size"] == sizes) & (inside["merged"] == merged)), "block_facts")
    h.ensure(implies(waits, (waiting.y_size != 0) & (waiting.z_size != 0)), "block_sizes")
    number = Mux(planes, 1, listed.y_size)
    facts = {
        "steps": (inside["y_step"] == listed.y_step) & (inside["z_step"] == listed.z_step),
        "rows": (inside["rows"] == number) & (number != 0) & (listed.z_size != 0),
        "rows_left": inside["rows_left"] == number - count.index["y"],
        "planes_left": inside["planes_left"] == listed.z_size - count.index["z"],
        "last_row": inside["last_row"] == count.at_end(["y"]),
        "last_plane": inside["last_plane"] == count.at_end(["z"]),
        "single": inside["single"] == (number == 1),
        "within": (count.index["y"] < number) & (count.index["z"] < listed.z_size),
        "plane": inside["plane"] == count.affine(listed.addr, {"z": listed.z_step}),
    }
    for name, fact in facts.items():
        h.ensure(implies(runs, fact), name)
    return Listing(
        h, dut, listed, waiting, runs, waits, begins, steps, planes, bytes_["plane"], sizes, count,
    )  # fmt: skip


LOOPS, WALK = "gemm_core/loops.py", "dae_pipeline/address_generators.py"
STRIDE = Mutant(
    LOOPS, "begin[operand, loop].eq(following)", "begin[operand, loop].eq(origin)", near="following.eq(origin + stride)"
)
GOES = Mutant(LOOPS, "coming[i + 1 :].all() & ~coming[i]", "coming[i + 1 :].all()")
RESTART = Mutant(LOOPS, "Mux(at_last[i], extent == 2, left[i] == 3)", "left[i] == 3")
AHEAD = Mutant(LOOPS, "Mux(moves, following, innermost)", "innermost")
for name, case in {
    "GEMM": (GEMM_LOOPS, {"acc": OUTER_LOOPS, "inp": GEMM_LOOPS}, ("k", "r", "s")),
    "VECTOR": (VECTOR_LOOPS, {"a": VECTOR_LOOPS, "dst": OUTER_LOOPS, "tap": TAP_LOOPS}, ("r", "s")),
}.items():
    prove(f"addresses of the loops of {name}", STRIDE, GOES, RESTART, AHEAD, depth=1, tested=name == "GEMM")(
        partial(loops, *case)
    )
NEXT = Mutant(WALK, "next_row.eq(next_plane), next_element", "next_element", near="next_plane.eq(plane + job.z_step)")
BORDER = Mutant(WALK, "stop | (self.outside & ~first)", "stop | self.outside")
PARTS = Mutant(WALK, "next_last_step.eq(next_outside | next_step_last)", "next_last_step.eq(next_step_last)")
for padded in (True, False):
    prove(
        f"elements of blocks in a scratchpad{', with padding' if padded else ''}",
        NEXT,
        *((BORDER, PARTS) if padded else ()),
        depth=1,
        tested=padded,
    )(partial(walker, padded))
prove(
    "rows of blocks in DRAM",
    Mutant(WALK, "offset.eq(next_plane)", "offset.eq(plane)", near="next_plane = (plane + z_step)[:OFFSET_BITS]"),
    Mutant(WALK, "count = Mux(merged, 1, block.y_size)", "count = block.y_size"),
    depth=1,
    tested=False,
)(partial(rows, 4))
