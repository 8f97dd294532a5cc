"""Tuning records: measurements as a file of JSON lines, one trial in each, to which several processes can append.

    {"workload": "1x14x14 of 8 blocks ... #0c2f", "config": "9a31...", "schedule": [{"n": 2, "y": 2, ...}],
     "measurer": "timed 1, zynq-hp", "status": "ok", "cycles": 235916, "detail": "", "crc": 305419896}

For a kernel of the CPU, "config" is the processor, "schedule" a trace, and "cycles" are picoseconds.

A line is appended in one write. Concatenated files are a valid file. Damaged lines are skipped and counted. A trial is
identified by workload, Config, schedule and measurer. Where two lines disagree about a trial, the worse counts, because
nothing here can decide which is right.

Records for the presets come with Celosia (presets/); `python -m benchmarks.shipped` writes them.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from celosia.compiler.program.safe_files import OutputError
from celosia.compiler.tensorize.space import Tiling
from celosia.compiler.tune.device_pool import Fleet, Job
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.hw.spec.config import PRESETS, Config
from celosia.plain import Sentence, from_json


class RecordsError(Sentence, ValueError):
    """Records that cannot be read; the message names the file and what to do."""


@dataclass(frozen=True)
class Key:
    """Identity of a trial.

    workload: description of the workload. config: digest of the Config. schedule: canonical JSON of the decisions.
    measurer: what measured, with its version, such as "timed 5, zynq-hp" (CostSource.version).
    """

    workload: str
    config: str
    schedule: str
    measurer: str

    @staticmethod
    def of(cfg: Config, workload: str, schedule: Any, measurer: str) -> Key:
        """Return the key of a trial on `cfg`.

        schedule: a sequence of Tilings, or a mapping of workloads to such sequences.
        """
        return Key(workload, cfg.digest, _canonical(_plain(schedule)), measurer)


def _plain(schedule: Any) -> Any:
    """Convert decisions to plain data for JSON."""
    if isinstance(schedule, Mapping):
        return {name: _plain(decisions) for name, decisions in schedule.items()}
    return [decisions.to_json() for decisions in schedule]


def schedule_of(text: str) -> tuple[Tiling, ...]:
    """Parse the decisions in a Key's schedule. Raises ValueError where they are none of a layer."""
    rows = from_json(text)
    if not isinstance(rows, list):
        raise ValueError("a schedule is a list of decisions")
    return tuple(Tiling.from_json(row) for row in rows)


class Records:
    """Trials by their keys.

    path: the file to which `add` appends; None: memory only. trials: all results. by_workload: the same for each
    (workload, digest of a Config).
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.trials: dict[Key, TrialResult] = {}
        self.damaged = self.conflicts = 0
        """Number of damaged lines, and number of lines that contradict another one."""
        self.by_workload: dict[tuple[str, str], dict[Key, TrialResult]] = {}

    @staticmethod
    def load(path: str | Path, must_exist: bool = True) -> Records:
        """Read all records of a file. Raises RecordsError where it cannot be read, or is missing and `must_exist`."""
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
                records._keep(*_parse(line))
            except (ValueError, KeyError, TypeError):
                records.damaged += 1
        if records.damaged and not records.trials:
            raise RecordsError(f"{path} holds no records; give the file that `celosia tune --records` wrote")
        return records

    def get(self, key: Key) -> TrialResult | None:
        """Return the result of a trial, or None where it is not known."""
        return self.trials.get(key)

    def knows(self, cfg: Config) -> bool:
        """Return whether there is any trial on `cfg`."""
        return any(config == cfg.digest for _, config in self.by_workload)

    def joined(self, others: Records) -> Records:
        """Return the union with `others`, with the path and the number of damaged lines of these records."""
        if not self.trials and self.path is None:
            return others
        union = Records(self.path)
        union.damaged, union.conflicts = self.damaged, self.conflicts
        for known in (self, others):
            for key, result in known.trials.items():
                union._keep(key, result)
        return union

    def add(self, key: Key, result: TrialResult) -> None:
        """Keep a trial and append it to the file. Raises OutputError."""
        self._keep(key, result)
        if self.path is not None:
            append_line(self.path, _encode(key, result))

    def measure_unknown(
        self, fleet: Fleet, keys: Sequence[Key], job: Callable[[int], Job],
        on_result: Callable[[int, TrialResult, bool], None],
        credible: Callable[[int, TrialResult], bool] = lambda index, result: True,
    ) -> list[TrialResult]:  # fmt: skip
        """Return the result of each of `keys`; run the trials whose result is not known, or not credible, on `fleet`.

        job: returns the Job of a key by its index. credible: returns whether a known result may be used. on_result:
        called with the index, the result and whether it is new, as soon as it is known. Raises FleetError, OutputError.
        """
        known: dict[int, TrialResult] = {}
        for index, key in enumerate(keys):
            if (recorded := self.get(key)) and credible(index, recorded):
                known[index] = recorded
        for index, result in known.items():
            on_result(index, result, False)
        missing = [index for index in range(len(keys)) if index not in known]

        def keep(job_index: int, result: TrialResult) -> None:
            index = missing[job_index]
            known[index] = result
            self.add(keys[index], result)
            on_result(index, result, True)

        if missing:
            fleet.run([job(index) for index in missing], keep)
        return [known[index] for index in range(len(keys))]

    def best(self, cfg: Config, workload: str, measurer: str) -> tuple[Key, TrialResult, bool] | None:
        """Return the trial of a workload with the fewest cycles, and whether `measurer` measured it.

        Where `measurer` measured none, it is the best of any other measurer, which may not be the best here. None where
        there is no successful trial.
        """
        known = [(k, r) for k, r in self.by_workload.get((workload, cfg.digest), {}).items() if r.cost is not None]
        by_measurer = [(key, result) for key, result in known if key.measurer == measurer]
        best = min(by_measurer or known, key=lambda trial: (trial[1].cycles, trial[0].schedule), default=None)
        return None if best is None else (*best, bool(by_measurer))

    def _keep(self, key: Key, result: TrialResult) -> None:
        """Keep a trial in memory; of two results of one trial, the worse, and count contradictions."""
        before = self.trials.get(key)
        if before is not None and (before.status, before.cycles) != (result.status, result.cycles):
            self.conflicts += before.status == result.status == Status.OK
            result = _worse(before, result)
        self.trials[key] = result
        self.by_workload.setdefault((key.workload, key.config), {})[key] = result


def _worse(a: TrialResult, b: TrialResult) -> TrialResult:
    """Return the worse of two results of one trial.

    A result that concerns the schedule is preferred to a failure of the device, which may be transient.
    """
    settled = [result for result in (a, b) if result.status in (Status.OK, Status.WRONG, Status.REFUSED)]
    if len(settled) == 1:
        return settled[0]
    wrong = [result for result in settled if result.status != Status.OK]
    return wrong[0] if wrong else max(a, b, key=lambda result: result.cycles)


@dataclass
class Progress:
    """Counts of trials of a tuning that is running.

    trials: limit of their number. measured: those that ran now. known: those that were in the records. failed: those
    without a cost. excluded_devices: why devices get no more trials, by name. started: time.perf_counter() at the
    beginning.
    """

    trials: int
    measured: int = 0
    known: int = 0
    failed: int = 0
    excluded_devices: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> int:
        """Trials that count against the limit."""
        return self.measured + self.known

    @property
    def rate(self) -> float:
        """Measured trials a second."""
        return self.measured / max(1e-9, time.perf_counter() - self.started)


# Lines of a file -----------------------------------------------------------------------------------------------


def _encode(key: Key, result: TrialResult) -> bytes:
    """Encode a record as a line of the file."""
    row: dict[str, Any] = {
        "workload": key.workload, "config": key.config, "schedule": json.loads(key.schedule), "measurer": key.measurer,
        "status": result.status.value, "cycles": result.cycles, "detail": result.detail[:200],
        "seconds": round(result.seconds, 3),
    }  # fmt: skip
    return encode_line(row)


def encode_line(row: Mapping[str, Any]) -> bytes:
    """Encode `row` as a JSON line with a checksum; `decode_line` reads it."""
    return _canonical({**row, "crc": zlib.crc32(_canonical(row).encode())}).encode() + b"\n"


def _parse(line: bytes) -> tuple[Key, TrialResult]:
    """Decode a record. Raises ValueError, KeyError, TypeError where it is damaged."""
    row = decode_line(line)
    status, cycles = Status(row["status"]), row["cycles"]
    if not isinstance(cycles, int) or isinstance(cycles, bool) or cycles < (status == Status.OK):
        raise ValueError(f"{cycles!r} are no cycles")
    names = [row["workload"], row["config"], row["measurer"]]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("names are texts")
    key = Key(names[0], names[1], _canonical(row["schedule"]), names[2])
    return key, replace(TrialResult(status, cycles), detail=str(row["detail"]), seconds=float(row["seconds"]))


def decode_line(line: bytes) -> dict[str, Any]:
    """Decode a line that `encode_line` wrote. Raises ValueError, KeyError or TypeError where it is damaged."""
    row = from_json(line)
    if not isinstance(row, dict):
        raise TypeError("a record has names")
    if row.pop("crc") != zlib.crc32(_canonical(row).encode()):
        raise ValueError("it is not what was written")
    return row


def _canonical(value: Any) -> str:
    """Return JSON that is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file in one write, so that lines of several processes never mix.

    An incomplete last line is ended first. Raises OutputError.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            end = os.lseek(handle, 0, os.SEEK_END)
            is_incomplete = end > 0 and os.pread(handle, 1, end - 1) != b"\n"
            os.write(handle, b"\n" + line if is_incomplete else line)
        finally:
            os.close(handle)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None


# Records that come with Celosia --------------------------------------------------------------------------------

SHIPPED_FOLDER = Path(__file__).parent / "presets"
"""Folder with a file of records for each preset."""
SHIPPED, NONE = "shipped", "none"
"""Names that `compile` accepts instead of a file of records: those that come with Celosia, or none."""


@lru_cache
def shipped(cfg: Config) -> Records:
    """Load the records that come with Celosia for `cfg`; empty where it is no preset with records."""
    for preset in PRESETS.values():
        path = SHIPPED_FOLDER / f"{preset.name}.jsonl"
        if preset.digest == cfg.digest and path.exists():
            return Records.load(path)
    return Records()


def load_requested(records: str | Path | None) -> Records | None:
    """Load the records that the option `records` of `compile` names. Raises RecordsError.

    They are added to those that come with Celosia, so SHIPPED gives empty ones. None: no records are to be used.
    """
    if records is None or str(records) == NONE:
        return None
    return Records() if str(records) == SHIPPED else Records.load(records)
