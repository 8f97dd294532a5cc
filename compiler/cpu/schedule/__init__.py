"""Schedules of CPU kernels, in the order in which a kernel passes the files.

kernel_schedules   whether a kernel has the default schedule or that of a tuning record; what its workload is; the
                   default schedule: along which axis vectors run, also of gathers and transpositions; which loops
                   are unrolled; in how many partial sums a contiguous reduction adds up (`_vectorize_reduction`)
register_tiles     the default schedule of matrix products and convolutions: rows and columns of sums in registers,
                   and how far they are unrolled
output_reuse       which temporaries lie in an output's memory, and which outputs overwrite an input
parallel           which vectorised loops must become serial; which loops threads share, and from how much work on;
                   this and the rest below runs while llvm/ generates code
caches             which elements of the next iteration, and which block of weights of the next tiles, are prefetched;
                   which outputs bypass the caches
"""

from celosia.compiler.cpu.schedule.kernel_schedules import kernel_loops, schedule, using_schedules

__all__ = ["kernel_loops", "schedule", "using_schedules"]
