"""Schedule loops for a processor, and fuse operators."""

from celosia.compiler.cpu.schedule.arrange import schedule
from celosia.compiler.cpu.schedule.chosen import arranged, choosing

__all__ = ["arranged", "choosing", "schedule"]
