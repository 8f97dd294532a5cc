"""Run random models as cases of a campaign, and write the smallest model of each finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from celosia.driver.workstation.oracle import OracleError
from fuzz.cases import Failure
from fuzz.harness import Workers
from fuzz.models.draw import draw_case
from fuzz.models.judge import FINDINGS, UNCOUNTED, judge
from fuzz.models.minimise import Minimised, cause, minimise

MINIMISING = 300.0
"""Limit of processor seconds for minimising a finding; the smallest case so far is the result."""
MOST_OF_A_CAUSE = 2
"""Number of cases with the same cause that are minimised."""


def model(seed: int) -> str:
    """Compare a random model with onnxruntime, and return the verdict as a text.

    Raise Failure if the compiler crashes or refuses the model, or if outputs are wrong.
    """
    try:
        case = draw_case(seed)
    except OracleError:
        return UNCOUNTED
    verdict = judge(case)
    if verdict.what in FINDINGS:
        raise Failure(f"{case.kind}, {verdict.what}: {verdict.why}", cause(verdict))
    if verdict.what == UNCOUNTED:
        return UNCOUNTED
    return f"{case.kind}: {', '.join((verdict.what, *verdict.exclusions))}"


@dataclass(frozen=True)
class Finding:
    """A fault with all cases that show it.

    seeds: those cases. stem: path of the files with the smallest case, without their endings.
    """

    signature: str
    why: str
    seeds: tuple[int, ...]
    stem: Path

    def __str__(self) -> str:
        cases = ", ".join(map(str, self.seeds[:5])) + (", ..." if len(self.seeds) > 5 else "")
        return f"{self.stem.name}: {self.signature}: {self.why} (cases {cases})"


def minimised(seed: int, folder: Path) -> Minimised:
    """Minimise the finding of case `seed`, and write the case as `seed` into `folder`, before and after that."""
    case = draw_case(seed)
    case.save(folder / f"{seed}")
    result = minimise(case, judge(case))
    result.case.save(folder / f"{seed}")
    return result


def findings(
    causes: Mapping[str, list[int]], folder: Path, jobs: int, report: Callable[[str], None] = lambda text: None
) -> list[Finding]:
    """Minimise a few cases of each cause, and write each signature once into `folder`, with a line in findings.txt.

    causes: seeds of cases that failed, see `Results`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {seed: text for text, seeds in causes.items() for seed in sorted(seeds)[:MOST_OF_A_CAUSE]}
    known: dict[str, Finding] = {}
    with Workers(jobs, own_cache=True) as workers:
        calls = ((seed, partial(minimised, seed, folder)) for seed in chosen)
        for seed, answer in workers.run(calls, MINIMISING):
            signature = why = chosen[seed]
            if not isinstance(answer, str):
                signature, why = answer.signature, answer.verdict.why
            seeds, stem = {*causes[chosen[seed]]}, folder / str(seed)
            if signature in known:
                seeds, stem = seeds | {*known[signature].seeds}, known[signature].stem
                for path in folder.glob(f"{seed}.*"):
                    path.unlink()
            known[signature] = Finding(signature, " ".join(why.split())[:300], tuple(sorted(seeds)), stem)
            report(f"minimising: {len(known)} findings")
            _list(folder, known.values())
    return list(known.values())


def _list(folder: Path, known: Iterable[Finding]) -> None:
    lines = sorted(str(finding) for finding in known)
    (folder / "findings.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
