"""The date lines: right, varied, fast to make, and never in two parts."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from exporter.tasks.date_lines import draw_date, write_date
from exporter.tasks.dates import dates_task, draw_lines, make_tokenizer, part_of
from exporter.training.task import Task

TYPED = [
    line.split("\t")
    for line in (Path(__file__).parent / "typed_dates.tsv").read_text("utf-8").splitlines()
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def task() -> Task:
    return dates_task(0)


def lines(count: int, seed: int = 0) -> list[tuple[str, str]]:
    return draw_lines(random.Random(seed), count, part="training")


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


def test_no_date_is_in_two_parts() -> None:
    parts = {
        part: {iso for _, iso in draw_lines(random.Random(1), 2000, part=part)}
        for part in ("training", "validation", "held out")
    }

    assert not parts["training"] & parts["held out"]
    assert not parts["training"] & parts["validation"]
    assert not parts["validation"] & parts["held out"]
    assert part_of(datetime.date(1998, 2, 3)) in parts


def test_a_chunk_is_a_function_of_seed_and_number(
    task: Task, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.tasks.dates.make_tokenizer", lambda: tokenizer)  # in seconds
    again, other = dates_task(0), dates_task(1)

    def sources(examples: object) -> list[list[int]]:
        return [e.source.tolist() for e in list(examples)[:50]]  # type: ignore[call-overload]

    assert sources(task.chunks(3)) == sources(again.chunks(3))
    assert sources(task.chunks(3)) != sources(task.chunks(4))
    assert sources(task.chunks(3)) != sources(other.chunks(3))
    assert sources(task.held_out) == sources(other.held_out)
    assert len(task.held_out) == 1000


def test_the_tokenizer_is_the_same_every_time(tokenizer: Tokenizer) -> None:
    assert make_tokenizer().to_str() == tokenizer.to_str()


def test_the_tokenizer_gives_the_answer_back_and_ends_it(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode("2031-10-14")

    assert encoding.tokens == ["20", "31", "-", "10", "-", "14", "[EOS]"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "2031-10-14"


def test_case_accents_and_spaces_do_not_matter(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("  LE  3 AOÛT   2010 ").ids == tokenizer.encode("le 3 aout 2010").ids


def test_all_pairs_of_digits_are_tokens(tokenizer: Tokenizer) -> None:
    for number in range(100):
        assert tokenizer.token_to_id(f"{number:02}") is not None
        assert tokenizer.token_to_id(f"Ġ{number:02}") is not None


def test_any_text_can_be_encoded(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("日本 🙂 \x00 ſ").ids) > 1
    assert tokenizer.encode("").tokens == ["[EOS]"]


def test_typed_dates_are_well_formed_and_fit_the_model(tokenizer: Tokenizer, task: Task) -> None:
    longest = max(len(tokenizer.encode(line).ids) for line, _ in TYPED)

    assert len(TYPED) >= 60
    assert all(datetime.date.fromisoformat(iso) for _, iso in TYPED)
    assert longest <= task.config.max_source_len
