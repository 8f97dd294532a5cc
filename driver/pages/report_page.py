"""celosia.report: the page of a Program, a Result or a report file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from celosia.compiler.program import Program
from celosia.driver.pages.exploration_page import is_front, page_of_front
from celosia.driver.pages.names import ReportError
from celosia.driver.pages.page import Page
from celosia.driver.pages.run_page import page_of_prediction, page_of_report, page_of_run
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel

if TYPE_CHECKING:
    from celosia.driver.run.run_result import Result


def report(subject: Program | Result | str | Path, memory: MemoryModel | str = ZYNQ_HP) -> Page:
    """Return the figures of a run as a page, which a notebook shows and `Page.save` writes.

    Args:
        subject: A Result, with its own cycles; a Program or the path of a saved one, with cycles that the timing model
            predicts. Also the path of a report of `celosia run --report`, or of a front.json of `celosia explore`.
        memory: Memory model for the prediction of a Program's cycles: a MemoryModel, its name, or a board's .toml file.

    Returns:
        The page, in HTML.

    Raises:
        ReportError: The file is no report that a page can show, or the Result has no Program.
        ProgramError: The saved Program is damaged.
        MissingLibrary: Bokeh is not installed.
        ValueError: There is no such memory model.

    Examples:
        >>> import celosia
        >>> program = celosia.compile(celosia.models.demo_model_path(), "tiny")
        >>> celosia.report(program)
        <Page 'resnet8_fashion_int8' of 6 sections>
    """
    if isinstance(subject, (str, Path)):
        path = Path(subject)
        subject = Program.load(path) if path.is_file() and Program.is_program(path) else path
    if isinstance(subject, Path):
        return page_of_front(subject) if is_front(subject) else page_of_report(subject)
    if isinstance(subject, Program):
        return page_of_prediction(subject, memory)
    if subject.program is None:
        raise ReportError("this Result does not know its Program; write the page of the Program, or of the report")
    return page_of_run(subject.program, subject.report, subject.counters)
