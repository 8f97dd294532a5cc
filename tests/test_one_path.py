"""There is one way to an instruction: an expression, its schedule, an intrinsic, and the renderer of loops.

No other code of compiler or driver makes instructions, or words of them; what decodes and checks them only reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .test_imports import sources

ALLOWED = {
    "celosia.compiler.tensorize.intrinsics": "Opcode",  # which instruction a tile operation is
    "celosia.compiler.tensorize.render": "words",  # of a user's function
    "celosia.compiler.tensorize.tiles": "add",  # of loops around intrinsics
    "celosia.compiler.vthread.pipeline": "StreamInstruction",  # the stream, as what add() makes, and LOADs of codebooks
    "celosia.compiler.launch.image": "words",  # of layers
}
"""Modules that may make instructions, with the kinds (see `made`) that each may."""
FOLDERS = ("celosia.compiler.", "celosia.driver.")


def made(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of what makes an instruction in `tree`.

    "Opcode": one of its members handed to a call; "StreamInstruction": constructed; "add": into a stream;
    "words": encoded.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        text = ast.unparse(node)
        if name == "StreamInstruction":
            yield node.lineno, "StreamInstruction", text
        elif name == "encode" and not _of_text(node):
            yield node.lineno, "words", text
        elif name == "add" and ast.unparse(node.func).endswith("stream.add"):
            yield node.lineno, "add", text
        elif any(_opcode(argument) for argument in arguments):
            yield node.lineno, "Opcode", text


def _of_text(node: ast.Call) -> bool:
    """Whether it is `str.encode`, which takes the name of an encoding or nothing."""
    return all(isinstance(argument, ast.Constant) for argument in node.args) and not node.keywords


def _opcode(node: ast.AST) -> bool:
    """Whether it is Opcode.GEMM, or another of them."""
    return (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Opcode"
        and node.attr in ("LOAD", "GEMM", "VECTOR", "STORE")
    )  # fmt: skip


def elsewhere(texts: dict[str, str]) -> list[str]:
    """Lines of modules that make instructions but may not."""
    found = []
    for module, text in texts.items():
        if module.startswith(FOLDERS):
            allowed = ALLOWED.get(module, "").split()
            found += [f"{module}:{line}: {call}" for line, kind, call in made(ast.parse(text)) if kind not in allowed]
    return found


def test_nothing_else_makes_instructions() -> None:
    assert elsewhere(sources()) == []


def test_whoever_may_does() -> None:
    """A list that is longer than it must be hides what comes later."""
    texts = sources()
    for module, kinds in ALLOWED.items():
        assert {kind for _, kind, _ in made(ast.parse(texts[module]))} == set(kinds.split()), module


def test_what_makes_instructions_is_found() -> None:
    texts = {"celosia.compiler.odd": "stream.add(Opcode.GEMM, {})\nStreamInstruction(o, f)\nname.encode('utf-8')\n"}
    assert [line.split(": ", 1)[0] for line in elsewhere(texts)] == ["celosia.compiler.odd:1", "celosia.compiler.odd:2"]
    assert elsewhere({"celosia.driver.odd": "form.encode(**fields)\nencode(cfg, words)"}) != []
    assert elsewhere({"celosia.compiler.odd": "if i.opcode == Opcode.GEMM: count(i)"}) == []
