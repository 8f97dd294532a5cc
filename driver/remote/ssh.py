"""Run commands on another machine with the system's OpenSSH client, and the user's keys, agent and settings."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from celosia import tools
from celosia.compiler.program.host.op import clip_sentence
from celosia.driver.remote.channel import CommandChannel
from celosia.plain import Sentence, printable
from celosia.sim.devices import SSH_PREFIX

PATTERN = re.compile(r"(?:[\w.+-]+@)?[\w.:%\[\]-]+")
"""Pattern of USER@HOST or HOST."""
CONNECT_SECONDS = 15
"""Limit of the time to connect."""
LOGIN_SECONDS = 180
"""Limit of the time to log in, in which a user may type a password."""
SIGKILL, SIGBUS = 9, 7
"""Numbers of these signals on Linux, which boards run."""
UNREACHABLE = "timed out", "Connection refused", "No route", "unreachable", "resolve hostname"
"""Parts of ssh's messages where a machine cannot be reached."""


class SshError(Sentence, RuntimeError):
    """The other machine cannot be reached, refuses, or has gone; the message says which, and what to do."""


def ssh_destination(text: str) -> list[str]:
    """Return ssh's arguments for `user@host`, `user@host:port`, or `ssh://user@host:port`. SshError for other text.

    >>> ssh_destination("ssh://xilinx@pynq:2222")
    ['-p', '2222', 'xilinx@pynq']
    """
    try:
        parts = urlsplit(text if text.startswith(SSH_PREFIX) else SSH_PREFIX + text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    user = f"{parts.username}@" if parts.username else ""
    has_more = parts.path.strip("/") or parts.query or parts.fragment or parts.password is not None
    if not host or has_more or host.startswith("-") or user.startswith("-") or not PATTERN.fullmatch(f"{user}{host}"):
        raise SshError(f"{text!r} names no machine; write USER@HOST, or ssh://USER@HOST:PORT")
    return [*(["-p", str(port)] if port else []), f"{user}{host}"]


class Connection:
    """An authenticated connection, on which `start` runs commands.

    name: the machine, as the user wrote it. address: ssh's arguments for it. options: further arguments of ssh.
    """

    def __init__(self, name: str, address: list[str], options: tuple[str, ...]) -> None:
        self.name, self._where, self._options = name, address, options

    def start(self, command: str) -> CommandChannel:
        """Start `command`, a line for the shell of the other machine."""
        return CommandChannel(
            subprocess.Popen(
                self._process_arguments(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
        )

    def _process_arguments(self, command: str) -> list[str]:
        """Return the command line that runs `command` there; a rehearsal overrides it to run on this machine."""
        return ["ssh", *self._options, "-T", *self._where, command]

    def silence_error(self, channel: CommandChannel) -> SshError:
        """Return the error for a command that has been silent for too long."""
        return SshError(
            f"{self.name} has said nothing for {channel.seconds:g} s; check its power and network, and try again"
        )

    def unclear_error(self, reason: object) -> SshError:
        """Return the error for an unreadable answer. reason: what is wrong with it."""
        return SshError(
            f"{self.name} gave an answer that is none ({clip_sentence(printable(str(reason)))}); check that "
            f"`ssh {self.name}` leads to the right machine, and try again"
        )

    def ended_error(self, channel: CommandChannel) -> SshError:
        """Return the error that explains why the command of `channel` ended without an answer."""
        code = channel.exit_code()
        if code is None:
            return self.unclear_error("it goes on without one")
        errors = channel.errors()
        if code in (255, -1):
            return SshError(
                f"the connection to {self.name} was lost{f' ({_last_line(errors)})' if errors else ''}; try again"
            )
        if errors.startswith("sudo:"):
            return SshError(
                f"sudo on {self.name} asks for a password; log in as root, or allow it without: `sudo visudo`, "
                "USER ALL=(ALL) NOPASSWD: ALL"
            )
        if code == 128 + SIGBUS:
            return SshError(
                f"nothing answers at the accelerator's address on {self.name}; load its bitstream with `celosia "
                "flash`, and check --address"
            )
        if code == 128 + SIGKILL:
            return SshError(f"{self.name} ended the program, which it does where memory is short; end others there")
        if code == 127:
            return SshError(f"{self.name} has no python3; install Python 3.10 or newer there")
        return SshError(f"{self.name} gave no answer (exit code {code}): {_last_line(errors) or 'it said nothing'}")


def _read_text(path: Path) -> str:
    """Return the text of a file; "" if it does not exist."""
    return path.read_bytes().decode(errors="replace").strip() if path.exists() else ""


def _last_line(text: str) -> str:
    """Return the last line of some output, clipped and printable for a message."""
    return clip_sentence(printable(text.splitlines()[-1].strip())) if text else ""


@contextmanager
def connect(name: str, seconds: int = CONNECT_SECONDS) -> Iterator[Connection]:
    """Connect to `name` (see `ssh_destination`) in a context. A password is needed once, as commands share a login.

    seconds: limit of the time to connect. SshError where that fails.
    """
    address = ssh_destination(name)
    ssh = tools.tool_with_command("ssh")
    if tools.find(ssh) is None:
        raise SshError(
            f"boards are reached with the OpenSSH client, and there is no command ssh{tools.too_old(ssh)}; install "
            "openssh-client"
        )
    with tempfile.TemporaryDirectory(prefix="celosia") as folder:
        control, errors_path = Path(folder) / "s", Path(folder) / "errors"
        options = (
            "-M", "-N", "-f", "-S", str(control), "-T", "-o", f"ConnectTimeout={seconds}", "-o",
            "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ControlPersist=no",
        )  # fmt: skip
        with errors_path.open("wb") as errors:
            line = ["ssh", *options, *address]
            try:
                code = subprocess.run(line, stdout=subprocess.DEVNULL, stderr=errors, timeout=LOGIN_SECONDS).returncode
            except subprocess.TimeoutExpired:
                raise SshError(f"the login on {name} takes over {LOGIN_SECONDS} s; check `ssh {name}`") from None
        if code:
            raise SshError(_explain_refusal(name, _read_text(errors_path)))
        try:
            yield Connection(name, address, ("-S", str(control)))
        finally:
            with suppress(subprocess.TimeoutExpired):
                line = ["ssh", "-S", str(control), "-O", "exit", *address]
                subprocess.run(line, capture_output=True, timeout=CONNECT_SECONDS)


@contextmanager
def connect_unattended(name: str, seconds: int = CONNECT_SECONDS) -> Iterator[Connection]:
    """Return a connection for a process without a user, in a context: each command logs in by itself, with keys.

    ssh runs in the process group of this process, so that a signal to the group also ends it. SshError for an invalid
    name.
    """
    options = (
        "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}", "-o", "ServerAliveInterval=5",
        "-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ControlPath=none",
    )  # fmt: skip
    yield Connection(name, ssh_destination(name), options)


def _explain_refusal(name: str, errors: str) -> str:
    """Return a sentence that explains ssh's error output. name: the machine."""
    last = _last_line(errors) or "ssh said nothing"
    if "Host key verification failed" in errors or "IDENTIFICATION HAS CHANGED" in errors:
        return f"the host key of {name} is not the known one; log in once with ssh to check it, then try again ({last})"
    if "Permission denied" in errors or "Too many authentication failures" in errors:
        return f"{name} refused the login; check the user's name, and that `ssh {name}` works ({last})"
    if any(words in errors for words in UNREACHABLE):
        return f"{name} cannot be reached; check its name, power and cable ({last})"
    return f"no connection to {name}: {last}"
