"""VECTOR: the vector unit. `vector.py` lists the pipeline's stages; items pass the parts in this order.

vector.py          the unit: connects the stages to each other and to the scratchpads
issue.py           which instructions may start, and when their steps enter the pipeline
slots.py           the cycles in which a step may be issued (structural hazards)
constants.py       the values of an instruction that the stages need
stages.py          which values each stage has of its item
depthwise.py       sums of taps, for depthwise convolutions (taps a cycle: `taps` of a Config)
combine.py         reductions over windows; the binary operation of operands A and B (a new one: hw/spec/isa.py, too)
requantise.py      from int32 to int8, with float32's rounding
table.py           look-up tables (size and number: hw/spec/scratchpads.py)
residual.py        rescale_add, for residual additions
delay_queue.py     values that skip stages
writeback.py       results that wait to be written to acc
retire.py          in which order instructions are reported as done
softmax/           the engine that executes softmaxes, beside the pipeline
softmax_tracker.py     which instructions may overlap with a softmax (fields in which two softmaxes may differ:
                   hw/spec/pipeline.py)
war_hazard.py      when an instruction may overwrite the rows of a softmax
norm/              the engine that computes the factors of LayerNorm and RMSNorm for the pipeline
masks.py, multiply.py  arithmetic from look-up tables

What each operation computes is defined by `sim/functional/reference.py`; its number is in `hw/spec/isa.py`.
"""
