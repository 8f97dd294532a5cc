"""Depths of queues and stages of pipelines, of which the RTL is built and with which the timing model computes.

Standard library only: the RTL, the timing model and the count of memories read this file. Cycles between two events
are in `sim/timing/latency.py`, measured on the RTL, and those of softmax and norm in `sim/timing/engine_cycles.py`.
"""

from __future__ import annotations

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes

# On the bus ---------------------------------------------------------------------------------------------------

MAX_BURST = 16
"""Beats of the longest burst."""
BOUNDARY = 4096
"""Bytes; no burst crosses a multiple of it."""
OUTSTANDING = 8
"""Bursts that the engine of LOAD or STORE has under way at once."""
READ_BUFFER_BEATS = 128
"""Beats that the read engine holds."""
FETCH_BURSTS = 4
"""Bursts of fetch, the longest ones, for which its buffer has room."""


def fetch_burst(cfg: Config) -> int:
    """Count the beats of the longest burst of fetch: two instructions, as far as a burst goes."""
    return min(MAX_BURST, 2 * max(1, instruction_bytes(cfg) // cfg.bus_bytes))


# Between the units and inside them ----------------------------------------------------------------------------

SKID_DEPTH = 2
"""Places of a queue that cuts a combinational path."""
ISSUE_DEPTH = SKID_DEPTH
"""Instructions between a gate and its unit."""
ROW_FIFO_DEPTH = 2 * OUTSTANDING
"""Rows that are listed while their bytes have not all passed."""
PREFETCH_ROWS = SKID_DEPTH + 1
"""Rows that are listed while their last burst has not been asked for: those in a queue, and the one being split."""
IN_FLIGHT = 8
"""Instructions of a lane of LOAD, or of STORE, whose data is awaited while that of the next one is asked for."""
MAX_UNANSWERED = 2 * IN_FLIGHT
"""Instructions of STORE whose responses are awaited."""
MAX_UNRETIRED = 2 * IN_FLIGHT
"""Instructions of LOAD that have not retired, where it has two lanes."""

EXPAND_STAGES = 3
"""Registers between LOAD and wgt where it expands packed weights: factors' multiples, products of two bits, products.
Ends of instructions are reported that much later."""

# The gemm unit ------------------------------------------------------------------------------------------------

PAIR_STAGES = 4
"""Registers between two factors and the sum of their products: operands, first product, second product, sum. As many
cycles where one block makes both products at twice the clock."""


def array_stages(cfg: Config) -> int:
    """Count the registers from operands to the running sum that includes them: pairs, the tree of adders, the sum."""
    pairs = cfg.block_in // 2
    return PAIR_STAGES + (pairs.bit_length() - 1) + 1


# The vector unit ----------------------------------------------------------------------------------------------

UNDER_WAY = 2
"""Instructions that the vector unit has under way at once."""
READ_STAGES, TAP_STAGES = 1, 3
"""Registers from an entry's step to the read of its accumulator, without taps and with taps."""
WRITEBACK_DEPTH = 32
"""Entries on their way from VECTOR to acc at most: the places of the queue in which they wait for GEMM."""
REQUANTISE_STAGES, ADD_STAGES = 8, 6
"""Registers between operands and result of the requantiser, and of rescale_add."""
_FROM_ACC = {
    "acc": 1, "offset": 1, "reduce": 1, "binary": 1, "requantise": REQUANTISE_STAGES, "clip": 1, "select": 1,
    "add": ADD_STAGES, "write": 1,
}  # fmt: skip
VECTOR_STAGES = sum(_FROM_ACC.values()) - 1
"""Cycles from the read of an accumulator to the entry's write."""
SUMS = 4
"""Registers of an adder of softmax, around which as many sums go: rows of a lane in a tile of rows."""
QUOTIENT_BITS = 10
"""Bits of a share in softmax, with one behind the point: the steps of its division."""
PART_STAGES, LOOK_STAGES, DIVIDE_STAGES = 3, 3, QUOTIENT_BITS + 6
"""Registers of softmax between a step and the bytes of its entry that count, between the place of a byte that is kept
and its power, and between a share and its quotient."""
SHARE_STAGES = PART_STAGES + LOOK_STAGES - 1
"""Registers of softmax between a step and the share of a byte, which is not kept in between."""


ROWS_OWN = ("extent_x", "a_base", "dst_base")
ROWS_ALIKE = ("extent_n", "a_n", "a_x", "dst_n", "dst_x", "imm")
"""Fields of a softmax that say where rows lie. One that has nothing but those of its own goes through the engine close
behind the one before it."""
FILL_TURN, DIVIDE_TURN, FIND_TURN = range(3)
"""Cycles of a beat in which each walk of softmax reads vin."""
READERS = 4
"""Cycles of the shortest beat, a power of two in which each walk has its own."""
ROWS_OFFERED = 2
"""Cycles for which the end of a row is offered before it is reported."""


def tile_rows(cfg: Config) -> int:
    """Count the rows of a tile of softmax."""
    return SUMS * cfg.softmax


def softmax_span(cfg: Config) -> int:
    """Count the neighbouring entries of vin that a walk of softmax reads at once, which make a beat long enough for
    all."""
    return max(1, READERS * cfg.softmax // cfg.block_out)


def softmax_parts(cfg: Config) -> int:
    """Count the parts of what a walk of softmax reads at once: cycles of a beat."""
    return softmax_span(cfg) * cfg.block_out // cfg.softmax


NORM_ROWS = 64
"""Rows of a norm: the places of the memory of what is found of each."""
NORM_LANES = 2048
"""Lanes of the longest row, as it lies in whole entries."""
NORM_OFFSET = 128
"""Largest magnitude of a_offset in a norm, so that squared numbers have 9 bits."""
NORM_STEPS = 32
"""Cycles from a row of a norm to the next one at least: of each part of what is computed of its sums."""
EPSILON_SHIFT, ROOT_BITS, FACTOR_BITS, NORM_FRACTION = 20, 26, 24, 25
"""Bits: of the variance behind the point, of its inverse root, of a row's factor, and of results behind the point, see
`sim/functional/norm.py`."""


def norm_parts(cfg: Config) -> int:
    """Count the parts of an entry of a norm, of which its sums take one a cycle."""
    return cfg.block_out // cfg.norm


def read_stages(cfg: Config) -> int:
    """Count the registers from an entry's step to the read of its accumulator."""
    return TAP_STAGES if cfg.taps else READ_STAGES


def claim_lead(cfg: Config) -> int:
    """Count the cycles before its read of an accumulator in which GEMM claims the port.

    VECTOR decides a cycle ahead whether it takes a step, and whether that meets GEMM at VECTOR's own read.
    """
    return read_stages(cfg) + 1


def vector_stages(cfg: Config) -> dict[str, int]:
    """Number the stages of the vector unit, by name; the first one of an operation has its name."""
    counts = {"read": 1} | ({"tap": 1, "product": 1} if cfg.taps else {}) | _FROM_ACC
    names = [f"{name}{i or ''}" for name, count in counts.items() for i in range(count)]
    return {name: number for number, name in enumerate(names)}


def ring_places(stages: int) -> int:
    """Count the places of a ring for what skips so many stages."""
    return 1 << (stages - 1).bit_length()
