"""torch.compile(model, backend="celosia") gives onnxruntime's results and meets Dynamo's rules for backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest
from driver_models import UNBLOCKED
from thorough import some

HOW = "PyTorch is not installed: `make torch` installs it beside the rest, then these tests run"
torch = pytest.importorskip("torch", reason=HOW)
pytest.importorskip("torchao", reason=HOW)
ort = pytest.importorskip("onnxruntime")

from test_torch import LSTM_MACS, flat, oracle, pt2e  # noqa: E402
from torch import nn  # noqa: E402
from torch_models import NETWORKS, network  # noqa: E402

from celosia.driver.torch import backend  # noqa: E402
from celosia.driver.torch.export import TorchError, to_onnx  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):  # else Dynamo leaves LSTM and GRU to PyTorch
        yield


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return `function` compiled by the backend, and the list to which the backend appends Programs."""
    programs: list[Any] = []
    chosen = {"config": UNBLOCKED, "programs": programs, **options}
    return torch.compile(function, backend=backend.celosia, options=chosen), programs


FLOAT, QUANTISED = ["lstm"], ["attention"]
"""Networks that `make test` compiles as they are, and quantised; test_torch.py has all."""


@pytest.mark.parametrize("name", some(NETWORKS, FLOAT))
@torch.no_grad()
def test_float(name: str) -> None:
    module, x = network(name)
    call, programs = compiled(module)
    for found, expected in zip(flat(call(x)), oracle(to_onnx(module, x), x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert len(programs) == 1  # in one graph


@pytest.mark.parametrize("name", some(NETWORKS, QUANTISED))
@torch.no_grad()
def test_quantised(name: str) -> None:
    module, x = network(name)
    quantised = pt2e(module, x)
    call, programs = compiled(quantised)
    proto = to_onnx(quantised, x)
    for sample in (x, torch.randn_like(x)):
        for found, expected in zip(flat(call(sample)), oracle(proto, sample), strict=True):
            np.testing.assert_array_equal(found, expected)
    (program,) = programs
    assert program.macs_accelerator == program.macs_total - LSTM_MACS * (name == "lstm") > 0


def test_the_name_is_known_to_torch() -> None:
    (found,) = entry_points(group="torch_dynamo_backends", name="celosia")
    assert found.load() is backend.celosia
    assert "celosia" in torch._dynamo.list_backends()
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(lambda x: x.exp() + 1, backend="celosia")(x), x.exp() + 1)


@torch.no_grad()
def test_each_shape_and_type_is_compiled_once() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(2)).eval()
    call, programs = compiled(module)
    for size in (5, 8, 6, 8, 5, 6):
        x = torch.randn(1, 3, size, size + 1)
        torch.testing.assert_close(call(x), module(x), rtol=1e-5, atol=1e-6)
    assert len(programs) == 4  # the first shape twice, because Dynamo's first graph has its sizes in it
    call, programs = compiled(lambda x: x * 2 + 1)
    for dtype in (torch.float32, torch.int32, torch.bfloat16, torch.float32):
        x = torch.arange(6).reshape(2, 3).to(dtype)
        assert torch.equal(call(x), x * 2 + 1) and call(x).dtype == dtype
    assert len(programs) == 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(2))

    def forward(self, x: Any) -> Any:
        return self.body(x) + 1


@torch.no_grad()
def test_compiling_again_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    module = Net().eval()
    call, programs = compiled(module)

    def said(*shape: int) -> str:
        call(torch.randn(shape))
        return "".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("celosia: "))

    assert said(1, 3, 5, 6) == ""  # the first time is no news
    assert said(2, 3, 8, 9) == "celosia: compiling Net again for shape (2, 3, 8, 9) ..."
    assert said(2, 3, 8, 9) == ""
    module.body[0].weight.mul_(2)
    assert said(2, 3, 8, 9) == "celosia: compiling Net again as its parameters have changed ..."
    assert {program.name for program in programs} == {"Net"}
    assert "body.0" in {row["name"] for row in programs[0].placements}
    quiet, _ = compiled(Net().eval(), quiet=True)
    quiet(torch.randn(1, 3, 5, 6)), quiet(torch.randn(1, 3, 6, 6))
    assert capsys.readouterr().err == ""


@torch.no_grad()
def test_numbers_that_dynamo_holds_in_tensors() -> None:
    """Numbers that Dynamo passes as tensors are constants: with dynamic sizes, the eps of a normalisation is one."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.01)).eval()
    programs: list[Any] = []
    options = {"config": "tiny", "programs": programs}
    call = torch.compile(module, backend=backend.celosia, dynamic=True, options=options)
    for size in (5, 6, 5):
        x = torch.randn(1, 3, size, size)
        torch.testing.assert_close(call(x), module(x), rtol=1e-5, atol=1e-6)
    assert [program.inputs[0].shape for program in programs] == [(1, 3, 5, 5), (1, 3, 6, 6)]


@torch.no_grad()
def test_a_function_has_its_own_name() -> None:
    def twice(x: Any) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    call, programs = compiled(twice)
    call(torch.randn(3))
    assert [program.name.rpartition(".")[2] for program in programs] == ["twice", "twice"]


@torch.no_grad()
def test_parameters_are_constants_that_may_change() -> None:
    module, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), torch.randn(2, 4)
    call, programs = compiled(module)
    call(x), call(x)
    assert len(programs) == 1 and [each.name for each in programs[0].inputs] == ["inputs_0"]
    module[0].weight.mul_(2)
    torch.testing.assert_close(call(x), module(x), rtol=1e-5, atol=1e-6)
    module.load_state_dict({name: torch.rand_like(value.float()) for name, value in module.state_dict().items()})
    torch.testing.assert_close(call(x), module(x), rtol=1e-5, atol=1e-6)
    for _ in range(2):  # the memory of the one before is free again, and is not taken for it
        module[0].weight = nn.Parameter(torch.randn(3, 4))
        torch.testing.assert_close(call(x), module(x), rtol=1e-5, atol=1e-6)
    assert len(programs) == 5


def test_between_graphs_python_runs() -> None:
    seen = []

    @torch._dynamo.disable
    def python(y: Any) -> Any:
        seen.append(y.numpy().sum())
        return y if seen[-1] > 0 else -y

    call, programs = compiled(lambda x: python(x.sin() * 2).cos() + 1)
    for x in torch.ones(3), -torch.ones(3):
        torch.testing.assert_close(call(x), (x.sin() * 2).cos() + 1)
    assert len(seen) == len(programs) == 2


def test_gradients_are_refused() -> None:
    module, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    call, programs = compiled(module)
    with pytest.raises(TorchError, match=r"gradients.*torch\.no_grad\(\)"):
        call(x)
    assert not programs
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            torch.testing.assert_close(call(x), module(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(TorchError, match="computes no gradients"):
        call(x)
    doubled, _ = compiled(lambda x: x * 2)
    assert torch.equal(doubled(x), x * 2)  # nothing here has a gradient
    with pytest.raises(TorchError, match="computes no gradients"):
        doubled(x.requires_grad_())


@torch.no_grad()
def test_results_of_every_kind() -> None:
    def function(x: Any, n: int, flag: bool) -> Any:
        y = x + n
        return {"y": y, "same": y, "x": x, "none": None, "size": x.shape[0] * n, "both": (y > 0, flag)}

    call, programs = compiled(function)
    for n in (1, 2):
        for size in (2, 5):
            x = torch.randn(size, 3)
            found, expected = call(x, n, True), function(x, n, True)
            assert torch.equal(found.pop("both")[0], expected.pop("both")[0])
            assert {k: v for k, v in found.items() if not isinstance(v, torch.Tensor)} == {
                "none": None,
                "size": size * n,
            }
            for name in ("y", "same", "x"):
                assert torch.equal(found[name], expected[name])
    assert len(programs) == 4


@torch.no_grad()
def test_views_and_results_are_apart() -> None:
    """Inputs may be views, and the next call leaves results unchanged."""
    call, _ = compiled(lambda x: x * 2)
    x = torch.arange(24.0).reshape(4, 6)
    first = call(x.T[::2])
    assert torch.equal(first, x.T[::2] * 2)
    call(torch.zeros(3, 4))
    assert torch.equal(first, x.T[::2] * 2)


@torch.no_grad()
def test_refusals() -> None:
    counting = nn.BatchNorm1d(3).train()
    call, _ = compiled(counting)
    with pytest.raises(TorchError, match=r"module writes to"):
        call(torch.randn(2, 3))
    call, _ = compiled(lambda x: x + torch.rand_like(x))
    with pytest.raises(TorchError, match="draws random numbers"):
        call(torch.randn(2, 3))
    call, _ = compiled(lambda x: x * 2)
    with pytest.raises(TorchError, match=r"CPU.*meta.*\.cpu\(\)"):
        call(torch.empty(2, 3, device="meta"))
    with pytest.raises(ValueError, match=r"'confg'.*config, accelerator"):
        backend.celosia(torch.fx.symbolic_trace(nn.ReLU()), [], options={"confg": "tiny"})


@torch.no_grad()
def test_devices() -> None:
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(1, 3, 6, 6)
    quantised = pt2e(module, x)
    results = [compiled(quantised, **chosen)[0](x) for chosen in ({"device": "timed"}, {"accelerator": False})]
    assert torch.equal(*results)
