"""A process that measures: Jobs come in, Results go out, one after the other.

python -m celosia.compiler.tune.station
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO


def serve(jobs: BinaryIO, results: BinaryIO) -> None:
    """Answer each Job of `jobs` until there are no more."""
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        pickle.dump(job.run(), results)
        results.flush()


def main() -> None:
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between answers
    serve(sys.stdin.buffer, results)


if __name__ == "__main__":
    main()
