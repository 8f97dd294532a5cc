"""Decoupled access and execute: how instructions and data move. Listed as they pass the parts.

fetch.py                 reads instructions, checks that they are legal, puts each into the queue of its unit (rules:
                         hw/spec/legality.py; depth of the queues: `queue_depth` of a Config; size of its buffer:
                         hw/spec/pipeline.py)
tokens.py                lets an instruction start when its tokens are there
load.py                  LOAD: copies blocks from DRAM to scratchpads; which channel executes an instruction
address_generators.py    rows in DRAM and elements in scratchpads, of LOAD's and STORE's blocks
dma.py                   how rows become AXI bursts of LOAD and STORE (greatest length, and how many may be outstanding:
                         hw/spec/pipeline.py)
readmux.py               which of fetch and LOAD uses the AXI read channel
aligner.py               cuts beats into chunks, which may begin at any byte
scratchpad_writer.py     writes chunks and padding to scratchpads
weight_decompressor.py   expands packed weights on their way to wgt
retire_queue.py          in which order LOAD reports instructions of two channels as done
scratchpad.py            the memories, their banks, and who writes first (sizes, and the order of units in acc:
                         hw/spec/scratchpads.py)
store.py                 STORE: copies blocks from out to DRAM
fifo.py                  queues between two streams
"""
