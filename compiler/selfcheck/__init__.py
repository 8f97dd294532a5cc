"""A compiled model against its own graph: the functional simulator and LLVM kernels must give the same bytes."""
