"""The contract between hardware and software: every size and bit position derives from here.

    config.py        which parameters of the accelerator a user chooses (sizes, depths, units, the number of its ports
                     to memory and the one width of all of them), their limits, and the presets
    isa.py           the fields of each instruction, their widths and bit positions; the operations of VECTOR (what they
                     compute: sim/functional/reference.py, hw/vector_unit)
    legality.py      which instructions are illegal, and why
    packing.py       how weights of 4, 2 or 1 bits lie in DRAM; how many codebooks there are, of how many values
    scratchpads.py   what each scratchpad holds, its depth and the width of an entry, which units write and read it (in
                     acc by falling priority); from which size on weights are spread over two ports (the memories
                     themselves: hw/dae_pipeline/scratchpad.py)
    pipeline.py      numbers that no Config chooses: depths of queues, lengths of bursts and how many are outstanding,
                     pipeline stages, instructions of VECTOR under way, bits and limits of the softmax and norm engines
    regs.py          the host's registers, their bits, and counters; the error codes of a run and their texts (what
                     they do and count: hw/control.py)
    blocks.py        which DSP block of a vendor the RTL instantiates
    config_doc.py, isa_doc.py   print docs/configs.md and docs/isa.md

Standard library only.
"""
