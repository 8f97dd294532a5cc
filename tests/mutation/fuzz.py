"""Run random programs on hardware with a mutant: python -m mutation.fuzz FILE, in the tree with the mutant.

It uses the first Config whose Verilog the mutant changes. Prints JSON lines, see campaign.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from configs import CONFIGS, VARIED
from fuzz.run import chunk

from celosia.hw.verilog import verilog
from celosia.sim.rtl.build import BuildError, build_library

ORDER = sorted(VARIED, key=lambda name: ("softmax" not in name, name))
"""Names of Configs; those with the most parts come first."""
LEGAL, GARBAGE, STEP = 150, 50, 25


def say(**event: str) -> None:
    print(json.dumps(event), flush=True)


def digest(name: str) -> str:
    """Return the digest of the Verilog of Config `name`."""
    return hashlib.sha256(verilog(CONFIGS[name], simulation=True).encode()).hexdigest()[:24]


def before(name: str) -> str:
    """Return the digest without the mutant."""
    path = Path(os.environ["MUTANTS_TEXTS"])
    digests: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    if name not in digests:
        tree = os.environ["MUTANTS_BASE"]
        paths = os.pathsep.join(f"{tree}/{folder}" for folder in ("src", "tests", "tests/cosim"))
        command = [sys.executable, "-W", "ignore", "-c", f"from mutation.fuzz import digest; print(digest({name!r}))"]
        environment = os.environ | {"PYTHONPATH": paths, "CELOSIA_CACHE": f"{tree}/../cache"}
        process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tree)
        digests[name] = process.stdout.strip()
        path.write_text(json.dumps(digests))
    return digests[name]


def main() -> None:
    """Run legal programs, then garbage, until one fails."""
    for name in ORDER:
        try:
            is_unchanged = digest(name) == before(name)
        except Exception as error:
            say(unbuilt=name, note=f"{type(error).__name__}: {error}"[-300:])
            return
        if is_unchanged:
            continue
        say(differs=name)
        cfg = CONFIGS[name]
        try:
            build_library(cfg, quiet=True)
        except BuildError as error:
            say(unbuilt=name, note=str(error)[-300:])
            return
        for kind, count in (("legal", LEGAL), ("garbage", GARBAGE)):
            for start in range(0, count, STEP):
                failures = chunk(kind, cfg, range(start, start + STEP)).failures
                if failures:
                    say(killed=f"{kind} programs on {name}", note=failures[0])
                    return
        return  # one Config is enough


if __name__ == "__main__":
    main()
