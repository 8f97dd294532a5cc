"""Boards that the accelerator runs on. Standard library only.

fpga.py        which FPGA devices there are, and their resources
memory.py      the memory models of simulators; how a board's DRAM becomes one
board.py       what a board is: its fields, their limits, the states that its lights show; its processor, with the
               width of its widest port to memory (width of the accelerator's bus: hw/spec/config.py)
boards.py      which boards and memory models Celosia knows by name, and their numbers (each board names its preset:
               hw/spec/config.py)
board_file.py  how a user's own board is read from a TOML file
"""
