"""Run ONNX's backend tests through compiler, Program and Runtime, in a few processes.

`python tests/compiler/onnx_nodes.py` prints failures; `--update` writes the list of tests that do not pass yet.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.loader as loader
import pytest
from onnx.backend.test.case import base
from onnx.backend.test.runner import Runner

import celosia
from celosia.compiler.program import Program
from celosia.driver.runtime import Runtime

RANDOM = re.compile("test_bernoulli")
"""Tests of random values: they have no expected values, and pass by chance."""
FAILING = Path(__file__).with_name("onnx_nodes_failing.txt")


SLOW = "export_averagepool_3d_default", "export_lppool_3d_default", "export_maxpool_3d_default"
"""Functions in ONNX that take seconds to make the expected values of one node test each."""
_slow: list[Callable[[], None]] = []
"""The functions of SLOW, once ONNX's node tests are loaded."""


@functools.cache
def cases(kind: str) -> dict[str, Any]:
    """Return the tests of one kind ("node", "simple", "real") by name, except those of SLOW."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of overflows
        patch.setattr(base, "process_snippet", lambda *_: ("", ""))  # is for ONNX's documentation, and takes seconds
        patch.setattr(base._Exporter, "__init__", functools.partialmethod(_export_quick, base._Exporter.__init__))
        return {case.name: case for case in loader.load_model_tests(kind=kind)}


def _export_quick(cls: Any, export: Any, name: str, bases: Any, members: dict[str, Any]) -> None:
    """Make the node tests of a class of ONNX, except those of SLOW."""
    export(cls, name, bases, {key: value for key, value in members.items() if key not in SLOW})
    _slow.extend(getattr(cls, key) for key in members if key in SLOW)


@functools.cache
def slow_cases() -> dict[str, Any]:
    """Return the node tests of SLOW by name."""
    quick = len(cases("node"))
    for export in _slow:
        np.random.seed(0)  # as ONNX does
        export()
    return {case.name: case for case in loader.load_model_tests(kind="node")[quick:]}


def sample() -> list[str]:
    """Return the names of node tests in which each operator of ONNX's node tests occurs, the smallest models first."""
    operators: set[str] = set()
    names = []
    for name, case in sorted(cases("node").items(), key=lambda item: len(item[1].model.graph.node)):
        if new := {node.op_type for node in case.model.graph.node} - operators:
            operators |= new
            names.append(name)
    return names


def run(case: Any) -> str:
    """Run `case` and return why it fails, or "" if it passes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _run(case)
    except Exception as error:  # whatever it is, it is the result
        lines = [line for line in str(error).splitlines() if line.strip()]
        return " ".join(f"{type(error).__name__}: {' '.join(lines[:6])}".split())[:160]
    return ""


def _run(case: Any) -> None:
    """Compile, save, load and run the model of `case`; raise an error if an output differs."""
    model = case.model if case.model is not None else onnx.load(model_path(case))
    with tempfile.TemporaryDirectory() as folder:  # through the file, as a user would
        celosia.compile(model).save(Path(folder) / "program")
        program = Program.load(Path(folder) / "program")
    for inputs, outputs in data(case, model):
        arrays = dict(zip((tensor.name for tensor in program.inputs), map(_array, inputs)))
        results = Runtime(program, "functional").run(arrays).outputs
        values = [results[value.name] for value in model.graph.output]
        assert len(values) == len(outputs)
        for a, b in zip(values, outputs):
            _compare(case, a, _array(b))


def _compare(case: Any, got: Any, expected: Any) -> None:
    """Raise AssertionError if an output differs from ONNX's. ONNX's own comparison fails for sequences of scalars."""
    if not isinstance(expected, list):
        Runner.assert_similar_outputs([expected], [got], rtol=case.rtol, atol=case.atol, model_dir=case.model_dir)
        return
    assert isinstance(got, list) and len(got) == len(expected), f"a sequence of {len(expected)} is expected"
    for a, b in zip(got, expected):
        _compare(case, a, b)


def model_path(case: Any) -> Path:
    """Return the path of a test's model; models of "real" tests lie in the package, without weights."""
    if case.model_dir is not None:
        return Path(case.model_dir) / "model.onnx"
    return Path(loader.DATA_DIR) / "light" / Path(case.url).name


def data(case: Any, model: onnx.ModelProto) -> Iterable[tuple[list[Any], list[Any]]]:
    """Yield (inputs, outputs) of each set of test data."""
    if case.data_sets is not None:
        yield from case.data_sets
        return
    if case.model_dir is None:
        known = {tensor.name for tensor in model.graph.initializer}
        inputs = [Runner.generate_dummy_data(value) for value in model.graph.input if value.name not in known]
        path = model_path(case)
        yield inputs, [_value(path.with_name(f"{path.stem}_output_0.pb"), model.graph.output[0].type)]
        return
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")):
        values = []
        for direction, infos in (("input", model.graph.input), ("output", model.graph.output)):
            files = [folder / f"{direction}_{i}.pb" for i in range(len(infos))]
            values.append([_value(file, info.type) for file, info in zip(files, infos) if file.exists()])
        yield values[0], values[1]


def _array(value: Any) -> Any:
    """Return a value as an array. Tests of types that numpy does not know hold protos."""
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _value(path: Path, kind: onnx.TypeProto) -> Any:
    content = path.read_bytes()
    match kind.WhichOneof("value"):
        case "sequence_type":
            return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(content))
        case "optional_type":
            return onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(content))


def _run_named(kind: str, name: str) -> tuple[str, str]:
    return name, run(cases(kind)[name])


def run_all(kind: str, names: Iterable[str], processes: int = 2) -> dict[str, str]:
    """Run tests of `kind`; return the reason of each failure by the test's name."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        results = pool.starmap(_run_named, [(kind, name) for name in names], chunksize=8)
    return {name: why for name, why in results if why}


def known_failing() -> dict[str, str]:
    """Return the tests that do not pass yet, with the reason."""
    lines = [line for line in FAILING.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--kind", default="node")
    parser.add_argument("--match", default="")
    parser.add_argument("-j", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    names = [name for name in cases(args.kind) if re.search(args.match, name)]
    failing = run_all(args.kind, names, args.j)
    for name, why in failing.items():
        print(f"{name}: {why}")
    print(f"{len(names) - len(failing)} of {len(names)} pass")
    if args.update:
        head = "# Backend tests of ONNX that do not pass yet, with the reason; one that passes must leave this list.\n"
        FAILING.write_text(head + "".join(f"{name}: {why}\n" for name, why in sorted(failing.items())))


if __name__ == "__main__":
    main()
