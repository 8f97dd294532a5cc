"""Open pages in headless Chromium through its debugging protocol: console messages, scripts, screenshots."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 120.0
"""Limit for each operation; test machines are slow."""


class Browser:
    """One tab of the browser.

    messages: console messages of the levels warning and error, uncaught exceptions, and requests to the network.
    """

    def __init__(self, socket: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop, self._number = socket, loop, 0
        self.messages: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **options: Any) -> Any:
        """Send a command of the protocol and return its answer."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, options), SECONDS))

    async def _call(self, method: str, options: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": options}))
        while True:
            message = json.loads(await self._socket.read_message())
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, event: dict[str, Any]) -> None:
        """Append an event to `messages` if it is a problem."""
        if method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(event["exceptionDetails"].get("exception", event["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.messages.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.messages.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not event["request"]["url"].startswith(("file:", "data:")):
            self.messages.append(f"asks for {event['request']['url']}")

    def run(self, script: str) -> Any:
        """Run a script in the page and return its value."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def open(self, path: Path, width: int = 1280, height: int = 800, dark: bool = False) -> float:
        """Open a page, wait until its figures are drawn, and return the seconds of the page's own clock until then."""
        phone = width < 600
        self.messages.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + SECONDS
        while self.run("document.body?.dataset.ready ?? ''") not in ("yes", "failed"):
            assert time.monotonic() < until, f"{path} is not drawn; the console says {self.messages}"
            time.sleep(0.05)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return float(self.run("Number(document.body.dataset.milliseconds)")) / 1000

    def picture(self, path: Path, whole: bool = False, clip: dict[str, float] | None = None) -> Path:
        """Write a screenshot as PNG: the window, the whole page, or a part of the page."""
        options: dict[str, Any] = {"captureBeyondViewport": whole or clip is not None}
        if clip is not None:
            options["clip"] = {**clip, "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"]))
        return path

    def move(self, x: float, y: float) -> None:
        """Move the pointer to this place, in CSS pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser with a fresh profile. Raises RuntimeError if it does not start."""
    assert CHROMIUM is not None
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             "--disable-background-networking", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage",
             f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = _port(Path(profile) / "DevToolsActivePort", process)
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS) as answer:
                tab = next(target for target in json.load(answer) if target["type"] == "page")
            socket = loop.run_until_complete(_connected(tab["webSocketDebuggerUrl"]))
            yield Browser(socket, loop)
            loop.run_until_complete(_closed(socket))
        finally:
            process.terminate()
            process.wait(SECONDS)
            loop.close()


async def _connected(url: str) -> Any:
    from tornado.websocket import websocket_connect

    return await websocket_connect(url, max_message_size=1 << 28)


async def _closed(socket: Any) -> None:
    socket.close()


def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    """Return the debugging port when Chromium has written it. Raises RuntimeError if Chromium ends before."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        if path.exists() and path.read_text().count("\n"):
            return int(path.read_text().splitlines()[0])
        time.sleep(0.05)
    raise RuntimeError(f"{CHROMIUM} does not start: exit code {process.poll()}")
