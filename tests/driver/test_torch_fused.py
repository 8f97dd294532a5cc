"""PyTorch's fused kernels and operators unknown to torch.onnx run in both front ends; PyTorch is the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from thorough import some

HOW = "PyTorch is not installed: `make torch` installs it beside the rest, then these tests run"
torch = pytest.importorskip("torch", reason=HOW)
pytest.importorskip("torchao", reason=HOW)

from torch import nn  # noqa: E402

import celosia  # noqa: E402
from celosia.driver.torch import backend  # noqa: E402
from celosia.driver.torch.decompose import FUSED  # noqa: E402
from celosia.driver.torch.export import TorchError  # noqa: E402

WIDTH, HEADS, TOKENS = 16, 4, 5
NONE = float("-inf")
PADDED = torch.tensor([[False] * TOKENS, [False] * 3 + [True] * 2])
CAUSAL = torch.full((TOKENS, TOKENS), NONE).triu(1)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    programs: list[Any] = []
    return torch.compile(function, backend=backend.celosia, options={"config": "tiny", "programs": programs}), programs


def layer(**options: Any) -> nn.Module:
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, **{"batch_first": True, **options}).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    return made


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.eval()

    def forward(self, x: Any, **more: Any) -> Any:
        return self.attention(x, x, x, **more)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "layer": (layer, {}),
    "layer, normalised before, GELU": (lambda: layer(norm_first=True, activation="gelu"), {}),
    "layer, tokens first": (lambda: layer(batch_first=False), {}),
    "layer, causal": (layer, {"src_mask": CAUSAL, "is_causal": True}),
    "layer, padded": (layer, {"src_key_padding_mask": PADDED}),
    "layer, both": (layer, {"src_mask": CAUSAL.bool(), "src_key_padding_mask": PADDED}),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False).eval(), {}),
    "encoder, padded": (lambda: nn.TransformerEncoder(layer(), 2).eval(), {"src_key_padding_mask": PADDED}),
    "attention": (lambda: Attention(batch_first=True), {"need_weights": False}),
    "attention and weights": (lambda: Attention(batch_first=True), {"key_padding_mask": PADDED}),
    "attention, tokens first": (lambda: Attention(), {"average_attn_weights": False}),
}


def leaves(made: Any) -> list[Any]:
    return [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]


MODES = [*((name, torch.inference_mode) for name in CASES), ("layer", torch.no_grad), ("attention", torch.no_grad)]
QUICK = ("layer, both", "encoder, padded", "attention and weights", "attention, tokens first")
"""Whose parts are those of all others."""


@pytest.mark.parametrize(
    ("name", "mode"), some(MODES, [case for case in MODES if case[0] in QUICK or case == ("layer", torch.no_grad)])
)
def test_transformers_run(name: str, mode: Any) -> None:
    make, masks = CASES[name]
    module, x = make(), torch.randn(2, TOKENS, WIDTH)
    if "tokens first" in name:
        x = x.transpose(0, 1)
    call, programs = compiled(module)
    torch.backends.mha.set_fastpath_enabled(False)  # whose nested tensors put zeros where there is padding
    try:
        with torch.no_grad():
            expected = leaves(module(x, **masks))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with mode():
        found = leaves(call(x, **masks))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(programs) == 1
    if name in ("layer, padded", "encoder"):
        program = celosia.from_torch(module, x, "tiny", kwargs=masks)
        feed = dict(zip((each.name for each in program.inputs), (x.numpy(), *(m.numpy() for m in masks.values()))))
        made = list(celosia.Runtime(program).run(feed).outputs.values())
        np.testing.assert_allclose(made[0], expected[0], rtol=1e-4, atol=1e-5)


def test_gradients_of_a_transformer_are_refused() -> None:
    call, programs = compiled(layer())
    with pytest.raises(TorchError, match="computes no gradients"):
        call(torch.randn(2, TOKENS, WIDTH))
    assert not programs


MASKS: dict[str, tuple[int | None, Any]] = {
    "none": (None, None),
    "of queries": (0, torch.rand(TOKENS, TOKENS) > 0.7),
    "of samples": (1, PADDED),
    "of all": (2, torch.rand(2, HEADS, TOKENS, TOKENS) > 0.8),
    "floats": (0, CAUSAL),
}


@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_each_fused_kernel_is_what_it_stands_for(name: str) -> None:
    """Each fused kernel equals its plain operators, also for fully masked rows, which are NaN."""
    kind, mask = MASKS[name]
    aten = torch.ops.aten
    x, m = torch.randn(2, TOKENS, WIDTH), layer()
    names = "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"
    attention = [m.self_attn.get_parameter(each) for each in names]

    def check(op: Any, *arguments: Any) -> None:
        found, expected = FUSED[op](*arguments), op(*arguments)
        both = zip(found, expected) if isinstance(expected, tuple) else [(found, expected)]
        for one, other in both:
            if one is not None:
                torch.testing.assert_close(one, other, equal_nan=True)

    for need, mean in (True, True), (True, False), (False, True):
        op = aten._native_multi_head_attention.default
        check(op, x, x, x, WIDTH, HEADS, *attention, mask, need, mean, kind)
    rest = [each for norm in (m.norm1, m.norm2) for each in (norm.weight, norm.bias)]
    rest += [each for linear in (m.linear1, m.linear2) for each in (linear.weight, linear.bias)]
    for gelu in False, True:
        for first in False, True:
            op = aten._transformer_encoder_layer_fwd.default
            check(op, x, WIDTH, HEADS, *attention, gelu, first, 1e-3, *rest, mask, kind)
        product = FUSED[aten._addmm_activation.default](x[0, 0], x[0], m.self_attn.out_proj.weight, use_gelu=gelu)
        expected = aten._addmm_activation(x[0, 0], x[0], m.self_attn.out_proj.weight, use_gelu=gelu)
        torch.testing.assert_close(product, expected)
    if mask is not None:
        check(aten._masked_softmax.default, torch.randn(2, HEADS, TOKENS, TOKENS), mask.bool(), 3, kind)


# What torch.onnx does not know -----------------------------------------------------------------------------------


def told(call: Callable[..., Any], *arguments: Any) -> tuple[Any, list[str]]:
    """Return the result of `call`, and the warnings of the backend."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        result = call(*arguments)
    return result, [str(warning.message) for warning in caught if "celosia" in str(warning.message)]


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        q, r = torch.linalg.qr(self.before(x))
        return self.after(q @ r), 3, torch.linalg.qr(q)[1] + x


def test_an_operator_that_onnx_has_not_runs_in_pytorch() -> None:
    module, x = Inverse().eval(), torch.randn(4, 4)
    call, programs = compiled(module)
    found, warned = told(call, x)
    torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)
    assert len(warned) == 1, warned
    assert warned[0].startswith("backend celosia leaves aten.linalg_qr.default of Inverse to PyTorch, as torch.onnx")
    assert [program.macs_total for program in programs] == [64, 128]  # before, and after: there are products in both
    with torch.no_grad():
        module.after[1].weight.mul_(2)
    found, warned = told(call, x)
    torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)
    assert not warned


def test_operators_under_other_names() -> None:
    """The error names the user's operator, though torch.onnx names its decomposition."""
    call, programs = compiled(lambda x: torch.linalg.inv(x + 1) * torch.lgamma(x.abs() + 1))
    x = torch.randn(4, 4)
    found, warned = told(call, x)
    torch.testing.assert_close(found, torch.linalg.inv(x + 1) * torch.lgamma(x.abs() + 1))
    assert len(warned) == 2 and "linalg_inv_ex" in warned[0] and "lgamma" in warned[1]
    assert programs


def test_a_graph_that_cannot_be_exported_at_all_runs_in_pytorch() -> None:
    call, programs = compiled(lambda x: torch.complex(x, x) * 2)
    x = torch.randn(3)
    found, warned = told(call, x)
    torch.testing.assert_close(found, torch.complex(x, x) * 2)
    assert not programs and len(warned) == 1 and "is complex, and ONNX has real numbers" in warned[0]
    again, warned = told(call, x)
    assert torch.equal(again, found) and not warned


def test_a_graph_that_depends_on_values_runs_in_pytorch(capfd: pytest.CaptureFixture[str]) -> None:
    def put(cache: Any, x: Any, place: Any) -> Any:
        cache = cache.clone()
        cache[:, place] = x
        return cache.softmax(-1)

    call, programs = compiled(put)
    given = torch.zeros(1, 5, 4), torch.randn(1, 4), torch.tensor(2)
    found, warned = told(call, *given)
    torch.testing.assert_close(found, put(*given))
    assert not programs and len(warned) == 1
    assert "put to PyTorch: torch.export cannot trace" in warned[0] and "_BoundGraph" not in warned[0]
    assert "def forward" not in capfd.readouterr().err


def test_a_program_of_its_own_names_the_operator() -> None:
    class Inverted(nn.Linear):
        def forward(self, x: Any) -> Any:
            return torch.linalg.inv(super().forward(x))

    with pytest.raises(TorchError, match=r"aten\.linalg_inv_ex\.default") as it:
        celosia.from_torch(Inverted(4, 4).eval(), torch.randn(4, 4), "tiny")
    assert "\n" not in str(it.value)
