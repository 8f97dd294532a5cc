"""Open the fleet that measures for a search: processes of this machine, a board over ssh, or workers of a Dask cluster.

    python -m celosia.driver.tune.fleet ssh://root@pynq        # measures on a board; see worker_process.py

Nothing here listens on a port: users start a Dask scheduler themselves. Whoever reaches a scheduler or worker may run
any code there, unless it has TLS; so one with a public address and without TLS is refused.
"""

from __future__ import annotations

import argparse
import importlib
import ipaddress
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from celosia.compiler.tune.device_pool import WORKER_ARGUMENTS, ExecutorWorker, Fleet, Measurer, WorkerProcess
from celosia.compiler.tune.device_pool import Job as AnyJob
from celosia.compiler.tune.layer_trial import CostSource, LayerJob, Status, TrialResult, measure
from celosia.compiler.tune.tuner_options import DEADLINE
from celosia.compiler.tune.worker_process import main as serve
from celosia.driver.remote.deploy import Remote
from celosia.driver.remote.remote_device import RemoteDevice
from celosia.driver.remote.ssh import SshError, connect_unattended, ssh_destination
from celosia.driver.workstation.oracle import MissingLibrary
from celosia.hw.spec.config import Config
from celosia.plain import Sentence
from celosia.sim.devices import SSH_PREFIX

RTL = "rtl"
"""Resource of a Dask worker: the number of RTL simulators that it may run at once. Its other resources are
`board:NAME`, 1 for each board that only it is connected to."""
CONNECT_SECONDS = 10
"""Seconds to wait for a Dask scheduler."""


class PoolError(Sentence, ValueError):
    """An invalid pool, or one without a worker for the task. The message says what to do."""


def open_fleet(
    judge: CostSource, jobs: int = 0, pool: str | None = None, deadline: float = DEADLINE, sudo: bool = False,
    base: int | None = None,
) -> Fleet:  # fmt: skip
    """Open the fleet that measures on the device of `judge`.

    jobs: processes of this machine; 0: this one. pool: the workers of dask://HOST:PORT instead, all that have the
    resource (see RTL); dask+tls:// with the certificates of Dask's configuration; dask+insecure:// also where the
    scheduler or a worker has a public address and no TLS. deadline: seconds for each trial. sudo, base: of a board, as
    `celosia run` takes them. Raises PoolError, SshError for an invalid board name, MissingLibrary without Dask.
    """
    resource = resource_of(judge)
    worker_arguments = board_worker_command(judge.device, sudo, base) if judge.board else WORKER_ARGUMENTS
    if pool is not None:
        return _open_dask_fleet(judge, pool, worker_arguments, deadline)
    if judge.board:
        return Fleet([WorkerProcess(str(resource), (sys.executable, *worker_arguments))], deadline)
    return Fleet.local(jobs, deadline)


def resource_of(judge: CostSource) -> str | None:
    """Return the resource that a Dask worker must have to measure for `judge`; None for none.

    SshError for an invalid board name.
    """
    if judge.board:
        return f"board:{ssh_destination(_address_of(judge.device))[-1].rsplit('@')[-1]}"
    return RTL if judge.device == "rtl" else None


# Boards -----------------------------------------------------------------------------------------------------------


def board_worker_command(url: str, sudo: bool = False, base: int | None = None) -> tuple[str, ...]:
    """Return the arguments of Python for a process that measures on a board: this file's `main`."""
    base_option = () if base is None else (f"--base={base}",)
    return ("-m", "celosia.driver.tune.fleet", *(["--sudo"] if sudo else []), *base_option, url)


class BoardMeasurer:
    """Measures layers on a board. Its ssh session is opened at the first job, and again after it was lost.

    A job whose session is lost has the Status LOST. url: of the board. options: of the board's device.
    """

    def __init__(self, url: str, sudo: bool = False, options: Mapping[str, Any] = {}) -> None:
        self.url, self.sudo, self.options = url, sudo, options
        self._devices: dict[Config, RemoteDevice] = {}
        self._session = ExitStack()

    def __call__(self, job: AnyJob) -> TrialResult:
        """Measure a LayerJob."""
        assert isinstance(job, LayerJob)
        try:
            return measure(job, self._open_device)
        except SshError as error:
            self.close()
            return TrialResult(Status.LOST, detail=str(error))

    def _open_device(self, cfg: Config, judge: CostSource) -> RemoteDevice:
        """Return the board's device with the accelerator of `cfg`; it replaces that of another Config."""
        if cfg not in self._devices:
            self.close()  # the board has one accelerator
            connection = self._session.enter_context(connect_unattended(_address_of(self.url)))
            kind = self.url.removeprefix(SSH_PREFIX).partition("/")[2] or "board"
            device = RemoteDevice(Remote(connection, sudo=self.sudo), cfg, kind, self.options)
            self._session.callback(device.close)
            self._devices[cfg] = device
        return self._devices[cfg]

    def close(self) -> None:
        """End the session."""
        self._devices.clear()
        self._session.close()


def _address_of(url: str) -> str:
    """Return USER@BOARD of ssh://USER@BOARD/DEVICE."""
    return url.removeprefix(SSH_PREFIX).partition("/")[0]


# Dask -------------------------------------------------------------------------------------------------------------


def _open_dask_fleet(judge: CostSource, pool: str, worker_arguments: Sequence[str], deadline: float) -> Fleet:
    """Open a fleet with a device for each job that a worker of the pool may run at once. PoolError, MissingLibrary."""
    resource = resource_of(judge)
    _require_private(pool, _scheduler_address(pool))
    client = _connect_to_pool(pool)
    try:
        for address in (client.scheduler_info(n_workers=0)["address"], *_workers_by_address(client)):
            _require_private(pool, address)
    except PoolError:
        client.close()
        raise
    devices: list[Measurer] = []
    for address, worker in _workers_by_address(client).items():
        count = worker["nthreads"] if resource is None else int(worker["resources"].get(resource, 0))
        requirement = {} if resource is None else {"resources": {resource: 1}}
        for number in range(count):
            executor = client.get_executor(workers=[address], pure=False, **requirement)
            name = f"worker {worker['name']}" + (f", {number + 1} of {count}" if count > 1 else "")
            devices.append(ExecutorWorker(name, executor, worker_arguments, partial(_is_connected, client, address)))
    if not devices:
        client.close()
        option = "" if resource is None else f" --resources {resource}=1"
        subject = "no worker" if resource is None else f"no worker with the resource {resource}"
        raise PoolError(
            f"{pool} has {subject}; start one: dask worker {_scheduler_address(pool)}{_listening_options(pool)}{option}"
        )
    return Fleet(devices, deadline, client.close)


def _connect_to_pool(pool: str) -> Any:
    """Return a Dask client of the pool's scheduler. PoolError where none answers, MissingLibrary without Dask."""
    address = _scheduler_address(pool)
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise MissingLibrary(f'{pool} needs Dask, which is not installed: pip install "celosia[fleet]"') from None
    try:
        return distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except OSError:
        port = address.rsplit(":")[-1]
        command = f"dask scheduler{_listening_options(pool)} --port {port}"
        raise PoolError(f"no scheduler answers at {pool}; start one: {command}") from None


def _scheduler_address(pool: str) -> str:
    """Return Dask's own form of a pool's address: tcp://HOST:PORT for dask://HOST:PORT. PoolError for other texts."""
    url = urlsplit(pool)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if url.scheme not in SCHEMES or not host or not port or url.path.strip("/"):
        raise PoolError(f"{pool!r} is no pool; write dask://HOST:PORT, or dask+tls://HOST:PORT")
    return f"{SCHEMES[url.scheme]}://{f'[{host}]' if ':' in host else host}:{port}"


def _listening_options(pool: str) -> str:
    """Return options for `dask scheduler` and `dask worker`, without which they listen on all interfaces, to anyone.

    >>> _listening_options("dask://127.0.0.1:8786"), _listening_options("dask+tls://10.0.0.5:8786")
    (' --host 127.0.0.1', ' --protocol tls')
    """
    host = urlsplit(pool).hostname
    if pool.startswith("dask+tls:"):
        return " --protocol tls"
    return f" --host {host}" if host in LOCAL else " --host ITS_PRIVATE_ADDRESS"


LOCAL = ("127.0.0.1", "::1", "localhost")
"""Names of this machine."""
SCHEMES = {"dask": "tcp", "dask+insecure": "tcp", "dask+tls": "tls"}
"""Dask's schemes of addresses, by those of a pool."""


def allow_any_interface(pool: str | None) -> str | None:
    """Return the pool's address with the scheme that allows public addresses without TLS (`--insecure-pool`)."""
    return None if pool is None else pool.replace("dask://", "dask+insecure://", 1)


def _require_private(pool: str, address: str) -> None:
    """Raise PoolError where `address` is public and without TLS, so that anybody may run code there."""
    if pool.startswith("dask+insecure:") or not address.startswith("tcp:"):
        return
    host, port = urlsplit(address).hostname, urlsplit(address).port
    try:
        addresses = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, port)}
    except OSError:
        return  # the name is unknown, so connecting will fail
    public = [address for address in sorted(addresses) if not ipaddress.ip_address(address).is_private]
    if public:
        raise PoolError(
            f"{pool}: {public[0]} is a public address, without TLS, and Dask runs what anybody sends there; start its "
            "scheduler and workers with --host in a private network, or with TLS and write dask+tls://HOST:PORT; "
            "--insecure-pool does it nevertheless"
        )


def _workers_by_address(client: Any) -> dict[str, Any]:
    """Return Dask's data on each worker of the pool, by address."""
    workers: dict[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
    return workers


def _is_connected(client: Any, address: str) -> bool:
    """Whether the worker at `address` is still part of the pool."""
    try:
        return address in _workers_by_address(client)
    except Exception:  # the scheduler does not answer either
        return False


def main(arguments: list[str]) -> None:
    """Serve jobs on stdin by measuring on a board: the main function of a process that `open_fleet` starts."""
    docstring = "Measures on a board: Jobs come in, Results go out."
    parser = argparse.ArgumentParser(prog="python -m celosia.driver.tune.fleet", description=docstring)
    parser.add_argument("url", help="ssh://USER@BOARD, or ssh://USER@BOARD/functional")
    parser.add_argument("--sudo", action="store_true")
    parser.add_argument("--base", type=int)
    options = parser.parse_args(arguments)
    board = BoardMeasurer(options.url, options.sudo, {} if options.base is None else {"base": options.base})
    try:
        serve(board)
    finally:
        board.close()


if __name__ == "__main__":
    main(sys.argv[1:])
