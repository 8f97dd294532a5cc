"""Layers of the accelerator to loops of tiles, whose bodies are its instructions.

In the order in which a layer passes them:

lowering, layer_lowering, row_lowering, attention_lowering    which expressions a layer is; computation: their types
space, block_space         which tilings a layer or a block has, and what limits them (orders of loops: `space.ORDERS`)
roofline                   how many cycles a tiling takes, by an estimate
schedule_policy            which tiling is used: a user's file (tilings_file), records, search of blocks, estimate
templates                  by which primitives a tiling becomes loops
intrinsic, intrinsics, transfer, softmax, norm, requantised    which operations the accelerator has
match                      whether loops compute what an intrinsic is declared to do
instruction, instruction_builder, render      which instruction an intrinsic is, and which fields loops change
plan, tiles                a layer as tiles with places in scratchpads
pack, codebooks            how weights, parameters and tables lie in DRAM
"""
