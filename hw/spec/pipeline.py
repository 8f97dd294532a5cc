"""Depths of queues and stages of pipelines, shared by the RTL, the timing model and the count of memories.

Standard library only. Cycles between two events that follow from no declaration are in
`sim/timing/latency.py`, measured on the RTL; those of softmax and norm are in `sim/timing/engine_cycles.py`.
"""

from __future__ import annotations

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes

# AXI bus ---------------------------------------------------------------------------------------------------

MAX_BURST = 16
"""Beats of the longest AXI burst of LOAD and STORE; the AXI3 ports of a Zynq-7000 allow no more."""
BURST_BOUNDARY = 4096
"""Bytes; AXI forbids that a burst crosses a multiple of it."""
MAX_OUTSTANDING_BURSTS = 8
"""Bursts of LOAD, or of STORE, that may await responses at once."""
READ_BUFFER_BEATS = MAX_OUTSTANDING_BURSTS * MAX_BURST
"""Beats that the buffer of a read engine holds. A burst is requested only where its beats have room."""
FETCH_BURSTS = 4
"""Size of fetch's buffer, in bursts of the greatest length (`fetch_burst`)."""


def fetch_burst(cfg: Config) -> int:
    """Return the beats of the longest burst of fetch: two instructions, but at most MAX_BURST beats."""
    return min(MAX_BURST, 2 * max(1, instruction_bytes(cfg) // cfg.bus_bytes))


# Queues between and inside the units ---------------------------------------------------------------------------------

SKID_DEPTH = 2
"""Entries of a skid buffer, which cuts a combinational path."""
ISSUE_DEPTH = SKID_DEPTH
"""Instructions that have passed the dependency gate and wait in front of their unit."""
ROW_FIFO_DEPTH = 2 * MAX_OUTSTANDING_BURSTS
"""Rows of LOAD, or of STORE, that may be in flight: their addresses are generated, not all of their bytes are moved."""
REQUEST_QUEUE_DEPTH = SKID_DEPTH
"""Rows that wait to be split into bursts, in LOAD and in STORE."""
PREFETCH_ROWS = REQUEST_QUEUE_DEPTH + 1
"""Rows whose address is computed before their last burst is requested: the queue of requests, and the row that is split
into bursts."""
MAX_IN_FLIGHT = 8
"""Instructions of a channel of LOAD, or of STORE, that may await data while the next one requests data."""
MAX_UNANSWERED = 2 * MAX_IN_FLIGHT
"""Instructions of STORE that may await write responses."""
MAX_UNRETIRED = 2 * MAX_IN_FLIGHT
"""Instructions of LOAD that may be issued and not yet retired, if LOAD has two channels."""

EXPAND_STAGES = 3
"""Pipeline registers between LOAD and wgt that expand packed weights. LOAD retires instructions that much later."""

# GEMM ------------------------------------------------------------------------------------------------

PAIR_STAGES = 4
"""Registers from two pairs of factors to the sum of their products: operands, first product, second product, sum. With
pump = 2, where one DSP block makes both products at twice the clock, it takes as many cycles."""


def array_stages(cfg: Config) -> int:
    """Return the registers from operands to the int32 sum that includes them: pairs of products, adder tree, sum."""
    pairs = cfg.block_in // 2
    return PAIR_STAGES + (pairs.bit_length() - 1) + 1


# VECTOR ----------------------------------------------------------------------------------------------

VECTOR_IN_FLIGHT = 2
"""Instructions that may be in the pipeline of VECTOR at once."""
READ_STAGES, TAP_STAGES = 1, 3
"""Registers from the step of an entry to the read of its accumulator: without taps, and with taps."""
WRITEBACK_DEPTH = 32
"""Entries of the queue in which VECTOR's results wait to be written to acc while GEMM uses the port."""
REQUANTISE_STAGES, ADD_STAGES = 8, 6
"""Registers from operands to result: of requantise, and of rescale_add."""
_FROM_ACC = {
    "acc": 1, "offset": 1, "reduce": 1, "binary": 1, "requantise": REQUANTISE_STAGES, "clip": 1, "select": 1,
    "add": ADD_STAGES, "write": 1,
}  # fmt: skip
"""Pipeline registers of each operation of VECTOR from the read of the accumulator on, in order."""
VECTOR_STAGES = sum(_FROM_ACC.values()) - 1
"""Registers from the read of an accumulator to the write of the entry."""
SOFTMAX_SUMS = 4
"""Pipeline registers of an adder of softmax. It adds up as many rows at once, one in each register."""
QUOTIENT_BITS = 10
"""Bits of a quotient in softmax, one of them behind the binary point; the division takes a step for each."""
PART_STAGES, LOOK_STAGES, DIVIDE_STAGES = 3, 3, QUOTIENT_BITS + 6
"""Pipeline registers of softmax. PART: from a step to the use of the bytes that it reads. LOOK: from a stored byte to
its power, by table lookup. DIVIDE: from a share (a power divided by the scale of the result) to its quotient."""
SHARE_STAGES = PART_STAGES + LOOK_STAGES - 1
"""Pipeline registers of softmax from a step to the shares of its bytes, which are not stored in between."""


OVERLAP_FREE_FIELDS = ("extent_x", "a_base", "dst_base")
OVERLAP_EQUAL_FIELDS = ("extent_n", "a_n", "a_x", "dst_n", "dst_x", "imm")
"""Fields of VECTOR that say where the rows of a softmax lie. A softmax overlaps with the one before it if all fields of
the second tuple are equal; those of the first may differ."""
FILL_TURN, DIVIDE_TURN, FIND_TURN = range(3)
"""Cycle of a round in which each of the three address generators of softmax reads vin.

`find` reads to search the largest byte of each row, `fill` to add up powers, `divide` to divide shares by sums. In a
round each of them reads once, and the lanes process the data read.
"""
MIN_ROUND_CYCLES = 4
"""Cycles of the shortest round: a power of two with one cycle for each address generator."""
SOFTMAX_OFFER_CYCLES = 2
"""Cycles for which a softmax must be offered before it is known whether it may overlap with the one under way."""


def tile_rows(cfg: Config) -> int:
    """Return the rows of a tile of softmax, which its adders process at once."""
    return SOFTMAX_SUMS * cfg.softmax


def softmax_span(cfg: Config) -> int:
    """Return the neighbouring entries of vin that an address generator of softmax reads at once.

    They are 1 or 2, so many that a round has a cycle for each address generator.
    """
    return max(1, MIN_ROUND_CYCLES * cfg.softmax // cfg.block_out)


def softmax_parts(cfg: Config) -> int:
    """Return the cycles of a round: the elements read at once, divided by those that softmax processes in a cycle."""
    return softmax_span(cfg) * cfg.block_out // cfg.softmax


MAX_NORM_ROWS = 64
"""Largest number of rows of a norm: the entries of the memory for the rows' factors."""
MAX_NORM_ELEMENTS = 2048
"""Largest number of elements in a row of a norm, rounded up to whole entries."""
MAX_NORM_OFFSET = 128
"""Largest absolute value of a_offset of a norm, so that the operand of the square has 9 bits."""
MIN_NORM_ROW_CYCLES = 32
"""Smallest number of cycles from one row of a norm to the next. Each step of the computation from a row's sums to its
factor takes as many."""
EPSILON_SHIFT, ROOT_BITS, FACTOR_BITS, NORM_FRACTION = 20, 26, 24, 25
"""Bits in the arithmetic of norm, see `sim/functional/norm.py`: fraction bits of the variance; width of its inverse
square root; width of a row's factor; fraction bits of results."""


def norm_parts(cfg: Config) -> int:
    """Return the number of parts of an entry of vin; norm adds up one part of `cfg.norm` elements a cycle."""
    return cfg.block_out // cfg.norm


def read_stages(cfg: Config) -> int:
    """Return the registers from the step of an entry to the read of its accumulator in VECTOR."""
    return TAP_STAGES if cfg.taps else READ_STAGES


def claim_lead(cfg: Config) -> int:
    """Return the cycles by which GEMM announces a read of acc, so that VECTOR can keep away from the port.

    VECTOR decides one cycle ahead whether it takes a step, and reads acc `read_stages` cycles after the step.
    """
    return read_stages(cfg) + 1


def vector_stages(cfg: Config) -> dict[str, int]:
    """Return the number of each pipeline stage of VECTOR by name, in order.

    The first stage of an operation has the operation's name; a number follows in the names of the others.
    """
    counts = {"read": 1} | ({"tap": 1, "product": 1} if cfg.taps else {}) | _FROM_ACC
    names = [f"{name}{i or ''}" for name, count in counts.items() for i in range(count)]
    return {name: number for number, name in enumerate(names)}


def ring_places(stages: int) -> int:
    """Return the entries of a ring buffer that delays values by `stages` stages: the next power of two."""
    return 1 << (stages - 1).bit_length()
