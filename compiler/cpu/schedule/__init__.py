"""How loops are arranged for a processor, and which operators share them."""

from celosia.compiler.cpu.schedule.arrange import schedule
from celosia.compiler.cpu.schedule.chosen import arranged, choosing

__all__ = ["arranged", "choosing", "schedule"]
