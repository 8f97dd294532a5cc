"""The accelerator of a board as a Device here: each call is a message over ssh (driver/remote/serve.py answers)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.driver.remote.deploy import Remote, skip_to_mark
from celosia.driver.remote.runner import runner
from celosia.driver.remote.serve import ERRORS, load_counters, pack, unpack
from celosia.driver.remote.ssh import SshError, connected
from celosia.hw.config import Config
from celosia.sim.device import Counters, DeviceError


def open_remote(url: str, config: Config, **options: Any) -> RemoteDevice:
    """The accelerator of ssh://USER@BOARD, or numpy there with /functional behind it. Its connection ends with it.

    SshError, DeviceError: as of RemoteDevice, and SshError where `url` names no such device.
    """
    scheme, _, rest = url.partition("://")
    place, _, kind = rest.partition("/")
    if kind not in ("", "board", "functional"):
        raise SshError(f"there is no device {kind!r} on a board; take {scheme}://{place}, or /functional after it")
    with ExitStack() as stack:
        connection = stack.enter_context(connected(place))
        device = RemoteDevice(Remote(connection), config, kind or "board", options)
        device.ending = stack.pop_all()
    return device


class RemoteDevice:
    """A Device on the machine of `remote`, which it holds until `close`; see sim.device.Device.

    device: its name there, "board" or "functional"; options: as `open_device` takes them. SshError where there is no
    connection, or it is lost; DeviceError where the machine has no such device.
    """

    def __init__(self, remote: Remote, config: Config, device: str = "board", options: Mapping[str, Any] = {}) -> None:
        self.config, self._connection = config, remote.connection
        self._beside = partial(RemoteDevice, remote, config, device, options)
        file = runner()
        board = remote.status(file)
        if board.numpy is None:
            raise DeviceError(f"{remote.connection.name} has no numpy; pip3 install numpy there")
        remote.install(board, file)
        self._process = remote.start(file)
        head = {"config": config.to_dict(), "device": device, "options": dict(options)}
        self.memory_model: str | None = self._answer(pack(head, {}), first=True)[0]["memory_model"]

    abandoned = False
    ending: ExitStack | None = None
    """What ends with the device."""

    def beside(self) -> RemoteDevice:
        """The same accelerator, with another process there; see sim.device.Shared."""
        return self._beside()

    def allocate(self, size: int) -> None:
        self._call("allocate", {"size": size})

    def write(self, addr: int, data: NDArray[np.uint8]) -> None:
        self._call("write", {"addr": addr}, {"data": np.ascontiguousarray(data)})

    def read(self, addr: int, size: int) -> NDArray[np.uint8]:
        data: NDArray[np.uint8] = self._call("read", {"addr": addr, "size": size})[1]["data"]
        return data

    def run(self, instr_addr: int, count: int, timeout_cycles: int, trace: bool = False) -> Counters:
        """See Device."""
        values = {"instr_addr": instr_addr, "count": count, "timeout_cycles": timeout_cycles, "trace": trace}
        return load_counters(self._call("run", values)[0])

    def close(self) -> None:
        """End the process there: the end of its input ends it."""
        if self.ending is not None:
            self.ending.callback(self._end)
            self.ending.close()
        else:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError, AttributeError):
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()

    def _call(
        self, what: str, values: Mapping[str, int], arrays: Mapping[str, Any] = {}
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._answer(pack({"call": what, **{name: int(each) for name, each in values.items()}}, arrays))

    def _answer(self, message: bytes, first: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(message)
            process.stdin.flush()
            if first:
                skip_to_mark(process.stdout)
            head, arrays = unpack(process.stdout)
        except (OSError, EOFError, ValueError):
            lost = self._connection.ended(process)
            self.close()
            raise lost from None
        if "error" in head:
            raise ERRORS.get(head["kind"], DeviceError)(head["error"])
        return head, arrays
