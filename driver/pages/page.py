"""A page of figures in one file that needs no network: head, sections, and Bokeh with its figures."""

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
from celosia.driver.host.oracle import MissingLibrary

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

HERE = Path(__file__).parent


@dataclass
class Section:
    """A section of a page. title, text: plain text. html: of the page's own making, names in it escaped. figure: drawn
    below both."""

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
    """A page of sections. title, subtitle: plain text. facts: (number, what it is), shown large. data: what the page's
    script reads."""

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
        """Parts of the page that need no script, in a frame of its own: a notebook keeps every output."""
        titles = ", ".join(section.title for section in self.sections if not section.brief)
        way = 'page = celosia.report(...); page.save("page.html") writes all of it, page.interactive() shows it here.'
        rest = [Section("More", f"The whole page also has: {titles}. {way}")] if titles else []
        sections = [_drop_figure(section) for section in self.sections if section.brief] + rest
        text = self._fill_template(
            sections, style=_read_asset("page.css"), figures="[]", data="{}", bokeh="", script=""
        )
        return _wrap_in_frame(text, 540, "")

    def interactive(self) -> Interactive:
        """Return the whole page for a notebook, with interactive figures: 1.4 to 4 MB, which the notebook keeps."""
        return Interactive(self)

    def html(self) -> str:
        """Return the page's text. MissingLibrary where Bokeh is not installed."""
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
        """Fill page.html with the title, the key figures, the sections and further parts."""
        return Template(_read_asset("page.html")).substitute(
            title=escape(self.title or "(no name)"), subtitle=escape(self.subtitle),
            facts="".join(f"<div><b>{escape(n)}</b><span>{escape(fact)}</span></div>" for n, fact in self.facts),
            sections="".join(map(_section_html, sections)), **parts,
        )  # fmt: skip


@dataclass
class Interactive:
    """Display of a page in a notebook with its figures."""

    page: Page

    def _repr_html_(self) -> str:
        return _wrap_in_frame(self.page.html(), 820, "allow-scripts")


def _drop_figure(section: Section) -> Section:
    """Return the section without the figure, which its text describes."""
    return replace(section, text="" if section.figure is not None else section.text, html=section.brief, after="")


def _wrap_in_frame(text: str, height: int, allowed: str) -> str:
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe sandbox="{allowed}" style="{style}" srcdoc="{escape(text)}"></iframe>'


def require_bokeh() -> None:
    """Raise MissingLibrary where Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise MissingLibrary("to draw a report, Bokeh is needed: pip install celosia[report]") from None


def _section_html(section: Section) -> str:
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    return f"<section><h2>{escape(section.title)}</h2>{text}{section.html}{section.after}</section>"


def _figure_json(figure: LayoutDOM, place: str) -> Any:
    from bokeh.embed import json_item
    from bokeh.themes import Theme

    return json_item(figure, place, theme=Theme(json={}))  # type: ignore[arg-type]


def _as_json(value: Any) -> str:
    r"""Write JSON that ends no script element, whatever names are in it.

    >>> _as_json({"name": "</script>"})
    '{"name":"\\u003c/script>"}'
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _read_asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@cache
def _bokeh_script() -> str:
    """Bokeh's own script, which draws the figures."""
    require_bokeh()
    import bokeh

    path = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")
