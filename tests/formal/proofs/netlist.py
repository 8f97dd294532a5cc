"""Find paths through gates from the inputs of a component to its outputs."""

from __future__ import annotations

from amaranth.hdl import Fragment, Value
from amaranth.hdl._ir import PortDirection, build_netlist
from amaranth.lib import wiring
from amaranth.lib.wiring import In


def feeds(component: wiring.Component) -> dict[str, set[str]]:
    """Return, for each output, the inputs that reach it on a path without a register."""
    ports = {}
    for path, member, value in component.signature.flatten(component):
        direction = PortDirection.Input if member.flow is In else PortDirection.Output
        ports["__".join(map(str, path))] = (Value.cast(value), direction)
    netlist = build_netlist(Fragment.get(component, None), ports)
    inputs = {}
    for name, (start, width) in netlist.top.ports_i.items():
        inputs.update({bit: name for bit in range(start, start + width)})
    found = {}
    for name, value in netlist.top.ports_o.items():
        seen, todo, found[name] = set(value), list(value), set()
        while todo:
            net = todo.pop()
            if net.is_const:
                continue
            if net.cell == 0:
                found[name].add(inputs[net.bit])
                continue
            for before, _ in netlist.cells[net.cell].comb_edges_to(net.bit):
                if before not in seen:
                    seen.add(before)
                    todo.append(before)
    return found


def waiting(component: wiring.Component) -> list[str]:
    """Return a sentence for each `valid` that depends on its own `ready` in the same cycle."""
    return [
        f"{type(component).__name__}: {output} waits for {output.removesuffix('valid')}ready"
        for output, inputs in feeds(component).items()
        if output.endswith("valid") and output.removesuffix("valid") + "ready" in inputs
    ]


def through(component: wiring.Component, hosts: str) -> list[str]:
    """Return a sentence for each output that depends on an input in the same cycle, except the clock.

    Outputs of port `hosts` may depend on inputs of that port.
    """
    return [
        f"{type(component).__name__}: {output} depends on {source}"
        for output, inputs in feeds(component).items()
        for source in sorted(inputs - {"clk"})
        if not (output.startswith(hosts) and source.startswith(hosts))
    ]
