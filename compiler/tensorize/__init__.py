"""Lower layers of the accelerator to loops over tiles, whose bodies are its instructions.

In the order in which a layer passes them:

plan               the Planner: lowers one layer by all that follows, and remembers the results; which source gives the
                   tiling (`SchedulePolicy.choose`): a user's file (`--decisions`), records, search of blocks, estimate
lowering           which computations a layer or block is; the tensors of blocks, rows (softmax, norms) and attention
layer_lowering     the tensors of one layer: convolutions, products, poolings and maps
computation        types: a layer as tensor expressions, and where its tensors lie
space, block_space which tilings a layer or a block has, and what limits them (orders of loops: `space.ORDERS`; how many
                   tiles load ahead: `Tiling.ahead`, by default `AHEAD` of vthread/pipeline; of hosts in launch/overlap)
remembered_cycles  which predicted cycles earlier compilations left in the cache, and what they depend on
roofline           how many cycles a tiling of one layer takes, by an estimate, and which tiling is chosen by it (of a
                   block: block_space)
templates          by which scheduling primitives a tiling becomes loops
intrinsic          what an intrinsic is, and whether a loop nest computes what it is declared to compute
intrinsics         which intrinsics the accelerator has: GEMM, LOAD, STORE, and passes, softmax and norm of VECTOR;
                   which fields of VECTOR an operation of a pass (requantise, table, residual) sets
render             compiles loops around intrinsics to nodes: tiles, regions of scratchpads, instructions; where the
                   arrays of a user's function lie in DRAM
instruction_builder how the loops around an intrinsic become extents and strides of one instruction
instruction        which fields of an instruction change with the loops outside of it; how the dimensions of a LOAD or
                   STORE are merged
tiles              runs the nodes: gives tensors entries of scratchpads, and emits the instructions of each tile
pack               how weights, parameters and tables lie in DRAM; in which codebooks packed weights find their values
"""
