"""Copies of a few cases run in every number; what a format loses is counted of each case once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exporter.certificate import row_counts
from exporter.certificate.cases import no_progress
from exporter.certificate.comparison import LossyComparison
from exporter.certificate.driver import Runner
from exporter.certificate.execution import OnCpu
from exporter.certificate.one_pass import Pair, certify_images
from exporter.certificate.row_counts import certify_row_counts
from exporter.certificate.sides import Sides
from exporter.certificate.sources import certify_sources

from engine.sampling.logits import StepLogits
from exporter.checkpoint import load_checkpoint
from exporter.graphs.contracts import generation_contract, image_contract
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.torch_export import build_graphs

MakeCheckpoint = Callable[..., Path]

WRONG_ROWS, WRONG_BY = 13, 40.0
SOURCES = [(3, 1, 4), (1, 5, 9)]


class RowsDiffer(LossyComparison):
    """Of a format whose rows differ in a batch from the same rows alone."""

    def bits(self, *rows: Any) -> bool:
        super().bits(*rows)
        return False


@pytest.fixture
def sides(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Sides:
    model = load_checkpoint(make_checkpoint("encoder-decoder")).model
    contract = generation_contract(model.config)
    assert contract is not None
    write_graphs(build_graphs(model), tmp_path)
    return Sides(model.double(), contract, tmp_path, RowsDiffer())


def test_copies_do_not_count_but_one_that_is_far_off_is_noted(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, found = row_counts.decode, sides.comparison

    def wrong(runner: Runner, tokens: Sequence[int], *asked: Any, **options: Any) -> StepLogits:
        step = decode(runner, tokens, *asked, **options)
        off = np.float32(WRONG_BY * (len(tokens) == WRONG_ROWS))
        return step._replace(logits=step.all_logits + off, top_logits=step.top_logits + off)

    monkeypatch.setattr(row_counts, "decode", wrong)

    groups = certify_sources(sides, SOURCES)
    of_sources = found.tokens_seen, found.max_abs_logit_diff
    num_cases, tried = certify_row_counts(sides)

    assert max(groups) > len(SOURCES) and of_sources[0] == 0 < of_sources[1] < 1e-4
    assert num_cases == 8 and tried == list(range(1, 33))
    assert num_cases <= found.tokens_seen <= 6 * num_cases  # of its prompt and one token
    assert isinstance(found, LossyComparison) and found.mean_abs_logit_diff < 1e-4
    assert found.max_abs_logit_diff == pytest.approx(WRONG_BY, rel=1e-3)


def test_images_that_come_again_in_a_batch_do_not_count(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model = load_checkpoint(make_checkpoint("vit")).model
    contract = image_contract(model.config)
    assert contract is not None
    write_graphs(build_graphs(model), tmp_path)
    found = RowsDiffer()

    pair = Pair(model.double(), OnCpu().load_session(tmp_path))
    num_images, covered = certify_images(pair, contract, found, no_progress)

    assert sum(covered["row_counts"]) > 500
    assert found.tokens_seen <= num_images * (1 + len(covered["batch_sizes"]))
