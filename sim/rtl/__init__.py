"""RTL simulator: the hardware itself, compiled by Verilator.

build          which Verilog is simulated, with which flags it is compiled, and where the library is kept
array_model    the module in C++ that replaces the array of large Configs
flat_verilog   how flat Verilog of Yosys is parsed into assignments and registers
gating         which logic of that Verilog moves into the conditions of the registers that use it
pgo_training   the training run between the two compilations of a large simulator
harness.cpp    all that runs in every cycle: the memory at the AXI ports (its latencies: hw/boards/memory.py; the
               longest burst that it accepts: MAX_BURST, here, too), register accesses, events, states of units, and
               the checks that end a simulation with an error at once (AXI protocol). A waveform would be dumped here;
               tests/hw writes waveforms of single units
rtlsim         the device that runs a library: memory; runs in slices of many cycles, and what is decided between two
               slices (time limit, progress); the messages of errors
"""
