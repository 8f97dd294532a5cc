"""Depths of queues and stages of pipelines that the RTL is built with and the timing model reckons with.

Standard library only: RTL, timing model and the count of memories all read it. What only the RTL knows, the cycles
between two events, `sim/timing/latency.py` has, measured.
"""

from __future__ import annotations

from typing import Any

from celosia.hw.config import Config
from celosia.hw.isa import instruction_bytes

# On the bus ---------------------------------------------------------------------------------------------------

MAX_BURST = 16
"""Beats of the longest burst."""
BOUNDARY = 4096
"""Bytes; no burst crosses a multiple of it."""
OUTSTANDING = 8
"""Bursts that the engine of LOAD or STORE has under way at once."""
ROOM = 128
"""Beats that the read engine holds."""
FETCH_BURSTS = 4
"""Bursts of fetch, the longest ones, for which its buffer has room."""


def fetch_burst(cfg: Config) -> int:
    """Beats of the longest burst of fetch: two instructions, as far as a burst goes."""
    return min(MAX_BURST, 2 * max(1, instruction_bytes(cfg) // cfg.bus_bytes))


# Between and inside the units ---------------------------------------------------------------------------------

PARTING = 2
"""Places of a queue that is there to part two paths."""
ISSUE = PARTING
"""Instructions between a gate and its unit."""
PLACES = 2 * OUTSTANDING
"""Rows listed whose bytes have not all passed yet."""
AHEAD = PARTING + 1
"""Rows listed whose last burst has not been asked for: those in a queue, and the one being split."""
IN_FLIGHT = 8
"""Instructions of a lane of LOAD, or of STORE, whose data is awaited while the next one's is asked for."""
RESPONSES = 2 * IN_FLIGHT
"""Instructions of STORE whose responses are awaited."""
UNTOLD = 2 * IN_FLIGHT
"""Instructions of LOAD, where it has two lanes, whose end has not been told."""

EXPAND_STAGES = 3
"""Registers between what leaves LOAD and wgt, where it expands packed weights: factors' multiples, products of two
bits, products. Ends are told as much later."""

# The gemm unit ------------------------------------------------------------------------------------------------

PAIR_STAGES = 4
"""Registers between two factors and the sum of their products: operands, first product, second product, sum. As many
cycles where one block makes both products at twice the clock."""


def array_stages(cfg: Config) -> int:
    """Registers between operands and the running sum that includes them: pairs, the tree of adders behind them, sum."""
    pairs = cfg.block_in // 2
    return PAIR_STAGES + (pairs.bit_length() - 1) + 1


# The vector unit ----------------------------------------------------------------------------------------------

UNDER_WAY = 2
"""Instructions in it at once."""
READ_STAGES, TAP_STAGES = 1, 3
"""From an entry's step to the read of its accumulator, where the Config has no taps, and where it has."""
QUEUED = 32
"""Entries that VECTOR has under way to acc at most: the places of the queue in which they wait for GEMM."""
REQUANTISE_STAGES, ADD_STAGES = 8, 6
"""Registers between operands and result of the requantiser, and of rescale_add."""
_FROM_ACC = {
    "acc": 1, "offset": 1, "reduce": 1, "binary": 1, "requantise": REQUANTISE_STAGES, "clip": 1, "select": 1,
    "add": ADD_STAGES, "write": 1,
}  # fmt: skip
VECTOR_STAGES = sum(_FROM_ACC.values()) - 1
"""From the read of an accumulator to the entry's write."""
SUMS = 4
"""Registers of an adder of softmax, around which as many sums go: rows of a lane in a tile of rows."""
QUOTIENT_BITS = 10
"""Of a share in softmax, with one behind the point: the steps of its division."""
PART_STAGES, LOOK_STAGES, DIVIDE_STAGES = 3, 3, QUOTIENT_BITS + 6
"""Registers of softmax between a step and the bytes that count of its entry, those and their powers, and between these
and results."""


def largest_stages(cfg: Config) -> int:
    """Registers of softmax between an entry and its largest byte, and that in the memory of rows."""
    return cfg.block_out.bit_length() + 1


def softmax_cycles(cfg: Config, rows: Any, groups: Any, left_out: Any) -> Any:
    """Between the cycle in which a VECTOR with softmax is accepted and that in which it is done: of `rows` rows of
    `groups` entries each, in the last of which so many lanes are none of it; numbers, or arrays of them.

    >>> softmax_cycles(Config(softmax=4), rows=16, groups=4, left_out=0)
    623
    """
    parts, keys = cfg.block_out // cfg.softmax, groups * cfg.block_out - left_out
    tiles = -(-rows // (SUMS * cfg.softmax))
    steps = rows * groups + rows + rows * groups * parts
    return steps + tiles * (largest_stages(cfg) + SUMS * keys) + PART_STAGES + LOOK_STAGES + DIVIDE_STAGES + 3


def read_stages(cfg: Config) -> int:
    """From an entry's step to the read of its accumulator."""
    return TAP_STAGES if cfg.taps else READ_STAGES


def claim_lead(cfg: Config) -> int:
    """Cycles before its read of an accumulator in which GEMM claims the port: VECTOR decides a cycle ahead whether it
    takes a step, and whether that meets GEMM when it comes to its own read."""
    return read_stages(cfg) + 1


def vector_stages(cfg: Config) -> dict[str, int]:
    """The stages in their order, by name; of those of one operation the first one has its name."""
    counts = {"read": 1} | ({"tap": 1, "product": 1} if cfg.taps else {}) | _FROM_ACC
    names = [f"{name}{i or ''}" for name, count in counts.items() for i in range(count)]
    return {name: number for number, name in enumerate(names)}


def ring_places(stages: int) -> int:
    """Places of a ring for what skips so many stages."""
    return 1 << (stages - 1).bit_length()
