"""`celosia generate`: write text with a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import command
from celosia.driver.cli.runs import Device, Threads, device_options
from celosia.sim.devices import SSH_PREFIX

if TYPE_CHECKING:
    from celosia.driver.generate.decoder import Decoder, Session
    from celosia.driver.show.progress import Stages

Prompt = Annotated[
    str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Start of the text; the model needs a vocabulary.")
]
Ids = Annotated[
    str | None,
    typer.Option(
        "--ids", metavar="1,2,3", help="Start of the text as token numbers. The command then prints token numbers."
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", "-n", min=1, help="Number of tokens to generate.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 takes the likeliest token. 1 draws with the model's probabilities.")
]
Top = Annotated[int, typer.Option("--top", min=0, metavar="K", help="Draw among the K likeliest tokens; 0: among all.")]
DrawSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random numbers that draw tokens.")]
Length = Annotated[
    int | None,
    typer.Option(min=2, help="Largest number of tokens of a sequence with its prompt, for which the cache has room."),
]
TextAlone = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the text.")]


@command
def generate(
    model: opt.OnnxModel,
    prompt: Prompt = None,
    ids: Ids = None,
    tokens: Tokens = 100,
    temperature: Temperature = 0.0,
    top: Top = 0,
    seed: DrawSeed = 0,
    device: Device = "functional",
    config: opt.ConfigOption = "pynq",
    memory: opt.Memory = None,
    length: Length = None,
    rounding: opt.Rounding = None,
    threads: Threads = None,
    sudo: opt.Sudo = False,
    address: opt.Address = None,
    report: opt.Report = None,
    no_check: opt.NoCheck = False,
    quiet: TextAlone = False,
) -> None:
    """Generate text with a decoder: a model with tokens, a mask and a cache as inputs, as optimum and
    onnxruntime-genai export it.

    A prompt needs a vocabulary in the model's metadata, such as that of `celosia.models.gpt_path()`. With a board over
    ssh, only the accelerator's part runs on the board, and the rest on this machine.

    \b
    Examples:
      celosia generate models/gpt_topics_int8.onnx --prompt "The for statement"
      celosia generate models/gpt_topics_int8.onnx --prompt "def " --temperature 0.8 --seed 1 --device rtl
      celosia generate decoder.onnx --ids 1,15043,29892 --tokens 20 --device timed --memory pynq-z2
    """
    from celosia.driver.generate.sampling import Sampler

    if not temperature < float("inf"):
        raise typer.BadParameter(f"--temperature {temperature} is no temperature; take 0, 1 or between")
    choose = Sampler(temperature, top, seed)
    options = device_options(device, memory, address)
    common.check_source(model)
    common.check_destinations([model], report)
    with (
        common.progress_stages(quiet) as stages,
        _open_addressed_device(device, config, sudo, stages, options) as device_or_name,
    ):
        from celosia.driver.generate.decoder import Decoder

        options |= {"progress": stages.cycles, "quiet": quiet} if device == "rtl" else {}
        decoder = Decoder(
            model, device_or_name, config=config, length=length, threads=threads, check=not no_check, progress=stages,
            options=options if device_or_name == device else {}, **common.rounding_option(rounding),
        )  # fmt: skip
        with decoder:
            begin = _parse_prompt(decoder, model, prompt, ids)
            session = decoder.session()
            session.check(begin)
            decoder.compile(len(begin))
            with stages.paused():
                decoder.open()
                _print_tokens(decoder, begin, session.generate(begin, tokens, choose), prompt)
    common.write_json(report, session.usage.report())
    if not quiet:
        _print_summary(session)


def _print_summary(session: Session) -> None:
    """Print tokens, speed and runs of a session."""
    from celosia.driver.show.generate_summary import summary

    common.show(["", summary(session.usage.report(), session.length, session.decoder)])


@contextmanager
def _open_addressed_device(
    device: str, config: str, sudo: bool, stages: Stages, options: dict[str, Any]
) -> Iterator[Any]:
    """Open the Device behind the ssh:// address of a board, in a context; yield other names as they are."""
    if not device.startswith(SSH_PREFIX):
        yield device
        return
    from celosia.driver.remote.deploy import Remote
    from celosia.driver.remote.remote_device import RemoteDevice
    from celosia.driver.remote.ssh import connect
    from celosia.hw.spec.config import Config

    host, _, kind = device.removeprefix(SSH_PREFIX).partition("/")
    with stages.paused(), connect(host) as connection:
        remote = RemoteDevice(Remote(connection, sudo=sudo), Config.load(config), kind or "board", options)
        try:
            yield remote
        finally:
            remote.close()


def _parse_prompt(decoder: Decoder, model: Path, prompt: str | None, ids: str | None) -> list[int]:
    """Return the tokens of --prompt or --ids. InputError, BadParameter."""
    from celosia.compiler.program import InputError

    if (prompt is None) == (ids is None):
        raise typer.BadParameter("give --prompt TEXT, or --ids 1,2,3 for a model without a vocabulary")
    if prompt is not None:
        if decoder.vocabulary is None:
            raise InputError(f"{model} has no vocabulary in its metadata; give the tokens themselves with --ids")
        return decoder.vocabulary.tokens_of(prompt)
    try:
        return [int(text) for text in (ids or "").split(",")]
    except ValueError:
        raise typer.BadParameter(f"--ids {ids} are no whole numbers between commas") from None


def _print_tokens(decoder: Decoder, begin: list[int], new_tokens: Iterator[int], prompt: str | None) -> None:
    """Print tokens as they come: as escaped text, or as numbers."""
    from celosia.plain import printable_lines

    def text(tokens: list[int]) -> str:
        """Return tokens as they are printed."""
        if prompt is None or decoder.vocabulary is None:
            return "".join(f"{token} " for token in tokens)
        return printable_lines(decoder.vocabulary.text_of(tokens))

    typer.echo(text(begin), nl=False)
    for token in new_tokens:
        typer.echo(text([token]), nl=False)
    typer.echo()
