"""Cases are played in blocks, of which one at a time has its logits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from engine.package.manifest import PackageFormat
from exporter.checkpoint import load_checkpoint
from exporter.graphs.package_graphs import write_graphs
from exporter.prover.execution import OnCpu
from exporter.prover.generation_cases import Case, make_cases
from exporter.prover.judge import ExactJudge
from exporter.prover.pair import Alone, GeneratingPair
from exporter.prover.players import ReferenceModel, load
from exporter.prover.plays import blocks
from tests.exporter.conftest import MakeCheckpoint
from tests.fakes.traces import Trace


def test_the_logits_of_a_block_are_given_back_before_those_of_the_next_are_computed(
    make_checkpoint: MakeCheckpoint, traced: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(make_checkpoint("gpt"))
    write_graphs(traced(checkpoint.model), tmp_path)
    reference = ReferenceModel.of(checkpoint, PackageFormat())
    pair = load(reference, tmp_path, ExactJudge(), OnCpu())
    assert isinstance(pair, GeneratingPair)
    cases = make_cases(pair.contract, [], 2, 4)
    monkeypatch.setattr(blocks, "_BLOCK_LOGITS", 1)  # eight cases each
    take_alone, of_blocks = pair.take_alone, []

    def take(block: Sequence[Case], *seen: Any) -> list[Alone]:
        assert all(one() is None for found in of_blocks for one in found)
        found = take_alone(block, *seen)
        of_blocks.append([ref(one.eager) for one in found])
        return found

    monkeypatch.setattr(pair, "take_alone", take)
    list(blocks.play_blocks(pair, cases, cases))

    assert [len(found) for found in of_blocks] == [8, 8, 8]
