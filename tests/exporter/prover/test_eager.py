"""The eager model gives numbers in float64 and in its own type, and loses some there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.errors import CertificateError, PackageError
from exporter.checkpoint import load_checkpoint
from exporter.export import export_package
from exporter.prover.eager import (
    EagerModel,
    Floats,
    alignment_of,
    alike,
    logits_of,
    losses,
    waiting,
)
from exporter.prover.generation_cases import Case
from tests.exporter.conftest import MakeCheckpoint
from tests.exporter.prover.surgery import Spoil
from tests.exporter.prover.test_faults_of_items import labels_permuted

MEDIUM, LARGE = 10**7, 10**9  # weights


@pytest.mark.parametrize("source_lengths", [[0], [1, 9, 30, 60]])
@pytest.mark.parametrize("num_weights", [1000, MEDIUM, LARGE])
def test_cases_run_beside_those_of_like_length(source_lengths: list[int], num_weights: int) -> None:
    cases = [
        Case((5,) * source, (5,) * prompt, num_tokens=4)
        for source in source_lengths
        for prompt in (1, 2, 3, 8, 40)
        for _ in range(8)
    ]
    np.random.default_rng(0).shuffle(cases)  # type: ignore[arg-type]

    groups = alike(cases, num_weights)

    assert sorted(chain(*groups)) == list(range(len(cases)))
    assert len(groups) < len(cases) / 3
    for group in groups:
        lengths = [cases[i].lengths for i in group]
        padded = len(group) * sum(map(max, zip(*lengths, strict=True)))
        assert padded <= 1024
        assert num_weights < LARGE or padded - sum(map(sum, lengths)) <= 100


def test_a_case_that_is_longer_than_any_group_runs_alone() -> None:
    cases = [Case((), (5,) * 4000, 4), Case((), (5,), 4), Case((), (5,) * 4000, 4)]

    assert alike(cases, MEDIUM) == [[1], [0], [2]]


def test_what_cases_give_beside_others_is_what_they_give_alone(
    make_checkpoint: MakeCheckpoint,
) -> None:
    model = load_checkpoint(make_checkpoint("encoder-decoder")).model.eval()
    cases = [Case((3, 4, 5), (1,), 4), Case((5, 6, 7, 8), (1, 2, 3), 3, num_prompt_logits=2)]
    tokens = [(4, 5, 6, 7), (5, 5, 9)]

    with torch.no_grad():
        together = logits_of(cases, tokens)(model)
        for one, case, ids in zip(together, cases, tokens, strict=True):
            (alone,) = logits_of([case], [ids])(model)
            assert one.shape == alone.shape == (case.num_logits, 31)
            np.testing.assert_allclose(one, alone, atol=1e-5)
        (attended,) = alignment_of(cases[1], tokens[1], width=9)(model)

    assert attended.shape == (4, 9) and not attended[:, 4:].any()
    np.testing.assert_allclose(attended.sum(axis=1), 1, rtol=1e-5)


def test_many_numbers_that_wait_lie_in_a_file_that_no_start_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    numbers = np.random.default_rng(0).random((40, 5000))

    kept = waiting(numbers)

    np.testing.assert_array_equal(kept, numbers)
    np.testing.assert_array_equal(kept[3:5].argmax(-1), numbers[3:5].argmax(-1))
    assert not kept.flags.writeable and not list(tmp_path.iterdir())
    few = numbers[:2]
    assert waiting(few) is few
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(PackageError, match="cannot write .*gone: No such file.*set TMPDIR"):
        waiting(numbers)


class Summed(nn.Module):
    """A product, which is large where it rounds; without float64, if that is asked."""

    def __init__(self, *, has_float64: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(300, 4, bias=False)
        self.has_float64 = has_float64

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        if not self.has_float64 and found.dtype == torch.float64:
            raise RuntimeError("no kernel for float64")
        return found


X = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))


def forward(model: nn.Module) -> list[Floats]:
    found: Tensor = model(X)
    return [found[:20].numpy(), found[20:].numpy()]


def itself(numbers: Floats) -> Floats:
    return numbers


def test_an_eager_model_is_held_against_itself_in_float64_and_again_in_other_orders() -> None:
    model = Summed()
    exact = X.double() @ model.linear.weight.detach().double().T

    first, second = EagerModel.of(model, model, forward).run(forward)

    np.testing.assert_allclose(second.exact, exact[20:], rtol=1e-12)
    part = second.part(np.array([4, 7]))
    assert part.origin is not None and not part.is_mean
    found = part.losses(itself)
    np.testing.assert_array_equal(found, np.abs(part.runs[0] - exact[[24, 27]].numpy()).max(-1))
    again = part.origin.again()[part.origin.case].part(part.origin.positions)
    assert len(first.runs) == 1 and len(again.runs) == 4
    np.testing.assert_array_equal(again.exact, part.exact)
    assert (again.losses(itself) >= found).all() and (again.losses(itself) > found).any()


def test_a_model_that_does_not_run_in_float64_has_the_mean_of_its_runs_for_it() -> None:
    model = Summed(has_float64=False)
    eager = EagerModel.of(model, model, forward)

    first, _ = eager.run(forward)

    assert not eager.has_float64 and first.is_mean and first.origin is None
    np.testing.assert_array_equal(first.exact, np.mean(first.runs, axis=0, dtype=np.float64))
    others = [np.mean(np.delete(first.runs, i, 0), axis=0, dtype=np.float64) for i in range(4)]
    expected = np.max([losses(r, o) for r, o in zip(first.runs, others, strict=True)], axis=0)
    np.testing.assert_allclose(first.losses(itself), expected, atol=1e-12)
    assert eager.run(forward, in_own=False)[0].exact.dtype == np.float64


@contextmanager
def no_float64() -> Iterator[None]:
    raise RuntimeError("no kernel for float64")
    yield


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_certificate_says_that_the_reference_is_the_mean_of_runs(
    is_faulty: bool,
    spoil: Spoil,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("exporter.prover.eager.float64", no_float64)
    fault = labels_permuted if is_faulty else lambda _: None
    checkpoint = spoil("vit", "model.onnx", fault)

    if is_faulty:
        with pytest.raises(CertificateError, match="the median of all positions"):
            export_package(checkpoint, tmp_path / "package")
        return
    found = export_package(checkpoint, tmp_path / "package").certificate

    assert found.reference == "mean of runs"
    assert {one.what for one in found.judged} == {"logits", "vectors"}
