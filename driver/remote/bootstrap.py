"""Runs on a board before anything of Celosia is there: says what the board has, and puts files into place.

Its text is sent over ssh and executed by whatever Python the board has, from 3.6 on, so it is on its own, and plain;
annotations are strings, which that one does not evaluate. It reads a request from standard input: a line of JSON, then
the bytes of the files. It answers with a line of JSON after MARK.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from typing import Any, BinaryIO

MARK = b"\n<celosia>\n"


def versions() -> "dict[str, Any]":
    """Of numpy and pynq, None where one is missing, with the reason as `NAME_error`."""
    found: dict[str, Any] = {}
    for name in ("numpy", "pynq"):
        try:
            found[name] = getattr(__import__(name), "__version__", "unknown")
        except Exception as error:  # pynq has many ways to fail
            found[name] = None
            found[name + "_error"] = type(error).__name__ + ": " + str(error)
    return found


def digest(path: str) -> "str | None":
    """The SHA-256 of a file, None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def status(request: "dict[str, Any]", folder: str) -> "dict[str, Any]":
    """What the board has, and the names of the files asked for that it has not, or not so."""
    files = request["files"]
    missing = [each["name"] for each in files if digest(os.path.join(folder, each["name"])) != each["sha256"]]
    home = os.path.expanduser("~")
    return {
        "python": list(sys.version_info[:3]), "machine": platform.machine(), "folder": folder, "missing": missing,
        "free": shutil.disk_usage(home).free, **versions(),
    }  # fmt: skip


def install(request: "dict[str, Any]", folder: str, stream: BinaryIO) -> "dict[str, Any]":
    """Each file appears under its name when all of it is there and right; a file begun is removed."""
    os.makedirs(folder, exist_ok=True)
    for each in request["files"]:
        handle, part = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
        try:
            left, hashed = each["size"], hashlib.sha256()
            with os.fdopen(handle, "wb") as file:
                while left:
                    data = stream.read(min(left, 1 << 16))
                    if not data:
                        raise EOFError("the connection ended within " + each["name"])
                    file.write(data)
                    hashed.update(data)
                    left -= len(data)
                file.flush()
                os.fsync(file.fileno())
            if hashed.hexdigest() != each["sha256"]:
                raise ValueError(each["name"] + " arrived damaged")
            os.replace(part, os.path.join(folder, each["name"]))
        except BaseException:
            os.unlink(part)
            raise
    return {}


def main() -> None:
    """Answers one request from standard input with a line of JSON behind MARK."""
    stream = sys.stdin.buffer
    answer: dict[str, Any] = {}
    try:
        request = json.loads(stream.readline().decode())
        folder = os.path.expanduser(request["folder"])
        answer = status(request, folder) if request["what"] == "status" else install(request, folder, stream)
    except Exception as error:
        answer = {"error": getattr(error, "strerror", None) or str(error), "kind": type(error).__name__}
    sys.stdout.buffer.write(MARK + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
