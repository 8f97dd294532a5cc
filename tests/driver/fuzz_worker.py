"""Compile and run one model after the other under limits; see fuzz_models.py.

Reads pickled (content, inputs) from standard input and writes a pickled dict for each. Its `status` is "ran" (with
`outputs` and the `inputs` that the model took), "refused" (with the sentence), "slow" or "fault" (with the traceback).
With "onnxruntime" as argument, onnxruntime runs the models.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np

MEMORY = 4 << 30
CPU_SECONDS = 10.0
"""Processor time after which Python is interrupted, as by Ctrl-C. After twice this time the process is killed."""


class TimeUp(BaseException):
    """Raised when a model uses too much processor time. Like KeyboardInterrupt, no `except Exception` catches it."""


def _time_up(*_: object) -> None:
    raise TimeUp


def _limit_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + 2 * CPU_SECONDS) + 1, hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


def _inputs(infos: Any, passed: dict[str, Any]) -> dict[str, Any]:
    """Return arrays for all inputs: the passed ones if they fit, else small random ones."""
    rng = np.random.default_rng(0)
    arrays = {}
    for info in infos:
        dims = tuple(2 if n < 0 else n for n in info.shape)
        value = passed.get(info.name)
        if info.kind != "tensor":
            arrays[info.name] = value if value is not None or info.kind == "optional" else [np.zeros(dims, info.dtype)]
        elif isinstance(value, np.ndarray) and value.dtype.name == info.dtype and value.shape == dims:
            arrays[info.name] = value
        elif info.dtype == "object":
            arrays[info.name] = np.full(dims, "text", object)
        else:
            arrays[info.name] = rng.integers(0, 3, dims).astype(info.dtype)
    return arrays


def celosia_run(content: bytes, inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile and run a model with Celosia."""
    import celosia
    from celosia.compiler.graph.errors import ModelError
    from celosia.compiler.program import InputError
    from celosia.compiler.program.host.op import HostError

    path = folder / "model.onnx"
    path.write_bytes(content)
    try:
        celosia.compile(path, "tiny").save(folder / "program")
        program = celosia.Program.load(folder / "program")
        try:
            used = _inputs(program.inputs, inputs)
        except ValueError:  # larger than any memory
            return {"status": "refused", "why": "inputs"}
        outputs = celosia.Runtime(program).run(used).outputs
    except (ModelError, HostError, InputError) as error:
        if not str(error) or "\n" in str(error) or len(str(error)) > 2000:
            return {"status": "fault", "why": f"not one short sentence: {error}", "trace": traceback.format_exc()}
        return {"status": "refused", "why": str(error)}
    except MemoryError:
        return {"status": "refused", "why": "memory"}
    return {"status": "ran", "outputs": outputs, "inputs": used}


def onnxruntime_run(content: bytes, inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a model with onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        values = session.run(None, inputs)
    except Exception as error:  # of many classes
        return {"status": "refused", "why": str(error)[:500]}
    return {"status": "ran", "outputs": dict(zip((o.name for o in session.get_outputs()), values))}


def planted_run(content: bytes, inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Crash, loop or raise an error, for the test of the fuzzer."""
    match content:
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"loop":
            signal.setitimer(signal.ITIMER_PROF, 0.2)
            while True:
                pass
    raise KeyError("planted")


RUNS = {"onnxruntime": onnxruntime_run, "planted": planted_run}


def main() -> None:
    run = RUNS.get(sys.argv[-1], celosia_run)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # native code prints to standard output
    if run is celosia_run:
        import celosia.compiler.compile
        import celosia.driver.runtime
        import celosia.sim.functional.fsim  # noqa: F401
    signal.signal(signal.SIGPROF, _time_up)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                content, inputs = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                _limit_time()
                answer = run(content, inputs, Path(folder))
            except TimeUp:
                answer = {"status": "slow", "why": "too slow", "trace": traceback.format_exc()}
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                answer = {"status": "fault", "why": why, "trace": traceback.format_exc()}
            signal.setitimer(signal.ITIMER_PROF, 0)
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    main()
