"""A file is one idea, and so is a function: long ones say in their first line why all of it is in one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "bitstreams", "compiler", "driver", "hw", "sim")
LONGEST = 450
"""Lines of a file that needs no reason."""
LONGEST_FUNCTION = 59
"""Lines of a function that needs no reason, from `def` to its end."""
UNCUT = {
    "hw/control.py: elaborate", "hw/dae_pipeline/dma.py: elaborate", "hw/dae_pipeline/walk.py: elaborate",
    "hw/gemm_core/loops.py: elaborate", "hw/regs.py: _registers", "hw/vector_unit/requantise.py: elaborate",
    "compiler/compile.py: _compile", "compiler/cpu/ops/integer.py: convolution",
    "compiler/expr/transform.py: _collapse", "compiler/tensorize/definer.py: vector",
    "compiler/tensorize/make.py: compute", "compiler/tensorize/space.py: terms",
}  # fmt: skip
"""Functions that are still to be cut: this list only becomes shorter."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def too_long(root: Path) -> Iterator[str]:
    for path in sources(root):
        first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
        if len(rest) >= LONGEST and "in one file" not in first:
            yield f"{path.relative_to(root)}: {len(rest) + 1} lines"


def long_functions(root: Path) -> Iterator[str]:
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION:
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if "in one function" not in first:
                    yield f"{path.relative_to(root)}: {node.name}"


def test_long_functions_have_a_reason() -> None:
    assert set(long_functions(ROOT)) <= UNCUT


def test_a_planted_long_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    body = ["    x = 1"] * LONGEST_FUNCTION
    reason = '    """All in one function, as it is a table."""'
    text = ["def a():", *body, "async def b():", reason, *body, "def c():", *body[1:]]
    (tmp_path / "sim" / "a.py").write_text("\n".join(text))
    assert list(long_functions(tmp_path)) == ["sim/a.py: a"]


def test_long_files_have_a_reason() -> None:
    assert not list(too_long(ROOT))


def test_a_planted_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    for name, first in (
        ("a", "Cycles."),
        ("b", "Cycles, in one file as all share queues."),
        ("c", "Short."),
    ):
        lines = ['"""' + first + '"""', *["x = 1"] * (1 if name == "c" else LONGEST)]
        (tmp_path / "sim" / f"{name}.py").write_text("\n".join(lines))
    assert list(too_long(tmp_path)) == ["sim/a.py: 451 lines"]
