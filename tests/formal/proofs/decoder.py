"""Prove that fetch turns every word into an instruction or an error, and requests its words by the rules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from operator import or_

from amaranth import Cat, Const, Mux, Signal, Value

from celosia.hw.dae_pipeline.fetch import Fetch
from celosia.hw.lib.layout import INDEX_BITS
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, formats, instruction_bytes
from celosia.hw.spec.legality import rules
from celosia.hw.spec.regs import Error
from proofs.bursts import legal, limits
from proofs.declare import Mutant, prove
from proofs.handshakes import SMALL
from proofs.harness import Harness, implies

STABLE = ("instr_addr", "instr_count", "dma_base", "dma_size")
WIDE = Config(
    batch=16, block_in=8, block_out=8, bus_bytes=128, inp_depth=1 << 20, wgt_depth=1 << 20, acc_depth=1 << 20,
    vin_depth=1 << 20, out_depth=1 << 20, par_depth=1 << 12, lut_count=16, queue_depth=2, token_bits=16, taps=16,
    tap_depth=1 << 12, forward=True,
)  # fmt: skip
"""A Config with the widest addresses."""
BROAD = replace(SMALL, bus_bytes=128)
"""A Config with two words in a beat."""
LEAN = replace(SMALL, taps=3, forward=True, alu=False, int32=False)
CONFIGS = {"small": SMALL, "broad": BROAD, "wide": WIDE, "taps": LEAN}


def decoder(cfg: Config) -> Harness:
    """A word goes unchanged to one queue, with its number, or is an error; it waits only if that queue is full."""
    h = Harness()
    dut = Fetch(cfg)
    inside = h.add(dut, STABLE)
    holds, error, index = inside["holds"], inside["error"], inside["index"]
    bits: Value = inside["instr"]
    # The rules on fields that are cut out of the word by their declared places.
    illegal = Signal()
    by_opcode: Value = Const(1)
    for opcode, fmt in formats(cfg).items():
        fields = {field.name: bits[fmt.offsets[field.name] :][: field.width] for field in fmt.fields}
        broken = reduce(or_, (rule(fields) for rule in rules(cfg)[opcode].values()))
        is_it = bits[:3] == opcode
        by_opcode = (is_it & broken) | (~is_it & by_opcode)
    h.m.d.comb += illegal.eq(by_opcode)

    going = inside["going"]
    seen = going & holds & (index != dut.instr_count)
    taken = inside["goes"]
    bad = illegal | error
    # Registers that hold what was decoded of the word in the cycle before.
    h.ensure(implies(holds, inside["legal"] == ~illegal), "legal")
    for mine, opcode in zip(inside["belongs"], formats(cfg)):
        h.ensure(implies(holds, mine == (bits[:3] == opcode)), f"belongs_{opcode.name}")
    h.ensure(implies(going, inside["last"] == (index == dut.instr_count)), "last")
    pushes, stands = [], Const(0)
    for (opcode, fmt), queue in zip(formats(cfg).items(), inside["queues"]):
        unit = UNIT_OF[opcode]
        push = queue.i.valid & queue.i.ready
        pushes.append(push)
        same = Value.cast(queue.i.payload) == Cat(index[:INDEX_BITS], bits[: fmt.width])
        h.ensure(implies(push, same & (bits[:3] == opcode) & taken), f"{unit.name}_gets_its_own")
        waits = seen & ~bad & (bits[:3] == opcode)
        h.ensure(implies(waits, queue.i.valid | ~queue.i.ready), f"{unit.name}_gets_all")
        stands = stands | (waits & ~queue.i.ready)
    h.ensure(taken == Cat(pushes).any(), "taken_by_one")
    h.ensure(sum(pushes[1:], pushes[0]) <= 1, "taken_by_no_two")
    h.ensure(implies(seen, dut.error.valid == bad), "error_or_instruction")
    h.ensure(implies(seen, dut.error.valid + taken + stands == 1), "total")
    h.ensure(implies(taken, ~bad & seen), "no_bad_one_taken")
    code = Error.READ * error + Error.ILLEGAL_INSTRUCTION * ~error
    names = (dut.error.payload.code == code) & (dut.error.payload.index == index[:INDEX_BITS])
    h.ensure(implies(seen & bad, names), "error_names_it")
    return h


def requests(cfg: Config) -> Harness:
    """Bursts are legal, inside the limits and kept; there is room for every beat that they bring."""
    h = Harness()
    dut = Fetch(cfg)
    inside = h.add(dut, STABLE)
    limits(h, dut.dma_base, dut.dma_size)
    bus_bytes, word_bytes = cfg.bus_bytes, instruction_bytes(cfg)
    request, response = dut.bus.request, dut.bus.response
    h.obeys(request, "request")
    burst = request.payload
    h.ensure(implies(request.valid, legal(burst, dut.dma_base, dut.dma_size, bus_bytes)), "legal")
    pending, room, buffer = inside["pending"], inside["room"], inside["buffer"]
    h.assume(implies(response.valid, (pending > burst.len + 1) | (~request.valid & (pending != 0))))
    h.ensure(implies(response.valid, response.ready & buffer.i.ready), "room_for_every_beat")
    h.ensure(implies(dut.idle, ~request.valid), "quiet")
    # Invariants for the induction: where the next burst begins, and that nothing is asked for unless all of it fits.
    depth = inside["depth"]
    h.ensure(room + inside["buffer.queue.level"] + pending == depth, "every_beat_counted")
    first, total = dut.instr_addr // bus_bytes, (dut.instr_count * word_bytes + bus_bytes - 1) // bus_bytes
    following, left = inside["next_"], inside["left"]
    asked = (following - first)[:32]
    aligned = dut.instr_addr % max(word_bytes, bus_bytes) == 0
    fits = (dut.instr_count == 0) | (aligned & (dut.instr_addr + dut.instr_count * word_bytes <= dut.dma_size))
    started = h.register(1, "started")
    h.ensure(implies(started, inside["bad"] == ~fits), "checked")
    h.ensure(implies(inside["allowed"], fits), "allowed_where_it_fits")
    h.ensure(implies(inside["checked"] | inside["allowed"], started), "checked_after_start")
    h.ensure(implies(~started, (left == 0) & ~request.valid & (pending == 0)), "nothing_yet")
    h.ensure(implies(request.valid | (started & (asked != 0)), fits), "asks_only_what_fits")
    h.ensure(implies(started, (left <= total) & (asked + left == total)), "adds_up")
    h.ensure(implies(request.valid, asked > burst.len), "not_too_many")
    end = dut.dma_base + following * bus_bytes
    h.ensure(implies(request.valid, burst.addr + (burst.len + 1) * bus_bytes == end), "next")
    longest = depth // 4
    to_end = longest - following % longest
    length = Mux(left < to_end, left, to_end)
    h.ensure(implies(inside["more"] & ~request.valid, (left != 0) & (inside["length"] == length)), "knows_the_next")
    page = (burst.addr[:12] // bus_bytes) % longest
    h.ensure(implies(request.valid, page + burst.len < longest), "ends_at_a_multiple")
    h.ensure(implies(request.valid, pending > burst.len), "pending")
    return h


FETCH = "dae_pipeline/fetch.py"
for name, cfg in CONFIGS.items():
    prove(
        f"every word of {8 * instruction_bytes(cfg)} bits is an instruction or an error, Config {name}",
        Mutant(FETCH, "(error | ~legal)", "(error | (~legal & instr[2]))", near="instr.eq(word.payload.data)"),
        Mutant(FETCH, "= coming.opcode == opcode, Reg(", "= coming.opcode[:2] == int(opcode) & 3, Reg("),
        depth=1,
    )(partial(decoder, cfg))
for name in ("small", "wide"):
    prove(
        f"requests of fetch, Config {name}",
        Mutant(FETCH, "promised = Mux(asks, length, 0)", "promised = Mux(asks, length - 1, 0)"),
        Mutant(FETCH, "(unaligned | (ends > self.dma_size))", "(ends > self.dma_size)"),
        depth=1,
        tested=name == "small",
    )(partial(requests, CONFIGS[name]))
