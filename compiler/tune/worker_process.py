"""A process that measures: Jobs come in, Results go out, one after the other.

python -m celosia.compiler.tune.worker_process
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from celosia.compiler.tune.measure import TrialResult
from celosia.compiler.tune.pool import Job


def serve(jobs: BinaryIO, results: BinaryIO, measured: Callable[[Job], TrialResult]) -> None:
    """Answer each Job of `jobs` until there are no more."""
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        pickle.dump(measured(job), results)
        results.flush()


def main(measured: Callable[[Job], TrialResult] = lambda job: job.run()) -> None:
    """measured: who answers."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between answers
    with suppress(BrokenPipeError):  # nobody waits for the answer any more
        serve(sys.stdin.buffer, results, measured)


if __name__ == "__main__":
    main()
