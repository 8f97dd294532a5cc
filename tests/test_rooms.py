"""Check that each public class has a unique name, and that public functions have docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "bitstreams", "compiler", "driver", "hw", "sim")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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
"""Names that two public classes share, and the meaning of each."""


def shared_names(root: Path) -> Iterator[str]:
    """Yield the names of public classes that several modules define."""
    paths_by_name: dict[str, set[Path]] = {}
    for path in sources(root):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paths_by_name.setdefault(node.name, set()).add(path)
    return (name for name, paths in paths_by_name.items() if len(paths) > 1)


def test_a_class_has_a_name_of_its_own() -> None:
    assert sorted(shared_names(ROOT)) == sorted(TWICE)


def test_a_planted_second_class_is_found(tmp_path: Path) -> None:
    for folder, text in (("sim", "class A: ...\nclass _B: ..."), ("hw", "class A: ...\nclass _B: ...\nclass C: ...")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(text)
    assert list(shared_names(tmp_path)) == ["A"]


# Docstrings -----------------------------------------------------------------------------------------------------

FOREIGN = {"elaborate", "get_next", "annotate", "validate", "forward"}
"""Methods that base classes in other packages declare: Amaranth, onnxruntime, torchao, PyTorch."""


def last_name(node: ast.expr) -> str:
    """Return the last part of the name of a class or decorator, without arguments and subscripts."""
    if isinstance(node, (ast.Subscript, ast.Call)):
        return last_name(node.value if isinstance(node, ast.Subscript) else node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {statement.name: statement for statement in node.body if isinstance(statement, Function)}


class Public:
    """The public functions of the files below `root`, and the methods of public classes."""

    def __init__(self, root: Path) -> None:
        self.trees = {f"{path.relative_to(root)}": parsed(path) for path in sources(root)}

    @cached_property
    def classes(self) -> dict[str, list[ast.ClassDef]]:
        """Return all classes by name; several may share a name."""
        by_name: dict[str, list[ast.ClassDef]] = {}
        for node in (node for tree in self.trees.values() for node in ast.walk(tree)):
            if isinstance(node, ast.ClassDef):
                by_name.setdefault(node.name, []).append(node)
        return by_name

    def inherits(self, name: str, node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> bool:
        """Return True if a base class, or a protocol that `node` implements, documents `name`.

        A field of this name in a base class counts as documentation, too.
        """
        bases = {last_name(base) for base in node.bases} - seen
        parents = [parent for base in bases for parent in self.classes.get(base, ())]
        implemented = [
            candidate
            for candidate in self.protocols
            if candidate is not node and methods(candidate).keys() <= methods(node).keys()
        ]
        is_documented = any(
            name in methods(candidate) and ast.get_docstring(methods(candidate)[name])
            for candidate in (*parents, *implemented)
        )
        is_documented |= any(
            isinstance(statement, ast.AnnAssign) and last_name(statement.target) == name
            for candidate in parents
            for statement in candidate.body
        )
        return is_documented or any(self.inherits(name, parent, seen | bases) for parent in parents)

    @cached_property
    def protocols(self) -> list[ast.ClassDef]:
        return [
            each for classes in self.classes.values() for each in classes if "Protocol" in map(last_name, each.bases)
        ]

    def undocumented(self) -> list[str]:
        """Return the public functions without a docstring, each as its path and its name with that of the class."""
        return [each for path, tree in self.trees.items() for each in self._undocumented(f"{path}: ", tree)]

    def _undocumented(self, prefix: str, owner: ast.Module | ast.ClassDef) -> Iterator[str]:
        for node in owner.body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                yield from self._undocumented(f"{prefix}{node.name}.", node)
            elif not ast.get_docstring(node) and not {last_name(decorator) for decorator in node.decorator_list} & {
                "setter",
                "overload",
            }:
                is_method = isinstance(owner, ast.ClassDef)
                if not is_method or not (node.name in FOREIGN or self.inherits(node.name, owner)):
                    yield f"{prefix}{node.name}"


def test_what_is_public_says_what_a_caller_needs() -> None:
    assert Public(ROOT).undocumented() == []


def test_a_planted_silence_is_found(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "a.py").write_text(
        "class Base:\n def said(self):\n  'Says.'\n def unsaid(self): ...\n def _own(self): ...\n"
    )
    (tmp_path / "sim" / "b.py").write_text(
        "class Mine(a.Base):\n def said(self): ...\n def unsaid(self): ...\n @property\n def size(self): ...\n"
        "class _Own:\n def x(self): ...\ndef f(): ...\ndef _g(): ...\n"
    )
    assert Public(tmp_path).undocumented() == [
        "sim/a.py: Base.unsaid", "sim/b.py: Mine.unsaid", "sim/b.py: Mine.size", "sim/b.py: f",
    ]  # fmt: skip
