"""Imports form a graph without cycles, between modules and between the parts of every folder.

Every import counts, even inside functions and for type checkers only. The names in a module that loads modules by name
count, too; only `celosia` itself does that, from a table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("bitstreams", "compiler", "driver", "hw", "models", "sim")

Graph = dict[str, set[str]]


def sources(root: Path = ROOT) -> dict[str, str]:
    """Return the text of each module of celosia, by its name."""
    texts = {}
    top = root / "src" / "celosia"
    for base, paths in ((top, top.glob("*.py")), *((root, (root / folder).rglob("*.py")) for folder in FOLDERS)):
        for path in paths:
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(("celosia", *parts[: -1 if parts[-1] == "__init__" else None]))
            texts[name] = path.read_text(encoding="utf-8")
    return texts


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name in it or "") of every import inside `node`."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, "") for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child.module or "", alias.name) for alias in child.names)


LOADS = ("import_module", "__import__")


def loaded(tree: ast.AST) -> set[str]:
    """Return the names of celosia's modules in a module that loads some by name; computed names end in "*"."""
    nodes = list(ast.walk(tree))
    if not any(isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOADS for node in nodes):
        return set()
    texts = {ast.unparse(node).strip("f'\"").split("{")[0] + "*" for node in nodes if isinstance(node, ast.JoinedStr)}
    texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if text.startswith("celosia.") and text.isprintable() and " " not in text}


def import_graph(texts: Mapping[str, str]) -> Graph:
    """Return the modules of `texts` that each of them imports, with their packages except the importer's own."""
    graph: Graph = {name: set() for name in texts}
    for name, text in texts.items():
        tree = ast.parse(text)
        by_name = loaded(tree) if any(word in text for word in LOADS) else ()
        for module, member in (*imported(tree), *((module, "") for module in by_name)):
            target = f"{module}.{member}" if f"{module}.{member}" in texts else module
            parts = target.split(".")
            packages = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
            graph[name] |= {
                package for package in packages if package in texts and not f"{name}.".startswith(f"{package}.")
            }
            if target in texts and target != name:
                graph[name].add(target)
    return graph


def between_parts(graph: Graph, folder: str) -> Graph:
    """Return the imports between the modules and folders directly in `folder`, each folder as one part."""
    inside = f"{folder}."

    def part(module: str) -> str:
        return inside + module.removeprefix(inside).split(".")[0]

    parts: Graph = {}
    for module, others in graph.items():
        if module.startswith(inside):
            imports = parts.setdefault(part(module), set())
            imports |= {part(other) for other in others if other.startswith(inside)} - {part(module)}
    return parts


def circle(graph: Graph) -> list[str]:
    """Return modules that import each other in turn, the first one again at the end, or []."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1][::-1]]
    return []


@cache
def graph_of_sources() -> Graph:
    return import_graph(sources())


def test_no_module_is_loaded_by_name_but_those_of_one_table() -> None:
    texts = sources()
    loads = {
        name: names
        for name, text in texts.items()
        if any(word in text for word in LOADS) and (names := loaded(ast.parse(text)) - {name})
    }
    assert set(loads) == {"celosia"} and loads["celosia"] <= set(texts)


def test_no_circle_of_modules() -> None:
    graph = graph_of_sources()
    assert len(graph) > 100
    cycle = circle(graph)
    assert not cycle, " → ".join(cycle)


def test_no_circle_between_the_parts_of_a_folder() -> None:
    graph = graph_of_sources()
    for folder in {name.rsplit(".", 1)[0] for name in graph if "." in name}:
        cycle = circle(between_parts(graph, folder))
        assert not cycle, f"in {folder}: " + " → ".join(cycle)


def test_a_circle_is_found() -> None:
    texts = {
        "celosia": "",
        "celosia.a": "from celosia.b import c",
        "celosia.b": "from celosia.b.c import thing",
        "celosia.b.c": "def f():\n    import celosia.d",
        "celosia.d": "",
    }
    graph = import_graph(texts)
    assert graph["celosia.a"] == {"celosia.b", "celosia.b.c"}
    assert circle(graph) == []
    for again in (
        "from celosia import a", "if TYPE_CHECKING:\n    import celosia.a", "import_module('celosia.a')",
        "PLACES = ['celosia.a']\n__import__(PLACES[0])",
    ):  # fmt: skip
        assert circle(import_graph(texts | {"celosia.d": again})), again
    assert loaded(ast.parse("importlib.import_module(f'celosia.{name}')")) == {"celosia.*", "celosia."}
    assert not loaded(ast.parse("import_module('numpy')\nx = 'celosia of no module'"))
    assert circle(between_parts(import_graph(texts | {"celosia.d": "import celosia.b"}), "celosia")) == [
        "celosia.b", "celosia.d", "celosia.b",
    ]  # fmt: skip
