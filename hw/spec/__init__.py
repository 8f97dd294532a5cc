"""The contract between hardware and software: every size and bit position derives from here.

    config.py        which parameters of the accelerator a user chooses, their limits, and the presets
    isa.py           the fields of each instruction, their widths and bit positions; the operations of VECTOR
    legality.py      which instructions are illegal, and why
    packing.py       how weights of 4, 2 or 1 bits lie in DRAM
    scratchpads.py   what each scratchpad holds, its depth and the width of an entry, which units write and read it (the
                     memories themselves: hw/dae_pipeline/scratchpad.py)
    pipeline.py      depths of queues that no Config chooses, lengths of bursts, numbers of pipeline stages
    regs.py          the host's registers and counters; the error codes of a run and their texts
    blocks.py        which DSP block of a vendor the RTL instantiates
    config_doc.py, isa_doc.py   print docs/configs.md and docs/isa.md

Standard library only.
"""
