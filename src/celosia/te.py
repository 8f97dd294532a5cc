"""Tensor expressions in TVM's words, as `from celosia import te` (docs/expressions.md).

>>> import numpy as np
>>> from celosia import te
>>> n = te.var("n")
>>> A = te.placeholder((n,), "int32", name="A")
>>> B = te.compute((n,), lambda i: A[i] * 2 + 1, name="B")
>>> s = te.create_schedule(B.op)
>>> outer, inner = s[B].split(B.op.axis[0], factor=4)
>>> s[B].vectorize(inner)
>>> kernel = te.build(s, [A, B])
>>> b = np.zeros(6, np.int32)
>>> kernel(np.arange(6, dtype=np.int32), b)
>>> b
array([ 1,  3,  5,  7,  9, 11], dtype=int32)
"""

from celosia.driver.te import *  # noqa: F403
from celosia.driver.te import __getattr__ as __getattr__
