"""Remove operators whose results nothing reads.

h = Add(x, 1)
unused = Relu(h)        ->     h = Add(x, 1)
y = Neg(h)                     y = Neg(h)
"""

from __future__ import annotations

import onnx_ir as ir


def remove_dead(model: ir.Model) -> None:
    """Remove operators and constants of which no output is read or returned."""
    drop_unused(model.graph)


def drop_unused(graph: ir.Graph) -> None:
    """Change `graph`: nodes and constants go."""
    for node in reversed(list(graph)):
        if all(not list(out.uses()) and not out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)
    for name in list(graph.initializers):
        value = graph.initializers[name]
        if not list(value.uses()) and not value.is_graph_output():
            del graph.initializers[name]
