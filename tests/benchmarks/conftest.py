"""Let these tests `import benchmarks`, which is not installed, and `import small_models`."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path += [str(ROOT), str(ROOT / "tests" / "cosim")]


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable recording, because measurements of tests are not figures of the documents."""
    from benchmarks import figures

    monkeypatch.setattr(figures, "record", lambda *arguments: [])
