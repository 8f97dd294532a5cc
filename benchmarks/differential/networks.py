"""Random float networks."""

from __future__ import annotations

from benchmarks.differential.net import Draw, Net


def network(draw: Draw, opset: int) -> Net:
    net = Net(draw, opset)
    x = net.input(draw.floats((1, 4, 6, 6)))
    x = net.add("Conv", x, net.floats((8, 4, 3, 3), 0.2), net.floats((8,)))
    x = net.add("Relu", x)
    net.outputs.append(x)
    return net
