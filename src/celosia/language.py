"""The tile language, as `import celosia.language as cl`: kernels in Python (docs/language.md)."""

from celosia.compiler.language import *  # noqa: F403
