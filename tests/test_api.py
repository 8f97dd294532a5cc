"""The package as a Python user meets it: what it lists, what objects print, types, and ways to run."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest

import celosia
from celosia.compiler.program import InputError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def program() -> celosia.Program:
    return celosia.compile(celosia.models.demo_model_path(), "tiny")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return celosia.models.demo_images()[0]


def test_the_package_lists_what_it_offers() -> None:
    command = "import celosia, sys; print(*dir(celosia)); print('celosia.compiler.compile' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    names, loaded = done.stdout.splitlines()
    assert names.split() == sorted(celosia.__all__) and {"compile", "Runtime", "models"} <= set(names.split())
    assert loaded == "False"  # listing loads nothing
    for name in celosia.__all__:
        if name not in ("from_torch", "CelosiaQuantizer"):  # with PyTorch; docs/pytorch.md runs both
            text = inspect.getdoc(getattr(celosia, name))
            assert text and (name == "models" or ">>>" in text), name


def test_sympy_waits_until_sizes_are_added() -> None:
    """onnx-ir imports it at once, and it takes longer to load than all of Celosia."""
    command = """if True:
        import celosia, sys
        celosia.compile(celosia.models.demo_model_path(), celosia.Config(block_in=4, block_out=4), check=False)
        import onnx_ir
        print("sympy.core" in sys.modules, onnx_ir.SymbolicDim("n") + 1, "sympy.core" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "n", "+", "1", "True"]


def test_what_objects_print(program: celosia.Program, images: np.ndarray) -> None:
    result = celosia.Runtime(program, "timed").run({"image": images[:1]})
    layer = program.launches[0].layers[1]
    model = onnx.load(celosia.models.demo_model_path())
    opened = celosia.Runtime(model, config="tiny", threads=1)
    for thing, words in (
        (
            celosia.Runtime(program, "timed", threads=2),
            ["Runtime", "'resnet8_fashion_int8'", "on timed", "Config tiny", "logits float32[1, 10]", "2 threads"],
        ),
        (opened, ["Runtime of the model 'model'", "on functional", "Config tiny", "0 shapes", "1 thread>"]),
        (program, ["resnet8_fashion_int8", "tiny", "image float32[1, 1, 32, 32]", "11 layers"]),
        (result, ["timed", "logits float32[1, 10]", "cycles"]),
        (layer, ["block1.first", "conv 3x3, 16→16", "2,359,296 MACs"]),
    ):
        text = repr(thing)
        assert len(text) < 300 and "\n" not in text
        assert all(word in text for word in words), text
    functional = celosia.Runtime(program).run({"image": images[:1]})
    assert "cycles" not in repr(functional)


def test_the_version_is_that_of_the_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert celosia.__version__ == tomllib.load(file)["project"]["version"]
    assert celosia.language is importlib.import_module("celosia.language") and "language" in dir(celosia)


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_tables_for_notebooks(program: celosia.Program, images: np.ndarray) -> None:
    result = celosia.Runtime(program).run({"image": images[:1]})  # one with cycles shows them in a brief page
    for thing in (program, result):
        parser = _Cells()
        parser.feed(thing._repr_html_())
        assert parser.open == [] and len(parser.rows) == 1 + 11
        assert {len(row) for row in parser.rows} == {len(parser.rows[0])}
        assert parser.rows[2][:2] == ["block1.first", "conv 3x3, 16→16"]


def test_a_runtime_is_called_with_arrays(program: celosia.Program, images: np.ndarray) -> None:
    with celosia.Runtime(program) as runtime:
        expected = runtime.run({"image": images[:1]}).outputs["logits"]
        np.testing.assert_array_equal(runtime(images[:1]), expected)
        with pytest.raises(InputError, match=r"1 inputs.*image.*2 arrays"):
            runtime(images[:1], images[:1])
        with pytest.raises(InputError, match="must be float32"):
            runtime(images[0])


def test_samples_one_after_the_other_and_batches(program: celosia.Program, images: np.ndarray) -> None:
    runtime = celosia.Runtime(program)
    expected = [runtime.run({"image": image[None]}).outputs["logits"] for image in images[:4]]
    taken = []

    def samples() -> object:
        for number, image in enumerate(images[:4]):
            taken.append(number)
            yield image[None] if number % 2 else {"image": image[None]}

    results = runtime.run_each(samples(), in_flight=1)
    np.testing.assert_array_equal(next(results).outputs["logits"], expected[0])
    assert taken == [0]  # no sample before its result is asked for
    rest = [result.outputs["logits"] for result in results]
    np.testing.assert_array_equal(np.concatenate(rest), np.concatenate(expected[1:]))
    np.testing.assert_array_equal(runtime.run_batch({"image": images[:4]})["logits"], np.concatenate(expected))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"image": np.zeros((0, 1, 32, 32), np.float32)}, "must be a batch of a multiple of 1, not of shape"),
        ({"image": np.float32(1)}, "must be a batch"),
        ({}, "inputs need batches of one size"),
        ({"image": np.zeros((2, 1, 32, 32), np.float32), "b": np.zeros(2)}, "there is no input 'b'"),
        ({"image": np.zeros((2, 1, 31, 32), np.float32)}, "must be float32"),
    ],
)
def test_wrong_batches(program: celosia.Program, inputs: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words):
        celosia.Runtime(program).run_batch(inputs)


def test_users_see_types() -> None:
    """tests/typed_user.py says what `make types` then finds."""
    assert (Path(celosia.__file__).parent / "py.typed").exists()
