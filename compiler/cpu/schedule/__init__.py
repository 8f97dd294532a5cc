"""Schedules of CPU kernels, in the order in which a kernel passes the files.

operator_fusion      which operators of a model share a kernel
vectorize            along which axis vectors run (the default schedule)
register_tiles       how many rows and columns of a reduction are accumulated in registers
kernel_schedules     which trace of a tuning record replaces the default schedule; the workload of a kernel
output_reuse         which temporaries and inputs lie in the output's memory
vector_lanes         which vectorised loops must become serial
parallel             which loops threads share
prefetch             what is fetched for the next iteration, and which block of weights for the next tiles
streaming_stores     which outputs bypass the caches
"""

from celosia.compiler.cpu.schedule.kernel_schedules import kernel_loops, using_schedules
from celosia.compiler.cpu.schedule.vectorize import schedule

__all__ = ["kernel_loops", "schedule", "using_schedules"]
