"""Data that are made up: right, varied, and never both learned and judged by."""

from __future__ import annotations

import datetime
import random
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch

from exporter.checkpoint import load_checkpoint
from exporter.tasks import build_task
from exporter.tasks.date_lines import draw_date, write_date
from exporter.tasks.made import MADE, draw_line, draw_opinion
from exporter.tasks.opinions import NEGATIVE, POSITIVE
from exporter.tasks.tagged_sentences import TAGS, write_sentence
from exporter.training.trainer import train

TYPED = [
    line.split("\t")
    for line in (Path(__file__).parent / "typed_dates.tsv").read_text("utf-8").splitlines()
]


def lines(count: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    drawn = (draw_line(rng)[0].split("\t") for _ in range(count))
    return [(line, iso) for line, iso in drawn]


@pytest.mark.parametrize("name", MADE)
def test_no_example_to_judge_by_is_learned(name: str, few_examples: None, tmp_path: Path) -> None:
    MADE[name].write(tmp_path, "learned")
    MADE[name].write(tmp_path, "judged")

    if name == "digits":
        learned, judged = (
            {path.name for path in (tmp_path / part).rglob("*.png")}
            for part in ("learned", "judged")
        )
        assert len(learned) + len(judged) == 1797
    else:
        between = "\n\n" if name == "tagging" else "\n"
        learned, judged = (
            {about(name, text) for text in (tmp_path / part).read_text().split(between)}
            for part in ("learned", "judged")
        )
    assert learned and judged and not learned & judged


def about(name: str, text: str) -> str:
    """Return what may be in one part alone: a date, words, a text."""
    if name == "tagging":
        return " ".join(line.split()[0] for line in text.splitlines()).lower()
    return text.split("\t")[1 if name == "dates" else 0].lower()


def test_every_line_stands_for_a_date() -> None:
    for line, iso in lines(2000):
        date = datetime.date.fromisoformat(iso)
        assert str(date.year % 100) in line
        assert len(line) < 64


def test_numbers_are_day_first_and_month_first_only_if_the_second_is_above_twelve() -> None:
    rng = random.Random(0)
    checked = 0
    for _ in range(5000):
        date = draw_date(rng)
        first, _, rest = write_date(rng, date).partition("/")
        second = rest.partition("/")[0]
        if not (first.isdigit() and second.isdigit()) or len(first) > 2:
            continue
        checked += 1
        expected = (int(second), int(first)) if int(second) > 12 else (int(first), int(second))
        assert (date.day, date.month) == expected
    assert checked > 100


def test_two_digit_years_are_1969_to_2068() -> None:
    years = {datetime.date.fromisoformat(iso).year for line, iso in lines(20_000) if "'" in line}

    assert 1969 <= min(years) < 1980
    assert 2060 < max(years) <= 2068


def test_all_months_of_all_languages_are_written() -> None:
    text = " ".join(line.lower() for line, _ in lines(20_000))

    for word in ("february", "février", "februar", "août", "mrz", "sept.", "juil.", "dienstag"):
        assert word in text, word
    for ordinal in ("1st", "2nd", "3rd", "11th", "21st", "1er", "twenty-first", "ersten"):
        assert ordinal in text, ordinal


def test_typed_dates_are_well_formed_and_fit_the_model(few_examples: None) -> None:
    task = build_task("dates")
    assert task.tokenizer is not None
    longest = max(len(task.tokenizer.encode(line).ids) for line, _ in TYPED)

    assert len(TYPED) >= 60
    assert all(datetime.date.fromisoformat(iso) for _, iso in TYPED)
    assert longest <= task.config.max_source_len
    assert task.tokenizer.encode("2031-10-14").tokens[1:6] == ["31", "-", "10", "-", "14"]


def test_words_have_more_than_one_tag() -> None:
    tags: defaultdict[str, set[str]] = defaultdict(set)
    rng = random.Random(0)
    for _ in range(5000):
        for word, tag in write_sentence(rng):
            tags[word].add(tag)

    assert tags["saw"] == {"NOUN", "VERB"}
    assert tags["can"] == {"AUX", "NOUN", "VERB"}
    assert tags["will"] >= {"AUX", "NOUN", "PROPN"}
    assert tags["her"] == {"DET", "PRON"}
    assert tags["to"] == {"ADP", "PART"}
    assert set().union(*tags.values()) == set(TAGS)


def test_the_same_adjective_is_praise_and_blame_and_labels_are_balanced() -> None:
    rng = random.Random(0)
    texts = [draw_opinion(rng)[0].lower().split("\t") for _ in range(5000)]

    for word in ("good", "boring", "not", "but", "loved"):
        assert {label for text, label in texts if word in text.split()} == {POSITIVE, NEGATIVE}
    assert 0.45 < sum(label == POSITIVE for _, label in texts) / 5000 < 0.55


SAWS = {
    "I saw a saw": "PRON VERB DET NOUN",
    "They can fish": "PRON AUX VERB",
    "The can will fall": "DET NOUN AUX VERB",
    "Will Mary water the plants ?": "AUX PROPN VERB DET NOUN PUNCT",
}


@pytest.mark.long
def test_training_reaches_its_target_and_tells_a_saw_from_seeing(tmp_path: Path) -> None:
    report = train(partial(build_task, "tagging"), tmp_path / "run")

    assert report.target_reached, report.summary
    assert report.metrics["label_accuracy"] >= 0.99
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint.tokenizer is not None
    for text, expected in SAWS.items():
        ids = torch.tensor([checkpoint.tokenizer.encode(text).ids])
        with torch.no_grad():
            found = checkpoint.model(ids, None).logits[0].argmax(-1).tolist()
        assert " ".join(TAGS[i] for i in found) == expected
