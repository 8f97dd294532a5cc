"""Run mutated models through compiler, Program and Runtime in a separate process: no crash, no hang, no unknown error.

`python tests/driver/fuzz_models.py --minutes 30 --out findings` continues after a finding and writes each kind once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pickle
import random
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "cosim")]

from mutations import BYTES, MUTATIONS, graphs, mutated, seeds

WALL_SECONDS = 120.0
"""Limit for one model on a busy machine; the limit of its processor time is in fuzz_worker.py."""
RANDOM = ("Random", "Bernoulli", "Multinomial", "Dropout")
FLAGS = (
    "keepdims", "ceil_mode", "training_mode", "largest", "sorted", "interleaved", "select_last_index", "allowzero",
    "saturate", "periodic", "exclusive", "reverse", "transA", "transB", "align_corners", "is_causal",
    "linear_before_reset",
)  # fmt: skip
KINDS = [*MUTATIONS, BYTES]


class Worker:
    """A process that runs models; after its death, the next model starts it again."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self.cache = tempfile.TemporaryDirectory()  # holds thousands of kernels that no later test uses

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.cache.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"CELOSIA_CACHE": self.cache.name, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("fuzz_worker.py"))]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        return subprocess.Popen(
            [*command, *self.arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=environment,
        )  # fmt: skip

    def _end(self) -> int:
        """End the process and return its exit code."""
        if self.process is None:
            return 0
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process = None
        return code

    def run(self, content: bytes, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of fuzz_worker.py; its status is "crash" or "hang" if the process does not answer."""
        self.process = self.process or self._start()
        assert self.process.stdin is not None and self.process.stdout is not None
        self._errors.seek(0, os.SEEK_END)
        start = self._errors.tell()
        try:
            pickle.dump((content, inputs), self.process.stdin)
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], WALL_SECONDS)[0]:
                self._end()
                return {"status": "hang", "why": f"no answer in {WALL_SECONDS} s"}
            answer: dict[str, Any] = pickle.load(self.process.stdout)
            return answer
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self._end()
            self._errors.seek(start)
            return {"status": "crash", "why": f"exit {code}", "trace": self._errors.read().decode(errors="replace")}


def finding(answer: dict[str, Any]) -> str:
    """Return the fault in an answer as a text that is the same for each cause; "" if there is no fault."""
    trace = str(answer.get("trace", ""))
    if answer["status"] in ("ran", "refused"):
        return ""
    if answer["status"] == "slow" and re.search(r"in (loop|_scan)\n", trace):
        return ""  # the model asks for so many iterations, and Ctrl-C ends them
    frames = re.findall(r'File "[^"]*/((?:compiler|driver|sim|hw)/[^"]*)", line (\d+)', trace)
    place = f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
    why = re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "#", str(answer["why"]).split("\n")[0])[:60]
    return f"{answer['status']} {place} {why}"


def difference(content: bytes, answer: dict[str, Any], oracle: Worker) -> str:
    """Return which output differs from onnxruntime's and how; "" if none differs or onnxruntime refuses the model."""
    model = onnx.ModelProto.FromString(content)
    if any(node.op_type.startswith(RANDOM) for node in model.graph.node) or not _is_tame(answer["inputs"], model):
        return ""
    for node in model.graph.node:  # ONNX allows equal names, onnxruntime does not
        node.name = ""
    expected = oracle.run(model.SerializeToString(), answer["inputs"])
    if expected["status"] != "ran":
        return ""
    ops = ",".join(sorted({node.op_type for node in model.graph.node}))
    for name, expected_output in expected["outputs"].items():
        why = _different(answer["outputs"][name], expected_output)
        if why:
            return f"differs {ops}: {name} {why}"
    return ""


def _is_tame(inputs: dict[str, Any], model: onnx.ModelProto) -> bool:
    """Return whether all floats are finite and small, and all flags 0 or 1. ONNX does not define other results."""
    floats = [np.asarray(value, np.float64) for value in inputs.values()
              if isinstance(value, np.ndarray) and value.dtype.kind == "f"]  # fmt: skip
    floats += [numpy_helper.to_array(t).astype(np.float64) for g in graphs(model.graph) for t in g.initializer
               if t.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)]  # fmt: skip
    flags = [attr.i for g in graphs(model.graph) for node in g.node for attr in node.attribute if attr.name in FLAGS]
    return all(np.all(np.abs(a) < 1e6) for a in floats) and all(flag in (0, 1) for flag in flags)


def _different(actual: Any, expected: Any) -> str:
    """Return how two outputs differ, or ""."""
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return "number of a sequence"
        return next(filter(None, (_different(a, b) for a, b in zip(actual, expected))), "")
    if expected is None or actual is None:
        return "" if expected is actual else "none"
    expected, actual = np.asarray(expected), np.asarray(actual)
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, not {list(expected.shape)}"
    if expected.dtype.kind in "OSU":
        return "" if [str(v) for v in actual.flat] == [str(v) for v in expected.flat] else "texts"
    if actual.dtype != expected.dtype:
        return f"type {actual.dtype}, not {expected.dtype}"
    if expected.dtype.kind in "fcV":
        a, b = actual.astype(np.float64), expected.astype(np.float64)
        same = np.isclose(a, b, rtol=1e-3, atol=1e-3 * max(1.0, np.max(np.abs(b[np.isfinite(b)]), initial=0)),
                          equal_nan=True)  # fmt: skip
    else:
        same = actual == expected
    if np.all(same):
        return ""
    place = int(np.argmin(np.reshape(same, -1)))
    return f"{actual.reshape(-1)[place]}, not {expected.reshape(-1)[place]} at {place}"


def draw(rng: random.Random) -> tuple[str, list[str], int]:
    """Draw the name of a seed, mutations, and a number for their random choices."""
    names = sorted(seeds())
    own_models = [name for name in names if not name.startswith("test_")]
    name = rng.choice(own_models) if rng.random() < 0.1 else rng.choice(names)
    return name, rng.choices(KINDS, k=rng.randint(1, 3)), rng.getrandbits(32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--case", help="NAME KINDS NUMBER of a finding, run again")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    counts: collections.Counter[str] = collections.Counter()
    known: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    with Worker() as worker, Worker("onnxruntime") as oracle:
        while time.monotonic() < started + 60 * args.minutes:
            case = draw(rng)
            content, inputs = mutated(*case)
            answer = worker.run(content, inputs)
            counts[answer["status"]] += 1
            fault = finding(answer)
            if not fault and answer["status"] == "ran":
                fault = difference(content, answer, oracle)
                counts["compared"] += 1
            if fault:
                known[fault] += 1
                if known[fault] == 1:
                    number = len(known)
                    (args.out / f"{number:03}.onnx").write_bytes(content)
                    (args.out / f"{number:03}.pickle").write_bytes(pickle.dumps(inputs))
                    text = f"{fault}\n{case}\n{answer.get('why')}\n{answer.get('trace', '')}"
                    (args.out / f"{number:03}.txt").write_text(text)
                    print(f"{number:03} {fault}", flush=True)
            if sum(counts.values()) % 500 == 0:
                print(f"{time.monotonic() - started:.0f} s: {dict(counts)}, {len(known)} kinds", flush=True)
    print(f"{time.monotonic() - started:.0f} s: {dict(counts)}")
    for text, count in known.most_common():
        print(f"{count:5} {text}")


if __name__ == "__main__":
    main()
