"""The self-check that follows each compilation, and proves nothing but finds most faults of the compiler.

check_launches      whether launches on the functional simulator give the bytes of the graph's operators
tapped_device       what each layer of a launch reads and stores in that check
operator_results    what a quantised operator gives on the CPU
shared_kernels      how convolutions and products of all sizes are computed fast for that
check_rewriting     whether a tensor of the compiled model equals that of the imported model
imported_model      what the imported model's operators give, with bounds for roundings
tolerance           which differences are allowed, and how far rounding alone may move a float
"""
