"""Transformers run through PT2E and from_torch, and through torch.compile.

The reference is onnxruntime for bytes, and PyTorch for all else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle import opened
from thorough import some

HOW = "PyTorch is not installed: `make torch` installs it beside the rest, then these tests run"
torch = pytest.importorskip("torch", reason=HOW)
pytest.importorskip("torchao", reason=HOW)

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch_models import exported  # noqa: E402
from torchao.quantization.pt2e import move_exported_model_to_eval  # noqa: E402
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e  # noqa: E402

import celosia  # noqa: E402
from celosia.driver.runtime import Runtime  # noqa: E402
from celosia.driver.torch import products  # noqa: E402
from celosia.driver.torch.decompose import PRODUCTS, aten, expose_products  # noqa: E402
from celosia.driver.torch.quantizer import KEY, CelosiaQuantizer  # noqa: E402
from celosia.hw.spec.config import PRESETS  # noqa: E402

WIDTH, HEADS, INNER, LENGTH, WORDS = 32, 2, 16, 8, 20
"""Channels, heads and channels of one; tokens of the caches, words of the language."""
CONFIG = replace(PRESETS["pynq"], forward=False)
"""Without blocks, whose search takes the compiler longer than all else."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# Networks --------------------------------------------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    """Split [batch, tokens, WIDTH] to [batch, HEADS, tokens, INNER]."""
    return x.reshape(*x.shape[:2], HEADS, INNER).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Feed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Vit(nn.Module):
    """A vision transformer of 8×8 images in patches of 2×2, with a class token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.feed = nn.Conv2d(3, WIDTH, 2, 2), nn.LayerNorm(WIDTH), Feed()
        self.token, self.places = (nn.Parameter(torch.randn(1, n, WIDTH)) for n in (1, 17))
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        q, k, v = map(heads, self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.project(joined(F.scaled_dot_product_attention(q, k, v)))
        return self.head(self.last(x + self.feed(x))[:, 0])


class Gpt(nn.Module):
    """A decoder of one word: its inputs are the word and keys and values of the last LENGTH words.

    Keys and values are [1, HEADS, LENGTH, INNER]. seen: [1, LENGTH] float, -1e9 for positions before the first word,
    else 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(4 * LENGTH, WIDTH)
        self.norm, self.feed, self.last = nn.LayerNorm(WIDTH), Feed(), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, word: Tensor, place: Tensor, seen: Tensor, keys: Tensor, values: Tensor) -> Any:
        x = self.words(word) + self.places(place)
        y = self.norm(x)
        keys = torch.cat([keys[:, :, 1:], heads(self.k(y))], 2)
        values = torch.cat([values[:, :, 1:], heads(self.v(y))], 2)
        scores = heads(self.q(y)) @ keys.transpose(-2, -1) / INNER**0.5 + seen[:, None, None]
        x = x + self.project(joined(scores.softmax(-1) @ values))
        return self.head(self.last(x + self.feed(x))), keys, values


def steps(module: Any, count: int) -> Iterator[tuple[tuple[Tensor, ...], Any]]:
    """Run a Gpt on random words; return the arguments of each step."""
    keys, values = torch.zeros(1, HEADS, LENGTH, INNER), torch.zeros(1, HEADS, LENGTH, INNER)
    for place in range(count):
        seen = torch.where(torch.arange(LENGTH) < LENGTH - 1 - place, -1e9, 0.0)[None]
        given = torch.randint(WORDS, (1, 1)), torch.tensor([[place]]), seen, keys, values
        made = module(*given)
        yield given, made
        keys, values = made[1:]


def encoder(layers: int = 2) -> nn.Module:
    """Return an encoder with GELU. After a ReLU, onnxruntime would compute a product of three axes in floats."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


SAMPLES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], list[tuple[Tensor, ...]]]]] = {
    "encoder": (lambda: encoder(1), lambda module, n: [(torch.randn(2, 7, WIDTH),) for _ in range(n)]),
    "vit": (Vit, lambda module, n: [(torch.randn(1, 3, 8, 8),) for _ in range(n)]),
    "gpt": (Gpt, lambda module, n: [given for given, _ in steps(module, n)]),
}
"""What makes a network, and a number of examples of its arguments."""


def pt2e(module: nn.Module, samples: list[tuple[Tensor, ...]], quantizer: Any = None) -> Any:
    prepared = prepare_pt2e(torch.export.export(module, samples[0]).module(), quantizer or CelosiaQuantizer())
    for sample in samples:
        prepared(*sample)
    return convert_pt2e(prepared)


def row(made: Any) -> list[np.ndarray]:
    return [x.numpy() for x in (made if isinstance(made, (tuple, list)) else (made,))]


def run(program: Any, given: tuple[Tensor, ...]) -> list[np.ndarray]:
    feed = {tensor.name: x.numpy() for tensor, x in zip(program.inputs, given, strict=True)}
    return list(Runtime(program).run(feed).outputs.values())


def oracle(proto: Any, arrays: tuple[Tensor, ...]) -> list[np.ndarray]:
    """Return onnxruntime's outputs without the fusion of residual and normalisation, which rounds differently.

    At a tie, that rounding would change a byte and all that follows.
    """
    session = opened(proto, int8=True, without=["SkipLayerNormFusion"])
    return session.run(None, {info.name: x.numpy() for info, x in zip(session.get_inputs(), arrays, strict=True)})


def product_places(program: Any) -> list[str]:
    """Return where the products of two activations run."""
    return [row["place"] for row in program.placements if "matmul" in row["name"] and row["op"].endswith("MatMul")]


# Both ways in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(SAMPLES, ["gpt"]))  # `vit` is below, docs/pytorch.md has an encoder
def test_quantised(name: str) -> None:
    """Quantised transformers give onnxruntime's values, and PyTorch's up to 2%.

    Normalisations and softmax are float in PyTorch: values near a tie may differ by a step and change later values.
    """
    make, samples = SAMPLES[name]
    module = make().eval()
    quantised = pt2e(module, samples(module, 32))
    arguments = samples(quantised, 4)
    proto, program = exported(quantised, arguments[0], CONFIG)
    for sample in arguments:
        outputs, expected = run(program, sample), row(quantised(*sample))
        for output, exact, by_torch, real in zip(
            outputs, oracle(proto, sample), expected, row(module(*sample)), strict=True
        ):
            np.testing.assert_allclose(output, exact, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(output, by_torch, atol=0.02 * np.abs(by_torch).max())
            assert np.abs(output - real).max() < 0.1 * np.abs(real).max()
        for cache, old_cache in zip(outputs[1:], sample[3:]):  # a Gpt's, in whose bytes nothing moves
            np.testing.assert_array_equal(cache[:, :, :-1], old_cache[:, :, 1:])
    assert program.macs_accelerator == program.macs_total > 0
    assert product_places(program) == ["accelerator"] * 2


def test_an_open_batch() -> None:
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    pair = torch.randn(2, 3, 8, 8)
    prepared = prepare_pt2e(
        torch.export.export(Vit().eval(), (pair,), dynamic_shapes=(batch,)).module(), CelosiaQuantizer()
    )
    prepared(pair)
    quantised = convert_pt2e(prepared)
    program = celosia.from_torch(quantised, pair, CONFIG, dynamic_shapes=(batch,))
    assert program.shape_text(program.inputs[0]) == "float32[n, 3, 8, 8]"
    assert program.macs_accelerator == program.macs_total > 0
    found = [run(program, (pair[:count],))[0] for count in (1, 2)]
    np.testing.assert_allclose(found[1], quantised(pair), atol=0.02 * abs(found[1]).max())
    np.testing.assert_array_equal(found[0], found[1][:1])


@pytest.mark.parametrize("name", some(SAMPLES, ["gpt"]))  # test_torch_fused.py has encoders
def test_floats_by_torch_compile(name: str) -> None:
    make, samples = SAMPLES[name]
    module, made = make().eval(), []
    call = torch.compile(module, backend="celosia", options={"config": CONFIG, "programs": made})
    for each in samples(module, 2):
        for found, expected in zip(row(call(*each)), row(module(*each)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert len(made) == 1


def test_trained_with_fake_quantisation() -> None:
    module, x, wanted = encoder(1), torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
    trained = prepare_qat_pt2e(torch.export.export(module, (x,)).module(), CelosiaQuantizer(qat=True))
    optimiser, losses = torch.optim.SGD(trained.parameters(), 0.1), []
    with torch.enable_grad():
        for _ in range(4):
            losses.append(F.mse_loss(trained(x), wanted))
            optimiser.zero_grad()
            losses[-1].backward()
            optimiser.step()
    assert losses[-1] < losses[0]
    move_exported_model_to_eval(trained)
    quantised = convert_pt2e(trained)
    proto, program = exported(quantised, x, CONFIG)
    np.testing.assert_allclose(run(program, (x,))[0], oracle(proto, (x,))[0], rtol=1e-5, atol=1e-6)
    assert program.macs_accelerator == program.macs_total > 0


# The quantizer ---------------------------------------------------------------------------------------------------


class Of(nn.Module):
    """A function of the module and its inputs, with one parameter."""

    def __init__(self, function: Callable[..., Any], shape: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def annotated(function: Callable[..., Any], *inputs: Tensor, shape: tuple[int, ...] = (1,)) -> Any:
    """Return the graph of a function with the quantizer's annotations."""
    quantizer = CelosiaQuantizer()
    exported = torch.export.export(Of(function, shape).eval(), inputs).module()
    return quantizer.annotate(quantizer.transform_for_annotation(exported)).graph


def notes(graph: Any, *names: str) -> list[Any]:
    return [node.meta.get(KEY) for node in graph.nodes if products.name_of(node) in names]


def linears(graph: Any) -> list[Any]:
    return [node for node in graph.nodes if products.name_of(node) == "linear"]


@pytest.mark.parametrize(
    ("function", "shapes", "weight"),
    [
        (lambda m, x: x @ m.weight, [(2, 5, 8)], (8, 3)),
        (lambda m, x: m.weight.transpose(1, 2) @ x, [(2, 5, 8)], (2, 5, 3)),
        (lambda m, x: torch.bmm(x, m.weight * 2), [(2, 5, 8)], (2, 8, 3)),
        (lambda m, a, b: a @ b, [(2, 5, 8), (8,)], ()),
        (lambda m, a, b: a @ b, [(2, 5, 8), (1, 8, 3)], ()),
        (lambda m, a, b: a @ b, [(2, 5, 8), (8, 3)], ()),
    ],
)
def test_other_products_stay_as_they_were(function: Any, shapes: Any, weight: tuple[int, ...]) -> None:
    """Products by a constant or a vector, and with broadcast matrices, are not annotated: the accelerator lacks
    them."""
    graph = annotated(function, *map(torch.randn, shapes), shape=weight)
    assert not any(notes(graph, "matmul", "bmm", "transpose", "mul"))


def test_operands_are_symmetric_and_nothing_else() -> None:
    """Operands of a product are symmetric back to the product that makes them, through views, parts and concatenations.

    Results of other products keep their zero point.
    """

    def function(m: Any, x: Tensor, y: Tensor, cache: Tensor) -> Any:
        a, b = F.linear(x, m.weight).split([3, 5], 1)
        both = torch.cat([cache, b * 0.5], 1).transpose(1, 2)
        return torch.bmm(F.relu(F.linear(y, m.weight)), both), F.linear(a, m.weight), F.linear(y, m.weight)

    arguments = torch.randn(2, 8, 6), torch.randn(2, 4, 6), torch.randn(2, 2, 6)
    graph = annotated(function, *arguments, shape=(6, 6))
    assert not [node for node in graph.nodes if node.target is operator.getitem]
    kinds = [note.output_qspec and getattr(note.output_qspec, "qscheme", "shared") for note in notes(graph, "linear")]
    symmetric, affine = torch.per_tensor_symmetric, torch.per_tensor_affine
    assert kinds == [symmetric, None, affine, affine]  # the second one's is its relu's
    assert [note.output_qspec.qscheme for note in notes(graph, "relu", "mul", "bmm")] == [symmetric, symmetric, affine]
    (product,) = notes(graph, "bmm")
    assert {spec.qscheme for spec in product.input_qspec_map.values()} == {symmetric}


def masked(m: Any, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (F.linear(q, m.weight) @ k.transpose(1, 2) * 0.3 + mask.unsqueeze(0)).softmax(-1) @ k


@pytest.mark.parametrize("planted", [False, True])
def test_masks_stay_float(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks stay in floats: as bytes, a mask of -1e9 would leave no steps to the scores."""
    if planted:
        monkeypatch.setattr(products.ActivationProducts, "_masks", lambda self, node: set())
    module = Of(masked, (6, 6)).eval()
    arguments = torch.randn(1, 4, 6), torch.randn(1, 5, 6), torch.where(torch.rand(4, 5) < 0.4, -1e9, 0.0)
    found, real = pt2e(module, [arguments])(*arguments), module(*arguments)
    assert (abs(found - real).max() > 0.1 * abs(real).max()) == planted


def test_what_is_excluded_stays_one_operator() -> None:
    module = nn.ModuleDict({name: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for name in "ab"})
    whole = Of(lambda m, x: m.both["b"](*[m.both["a"](x, x, x, need_weights=False)[0]] * 3, need_weights=False)[0])
    whole.both = module
    x = torch.randn(1, 5, WIDTH)
    graph = pt2e(whole.eval(), [(x,)], CelosiaQuantizer(exclude=["both.a"])).graph
    names = [products.name_of(node) for node in graph.nodes]
    assert names.count("scaled_dot_product_attention") == 1 and names.count("matmul") == 2


# Written out -----------------------------------------------------------------------------------------------------

SIZES = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)
PARTLY = torch.arange(35).reshape(5, 7) % 3 > 0
PARTLY[2] = False
"""One query that looks at nothing: PyTorch's kernel gives 0 there."""
ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bools": {"attn_mask": PARTLY},
    "floats": {"attn_mask": torch.where(PARTLY, 0.5, float("-inf"))},
}


def written_out(function: Callable[..., Any], *given: Tensor) -> Any:
    exported = torch.export.export(Of(function).eval(), given).module()
    assert any(node.target in PRODUCTS for node in exported.graph.nodes)
    expose_products(exported, lambda node: False)
    assert not any(node.target in PRODUCTS for node in exported.graph.nodes)
    return exported


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_written_out(name: str) -> None:
    given = [torch.randn(shape) for shape in SIZES]
    exported = written_out(lambda m, *x: F.scaled_dot_product_attention(*x, **ATTENTIONS[name]), *given)
    torch.testing.assert_close(exported(*given), F.scaled_dot_product_attention(*given, **ATTENTIONS[name]))


def test_grouped_queries_are_written_out() -> None:
    q, (k, v) = torch.randn(SIZES[0]), (torch.randn(2, 2, *shape[2:]) for shape in SIZES[1:])
    exported = written_out(lambda m, *x: F.scaled_dot_product_attention(*x, enable_gqa=True), q, k, v)
    torch.testing.assert_close(exported(q, k, v), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "alpha": -2}])
def test_sums_of_a_product_are_written_out(options: dict[str, float]) -> None:
    given = torch.randn(3), torch.randn(2, 5, 8), torch.randn(2, 8, 3)
    exported = written_out(lambda m, *x: torch.baddbmm(*x, **options), *given)
    torch.testing.assert_close(exported(*given), torch.baddbmm(*given, **options))


def test_fused_kernels_are_written_out() -> None:
    """A module traced in its fast path, whose fused kernel returns a tuple, is decomposed."""
    m = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x, parts = torch.randn(2, 5, WIDTH), (m.in_proj_weight, m.in_proj_bias, m.out_proj.weight, m.out_proj.bias)

    def function(_: Any, x: Tensor, *parts: Tensor) -> Any:
        return aten._native_multi_head_attention.default(x, x, x, WIDTH, HEADS, *parts)

    exported = written_out(function, x, *parts)
    for found, expected in zip(exported(x, *parts), m(x, x, x), strict=True):
        torch.testing.assert_close(found, expected)


def test_weights_of_fused_kernels_are_known() -> None:
    """The three input products of a fused kernel become one, with the module's own weights."""
    m, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), torch.randn(1, 5, WIDTH)
    parts = m.in_proj_bias, m.out_proj.weight, m.out_proj.bias

    def function(module: Any, x: Tensor) -> Any:
        return aten._native_multi_head_attention.default(x, x, x, WIDTH, HEADS, module.weight, *parts, None, False)[0]

    whole = Of(function)
    whole.weight = m.in_proj_weight
    exported = torch.export.export(whole.eval(), (x,)).module()
    quantizer = CelosiaQuantizer()
    graph = quantizer.annotate(quantizer.transform_for_annotation(exported)).graph
    assert [node.op for node in graph.nodes if node in {each.args[1] for each in linears(graph)}] == ["get_attr"] * 2
    assert len(notes(graph, "matmul")) == 2 and all(notes(graph, "matmul", "slice", "transpose"))


def test_parts_are_taken_one_by_one() -> None:
    def function(m: Any, x: Tensor) -> Any:
        first, second = x.unbind(1)
        (left, right), (upper, lower) = first.chunk(2, -1), second.split([2, 4], dim=1)
        return left @ right.transpose(1, 2), upper @ lower.transpose(1, 2), x.sum(1).split(2)[0]

    x = torch.randn(3, 2, 6, 8)
    exported = torch.export.export(Of(function).eval(), (x,)).module()
    changed = CelosiaQuantizer().transform_for_annotation(exported)
    names = [products.name_of(node) for node in changed.graph.nodes]
    assert [names.count(each) for each in ("unbind", "chunk", "split_with_sizes", "split")] == [0, 0, 0, 1]
    for found, expected in zip(changed(x), function(None, x), strict=True):
        assert torch.equal(found, expected)
