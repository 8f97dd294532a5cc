"""Cycles from one event of the RTL to another, each named FIRST_TO_SECOND.

Each docstring names both events and then the registers between them that cost the cycles. They are declared here only;
tests/sim/test_timing.py measures them on the RTL. Depths of queues and stages of the vector unit are in
`hw/spec/pipeline.py`.
"""

FIRST_ASK = 4
"""Write of `control` -> first burst of fetch asked for: start, clear, run, limits checked, length of the burst."""
ASK_TO_REQUEST = 1
"""Fetch asks -> the read channel's arbiter may choose its request: the register of the request."""
ASK_TO_ADDRESS = 1
"""An engine of LOAD or STORE asks for a burst -> memory has the address: the register in front of AXI."""
REQUEST_TO_ASK = 1
"""The arbiter has chosen fetch's request -> fetch may ask again."""
BEAT_TO_WORD = 2
"""Last beat of an instruction -> its word is there: fetch's buffer, the word put together."""
WORD_TO_QUEUE = 1
"""A word is there -> it may go to its queue: checked."""
QUEUE_TO_GATE = 2
"""An instruction goes to its queue, an empty one -> it is at its gate: memory, the register behind it."""
END_TO_ASK = 1
"""Last beat of a burst (response, of STORE) -> the engine may ask for another in its place."""
START_TO_ASK = 4
"""LOAD or STORE starts -> its first burst is asked for: waiting block, listed row, queue, splitter."""
BEGIN_TO_ASK = START_TO_ASK - 1
"""The rows of a LOAD or STORE begin to be listed -> its first burst is asked for."""
START_TO_STEP = 3
"""LOAD or STORE starts -> its first step: job queue, walker, and LOAD's plan or STORE's read."""
BEAT_TO_STEP = 5
"""A beat arrives -> LOAD writes its first unit: buffer of two stages, queues in front of the aligner and behind it."""
STEP_TO_END = 3
"""LOAD's last step -> end: register in front of the port, `done`."""
GEMM_STAGES = 4
"""GEMM's last step -> end beside the array: operands read, accumulator added, written, `done`."""
WRITE_TO_END = 2
"""The write of GEMM's or VECTOR's last entry -> end: `done`."""
ARRIVAL_TO_WRITE = 2
"""An entry for acc is in VECTOR's last stage -> it is written: its queue, the register in front of the port."""
WRITE_TO_ROOM = 2
"""An entry is written -> a step may be taken in its place: count of entries under way, register of the decision."""
READ_TO_WRITE = 4
"""GEMM reads an accumulator -> it writes the sum (gemm.py)."""
UNIT_TO_BEAT = 2
"""STORE's reader has a unit -> its beat is offered to memory: the queue in front of the packer, the packer."""
RESPONSE_TO_END = 2
"""The response to STORE's last burst -> end: the engine's answer, `done`."""
END_TO_DONE = 1
"""The last end of an instruction -> the run is done: control's register that all units are quiet."""
