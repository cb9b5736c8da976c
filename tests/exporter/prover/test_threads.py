"""A row that depends on the number of threads gets no certificate; the engine's limit keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exporter.certificate import threads as threads_module
from exporter.certificate.comparison import Comparison, LossyComparison
from exporter.certificate.sides import Sides
from exporter.certificate.threads import certify_threads

from engine.errors import CertificateError
from engine.slots import generation_sessions
from exporter.checkpoint import load_checkpoint
from exporter.graphs.contracts import generation_contract
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.torch_export import build_graphs

MakeCheckpoint = Callable[..., Path]
MakeSides = Callable[[Comparison], Sides]

# One head so wide, and a row so long, that the keys of a row are divided among the threads beyond
# the heads where a core has up to 8 MiB of L2 cache.
WIDE = {"d_model": 256, "num_heads": 1, "num_decoder_layers": 1, "max_target_len": 1100}


@pytest.fixture(scope="module")
def make_sides(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> MakeSides:
    model = load_checkpoint(make_checkpoint("gpt", **WIDE)).model
    contract = generation_contract(model.config)
    assert contract is not None
    directory = tmp_path_factory.mktemp("wide")
    write_graphs(build_graphs(model), directory)
    return lambda comparison: Sides(model.double(), contract, directory, comparison)


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a decoder run on more threads than it has heads."""
    for module in (threads_module, generation_sessions):
        monkeypatch.setattr(module, "decoder_threads", lambda contract, num_threads=0: num_threads)


def test_the_engine_decodes_on_no_more_threads_than_the_certificate_tries(
    make_sides: MakeSides,
) -> None:
    comparison = Comparison()

    assert certify_threads(make_sides(comparison), num_heads=1) == [1]
    assert comparison.batch_invariant


@pytest.mark.usefixtures("no_limit")
def test_a_row_that_depends_on_the_number_of_threads_is_refused(make_sides: MakeSides) -> None:
    message = r"prompt of 1098, alone on 2 threads with 1 heads, step \d: the row differs by"

    with pytest.raises(CertificateError, match=message):
        certify_threads(make_sides(Comparison()), num_heads=1)


@pytest.mark.usefixtures("no_limit")
def test_a_format_with_loss_tells_that_it_depends_on_the_number_of_threads(
    make_sides: MakeSides,
) -> None:
    comparison = LossyComparison()

    assert certify_threads(make_sides(comparison), num_heads=1) == [1, 2]
    assert not comparison.batch_invariant
