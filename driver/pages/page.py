"""The frame of all pages: one HTML file that needs no network, with head, sections, and Bokeh with its figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from celosia.compiler.program.safe_files import write_text
from celosia.driver.workstation.oracle import MissingLibrary

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

ASSETS = Path(__file__).parent
"""Folder of page.html, page.css and page.js."""


@dataclass
class Section:
    """A section of a page.

    title, text: plain text. html: below the text; names in it must be escaped. figure: drawn below both.
    """

    title: str
    text: str = ""
    html: str = ""
    figure: LayoutDOM | None = None
    after: str = ""
    """HTML as `html`, below the figure."""
    brief: str = ""
    """HTML as `html` for notebooks, which run no script."""


@dataclass(repr=False)
class Page:
    """A page of sections.

    title, subtitle: plain text. facts: key figures at the head, (number, caption). data: for the page's script.
    """

    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    data: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Page {self.title!r} of {len(self.sections)} sections>"

    def save(self, path: str | Path) -> None:
        """Write the page to a file. OutputError where that cannot be, MissingLibrary where Bokeh is not installed."""
        write_text(Path(path), self.html())

    def _repr_html_(self) -> str:
        """Return the brief parts of the sections in a frame, without scripts and figures: notebooks save every
        output."""
        titles = ", ".join(section.title for section in self.sections if not section.brief)
        hint = 'page = celosia.report(...); page.save("page.html") writes all of it, page.interactive() shows it here.'
        more = [Section("More", f"The whole page also has: {titles}. {hint}")] if titles else []
        sections = [_drop_figure(section) for section in self.sections if section.brief] + more
        text = self._fill_template(
            sections, style=_read_asset("page.css"), figures="[]", data="{}", bokeh="", script=""
        )
        return _wrap_in_frame(text, 540, "")

    def interactive(self) -> Interactive:
        """Return the whole page for a notebook, with interactive figures: 1.4 to 4 MB, which the notebook keeps."""
        return Interactive(self)

    def html(self) -> str:
        """Return the page as HTML, with figures and scripts. MissingLibrary where Bokeh is not installed."""
        figures = [
            _figure_json(section.figure, f"figure{number}")
            for number, section in enumerate(self.sections)
            if section.figure is not None
        ]
        sections = [
            replace(section, html=f'{section.html}<div class="figure" id="figure{number}"></div>')
            if section.figure is not None else section for number, section in enumerate(self.sections)
        ]  # fmt: skip
        return self._fill_template(
            sections, style=_read_asset("page.css"), script=_read_asset("page.js"),
            bokeh=_bokeh_script() if figures else "", figures=_as_json(figures), data=_as_json(self.data),
        )  # fmt: skip

    def _fill_template(self, sections: Sequence[Section], **parts: str) -> str:
        """Return page.html filled with title, key figures, sections and `parts`, the texts of other placeholders by
        name."""
        return Template(_read_asset("page.html")).substitute(
            title=escape(self.title or "(no name)"), subtitle=escape(self.subtitle),
            facts="".join(f"<div><b>{escape(n)}</b><span>{escape(fact)}</span></div>" for n, fact in self.facts),
            sections="".join(map(_section_html, sections)), **parts,
        )  # fmt: skip


@dataclass
class Interactive:
    """Shows a page in a notebook with its figures."""

    page: Page

    def _repr_html_(self) -> str:
        return _wrap_in_frame(self.page.html(), 820, "allow-scripts")


def _drop_figure(section: Section) -> Section:
    """Return the section as notebooks show it: `brief` in place of the figure and of the text that describes it."""
    return replace(section, text="" if section.figure is not None else section.text, html=section.brief, after="")


def _wrap_in_frame(text: str, height: int, allowed: str) -> str:
    """Return an iframe with the page `text`, `height` pixels high. allowed: permissions of its sandbox."""
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe sandbox="{allowed}" style="{style}" srcdoc="{escape(text)}"></iframe>'


def require_bokeh() -> None:
    """Raise MissingLibrary where Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise MissingLibrary("to draw a report, Bokeh is needed: pip install celosia[report]") from None


def _section_html(section: Section) -> str:
    """Return the HTML of a section."""
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    return f"<section><h2>{escape(section.title)}</h2>{text}{section.html}{section.after}</section>"


def _figure_json(figure: LayoutDOM, place: str) -> Any:
    """Return the JSON from which Bokeh's script draws a figure. place: id of the HTML element."""
    from bokeh.embed import json_item
    from bokeh.themes import Theme

    return json_item(figure, place, theme=Theme(json={}))  # type: ignore[arg-type]


def _as_json(value: Any) -> str:
    r"""Return a value as JSON that cannot end a script element, whatever names are in it.

    >>> _as_json({"name": "</script>"})
    '{"name":"\\u003c/script>"}'
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _read_asset(name: str) -> str:
    """Return the text of a file in ASSETS."""
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def _bokeh_script() -> str:
    """Return the text of Bokeh's script, which draws the figures in the browser. MissingLibrary without Bokeh."""
    require_bokeh()
    import bokeh

    path = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")
