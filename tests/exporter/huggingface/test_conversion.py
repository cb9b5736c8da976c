"""Each difference between a tensor of a source and ours is undone, from the shape that it has."""

from __future__ import annotations

import pytest
import torch

from exporter.huggingface.conversion import (
    PLUS_ONE,
    SQUEEZED,
    TRANSPOSED,
    Step,
    StoredWeight,
    head_order,
    head_parts,
    modules,
    packed,
    rows_of,
    skip_rows,
)

MATRIX = torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize(
    ("step", "stored", "ours"),
    [
        (TRANSPOSED, MATRIX, MATRIX.T),
        (TRANSPOSED, MATRIX[:, 0], MATRIX[:, 0]),
        (rows_of(2, 5, 6), MATRIX, MATRIX[[2, 3, 4]]),
        (skip_rows(2), MATRIX, MATRIX[2:]),
        (SQUEEZED, MATRIX[:, 0][None], MATRIX[:, 0]),
        (PLUS_ONE, MATRIX[0], torch.tensor([1.0, 2.0])),
        (head_parts(1, 3, 2), MATRIX, MATRIX[[1, 4]]),
        (head_parts(2, 3, 1), MATRIX[:, 0], MATRIX[[4, 5], 0]),
        (head_order((2, 0, 1), 2), MATRIX, MATRIX[[2, 0, 1, 5, 3, 4]]),
    ],
)
def test_a_step_gives_ours_and_knows_the_shape_of_theirs(
    step: Step, stored: torch.Tensor, ours: torch.Tensor
) -> None:
    assert torch.equal(step.made(stored), ours)
    assert step.stored_shape(tuple(ours.shape)) == tuple(stored.shape)


def test_steps_are_done_in_turn() -> None:
    weight = StoredWeight(("one",), (TRANSPOSED, rows_of(0, 1, 2)))

    assert weight.extract(MATRIX.half()).tolist() == [[0, 2, 4, 6, 8, 10]]
    assert weight.extract(MATRIX).dtype == torch.float32
    assert weight.stored_shape((1, 6)) == (6, 2)


def test_a_table_has_weight_and_bias_of_every_module_and_of_every_packed_part() -> None:
    table = {
        **modules({"layers.{i}.norm": ("h.{i}.ln", "h.{i}.norm")}),
        **packed("layers.{i}", {"q": 4, "k": 2}, "h.{i}.qk"),
    }

    assert table["layers.{i}.norm.bias"] == StoredWeight(("h.{i}.ln.bias", "h.{i}.norm.bias"))
    key = table["layers.{i}.k.weight"]
    assert key.names == ("h.{i}.qk.weight",)
    assert torch.equal(key.extract(MATRIX), MATRIX[4:6]) and key.stored_shape((2, 2)) == (6, 2)
    assert len(table) == 6
