"""Code generation for CPUs: loops to LLVM IR and machine code, in the order in which a loop nest passes the files.

compile_loops   whether machine code is in memory, in the cache on disk, or compiled now; how kernels for another
                processor become a shared object (one kernel after the other: launch/assemble, and driver/run/prepare
                for a loaded Program)
codegen         which functions a kernel becomes, and which memory and threads each uses; which LLVM IR a statement or
                expression becomes; which minima and maxima never see a NaN
memory_access   which temporaries lie on the stack; how an element, or a vector of them, is loaded and stored; which
                accesses of an unrolled loop are combined; which lanes of a vector a condition on indices selects
arithmetic      which instructions an operation becomes; which polynomial computes exp, tanh, erf, ...
operations      which LLVM type an element has; how conversions (bfloat16 too), divisions, fused products of floats and
                reductions over lanes are computed; how NEON rounds to bytes
byte_products   how each kind of instruction adds up products of bytes. compiler/target.py chooses the kind by the
                processor alone; AMX also needs sizes that fit (schedule/register_tiles: `_fits_amx`).
                Products of bfloat16 never come here: ops/ makes them products of float32
machine         which processor LLVM optimises for, and how code is linked into this process
team_code       what the threads of a team run between kernels, and how long they spin (how many threads:
                program/host/thread_team)
"""

from celosia.compiler.cpu.llvm.compile_loops import LinkError, compile_function, from_loops, link_library
from celosia.compiler.cpu.llvm.machine import host, link
from celosia.compiler.cpu.llvm.team_code import link_team

__all__ = ["LinkError", "compile_function", "from_loops", "host", "link", "link_library", "link_team"]
