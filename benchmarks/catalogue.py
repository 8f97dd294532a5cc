"""All figures in one file, as they are a list: what each is of, what decides it, and what is asked of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

from benchmarks.figures import ROOT, Figure

Details = dict[str, Any]
MACHINE = ("compiler", "hw", "sim")
"""What decides bytes and cycles."""
EVERYTHING = ("compiler", "driver", "hw", "sim")
KERNELS = ("compiler",)
"""What decides the speed of what runs on the CPU."""
INTEGERS = ("demo", "mnist_conv", "squeezenet1_1")
ISLANDS = ("fer_minixception", "pplcnet_orientation", "resnet18", "mobilenet_v2")
"""Networks of which onnxruntime computes a part in float."""
COMPARED = ("demo", "ds_cnn", "resnet18", "mobilenet_v2", "lite", "resnet50")
SEARCHED = (
    "four_branches", "detector", "u_net", "separable_cell", "nasnet_cells", "squeezenet1_1", "resnext", "resnext50",
    "inception", "inception_narrow", "inception_v3_first", "inception_v3_middle", "inception_v3_last", "inception_v3",
    "minilm_64", "split_attention", "super_resolution", "resnet18", "resnet50",
)  # fmt: skip
PARTLY = ("deeplab_head", "dilated_stage", "denoiser", "srcnn", "retina_head")
MERGED, CORRECTED = ("four_branches", "inception_narrow"), ("srcnn", "retina_head")
"""Rewritten graphs that run on the RTL: two of merging rules, and two of partly equivalent ones."""
PRESETS = ("tiny", "pynq", "wide", "ultra96", "zcu104")
BENCH = "python -m benchmarks"


def of(key: str, factor: float = 1) -> Callable[[Details], float | None]:
    """The number at `key` of a row's details, times `factor`; None where there is none."""

    def value(details: Details) -> float | None:
        found = details.get(key)
        return None if found is None else found * factor if factor != 1 else found

    return value


def worst(key: str) -> Callable[..., float]:
    """The largest value of `key` in the details of rows."""
    return lambda *rows: max(row[key] for row in rows)


def total(key: str) -> Callable[..., float]:
    """The sum of the values of `key` in the details of rows."""
    return lambda *rows: sum(row[key] for row in rows)


# What is counted -----------------------------------------------------------------------------------------------------


@cache
def _node_tests() -> int:
    import onnx.backend.test.loader as loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators of some tests overflow
        return len(loader.load_model_tests(kind="node"))


def _passing() -> int:
    lines = (ROOT / "tests" / "compiler" / "onnx_nodes_failing.txt").read_text(encoding="utf-8").splitlines()
    return _node_tests() - sum(bool(line) and not line.startswith("#") for line in lines)


def _kernels() -> int:
    from benchmarks.kernels import KERNELS as kernels

    return len(kernels)


def _multipliers() -> int:
    from celosia.bitstreams.area import shipped_model
    from celosia.hw.spec.config import PRESETS as presets

    return shipped_model().estimate(presets["pynq"]).dsp


COUNTED = (
    Figure("onnx-node-tests", "operator tests of ONNX", count=_node_tests),
    Figure("onnx-node-tests-passed", "of these, those not listed as failing", count=_passing),
    Figure("cpu-kernels", "kernels that are timed beside onnxruntime", count=_kernels),
    Figure("pynq-dsp", "DSP blocks of `pynq`, as declared", count=_multipliers),
)  # fmt: skip

# What is proved ------------------------------------------------------------------------------------------------------

PROVED = tuple(
    Figure(
        f"formal-{key}", what, of=("hw", "tests/formal"), command="make prove", row=("hardware/proofs",), value=of(key)
    )
    for key, what in (
        ("proved", "properties of the hardware that are proved"),
        ("caught", "faults planted for them that their proofs find"),
    )
)

# Bytes ---------------------------------------------------------------------------------------------------------------


def _operators_wrong(*rows: Details) -> int:
    return sum(each["different"] for row in rows for each in row["failed"])


def _whole(name: str, what: str, unit: str, networks: tuple[str, ...], suffix: str, key: str, most: float) -> Figure:
    keys = tuple(f"models/{network}{suffix}" for network in networks)
    value = total(key) if key == "different" else worst(key)
    return Figure(name, what, unit, MACHINE, f"{BENCH} models --models *", keys, value, most=most)


BYTES = (
    Figure(
        "exactness-bytes", "operators that onnxruntime runs in integers, fed with its tensors, 7 models, on the RTL",
        "bytes", MACHINE, f"{BENCH} exactness --models *",
        tuple(f"exactness/{name}/all-integer" for name in (*INTEGERS, *ISLANDS)), _operators_wrong, most=0,
    ),
    _whole("models-bytes", "demo (100 images), mnist_conv, squeezenet1_1, end to end on the RTL", "bytes",
           INTEGERS, "", "different", 0),
    _whole("models-steps", "networks with float islands (fer, pplcnet, ResNet-18, MobileNetV2)", "steps",
           ISLANDS, "", "steps", 1),
    _whole("devices-bytes", "functional simulator against RTL, outputs and whole DRAM", "bytes",
           (*INTEGERS, *ISLANDS), "/devices", "different", 0),
    Figure(
        "names-bytes", "2,000 random models without names, with equal and hostile ones, 6 Configs, functional", "bytes",
        MACHINE, f"{BENCH} names", ("names/random",), of("different"), most=0,
    ),
    *(
        Figure(
            f"differential-{name}", what, "", (*MACHINE, "benchmarks/differential"),
            f"{BENCH} differential --seed * --count 5000", ("differential",), of(name), most=most,
        )
        for name, what, most in (
            ("wrong", "random models in all formats of onnxruntime's quantiser, and random operators, beside "
             "onnxruntime: wrong ones, other than documented", 0),
            ("counted", "of so many", None),
        )
    ),
)  # fmt: skip

# Cycles --------------------------------------------------------------------------------------------------------------


def _cycles(name: str, label: str, row: str, most: float | None, command: str = "cycles") -> Figure:
    line = f"{BENCH} {command} --models {row}" + (" --device rtl" if command == "onchip" else "")
    key = f"cycles/{row}" if command == "cycles" else f"onchip/{row}/rtl/zynq-hp"
    value, what = of("cycles"), f"{label}: cycles of the RTL"
    return Figure(f"{name}-cycles", what, "cycles", MACHINE, line, (key,), value, most=most)


def _onchip(
    name: str, what: str, row: str, value: Callable[[Details], float | None],
    least: float | None = None, most: float | None = None,
) -> Figure:  # fmt: skip
    line = f"{BENCH} onchip --models {row} --device rtl"
    return Figure(name, what, "", MACHINE, line, (f"onchip/{row}/rtl/zynq-hp",), value, least=least, most=most)


def _over_bound(details: Details) -> float:
    return float(details["cycles"] / details["bound"]["cycles"])


def _macs_a_cycle(details: Details) -> float:
    return float(sum(layer["macs"] for layer in details["layers"]) / details["cycles"])


def _wide(
    name: str, what: str, unit: str, rows: tuple[str, ...], value: Callable[..., float | None], most: float
) -> Figure:
    """Of rows on preset `wide` and the memory of a PYNQ-Z2."""
    line = f"{BENCH} cycles --models {rows[0] if len(rows) == 1 else '*'} --config wide --memory pynq-z2"
    keys = tuple(f"cycles/{row}/wide/pynq-z2" for row in rows)
    return Figure(name, f"{what} on `wide`, memory of a PYNQ-Z2", unit, MACHINE, line, keys, value, most=most)


CYCLES = (
    _cycles("resnet18", "ResNet-18, 224²", "resnet18", 7_600_000),
    Figure("resnet18-peak", "ResNet-18: share of what the multipliers can do", "%", MACHINE,
           f"{BENCH} cycles --models resnet18", ("cycles/resnet18",), of("utilization", 100)),
    _cycles("resnet50", "ResNet-50, 224²", "resnet50", 17_500_000),
    Figure("resnet50-peak", "ResNet-50: share of what the multipliers can do", "%", MACHINE,
           f"{BENCH} cycles --models resnet50", ("cycles/resnet50",), of("utilization", 100)),
    _cycles("mobilenet", "MobileNetV2, 224²", "mobilenet_v2", 1_600_000),
    _wide("resnet18-cycles-wide", "ResNet-18: cycles of the RTL", "cycles", ("resnet18",), of("cycles"), 4_100_000),
    _wide("resnet50-cycles-wide", "ResNet-50: cycles of the RTL", "cycles", ("resnet50",), of("cycles"), 9_400_000),
    _wide("mobilenet-cycles-wide", "MobileNetV2: cycles of the RTL", "cycles", ("mobilenet_v2",), of("cycles"),
          1_300_000),
    _wide("wide-bytes", "ResNet-18, ResNet-50, MobileNetV2: bytes that differ between RTL and functional simulator",
          "bytes", ("resnet18", "resnet50", "mobilenet_v2"), total("different"), 0),
    _cycles("ds-cnn", "a keyword spotter (DS-CNN)", "ds_cnn", None, "onchip"),
    _onchip("ds-cnn-bound", "the same over max(dense products, bytes/bus)", "ds_cnn", _over_bound, most=1.45),
    _onchip("mobilenet160-bound", "MobileNetV2, 160²: cycles over max(dense products, bytes/bus)", "mobilenet_v2_160",
            _over_bound, most=1.45),
    _onchip("lite-bound", "an EfficientNet-Lite-like network: cycles over max(dense products, bytes/bus)", "lite",
            _over_bound, most=1.45),
    _onchip("depthwise-speed", "depthwise 3×3, 112×112×96, alone: useful multiplications a cycle", "depthwise",
            _macs_a_cycle, least=46),
    _onchip("yolo-launches", "a YOLOv8-like detector at 256²: launches", "yolo_256", of("launches"), most=3),
    _onchip("yolo-share", "the same: percent of its MACs on the accelerator", "yolo_256", of("share", 100), least=99),
)  # fmt: skip


def _layers(*rows: Details) -> float:
    errors: list[float] = [abs(layer["error"]) for row in rows for layer in row["layers"]]
    return 100 * max(errors, default=0.0)


TIMED = tuple(
    Figure(
        f"timed-{part}-{preset}", f"timing model against RTL, six networks on `{preset}`: {what}, off by at most", "%",
        ("hw", "sim"), f"{BENCH} timed --models * --config {preset}",
        tuple(f"timed/{name}/{preset}" for name in COMPARED), value, most=most,
    )
    for preset in PRESETS
    for part, what, value, most in (
        ("networks", "whole", lambda *rows: 100 * max(abs(row["error"]) for row in rows), 1.0),
        ("layers", "layers above 5,000 cycles", _layers, 3.0),
    )
)  # fmt: skip

LABELS = {
    "resnet18": "ResNet-18", "mobilenet_v2": "MobileNetV2", "mobilenet_v2_160": "MobileNetV2, 160 × 160",
    "ds_cnn": "`ds_cnn`", "lite": "`lite`, by records of other networks' layers", "demo": "the demo model",
}  # fmt: skip


def _gain(details: Details) -> float:
    return 100 * float(1 - details["tuned"] / details["untuned"])


GAIN = tuple(
    Figure(
        f"{part}-{network}-{preset}", f"{label} on `{preset}`, {what}", unit, MACHINE,
        f"{BENCH} gain --models {network} --config {preset} --memory zynq-hp", (f"gain/{network}/{preset}",), value,
    )
    for network, label in LABELS.items()
    for preset in PRESETS[1:]
    for part, what, unit, value in (
        ("untuned", "by the compiler's own schedules", "cycles", of("untuned")),
        ("tuned", "by those that come with Celosia", "cycles", of("tuned")),
        ("gain", "that is less by", "%", _gain),
    )
)  # fmt: skip

# Layers beside convolutions ------------------------------------------------------------------------------------------

BESIDE = tuple(
    Figure(f"beside-{network}{end}", f"{label}: {what}", unit, MACHINE,
           f"{BENCH} beside --models {network} --config pynq --memory zynq-hp", (f"beside/{network}",), of(key),
           least=least)
    for network, label in (
        ("inception_v3", "Inception v3"), ("inception", "an inception block of four branches"),
        ("squeezenet1_1", "SqueezeNet 1.1"), ("u_net", "a U-Net of two levels"),
        ("nasnet_cells", "two normal cells of NASNet-A"),
    )
    for end, what, unit, key, least in (
        ("", "cycles on `pynq`, layers of the vector unit behind convolutions over beside them", "", "ratio", 1),
        ("-products", "share of the cycles that products take, with them beside convolutions", "%", "products", None),
    )
)  # fmt: skip

# Transformers --------------------------------------------------------------------------------------------------------

TRANSFORMERS = tuple(
    Figure(
        f"transformers-{name}-{kind}", f"{label}, {kind}, on `pynq`: cycles over products / 256", "", MACHINE,
        f"{BENCH} transformers --models {name} --config pynq --memory zynq-hp", (f"transformers/{name}/{kind}",),
        of("ratio"), most=most,
    )
    for name, label, most in (
        ("minilm_64", "MiniLM-L6's layers, 64 tokens", 1.10), ("minilm_128", "the same, 128 tokens", 1.10),
        ("deit_tiny", "DeiT-tiny's layers, 197 tokens", 1.12),
    )
    for kind in ("int8", "uint8")
)  # fmt: skip
SOFTMAX = tuple(
    Figure(
        f"softmax-{name}-{part}", f"{label}, int8, on `pynq` with softmax = 4: {what}", "", MACHINE,
        f"{BENCH} transformers --models {name} --config pynq --memory zynq-hp", (f"transformers/{name}/int8/softmax",),
        of(value), most=most,
    )
    for name, label, cycles, launches in (
        ("minilm_64", "MiniLM-L6's layers, 64 tokens", 1.10, 13), ("minilm_128", "the same, 128 tokens", 1.10, 13),
        ("deit_tiny", "DeiT-tiny's layers, 197 tokens", 1.12, 26),
    )
    for part, what, value, most in (
        ("cycles", "cycles over products / 256", "ratio", cycles), ("launches", "launches", "launches", launches),
    )
)  # fmt: skip
ROUNDED = tuple(
    Figure(
        f"rounded-{name}-{part}", f"{label}, int8, on `pynq` with softmax = 4, norm = 8, rounded correctly: {what}", "",
        MACHINE, f"{BENCH} transformers --models {name} --config pynq --memory zynq-hp",
        (f"transformers/{name}/int8/rounded",), of(value), most=most,
    )
    for name, label, cycles in (
        ("minilm_64", "MiniLM-L6's layers, 64 tokens", 1.08), ("minilm_128", "the same, 128 tokens", 1.08),
        ("deit_tiny", "DeiT-tiny's layers, 197 tokens", 1.12),
    )
    for part, what, value, most in (
        ("cycles", "cycles over products / 256", "ratio", cycles), ("launches", "launches", "launches", 1),
        ("apart", "values of norms a step beside onnxruntime's", "apart", None),
    )
)  # fmt: skip
PACKED = tuple(
    Figure(
        f"packed-{name}-{part}", f"{label}, weights of {bits} bits, on `pynq`: {what}", unit, MACHINE,
        f"{BENCH} packed --models {name} --config pynq --memory zynq-hp", (f"packed/{name}",), value, most=most,
        least=least,
    )
    for name, label, bits, number, ratio in (
        ("fc_1000x512", "a product of 1000x512 with a row", "four", 4, 0.53),
        ("gpt_10m", "a step of a GPT of 10.6 M parameters", "four", 4, 0.53),
        ("fc_1000x512_2", "a product of 1000x512 with a row", "two", 2, 0.30),
    )
    for part, what, unit, value, most, least in (
        ("plain", "cycles as they are", "cycles", of("plain"), None, None),
        ("cycles", f"cycles with weight_bits = {number}", "cycles", of("packed"), None, None),
        ("ratio", "cycles over those as they are", "", of("ratio"), ratio, None),
        ("bus", "bytes loaded over what the bus carries", "%", lambda details: 100 * details["bus"], None, 93),
    )
)  # fmt: skip
SUMS = tuple(
    Figure(
        f"sums-llama_10m-{part}", f"a step of a Llama-like decoder of MatMulNBits, on `pynq` with `sums`: {what}", unit,
        MACHINE, f"{BENCH} packed --models llama_10m_nbits --config pynq --memory zynq-hp",
        ("packed/llama_10m_nbits",), of(key, factor), most=most, least=least,
    )
    for part, key, what, unit, factor, most, least in (
        ("cycles", "packed", "cycles, weights packed", "cycles", 1, None, None),
        ("ratio", "ratio", "cycles over those of the same one in int8", "", 1, 0.53, None),
        ("share", "share", "products on the accelerator", "%", 100, None, None),
        ("bus", "bus", "bytes loaded over what the bus carries", "%", 100, None, 93),
    )
)  # fmt: skip
DECODERS = tuple(
    Figure(
        f"decoder-{kind}{name}-{part}", f"{label}, a step of 128 tokens at most, on `pynq`{on}: {what}", unit, MACHINE,
        f"{BENCH} transformers --models {name} --config pynq --memory zynq-hp", (f"transformers/{name}/step{key}",),
        value, most=most, least=least,
    )
    for kind, on, key, limit in (
        ("", "", "", 18), ("softmax-", " with softmax = 4, attention in bytes", "/softmax", 18),
        ("rounded-", " with softmax = 4, norm = 8, everything in bytes, rounded correctly", "/rounded", 1),
    )
    for name, label in (("gpt_10m", "a GPT of 10.6 M parameters"), ("llama_10m", "a Llama-like one"))
    for part, what, unit, value, most, least in (
        ("cycles", "cycles, timed", "cycles", of("cycles"), None, None),
        ("bus", "bytes loaded over what the bus carries", "%", lambda details: 100 * details["bus"], None, 95),
        ("launches", "launches, six layers", "", of("launches"), limit, None),
        ("apart", "values of norms a step beside onnxruntime's, of 128 tokens", "", of("apart"), None, None),
        ("different", "logits that differ from onnxruntime's", "", of("different"), None, None),
    )
    if kind == "rounded-" or part not in ("apart", "different")
)  # fmt: skip
IN_BYTES = tuple(
    Figure(
        f"gpt_topics-{kind}", f"the demo GPT, {what}: perplexity of what was held out", "", ("driver",),
        f"{BENCH} transformers --models gpt_topics", ("transformers/gpt_topics",), of(kind),
    )
    for kind, what in (
        ("float", "floats but for the weights' own bytes"), ("products", "products in bytes"),
        ("attention", "attention in bytes, too"), ("all", "everything in bytes between embeddings and logits"),
    )
)  # fmt: skip
SMOOTHED = tuple(
    Figure(
        f"{name}-{kind}", f"the demo GPT{larger}, {what}: perplexity of what was held out", "", ("driver",),
        f"{BENCH} transformers --models gpt_outliers", (f"transformers/{name}",), of(kind),
    )
    for name, larger in (("gpt_outliers", " with a few larger channels"), ("gpt_plain", ""))
    for kind, what in (
        ("float", "floats"), ("products", "products in bytes"), ("products-smooth", "the same with `--smooth auto`"),
        ("all", "everything in bytes"), ("all-smooth", "the same with `--smooth auto`"),
    )
)  # fmt: skip
VIT = tuple(
    Figure(
        f"vit-{part}", f"the vision transformer on 10,000 images of Fashion-MNIST: {what}", unit,
        ("driver", "models"), f"{BENCH} transformers --models vit_fashion --config pynq --memory zynq-hp",
        ("transformers/vit_fashion",), of(part), most=most,
    )
    for part, what, unit, most in (
        ("float", "accuracy of floats", "%", None), ("int8", "accuracy of bytes", "%", None),
        ("points", "points that bytes cost", "", 0.5),
    )
) + tuple(
    Figure(
        f"vit-{kind}-{part}", f"the same, an image, on `pynq` with {on}: {what}", "", MACHINE,
        f"{BENCH} transformers --models vit_fashion --config pynq --memory zynq-hp",
        (f"transformers/vit_fashion/{kind}",), of(value), most=most,
    )
    for kind, on, launches in (("softmax", "softmax = 4", 26), ("rounded", "softmax = 4, norm = 8, rounded", 1))
    for part, what, value, most in (
        ("cycles", "cycles over products / 256", "ratio", 1.12), ("launches", "launches", "launches", launches),
        ("different", "logits of 20 images that differ from onnxruntime's", "different", None),
        ("apart", "values of norms a step beside onnxruntime's", "apart", None),
    )
    if part != ("different" if kind == "rounded" else "apart")
)  # fmt: skip
ONE_LAYER = tuple(
    Figure(
        f"rtl-{name}-{kind}-{part}", f"{label}, on `pynq` with softmax = 4, norm = 8, {how}: {what}", unit,
        ("compiler", "hw"), f"{BENCH} transformers --device rtl --models {name} --config pynq --memory zynq-hp",
        (f"transformers/{name}/rtl/{kind}",), of(value), most=most,
    )
    for name, label in (
        ("attention_64", "attention alone, 64 tokens"), ("minilm_64", "a layer of MiniLM-L6, 64 tokens"),
        ("minilm_128", "the same, 128 tokens"), ("deit_tiny", "a layer of DeiT-tiny"),
        ("gpt_10m", "two steps of a layer of the GPT of 10.6 M and its logits"),
        ("llama_10m", "the same of the Llama-like one"),
    )
    for kind, how in (("softmax", "norms on the CPU"), ("rounded", "rounded"))
    for part, what, unit, value, most in (
        ("cycles", "cycles of the RTL", "cycles", "rtl", None),
        ("timed", "by the timing model", "cycles", "timed", None),
        ("different", "values that differ", "", "different", 0),
    )
    if (name, kind) != ("attention_64", "rounded")
)  # fmt: skip
ATTENTION = tuple(
    Figure(
        f"attention-{tokens}", f"attention, 12 heads of 32, {tokens} tokens, on `pynq`: cycles over products / 256", "",
        MACHINE, f"{BENCH} transformers --models attention_{tokens} --config pynq --memory zynq-hp",
        (f"transformers/attention_{tokens}/int8",), of("ratio"), most=1.25,
    )
    for tokens in (64, 128, 512, 1024)
) + tuple(
    Figure(
        f"attention-{tokens}-{part}{key}", f"the same with softmax = {lanes}, {tokens} tokens: {what}", "", MACHINE,
        f"{BENCH} transformers --models attention_{tokens} --config pynq --memory zynq-hp",
        (f"transformers/attention_{tokens}/int8/softmax{lanes}",), of(value), most=most,
    )
    for lanes, key in ((4, ""), (8, "-8"))
    for tokens in (64, 128, 512, 1024)
    for part, what, value, most in (
        ("softmax", "cycles over products / 256", "ratio", 1.25),
        ("scores", "bytes of scores and probabilities in DRAM", "scores", 0),
    )
)  # fmt: skip

FOUR_BITS = tuple(
    Figure(
        f"four-bits-{name}{suffix}", f"{label}: {what}", unit,
        ("driver/quantize/four_bits.py", "driver/quantize/second_moments.py", "driver/quantize/quantize.py", "models"),
        f"{BENCH} four_bits --models {name}", (f"four_bits/{name}",), of(key, factor), most=most,
    )
    for name, label, unit, cost, bound, factor in (
        ("resnet8", "ResNet-8, 10,000 test images", "%", "points that weights of 4 bits cost", 0.5, 100),
        ("gpt", "the demo GPT, held-out text", "", "percent that weights of 4 bits add", 3, 1),
    )
    for suffix, key, what, unit, factor, most in (
        ("-cost", "cost", cost, "", 1, bound),
        ("-float", "float", "in floats", unit, factor, None),
        ("-8", "8", "weights of 8 bits", unit, factor, None),
        ("-4", "4", "weights of 4 bits", unit, factor, None),
        ("-2", "2", "weights of 2 bits", unit, factor, None),
        ("-1", "1", "weights of 1 bit", unit, factor, None),
    )
)  # fmt: skip
BITS = tuple(
    Figure(
        f"bits-{target}-{name}{suffix}", f"ResNet-18's convolutions, {bits} bits over bytes, {where}: {what}",
        "times as fast", KERNELS, f"{BENCH} bits", (f"bits/{target}/{name}",), of(key),
        least=1.0 if asked and key == "least" else None,
    )
    for target, where, asked in (
        ("here", "this processor", False), ("armv7", "a Cortex-A9, estimated", True),
        ("aarch64", "a Cortex-A53, estimated", True),
    )
    for name, bits in (("a1w1", "1 x 1"), ("a2w1", "2 x 1"), ("a2w2", "2 x 2"))
    for suffix, key, what in (
        ("", "whole", "all of them"), ("-least", "least", "the slowest"), ("-most", "most", "the fastest"),
    )
)  # fmt: skip

# Rewritten graphs ----------------------------------------------------------------------------------------------------

REWRITTEN = (
    *(
        Figure(f"superoptimise-{key}", f"{what}: cycles before over after, geometric mean", "", MACHINE,
               f"{BENCH} superoptimise --config pynq --seconds 60", (f"superoptimise/{key}",), of("ratio"), least=1.1)
        for key, what in (
            ("mean", "networks with branches"), ("listed", "whole and published networks of these"),
            ("with-branches", "the same with four narrow branches as the inception block"),
        )
    ),
    Figure("superoptimise-near", "Inception v3: seconds to within 1% of what five minutes find", "s", MACHINE,
           f"{BENCH} superoptimise --models inception_v3 --config pynq --seconds 300",
           ("superoptimise/inception_v3",), of("near"), most=60),
    *(
        Figure(f"superoptimise-{name}", f"{name}: cycles on `pynq` before over after, 60 s", "", MACHINE,
               f"{BENCH} superoptimise --models {name} --config pynq --seconds 60", (f"superoptimise/{name}",),
               of("ratio"), least=3 if name == "four_branches" else least)
        for names, least in ((SEARCHED, 1), (PARTLY, 1.05)) for name in names
    ),
    *(
        Figure(f"superoptimise-floats-{name}", f"{name} in floats: seconds on one thread before over after", "",
               KERNELS, f"{BENCH} superoptimise --only floats --models {name} --seconds {seconds}",
               (f"superoptimise/floats/{name}",), of("ratio"), least=1.05)
        for name, seconds in (("inception_v3_last", 60), ("inception_v3", 150))
    ),
    *(
        Figure(f"superoptimise-fast-math-{name}", f"{name} in floats, fast-math: seconds on one thread before over "
               "after", "", KERNELS, f"{BENCH} superoptimise --only floats --models {name} --seconds 20",
               (f"superoptimise/fast_math/{name}",), of("ratio"), least=1)
        for name in ("convolutions_in_pairs", "training_form")
    ),
    *(
        Figure(f"superoptimise-rtl-{name}", f"{name}: cycles of the RTL of `pynq` before over after", "", MACHINE,
               f"{BENCH} superoptimise --device rtl --models {name} --config pynq --seconds 30",
               (f"superoptimise/rtl/{name}",), of("ratio"), least=1.05)
        for name in (*MERGED, *CORRECTED)
    ),
)  # fmt: skip

# Times ---------------------------------------------------------------------------------------------------------------


def _simulators(side: str) -> Callable[[Details], float]:
    return lambda rows: float(median(row["processor_seconds"] for row in rows[side]))


def _ratio(rows: Details) -> float:
    key = "processor_seconds"
    return float(median(here[key] / base[key] for here, base in zip(rows["here"], rows["base"])))


TIMES = (
    Figure("resnet18-rtl-seconds", "ResNet-18 on the RTL simulator of `pynq`: processor time", "s", MACHINE,
           f"{BENCH} simspeed --models resnet18", ("simspeed/resnet18/pynq",), _simulators("here"), most=30),
    Figure("resnet18-rtl-ratio", "the same over that of plain Verilog", "", MACHINE,
           f"{BENCH} simspeed --models resnet18", ("simspeed/resnet18/pynq",), _ratio, most=0.5),
    Figure("resnet18-functional-seconds", "ResNet-18 on the functional simulator: wall time", "s", EVERYTHING,
           f"{BENCH} walltime", ("walltime/functional",), lambda details: details["seconds"][0], most=2),
    Figure("resnet18-timed-seconds", "ResNet-18 on `pynq`: wall time of the timing model", "s", ("hw", "sim"),
           f"{BENCH} timed --models resnet18 --config pynq", ("timed/seconds",), of("seconds"), most=0.3),
    Figure("resnet18-compile-seconds", "ResNet-18: wall time of compiling, in a new process without caches", "s",
           KERNELS, f"{BENCH} compile", ("compile/resnet18",), lambda details: details["cold"]["seconds"], most=10),
    Figure("build-cold-seconds", "RTL simulator of `pynq`, built: wall time", "s", ("hw", "sim"), f"{BENCH} build",
           ("build/cold",), of("printed"), most=180),
    Figure("build-cached-seconds", "the same from the cache", "s", ("hw", "sim"), f"{BENCH} build", ("build/cached",),
           of("printed"), most=0.5),
    Figure("eval-ratio", "demo model, 100 images, functional: images a second of `celosia eval` over those of a Python "
           "loop", "", EVERYTHING, f"{BENCH} eval", ("eval/demo",),
           lambda details: median(details["eval"]) / median(details["loop"]), least=3),
    Figure("demo-fresh-seconds", "`make demo` on a fresh clone", "s", EVERYTHING, f"{BENCH} demo", ("demo/fresh",),
           of("seconds"), most=360),
    Figure("demo-second-seconds", "the second time", "s", EVERYTHING, f"{BENCH} demo", ("demo/second",), of("seconds"),
           most=15),
    Figure("page-megabytes", "page of `celosia report` of ResNet-18", "MB", ("driver",),
           "python -m benchmarks.pictures *", ("pictures/resnet18_qdq_s8",), of("megabytes"), most=8),
    Figure("page-seconds", "until it is drawn in Chromium, best of 3", "s", ("driver",),
           "python -m benchmarks.pictures *", ("pictures/resnet18_qdq_s8",), of("seconds"), most=2),
)  # fmt: skip

# The CPU beside onnxruntime: processor time of onnxruntime over ours -------------------------------------------------

RECURRENT = ("lstm_128", "lstm_128_both_ways", "lstm_256_batch_8", "gru_128", "gru_128_both_ways")
FLOATS = {
    **{name: name for name in ("squeezenet1_1", "pplcnet_orientation", "fer_minixception", "mnist_conv")},
    "minilm_encoder": "minilm, int8 matrix products",
}  # fmt: skip
MADE = {
    "mobilenet_v2_224": "MobileNetV2",
    "resnet18_224": "ResNet-18",
    "lite": "an EfficientNet-Lite-like network",
    "detector": "a face detector",
}

CPU = (
    Figure("cpu-kernels-mean", "kernels, geometric mean", "", KERNELS, f"{BENCH} cpu", ("cpu/kernels",), of("geomean"),
           least=1.35),
    Figure("cpu-kernels-least", "kernels, the least", "", KERNELS, f"{BENCH} cpu", ("cpu/kernels",), of("least"),
           least=0.85),
    *(
        Figure(f"cpu-recurrent-{name}", f"LSTM and GRU, 64 steps, hidden 128 and 256, {name}", "", KERNELS,
               f"{BENCH} cpu --kernels *", tuple(f"cpu/kernel/{each}" for each in RECURRENT), value, least=0.9)
        for name, value in (
            ("least", lambda *rows: min(row["ratio"] for row in rows)),
            ("most", lambda *rows: max(row["ratio"] for row in rows)),
        )
    ),
    *(
        Figure(f"cpu-{name}", f"{label}, one thread", "", KERNELS, f"{BENCH} cpu --models {name}",
               (f"cpu/model/{name}",), of("ratio"), least=1)
        for name, label in FLOATS.items()
    ),
    *(
        Figure(f"cpu-{name}-tvm", f"{label}, over TVM 0.27 as installed", "", KERNELS, f"{BENCH} cpu --models {name}",
               (f"cpu/model/{name}",), of("over_tvm"), least=1.5)
        for name, label in FLOATS.items()
    ),
    *(
        Figure(f"cpu-squeezenet1_1-{name}", f"squeezenet1_1, compiling, {label}: processor time", "s", KERNELS,
               f"{BENCH} cpu --models squeezenet1_1", ("cpu/model/squeezenet1_1",), of(name), most=most)
        for name, label, most in (("cold", "cold", 15), ("cached", "from the cache", 1))
    ),
    *(
        Figure(f"cpu-{name}-{threads}", f"{label} in float, {threads} thread{'s' * (threads > 1)}", "", KERNELS,
               f"{BENCH} cpu --models {name}", (f"cpu/network/{name}/{threads}",), of("ratio"), least=least)
        for threads, least in ((1, 1), (2, 0.9))
        for name, label in MADE.items()
    ),
    Figure("cpu-tuned-mean", "kernels without products of signed bytes, and convolutions of three networks, tuned", "",
           KERNELS, f"{BENCH} tune_cpu --full", ("tune/cpu/kernels",), of("geomean"), least=1.25),
    Figure("cpu-tuned-least", "the least of them", "", KERNELS, f"{BENCH} tune_cpu --full", ("tune/cpu/kernels",),
           of("least"), least=0.85),
    Figure("cpu-tuned-below", "how many are below 0.85", "", KERNELS, f"{BENCH} tune_cpu --full", ("tune/cpu/kernels",),
           of("slow"), most=0),
)  # fmt: skip

# C -------------------------------------------------------------------------------------------------------------------

TARGETS = ("x86_64", "armv7-linux", "armv7-none", "aarch64-linux", "riscv32-none", "wasm32")
EXPORT = (
    *(
        Figure(f"export-{name}-bytes", f"{label}: bytes of C, on six targets, that `celosia run` has not",
               "", EVERYTHING, f"{BENCH} export --models {name}",
               tuple(f"export/{name}/{target}/functional" for target in TARGETS), total("different"), most=0)
        for name, label in (("demo", "the demo ResNet-8"), ("mobilenet_v2", "MobileNetV2"),
                            ("cpu_steps", "floats on the CPU between two launches"))
    ),
    Figure("export-lines", "lines of the C runtime, devices among them", "", ("driver/export",), f"{BENCH} export",
           tuple(f"export/runtime/{target}" for target in TARGETS), worst("lines"), most=1000),
    Figure("export-open", "accesses to registers with which exported C opens the demo ResNet-8", "",
           ("driver/export", "hw"), f"{BENCH} export --models demo", ("export/demo/armv7-linux/functional",),
           worst("open_accesses")),
    Figure("export-copied", "bytes that it copies then", "", EVERYTHING, f"{BENCH} export --models demo",
           ("export/demo/armv7-linux/functional",), worst("copied")),
    Figure("export-code", "its code in bytes, the largest of six targets", "", ("driver/export",), f"{BENCH} export",
           tuple(f"export/runtime/{target}" for target in TARGETS), worst("bytes"), most=32 << 10),
)  # fmt: skip

# Streams of samples --------------------------------------------------------------------------------------------------

STREAMS = (
    Figure("streams-half", "half the time on the CPU: images a second as a stream, over one after the other", "",
           EVERYTHING, f"{BENCH} streams", ("streams/half",), of("ratio"), least=1.7),
    Figure("streams-two", "ResNet-18 on two accelerators over one: images a second", "",
           EVERYTHING, f"{BENCH} streams", ("streams/two/resnet18",), of("ratio"), least=1.95),
    Figure("streams-cut", "ResNet-50, a part on each of two accelerators, over one: images a second", "",
           EVERYTHING, f"{BENCH} streams", ("streams/cut/resnet50",), of("ratio"), least=1.8),
    Figure("streams-cut-cycles", "its cycles over those of the longer part", "",
           EVERYTHING, f"{BENCH} streams", ("streams/cut/resnet50",),
           lambda row: row["cycles"][0] / max(row["cycles"][1:]), least=1.8),
)  # fmt: skip

# Tables that stand in their pages, of commands that are no rows of a benchmark ---------------------------------------

HARDWARE = ("bitstreams", "hw")


def _table(name: str, page: str, what: str, folders: tuple[str, ...], command: str) -> Figure:
    return Figure(name, f"{what} ([{page}]({page}))", "", folders, command)


TABLES = (
    _table("resources", "bitstreams.md", "what presets take of their devices", HARDWARE, f"{BENCH} hardware"),
    _table("block-resources", "bitstreams.md", "what parts for blocks of layers take", HARDWARE,
           "celosia bitstream report --board pynq-z2 --config FILE"),
    _table("clocks", "bitstreams.md", "estimates of the clock of a xc7z020", HARDWARE, "celosia bitstream timing"),
    _table("ecp5-clocks", "bitstreams.md", "clocks of routed designs on an ECP5", HARDWARE, "celosia bitstream ecp5"),
    _table("explored", "explore.md", "what `celosia explore` finds, and other searches", (*EVERYTHING, "bitstreams"),
           f"{BENCH} explore --full"),
    _table("presets-beaten", "explore.md", "what beats a preset on its board", (*EVERYTHING, "bitstreams"),
           f"{BENCH} explore --full --only best"),
    _table("searches", "tuning.md", "searches for schedules of ResNet-18's convolutions", MACHINE,
           f"{BENCH} tune --full --only regret"),
    _table("judged", "tuning.md", "the default search with the RTL as the judge", MACHINE,
           f"{BENCH} tune --full --only judged"),
    _table("learned", "tuning.md", "what models learn of other layers", MACHINE, f"{BENCH} tune --full --only model"),
    _table("tuned-kernels", "tuning.md", "kernels of the CPU and networks, tuned", KERNELS, f"{BENCH} tune_cpu --full"),
    _table("legal-programs", "fuzzing.md", "random programs on RTL and functional simulator",
           ("hw", "sim", "tests/fuzz"), "make fuzz"),
    _table("numerics", "numerics.md", "values beside onnxruntime's", ("compiler/numerics",),
           "python -m tests.compiler.numerics_sweep --count 2000"),
    _table("windows", "numerics.md", "attributes of windows beside onnxruntime", ("compiler",),
           "python -m tests.compiler.windows_sweep --count 11000 --whole 220 --seed 5"),
    _table("narrow-models", "low_precision.md", "random models of few bits beside onnxruntime", ("compiler",),
           "python -m tests.compiler.narrow_models --count 250 --seed 1000"),
    _table("sums-models", "low_precision.md", "random MatMulNBits on the accelerator", ("compiler",),
           "python -m tests.compiler.narrow_models --kinds sums --count 1000 --seed 5000"),
)  # fmt: skip

# The papers' charts -----------------------------------------------------------------------------------------------


def _paper(name: str, what: str, unit: str, row: str, key: str, folders: tuple[str, ...] = MACHINE, factor: float = 1,
           least: float | None = None) -> Figure:  # fmt: skip
    return Figure(
        f"paper-{name}", what, unit, folders, f"{BENCH} paper", (f"paper/{row}",), of(key, factor), least=least
    )


def _without(network: str, side: str) -> Callable[[Details], float | None]:
    return lambda details: details["ratios"].get(f"{network}, {side}")


PAPER = (
    *(
        _paper(f"hiding-{config}-{key}", f"ResNet-18 on `{config}`: {what}", unit, f"hiding/{config}", key, MACHINE,
               factor, least)
        for config in ("pynq", "ultra96")
        for key, what, unit, factor, least in (
            ("convolutions", "cycles of convolutions, without latency hiding over with", "", 1, 1.2),
            ("whole", "all cycles, without over with", "", 1, None),
            ("off_utilization", "share of the multipliers, without latency hiding", "%", 100, None),
            ("on_utilization", "share of the multipliers, with it", "%", 100, None),
        )
    ),
    *(
        Figure(f"paper-without-{part}-{network}-{side.lower()}", f"{network}: {side} without {what}, over with", "",
               folders, f"{BENCH} paper", (f"paper/without/{part}",), _without(network, side))
        for part, what, network, side, folders in (
            ("fusion", "fusion", "resnet18", "CPU", KERNELS), ("fusion", "fusion", "mobilenet_v2", "CPU", KERNELS),
            ("layout", "blocked layouts", "resnet18", "CPU", KERNELS),
            ("layout", "blocked layouts", "mobilenet_v2", "CPU", KERNELS),
            ("blocks", "blocks on chip", "mobilenet_v2", "cycles", MACHINE),
            ("memory", "reuse of memory", "resnet18", "bytes", MACHINE),
            ("memory", "reuse of memory", "mobilenet_v2", "bytes", MACHINE),
            ("records", "tuned schedules", "mobilenet_v2", "cycles", MACHINE),
            ("superoptimiser", "the superoptimiser", "four_branches", "cycles", MACHINE),
        )
    ),
    _paper("offload-arm", "ResNet-18: the board's CPU alone, over CPU and `pynq` (an estimate)", "",
           "offload/all", "over_arm"),
    _paper("offload-arm-conv", "its convolutions: the board's CPU over `pynq` (an estimate)", "", "offload/conv",
           "over_arm"),
    _paper("offload-cpu", "ResNet-18: one thread of the measuring CPU alone, over CPU and `pynq`", "",
           "offload/all", "ratio"),
    _paper("operators-resnet18", "convolutions of ResNet-18, float: times as fast as onnxruntime, geometric mean", "",
           "operators/resnet18", "geomean", KERNELS, least=1),
    _paper("operators-mobilenet", "convolutions of MobileNetV2, float: the same", "", "operators/mobilenet_v2",
           "geomean", KERNELS, least=1),
    _paper("operators-resnet18-numpy", "convolutions of ResNet-18, float: times as fast as numpy", "",
           "operators/resnet18", "numpy", KERNELS),
    _paper("operators-resnet18-tvm", "convolutions of ResNet-18, float: times as fast as TVM 0.27 as installed", "",
           "operators/resnet18", "TVM", KERNELS),
    _paper("operators-mobilenet-tvm", "convolutions of MobileNetV2, float: the same", "", "operators/mobilenet_v2",
           "TVM", KERNELS),
    *(
        _paper(f"arm-{network}{end}", f"convolutions of {label}, int8, Cortex-A53: {what} of LiteRT over ours", "",
               f"arm/{network}", key, KERNELS)
        for network, label in (("resnet18", "ResNet-18"), ("mobilenet_v2", "MobileNetV2"))
        for key, end, what in (("cycles", "", "estimated cycles"), ("instructions", "-instructions", "instructions"))
    ),
    _paper("language", "kernels of the tile language: times as fast as onnxruntime, geometric mean", "", "language",
           "geomean", KERNELS, least=1),
    _paper("language-numpy", "the same: times as fast as numpy", "", "language", "numpy", KERNELS),
    _paper("language-accelerator", "int8 kernels of the tile language on `pynq`: most cycles over the compiler's own",
           "", "language/accelerator", "most", MACHINE),
    _paper("workers", "trials a second of two workers over one", "", "workers", "ratio", EVERYTHING),
    _paper("designs-times", "ResNet-18: times fewer cycles than the smallest Config, for at most 12 x its LUTs", "",
           "designs", "times", MACHINE, least=11.5),
    _paper("designs-area", "its LUTs over those of the smallest", "", "designs", "area", MACHINE),
    _paper("minutes", "the page: minutes", "", "time", "minutes", EVERYTHING),
)  # fmt: skip

FIGURES = {
    "Cycles": CYCLES,
    "Bytes that differ": BYTES,
    "What there is": COUNTED,
    "What is proved": PROVED,
    "The timing model against the RTL": TIMED,
    "Times": TIMES,
    "The CPU: processor time of onnxruntime over ours": CPU,
    "Schedules that come with Celosia": GAIN,
    "Layers beside convolutions": BESIDE,
    "Rewritten graphs": REWRITTEN,
    "Transformers": (*TRANSFORMERS, *SOFTMAX, *ROUNDED, *ATTENTION, *DECODERS, *IN_BYTES, *SMOOTHED, *VIT, *ONE_LAYER),
    "Weights of four bits in hardware": (*PACKED, *SUMS),
    "Weights of four bits": FOUR_BITS,
    "Products of one and two bits": BITS,
    "Models as C": EXPORT,
    "Streams of samples": STREAMS,
    "The papers' charts": PAPER,
    "Tables of other pages": TABLES,
}
