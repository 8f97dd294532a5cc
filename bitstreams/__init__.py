"""Bitstreams and estimates for FPGAs.

Make a bitstream:

    project.py        Vivado projects for boards: files, wrapper module, pins, clocks; runs Vivado (by build.tcl)
    designs.py        which parts of the accelerator are built for an ECP5
    ecp5.py           bitstreams for an ECP5 with open tools
    scan.py           shift registers around a design that has too few pins

Count and simulate what Yosys makes:

    synthesis.py      runs Yosys; counts resources; makes netlists; reports progress
    postsynthesis.py  writes a netlist as Verilog for simulation, with ramb.v

Estimate without Vivado:

    area.py           LUTs, flip-flops, DSP blocks and block RAM, in milliseconds (area.json: samples)
    memories.py       which memories the accelerator has, and whether they become block RAM or LUTs
    timing.py         the clock, by static timing analysis of a netlist
    cells.py          delays of cells (delays.toml)
    power.py          watts (power.toml: reports of Vivado; activity.json: toggles)
"""
