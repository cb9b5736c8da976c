"""A format that rounds is certified with how it answers a person's own lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from engine.errors import CertificateError
from engine.package.manifest import Loss, PackageFormat
from engine.package.package import read_manifest
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import load_checkpoint
from exporter.compare import scored_text
from exporter.compare.quality import eager_answers, measure_text, num_lines
from exporter.compare.scored_text import MAX_LINES, read_text
from exporter.compare.sides import EagerWriter
from exporter.export import export_package
from exporter.graphs.contracts import generation_contract
from exporter.likeness import likeness
from exporter.prover.eager import Floats
from exporter.prover.generation_cases import Case
from exporter.prover.loss import LossLimits, TextQuality
from exporter.training.writing import write_greedily
from exporter.verification import verify_package
from tests.exporter.compare.guesses import Zeros
from tests.exporter.conftest import VOCAB_SIZE, MakeCheckpoint, make_likely_and_ban
from tests.fakes.stand_in_certificate import edit_manifest
from tests.parity.conftest import export_unproven

pytestmark = pytest.mark.usefixtures("few_cases")

ANY_LOSS = LossLimits(max_token_loss=1, max_logit_loss=100, max_perplexity_loss=100)
PAIRS = "w3 w4 w5\tw6 w7 w30\n\nw9 w3\tw8\nno tab\nw7 w8 w3 w4\tw30 w30\n"
SOURCES = "w3 w4 w5\nw9 w3\n"


SMALL = {
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "max_source_len": 4,
    "max_target_len": 7,
}


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("encoder-decoder", **SMALL)


@pytest.fixture(scope="module")
def package(checkpoint: Path) -> Path:
    """An 8-bit package, exported with pairs of sentences."""
    text = checkpoint.parent / "text.tsv"
    text.write_text(PAIRS)
    out = checkpoint.parent / "package"
    export_package(checkpoint, out, weights="int8", kv_cache="fp32", limits=ANY_LOSS, text=text)
    return out


def loss_of(package: Path) -> Loss:
    loss = read_manifest(package).certificate.loss
    assert loss is not None
    return loss


def measured(package: Path, checkpoint: Path, content: str) -> TextQuality:
    (package.parent / "others").write_text(content)
    loaded = load_checkpoint(checkpoint)
    text = read_text(package.parent / "others", loaded)
    contract = generation_contract(loaded.config.model, PackageFormat(weights="int8"))
    assert contract is not None
    return measure_text(loaded.model, contract, package, text)


def test_answers_are_compared_with_references_and_with_those_of_the_eager_model(
    package: Path, checkpoint: Path
) -> None:
    found = loss_of(package)

    loaded = load_checkpoint(checkpoint)
    assert loaded.tokenizer is not None
    lines = read_text(package.parent / "text.tsv", loaded).lines
    cases = [line.case for line in lines]
    written = eager_answers(EagerWriter(loaded.model), cases, (2,), Zeros())
    texts = loaded.tokenizer.decode_batch(written)
    expected = likeness(texts, ["w6 w7 w30", "w8", "w30 w30"]).chrf
    assert found.text_lines == 3 and found.perplexity is not None
    assert found.eager_chrf == pytest.approx(expected)
    assert found.chrf is not None and 0 < found.chrf < 100
    assert found.chrf_between is not None and 0 < found.chrf_between <= 100
    again = measured(package, checkpoint, PAIRS)
    assert all(getattr(found, name) == value for name, value in asdict(again).items())


def test_sources_without_references_have_answers_to_compare(
    package: Path, checkpoint: Path
) -> None:
    found = measured(package, checkpoint, SOURCES)

    assert found.text_lines == 2 and found.chrf is found.eager_chrf is None
    assert found.chrf_between is not None and found.perplexity is None


def test_verify_finds_what_was_told_of_a_text(
    package: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_manifest(package).certificate
    assert found.loss is not None
    without = {"text_tokens": 0, "perplexity": None, "eager_perplexity": None, "text_lines": 0}
    without |= {"chrf": None, "eager_chrf": None, "chrf_between": None}
    nothing = found.model_copy(update={"loss": found.loss.model_copy(update=without)})
    edited = tmp_path / "package"
    shutil.copytree(package, edited)
    half = found.loss.chrf / 2  # type: ignore[operator]
    edit_manifest(edited, lambda m: m["certificate"]["loss"].update(chrf=half))

    monkeypatch.setattr("exporter.verification.prove", lambda *_, **__: nothing)
    notes = verify_package(package, checkpoint).notes
    monkeypatch.setattr("exporter.verification.prove", lambda *_, **__: found)
    with pytest.raises(CertificateError, match=r"loss\.chrf is .*, found"):
        verify_package(edited, checkpoint)

    assert "nothing of --text was measured again, for which it is to be given" in notes


def test_the_eager_model_writes_the_likeliest_tokens(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint)
    sources = [(3, 4, 5), (9, 3), (7, 8, 3, 4), (6,), (10, 11), (12, 13), (14,), (15, 16), (17,)]

    cases, eager = [Case(ids, (1,), 6) for ids in sources], EagerWriter(loaded.model)

    answers = eager_answers(eager, cases, (2,), Zeros())

    arrays = [np.array(ids) for ids in sources]
    written = write_greedily(loaded.model, loaded.config.model, arrays)  # type: ignore[arg-type]
    assert [[i for i in ids if i != 2] for ids in answers] == written
    rounds: list[int] = []

    class Right(Zeros):
        def write(self, cases: Sequence[Case]) -> list[Floats]:
            rounds.append(len(cases))
            by_source = dict(zip(sources, answers, strict=True))
            ids = [(*by_source[case.source], *(0,) * 6)[: case.num_tokens] for case in cases]
            return [np.eye(VOCAB_SIZE)[list(one)] for one in ids]

    assert eager_answers(eager, cases, (2,), Right()) == answers
    assert rounds == [8, 1]  # one for each batch, for all was guessed


def test_answers_begin_as_the_package_says(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = make_checkpoint("encoder-decoder")
    config = json.loads((path / "config.json").read_text())
    config["generation"] = GenerationDefaults(forced_begin=(7, 8)).model_dump(mode="json")
    (path / "config.json").write_text(json.dumps(config))
    (tmp_path / "text").write_text(SOURCES)
    loaded = load_checkpoint(path)

    text = read_text(tmp_path / "text", loaded)
    eager = EagerWriter(loaded.model)
    answers = eager_answers(eager, [line.case for line in text.lines], (2,), Zeros())

    assert [line.case.prompt for line in text.lines] == [(1, 7, 8)] * 2
    assert all(line.case.num_tokens == 5 for line in text.lines)  # room for seven, one behind
    longest = max(map(len, answers))
    assert 1 <= longest <= 5 and all(2 not in ids[:-1] for ids in answers)


def test_answers_have_no_token_that_is_banned(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = make_checkpoint("encoder-decoder", **SMALL)
    defaults = make_likely_and_ban(path, 7)
    (tmp_path / "text").write_text(SOURCES)
    loaded = load_checkpoint(path)
    contract = generation_contract(loaded.config.model)
    package = export_unproven(path).package
    assert contract is not None

    text = read_text(tmp_path / "text", loaded)
    found = measure_text(loaded.model, contract, package, text)

    eager = EagerWriter(loaded.model)
    answers = eager_answers(eager, [line.case for line in text.lines], (2,), Zeros())
    sources = [np.array(line.case.source) for line in text.lines]
    written = write_greedily(loaded.model, loaded.config.model, sources, defaults)  # type: ignore[arg-type]
    longest = loaded.config.model.max_target_len - 1
    assert [[i for i in ids if i != 2][:longest] for ids in answers] == written
    assert found.chrf_between == pytest.approx(100)


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0b", "\x0c", "\r"])
def test_line_feeds_alone_end_a_line_and_a_byte_order_mark_is_no_token(
    separator: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    loaded = load_checkpoint(make_checkpoint("encoder-decoder"))
    (tmp_path / "plain").write_text(PAIRS)
    typed = "\ufeff" + PAIRS.replace(" ", separator).replace("\n", "\r\n")
    (tmp_path / "typed").write_bytes(typed.encode())

    plain, found = (read_text(tmp_path / name, loaded) for name in ("plain", "typed"))

    assert [line.case for line in found.lines] == [line.case for line in plain.lines]
    assert found.pieces == plain.pieces


def test_no_more_lines_are_answered_than_a_text_may_have_tokens(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored_text, "MAX_TOKENS", 4)
    (tmp_path / "text").write_text("w3 w4 w5\nw6 w7\nw8\n")

    lines = read_text(tmp_path / "text", load_checkpoint(checkpoint)).lines

    assert [line.case.source for line in lines] == [(3, 4, 5), (6, 7)]


def test_a_large_model_answers_fewer_lines() -> None:
    assert num_lines(10**6) == MAX_LINES
    assert num_lines(77 * 10**6) == 64 and num_lines(6 * 10**8) == 8 and num_lines(10**10) == 8
