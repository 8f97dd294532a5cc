"""Tables and progress on a terminal: names of models and files may hold anything, and no terminal may obey them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from celosia.plain import lines


class Console(rich.console.Console):
    """Rich's Console without markup; other characters than text become escapes: names hold neither style nor
    commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as Rich does, each text through `lines`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(lines(segment.text), segment.style)
