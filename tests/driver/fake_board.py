"""A board for tests of deployment: an ssh server in this process.

Its Python has a package `pynq` that is the Verilated accelerator. All commands run there as on a board.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncssh

LOCKS = """
# A board of its own, with locks of its own.
import os, pathlib
try:
    import celosia.driver.board.board_device
    celosia.driver.board.board_device.LOCKS = pathlib.Path(os.environ["HOME"])
except ImportError:  # what asks for the board's state has no runner
    pass
"""
PYNQ = '''
"""pynq on a board whose FPGA is the library CELOSIA_RTL: registers at ADDRESS, memory at BASE."""
import ctypes, os
import numpy as np
__version__ = "0 (simulated)"
ADDRESS, BASE, SIZE = 0x43C00000, 0x10000000, 1 << 22
lib = ctypes.CDLL(os.environ["CELOSIA_RTL"])
lib.celosia_create.restype = ctypes.c_void_p
handle = ctypes.c_void_p(lib.celosia_create(ctypes.c_uint64(1)))
memory = np.zeros(SIZE + 4096, np.uint8)
model = (ctypes.c_uint64 * 13)(40, 40, 8, 780, 16, 32, 0, 0, 0, 0, 0, 2**64 - 1, 2**64 - 1)
lib.celosia_memory(handle, ctypes.c_void_p(memory.ctypes.data), ctypes.c_uint64(BASE), ctypes.c_uint64(SIZE), model)
lib.celosia_reset(handle)
lib.celosia_begin(handle, 0)

class MMIO:
    def __init__(self, address, length):
        assert address == ADDRESS, hex(address)
    def read(self, offset):
        lib.celosia_run(handle, ctypes.c_uint64(500))
        value = ctypes.c_uint32()
        assert lib.celosia_read_register(handle, offset, ctypes.byref(value))
        return value.value
    def write(self, offset, value):
        assert lib.celosia_write_register(handle, offset, ctypes.c_uint32(value))

class Clocks:
    fclk0_mhz = 0

class Overlay:
    def __init__(self, path):
        if not os.path.exists(path.replace(".bit", ".hwh")):
            raise FileNotFoundError(path)

class Buffer(np.ndarray):
    physical_address = BASE
    def flush(self): pass
    def invalidate(self): pass
    def freebuffer(self): pass

def allocate(shape, dtype, cacheable):
    if shape[0] > SIZE:
        raise RuntimeError("Failed to allocate memory")
    return memory[: shape[0]].view(Buffer)
'''
PYTHON = """#!/bin/sh
# Python as on a board: numpy and what is in {site}, nothing else of this machine.
PYTHONPATH={site} exec {python} -S "$@"
"""


class FakeBoard:
    """An ssh server that acts as a board.

    home: the board's home folder. wrap: a function that changes each command line before it is executed.
    """

    def __init__(self, folder: Path, library: Path | None) -> None:
        import numpy

        self.home, bin_, site = folder / "home", folder / "bin", folder / "site"
        for directory in (self.home, bin_, site):
            directory.mkdir()
        (site / "numpy").symlink_to(Path(numpy.__file__).parent)
        for libraries in Path(numpy.__file__).parent.parent.glob("numpy.libs"):
            (site / "numpy.libs").symlink_to(libraries)
        if library is not None:
            (site / "pynq.py").write_text(PYNQ + LOCKS)
        self.python = bin_ / "python3"
        self.python.write_text(PYTHON.format(site=shlex.quote(str(site)), python=shlex.quote(sys.executable)))
        self.python.chmod(0o755)
        self.environment = {
            "HOME": str(self.home), "PATH": "/usr/bin:/bin", "CELOSIA_RTL": str(library or ""), "ENV": "",
        }  # fmt: skip
        # A PYNQ image sets up its Python in a file that only bash can read.
        (self.home / "activate").write_text(f"PATH={shlex.quote(str(bin_))}:/usr/bin:/bin\n")
        (self.home / ".profile").write_text("PATH=/usr/bin:/bin; source ~/activate; echo Welcome to the board\n")
        self.commands: list[str] = []
        self.wrap: Callable[[str], str] = lambda command: command
        self.cut_after: int | None = None
        """The number of bytes from the client after which the connection is lost."""
        self.limits: Callable[[], None] | None = None
        self.threads = ThreadPoolExecutor(32)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port = 0
        self.connection: Any = None
        """The connection of the last client."""

    # The server ------------------------------------------------------------------------------------------------

    async def handle(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """Execute the command of a client."""
        command = process.command or ""
        self.commands.append(command)
        self.connection = process.channel.get_connection()
        child = subprocess.Popen(
            ["sh", "-c", self.wrap(command)], env=self.environment, cwd=self.home, preexec_fn=self.limits,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(child)
        if self.cut_after is not None:
            await self._cut(process, child)
            return
        feeding = asyncio.create_task(self._feed(process, child))
        await asyncio.gather(self._pass_on(child.stdout, process.stdout), self._pass_on(child.stderr, process.stderr))
        code = await asyncio.get_running_loop().run_in_executor(self.threads, child.wait)
        feeding.cancel()
        process.exit(code)

    async def _feed(self, process: asyncssh.SSHServerProcess[bytes], child: subprocess.Popen[bytes]) -> None:
        """Copy the client's input to the child process."""
        assert child.stdin is not None
        with contextlib.suppress(OSError, asyncssh.Error):
            while data := await process.stdin.read(1 << 14):
                await asyncio.get_running_loop().run_in_executor(self.threads, os.write, child.stdin.fileno(), data)
        with contextlib.suppress(OSError):
            child.stdin.close()

    async def _pass_on(self, pipe: Any, out: asyncssh.SSHWriter[bytes]) -> None:
        """Copy a pipe of the child process to the client."""
        with contextlib.suppress(OSError, asyncssh.Error):
            while data := await asyncio.get_running_loop().run_in_executor(self.threads, pipe.read1, 1 << 14):
                out.write(data)
                await out.drain()

    async def _cut(self, process: asyncssh.SSHServerProcess[bytes], child: subprocess.Popen[bytes]) -> None:
        """Abort the connection after `cut_after` bytes."""
        assert self.cut_after is not None and child.stdin is not None
        left = self.cut_after
        while left > 0:
            data = await process.stdin.read(min(left, 1 << 14))
            left -= len(data)
            child.stdin.write(data)
            child.stdin.flush()
        process.channel.get_connection().abort()
        child.stdin.close()


@contextlib.contextmanager
def serving(board: FakeBoard, folder: Path, monkeypatch: Any) -> Iterator[FakeBoard]:
    """Run the board as host `board` of an ssh client whose settings are in `folder`."""
    key, host_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    key.write_private_key(str(folder / "key"))
    os.chmod(folder / "key", 0o600)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1", 0, server_host_keys=[host_key], process_factory=board.handle, encoding=None,
            authorized_client_keys=asyncssh.import_authorized_keys(key.export_public_key().decode()),
        )  # fmt: skip

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    board.port = server.sockets[0].getsockname()[1]
    public = host_key.export_public_key().decode().strip()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{board.port} {public}\n")
    (folder / "config").write_text(
        f"Host board\n HostName 127.0.0.1\n Port {board.port}\n User xilinx\n IdentityFile {folder}/key\n"
        f" IdentitiesOnly yes\n UserKnownHostsFile {folder}/known_hosts\n StrictHostKeyChecking yes\n"
    )
    # OpenSSH finds the user's settings by the password file, not by HOME.
    (folder / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {shlex.quote(str(folder))}/config "$@"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    try:
        yield board
    finally:
        for child in board.processes:
            child.kill()
            child.wait()

        async def stop() -> None:
            server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        board.threads.shutdown(wait=False)
