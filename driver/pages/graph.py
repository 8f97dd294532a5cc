"""The graph of a run: layers, CPU kernels and the data between them, drawn with a row for each, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import CpuStep, HostStep, LaunchStep, Pack, Program, Unpack
from celosia.driver.pages.names import NAME, short
from celosia.driver.run.explain import launch_code
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.functional.access import rows
from celosia.sim.functional.decode import decode

NO_NODE = -1
"""The maker of a byte that no node has written."""
MAX_TEXT = 240
"""Characters of the texts `what` and `why` of a node that are drawn."""
ROW_HEIGHT, NODE_X, NODE_RADIUS = 26, 96, 6
"""Pixels: height of a row, distance of the nodes' centres from the left, half the width of a node."""


@dataclass(frozen=True)
class DrawnNode:
    """A node of the drawing.

    what: its operators or shape. place: "accelerator", "cpu", or "border" for an input or output of the model. why:
    what limits it, or why it is on the CPU. reads: numbers of the nodes whose results it reads.
    """

    name: str
    what: str
    place: str
    why: str
    reads: tuple[int, ...] = ()


def nodes_of_report(report: Mapping[str, Any]) -> list[DrawnNode]:
    """Return the nodes of a report: layers, then operators of the CPU. A report has no edges."""
    layers = [DrawnNode(row["name"], row["what"], "accelerator", _limit_text(row)) for row in report["layers"]]
    return layers + [DrawnNode(node["name"], node["op"], "cpu", node["reason"]) for node in report["cpu_nodes"]]


def nodes(program: Program, report: Mapping[str, Any]) -> list[DrawnNode]:
    """Return the nodes of a Program with their edges.

    A layer reads the nodes that have written the bytes of DRAM that its instructions load.
    """
    return _GraphBuilder(program, report).nodes


class _GraphBuilder:
    """Builds `nodes` by a walk over the steps of a Program.

    It tracks which nodes have made each tensor of the host, and which node has made each byte of activations in DRAM.
    """

    def __init__(self, program: Program, report: Mapping[str, Any]) -> None:
        self._program = program
        self._makers_of_tensor: dict[str, set[int]] = {}
        self._maker_of_byte = np.full(program.image_address, NO_NODE, np.int32)
        self._report_rows = iter(report["layers"])
        self.nodes = [
            DrawnNode(tensor.name, program.shape_text(tensor), "border", "input") for tensor in program.inputs
        ]
        self._makers_of_tensor.update({tensor.name: {number} for number, tensor in enumerate(program.inputs)})
        for step in program.steps:
            if isinstance(step, LaunchStep):
                self._add_launch(step)
            else:
                self._add_cpu_step(step)
        for tensor in program.outputs:
            self._add_node(
                tensor.name,
                program.shape_text(tensor),
                "border",
                "output",
                self._makers_of_tensor.get(tensor.name, set()),
            )

    def _add_node(self, name: str, what: str, place: str, why: str, reads: Iterable[int]) -> int:
        """Append a node with the fields of DrawnNode; return its number."""
        self.nodes.append(DrawnNode(name, what, place, why, tuple(sorted(reads))))
        return len(self.nodes) - 1

    def _add_cpu_step(self, step: CpuStep | HostStep) -> None:
        """Add the node of a step on the CPU, and record its outputs."""
        reads = set().union(*(self._makers_of_tensor.get(name, set()) for name in step.inputs))
        first, count = step.nodes[0], len(step.nodes)
        operators = ", ".join(dict.fromkeys(node.op for node in step.nodes))
        label = operators if count == 1 else f"{operators}: {count} operators in one kernel"
        reason = "; ".join(dict.fromkeys(node.reason for node in step.nodes))
        number = self._add_node(first.name, label, "cpu", reason, reads)
        self._makers_of_tensor.update({name: {number} for name in step.outputs})

    def _add_launch(self, step: LaunchStep) -> None:
        """Add a node for each layer of a launch, with edges through the bytes that it loads and stores."""
        first, reads = len(self.nodes), [set[int]() for _ in step.layers]
        makers = {number: self._makers_of_tensor.get(pack.value, set()) for number, pack in enumerate(step.pack)}
        for number, pack in enumerate(step.pack):
            code_of_pack = -2 - number  # stands for the makers of this pack until they are looked up below
            self._makers_at(pack.address, self._bytes_in_dram(pack))[...] = code_of_pack
        code = np.frombuffer(launch_code(self._program, step), np.uint8)
        code = code.reshape(-1, instruction_bytes(self._program.config))
        for instruction, layer in zip(decode(self._program.config, code), step.layer_of.tolist()):
            block = (
                rows(self._program.config, instruction.opcode, instruction.fields) if instruction is not None else None
            )
            if block is None or block.address >= len(self._maker_of_byte):
                continue
            byte_makers = block.view(self._maker_of_byte)
            if block.write:
                byte_makers[...] = first + layer
                continue
            for maker in np.unique(byte_makers).tolist():
                reads[layer] |= {maker} if maker >= 0 else makers.get(-2 - maker, set())
        for number, layer_info in enumerate(step.layers):
            row = next(self._report_rows)
            self._add_node(
                layer_info.name, layer_info.what, "accelerator", _limit_text(row), reads[number] - {first + number}
            )
        for unpack in step.unpack:
            byte_makers = self._makers_at(unpack.address, self._bytes_in_dram(unpack))
            self._makers_of_tensor[unpack.value] = {maker for maker in np.unique(byte_makers).tolist() if maker >= 0}
        for number, makers_of in makers.items():  # codes of packs become nodes at the end of the launch
            from_pack = self._maker_of_byte == -2 - number
            self._maker_of_byte[from_pack] = next(iter(makers_of), NO_NODE)

    def _makers_at(self, address: int, size: int) -> NDArray[np.int32]:
        """Return a view of the makers of `size` bytes of DRAM from `address` on."""
        return self._maker_of_byte[address : address + size]

    def _bytes_in_dram(self, copy: Pack | Unpack) -> int:
        """Return the bytes of DRAM to which the host copies a tensor before a launch, or from which after a launch."""
        cfg = self._program.config
        images, _, height, width = copy.form.dims
        return -(-images // cfg.batch) * copy.groups * height * width * cfg.piece_bytes


def _limit_text(row: Mapping[str, Any]) -> str:
    """Return a layer's cycles and bound as text; "" without cycles. row: of a report."""
    return "" if row["bound"] is None else f"{row['cycles']:,} cycles, bound by {row['bound']}"


# Drawing ----------------------------------------------------------------------------------------------------


def draw(nodes: list[DrawnNode]) -> str:
    """Return HTML with a row for each node, and, at their left, lines from each node to those that read it."""
    lines = "".join(_edge_path(start, end) for end, node in enumerate(nodes) for start in node.reads)
    marks = "".join(
        f'<rect class="{node.place}" x="{NODE_X - NODE_RADIUS}" y="{_row_centre(number) - NODE_RADIUS}" '
        f'width="{2 * NODE_RADIUS}" height="{2 * NODE_RADIUS}" rx="3"/>' for number, node in enumerate(nodes)
    )  # fmt: skip
    height = ROW_HEIGHT * len(nodes)
    svg = f'<svg width="{NODE_X + 10}" height="{height}" role="img" aria-label="what reads what">{lines}{marks}</svg>'
    return f'<div class="graph">{svg}<ol>{"".join(map(_node_row, nodes))}</ol></div>'


def _node_row(node: DrawnNode) -> str:
    """Return the HTML list item of a node: its name, what it is, and why it is there."""
    description = " · ".join(escape(short(part, MAX_TEXT)) for part in (node.what, node.why) if part)
    return f"<li><b>{escape(short(node.name, NAME))}</b> {description}</li>"


def _row_centre(number: int) -> float:
    """Return the y of the centre of row `number`, in pixels."""
    return ROW_HEIGHT * (number + 0.5)


def _edge_path(start: int, end: int) -> str:
    """Return the SVG path of an edge between two rows: straight to the next row, else a bow, wider for longer edges."""
    top, bottom = _row_centre(start) + NODE_RADIUS, _row_centre(end) - NODE_RADIUS
    if end == start + 1:
        return f'<path d="M{NODE_X} {top}V{bottom}"/>'
    bow_x = NODE_X - NODE_RADIUS - min(NODE_X - 12, 10 + 9 * sqrt(end - start))
    node_left = NODE_X - NODE_RADIUS
    top, bottom, bend = _row_centre(start), _row_centre(end), min(12.0, (node_left - bow_x) / 2)
    return (
        f'<path d="M{node_left} {top}H{bow_x + bend}Q{bow_x} {top} {bow_x} {top + bend}V{bottom - bend}'
        f'Q{bow_x} {bottom} {bow_x + bend} {bottom}H{node_left}"/>'
    )
