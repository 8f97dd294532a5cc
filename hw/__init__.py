"""The accelerator: facts that hardware and software share (standard library only), and its hardware (Amaranth).

boards/         which boards there are: FPGA, pins, DRAM, clock; the memory models that stand for their DRAM
spec/           what a user chooses (Config), instruction set, registers, sizes of scratchpads, queues, pipelines
top.py          which units, scratchpads and ports to memory the accelerator has, and how they are connected
control.py      the host's registers; start and end of a run, errors, watchdog and lease (after how many cycles:
                driver/board/board_device.py), counters
dae_pipeline/   how instructions are fetched and ordered by tokens; LOAD, STORE and the scratchpads
gemm_core/      GEMM: its loops, the array of multipliers, the DSP blocks
vector_unit/    VECTOR: depthwise sums, reductions, requantisation, tables, residuals, softmax, norms
event_trace.py  which starts and ends of instructions the hardware records for the host
lib/            what several of these parts use: AXI ports, port signatures, registers, probes
verilog.py      how the hardware becomes Verilog, and where the Verilog is cached
sources.py      the digest by which driver, simulators and bitstreams recognise matching hardware
manifest.py     what a bitstream was made from, checked before a board loads it
"""
