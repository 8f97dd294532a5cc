"""`celosia deploy` and `flash`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from celosia.driver.cli import common
from celosia.driver.cli import options as opt
from celosia.driver.cli.errors import command, say

Bit = Annotated[Path, typer.Argument(metavar="FILE.bit", help="The bitstream; its .hwh and manifest lie beside it.")]
Host = Annotated[str, typer.Option("--host", metavar="USER@BOARD", help="The board, as ssh knows it.")]
MaybeHost = Annotated[
    str | None, typer.Option("--host", metavar="USER@BOARD", help="The board, as ssh knows it; by default this one.")
]


@command
def deploy(
    model: opt.Model,
    host: Host,
    config: opt.MaybeConfig = None,
    sudo: opt.Sudo = False,
    shape: opt.ShapeOption = None,
    no_check: opt.NoCheck = False,
    quiet: opt.Quiet = False,
) -> None:
    """Put a Program and what runs it on a board, over ssh, and say what the board lacks.

    \b
    Examples:
      celosia deploy resnet18.celosia --host root@pynq
      celosia run resnet18.celosia -i image.npy --device ssh://root@pynq
    """
    from celosia.driver.remote import deploy as deployment
    from celosia.driver.remote.runner import runner
    from celosia.driver.remote.ssh import connected

    common.check_source(model)
    shapes = common.shapes_of(shape)
    with common.progress_stages(quiet) as stages, stages.paused(), connected(host) as connection:
        remote = deployment.Remote(connection, sudo=sudo)
        stages(f"connected to {host}")
        program = common.program_there(model, config, stages, remote, no_check, shapes)
        stages(f"copying to {host}")
        files = runner(), deployment.program_file(program)
        board = remote.status(*files)
        sent = remote.install(board, *files)
        deployment.require(board, program, "board", host)
    if not quiet:
        python = ".".join(map(str, board.python))
        say(f"{host}: {board.machine}, Python {python}, numpy {board.numpy}, pynq {board.pynq}")
        say(f"{deployment.FOLDER}: {', '.join(file.name for file in files)}; {sent:,} bytes sent")


@command
def flash(
    bit: Bit,
    board: opt.Board,
    host: MaybeHost = None,
    sudo: opt.Sudo = False,
    quiet: opt.Quiet = False,
) -> None:
    """Load a bitstream into a board's FPGA, and check that its accelerator answers.

    JTAG is no way to do it: on a Zynq it leaves the clocks of the logic as they were.

    \b
    Examples:
      celosia flash build/pynq-z2/pynq-z2-pynq.bit --board pynq-z2 --host root@pynq
    """
    from celosia.driver.board.flash import load, prepare
    from celosia.driver.remote import deploy as deployment
    from celosia.driver.remote.ssh import connected
    from celosia.hw.config import Config
    from celosia.sim.boards import find_board

    place = find_board(board)
    manifest = prepare(bit, place.name, place.part)
    if host is None:
        clock = load(str(bit), manifest)
    else:
        with common.progress_stages(quiet) as stages, stages.paused(), connected(host) as connection:
            stages(f"loading on {host}")
            clock = deployment.flash(deployment.Remote(connection, sudo=sudo), bit, manifest)
    if not quiet:
        what = f"{Config.from_dict(manifest.config).name} ({manifest.identity:08x}) at {clock:g} MHz"
        say(f"{host or 'this board'}: {bit.name} is loaded, accelerator {what} answers at {manifest.address:#x}")
