"""`celosia deploy`, `flash` and `rehearse`: Programs and bitstreams on boards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import DIFFERS, command, say

Bit = Annotated[
    Path,
    typer.Argument(metavar="FILE.bit", help="The bitstream. Its .hwh file and its manifest are in the same folder."),
]
BoardAddress = Annotated[str, typer.Option("--host", metavar="USER@BOARD[:PORT]", help="Address of the board for ssh.")]
MaybeBoardAddress = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="USER@BOARD[:PORT]", help="Address of the board for ssh. Default: this machine is the board."
    ),
]


@command
def deploy(
    model: opt.Model,
    board_address: BoardAddress,
    config: opt.MaybeConfig = None,
    sudo: opt.Sudo = False,
    shape: opt.ShapeOption = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
) -> None:
    """Copy a Program and its runtime to a board over ssh, and report what the board lacks.

    \b
    Examples:
      celosia deploy resnet18.celosia --host root@pynq
      celosia run resnet18.celosia -i image.npy --device ssh://root@pynq
    """
    from celosia.driver.remote import deploy as deployment
    from celosia.driver.remote.runner import pack_runner
    from celosia.driver.remote.ssh import connect

    common.check_source(model)
    shapes = common.parse_shapes(shape)
    with common.progress_stages(quiet) as stages, stages.paused(), connect(board_address) as connection:
        remote = deployment.Remote(connection, sudo=sudo)
        stages(f"connected to {board_address}")
        program = common.load_or_compile_for_board(model, config, stages, remote, no_check, shapes)
        stages(f"copying to {board_address}")
        files = pack_runner(), deployment.pack_program(program)
        board = remote.status(*files)
        sent = remote.install(board, *files)
        deployment.require_board(board, program, "board", board_address)
    if not quiet:
        python = ".".join(map(str, board.python))
        say(f"{board_address}: {board.machine}, Python {python}, numpy {board.numpy}, pynq {board.pynq}")
        say(f"{deployment.FOLDER}: {', '.join(file.name for file in files)}; {sent:,} bytes sent")


@command
def flash(
    bit: Bit,
    board: opt.Board,
    board_address: MaybeBoardAddress = None,
    sudo: opt.Sudo = False,
    quiet: opt.Quiet = False,
) -> None:
    """Load a bitstream into a board's FPGA, and check that its accelerator answers.

    Do not load it over JTAG: on a Zynq that does not set the clocks of the logic.

    \b
    Examples:
      celosia flash build/pynq-z2/pynq-z2-pynq.bit --board pynq-z2 --host root@pynq
    """
    from celosia.driver.board.flash import check_bitstream, load
    from celosia.driver.remote import deploy as deployment
    from celosia.driver.remote.ssh import connect
    from celosia.hw.boards.boards import find_board
    from celosia.hw.spec.config import Config

    target_board = find_board(board)
    manifest = check_bitstream(bit, target_board.name, target_board.part)
    if board_address is None:
        clock = load(str(bit), manifest)
    else:
        with common.progress_stages(quiet) as stages, stages.paused(), connect(board_address) as connection:
            stages(f"loading on {board_address}")
            clock = deployment.flash(deployment.Remote(connection, sudo=sudo), bit, manifest)
    if not quiet:
        design = f"{Config.from_dict(manifest.config).name} ({manifest.identity:08x}) at {clock:g} MHz"
        board_name = board_address or "this board"
        say(f"{board_name}: {bit.name} is loaded, accelerator {design} answers at {manifest.address:#x}")


Fpga = Annotated[
    str,
    opt.one_of(
        "--device",
        names=("functional", "rtl"),
        help="Simulator in place of the FPGA: numpy, or the RTL under Verilator.",
    ),
]


@command
def rehearse(
    model: opt.OnnxModel,
    board: opt.Board,
    inputs: opt.Inputs = None,
    config: opt.BoardConfig = None,
    device: Fpga = "functional",
    shape: opt.ShapeOption = None,
    mean: opt.Mean = None,
    std: opt.Std = None,
    quiet: opt.Quiet = False,
) -> None:
    """Compile, deploy, flash and run a model on a board that is simulated on this machine, step by step.

    Files, checks and processes are those of a real board, without ssh. Inputs without a file get random values. The
    exit code is 7 if an output differs from that of the functional simulator without a board.

    \b
    Examples:
      celosia rehearse resnet18.onnx --board pynq-z2
      celosia rehearse resnet18.onnx --board pynq-z2 --device rtl -i image.npy
    """
    from celosia.driver.rehearse import rehearse as rehearsed
    from celosia.driver.show.rehearse_summary import steps
    from celosia.hw.boards.boards import find_board
    from celosia.hw.spec.config import Config

    common.check_source(model)
    target_board = find_board(board)
    with common.progress_stages(quiet) as stages:
        values = common.read_inputs(model, inputs, True, common.image_conversion(mean, std, quiet))
        accelerator = None if config is None else Config.load(config)
        shapes = common.parse_shapes(shape)
        rehearsal = rehearsed(model, target_board, values, accelerator, device, shapes, stages, board)
    if not quiet:
        common.show(steps(rehearsal))
    if rehearsal.different:
        say(f"celosia: outputs differ from those here: {', '.join(rehearsal.different)}", error=True)
        raise typer.Exit(DIFFERS)
