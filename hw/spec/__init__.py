"""The contract between hardware and software: Config, instruction set, registers, scratchpads, queue depths.

RTL, simulators, compiler and driver derive their sizes and bit positions from here. Standard library only.
"""
