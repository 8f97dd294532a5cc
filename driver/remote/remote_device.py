"""A board's accelerator as a Device: each call is a message over ssh, which driver/remote/serve.py answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.driver.remote.deploy import Remote, skip_to_mark
from celosia.driver.remote.runner import pack_runner
from celosia.driver.remote.serve import AnswerError, pack, parse_counters, parse_memory, raise_error, unpack
from celosia.driver.remote.ssh import SshError, connect
from celosia.hw.spec.config import Config
from celosia.sim.device import Counters, DeviceError


def open_remote(url: str, config: Config, **options: Any) -> RemoteDevice:
    """Open the accelerator of ssh://USER@BOARD, or the functional simulator there for ssh://USER@BOARD/functional.

    Closing the device also ends the connection. SshError, DeviceError: see RemoteDevice; SshError for an invalid `url`.
    """
    scheme, _, rest = url.partition("://")
    host, _, kind = rest.partition("/")
    if kind not in ("", "board", "functional"):
        raise SshError(f"there is no device {kind!r} on a board; take {scheme}://{host}, or /functional after it")
    with ExitStack() as stack:
        connection = stack.enter_context(connect(host))
        device = RemoteDevice(Remote(connection), config, kind or "board", options)
        device.ending = stack.pop_all()
    return device


class RemoteDevice:
    """Device on the machine of `remote`, in a process there that ends with `close`; see sim.device.Device.

    device: its name there, "board" or "functional". options: those of `open_device`. SshError without a connection, or
    where it is lost; DeviceError where the machine has no such device.
    """

    def __init__(self, remote: Remote, config: Config, device: str = "board", options: Mapping[str, Any] = {}) -> None:
        self.config, self._remote = config, remote
        self._clone = partial(RemoteDevice, remote, config, device, options)
        file = pack_runner()
        board = remote.status(file)
        if board.numpy is None:
            raise DeviceError(f"{remote.connection.name} has no numpy; pip3 install numpy there")
        remote.install(board, file)
        self._channel = remote.start(file)
        head = {"config": config.to_dict(), "device": device, "options": dict(options)}
        with self._raise_ssh_errors():
            self.memory_model = parse_memory(self._send_and_read(pack(head, {}), first=True)[0])

    abandoned = False
    ending: ExitStack | None = None
    """Contexts to close with the device, such as the connection that was made for it."""

    def clone_shared(self) -> RemoteDevice:
        """Return a device for the same accelerator, with another process there; see sim.device.SharedDevice."""
        return self._clone()

    def allocate(self, size: int) -> None:
        """Allocate memory of the device, see Device."""
        self._call("allocate", {"size": size})

    def write(self, addr: int, data: NDArray[np.uint8]) -> None:
        """Write to memory of the device, see Device."""
        self._call("write", {"addr": addr}, {"data": np.ascontiguousarray(data)})

    def read(self, addr: int, size: int) -> NDArray[np.uint8]:
        """Read `size` bytes at `addr`. SshError where the answer has another size."""
        with self._raise_ssh_errors():
            data = self._call("read", {"addr": addr, "size": size})[1].get("data")
            if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (size,):
                raise AnswerError(f"it does not give the {size} bytes of its memory that were asked for")
            return data

    def run(self, instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        """Run instructions on the device, see Device. DeviceError, SshError."""
        values = {"instr_addr": instr_addr, "count": count, "timeout_cycles": timeout_cycles, "trace": trace}
        with self._raise_ssh_errors():
            counters = parse_counters(self._call("run", values)[0])
            counters.check(count)
            return counters

    def close(self) -> None:
        """End the process there: the end of its input ends it."""
        if self.ending is not None:
            self.ending.callback(self._end_process)
            self.ending.close()
        else:
            self._end_process()

    def _end_process(self) -> None:
        """End the process there by closing its input."""
        self._channel.close()

    @contextmanager
    def _raise_ssh_errors(self) -> Iterator[None]:
        """Raise SshError where there is no answer, or an invalid one, and close the device, which is unusable then."""
        try:
            with self._remote.raise_ssh_errors(self._channel):
                yield
        except SshError:
            self.close()
            raise

    def _call(
        self, method: str, values: Mapping[str, int], arrays: Mapping[str, Any] = {}
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Call a method of the device there, and return the answer: (head, arrays). DeviceError, SshError."""
        return self._send_and_read(
            pack({"call": method, **{name: int(value) for name, value in values.items()}}, arrays)
        )

    def _send_and_read(self, message: bytes, first: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """Send a message and return the answer: (head, arrays). DeviceError, SshError.

        first: the answer is the first one, behind what a login shell prints.
        """
        with self._raise_ssh_errors():
            self._channel.write(message)
            if first:
                skip_to_mark(self._channel)
            head, arrays = unpack(self._channel)
            raise_error(head, DeviceError)
            return head, arrays
