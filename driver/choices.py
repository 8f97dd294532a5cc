"""Choices of options and their defaults. Imports nothing slow, for the command's help."""

TRIALS, KERNEL_TRIALS = 1000, 300
"""Default limits of `celosia tune`: schedules of layers, and of the CPU's kernels, that are tried."""
SEARCH_NAMES = ("bottleneck", "nsga2", "random")
"""Searches for Configs; the first is the default."""
OBJECTIVES = {
    "cycles": "cycles for an image, the geometric mean of the models",
    "latency": "milliseconds from start to end of a run, the geometric mean of the models",
    "period": "milliseconds from image to image: the less, the more images a second",
    "area": "percent of the device: the mean of LUTs, flip-flops, DSP blocks and block RAM",
    "energy": "millijoules for an image, an estimate: what logic and device draw, without processors and DRAM",
}
"""Objectives of an exploration, and the meaning of each figure."""
DEFAULT_OBJECTIVES = ("cycles", "area")
"""Objectives of an exploration that names none."""
ALSO = {"fps": "period"}
"""Other names of objectives that a user may give."""
BUDGET = "10m"
"""Time of an exploration that is given neither a time nor a number of points."""
WAYS = ("yosys", "rtl")
"""Ways to confirm the Configs of a front: count resources with Yosys, or run the RTL."""
ACTIVATIONS = ("int8", "uint8")
"""Types of activations; the first is the default."""
WEIGHTS = (8, 4, 2, 1)
"""Bits of weights; the first is the default."""
METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
"""Methods to get ranges from samples, with onnxruntime's names for them; the first is the default."""
OPERATORS = ("all", "products", "rotary", "attention")
"""Operators to quantise: every one that can be, products only, these and rotary positions, or all between products
in attention; of decoders `all` is what lies between embeddings and logits."""
AUTO = "auto"
"""Value of --smooth: alpha is searched for each place."""

SUPEROPTIMISERS = ("queue", "greedy")
"""Searches of `celosia optimise`; the first is the default."""
EXPORT_TARGETS = ("x86_64", "armv7-linux", "armv7-none", "aarch64-linux", "riscv32-none", "wasm32")
"""Targets of export; the first is the default."""


def parse_alpha(text: float | str) -> float | str:
    """Return the value of --smooth: AUTO, or a number from 0 to 1. ValueError for anything else.

    >>> parse_alpha("0.5"), parse_alpha("auto")
    (0.5, 'auto')
    """
    try:
        alpha = None if text == AUTO else float(text)
    except ValueError:
        alpha = -1.0
    if alpha is None:
        return AUTO
    if not 0 <= alpha <= 1:
        raise ValueError(f"smoothing takes {AUTO} or a number from 0 to 1, not {text!r}")
    return alpha
