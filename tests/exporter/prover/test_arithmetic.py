"""Eager models of any class run in float64, and with the sums of their products in other orders."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import CertificateError
from exporter.checkpoint import load_checkpoint
from exporter.graphs.contracts import contract_of
from exporter.models.layers import Decoder
from exporter.prover.arithmetic import Float16Reach, float64, reordered
from exporter.prover.eager import Forward, logits_of
from exporter.prover.generation_cases import Case
from exporter.prover.item_cases import draw_images, random_groups
from exporter.prover.plays.items import forward_of
from tests.exporter.conftest import MakeCheckpoint
from tests.exporter.test_export_for_cuda import LLAMA, T5

WIDTH = 24
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class CastsToFloat32(nn.Module):
    """Takes its softmax in float32, as many models do in whatever type they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        shares = scores.float().softmax(-1, dtype=torch.float32).to(torch.float32)
        return self.linear(shares.type_as(scores) + torch.zeros(x.shape, dtype=torch.float32))

    def exactly(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).softmax(-1))


class WritesInPlace(nn.Module):
    """Fills an output step by step, and by views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        for i in range(x.shape[1]):
            out[:, i] = self.linear(x[:, i])
        out[:, 1:].mul_(1 / 3)
        out.transpose(0, 1)[0] += x[:, 0]
        out[..., :3].exp_()
        return out.view(-1, WIDTH)

    def exactly(self, x: Tensor) -> Tensor:
        first, rest = self.linear(x).split([1, x.shape[1] - 1], dim=1)
        out = torch.cat([first + x[:, :1], rest / 3], dim=1)
        return torch.cat([out[..., :3].exp(), out[..., 3:]], dim=-1).flatten(0, 1)


class WritesIntoItself(nn.Module):
    """Keeps sums in a buffer of float32, to which they are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Tensor
        self.register_buffer("sums", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.sums.zero_()
        for i in range(x.shape[1]):
            self.sums += x[:, i] / 3
        return self.sums * 1.0

    def exactly(self, x: Tensor) -> Tensor:
        return (x / 3).sum(1)


def drawn(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for weight in model.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [(CastsToFloat32, 1e-12), (WritesInPlace, 1e-12), (WritesIntoItself, 1e-6)],
)
def test_people_s_own_classes_run_in_float64_whatever_type_they_ask_for(
    kind: type[nn.Module], allowed: float
) -> None:
    model = drawn(kind())
    exact = copy.deepcopy(model).double()

    with float64():
        found = model(X)

    with torch.no_grad():
        expected = exact.exactly(X.double())  # type: ignore[operator]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32 and weight.double().equal(exact.get_parameter(name))


def test_behind_an_error_all_is_in_float32_again() -> None:
    with pytest.raises(ValueError), float64():
        raise ValueError

    assert torch.zeros(1).dtype == (X @ X.mT).dtype == torch.float32


def forward_on(checkpoint: object) -> Forward:
    """Return what asks a tiny model of something long."""
    contract = contract_of(checkpoint.config.model)  # type: ignore[attr-defined]
    if contract.encoding:
        return forward_of(random_groups(contract.encoding)[-1])
    if contract.image:
        return forward_of(draw_images(contract.image, 3))
    source = (3, 1, 4, 1, 5) if contract.generation.cross_cache else ()
    cases = [Case(source, (1, 2), 4, num_prompt_logits=2), Case(source[:3], (1, 5, 6, 7), 2)]
    return logits_of(cases, [(8, 9, 10, 11), (12, 13)])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("encoder-decoder", {}),
        ("encoder-decoder", T5),
        ("gpt", LLAMA),
        ("gpt", {}),
        ("bert", {}),
        ("labeller", {}),
        ("vit", {}),
    ],
)
def test_our_families_give_what_they_give_as_models_in_float64(
    family: str,
    options: dict[str, object],
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Decoder, "logits_in_float32", Decoder.logits)
    checkpoint = load_checkpoint(make_checkpoint(family, **options))
    model, forward = checkpoint.model.eval(), forward_on(checkpoint)

    with float64():
        found = forward(model)
    with reordered(3):
        others = forward(model)
    with torch.no_grad():
        own, exact = forward(model), forward(copy.deepcopy(model).double())

    for mine, wide, narrow, other in zip(found, exact, own, others, strict=True):
        assert mine.dtype == np.float64 and narrow.dtype == other.dtype == np.float32
        np.testing.assert_allclose(mine, wide, rtol=1e-12, atol=1e-12)
        assert 0 < np.abs(narrow - wide).max() < 1e-4
        assert (narrow != other).any()
        assert np.abs(other - wide).max() < 10 * np.abs(narrow - wide).max()


def attend(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (3, -1)).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


MULTIHEAD = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a linear layer": nn.Linear(WIDTH, 7),
    "one without bias": nn.Linear(WIDTH, 7, bias=False),
    "products of batches": lambda x: x @ x.mT,
    "a matrix and a vector": lambda x: x[0] @ x[0, 0],
    "two vectors": lambda x: x[0, 0] @ x[0, 1],
    "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x),
    "baddbmm": lambda x: torch.baddbmm(x.new_ones(1), x, x.mT),
    "scaled_dot_product_attention": attend,
    "MultiheadAttention": lambda x: MULTIHEAD(x, x, x, need_weights=False)[0],
    "TransformerEncoderLayer": nn.TransformerEncoderLayer(WIDTH, 3, 32, batch_first=True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_permuted_sums_differ_in_bits_and_agree_in_value(name: str) -> None:
    operation = OPERATIONS[name]
    for module in (operation, MULTIHEAD):
        if isinstance(module, nn.Module):
            drawn(module)
    with torch.no_grad():
        own = operation(X)

    found = []
    for seed in (1, 2, 3, 3):
        with reordered(seed):
            found.append(operation(X))

    torch.testing.assert_close(found[2], found[3], rtol=0, atol=0)
    assert any(not one.equal(own) for one in found)
    assert found[0].numel() < 2 or not found[0].equal(found[1])
    for one in found:
        torch.testing.assert_close(one, own, rtol=1e-5, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


def test_no_operation_in_float64_has_another_value_than_in_a_model_of_that_type() -> None:
    for operation in OPERATIONS.values():
        with float64():
            found = operation(X)
        wide = copy.deepcopy(operation).double() if isinstance(operation, nn.Module) else operation
        if operation is not OPERATIONS["MultiheadAttention"]:
            with torch.no_grad():
                torch.testing.assert_close(found, wide(X.double()), rtol=1e-12, atol=1e-12)
        assert found.dtype == torch.float64


def test_how_large_numbers_become_in_float16_is_noted_and_too_large_ones_are_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False).half()
    nn.init.ones_(model.weight)
    mask = torch.full((5, 5), -torch.inf).half()

    with torch.no_grad(), Float16Reach() as reach:
        model(torch.full((1, WIDTH), 1000.0).half())
        (mask + torch.ones(5, 5).half()).exp()
    assert reach.largest == 24_000

    with torch.no_grad(), pytest.raises(CertificateError, match="passes 65,504, .* it computes mm"):
        with Float16Reach():
            model(torch.full((1, WIDTH), 3000.0).half())
