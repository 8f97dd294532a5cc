"""PyTorch modules become Programs: six networks, in float and quantised by PT2E, against onnxruntime."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from driver_models import UNBLOCKED
from oracle import opened
from thorough import some

HOW = "PyTorch is not installed: `make torch` installs it beside the rest, then these tests run"
torch = pytest.importorskip("torch", reason=HOW)
pytest.importorskip("torchao", reason=HOW)

from torch import nn  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch_models import NETWORKS, UNet, exported, network, random_network  # noqa: E402
from torchao.quantization.pt2e import move_exported_model_to_eval  # noqa: E402
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e  # noqa: E402

import celosia  # noqa: E402
from celosia.driver.runtime import Runtime  # noqa: E402
from celosia.driver.torch.export import TorchError, require_all_pairs, to_onnx, trace  # noqa: E402
from celosia.driver.torch.quantizer import CelosiaQuantizer  # noqa: E402

LSTM_MACS = 2 * 7 * sum(2 * 4 * 24 * (size + 24) for size in (16, 48))
"""Of the two layers of the recurrent network, in both directions, which stay float."""


def pt2e(module: nn.Module, example: Any, quantizer: Any = None, samples: int = 4) -> nn.Module:
    """Return `module` quantised with random samples, of which the first is the example."""
    prepared = prepare_pt2e(torch.export.export(module, (example,)).module(), quantizer or CelosiaQuantizer())
    with torch.no_grad():
        for sample in (example, *(torch.randn_like(example) for _ in range(samples - 1))):
            prepared(sample)
    return convert_pt2e(prepared)


def oracle(proto: onnx.ModelProto, x: Any) -> list[np.ndarray]:
    """Return onnxruntime's outputs for the first input."""
    session = opened(proto, int8=True)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})


def flat(outputs: Any) -> list[np.ndarray]:
    return [x.numpy() for x in (outputs if isinstance(outputs, (tuple, list)) else (outputs,))]


def run(program: Any, x: Any) -> list[np.ndarray]:
    return list(Runtime(program).run({program.inputs[0].name: x.numpy()}).outputs.values())


# from_torch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(NETWORKS, ["attention"]))  # torch.compile has "lstm"
def test_float(name: str) -> None:
    module, x = network(name)
    proto, program = exported(module, x)
    if name == "attention":  # layers have the paths of their modules
        rows = {row["name"]: row["op"] for row in program.placements}
        assert {"norm", "qkv", "project", "mlp.0", "mlp.1", "mlp.2", "mlp.3", "head"} <= rows.keys()
        assert rows["qkv"] == "MatMul" and rows["qkv/Add"] == "Add" and program.name == "Attention"
        names = [node.name for node in proto.graph.node]
        assert len(set(names)) == len(names)
    with torch.no_grad():
        expected = flat(module(x))
    for found, oracles, want in zip(run(program, x), oracle(proto, x), expected, strict=True):
        np.testing.assert_allclose(found, oracles, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


QUANTISED = [
    ("detector", 3, "ultra96"),
    *((name, 0, "tiny") for name in NETWORKS),
    ("conv", 1, "pynq"),
    ("depthwise", 2, "pynq"),
]
QUICK = [case for case in QUANTISED[1:-2] if case[0] in ("residual", "depthwise", "detector")]
"""test_torch_compile.py quantises "attention", test_random_networks plain convolutions."""


@pytest.mark.parametrize(
    ("name", "seed", "config"),
    some(QUANTISED, QUICK),
)
def test_quantised(name: str, seed: int, config: str) -> None:
    module, x = network(name, seed)
    quantised = pt2e(module, x)
    proto, program = exported(quantised, x, UNBLOCKED if config == "tiny" else config)
    if name == "detector":  # also after PT2E, layers have the paths of their modules, and the model the class's name
        assert program.name == proto.graph.name == "Detector"
        layers = {layer.name for launch in program.launches for layer in launch.layers}
        assert {"stem.0", "fine.0", "coarse.0", "lateral", "merge.0", "boxes.0", "boxes.1", "classes.1"} <= layers
    for sample in (x, torch.randn_like(x)):
        for found, expected in zip(run(program, sample), oracle(proto, sample), strict=True):
            np.testing.assert_array_equal(found, expected)
    with torch.no_grad():
        for found, real in zip(run(program, x), flat(module(x)), strict=True):
            assert np.abs(found - real).max() < 0.1 * np.abs(real).max()
    assert program.macs_accelerator == program.macs_total - LSTM_MACS * (name == "lstm") > 0


BATCH = {0: torch.export.Dim("batch", min=1, max=64)}


@pytest.mark.parametrize("name", some(["conv", "residual", "depthwise"], ["conv"]))
def test_an_open_batch_is_one_program(name: str) -> None:
    module, x = network(name)
    program = celosia.from_torch(module, torch.cat([x, x]), "tiny", dynamic_shapes=(BATCH,), input_names=["x"])
    assert program.shape_text(program.inputs[0]).startswith("float32[n, ")
    for count in (1, 2, 5):
        images = torch.randn(count, *x.shape[1:])
        with torch.no_grad():
            for found, want in zip(run(program, images), flat(module(images)), strict=True):
                np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_an_open_batch_of_a_quantised_module() -> None:
    """A module exported with an open batch before quantisation gives onnxruntime's bytes for each batch."""
    module, x = network("conv")
    pair = torch.cat([x, torch.randn_like(x)])
    traced = torch.export.export(module, (pair,), dynamic_shapes=(BATCH,)).module()
    prepared = prepare_pt2e(traced, CelosiaQuantizer())
    with torch.no_grad():
        prepared(pair)
    quantised = convert_pt2e(prepared)
    proto, program = exported(quantised, pair, dynamic_shapes=(BATCH,))
    assert program.macs_accelerator == program.macs_total > 0
    for count in (1, 3):
        images = torch.randn(count, *x.shape[1:])
        for found, expected in zip(run(program, images), oracle(proto, images), strict=True):
            np.testing.assert_array_equal(found, expected)


GROUPS = [lambda: nn.GroupNorm(2, 8), lambda: nn.InstanceNorm2d(8), lambda: nn.GroupNorm(8, 8, affine=False)]


@pytest.mark.parametrize("normalise", some(GROUPS, GROUPS[:2]))
def test_an_open_batch_of_normalised_groups(normalise: Callable[[], nn.Module]) -> None:
    """GroupNorm has an open batch, though torch.onnx writes it as a Reshape to joined constants."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), normalise(), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    program = celosia.from_torch(module, torch.randn(2, 3, 8, 8), "tiny", dynamic_shapes=(BATCH,))
    assert program.shape_text(program.inputs[0]) == "float32[n, 3, 8, 8]"
    for count in (1, 3):
        images = torch.randn(count, 3, 8, 8)
        with torch.no_grad():
            np.testing.assert_allclose(run(program, images)[0], module(images), rtol=1e-4, atol=1e-5)


class Rows(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.reshape(2, -1) + 1


@pytest.mark.parametrize(
    ("make", "shape", "open_size", "sentence"),
    [
        (lambda: nn.LSTM(8, 4, batch_first=True), (2, 2, 8), BATCH,
         r"dimension 0 of input 'input' is 2, and .*: samples are not computed one by one: Expand .*; for any size"),
        (lambda: nn.Conv2d(3, 4, 1), (1, 3, 8, 8), {2: torch.export.Dim("height", min=2, max=64)},
         r"dimension 2 of input 'input' is 8, and .*: operators with weights meet it; .* what .*to_onnx returns"),
        (Rows, (2, 3), {0: torch.export.Dim.AUTO},
         r"dimension 0 of input 'x' is 2, and .*: torch.export found that the module takes no other"),
    ],
)  # fmt: skip
def test_a_size_that_becomes_fixed_is_said_with_its_reason(
    make: Callable[[], nn.Module], shape: tuple[int, ...], open_size: Any, sentence: str
) -> None:
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(shape)
    with pytest.warns(UserWarning, match=sentence) as caught:
        program = celosia.from_torch(module, x, "tiny", dynamic_shapes=(open_size,))
    assert len([each for each in caught if "dynamic_shapes" in str(each.message)]) == 1
    assert program.inputs[0].shape == shape
    with torch.no_grad():
        np.testing.assert_allclose(run(program, x)[0], tree_leaves(module(x))[0], rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():  # what the caller decides is no surprise
        warnings.filterwarnings("error", "dimension")
        celosia.from_torch(module, x, "tiny")


def test_an_exported_program_with_an_open_size_has_its_own_example() -> None:
    module, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(2, 4)
    program = celosia.from_torch(torch.export.export(module, (x,), dynamic_shapes=(BATCH,)), (), "tiny")
    assert program.shape_text(program.inputs[0]) == "float32[n, 4]" and program.name == "Sequential"
    exported = torch.export.export(module.bfloat16(), (x.bfloat16(),), dynamic_shapes=(BATCH,))
    assert celosia.from_torch(exported, (), "tiny").shape_text(program.inputs[0]).endswith("[n, 4]")


def test_other_open_sizes_are_the_example_s_and_a_runtime_s() -> None:
    """A Program has the example's height and width; a Runtime makes a Program for each other size."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    x, size = torch.randn(1, 3, 8, 8), torch.export.Dim("size", min=4, max=64)
    shapes = ({2: size, 3: torch.export.Dim("width", min=4, max=64)},)
    program = celosia.from_torch(module, x, "tiny", dynamic_shapes=shapes)
    assert program.inputs[0].shape == (1, 3, 8, 8)
    with pytest.raises(celosia.compiler.program.InputError, match=r"1, 3, 8, 8"):
        Runtime(program).run({program.inputs[0].name: np.zeros((1, 3, 9, 8), np.float32)})
    other = celosia.from_torch(module, x, "tiny", dynamic_shapes=shapes, shapes={"input": (1, 3, 12, 10)})
    assert other.inputs[0].shape == (1, 3, 12, 10)
    with Runtime(to_onnx(module, x, dynamic_shapes=shapes, input_names=["image"]), config="tiny") as runtime:
        for height, width in ((8, 8), (12, 5), (8, 8)):
            image = torch.randn(1, 3, height, width)
            found = runtime.run({"image": image.numpy()}).outputs
            with torch.no_grad():
                np.testing.assert_allclose(next(iter(found.values())), module(image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (({1: torch.export.Dim("channels")},), r"trace Sequential: .*channels.* constant \(3\)"),
        (({0: torch.export.Dim("batch", min=4)},), r"trace Sequential: .*not in range \[4"),
        ({"image": BATCH}, r"must be the arg names \['input'\]"),
        ((BATCH, BATCH), "has 1 elements, but `dynamic_shapes` has 2"),
    ],
)
def test_open_sizes_that_cannot_be(shapes: Any, sentence: str) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    with pytest.raises(TorchError, match=sentence) as caught:
        celosia.from_torch(module, torch.randn(2, 3, 4, 4), "tiny", dynamic_shapes=shapes)
    assert "\n" not in str(caught.value)
    exported = torch.export.export(module, (torch.randn(2, 3, 4, 4),))
    with pytest.raises(TorchError, match=r"dynamic_shapes to torch\.export\.export"):
        to_onnx(exported, dynamic_shapes=shapes)


@pytest.mark.parametrize("seed", some(range(4), [1]))
def test_random_networks(seed: int) -> None:
    module, x = random_network(seed)
    quantised = pt2e(module, x)
    proto, program = exported(quantised, x, ("tiny", "pynq", "zcu104")[seed % 3])
    for sample in (x, torch.randn_like(x)):
        np.testing.assert_array_equal(run(program, sample)[0], oracle(proto, sample)[0])
    assert program.macs_accelerator == program.macs_total > 0


def test_clamps_stay_in_integers() -> None:
    """Clamps stay in integers, as in onnxruntime, which fuses a ReLU6 only if its bounds are constants."""
    module, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 1), nn.Hardtanh(-0.5, 0.3)).eval(), None
    x = 4 * torch.randn(1, 3, 8, 8)
    quantised = pt2e(module, x)
    proto, program = exported(quantised, x)
    assert not [node for node in proto.graph.node if node.op_type == "CastLike"]
    for _ in range(20):
        sample = 6 * torch.randn_like(x)
        np.testing.assert_array_equal(run(program, sample)[0], oracle(proto, sample)[0])


def operators(program: Any, place: str = "accelerator") -> list[str]:
    return [row["op"] for row in program.placements if row["place"] == place]


def test_nothing_is_computed_where_scales_are_shared() -> None:
    """MaxPool and parts of concatenations share scales, so that nothing is rescaled."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(32, 8, 1)

        def forward(self, x: Any) -> Any:
            a = self.a(x)
            pooled = nn.functional.max_pool2d(a, 3, 1, 1)
            both = torch.cat([pooled, self.b(a)], 1)
            return self.c(both), torch.cat([both, pooled], 1)

    torch.manual_seed(0)
    module, x = Net().eval(), torch.randn(1, 3, 8, 8)
    quantised = pt2e(module, x)
    proto, program = exported(quantised, x)
    assert "Table" not in operators(program) + operators(program, "cpu")
    assert operators(program).count("QLinearConv") == 3
    for found, expected in zip(run(program, x), oracle(proto, x), strict=True):
        np.testing.assert_array_equal(found, expected)


UP = {
    "2 x 2, of a U-Net": (lambda: nn.ConvTranspose2d(8, 6, 2, 2), (1, 8, 5, 7)),
    "normalised, clamped": (lambda: nn.Sequential(
        nn.ConvTranspose2d(8, 6, 4, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()), (2, 8, 4, 4)),
    "dilated, more outside": (lambda: nn.ConvTranspose2d(8, 5, 3, 2, 1, output_padding=1, dilation=2), (1, 8, 4, 5)),
    "depthwise": (lambda: nn.ConvTranspose2d(8, 8, 3, 2, 1, groups=8), (1, 8, 5, 5)),
    "two groups": (lambda: nn.ConvTranspose2d(8, 6, 3, 2, groups=2), (1, 8, 4, 4)),
    "signals": (lambda: nn.ConvTranspose1d(8, 6, 4, 2, 1), (2, 8, 9)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", some(UP, UP.keys() - {"2 x 2, of a U-Net", "depthwise"})
)  # a U-Net below has the first
def test_transposed_convolutions(name: str) -> None:
    """A transposed convolution may differ by one next to a tie: onnxruntime computes it in floats
    (docs/numerics.md)."""
    make, shape = UP[name]
    torch.manual_seed(0)
    up, x = make(), torch.randn(shape)
    for parameter in up.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    channels = up(x).shape[1]
    up.eval()
    with torch.no_grad():
        (up[0] if isinstance(up, nn.Sequential) else up).weight[:, 0] *= 20  # one scale for all would lose the others
    quantised = pt2e(up, x)
    proto, program = exported(quantised, x)
    assert "QLinearConvTranspose" in operators(program)
    scaled = [node for node in quantised.graph.nodes if "dequantize_per_channel" in str(node.target)]
    assert [quantised.get_buffer(node.args[1].target).numel() for node in scaled] == [channels] * (name != "two groups")
    last = next(node for node in proto.graph.node if proto.graph.output[0].name in node.output)
    (step,) = [
        onnx.numpy_helper.to_array(node.attribute[0].t) for node in proto.graph.node if last.input[1] in node.output
    ]
    steps = 0
    for sample in (x, *(torch.randn_like(x) for _ in range(4))):
        (found,), (expected,) = run(program, sample), oracle(proto, sample)
        apart = np.rint(np.abs(found - expected) / step)
        assert apart.max() <= 1
        steps += apart.sum() / apart.size
    assert steps < 0.01


def test_a_u_net_is_of_the_accelerator_alone() -> None:
    """A U-Net runs only on the accelerator; parts share a scale where they are joined.

    The reference is PT2E's float32 arithmetic: values near a tie may differ by a step and change later values.
    """
    torch.manual_seed(0)
    module, x = UNet().eval(), torch.randn(1, 3, 16, 16)
    quantised = pt2e(module, x)
    program = celosia.from_torch(quantised, x, "tiny")
    assert program.macs_accelerator == program.macs_total > 0
    assert set(operators(program, "cpu")) == {"QuantizeLinear", "DequantizeLinear"}
    with torch.no_grad():
        found, expected = run(program, x)[0], quantised(x).numpy()
    assert (found == expected).mean() > 0.99
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.thorough  # test_torch_transformers.py trains an encoder; torchao takes long to search for BatchNorm
def test_training_with_fake_quantisation() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    x, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    trained = prepare_qat_pt2e(torch.export.export(module, (x,)).module(), CelosiaQuantizer(qat=True))
    optimiser, losses = torch.optim.SGD(trained.parameters(), 0.05), []
    for _ in range(8):
        losses.append(nn.functional.cross_entropy(trained(x), labels))
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.5 * losses[0]
    move_exported_model_to_eval(trained)
    quantised = convert_pt2e(trained)
    proto, program = exported(quantised, x)
    assert program.macs_accelerator == program.macs_total > 0
    (found,), (expected,) = run(program, x), oracle(proto, x)
    np.testing.assert_array_equal(found, expected)
    assert (found.argmax(1) == labels.numpy()).mean() > 0.8


def test_another_quantizer() -> None:
    """XNNPACK's quantizer of PT2E works, too, with a float bias and ranges that the accelerator supports."""
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    module, x = network("conv")
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    quantised = pt2e(module, x, quantizer)
    proto, program = exported(quantised, x)
    np.testing.assert_array_equal(run(program, x)[0], oracle(proto, x)[0])
    assert program.macs_accelerator == program.macs_total


def test_what_is_excluded_stays_float() -> None:
    module, x = network("conv")
    program = celosia.from_torch(pt2e(module, x, CelosiaQuantizer(exclude=["3", "7"])), x, "tiny")
    assert operators(program).count("QLinearConv") == 1 and operators(program).count("QGemm") == 1
    with pytest.raises(ValueError, match="submodule 'nothing'"):
        pt2e(module, x, CelosiaQuantizer(exclude=["nothing"]))


def test_names_and_keywords() -> None:
    class Net(nn.Module):
        def forward(self, a: Any, b: Any, *, scale: Any) -> Any:
            return (a + b) * scale, {"difference": a - b}

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    program = celosia.from_torch(Net().eval(), (a, b), "tiny", kwargs={"scale": torch.tensor(2.0)})
    assert [each.name for each in program.inputs] == ["a", "b", "scale"] and program.name == "Net"
    feed = {"a": a.numpy(), "b": b.numpy(), "scale": np.array(2, np.float32)}
    outputs = list(Runtime(program).run(feed).outputs.values())
    np.testing.assert_array_equal(outputs[0], ((a + b) * 2).numpy())
    np.testing.assert_array_equal(outputs[1], (a - b).numpy())
    names = celosia.from_torch(nn.ReLU().eval(), a, "tiny", input_names=["x"], output_names=["y"])
    assert (names.inputs[0].name, names.outputs[0].name) == ("x", "y")


def test_modules_that_are_called_twice_keep_their_path() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.inner(self.inner(x).relu())

    names = [row["name"] for row in celosia.from_torch(Twice().eval(), torch.randn(2, 4), "tiny").placements]
    assert len(set(names)) == 3 and sum(name.startswith("inner") for name in names) == 2


def test_results_of_every_kind() -> None:
    @dataclass
    class Output:
        logits: Any
        hidden: Any
        loss: Any = None

    class Net(nn.Module):
        def __init__(self, how: Callable[..., Any]) -> None:
            super().__init__()
            self.linear, self.how = nn.Linear(4, 3), how

        def forward(self, x: Any) -> Any:
            y = self.linear(x)
            return self.how(y, y + 1)

    x = torch.randn(4, 2).T
    for how in (Output, lambda y, z: {"logits": y, "more": (z, [y])}, lambda y, z: (y, z, y, None)):
        module = Net(how).eval()
        with torch.no_grad():
            made = module(x)
            expected = tree_leaves([made.logits, made.hidden] if isinstance(made, Output) else made)
        found = run(celosia.from_torch(module, x, "tiny"), x)
        for one, other in zip(found, [each for each in expected if each is not None], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    named = celosia.from_torch(Net(lambda y, z: (y, z, y)).eval(), x, "tiny", output_names=["a", "b", "c"])
    assert [each.name for each in named.outputs] == ["a", "b", "c"]


def test_examples_and_modules_that_are_none() -> None:
    module, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    for given, example, sentence in (
        (module, x.numpy(), r"an array of numpy's; give torch.from_numpy\(array\)"),
        (module, {"input": x}, "give those with names as kwargs"),
        (torch.jit.trace(module, x), x, "has its operators no more; give the module that it was made of"),
    ):
        with pytest.raises(TorchError, match=sentence):
            to_onnx(given, example)
    program = celosia.from_torch(torch.compile(module, backend="celosia"), x, "tiny")
    assert program.name == "Linear" and {row["name"] for row in program.placements} == {"node_linear"}


def test_an_exported_program() -> None:
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(1, 3, 5, 5)
    program = celosia.from_torch(torch.export.export(module, (x,)), (), "tiny")
    assert program.name == "Sequential"
    np.testing.assert_allclose(run(program, x)[0], module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


# Errors ----------------------------------------------------------------------------------------------------------


class Of(nn.Module):
    """A function as a module in evaluation mode."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("seen", torch.zeros(1))
        self.eval()

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def count(module: Of, x: Any) -> Any:
    module.seen.add_(1)
    return x + module.seen


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1)), "Sequential is in training mode; call its eval"),
        (len, "a module of PyTorch is needed, not builtin_function_or_method"),
        (
            nn.Linear(3, 3, device="meta").eval(),
            r"Linear and its example are to be on the CPU, and a tensor is on meta;",
        ),
        (Of(count), "the module writes to 'seen', which a Program cannot; call eval"),
        (Of(lambda module, x: x.add_(1)), "the module writes to 'x'"),
        (Of(lambda module, x: x + torch.rand(3)), r"rand \(aten.rand.default\) draws random numbers"),
        (Of(lambda module, x: nn.functional.dropout(x, 0.5, True)), "draws random numbers; call eval"),
        (Of(lambda module, x: x if x.sum() > 0 else -x), "torch.export cannot trace Of: .*data-dependent"),
        (Of(lambda module, x: (x, x.shape[0])), "the module returns 3, which is no tensor"),
        (Of(lambda module, x: torch.linalg.qr(x)[0]), "torch.onnx cannot write the module: .*linalg_qr"),
    ],
)
def test_refusals(module: Any, sentence: str) -> None:
    with pytest.raises(TorchError, match=sentence) as caught:
        to_onnx(module, torch.randn(3, 3))
    assert "\n" not in str(caught.value)


def test_a_lost_pair_is_named() -> None:
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval(), torch.randn(1, 3, 6, 6)
    quantised = pt2e(module, x)
    program, proto = trace(quantised, x), to_onnx(quantised, x)
    require_all_pairs(program, proto)
    for op in ("QuantizeLinear", "DequantizeLinear"):
        nodes = [node for node in proto.graph.node if node.op_type == op]
        planted = copy.deepcopy(proto)
        planted.graph.node.remove(nodes[2])
        name = nodes[2].name.removeprefix("node_")
        with pytest.raises(TorchError, match=rf"{len(nodes)} operators.*{len(nodes) - 1} {op}: {name};"):
            require_all_pairs(program, planted)
        planted.graph.node.extend(nodes[1:3])
        with pytest.raises(TorchError, match="1 too many"):
            require_all_pairs(program, planted)


def test_torch_optimiser_is_left_out() -> None:
    """torch's optimiser stays off because it removes quantisation pairs; this test fails once that is fixed."""
    module, x = network("residual")
    exported = trace(pt2e(module, x), x)
    proto = torch.onnx.export(exported, dynamo=True, optimize=True, verbose=False).model_proto
    with pytest.raises(TorchError, match="operators that"):
        require_all_pairs(exported, proto)


def test_a_narrow_range_is_refused() -> None:
    from dataclasses import replace

    quantizer = CelosiaQuantizer()
    quantizer.activation = replace(quantizer.activation, quant_min=-127)
    module, x = nn.Conv2d(3, 4, 1).eval(), torch.randn(1, 3, 4, 4)
    with pytest.raises(TorchError, match=r"-127\.\.127, .*-128\.\.127"):
        to_onnx(pt2e(module, x, quantizer), x)


# Fake quantisation -------------------------------------------------------------------------------------------------


class Fake(nn.Module):
    """Passes x through fake quantisation by a given function."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function, self.scales = function, nn.Buffer(torch.tensor([0.05, 0.02, 0.03]))
        self.zeros = nn.Buffer(torch.tensor([3, 0, -2], dtype=torch.int32))

    def forward(self, x: Any) -> Any:
        return self.function(self, torch.relu(x))


FAKES: dict[str, Callable[[Any, Any], Any]] = {
    "int8": lambda m, x: torch.fake_quantize_per_tensor_affine(x, 0.05, 3, -128, 127),
    "uint8": lambda m, x: torch.fake_quantize_per_tensor_affine(x, 0.05, 3, 0, 255),
    "four-bits": lambda m, x: torch.fake_quantize_per_tensor_affine(x, 0.05, 3, -8, 7),
    "tensors": lambda m, x: torch.fake_quantize_per_tensor_affine(x, m.scales[:1], m.zeros[:1], -100, 100),
    "channels": lambda m, x: torch.fake_quantize_per_channel_affine(x, m.scales, m.zeros, 1, -128, 127),
    "narrow-channels": lambda m, x: torch.fake_quantize_per_channel_affine(x, m.scales, m.zeros, 1, -100, 100),
}


@pytest.mark.parametrize("name", some(FAKES, ("four-bits", "narrow-channels")))
def test_fake_quantisation_in_a_module(name: str) -> None:
    module, x = Fake(FAKES[name]).eval(), torch.randn(1, 3, 4, 4)
    proto, program = exported(module, x)
    (found,), (expected,) = run(program, x), oracle(proto, x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, module(x).numpy(), atol=1e-6)


def test_fake_quantisation_of_more_than_8_bits_says_what_to_do() -> None:
    module = Fake(lambda m, x: torch.fake_quantize_per_tensor_affine(x, 0.001, 3, 0, 65535)).eval()
    with pytest.raises(TorchError, match=r"0\.\.65535.*8 bits.*PT2E") as caught:
        to_onnx(module, torch.randn(1, 3, 4, 4))
    assert "\n" not in str(caught.value)


def test_fake_quantize_submodules() -> None:
    """Modules of eager-mode training run with their observers off; with observers on, the error names PT2E."""
    from torch.ao.quantization import QuantStub, disable_observer, get_default_qat_qconfig, prepare_qat

    torch.manual_seed(1)
    module = nn.Sequential(QuantStub(), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    module.qconfig = get_default_qat_qconfig("fbgemm")
    prepare_qat(module.train(), inplace=True)
    x = torch.randn(1, 3, 8, 8)
    module(x)
    module.eval()
    with pytest.raises(TorchError, match=r"FakeQuantize.*disable_observer.* PT2E"):
        to_onnx(module, x)
    module.apply(disable_observer)
    before = dict(module.named_modules())
    proto, program = exported(module, x)
    assert dict(module.named_modules()) == before
    (found,), (expected,) = run(program, x), oracle(proto, x)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(found, module(x).detach().numpy(), atol=0.02 * np.abs(expected).max())


def test_an_observer_is_named() -> None:
    from torch.ao.quantization import MinMaxObserver

    with pytest.raises(TorchError, match=r"1 is a MinMaxObserver.*PT2E"):
        to_onnx(nn.Sequential(nn.ReLU(), MinMaxObserver()).eval(), torch.randn(1, 3))
