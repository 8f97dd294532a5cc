"""Check that instructions have one source: an expression, its schedule, an intrinsic, and the renderer of loops.

No other code of compiler or driver makes instructions or encodes them; other modules only decode and check them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .test_imports import sources

ALLOWED = {
    "celosia.compiler.tensorize.intrinsics": "Opcode",  # which instruction a tile operation is
    "celosia.compiler.tensorize.render": "words",  # encodes instructions of a user's function
    "celosia.compiler.tensorize.tiles": "add",  # adds instructions of loops around intrinsics
    "celosia.compiler.vthread.pipeline": "StreamInstruction",  # instructions that add() appends, and LOADs of codebooks
    "celosia.compiler.vthread.load_order": "words",  # encodes instructions to estimate their cycles
    "celosia.compiler.launch.image": "words",  # encodes instructions of layers
}
"""Modules that may make instructions, with the kinds (see `instruction_sources`) that each may."""
FOLDERS = ("celosia.compiler.", "celosia.driver.")


def instruction_sources(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) of each call in `tree` that makes an instruction.

    Kinds: "Opcode" for a member of Opcode as an argument; "StreamInstruction" for its constructor; "add" for
    `stream.add`;
    "words" for encoding.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name == "StreamInstruction":
            yield node.lineno, "StreamInstruction", ast.unparse(node)
        elif name == "encode" and not _encodes_text(node):
            yield node.lineno, "words", ast.unparse(node)
        elif name == "add" and ast.unparse(node.func).endswith("stream.add"):
            yield node.lineno, "add", ast.unparse(node)
        elif any(_is_opcode(argument) for argument in arguments):
            yield node.lineno, "Opcode", ast.unparse(node)


def _encodes_text(node: ast.Call) -> bool:
    """Return True for `str.encode`, whose only arguments are constants, such as the name of an encoding."""
    return all(isinstance(argument, ast.Constant) for argument in node.args) and not node.keywords


def _is_opcode(node: ast.AST) -> bool:
    """Return True for Opcode.GEMM or another member of Opcode."""
    return (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Opcode"
        and node.attr in ("LOAD", "GEMM", "VECTOR", "STORE")
    )  # fmt: skip


def elsewhere(texts: dict[str, str]) -> list[str]:
    """Return the lines of modules that make instructions without permission."""
    forbidden = []
    for module, text in texts.items():
        if module.startswith(FOLDERS):
            allowed = ALLOWED.get(module, "").split()
            forbidden += [
                f"{module}:{line}: {call}"
                for line, kind, call in instruction_sources(ast.parse(text))
                if kind not in allowed
            ]
    return forbidden


def test_nothing_else_makes_instructions() -> None:
    assert elsewhere(sources()) == []


def test_whoever_may_does() -> None:
    """Each module in ALLOWED makes instructions of each of its kinds, so that the list has no spare entries."""
    texts = sources()
    for module, kinds in ALLOWED.items():
        assert {kind for _, kind, _ in instruction_sources(ast.parse(texts[module]))} == set(kinds.split()), module


def test_what_makes_instructions_is_found() -> None:
    texts = {"celosia.compiler.odd": "stream.add(Opcode.GEMM, {})\nStreamInstruction(o, f)\nname.encode('utf-8')\n"}
    assert [line.split(": ", 1)[0] for line in elsewhere(texts)] == ["celosia.compiler.odd:1", "celosia.compiler.odd:2"]
    assert elsewhere({"celosia.driver.odd": "form.encode(**fields)\nencode(cfg, words)"}) != []
    assert elsewhere({"celosia.compiler.odd": "if i.opcode == Opcode.GEMM: count(i)"}) == []
