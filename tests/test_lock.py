"""Each file that `make` installs has a digest in the lock, with the version of constraints.txt."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PINNED = re.compile(r"^([A-Za-z0-9][\w.-]*)==([\w.+!]+)(.*?)(?=^\w|\Z)", re.MULTILINE | re.DOTALL)

if not (ROOT / "requirements.lock").exists():
    pytest.skip("could not find 'requirements.lock', which the package does not have", allow_module_level=True)


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_is_of_the_constraints() -> None:
    pins = {plain(m[1]): m[2] for m in PINNED.finditer((ROOT / "constraints.txt").read_text())}
    locked = {plain(m[1]): (m[2], m[3]) for m in PINNED.finditer((ROOT / "requirements.lock").read_text())}
    assert len(locked) > 50
    for name, (version, rest) in locked.items():
        of_other_systems = rest.startswith(" ;")
        assert of_other_systems or pins.get(name) == version, f"{name} {version} is not what constraints.txt says"
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", rest), f"{name} has no digest"


def test_all_that_is_wanted_is_locked() -> None:
    locked = {plain(m[1]) for m in PINNED.finditer((ROOT / "requirements.lock").read_text())}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    waiting, seen = ["test", "prove"], set()
    wanted = list(project["dependencies"])
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in extras[extra]:
            if (found := re.match(r"celosia\[(\w+)\]", requirement)) is not None:
                waiting.append(found[1])
            else:
                wanted.append(requirement)
    names = {plain(re.split(r"[\s<>=!\[;]", requirement)[0]) for requirement in wanted}
    assert names <= locked, names - locked
