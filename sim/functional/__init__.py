"""Functional simulator: what each instruction computes, without cycles.

fsim          the device: which unit's instruction runs next (tokens, queues), memory, errors
decode        how instruction words become fields, all words of a program at once
vectorised    how an instruction is executed fast; falls back to the reference where it has no fast form
reference     what each instruction means, in plain numpy: the specification of RTL, simulator and compiler
patterns      how affine addresses become views and index arrays; used by `vectorised` and `access`
norm          what LayerNorm and RMSNorm compute, bit by bit
softmax       what softmax computes, bit by bit
unpacking     how packed weights expand
access        which entries and bytes an instruction reads and writes; also for the timing model and the compiler
checking      which programs rely on what the machine does not guarantee (races, unwritten entries)

A program is refused for an illegal instruction, by rules that the RTL has, too (hw/spec/legality.py); for an address
outside of memory (fsim); and for what the machine does not guarantee, if a device has `checking=True` (checking).
"""
