"""Tables about a package."""

from __future__ import annotations

import pytest

from engine.package.manifest import Answers
from server.cli.tables import certificate_table, print_table
from tests.fakes.engines import generation_package, prediction_package
from tests.fakes.stand_in_certificate import LOSS, certificate, judged


def test_the_certificate_shows_what_a_package_gives_to_requests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ids = tuple(range(100, 150))
    package = generation_package(
        beam=4, length_penalty=1.0, forced_begin=(7,), forced_end=1, banned_tokens=ids
    )

    print_table(certificate_table(package.manifest, package.manifest.certificate))

    out = capsys.readouterr().out
    told = " ".join(part for line in out.splitlines() for part in line.strip("│└┘─ ").split("│"))
    assert "banned_tokens [100 101 102 103 104 105 106 107, 50 in all]" in " ".join(told.split())
    assert "beam 4, forced_begin [7], forced_end 1, length_penalty 1" in " ".join(told.split())
    assert max(map(len, out.splitlines())) <= 80


def test_the_certificate_of_a_package_without_defaults_has_no_row_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = generation_package()

    print_table(certificate_table(package.manifest, package.manifest.certificate))

    assert "defaults" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("chrf", "told"),
    [
        ((41.26, 41.5, 97.0), "41.3, of the eager model's 41.5; to the eager model's 97.0"),
        ((None, None, 97.0), "to the eager model's 97.0"),
        ((None, None, None), "none: nothing was written"),
    ],
)
def test_the_certificate_shows_how_near_answers_to_a_text_are(
    chrf: tuple[float | None, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = generation_package().manifest
    names = ("chrf", "eager_chrf", "chrf_between")
    loss = LOSS.model_copy(update={"text_lines": 12, **dict(zip(names, chrf, strict=True))})

    print_table(certificate_table(manifest, manifest.certificate.model_copy(update={"loss": loss})))

    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"chrF of answers to 12 lines {told}" in out


def test_the_certificate_shows_what_graphs_lose_beside_pytorch_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = certificate(proof="quick", judged=(judged(2, play="beams", what="alignment"),))

    print_table(certificate_table(generation_package().manifest, found))

    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "cases compared with PyTorch 1, proof quick" in out
    assert "alignment from float64, beams median 2.0e-06, largest 2.0e-05; PyTorch itself " in out
    assert "PyTorch itself 1.0e-06, 1.0e-05" in out


@pytest.mark.parametrize(
    ("answers", "rows"),
    [
        (
            Answers(items=9, labels=70, labels_turned=2, max_probability_diff=3e-7),
            ["labels that differ 2 of 70", "largest difference of a probability 3.0e-07"],
        ),
        (
            Answers(items=9, max_score_diff=4e-6, pairs=36, pairs_turned=1),
            ["largest difference of a score 4.0e-06", "pairs in another order 1 of 36"],
        ),
        (
            Answers(items=9, max_vector_loss=1e-12, max_number_diff=2e-7, neighbours_kept=8),
            [
                "largest 1 - cosine of a vector 1.0e-12",
                "largest difference of a number 2.0e-07",
                "nearest neighbours kept 8 of 9",
            ],
        ),
    ],
)
def test_the_certificate_shows_what_items_are_told_in_words_of_the_kind_of_model(
    answers: Answers, rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = certificate(task="classify", answers=answers, tokens_compared=0, tokens_equal=0)

    print_table(certificate_table(prediction_package().manifest, found))

    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert [row for row in rows if row not in out] == []
    assert "same " not in out
