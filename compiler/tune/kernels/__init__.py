"""Search for schedules of the kernels that run on the CPU."""
