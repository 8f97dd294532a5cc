"""Mutated models through compile, Program and Runtime in a process of its own: no crash, no hang, no other error.

`python tests/driver/fuzz_models.py --minutes 30 --out findings` goes on after a finding and writes each kind once.
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
"""For one model on a busy machine; the limit on its processor time is in fuzz_worker.py."""
RANDOM = ("Random", "Bernoulli", "Multinomial", "Dropout")
FLAGS = (
    "keepdims", "ceil_mode", "training_mode", "largest", "sorted", "interleaved", "select_last_index", "allowzero",
    "saturate", "periodic", "exclusive", "reverse", "transA", "transB", "align_corners", "is_causal",
    "linear_before_reset",
)  # fmt: skip
KINDS = [*MUTATIONS, BYTES]


class Worker:
    """A process that answers; it is started again after it has died."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        self.cache = tempfile.TemporaryDirectory()  # for thousands of kernels that nobody needs again

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
        """What fuzz_worker.py answers; status "crash" or "hang" where it does not."""
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
    """What is wrong with an answer, one text for each cause; "" where nothing is."""
    trace = str(answer.get("trace", ""))
    if answer["status"] in ("ran", "refused"):
        return ""
    if answer["status"] == "slow" and re.search(r"in (loop|_scan)\n", trace):
        return ""  # as long as its model says, and Ctrl-C ends it
    frames = re.findall(r'File "[^"]*/((?:compiler|driver|sim|hw)/[^"]*)", line (\d+)', trace)
    place = f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
    why = re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "#", str(answer["why"]).split("\n")[0])[:60]
    return f"{answer['status']} {place} {why}"


def difference(content: bytes, answer: dict[str, Any], oracle: Worker) -> str:
    """Where onnxruntime runs the model, too: which output differs and how; "" where none does."""
    model = onnx.ModelProto.FromString(content)
    if any(node.op_type.startswith(RANDOM) for node in model.graph.node) or not _is_tame(answer["inputs"], model):
        return ""
    for node in model.graph.node:  # which may have one name for ONNX, and not for onnxruntime
        node.name = ""
    expected = oracle.run(model.SerializeToString(), answer["inputs"])
    if expected["status"] != "ran":
        return ""
    ops = ",".join(sorted({node.op_type for node in model.graph.node}))
    for name, want in expected["outputs"].items():
        why = _different(answer["outputs"][name], want)
        if why:
            return f"differs {ops}: {name} {why}"
    return ""


def _is_tame(inputs: dict[str, Any], model: onnx.ModelProto) -> bool:
    """Whether all floats are finite and small, and all flags 0 or 1: beyond, results are nobody's to define."""
    floats = [np.asarray(value, np.float64) for value in inputs.values()
              if isinstance(value, np.ndarray) and value.dtype.kind == "f"]  # fmt: skip
    floats += [numpy_helper.to_array(t).astype(np.float64) for g in graphs(model.graph) for t in g.initializer
               if t.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)]  # fmt: skip
    flags = [attr.i for g in graphs(model.graph) for node in g.node for attr in node.attribute if attr.name in FLAGS]
    return all(np.all(np.abs(a) < 1e6) for a in floats) and all(flag in (0, 1) for flag in flags)


def _different(got: Any, want: Any) -> str:
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return "number of a sequence"
        return next(filter(None, (_different(a, b) for a, b in zip(got, want))), "")
    if want is None or got is None:
        return "" if want is got else "none"
    want, got = np.asarray(want), np.asarray(got)
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, not {list(want.shape)}"
    if want.dtype.kind in "OSU":
        return "" if [str(v) for v in got.flat] == [str(v) for v in want.flat] else "texts"
    if got.dtype != want.dtype:
        return f"type {got.dtype}, not {want.dtype}"
    if want.dtype.kind in "fcV":
        a, b = got.astype(np.float64), want.astype(np.float64)
        same = np.isclose(a, b, rtol=1e-3, atol=1e-3 * max(1.0, np.max(np.abs(b[np.isfinite(b)]), initial=0)),
                          equal_nan=True)  # fmt: skip
    else:
        same = got == want
    if np.all(same):
        return ""
    place = int(np.argmin(np.reshape(same, -1)))
    return f"{got.reshape(-1)[place]}, not {want.reshape(-1)[place]} at {place}"


def draw(rng: random.Random) -> tuple[str, list[str], int]:
    """A seed's name, mutations, and a number for them."""
    names = sorted(seeds())
    few = [name for name in names if not name.startswith("test_")]
    name = rng.choice(few) if rng.random() < 0.1 else rng.choice(names)
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
            found = finding(answer)
            if not found and answer["status"] == "ran":
                found = difference(content, answer, oracle)
                counts["compared"] += 1
            if found:
                known[found] += 1
                if known[found] == 1:
                    number = len(known)
                    (args.out / f"{number:03}.onnx").write_bytes(content)
                    (args.out / f"{number:03}.pickle").write_bytes(pickle.dumps(inputs))
                    text = f"{found}\n{case}\n{answer.get('why')}\n{answer.get('trace', '')}"
                    (args.out / f"{number:03}.txt").write_text(text)
                    print(f"{number:03} {found}", flush=True)
            if sum(counts.values()) % 500 == 0:
                print(f"{time.monotonic() - started:.0f} s: {dict(counts)}, {len(known)} kinds", flush=True)
    print(f"{time.monotonic() - started:.0f} s: {dict(counts)}")
    for text, count in known.most_common():
        print(f"{count:5} {text}")


if __name__ == "__main__":
    main()
