"""Graph of layers and CPU kernels and the data between them: a row for each, in their order."""

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
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.functional.access import rows
from celosia.sim.functional.decode import decode

NOBODY = -1
TEXT = 240
"""Characters of what a node is, and of why it is there."""
ROW, MIDDLE, EDGE = 26, 96, 6
"""Sizes of the drawing: of a row, from the left border to the nodes, and of a node; pixels."""


@dataclass(frozen=True)
class DrawnNode:
    """A node of the drawing. place: "accelerator", "cpu" or "border", an input or output of the model. reads: numbers
    of nodes before it."""

    name: str
    what: str
    place: str
    why: str
    reads: tuple[int, ...] = ()


def nodes_of_report(report: Mapping[str, Any]) -> list[DrawnNode]:
    """Nodes of a report, which has no edges: layers, then the CPU's operators."""
    layers = [DrawnNode(row["name"], row["what"], "accelerator", _limit_text(row)) for row in report["layers"]]
    return layers + [DrawnNode(node["name"], node["op"], "cpu", node["reason"]) for node in report["cpu_nodes"]]


def nodes(program: Program, report: Mapping[str, Any]) -> list[DrawnNode]:
    """Nodes of a Program with their edges; layers read what other layers left in the bytes of DRAM that they load."""
    return _Walk(program, report).nodes


class _Walk:
    """Walk over the steps of a Program that tracks the maker of each tensor of the host and of each byte of activations
    in DRAM."""

    def __init__(self, program: Program, report: Mapping[str, Any]) -> None:
        self._program = program
        self._made: dict[str, set[int]] = {}
        self._bytes = np.full(program.image_address, NOBODY, np.int32)
        self._rows = iter(report["layers"])
        self.nodes = [
            DrawnNode(tensor.name, program.shape_text(tensor), "border", "input") for tensor in program.inputs
        ]
        self._made.update({tensor.name: {number} for number, tensor in enumerate(program.inputs)})
        for step in program.steps:
            if isinstance(step, LaunchStep):
                self._add_launch(step)
            else:
                self._add_cpu_step(step)
        for tensor in program.outputs:
            self._add_node(
                tensor.name, program.shape_text(tensor), "border", "output", self._made.get(tensor.name, set())
            )

    def _add_node(self, name: str, operators_text: str, place: str, reason: str, reads: Iterable[int]) -> int:
        self.nodes.append(DrawnNode(name, operators_text, place, reason, tuple(sorted(reads))))
        return len(self.nodes) - 1

    def _add_cpu_step(self, step: CpuStep | HostStep) -> None:
        """Add the node of a step on the CPU, and record its outputs."""
        reads = set().union(*(self._made.get(name, set()) for name in step.inputs))
        first, count = step.nodes[0], len(step.nodes)
        operators = ", ".join(dict.fromkeys(node.op for node in step.nodes))
        label = operators if count == 1 else f"{operators}: {count} operators in one kernel"
        reason = "; ".join(dict.fromkeys(node.reason for node in step.nodes))
        number = self._add_node(first.name, label, "cpu", reason, reads)
        self._made.update({name: {number} for name in step.outputs})

    def _add_launch(self, step: LaunchStep) -> None:
        """Add a node for each layer of a launch, with edges through the bytes that it loads and stores."""
        first, reads = len(self.nodes), [set[int]() for _ in step.layers]
        makers = {number: self._made.get(pack.value, set()) for number, pack in enumerate(step.pack)}
        for number, pack in enumerate(step.pack):
            self._bytes_at(pack.address, self._packed_bytes(pack))[...] = -2 - number  # its maker is looked up below
        code = np.frombuffer(launch_code(self._program, step), np.uint8)
        code = code.reshape(-1, instruction_bytes(self._program.config))
        for instruction, layer in zip(decode(self._program.config, code), step.layer_of.tolist()):
            moved = (
                rows(self._program.config, instruction.opcode, instruction.fields) if instruction is not None else None
            )
            if moved is None or moved.address >= len(self._bytes):
                continue
            owners = moved.view(self._bytes)
            if moved.write:
                owners[...] = first + layer
                continue
            for owner in np.unique(owners).tolist():
                reads[layer] |= {owner} if owner >= 0 else makers.get(-2 - owner, set())
        for number, layer_info in enumerate(step.layers):
            row = next(self._rows)
            self._add_node(
                layer_info.name, layer_info.what, "accelerator", _limit_text(row), reads[number] - {first + number}
            )
        for unpack in step.unpack:
            owners = self._bytes_at(unpack.address, self._unpacked_bytes(unpack))
            self._made[unpack.value] = {owner for owner in np.unique(owners).tolist() if owner >= 0}
        for number, makers_of in makers.items():  # no number of a pack outlives its launch
            of_node = self._bytes == -2 - number
            self._bytes[of_node] = next(iter(makers_of), NOBODY)

    def _bytes_at(self, address: int, size: int) -> NDArray[np.int32]:
        return self._bytes[address : address + size]

    def _packed_bytes(self, pack: Pack) -> int:
        shape = self._program.info(pack.value).shape
        images, _, height, width = pack.form.arrange(np.zeros(shape, np.int8)).shape
        return _storage_bytes(self._program.config, images, pack.groups, height, width)

    def _unpacked_bytes(self, unpack: Unpack) -> int:
        images, _, height, width = unpack.form.dims
        return _storage_bytes(self._program.config, images, unpack.groups, height, width)


def _storage_bytes(cfg: Config, images: int, groups: int, height: int, width: int) -> int:
    return -(-images // cfg.batch) * groups * height * width * cfg.piece_bytes


def _limit_text(row: Mapping[str, Any]) -> str:
    return "" if row["bound"] is None else f"{row['cycles']:,} cycles, bound by {row['bound']}"


# Drawing ----------------------------------------------------------------------------------------------------


def drawing(nodes: list[DrawnNode]) -> str:
    """Draw the rows as HTML, and beside them a line from each node to those that read it."""
    lines = "".join(_edge_path(start, end) for end, node in enumerate(nodes) for start in node.reads)
    marks = "".join(
        f'<rect class="{node.place}" x="{MIDDLE - EDGE}" y="{_row_centre(number) - EDGE}" width="{2 * EDGE}" '
        f'height="{2 * EDGE}" rx="3"/>' for number, node in enumerate(nodes)
    )  # fmt: skip
    height = ROW * len(nodes)
    svg = f'<svg width="{MIDDLE + 10}" height="{height}" role="img" aria-label="what reads what">{lines}{marks}</svg>'
    return f'<div class="graph">{svg}<ol>{"".join(map(_node_row, nodes))}</ol></div>'


def _node_row(node: DrawnNode) -> str:
    tooltip = " · ".join(escape(short(part, TEXT)) for part in (node.what, node.why) if part)
    return f"<li><b>{escape(short(node.name, NAME))}</b> {tooltip}</li>"


def _row_centre(number: int) -> float:
    return ROW * (number + 0.5)


def _edge_path(start: int, end: int) -> str:
    """Path of an edge: straight down to the next node, around those between to a later one, the further the wider."""
    top, bottom = _row_centre(start) + EDGE, _row_centre(end) - EDGE
    if end == start + 1:
        return f'<path d="M{MIDDLE} {top}V{bottom}"/>'
    left = MIDDLE - EDGE - min(MIDDLE - 12, 10 + 9 * sqrt(end - start))
    edge = MIDDLE - EDGE
    top, bottom, bend = _row_centre(start), _row_centre(end), min(12.0, (edge - left) / 2)
    return (
        f'<path d="M{edge} {top}H{left + bend}Q{left} {top} {left} {top + bend}V{bottom - bend}'
        f'Q{left} {bottom} {left + bend} {bottom}H{edge}"/>'
    )
