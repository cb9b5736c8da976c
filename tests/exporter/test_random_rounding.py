"""Models in half precision whose every result is rounded up or down at random."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from exporter.certificate.eager import eager_logits, rounded_logits
from exporter.certificate.generation_cases import Case
from exporter.certificate.one_pass import rounded_output
from exporter.certificate.one_pass_cases import draw_images
from exporter.certificate.random_rounding import RandomRounding, Rounded
from exporter.certificate.subject import subject_of
from torch import Tensor, nn
from torch.nn import functional as F

from engine.package.graph_io import LOGITS
from engine.package.manifest import PackageFormat
from exporter.checkpoint import load_checkpoint
from tests.exporter.conftest import MakeCheckpoint

HALVES = [torch.float16, torch.bfloat16]


def quotients(dtype: torch.dtype, divisor: float) -> Tensor:
    """Return what lies between two numbers of a type, of both signs and many sizes."""
    sizes = torch.tensor([1.0, -1.0, 128.0, -0.125]).to(dtype).repeat(20_000)
    with RandomRounding(dtype, 0):
        return (sizes / divisor).reshape(-1, 4)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_number_becomes_one_of_its_two_neighbours_and_seldom_the_farther(
    dtype: torch.dtype,
) -> None:
    """A third lies a third of the way to the farther one."""
    exact = torch.tensor([1 / 3, -1 / 3, 128 / 3, -0.125 / 3], dtype=torch.float64)
    nearest = exact.to(dtype)
    beyond = (exact - nearest.double()).sign().to(dtype) * math.inf
    farther = torch.nextafter(nearest, beyond)

    found = quotients(dtype, 3.0)

    assert ((found == nearest) | (found == farther)).all()
    share = (found == farther).double().mean(dim=0)
    assert share.tolist() == pytest.approx([1 / 6] * 4, abs=0.01)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_number_less_than_a_quarter_from_its_nearest_becomes_that(dtype: torch.dtype) -> None:
    exact = torch.tensor([1 / 31, -1 / 31, 128 / 31, -0.125 / 31], dtype=torch.float64)

    assert (quotients(dtype, 31.0) == exact.to(dtype)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_what_the_type_holds_stays(dtype: torch.dtype) -> None:
    numbers = torch.tensor([0.0, 1.0, -2.5, 1024.0, math.inf, -math.inf, 2.0**-14]).to(dtype)
    with RandomRounding(dtype, 0):
        found = [numbers * 1, numbers.reshape(7, 1).T[0] + 0, torch.cat([numbers, numbers])[:7]]
        assert all(torch.equal(one, numbers) for one in found)
        assert (numbers * math.nan).isnan().all()


def test_only_results_of_the_type_are_rounded() -> None:
    numbers = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    with RandomRounding(torch.float16, 0):
        wide = numbers.float() / 3
        total = (numbers / 1).sum(dtype=torch.float32) / 7
        written = numbers.clone()
        written[1:] = 5.0
        written.add_(1.0)
        ids = numbers.argmax()
        both = numbers * wide
    assert torch.equal(wide, numbers.float() / 3)
    assert float(total) == pytest.approx(6 / 7, rel=1e-6)
    assert written.tolist() == [2.0, 6.0, 6.0]
    assert (written.dtype, ids.item()) == (torch.float16, 2)
    assert torch.equal(both, numbers * wide)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_loses_hardly_more_and_other_numbers_by_seed(dtype: torch.dtype) -> None:
    """Where chance decides nothing, the bound stays what it is."""
    torch.manual_seed(0)
    half = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).to(dtype)
    given = torch.randn(4, 20, 64).to(dtype)
    exact = deepcopy(half).double()(given.double())

    def loss(found: Tensor) -> float:
        assert found.dtype == dtype
        return float((found.double() - exact).square().mean().sqrt().detach())

    nearest = half(given)
    first, again, other = (run(half, given, seed) for seed in (1, 1, 2))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for random in (first, other):
        assert 0.9 < loss(random) / loss(nearest) < 1.15


@pytest.mark.parametrize("dtype", HALVES)
def test_results_have_the_type_that_a_model_asks_for_and_lie_in_memory_as_ever(
    dtype: torch.dtype,
) -> None:
    """Under `inference_mode`, as models run, an operation is not yet taken apart."""
    given = torch.randn(2, 4, 8).to(dtype)

    with torch.inference_mode(), RandomRounding(dtype, 0):
        shares = [take(given, -1, dtype=torch.float32) for take in (F.softmax, F.log_softmax)]
        product = shares[0] @ given.float().mT
        turned = (given.transpose(1, 2) * 0.3).transpose(1, 2).view(2, 32)
        heads = given.view(2, 4, 2, 4).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).view(2, 32)

    assert {share.dtype for share in shares} == {product.dtype} == {torch.float32}
    assert turned.dtype == attended.dtype == dtype
    torch.testing.assert_close(shares[0], given.float().softmax(-1))
    torch.testing.assert_close(turned, given.view(2, 32) * 0.3, rtol=1e-2, atol=1e-2)


def run(model: nn.Module, given: Tensor, seed: int) -> Tensor:
    with RandomRounding(given.dtype, seed):
        found: Tensor = model(given)
    return found


def test_parts_and_sums_of_what_is_rounded_go_with_what_is_rounded_at_random() -> None:
    first, second = (
        Rounded(numbers, lambda seed, numbers=numbers: numbers + 100 * seed)
        for numbers in (np.arange(12.0).reshape(4, 3), np.arange(6.0).reshape(2, 3))
    )
    found = Rounded.joined([first, second]).part(slice(3, 5)).of(np.array([0, 2]))

    assert found.nearest.tolist() == [[9, 11], [0, 2]]
    assert found.at_random(7).tolist() == [[709, 711], [700, 702]]


def test_a_case_among_others_is_rounded_again_by_itself(make_checkpoint: MakeCheckpoint) -> None:
    model = load_checkpoint(make_checkpoint("encoder-decoder")).model.half()
    cases = [Case((3, 4, 5), (1,), 4), Case((5, 6, 7, 8), (2, 3), 5)]
    tokens = [(4, 5, 6, 7), (5, 5, 9, 3, 4)]
    exact = eager_logits(model.double(), cases, tokens)

    found = rounded_logits(model.half(), cases, tokens)

    for one, other in zip(found, exact, strict=True):
        again = [one.at_random(seed) for seed in (0, 1)]
        assert (again[0] != again[1]).any()
        for logits in (one.nearest, *again):
            np.testing.assert_allclose(logits, other, atol=2e-2)


def test_rows_of_one_pass_are_rounded_again(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = load_checkpoint(make_checkpoint("vit"))
    model = checkpoint.model.half()
    image = subject_of(checkpoint, PackageFormat.of("cuda", "fp16")).contract.image
    assert image is not None
    pixels = torch.from_numpy(draw_images(image)[:3])

    rows = rounded_output(model, (pixels,)).rows([2, 0]).to_hold(LOGITS)

    again = [rows.at_random(seed) for seed in (0, 1)]
    assert (again[0] != again[1]).any()
    exact = model.double()(pixels.double()).logits.detach().numpy()[[2, 0]]
    for logits in (rows.nearest, *again):
        np.testing.assert_allclose(logits, exact, atol=2e-2)
