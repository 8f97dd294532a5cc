"""Run a decoder token by token: celosia.Decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import read
from celosia.compiler.ops import op_spec
from celosia.compiler.program import InputError, Program
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.model import ROUNDINGS
from celosia.driver.generate.cached_attention import decompose_cached_attention
from celosia.driver.generate.roles import CACHE_AXIS, Roles, find_roles
from celosia.driver.generate.sampling import Sampler
from celosia.driver.generate.stepping import rewrite_to_return_new_rows
from celosia.driver.generate.usage import SessionUsage
from celosia.driver.generate.vocabulary import vocabulary_of
from celosia.driver.run.open_device import open_device
from celosia.driver.run.program_runtime import ProgramRuntime
from celosia.driver.run.run_result import Result
from celosia.driver.workstation.tools import require_tools
from celosia.hw.spec.config import Config
from celosia.sim.device import Device

Array = NDArray[Any]
DEFAULT_LENGTH, DEFAULT_CHUNK = 256, 16
"""Defaults: the most tokens of a sequence, and the tokens of a prompt that one run takes."""
COUNTING_OPERATORS = ("CumSum", "Sub", "Slice")
"""Operators, besides Cast, by which models compute positions of new tokens from a mask."""
TABLE_LOOKUPS = {"Gather": 0, "RotaryEmbedding": 2}
"""Operators whose second input is indices of a table's rows, with the number of the input that is the table."""


class Decoder:
    """A decoder model, compiled to two Programs: one takes a token, the other `chunk` tokens of a prompt.

    Sessions hold the tokens and the key-value caches of their sequences. The first run compiles the Programs and opens
    the device, and raises their errors. Use the Decoder in a `with` statement, which closes the device.

    Args:
        model: An ONNX model or its path, with inputs and outputs as driver/generate/roles.py has them.
        device: Name of a device, such as "functional", or any Device, whose Config then replaces `config`.
        config: Accelerator, as `celosia.compile` takes it.
        length: Largest number of tokens of a sequence, at least 2. None: 256 or the number of the model's positions,
            whichever is smaller.
        chunk: Number of tokens of a prompt that one run takes.
        check: Compare the Programs with the model, as `celosia.compile` does.
        rounding: "onnxruntime", "correct" or "bytes", as `celosia.compile` takes it.
        threads: Number of threads of the CPU's part. None: the default of `celosia.Runtime`.
        progress: Function that is called with the name of each stage. None: no function is called.
        options: Keyword arguments of the device by name.

    Raises:
        ModelError: The model is no decoder, or `celosia.compile` does not support it.
        ConfigError: The Config is invalid, or there is none of that name.
        InputError: `length` is less than 2, or more than the number of the model's positions.
        ThreadsError: The number of threads is impossible.
        ValueError: There is no device of that name.
        DeviceError: The device cannot be opened.
        SelfCheckError: The check has detected a fault of Celosia.
        CheckFailed: The check itself ended in an error.

    Examples:
        >>> import celosia
        >>> with celosia.Decoder(celosia.models.gpt_path(), config="tiny", length=32) as decoder:
        ...     session = decoder.session()
        ...     text = decoder.vocabulary.text_of(list(session.generate(decoder.vocabulary.tokens_of("The "), 3)))
        >>> len(text), session.length
        (3, 6)
    """

    def __init__(
        self, model: str | Path | onnx.ModelProto, device: str | Device = "functional", *,
        config: str | Path | Config = "pynq", length: int | None = None, chunk: int = DEFAULT_CHUNK, check: bool = True,
        rounding: str = ROUNDINGS[0], threads: int | None = None, progress: Callable[[str], None] | None = None,
        options: Mapping[str, Any] = {},
    ) -> None:  # fmt: skip
        proto = model if isinstance(model, onnx.ModelProto) else read(Path(model))
        self.name = "model" if isinstance(model, onnx.ModelProto) else Path(model).stem
        self.roles, self.vocabulary = find_roles(proto), vocabulary_of(proto)
        proto = decompose_cached_attention(proto)
        self.config = Config.load(config) if isinstance(device, str) else device.config
        self._step = rewrite_to_return_new_rows(proto, self.roles)
        self.length = _sequence_length(length, position_count(proto, self.roles))
        self.chunk = max(1, min(chunk, self.length - 1))
        if isinstance(device, str):
            require_tools(device, proto)
        self._device, self._device_source, self._options = None if isinstance(device, str) else device, device, options
        self._threads, self._say = threads, progress or (lambda stage: None)
        self._compiling: dict[str, Any] = {"check": check, "rounding": rounding}
        self._runtimes: dict[int, ProgramRuntime] = {}
        self._latest: _LatestRun | None = None

    def session(self) -> Session:
        """Begin an empty sequence.

        Several sessions of one Decoder may alternate.

        Returns:
            A Session that has seen no token.
        """
        return Session(self)

    def program(self, steps: int = 1) -> Program:
        """Return the Program that takes `steps` tokens at once, 1 or `chunk`; the first call compiles it."""
        return self._runtime(steps).program

    def run(self, steps: int, inputs: dict[str, Array], session: Session) -> Result:
        """Run the Program for `steps` tokens of `session`.

        The accelerator's memory keeps the caches of the latest run. If that was of this session, only rows that are new
        since are copied to it.
        """
        runtime = self._runtime(steps)
        latest, self._latest = self._latest, None  # after a failed run the memory's contents are unknown
        if (latest is None or latest.runtime is not runtime) and runtime.program.launches:
            runtime.attach(self._open_device())
        changed = None
        if latest is not None and latest.session is session:
            changed = {cache.past: range(latest.seen, session.length) for cache in self.roles.caches}
        result = runtime.run_on(inputs, changed)
        self._latest = _LatestRun(runtime, session, session.length)
        return result

    def compile(self, prompt: int) -> None:
        """Compile now the Programs that a prompt of `prompt` tokens and the tokens after it need.

        Otherwise the first run compiles them.
        """
        for steps in {1, self.chunk} if prompt > 1 else {1}:
            self._runtime(steps)

    def open(self) -> None:
        """Open the device now, if the Programs have launches: the first time, the RTL simulator is built here."""
        if self.program().launches:
            self._open_device()

    def _open_device(self) -> Device:
        """Return the Device, opened at the first call."""
        if self._device is None:
            assert isinstance(self._device_source, str)
            self._device = open_device(self._device_source, self.config, **self._options)
        return self._device

    def _runtime(self, steps: int) -> ProgramRuntime:
        """Return the runtime for `steps` tokens; the first call compiles its Program."""
        if steps not in self._runtimes:
            self._say(f"compiling for {steps} tokens at once" if steps > 1 else "compiling for a token")
            program = compile_model(
                self._step.proto, self.config, shapes=self._input_shapes(steps),
                caches=[cache.past for cache in self.roles.caches], **self._compiling,
            )  # fmt: skip
            program.name = self.name
            if self.vocabulary is not None and len(self.vocabulary.texts) != self._vocabulary_size(program):
                raise ModelError(
                    f"the model has {self._vocabulary_size(program)} tokens, and the vocabulary in its metadata "
                    f"{len(self.vocabulary.texts)}"
                )
            self._runtimes[steps] = ProgramRuntime(program, "functional", self._threads)  # until `run` attaches another
        return self._runtimes[steps]

    @property
    def returns_last(self) -> bool:
        """Whether the Program for several tokens returns logits of the last token only: then a padded run has none."""
        logits = next(output.shape for output in self.program(self.chunk).outputs if output.name == self.roles.logits)
        return logits[1] < self.chunk

    def _vocabulary_size(self, program: Program) -> int:
        """Return the number of tokens that the Program's logits are for."""
        return next(output.shape[-1] for output in program.outputs if output.name == self.roles.logits)

    @property
    def known(self) -> int:
        """Size of the model's vocabulary."""
        return self._vocabulary_size(self.program())

    def _input_shapes(self, steps: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all inputs for a run of `steps` tokens."""
        roles, past = self.roles, self.length - 1
        shapes: dict[str, tuple[int, ...]] = {cache.past: (1, cache.heads, past, cache.size) for cache in roles.caches}
        return shapes | {
            name: (1, past + steps if name == roles.mask else steps)
            for name in (roles.tokens, roles.mask, roles.positions) if name
        }  # fmt: skip

    def empty_caches(self) -> dict[str, Array]:
        """Return caches of zeros [1, heads, length - 1, size], by input."""
        return {
            cache.past: np.zeros(
                (1, cache.heads, self.length - 1, cache.size), numpy_dtype(self._step.dtypes[cache.past])
            )
            for cache in self.roles.caches
        }

    def close(self) -> None:
        """Close the device if this Decoder has opened it."""
        if self._device is not None and isinstance(self._device_source, str):
            self._device.close()
        self._device = self._latest = None

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        device = self._device_source if isinstance(self._device_source, str) else type(self._device_source).__name__
        return f"<Decoder {self.name!r} on {device}, Config {self.config.name}: sequences of {self.length} tokens>"


@dataclass(frozen=True)
class _LatestRun:
    """The latest run, whose caches are in device memory. seen: tokens that its session had before it."""

    runtime: ProgramRuntime
    session: Session
    seen: int


class Session:
    """A sequence of tokens that the model has seen, with its caches.

    Attributes:
        decoder: Decoder that runs the model.
        tokens: Numbers of the tokens that the model has seen.
        caches: Arrays [1, heads, length - 1, size] by input; a row for each token.
        logits: Logits [vocabulary] of the next token; empty before the first token.
        usage: Cycles and bytes of the session's runs.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.tokens: list[int] = []
        self.usage = SessionUsage(decoder.config)
        self.caches = decoder.empty_caches()
        self.logits: Array = np.zeros(0, np.float32)

    @property
    def length(self) -> int:
        """Number of tokens that the model has seen."""
        return len(self.tokens)

    def check(self, tokens: Sequence[int]) -> None:
        """Raise InputError where `tokens` is empty, does not fit into the sequence, or has a token out of range."""
        vocabulary_size = self.decoder.known
        if not tokens:
            raise InputError("there are no tokens; give at least one")
        for token in tokens:
            if not 0 <= token < vocabulary_size:
                raise InputError(f"token {token} is none of the model's, which are 0 to {vocabulary_size - 1}")
        if self.length + len(tokens) > self.decoder.length:
            raise InputError(
                f"{self.length + len(tokens)} tokens are more than a sequence of {self.decoder.length} has room for; "
                "give fewer, or a larger length"
            )

    def feed(self, tokens: Sequence[int]) -> Array:
        """Append tokens to the sequence, and compute the logits of the next token.

        Whole chunks run at once; the rest is padded to a chunk. If the model returns only the last token's logits, the
        rest runs token by token.

        Args:
            tokens: Numbers of tokens, of any integer type; at least one.

        Returns:
            Logits [vocabulary] of the next token.

        Raises:
            InputError: There is no token, one is out of range or no integer, or the sequence has no room. The sequence
                is then as it was.
            DeviceError: A run ended in an error status, or did not end in time.
        """
        tokens, decoder = _to_ints(tokens), self.decoder
        self.check(tokens)
        while len(tokens) > 1 and (len(tokens) >= decoder.chunk or not decoder.returns_last):
            self._run_padded(tokens[: decoder.chunk], decoder.chunk)
            tokens = tokens[decoder.chunk :]
        for token in tokens:
            self._run_padded([token], 1)
        return self.logits

    def generate(
        self, prompt: Sequence[int], count: int, choose: Callable[[Array], int] | None = None
    ) -> Iterator[int]:
        """Yield the tokens that the model appends to a prompt.

        Args:
            prompt: Numbers of at least one token, or none to continue the sequence.
            count: Number of tokens to yield; they are fewer if the sequence has no room for them.
            choose: Function that returns the token for logits [vocabulary]. None: the token with the largest logit.

        Yields:
            The number of a token, as soon as it is computed.

        Raises:
            InputError: A token is out of range or no integer, or the sequence has no room for the prompt.
            DeviceError: A run ended in an error status, or did not end in time.
        """
        choose = choose or Sampler()
        logits = self.feed(prompt) if len(prompt) or not self.length else self.logits
        for number in range(count):
            token = choose(logits)
            yield token
            if number == count - 1 or self.length == self.decoder.length:
                return
            logits = self.feed([token])

    def _run_padded(self, tokens: list[int], steps: int) -> None:
        """Run the Program for `steps` tokens with fewer or as many `tokens`; masked padding fills up.

        Update the caches.
        """
        decoder, roles, count, before = self.decoder, self.decoder.roles, len(tokens), self.length
        seen = mask_of_seen_tokens(decoder.length - 1, before, steps, count)
        padded_tokens = np.array([tokens + tokens[-1:] * (steps - count)])
        positions = np.minimum(before + np.arange(steps), decoder.length - 1)[None]
        role_inputs = {roles.tokens: padded_tokens, roles.mask: seen[None], roles.positions: positions}
        inputs = {name: array.astype(roles.kinds[name]) for name, array in role_inputs.items() if name}
        result = decoder.run(steps, inputs | self.caches, self)
        for cache in roles.caches:
            new_rows = result.outputs[cache.present][:, :, :count]
            cache_rows = self.caches[cache.past][:, :, before : before + count]  # the last token of all needs no row
            cache_rows[...] = new_rows[:, :, : cache_rows.shape[CACHE_AXIS]]
        self.tokens += tokens
        self.usage.add(steps, result.report, count)
        logits = result.outputs[roles.logits][0]
        self.logits = logits[min(count, len(logits)) - 1]


def mask_of_seen_tokens(past: int, before: int, steps: int, count: int) -> NDArray[np.bool_]:
    """Return the attention mask [past + steps] of a cache of `past` rows followed by `steps` new tokens.

    It is true for the first `before` rows, which hold tokens, and for the first `count` new tokens; others are padding.
    """
    indices = np.arange(past + steps)
    mask: NDArray[np.bool_] = (indices < before) | ((indices >= past) & (indices < past + count))
    return mask


def _to_ints(tokens: Sequence[int]) -> list[int]:
    """Return `tokens`, of any integer type, as ints. InputError for other types."""
    numbers = []
    for token in tokens:
        try:
            numbers.append(index(token))
        except TypeError:
            raise InputError(f"token {token!r} is no whole number; a vocabulary makes tokens of text") from None
    return numbers


def _sequence_length(requested: int | None, limit: int | None) -> int:
    """Return the length of sequences: the user's, or the default within the model's `limit`.

    InputError where it is less than 2, or longer than the model's positions.
    """
    length = min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH) if requested is None else requested
    if length < 2:
        raise InputError(f"a sequence of {length} tokens is none; take 2 or more")
    if limit is not None and length > limit:
        raise InputError(f"the model has positions for {limit} tokens, not for {length}; take at most {limit}")
    return length


def position_count(proto: onnx.ModelProto, roles: Roles) -> int | None:
    """Return the number of rows of the model's table of positions; None where it looks up none: any position works."""
    tables = {tensor.name: tensor.dims[0] for tensor in proto.graph.initializer if len(tensor.dims) == 2}
    counted = {roles.mask}  # the mask, and tensors of positions that are counted in it
    aliases = {roles.positions} - {""}  # tensors that hold the positions of new tokens
    for node in proto.graph.node:
        if (op_spec(node.op_type).view or node.op_type == "Cast") and node.input[0] in aliases:
            aliases.update(node.output)
        if node.op_type in (*COUNTING_OPERATORS, "Cast") and node.input[0] in counted:
            counted.update(node.output)
            aliases.update(node.output if node.op_type == "Slice" else ())
        table_input = TABLE_LOOKUPS.get(node.op_type)
        if table_input is not None and node.input[1] in aliases and node.input[table_input] in tables:
            return int(tables[node.input[table_input]])
    return None
