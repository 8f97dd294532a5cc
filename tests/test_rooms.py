"""A public class has a name of its own, and public functions have docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "bitstreams", "compiler", "driver", "hw", "sim")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


# Names ----------------------------------------------------------------------------------------------------------

UNITS = "the unit in RTL, and the simulator's model of it"
TWICE = {
    "Config": "of the accelerator; of a kernel of the tile language, whose name is Triton's",
    "Control": UNITS, "Fetch": UNITS, "Gemm": UNITS, "Semaphore": UNITS, "Vector": UNITS,
    "Device": "an FPGA; what runs programs",
    "Layer": "what the accelerator executes at once; what a benchmark of few bits multiplies",
    "LoadChannel": UNITS,
    "Load": UNITS + "; reading an element, in the loop IR", "Store": UNITS + "; writing one",
    "Memory": "as Yosys declares it; DRAM",
    "Register": "of the accelerator; of flat Verilog",
    "Requantise": "the unit, and the numbers of a layer, which Programs hold by this name",
    "RescaleAdd": "the unit, and the numbers of a layer, which Programs hold by this name",
    "Scratchpad": "the memory in RTL; what everybody knows of it",
    "Stage": "of a schedule, as in TVM; of a pipeline",
    "State": "of a unit in a cycle; of all scratchpads",
    "Timing": "of paths in a bitstream; of instructions",
    "Workload": "what a schedule of a layer is searched for; a model that benchmarks run",
    "Unit": "of the instruction set; of what is checked by itself",
}  # fmt: skip
"""Names of public classes that stand for two things, and why."""


def twice(root: Path) -> Iterator[str]:
    """Names of public classes that several modules have."""
    found: dict[str, set[Path]] = {}
    for path in sources(root):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(path)
    return (name for name, paths in found.items() if len(paths) > 1)


def test_a_class_has_a_name_of_its_own() -> None:
    assert sorted(twice(ROOT)) == sorted(TWICE)


def test_a_planted_second_class_is_found(tmp_path: Path) -> None:
    for folder, text in (("sim", "class A: ...\nclass _B: ..."), ("hw", "class A: ...\nclass _B: ...\nclass C: ...")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(text)
    assert list(twice(tmp_path)) == ["A"]


# Docstrings -----------------------------------------------------------------------------------------------------

FOREIGN = {"elaborate", "get_next", "annotate", "validate", "forward"}
"""Methods that classes of other packages declare: Amaranth, onnxruntime, torchao, PyTorch."""


def written(node: ast.expr) -> str:
    """The last part of the name of a class or decorator, without what it is called with or stands in brackets."""
    if isinstance(node, (ast.Subscript, ast.Call)):
        return written(node.value if isinstance(node, ast.Subscript) else node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, Function)}


class Public:
    """The public functions of the files below `root`, and methods of public classes."""

    def __init__(self, root: Path) -> None:
        self.trees = {f"{p.relative_to(root)}": ast.parse(p.read_text(encoding="utf-8")) for p in sources(root)}

    @cached_property
    def classes(self) -> dict[str, list[ast.ClassDef]]:
        """By name, which several may have."""
        found: dict[str, list[ast.ClassDef]] = {}
        for node in (node for tree in self.trees.values() for node in ast.walk(tree)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
        return found

    def inherits(self, name: str, node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a class that `node` is derived from, or a protocol whose methods it has, says what `name` does, or
        has a field of this name."""
        bases = {written(base) for base in node.bases} - seen
        parents = [parent for base in bases for parent in self.classes.get(base, ())]
        kept = [each for each in self.protocols if each is not node and methods(each).keys() <= methods(node).keys()]
        said = any(name in methods(each) and ast.get_docstring(methods(each)[name]) for each in (*parents, *kept))
        said |= any(isinstance(f, ast.AnnAssign) and written(f.target) == name for each in parents for f in each.body)
        return said or any(self.inherits(name, parent, seen | bases) for parent in parents)

    @cached_property
    def protocols(self) -> list[ast.ClassDef]:
        return [each for classes in self.classes.values() for each in classes if "Protocol" in map(written, each.bases)]

    def silent(self) -> list[str]:
        """Those that say nothing: path, and name with that of the class."""
        return [each for path, tree in self.trees.items() for each in self._silent(f"{path}: ", tree)]

    def _silent(self, prefix: str, owner: ast.Module | ast.ClassDef) -> Iterator[str]:
        for node in owner.body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                yield from self._silent(f"{prefix}{node.name}.", node)
            elif not ast.get_docstring(node) and not {written(each) for each in node.decorator_list} & {
                "setter",
                "overload",
            }:
                of_class = isinstance(owner, ast.ClassDef)
                if not of_class or not (node.name in FOREIGN or self.inherits(node.name, owner)):
                    yield f"{prefix}{node.name}"


def test_what_is_public_says_what_a_caller_needs() -> None:
    assert Public(ROOT).silent() == []


def test_a_planted_silence_is_found(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "a.py").write_text(
        "class Base:\n def said(self):\n  'Says.'\n def unsaid(self): ...\n def _own(self): ...\n"
    )
    (tmp_path / "sim" / "b.py").write_text(
        "class Mine(a.Base):\n def said(self): ...\n def unsaid(self): ...\n @property\n def size(self): ...\n"
        "class _Own:\n def x(self): ...\ndef f(): ...\ndef _g(): ...\n"
    )
    assert Public(tmp_path).silent() == [
        "sim/a.py: Base.unsaid", "sim/b.py: Mine.unsaid", "sim/b.py: Mine.size", "sim/b.py: f",
    ]  # fmt: skip
