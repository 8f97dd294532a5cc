"""A process that runs trials: pickled Jobs come in, TrialResults go out, one after the other.

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
    """Answer each Job of `jobs` until there are no more."""
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        pickle.dump(measure(job), results)
        results.flush()


def main(measure: Callable[[Job], TrialResult] = lambda job: job.run()) -> None:
    """Serve standard input and output. measure: runs a Job."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between answers
    with suppress(BrokenPipeError):  # nobody waits for the answer any more
        serve(sys.stdin.buffer, results, measure)


if __name__ == "__main__":
    main()
