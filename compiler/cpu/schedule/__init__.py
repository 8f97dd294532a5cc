"""How loops are arranged for a processor, and which operators share them."""

from celosia.compiler.cpu.schedule.arrange import schedule

__all__ = ["schedule"]
