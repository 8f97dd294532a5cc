"""Summary of the resources, power and timing of a Config on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from celosia.driver.show.text_table import add_row, new_table, percent

if TYPE_CHECKING:
    from celosia.bitstreams.power import Power
    from celosia.bitstreams.synthesis import Usage
    from celosia.bitstreams.timing import Timing
    from celosia.driver.explore.resource_use import Resources
    from celosia.hw.boards.fpga import Device


def estimated(used: Resources, device: Device, title: str) -> RenderableType:
    """Return a table of the resource model's estimates, which is shown before Yosys counts."""
    from celosia.bitstreams.synthesis import LABELS
    from celosia.driver.pages.names import resource

    table = new_table(title, "resource", ">used", ">available", ">left")
    row = vars(used)
    for name, label in LABELS.items():
        left = 100 - 100 * row[name] / getattr(device, name)
        add_row(table, label, resource(row, name), f"{getattr(device, name):,}", f"{left:.1f}%")
    return table


def resources(used: Usage, device: Device, title: str) -> RenderableType:
    """Return a table of the resources that an accelerator takes of a device."""
    from celosia.bitstreams.synthesis import LABELS

    table = new_table(title, "resource", ">used", ">available", ">left")
    left = used.free_percent(device)
    for name, label in LABELS.items():
        add_row(table, label, f"{getattr(used, name):,g}", f"{getattr(device, name):,}", f"{left[name]:.1f}%")
    return table


def power(working: Power, resting: Power, title: str, caveat: str) -> RenderableType:
    """Return a table of the watts that an accelerator draws where all of its units work, and where nothing runs."""
    from celosia.bitstreams.power import LABELS

    table = new_table(title, "watts", ">all units work", ">nothing runs")
    for name in [name for name in LABELS if working.watts[name] or resting.watts[name]]:
        mark = "?" if name in working.stand_ins else ""
        add_row(table, LABELS[name] + mark, *(f"{power.watts[name]:.3f}" for power in (working, resting)))
    add_row(table, "all but the processors", f"{working.fabric:.3f}", f"{resting.fabric:.3f}")
    stand_ins_text = " ?: by reports of another family or device, for want of its own." if working.stand_ins else ""
    return Group(table, Text(caveat + stand_ins_text))


def timing(result: Timing, title: str) -> RenderableType:
    """Return a table of the longest paths of an accelerator, and of how many paths end at each number of ns."""
    from celosia.bitstreams.timing import CAVEAT

    half = ("",) if result.pumped else ()
    table = new_table(title, ">ns", *half, ">on nets", ">levels", ">fan-out", ">ends", "from", "to")
    for path in result.paths:
        nets = percent(path.nets_ns / path.ns)
        half = (("of ½" if path.half else ""),) if result.pumped else ()
        add_row(table, f"{path.ns:.2f}", *half, nets, path.levels, path.fan_out, path.ends, path.start, path.end)
    ends_text = ", ".join(f"{ns}-{ns + 1} ns: {number:,}" for ns, number in reversed(list(result.ends.items())[-5:]))
    array = f", {2 * result.mhz:.1f} MHz in the array; paths there, or to and from there, have half a cycle (½)"
    clock = f"{result.mhz:.1f} MHz ({result.ns:.2f} ns){array if result.pumped else ''}"
    return Group(table, Text(f"{clock}. Ends of paths, {ends_text}.\n{CAVEAT}"))
