"""Each command on a page exists and accepts its options and values; test_pages.py runs whole pages.

Commands are in blocks of code, one per line; text after two spaces and `#` is a remark.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from celosia.driver.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "cli.md")]
BLOCK = re.compile(r"^```(?:sh|text|)\n(.*?)^```|((?:^ {4}\S.*\n)+)", re.DOTALL | re.MULTILINE)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each command `celosia`, `make` and `python` in the blocks of a page.

    Assignments before a command are left out.
    """
    for block in BLOCK.finditer(text):
        for line in (block[1] or block[2]).replace("\\\n", " ").splitlines():
            for command in line.split("  #")[0].split(" | "):
                try:
                    words = shlex.split(command.split(" > ")[0], comments=True)
                except ValueError:  # a sentence with an apostrophe
                    continue
                while words and ASSIGNMENT.fullmatch(words[0]):
                    words = words[1:]
                if words and Path(words[0]).name in {"celosia", "make", "python"}:
                    yield words


def parsed(words: list[str], command: Any) -> dict[str, Any]:
    """Return the parameters that the typer command or group `command` gets from `words`.

    Raise KeyError for a command that the group lacks, or an error of typer if the command refuses the words.
    """
    name, *rest = words
    if hasattr(command, "commands"):
        return parsed(rest, command.commands[rest[0]])
    return dict(command.make_context(name, rest).params)


COMMANDS = sorted({tuple(words) for page in PAGES for words in command_lines(page.read_text(encoding="utf-8"))})


def test_the_pages_have_commands() -> None:
    """The pages have a minimum of commands of each program, so that a changed page format does not hide them."""
    programs = [Path(words[0]).name for words in COMMANDS]
    assert programs.count("celosia") >= 80 and programs.count("make") >= 15 and programs.count("python") >= 8


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "celosia"], ids=" ".join)
def test_a_command_of_a_page_is_taken(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in words:
        for name in word.split("=") if "://" not in word else ():
            if re.fullmatch(r"[\w./-]+\.[a-z0-9]+", name) and not name.replace(".", "").isdigit():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).touch()
    parsed(list(words), typer.main.get_command(app))


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "make"], ids=" ".join)
def test_a_target_of_a_page_is_in_the_makefile(words: tuple[str, ...]) -> None:
    targets = {*TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")), ".venv/.installed"}
    assert words[1] in targets or words[1] == "-C"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("celosia run", "MissingParameter"),
        ("celosia run m.onnx --no-such", "NoSuchOption"),
        ("celosia run m.onnx --threads x", "BadParameter"),
        ("celosia rum m.onnx", "KeyError"),
    ],
)
def test_a_wrong_command_is_detected(wrong: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").touch()
    with pytest.raises(Exception) as caught:
        parsed(wrong.split(), typer.main.get_command(app))
    assert type(caught.value).__name__ == error
