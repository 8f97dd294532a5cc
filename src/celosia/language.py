"""The tile language, as `import celosia.language as cl`: kernels in Python (docs/language.md).

>>> import numpy as np
>>> import celosia.language as cl
>>> @cl.jit(target="cpu")
... def double(x, y, N: cl.constexpr):
...     at = cl.arange(0, N)
...     cl.store(y + at, cl.load(x + at) * 2)
>>> x, y = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
>>> launched = double[(1,)](x, y, 4)
>>> y
array([0, 2, 4, 6], dtype=int32)
"""

from types import ModuleType as _Module

from celosia.compiler.language import *  # noqa: F403


def __dir__() -> list[str]:
    """List the names for kernels, without the modules of the compiler that this module imports."""
    return sorted(name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module))
