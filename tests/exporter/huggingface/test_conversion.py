"""Each difference between a tensor of a source and ours is undone, from the shape that it has."""

from __future__ import annotations

import pytest
import torch

from exporter.huggingface.conversion import (
    HeadOrder,
    HeadParts,
    PlusOne,
    Rows,
    SkipRows,
    Squeezed,
    Step,
    StoredWeight,
    Transposed,
    modules,
    packed,
)

MATRIX = torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize(
    ("step", "stored", "ours"),
    [
        (Transposed(), MATRIX, MATRIX.T),
        (Transposed(), MATRIX[:, 0], MATRIX[:, 0]),
        (Rows(2, 5, 6), MATRIX, MATRIX[[2, 3, 4]]),
        (SkipRows(2), MATRIX, MATRIX[2:]),
        (Squeezed(), MATRIX[:, 0][None], MATRIX[:, 0]),
        (PlusOne(), MATRIX[0], torch.tensor([1.0, 2.0])),
        (HeadParts(1, 3, 2), MATRIX, MATRIX[[1, 4]]),
        (HeadParts(2, 3, 1), MATRIX[:, 0], MATRIX[[4, 5], 0]),
        (HeadOrder((2, 0, 1), 2), MATRIX, MATRIX[[2, 0, 1, 5, 3, 4]]),
    ],
)
def test_a_step_gives_ours_and_knows_the_shape_of_theirs(
    step: Step, stored: torch.Tensor, ours: torch.Tensor
) -> None:
    assert torch.equal(step(stored), ours)
    assert step.stored_shape(tuple(ours.shape)) == tuple(stored.shape)


def test_steps_are_done_in_turn() -> None:
    weight = StoredWeight(("one",), (Transposed(), Rows(0, 1, 2)))

    assert weight.extract(MATRIX.half()).tolist() == [[0, 2, 4, 6, 8, 10]]
    assert weight.extract(MATRIX).dtype == torch.float32
    assert weight.stored_shape((1, 6)) == (6, 2)


def test_a_table_has_weight_and_bias_of_every_module_and_of_every_packed_part() -> None:
    table = {
        **modules({"layers.{i}.norm": ("h.{i}.ln", "h.{i}.norm")}),
        **packed("layers.{i}", {"q": 4, "k": 2}, "h.{i}.qk"),
    }

    assert table["layers.{i}.norm.bias"] == StoredWeight(("h.{i}.ln.bias", "h.{i}.norm.bias"))
    assert table["layers.{i}.k.weight"] == StoredWeight(("h.{i}.qk.weight",), (Rows(4, 6, 6),))
    assert len(table) == 6
