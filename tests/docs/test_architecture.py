"""The diagrams of docs/architecture.md show the units, scratchpads and folders that the code declares."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, Unit
from celosia.hw.spec.scratchpads import scratchpads

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BASE = Config(alu=False, int32=False)
"""A Config without optional parts: it has what solid arrows show."""
FULL = Config(forward=True, int32=True, taps=3, softmax=4, weight_bits=4, ports=2)
"""A Config with all optional parts: it has what solid and dotted arrows show."""
COMPILER = ROOT / "compiler"
MEMORY, BOX, ROUNDED = "[(", "[", "(["
NODE = re.compile(r'(?P<id>\w+)(?P<shape>[\[({]+)"(?P<label>[^"]*)"[\])}]+')
ARROW = re.compile(r' (?:--|-\.)(?: "(?P<text>[^"]*)" (?:--|\.-)|-)?> ')


class Edge(NamedTuple):
    """An arrow between two nodes. Nodes are named by their text up to a line break."""

    source: str
    target: str
    is_dotted: bool
    text: str


class Diagram(NamedTuple):
    """A Mermaid flowchart: its arrows, and the opening bracket of each node."""

    edges: set[Edge]
    brackets: dict[str, str]

    def nodes(self, bracket: str) -> set[str]:
        """Return the names of the nodes that have this opening bracket."""
        return {name for name, own_bracket in self.brackets.items() if own_bracket == bracket}


def diagrams(text: str) -> Iterator[Diagram]:
    """Parse the flowcharts of a page."""
    for chart in re.findall(r"```mermaid\nflowchart \w+\n(.*?)```", text, re.DOTALL):
        names = {node["id"]: node["label"].split("<br>")[0] for node in NODE.finditer(chart)}
        edges = set()
        for line in chart.strip().splitlines():
            ends = [names[re.split(r"\W", part.strip())[0]] for part in ARROW.sub("\n", line).split("\n")]
            for (source, target), arrow in zip(pairwise(ends), ARROW.finditer(line), strict=True):
                edges.add(Edge(source, target, "-." in arrow[0], arrow["text"] or ""))
        yield Diagram(edges, {names[node["id"]]: node["shape"] for node in NODE.finditer(chart)})


INSTRUCTIONS, DATA, STAGES = diagrams(TEXT)


# The accelerator -----------------------------------------------------------------------------------------------------


def ports(cfg: Config) -> set[tuple[str, str]]:
    """Return (unit, scratchpad) for each unit that writes a scratchpad, (scratchpad, unit) for each that reads it."""
    pads = scratchpads(cfg).values()
    written = {(unit.upper(), pad.name) for pad in pads for unit in pad.writers}
    return written | {(pad.name, unit.upper()) for pad in pads for unit in pad.readers}


def wrong_ports(diagram: Diagram) -> set[tuple[str, str]]:
    """Return the arrows between units and scratchpads that are missing, or should not be there."""
    inner = {edge for edge in diagram.edges if not edge.text}
    solid = {edge[:2] for edge in inner if not edge.is_dotted}
    return (solid ^ ports(BASE)) | ({edge[:2] for edge in inner} ^ ports(FULL))


def test_scratchpads_have_the_declared_writers_and_readers() -> None:
    assert not wrong_ports(DATA)
    assert {name for name in DATA.nodes(MEMORY) if "DRAM" not in name} == set(scratchpads(FULL))


def test_a_wrong_port_is_found() -> None:
    for old, new in (("load --> wgt", "load -.-> wgt"), ("out[(", "load --> out[("), ('[("lut")]', '[("lot")]')):
        _, planted, _ = diagrams(TEXT.replace(old, new))
        assert wrong_ports(planted), new


def test_units_are_those_of_the_instruction_set() -> None:
    units = {unit.name for unit in Unit}
    assert units == {opcode.name for opcode in Opcode}
    assert DATA.nodes(BOX) == units
    assert INSTRUCTIONS.nodes(BOX) == units | {"host CPU", "control registers", "fetch", "queue"}
    assert {edge.target for edge in INSTRUCTIONS.edges if edge.source == "token gate"} == units
    rows = re.findall(r"^\| ([A-Z]{4,}) \|", TEXT, re.MULTILINE)
    assert rows == [unit.name for unit in Unit], "the table of units"


def test_each_axi_port_is_shown() -> None:
    top = pytest.importorskip("celosia.hw.top")
    members = top.Accelerator(FULL).signature.members
    shown = {edge.text.split(": ")[1] for diagram in (INSTRUCTIONS, DATA) for edge in diagram.edges if edge.text}
    assert shown == {name for name in members if name.startswith(("m_axi", "s_axi"))}


def test_the_table_has_every_scratchpad() -> None:
    table = TEXT.partition("### Scratchpads")[2].partition("###")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(scratchpads(FULL))


# The compiler --------------------------------------------------------------------------------------------------------


def stages() -> set[str]:
    """Return the folders of the compiler that compile.py imports, itself or through modules beside it."""
    waiting, seen, folders = ["compile"], {"compile"}, set[str]()
    while waiting:
        tree = ast.parse((COMPILER / f"{waiting.pop()}.py").read_text(encoding="utf-8"))
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        names = (f"{node.module}.{alias.name}" for node in imports for alias in node.names)
        for name in names:
            if not name.startswith("celosia.compiler."):
                continue
            inside = name.split(".")[2]
            if (COMPILER / inside).is_dir():
                folders.add(inside)
            elif inside not in seen and (COMPILER / f"{inside}.py").exists():
                seen.add(inside)
                waiting.append(inside)
    return folders


def wrong_folders(diagram: Diagram) -> set[str]:
    """Return the folders of the compiler that the diagram lacks, or shows in the wrong shape."""
    boxes = {name.split("/")[0] for name in diagram.nodes(BOX)}
    rounded = {name.split("/")[0] for name in diagram.nodes(ROUNDED) if "/" in name}
    folders = {path.parent.name for path in COMPILER.glob("*/__init__.py")}
    return (boxes ^ stages()) | (rounded ^ (folders - stages()))


def test_stages_are_the_folders_that_compile_imports() -> None:
    assert not wrong_folders(STAGES)
    names = {name for name in STAGES.brackets if "/" in name}
    assert all((COMPILER / name).is_dir() for name in names)


def test_a_wrong_folder_is_found() -> None:
    for old, new in (('["launch/<br>', '["lunch/<br>'), ('ops(["ops/<br>', 'ops["ops/<br>')):
        *_, planted = diagrams(TEXT.replace(old, new))
        assert wrong_folders(planted), new
