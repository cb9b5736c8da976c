"""Copies of a few cases run in every number; what a format loses is counted of each case once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.package.manifest import PackageFormat
from engine.sampling.logits import StepLogits
from engine.slots.runner import SlotModelRunner
from exporter.checkpoint import load_checkpoint
from exporter.graphs.package_graphs import write_graphs
from exporter.progress import no_progress
from exporter.prover.execution import OnCpu
from exporter.prover.loss import LossJudge, LossLimits
from exporter.prover.pair import GeneratingPair
from exporter.prover.players import Players, ReferenceModel, load, play_all, program_of
from exporter.prover.plays import rows
from exporter.prover.plays.program import Program, Scope
from exporter.prover.plays.rows import play_row_counts
from exporter.prover.plays.sources import group_sizes, play_sources
from exporter.prover.progress import Meter
from tests.exporter.conftest import MakeCheckpoint
from tests.fakes.traces import Trace

WRONG_ROWS, WRONG_BY = 13, 40.0
SOURCES = [(3, 1, 4), (1, 5, 9)]
ANY_LOSS = LossLimits(1, 100, 100, 100)


class RowsDiffer(LossJudge):
    """A judge of a format whose rows differ in a batch from the same rows alone."""

    def bits(self, *rows: Any) -> bool:
        super().bits(*rows)
        return False

    @property
    def tokens_seen(self) -> int:
        return self.tokens_compared + self.tokens_undecided


Loaded = tuple[ReferenceModel, Players, RowsDiffer]


@pytest.fixture
def load_tiny(
    make_checkpoint: MakeCheckpoint, traced: Trace, tmp_path: Path
) -> Callable[[str], Loaded]:
    def make(family: str) -> Loaded:
        checkpoint, judge = load_checkpoint(make_checkpoint(family)), RowsDiffer()
        write_graphs(traced(checkpoint.model), tmp_path)
        reference = ReferenceModel.of(checkpoint, PackageFormat())
        return reference, load(reference, tmp_path, judge, OnCpu()), judge

    return make


def test_copies_do_not_count_but_one_that_is_far_off_is_noted(
    load_tiny: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, (_, pair, found) = rows.decode, load_tiny("encoder-decoder")
    assert isinstance(pair, GeneratingPair)

    def wrong(
        runner: SlotModelRunner, tokens: Sequence[int], *asked: Any, **options: Any
    ) -> StepLogits:
        step = decode(runner, tokens, *asked, **options)
        off = np.float32(WRONG_BY * (len(tokens) == WRONG_ROWS))
        return step._replace(logits=step.all_logits + off, top_logits=step.top_logits + off)

    monkeypatch.setattr(rows, "decode", wrong)

    list(play_sources(pair, SOURCES, few=False))
    of_sources = found.tokens_seen, found.result(ANY_LOSS).max_abs_logit_diff
    list(play_row_counts(pair, range(1, 33)))

    assert max(group_sizes(SOURCES, pair.num_rows, few=False)) > len(SOURCES)
    assert of_sources[0] == 0 < of_sources[1] < 1e-4
    assert 8 <= found.tokens_seen <= 6 * 8  # its prompts and one token
    loss = found.result(ANY_LOSS)
    assert loss.mean_abs_logit_diff < 1e-4
    assert loss.max_abs_logit_diff == pytest.approx(WRONG_BY, rel=1e-3)


def test_images_that_come_again_in_a_batch_do_not_count(
    load_tiny: Callable[[str], Loaded],
) -> None:
    reference, pair, found = load_tiny("vit")
    program: Program = program_of(reference, Scope())

    play_all(pair, program, found, Meter(no_progress, 1, 1))

    assert isinstance(program.covered["row_counts"], list)
    assert sum(program.covered["row_counts"]) > 500
    assert found.tokens_seen <= program.num_cases * (1 + 4)
