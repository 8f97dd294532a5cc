"""A process that runs trials: it reads pickled Jobs and answers each with a pickled TrialResult.

python -m celosia.compiler.tune.worker_process
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from celosia.compiler.tune.device_pool import Job
from celosia.compiler.tune.layer_trial import TrialResult


def serve(jobs: BinaryIO, results: BinaryIO, measure: Callable[[Job], TrialResult]) -> None:
    """Read Jobs from `jobs` until its end, and write the result of `measure` of each to `results`."""
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        pickle.dump(measure(job), results)
        results.flush()


def main(measure: Callable[[Job], TrialResult] = lambda job: job.run()) -> None:
    """Answer Jobs from standard input on standard output until its end. measure: runs a Job."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # texts that libraries print must not come between answers
    with suppress(BrokenPipeError):  # the reader has ended
        serve(sys.stdin.buffer, results, measure)


if __name__ == "__main__":
    main()
