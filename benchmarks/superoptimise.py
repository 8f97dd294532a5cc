"""Rows of `superoptimise`: cycles by the timing model, before over after, and bytes that differ in onnxruntime.

`--only ablation`: the same of ABLATED without each group of rules, and by each other search. `--only floats`: seconds
of FLOATS, networks of floats, on this processor's CPU and one thread, before over after, and the same of FAST with
fast-math, with how far outputs differ. `--only pool`: steps that processes weigh in a second. `--device rtl`: cycles
of MERGED and CORRECTED, before over after, on the RTL simulator, and bytes that differ from onnxruntime's.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.branches import BRANCHES, LINEAR, with_shared_scales
from benchmarks.cpu import MODELS
from benchmarks.encoders import ENCODERS
from benchmarks.partly import PARTLY
from benchmarks.published import PUBLISHED, STRIDED, WHOLE
from benchmarks.rows import Request, Row
from benchmarks.workloads import WORKLOADS, Missing
from celosia.compiler.compile import compile
from celosia.compiler.pricing import pricing
from celosia.compiler.program.safe_files import write_text
from celosia.compiler.superoptimise.compare_outputs import compare_on_random_inputs, first_differing_output, inputs_of
from celosia.compiler.superoptimise.derivation import distance
from celosia.compiler.superoptimise.optimise import optimise as compared
from celosia.compiler.superoptimise.proofs import GENERATED, generated_rules, stored_text
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules import GROUPS, RULES
from celosia.compiler.tune.kernel_trial import time_alternating
from celosia.driver.choices import SUPEROPTIMISERS
from celosia.driver.runtime import Runtime
from celosia.driver.tune.optimise import optimise
from celosia.driver.workstation.oracle import open_model

ENCODER = "minilm_64"
MADE: dict[str, Callable[[], onnx.ModelProto]] = {
    **BRANCHES,
    **PUBLISHED,
    ENCODER: ENCODERS[ENCODER].model,
    **PARTLY,
    **STRIDED,
    **WHOLE,
}
"""Float models with random weights."""
SYMMETRIC = ("split_attention", "detector", "u_net", "causal", ENCODER)
"""Made networks whose activations have zero point 0: those of convolutions without Relu would differ."""
OTHERS = ("squeezenet1_1", "resnet18", "resnet50")
"""Networks of the folder of models."""
LISTED = (
    "inception_v3", "squeezenet1_1", "nasnet_cells", "resnext50", "inception", "u_net", "super_resolution", ENCODER,
)  # fmt: skip
"""Whole networks, and what is published of them: none is made of what a rule is good for."""
WITH_BRANCHES = tuple("four_branches" if name == "inception" else name for name in LISTED)
"""The same with four narrow branches of one input as the inception block."""
NEAR = 1.01
"""Times what the best takes: after how many seconds a search has something as good, details say as `near`; the original
may be."""
MOST = 0.9
"""Share of what the best saves: after how many seconds a search saves as much, details say as `most`."""
BUDGET = 60.0
"""Seconds for each."""
RTL_BUDGET = 30.0
"""The same for those that run on the RTL."""
GENERATE_BUDGET = 180.0
"""Seconds of a search with all generated rules, of which a busy machine weighs few in a minute."""
WON = ("resnet_v1_stage", "causal")
"""Networks that generated rules are kept for."""
TARGETS = {"four_branches": 3.0, **dict.fromkeys((*PARTLY, *WON), 1.05)}
FLOATS = ("inception_v3_first", "inception_v3_middle", "inception_v3_last", "inception_narrow", "inception_v3")
FLOAT_TARGETS = {"inception_v3": 1.05}
MERGED, CORRECTED = ("four_branches", "inception_narrow"), ("srcnn", "retina_head")
"""Rewritten graphs that run on the RTL: two of merging rules, and two of partly equivalent ones."""
FAST = (
    *LINEAR, "four_branches", "inception", "inception_narrow", "inception_v3_first", "inception_v3_middle", "resnext",
    "super_resolution", "squeezenet1_1",
)  # fmt: skip
"""Those that fast-math is measured on."""
SECONDS = 10.0
"""For which networks of floats are run by turns."""
ABLATED = ("four_branches", "detector", "u_net", "separable_cell", "resnext")


POOLED, PROCESSES = ("inception_v3", "inception_v3_middle"), (0, 1, 2)
"""What is searched with processes beside this one, and how many; 0: this one weighs steps itself."""
FLOAT_SEARCH = "greedy"
"""One step after the other: each of them is compiled for the CPU to be weighed, which takes long."""


@dataclass
class _Samples:
    left: Iterator[dict[str, NDArray[np.float32]]]

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        return next(self.left, None)


def made(name: str, folder: Path) -> Path:
    """The int8 model of one of MADE, per channel, by onnxruntime's quantiser; parts of a Concat share its scale."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    model, path = MADE[name](), folder / f"{name}.onnx"
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    inputs = ({"x": np.random.default_rng(seed).normal(size=shape).astype(np.float32)} for seed in range(3))
    onnx.save(model, folder / "float.onnx")
    quantize_static(
        folder / "float.onnx", path, _Samples(inputs), weight_type=QuantType.QInt8, per_channel=True,
        quant_format=QuantFormat.QDQ, activation_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": name in SYMMETRIC},
    )  # fmt: skip
    onnx.save(with_shared_scales(onnx.load(path)), path)
    return path


def rows(asked: Request) -> Iterator[Row]:
    """Rows of the section, or of the part `only` of it."""
    folder, models, config, say = asked.folder, asked.models, asked.preset, asked.say
    own = {"rtl": RTL_BUDGET, "generate": GENERATE_BUDGET}
    seconds = asked.seconds or own.get(asked.device or "") or own.get(asked.only or "") or BUDGET
    if asked.only == "floats":
        return floats(folder, models, seconds, say)
    if asked.only == "generate":
        return generate(models, config, seconds, say)
    if asked.only == "pool":
        return pool(models, config, seconds, say)
    if asked.device == "rtl":
        return on_rtl(models, config, seconds, say)
    if asked.only == "ablation":
        return ablation(config, seconds, say)
    return timed_rows(folder, models, config, seconds, say)


def generate(models: tuple[str, ...], config: str, seconds: float, say: Callable[[str], None]) -> Iterator[Row]:
    """Generate rules, and write those to generated.json that win on WON or `models`, which MADE has; a row for each."""
    from celosia.compiler.superoptimise.generator import Generator, winning_rules
    from celosia.compiler.superoptimise.vocabularies import VOCABULARIES

    generator, wins = Generator(RULES), dict[str, dict[str, float]]()
    for vocabulary in VOCABULARIES:
        say(f"{vocabulary.name}: generating rules")
        generator.run(vocabulary)
    with tempfile.TemporaryDirectory() as place:
        for name in models or WON:
            model = onnx.load(made(name, Path(place)))
            factor, needed = winning_rules(RULES, generator.rules, model, pricing(model, config), seconds, say)
            for rule in needed:
                wins.setdefault(rule.name, {})[name] = round(factor, 3)
            yield Row(
                f"superoptimise/generate/{name}", f"{name} on {config}: price without generated rules, over that with "
                "those that it needs", "", f"{factor:.3f}, {len(needed)} rules", None,
                f"python -m benchmarks superoptimise --only generate --models {name} --config {config}",
                {"ratio": factor, "rules": [rule.text for rule in needed], "generated": len(generator.rules)},
            )  # fmt: skip
    write_text(GENERATED, stored_text([rule for rule in generator.rules if rule.name in wins], wins))


def timed_rows(
    folder: Path | None, models: tuple[str, ...], config: str, seconds: float, say: Callable[[str], None]
) -> Iterator[Row]:
    """A row for each network, and means of all but PARTLY and STRIDED, of LISTED and of WITH_BRANCHES; or rows for
    those of `models`."""
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in models or (*MADE, *OTHERS):
            say(f"{name}: searching for {seconds:g} s")
            row = _row(name, folder, Path(place), config, seconds)
            ratios |= {name: row.details["ratio"]} if row.met is not None and name not in (*PARTLY, *STRIDED) else {}
            yield row
    if models:
        return
    for key, names in ("mean", tuple(ratios)), ("listed", LISTED), ("with-branches", WITH_BRANCHES):
        found = [ratios[name] for name in names if name in ratios]
        mean = math.exp(sum(map(math.log, found)) / len(found))
        head = f"superoptimise/{key}", f"{len(found)} networks: cycles before over after, geometric mean", "≥ 1.10"
        command = f"python -m benchmarks superoptimise --config {config} --seconds {seconds:g}"
        yield Row(*head, f"{mean:.3f}", mean >= 1.1, command, {"ratio": mean, "networks": len(found)})


def _row(name: str, folder: Path | None, place: Path, config: str, seconds: float) -> Row:
    target = TARGETS.get(name, 1.0)
    head = (
        f"superoptimise/{name}",
        f"{name} on {config}: cycles by the timing model, before over after; bytes that differ",
        f"≥ {target:g}; 0",
    )  # fmt: skip
    command = f"python -m benchmarks superoptimise --models {name} --config {config} --seconds {seconds:g}"
    try:
        path = made(name, place) if name in MADE else WORKLOADS[name].path(folder)
    except Missing as reason:
        return Row(*head, f"skipped: {reason}", None, command)
    found = optimise(path, config, budget=seconds)
    why = compare_on_random_inputs(onnx.load(path), found.model, open_model)
    ratio = found.before.cycles / found.after.cycles
    within = found.before.total - MOST * (found.before.total - found.after.total)
    near, most = (
        next(at for at, total in found.state.bests if total <= limit) for limit in (NEAR * found.after.total, within)
    )
    details: dict[str, Any] = {
        "config": config, "ratio": ratio, "with_cpu": found.before.total / found.after.total, "near": near,
        "most": most,
        **found.report,
    }  # fmt: skip
    text = (
        f"{ratio:.3f} ({found.before.cycles:,.0f} to {found.after.cycles:,.0f}, {len(found.steps)} steps), within 1% "
        f"after {near:.0f} s, {MOST:.0%} of what is saved after {most:.0f} s; {why or 0}"
    )
    return Row(*head, text, ratio >= target and not why, command, details)


def on_rtl(models: tuple[str, ...], config: str, seconds: float, say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each of MERGED and CORRECTED, or of `models`, which MADE has."""
    with tempfile.TemporaryDirectory() as place:
        for name in models or (*MERGED, *CORRECTED):
            say(f"{name}: searching for {seconds:g} s, then on the RTL")
            original = onnx.load(made(name, Path(place)))
            found = optimise(original, config, budget=seconds)
            feed = inputs_of(original, 0)
            expected = open_model(original)(feed)
            runs = [Runtime(compile(each, config=config), "rtl").run(feed) for each in (original, found.model)]
            why = "; ".join(filter(None, (first_differing_output(expected, run.outputs) for run in runs)))
            before, after = (int(run.report["cycles"]) for run in runs)
            timed, target = found.before.cycles / found.after.cycles, TARGETS.get(name, 1.0)
            options = f"--device rtl --models {name} --config {config} --seconds {seconds:g}"
            yield Row(
                f"superoptimise/rtl/{name}", f"{name} on {config}: cycles of the RTL, before over after; bytes that "
                "differ", f"≥ {target:g}; 0",
                f"{before / after:.3f} ({before:,} to {after:,}; {timed:.3f} by the timing model); {why or 0}",
                before / after >= target and not why, f"python -m benchmarks superoptimise {options}",
                {"config": config, "ratio": before / after, "before": before, "after": after, "timed": timed},
            )  # fmt: skip


def floats(folder: Path | None, models: tuple[str, ...], seconds: float, say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each of FLOATS, and with fast-math one for each of FAST, or for those of `models`."""
    for fast_math, names in ((False, FLOATS), (True, FAST)):
        for name in models or names:
            if name in names or not (fast_math or name in FAST):
                say(f"{name}, {'fast-math' if fast_math else 'floats'}: searching for {seconds:g} s")
                yield _float_row(name, folder, seconds, fast_math)


def _float_row(name: str, folder: Path | None, seconds: float, fast_math: bool) -> Row:
    """The processor's time of both, by turns in one process."""
    key = "fast_math" if fast_math else "floats"
    target = 1.0 if fast_math else FLOAT_TARGETS.get(name, 1.0)
    how, allowed = ("with fast-math", "how far outputs differ") if fast_math else ("in floats", "bytes that differ")
    head = (
        f"superoptimise/{key}/{name}", f"{name} {how} on one thread: seconds, before over after; {allowed}",
        f"≥ {target:g}; {'rounding' if fast_math else 0}",
    )  # fmt: skip
    command = f"python -m benchmarks superoptimise --only floats --models {name} --seconds {seconds:g}"
    file = (folder or Path()) / MODELS.get(name, "")
    if name in MODELS and not file.is_file():
        return Row(*head, f"skipped: {MODELS[name]} is not there; give --models-dir", None, command)
    model = onnx.load(file) if name in MODELS else {**MADE, **LINEAR}[name]()
    found = optimise(model, budget=seconds, search=FLOAT_SEARCH, accelerator=False, fast_math=fast_math)
    why = "" if fast_math else compare_on_random_inputs(model, found.model, open_model)
    feed = inputs_of(model, 0)
    both = [Runtime(compile(each, accelerator=False, check=False), threads=1) for each in (model, found.model)]
    before, after = time_alternating([partial(each.run, feed) for each in both], SECONDS)
    ratio = before / after if found.steps else 1.0
    differ = distance(found.report) if fast_math and found.steps else why or "0"
    return Row(
        *head, f"{ratio:.3f} ({before * 1e3:.3f} to {after * 1e3:.3f} ms, {len(found.steps)} steps); {differ}",
        ratio >= target and not why, command, {"ratio": ratio, "before": before, "after": after, **found.report},
    )  # fmt: skip


def pool(models: tuple[str, ...], config: str, seconds: float, say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each of POOLED, or of `models`, which MADE has, and each number of PROCESSES: steps weighed a second.
    The rest of what the machine does changes it."""
    with tempfile.TemporaryDirectory() as place:
        for name in models or POOLED:
            path = made(name, Path(place))
            for count in PROCESSES:
                say(f"{name}, {count} processes: searching for {seconds:g} s")
                found = optimise(path, config, budget=seconds, jobs=count)
                rate, load = found.state.weighed / found.state.seconds, os.getloadavg()[0]
                yield Row(
                    f"superoptimise/pool/{name}-{count}", f"{name}, {count} processes beside this one: steps weighed "
                    "a second", "",
                    f"{rate:.3f}, {found.before.cycles:,.0f} to {found.after.cycles:,.0f} cycles; load {load:.1f}",
                    None,
                    f"python -m benchmarks superoptimise --only pool --models {name} --seconds {seconds:g}",
                    {"rate": rate, "load": load, **found.report},
                )  # fmt: skip


def ablation(config: str, seconds: float, say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each group of rules that is left out, for none, and for each other search: geometric means."""
    every, first = (*RULES, *generated_rules()), SUPEROPTIMISERS[0]
    variants: dict[str, tuple[Sequence[RewriteRule], str]] = {
        "all": (every, first), **{way: (every, way) for way in SUPEROPTIMISERS[1:]},
        "without-generated": (RULES, first),
        **{f"without-{name}": ([rule for rule in every if rule not in group], first) for name, group in GROUPS.items()},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        paths = {name: made(name, Path(place)) for name in ABLATED}
        for variant, (rules, way) in variants.items():
            ratios, taken = {}, 0.0
            for name, path in paths.items():
                say(f"{name}, {variant}: searching for {seconds:g} s")
                costs = pricing(path, config)
                found = compared(path, costs, seconds, open_model, rules=rules, way=way)
                ratios[name] = found.before.cycles / found.after.cycles
                taken += found.state.seconds
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            yield Row(
                f"superoptimise/ablation/{variant}", f"{variant}, {len(ratios)} networks: before over after, mean", "",
                f"{mean:.3f} in {taken:.0f} s",
                None, f"python -m benchmarks superoptimise --only ablation --config {config} --seconds {seconds:g}",
                {"ratio": mean, "seconds": taken, "networks": ratios},
            )  # fmt: skip
