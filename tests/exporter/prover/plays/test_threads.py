"""A row that depends on the number of threads gets no certificate; the engine's limit keeps it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.errors import CertificateError
from engine.package.manifest import PackageFormat
from engine.slots import generation_sessions
from exporter.checkpoint import load_checkpoint
from exporter.graphs.package_graphs import write_graphs
from exporter.prover.execution import OnCpu
from exporter.prover.judge import ExactJudge, Judge
from exporter.prover.loss import LossJudge
from exporter.prover.pair import GeneratingPair
from exporter.prover.players import ReferenceModel, load
from exporter.prover.plays import rows
from exporter.prover.plays.rows import play_threads, thread_counts
from tests.exporter.conftest import MakeCheckpoint
from tests.fakes.traces import Trace

MakePair = Callable[[Judge], GeneratingPair]

# One head so wide, and a row so long, that the keys of a row are divided among the threads beyond
# the heads where a core has up to 8 MiB of L2 cache.
WIDE = {"d_model": 256, "num_heads": 1, "num_decoder_layers": 1, "max_target_len": 1100}


@pytest.fixture(scope="module")
def make_pair(
    make_checkpoint: MakeCheckpoint, traced: Trace, tmp_path_factory: pytest.TempPathFactory
) -> MakePair:
    checkpoint = load_checkpoint(make_checkpoint("gpt", **WIDE))
    directory = tmp_path_factory.mktemp("wide")
    write_graphs(traced(checkpoint.model), directory)

    def make(judge: Judge) -> GeneratingPair:
        pair = load(ReferenceModel.of(checkpoint, PackageFormat()), directory, judge, OnCpu())
        assert isinstance(pair, GeneratingPair)
        return pair

    return make


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a decoder run on more threads than it has heads."""
    for module in (rows, generation_sessions):
        monkeypatch.setattr(module, "decoder_threads", lambda contract, num_threads=0: num_threads)


def play(pair: GeneratingPair) -> list[int]:
    tried = thread_counts(pair.contract)
    list(play_threads(pair, tried, few=False))
    pair.judge.check()  # type: ignore[attr-defined]
    return tried


def test_the_engine_decodes_on_no_more_threads_than_the_certificate_tries(
    make_pair: MakePair,
) -> None:
    judge = ExactJudge()

    assert play(make_pair(judge)) == [1]
    assert judge.batch_invariant


@pytest.mark.usefixtures("no_limit")
def test_a_row_that_depends_on_the_number_of_threads_is_refused(make_pair: MakePair) -> None:
    message = r"prompt of 1098, alone on 2 threads with 1 heads, step \d: the row differs by"

    with pytest.raises(CertificateError, match=message):
        play(make_pair(ExactJudge()))


@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize("judge", [LossJudge(), ExactJudge(needs_equal_bits=False)])
def test_where_bits_are_not_claimed_it_is_told_that_they_depend_on_the_number_of_threads(
    judge: Judge, make_pair: MakePair
) -> None:
    assert play(make_pair(judge)) == [1, 2]

    assert not judge.batch_invariant
    if isinstance(judge, ExactJudge):
        assert "numbers of threads" in {one.play for one in judge.judged}
