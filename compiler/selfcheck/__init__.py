"""The self-check that follows each compilation: it proves nothing, but finds most faults of the compiler.

The first check compares launches with the graph's operators, layer by layer:

check_launches      runs the launches on a simulator with one random input (`seed`), in which each layer reads random
                    bytes, and compares the bytes that each layer stores
operator_results    what a quantised operator of the graph gives on the CPU: the reference of both checks
shared_kernels      convolutions, products and the instruction GEMM, compiled by LLVM for any size

The second check compares the compiled model with the imported one, tensor by tensor, and names the pass at fault:

check_rewriting     computes parts of the compiled model, compares tensors that both models have, and says how many
                    quantisation steps an operator of bytes may differ from the floats that it replaces (Softmax,
                    biases), and which operators are not compared
imported_model      what the imported model's operators give, with bounds for other orders of rounding, and how far a
                    tensor of floats may lie from these bounds: by its element type (float16, ...; `_rounding_loss`),
                    whatever its operator
"""
