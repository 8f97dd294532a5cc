"""Every loop nest that a test compiles for the CPU is verified first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celosia.compiler.cpu import kernel
from celosia.compiler.expr import Function, verify


@pytest.fixture(scope="session", autouse=True)
def verified_loops() -> Iterator[None]:
    render = kernel.render

    def checked(function: Function) -> tuple[str, int]:
        return render(verify(function))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "render", checked)
        yield
