"""GEMM: matrix products of inp and wgt, added up in acc.

gemm.py     the unit: takes instructions, reads operands, adds sums to accumulators, claims their ports
loops.py    nested loops and the addresses of operands, for GEMM and VECTOR
array.py    the grid of pairs, and its adder trees
pair.py     the multipliers: two products and their sum, their pipeline stages (how many: hw/spec/pipeline.py); two
            weights packed into one multiplication
dsp48.py    Xilinx' DSP blocks
mult18.py   Lattice's multiplier
pump.py     the clock of twice the rate (`pump = 2`)
"""
