"""A decoder with a cache of fixed length gives the tokens of onnxruntime with a growing cache."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.decoders import DECODERS, quantised
from benchmarks.decoders import DecoderNetwork as Network
from numpy.typing import NDArray
from onnx import helper
from thorough import some
from typer.testing import CliRunner

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import InputError
from celosia.driver import cli
from celosia.driver.generate import decoder as decoding
from celosia.driver.generate.decoder import Decoder
from celosia.driver.generate.roles import Roles, find_roles
from celosia.driver.generate.sampling import Sampler
from celosia.driver.generate.vocabulary import Vocabulary, vocabulary_of
from celosia.hw.spec.config import PRESETS, Config

from ..oracle import opened

Array = NDArray[Any]
GPT = Network(heads=2, inner=16, wide=48, layers=2, vocabulary=30, most=40)
SHORT = replace(GPT, layers=1)
LLAMA = Network(heads=4, groups=2, inner=8, wide=40, layers=1, vocabulary=25, most=64, rotary=True, seed=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, network in (("gpt", GPT), ("short", SHORT), ("llama", LLAMA)):
        folder = tmp_path_factory.mktemp(name)
        made[name] = quantised(network, folder, past=20)
        made[f"{name}, floats"] = folder / "float.onnx"
    made["gpt, bytes"] = quantised(SHORT, tmp_path_factory.mktemp("bytes"), past=20, attention=True)
    return made


@pytest.fixture(scope="module")
def short(files: dict[str, Path]) -> Iterator[Decoder]:
    with Decoder(files["short"], length=24) as decoder:
        yield decoder


class Oracle:
    """onnxruntime with a growing cache."""

    def __init__(self, path: Path, roles: Roles) -> None:
        self.session, self.roles, self.length_so_far = opened(path, int8=True), roles, 0
        self.caches = {cache.past: np.zeros((1, cache.heads, 0, cache.size), np.float32) for cache in roles.caches}

    def feed(self, tokens: list[int]) -> Array:
        """Run tokens and return the logits of the last one."""
        total = self.length_so_far + len(tokens)
        inputs = {
            self.roles.tokens: np.array([tokens]), self.roles.mask: np.ones((1, total), np.int64),
            self.roles.positions: np.arange(self.length_so_far, total)[None],
        }  # fmt: skip
        names = [output.name for output in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, inputs | self.caches)))
        self.length_so_far, self.caches = total, {cache.past: outputs[cache.present] for cache in self.roles.caches}
        logits: Array = outputs[self.roles.logits][0, -1]
        return logits


SOFTMAX = replace(PRESETS["pynq"], forward=False, softmax=4)
CASES = [
    ("gpt", "pynq", 40, 16, 21), ("gpt", "pynq", 33, 5, 6), ("gpt", "tiny", 37, 4, 1), ("gpt", "ultra96", 24, 8, 9),
    ("llama", "tiny", 30, 16, 5), ("llama", "pynq", 48, 16, 3), ("gpt, bytes", SOFTMAX, 39, 16, 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "length", "chunk", "prompt"), some(CASES, [CASES[2], CASES[4], CASES[6]]))
def test_tokens_are_onnxruntimes(
    name: str, config: str | Config, length: int, chunk: int, prompt: int, files: dict[str, Path]
) -> None:
    """Logits equal onnxruntime's with a padded cache, a prompt in pieces and bytes in place of floats.

    With attention in bytes, the host transposes 32 of the values row by row, and the accelerator the others.
    """
    known = (LLAMA if name == "llama" else GPT).vocabulary
    tokens = np.random.default_rng(prompt).integers(0, known, prompt).tolist()
    with Decoder(files[name], config=config, length=length, chunk=chunk) as decoder:
        session, oracle = decoder.session(), Oracle(files[name], decoder.roles)
        np.testing.assert_array_equal(session.feed(tokens), oracle.feed(tokens))
        for _ in range(length - prompt):
            token = int(np.argmax(session.logits))
            np.testing.assert_array_equal(session.feed([token]), oracle.feed([token]))
        assert session.length == length
        tokens = session.tokens[:prompt]
        assert list(decoder.session().generate(tokens, length)) == [
            *session.tokens[prompt:],
            int(np.argmax(session.logits)),
        ]


def test_floats(files: dict[str, Path]) -> None:
    """A cache that is read by more than products of bytes stays in floats."""
    with Decoder(files["short, floats"], length=24) as decoder:
        session, oracle = decoder.session(), Oracle(files["short, floats"], decoder.roles)
        tokens = list(range(18))
        np.testing.assert_allclose(session.feed(tokens), oracle.feed(tokens), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(session.feed([3]), oracle.feed([3]), rtol=1e-4, atol=1e-4)
        assert {each.dtype for each in decoder.program().inputs if "past" in each.name} == {"float32"}


def test_bytes_stay_on_the_accelerator(files: dict[str, Path]) -> None:
    """Each layer takes three launches, and the logits one; keys are appended where the products read them."""
    with Decoder(files["gpt"], length=32) as decoder:
        program = decoder.program()
        assert {each.dtype for each in program.inputs if "past" in each.name} == {"int8"}
        assert [each.shape for each in program.outputs if "present" in each.name] == [(1, 2, 1, 16)] * 4
        assert program.macs_accelerator == program.macs_total
        assert len(program.launches) == 3 * GPT.layers + 1
        packed = [pack.value for launch in program.launches for pack in launch.pack]
        assert [name for name in packed if name.startswith("past")] == [
            f"past_key_values.{layer}.key" for layer in range(GPT.layers)
        ]


@pytest.mark.rtl
def test_tokens_of_the_rtl(files: dict[str, Path]) -> None:
    tokens = {}
    for device in ("functional", "rtl", "timed"):
        with Decoder(files["short"], device, config="tiny", length=20, chunk=4) as decoder:
            session = decoder.session()
            tokens[device] = list(session.generate([1, 2, 3, 4, 5], 4))
            report = session.usage.report()
    assert tokens["rtl"] == tokens["functional"] == tokens["timed"]
    assert report["cycles_per_token"] > 0
    assert 0 < report["bandwidth"] <= 1
    assert report["steps"]["runs"] == 4  # the last of the prompt, and three that were fed


def test_sessions_take_turns(short: Decoder) -> None:
    alone = [list(short.session().generate([first, 2], 6)) for first in (1, 9)]
    both = [short.session().generate([first, 2], 6) for first in (1, 9)]
    assert list(zip(*both)) == list(zip(*alone))


def test_what_lies_in_unused_rows_does_not_matter(short: Decoder) -> None:
    expected = list(short.session().generate([4, 5], 6))
    session = short.session()
    for cache in session.caches.values():
        cache[...] = np.random.default_rng(1).integers(-128, 128, cache.shape)
    assert list(session.generate([4, 5], 6)) == expected


def test_a_mask_that_lets_unused_rows_through_is_seen(short: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above find a planted fault: a mask that lets unused rows of the cache through."""
    right, expected = decoding.mask_of_seen_tokens, short.session().feed([4, 5, 6])
    monkeypatch.setattr(decoding, "mask_of_seen_tokens", lambda *sizes: right(*sizes) | True)
    assert not np.array_equal(short.session().feed([4, 5, 6]), expected)


def test_where_a_sequence_ends(files: dict[str, Path]) -> None:
    with Decoder(files["short"], length=8) as decoder:
        session = decoder.session()
        assert len(list(session.generate([1, 2, 3], 100))) == 6  # the last is one that the model has not seen
        assert session.length == 8
        for tokens, message in [
            ([1], "9 tokens are more"),
            ([], "no tokens"),
            ([30], "token 30 is none"),
            ([-1], "-1"),
            ([1.5], "token 1.5 is no whole number"),
            ("ab", "token 'a' is no whole number; a vocabulary"),
        ]:
            with pytest.raises(InputError, match=message):
                session.feed(tokens)
        assert session.length == 8
    with pytest.raises(InputError, match=r"40 tokens.*41"):
        Decoder(files["gpt"], length=41)
    with pytest.raises(InputError, match="a sequence of 1"):
        Decoder(files["gpt"], length=1)
    assert Decoder(files["gpt"]).length == 40
    assert Decoder(files["llama"]).length == decoding.DEFAULT_LENGTH


# Interfaces -------------------------------------------------------------------------------------------------------


def changed(change: Callable[[onnx.GraphProto], None]) -> onnx.ModelProto:
    model = replace(GPT).model()
    change(model.graph)
    return model


def without(graph: onnx.GraphProto, name: str) -> None:
    kept = [value for value in graph.input if value.name != name]
    del graph.input[:]
    graph.input.extend(kept)


def renamed(graph: onnx.GraphProto, name: str, other: str) -> None:
    for value in (*graph.input, *graph.output):
        value.name = other if value.name == name else value.name
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [other if each == name else each for each in names]


def flat(graph: onnx.GraphProto) -> None:
    value = next(value for value in graph.input if value.name == "past_key_values.0.key")
    del value.type.tensor_type.shape.dim[0]


def prepended(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if "past_key_values.0.key" in node.input)
    node.input[:] = reversed(node.input)


def read_twice(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Identity", ["past_key_values.1.value"], ["copy"]))
    graph.output.append(helper.make_tensor_value_info("copy", 1, None))


WRONG = {
    "no mask": (lambda graph: without(graph, "attention_mask"), "mask of the tokens that are seen, and has none"),
    "no tokens": (lambda graph: without(graph, "input_ids"), "one input of tokens and one of positions, and has none"),
    "two of tokens": (
        lambda graph: graph.input.append(helper.make_tensor_value_info("kinds", 7, [1, 1])), "'input_ids', 'kinds'",
    ),
    "a float more": (
        lambda graph: graph.input.append(helper.make_tensor_value_info("scale", 1, [1])), "'scale' is none of tokens",
    ),
    "no rank of four": (flat, r"must be \[batch, heads, tokens, size\]"),
    "appended in front": (prepended, "by a Concat of it and the rows of new tokens"),
    "read elsewhere": (read_twice, "one output of logits, and has 'logits', 'copy'|by a Concat"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_models_that_are_no_decoders(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(ModelError, match=message):
        Decoder(changed(change))


def test_a_model_without_a_cache() -> None:
    value = helper.make_tensor_value_info("x", 1, [1])
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([node], "g", [value], [helper.make_tensor_value_info("y", 1, [1])])
    with pytest.raises(ModelError, match="the model has no cache"):
        Decoder(helper.make_model(graph))


def test_names_of_other_exporters() -> None:
    def change(graph: onnx.GraphProto) -> None:
        for layer in range(GPT.layers):
            for kind in ("key", "value"):
                renamed(graph, f"past_key_values.{layer}.{kind}", f"past_{kind}_self_{layer}")
                renamed(graph, f"present.{layer}.{kind}", f"present_{kind}_self_{layer}")
        renamed(graph, "logits", "scores")

    roles = find_roles(changed(change))
    assert [(cache.past, cache.present) for cache in roles.caches][:2] == [
        ("past_key_self_0", "present_key_self_0"), ("past_value_self_0", "present_value_self_0"),
    ]  # fmt: skip
    assert roles.logits == "scores"


# Tokens -----------------------------------------------------------------------------------------------------------


def test_what_is_drawn() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    drawn = Sampler(temperature=1.0, seed=3)
    share = np.bincount([drawn(logits) for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(share, np.exp(logits), atol=0.03)
    assert {Sampler(1.0, top=2, seed=seed)(logits) for seed in range(50)} == {0, 1}
    assert [Sampler(1.0, seed=7)(logits) for _ in range(3)] == [Sampler(1.0, seed=7)(logits)] * 3
    assert Sampler()(logits) == Sampler(1e-9)(logits) == 0
    with pytest.raises(InputError, match="no numbers"):
        Sampler(1.0)(np.full(4, np.nan))
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top": -1}):
        with pytest.raises(ValueError, match="not"):
            Sampler(**wrong)


@pytest.mark.parametrize("text", ["[1, 2]", "{}", "nonsense", '["a", "a"]', '["a", ""]', "[" * 500])
def test_vocabularies_that_are_none(text: str) -> None:
    model = GPT.model()
    model.metadata_props.add(key="vocabulary", value=text)
    with pytest.raises(ModelError, match="vocabulary"):
        vocabulary_of(model)


def test_text_and_tokens() -> None:
    vocabulary = Vocabulary(["a", "b", "ab", "\n"])
    assert vocabulary.tokens_of("abba\n") == [2, 1, 0, 3]
    assert vocabulary.text_of([2, 1, 0, 3]) == "abba\n"
    with pytest.raises(InputError, match="no token for 'c', character 2"):
        vocabulary.tokens_of("abc")


# The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def speaking(files: dict[str, Path], tmp_path: Path) -> Iterator[Path]:
    """Return a model with a vocabulary in which one token would clear a terminal."""
    model = onnx.load(files["short"])
    texts = [chr(97 + token) for token in range(GPT.vocabulary - 2)]
    model.metadata_props.add(key="vocabulary", value=json.dumps([*texts, "\n", "\x1b[2J"]))
    onnx.save(model, tmp_path / "speaking.onnx")
    yield tmp_path / "speaking.onnx"


def called(line: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, shlex.split(line))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command(speaking: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, out, _ = called(
        f"generate {speaking} --prompt hello -n 5 --length 32 --device timed --memory pynq-z2 --report {report}"
    )
    assert code == 0
    assert out.startswith("hello")
    assert "rounding is 'corect'" in called(f"generate {speaking} --prompt hello --rounding corect")[2]
    assert "tokens a second at 100 MHz" in out
    made = json.loads(report.read_text())
    assert made["share"] == 1.0
    assert made["steps"]["runs"] == 4
    code, alone, said = called(f"generate {speaking} --prompt hello -n 5 --length 32 --quiet")
    assert (code, said) == (0, "")
    assert out.startswith(alone.rstrip("\n"))
    code, numbers, _ = called(f"generate {speaking} --ids 7,4,11,11,14 -n 5 --length 32 --quiet")
    assert numbers.split()[:5] == ["7", "4", "11", "11", "14"]
    assert len(numbers.split()) == 10


def test_text_that_no_terminal_obeys(speaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "__call__", lambda self, logits: GPT.vocabulary - 1)
    code, out, _ = called(f"generate {speaking} --prompt ab -n 3 --length 16 --quiet")
    assert code == 0
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("", 2, "give --prompt TEXT, or --ids"), ("--prompt a --ids 1", 2, "give --prompt TEXT, or --ids"),
        ("--ids 1,x", 2, "no whole numbers"), ("--prompt ä", 1, "no token for 'ä'"),
        ("--ids 1,99", 1, "token 99 is none of the model's"), ("--prompt aaaaaaaaa --length 8", 1, "9 tokens are more"),
        ("--prompt a --length 99", 1, "positions for 40 tokens"), ("--prompt a --device nowhere", 2, "nowhere"),
        ("--prompt a --temperature nan", 2, "temperature"), ("--prompt a --temperature inf", 2, "no temperature"),
        ("--prompt a --memory pynq-z2", 2, "--memory needs"), ("--ids 1 --report /nowhere/r.json", 1, "nowhere"),
    ],
)  # fmt: skip
def test_wrong_command_lines(options: str, code: int, message: str, speaking: Path) -> None:
    found, _, said = called(f"generate {speaking} {options} --no-check")
    assert (found, message in " ".join(said.split())) == (code, True), said


def test_a_vocabulary_of_another_model(files: dict[str, Path]) -> None:
    model = onnx.load(files["gpt"])
    model.metadata_props.add(key="vocabulary", value=json.dumps(["a", "b"]))
    with pytest.raises(ModelError, match=r"30 tokens.*vocabulary.* 2"):
        Decoder(model, length=16).program()


def test_a_model_without_words(files: dict[str, Path]) -> None:
    code, _, said = called(f"generate {files['gpt']} --prompt hello")
    assert code == 1
    assert "has no vocabulary in its metadata; give the tokens themselves with --ids" in said


def test_the_networks_of_the_benchmark() -> None:
    """The benchmark's networks have 10.6 million parameters each, or about as many."""
    for network in DECODERS.values():
        assert 9e6 < sum(np.prod(tensor.dims) for tensor in network.model().graph.initializer) < 12e6
