"""Fleets that measure for a tuning, by name: processes here, a board over ssh, or the workers of a Dask cluster.

    python -m celosia.driver.tune.fleet ssh://root@pynq        # measures on a board; see worker_process.py

Nothing here listens on a port: a Dask scheduler is the user's own, and is asked. Whoever reaches it or a worker may run
what they like there, unless it has TLS: one that is open to the world is refused.
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
from celosia.driver.host.oracle import MissingLibrary
from celosia.driver.remote.deploy import Remote
from celosia.driver.remote.remote_device import RemoteDevice
from celosia.driver.remote.ssh import SshError, connect_unattended, ssh_destination
from celosia.hw.spec.config import Config
from celosia.plain import Sentence
from celosia.sim.devices import SSH_PREFIX

RTL = "rtl"
"""Resources of a Dask worker: how many simulators it may run at once, and `board:NAME`, 1 for each board that it alone
has a connection to."""
CONNECT_SECONDS = 10


class PoolError(Sentence, ValueError):
    """An invalid pool, or one without a worker for the task; the message says what to do."""


def open_fleet(
    judge: CostSource, jobs: int = 0, pool: str | None = None, deadline: float = DEADLINE, sudo: bool = False,
    base: int | None = None,
) -> Fleet:  # fmt: skip
    """Open the fleet that measures for `judge`. Raises PoolError, SshError for an invalid board name, MissingLibrary
    without Dask.

    jobs: processes of this machine; 0: this one. pool: dask://HOST:PORT instead, all of whose workers with the resource
    count; dask+tls:// with the certificates that Dask's configuration names, dask+insecure:// where the scheduler or a
    worker has a public address and no TLS, which is refused otherwise. deadline: seconds for each trial. sudo, base: of
    a board, as `celosia run` takes them.
    """
    resource = resource_of(judge)
    module = board_worker_command(judge.device, sudo, base) if judge.board else WORKER_ARGUMENTS
    if pool is not None:
        return _open_dask_fleet(judge, pool, module, deadline)
    if judge.board:
        return Fleet([WorkerProcess(str(resource), (sys.executable, *module))], deadline)
    return Fleet.local(jobs, deadline)


def resource_of(judge: CostSource) -> str | None:
    """Resource that a worker must have. SshError where a board's name is none."""
    if judge.board:
        return f"board:{ssh_destination(_address_of(judge.device))[-1].rsplit('@')[-1]}"
    return RTL if judge.device == "rtl" else None


# Boards -----------------------------------------------------------------------------------------------------------


def board_worker_command(url: str, sudo: bool = False, base: int | None = None) -> tuple[str, ...]:
    """Command that Python runs to measure on a board."""
    place = () if base is None else (f"--base={base}",)
    return ("-m", "celosia.driver.tune.fleet", *(["--sudo"] if sudo else []), *place, url)


class BoardMeasurer:
    """Session with a board, opened when it is needed; a lost one is answered with LOST, and opened again."""

    def __init__(self, url: str, sudo: bool = False, options: Mapping[str, Any] = {}) -> None:
        self.url, self.sudo, self.options = url, sudo, options
        self._devices: dict[Config, RemoteDevice] = {}
        self._session = ExitStack()

    def __call__(self, job: AnyJob) -> TrialResult:
        assert isinstance(job, LayerJob)
        try:
            return measure(job, self._open_device)
        except SshError as error:
            self.close()
            return TrialResult(Status.LOST, detail=str(error))

    def _open_device(self, cfg: Config, judge: CostSource) -> RemoteDevice:
        """Open the board's device for a Config."""
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
    return url.removeprefix(SSH_PREFIX).partition("/")[0]


# Dask -------------------------------------------------------------------------------------------------------------


def _open_dask_fleet(judge: CostSource, pool: str, module: Sequence[str], deadline: float) -> Fleet:
    """Make each worker a device, as often as it may measure at once."""
    resource = resource_of(judge)
    _require_private(pool, _scheduler_address(pool))
    client = _connect_to_pool(pool)
    try:
        for address in (client.scheduler_info(n_workers=0)["address"], *_workers_by_address(client)):
            _require_private(pool, address)
    except PoolError:
        client.close()
        raise
    places: list[Measurer] = []
    for address, worker in _workers_by_address(client).items():
        count = worker["nthreads"] if resource is None else int(worker["resources"].get(resource, 0))
        requirement = {} if resource is None else {"resources": {resource: 1}}
        for number in range(count):
            executor = client.get_executor(workers=[address], pure=False, **requirement)
            name = f"worker {worker['name']}" + (f", {number + 1} of {count}" if count > 1 else "")
            places.append(ExecutorWorker(name, executor, module, partial(_is_connected, client, address)))
    if not places:
        client.close()
        option = "" if resource is None else f" --resources {resource}=1"
        subject = "no worker" if resource is None else f"no worker with the resource {resource}"
        raise PoolError(
            f"{pool} has {subject}; start one: dask worker {_scheduler_address(pool)}{_local_options(pool)}{option}"
        )
    return Fleet(places, deadline, client.close)


def _connect_to_pool(pool: str) -> Any:
    """Connect to a Dask pool. PoolError."""
    address = _scheduler_address(pool)
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise MissingLibrary(f'{pool} needs Dask, which is not installed: pip install "celosia[fleet]"') from None
    try:
        return distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except OSError:
        port = address.rsplit(":")[-1]
        line = f"dask scheduler{_local_options(pool)} --port {port}"
        raise PoolError(f"no scheduler answers at {pool}; start one: {line}") from None


def _scheduler_address(pool: str) -> str:
    """Dask's own address for dask://HOST:PORT."""
    parts = urlsplit(pool)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in SCHEMES or not host or not port or parts.path.strip("/"):
        raise PoolError(f"{pool!r} is no pool; write dask://HOST:PORT, or dask+tls://HOST:PORT")
    return f"{SCHEMES[parts.scheme]}://{f'[{host}]' if ':' in host else host}:{port}"


def _local_options(pool: str) -> str:
    """Options without which Dask would listen on all interfaces, to anyone.

    >>> _local_options("dask://127.0.0.1:8786"), _local_options("dask+tls://10.0.0.5:8786")
    (' --host 127.0.0.1', ' --protocol tls')
    """
    host = urlsplit(pool).hostname
    if pool.startswith("dask+tls:"):
        return " --protocol tls"
    return f" --host {host}" if host in LOCAL else " --host ITS_PRIVATE_ADDRESS"


LOCAL = ("127.0.0.1", "::1", "localhost")
SCHEMES = {"dask": "tcp", "dask+insecure": "tcp", "dask+tls": "tls"}
"""Ways to a pool, and what Dask calls them."""


def allow_any_interface(pool: str | None) -> str | None:
    """Return the pool's address with the scheme that allows public network interfaces without TLS."""
    return None if pool is None else pool.replace("dask://", "dask+insecure://", 1)


def _require_private(pool: str, address: str) -> None:
    """Raise PoolError where anybody may reach `address`, and run code there."""
    if pool.startswith("dask+insecure:") or not address.startswith("tcp:"):
        return
    host, port = urlsplit(address).hostname, urlsplit(address).port
    try:
        addresses = {str(place[4][0]).partition("%")[0] for place in socket.getaddrinfo(host, port)}
    except OSError:
        return  # nobody answers there
    public = [address for address in sorted(addresses) if not ipaddress.ip_address(address).is_private]
    if public:
        raise PoolError(
            f"{pool}: {public[0]} is a public address, without TLS, and Dask runs what anybody sends there; start its "
            "scheduler and workers with --host in a private network, or with TLS and write dask+tls://HOST:PORT; "
            "--insecure-pool does it nevertheless"
        )


def _workers_by_address(client: Any) -> dict[str, Any]:
    workers: dict[str, Any] = client.scheduler_info(n_workers=-1)["workers"]
    return workers


def _is_connected(client: Any, address: str) -> bool:
    try:
        return address in _workers_by_address(client)
    except Exception:  # nor is the scheduler
        return False


def main(arguments: list[str]) -> None:
    """Serve measurements on a board: the main function of a process of `open_fleet`, see `--help`."""
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
