"""Measurements as a file of JSON lines: one trial a line, for anybody to add to, join and read again.

    {"workload": "1x14x14 of 8 blocks ... #0c2f", "config": "9a31...", "schedule": [{"n": 2, "y": 2, ...}],
     "measurer": "timed 1, zynq-hp", "status": "ok", "cycles": 235916, "detail": "", "crc": 305419896}

Of a kernel of the CPU, "config" is the processor, "schedule" a trace, and "cycles" are picoseconds.

A line is written at once, behind whatever others have written. Two files joined are one. What is damaged is left out
and counted. A trial is known by workload, Config, schedule and measurer; where two lines disagree about one, the worse
counts, for nothing here can tell which is right.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from celosia.compiler.program.safe_files import OutputError
from celosia.compiler.tensorize.space import Decisions
from celosia.compiler.tune.measure import Status, TrialResult
from celosia.compiler.tune.pool import Fleet, Job
from celosia.hw.spec.config import Config
from celosia.plain import Sentence, from_json

Schedule = Sequence[Decisions]


class RecordsError(Sentence, ValueError):
    """Records that cannot be read; the message names the file and the way out."""


@dataclass(frozen=True)
class Key:
    """The trial and its measurer. schedule: canonical JSON of the decisions, by name."""

    workload: str
    config: str
    schedule: str
    measurer: str

    @staticmethod
    def of(cfg: Config, workload: str, schedule: Any, measurer: str) -> Key:
        """schedule: Decisions, or what is JSON already."""
        return Key(workload, cfg.digest, _canonical(_plain(schedule)), measurer)


def _plain(schedule: Any) -> Any:
    if isinstance(schedule, Mapping):
        return {name: _plain(each) for name, each in schedule.items()}
    return [each.to_json() for each in schedule]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def schedule_of(text: str) -> tuple[Decisions, ...]:
    """The decisions in a Key's schedule. ValueError for what are none."""
    rows = from_json(text)
    if not isinstance(rows, list):
        raise ValueError("a schedule is a list of decisions")
    return tuple(Decisions.from_json(row) for row in rows)


class Records:
    """Trials by their keys. path: the file that `add` writes to; None: memory only."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.trials: dict[Key, TrialResult] = {}
        self.damaged = self.conflicts = 0
        """Lines that hold no record, or another than was written; and lines that contradict another one."""
        self.by_workload: dict[tuple[str, str], dict[Key, TrialResult]] = {}

    @staticmethod
    def load(path: str | Path, must_exist: bool = True) -> Records:
        """All records of a file. RecordsError where it cannot be read, or where there is none and there must be."""
        records = Records(path)
        try:
            text = Path(path).read_bytes()
        except FileNotFoundError:
            if must_exist:
                raise RecordsError(
                    f"there are no records at {path}; `celosia tune --records {path}` writes some"
                ) from None
            return records
        except OSError as error:
            raise RecordsError(f"cannot read {path}: {error.strerror}") from None
        for line in text.split(b"\n"):
            if not line.strip():
                continue
            try:
                records._keep(*_parsed(line))
            except (ValueError, KeyError, TypeError):
                records.damaged += 1
        if records.damaged and not records.trials:
            raise RecordsError(f"{path} holds no records; give the file that `celosia tune --records` wrote")
        return records

    def get(self, key: Key) -> TrialResult | None:
        """What a trial has given, None where it is not known."""
        return self.trials.get(key)

    def knows(self, cfg: Config) -> bool:
        """Whether something was measured on `cfg`."""
        return any(config == cfg.digest for _, config in self.by_workload)

    def joined(self, others: Records) -> Records:
        """These and `others`, in memory; `path` and what is damaged are those of these."""
        if not self.trials and self.path is None:
            return others
        found = Records(self.path)
        found.damaged, found.conflicts = self.damaged, self.conflicts
        for known in (self, others):
            for key, result in known.trials.items():
                found._keep(key, result)
        return found

    def add(self, key: Key, result: TrialResult) -> None:
        """Keep a trial, and write it. OutputError."""
        self._keep(key, result)
        if self.path is not None:
            append(self.path, _line(key, result))

    def measured(
        self, fleet: Fleet, keys: Sequence[Key], job: Callable[[int], Job],
        noted: Callable[[int, TrialResult, bool], None],
        credible: Callable[[int, TrialResult], bool] = lambda place, result: True,
    ) -> list[TrialResult]:  # fmt: skip
        """The result of each key, of a trial that `fleet` runs and that is kept where no credible one is known.

        job, credible: of the place in `keys`. noted: called with place, result and whether it is fresh, as soon as it
        is known. FleetError, OutputError."""
        known = {place: found for place, key in enumerate(keys) if (found := self.get(key)) and credible(place, found)}
        for place, result in known.items():
            noted(place, result, False)
        missing = [place for place in range(len(keys)) if place not in known]

        def keep(number: int, result: TrialResult) -> None:
            place = missing[number]
            known[place] = result
            self.add(keys[place], result)
            noted(place, result, True)

        if missing:
            fleet.run([job(place) for place in missing], keep)
        return [known[place] for place in range(len(keys))]

    def best(self, cfg: Config, workload: str, measurer: str) -> tuple[Key, TrialResult, bool] | None:
        """The fewest cycles of a workload by that measurer; where it has measured none, by another one of them all.
        The last is whether it is exact: what another has measured is worth a try, and no more."""
        known = [(k, r) for k, r in self.by_workload.get((workload, cfg.digest), {}).items() if r.cost is not None]
        exact = [(key, result) for key, result in known if key.measurer == measurer]
        found = min(exact or known, key=lambda each: (each[1].cycles, each[0].schedule), default=None)
        return None if found is None else (*found, bool(exact))

    def _keep(self, key: Key, result: TrialResult) -> None:
        before = self.trials.get(key)
        if before is not None and (before.status, before.cycles) != (result.status, result.cycles):
            self.conflicts += before.status == result.status == Status.OK
            result = _worse(before, result)
        self.trials[key] = result
        self.by_workload.setdefault((key.workload, key.config), {})[key] = result


def _worse(a: TrialResult, b: TrialResult) -> TrialResult:
    """The worse of two answers to one question. What a device failed at once may be asked again, so that any answer is
    better."""
    settled = [each for each in (a, b) if each.status in (Status.OK, Status.WRONG, Status.REFUSED)]
    if len(settled) == 1:
        return settled[0]
    wrong = [each for each in settled if each.status != Status.OK]
    return wrong[0] if wrong else max(a, b, key=lambda each: each.cycles)


def _line(key: Key, result: TrialResult) -> bytes:
    row: dict[str, Any] = {
        "workload": key.workload, "config": key.config, "schedule": json.loads(key.schedule), "measurer": key.measurer,
        "status": result.status.value, "cycles": result.cycles, "detail": result.detail[:200],
        "seconds": round(result.seconds, 3),
    }  # fmt: skip
    return sealed(row)


def sealed(row: Mapping[str, Any]) -> bytes:
    """`row` as a line with a checksum."""
    return _canonical({**row, "crc": zlib.crc32(_canonical(row).encode())}).encode() + b"\n"


def unsealed(line: bytes) -> dict[str, Any]:
    """The row of a line. ValueError, KeyError, TypeError for a damaged one."""
    row = from_json(line)
    if not isinstance(row, dict):
        raise TypeError("a record has names")
    if row.pop("crc") != zlib.crc32(_canonical(row).encode()):
        raise ValueError("it is not what was written")
    return row


def _parsed(line: bytes) -> tuple[Key, TrialResult]:
    """ValueError, KeyError, TypeError for a damaged line."""
    row = unsealed(line)
    status, cycles = Status(row["status"]), row["cycles"]
    if not isinstance(cycles, int) or isinstance(cycles, bool) or cycles < (status == Status.OK):
        raise ValueError(f"{cycles!r} are no cycles")
    names = [row["workload"], row["config"], row["measurer"]]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("names are texts")
    key = Key(names[0], names[1], _canonical(row["schedule"]), names[2])
    return key, replace(TrialResult(status, cycles), detail=str(row["detail"]), seconds=float(row["seconds"]))


def append(path: Path, line: bytes) -> None:
    """One write, so that lines of several processes never mix; on a line of its own though the last one was cut off."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            end = os.lseek(handle, 0, os.SEEK_END)
            cut = end > 0 and os.pread(handle, 1, end - 1) != b"\n"
            os.write(handle, b"\n" + line if cut else line)
        finally:
            os.close(handle)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
