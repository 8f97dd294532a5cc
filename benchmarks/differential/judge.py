"""A case on both sides, and its verdict."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import celosia
from benchmarks.differential.case import Case
from celosia.compiler.cpu.runtime.op import HostError
from celosia.compiler.graph.importer import ModelError
from celosia.compiler.program import InputError
from celosia.driver.oracle import OracleError, run, session
from celosia.driver.runtime import Runtime

Array = NDArray[Any]
EQUAL, DOCUMENTED, WRONG, REFUSED, CRASHED, UNCOUNTED = (
    "equal", "documented", "wrong", "refused", "crashed", "onnxruntime refuses",
)  # fmt: skip
VERDICTS = (EQUAL, DOCUMENTED, WRONG, REFUSED, CRASHED, UNCOUNTED)
FINDINGS = (WRONG, REFUSED, CRASHED)
SENTENCES = (ModelError, HostError, InputError)
"""What a model that cannot be run ends in, with one sentence."""


@dataclass(frozen=True)
class Verdict:
    """why: one line. place: of a crash, the last frame of ours."""

    what: str
    why: str = ""
    place: str = ""


def judge(case: Case) -> Verdict:
    try:
        reference = session(case.model, threads=1)
        expected = [run(reference, feed) for feed in case.feeds]
    except OracleError as error:
        return Verdict(UNCOUNTED, str(error))
    try:
        program = celosia.compile(case.model, case.config, accelerator=case.accelerator)
        with Runtime(program, threads=1) as runtime:
            found = [runtime.run(feed, trace=False).outputs for feed in case.feeds]
    except SENTENCES as error:
        return Verdict(REFUSED, str(error))
    except Exception as error:
        return crash(error)
    for got, want in zip(found, expected):
        for name in want:
            if why := difference(got[name], want[name]):
                return Verdict(WRONG, f"{name}: {why}")
    return Verdict(EQUAL)


def crash(error: Exception) -> Verdict:
    frames = [f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.name}"
              for frame in traceback.extract_tb(error.__traceback__) if "celosia" in frame.filename]  # fmt: skip
    return Verdict(CRASHED, f"{type(error).__name__}: {error}", frames[-1] if frames else "")


def difference(found: Any, expected: Any) -> str:
    """What differs, "" where nothing does."""
    if isinstance(expected, list):
        return next(filter(None, (difference(a, b) for a, b in zip(found, expected, strict=True))), "")
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, not {list(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"type {found.dtype}, not {expected.dtype}"
    same = (found == expected) | ((found != found) & (expected != expected))
    if np.all(same):
        return ""
    place = int(np.argmin(same.reshape(-1)))
    many = int(np.count_nonzero(~same))
    return f"{many} of {same.size} differ, the first is {found.reshape(-1)[place]}, not {expected.reshape(-1)[place]}"
