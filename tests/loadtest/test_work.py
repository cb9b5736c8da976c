"""Requests of a load test."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.work.ask import Ask, texts
from loadtest.work.common import Common
from loadtest.work.expecting import expecting, to_lines
from loadtest.work.lengths import parse_lengths
from loadtest.work.mix import Mix, parse_kind, parse_option
from loadtest.work.requests_file import read_lines, read_requests
from loadtest.work.synthetic import Synthetic


def draws(text: str, count: int = 5000) -> list[int]:
    generator = np.random.default_rng(0)
    lengths = parse_lengths(text)
    return [lengths.draw(generator) for _ in range(count)]


def jsonl(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_number_of_tokens_is_itself():
    assert set(draws("128")) == {128}


def test_a_range_of_tokens_has_each_number_alike():
    counts = Counter(draws("3-6"))

    assert set(counts) == {3, 4, 5, 6}
    assert min(counts.values()) > 1000


def test_a_lognormal_length_has_its_median_and_its_spread():
    found = np.log(draws("lognormal:180,0.6"))

    assert np.median(found) == pytest.approx(np.log(180), abs=0.03)
    assert found.std() == pytest.approx(0.6, rel=0.05)


def test_a_histogram_of_lengths_comes_from_a_file(tmp_path: Path):
    path = tmp_path / "lengths.json"
    path.write_text('{"64": 3, "512": 1}')

    counts = Counter(draws(f"@{path}"))

    assert set(counts) == {64, 512}
    assert counts[64] / 5000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    "text", ["0", "-3", "6-3", "x", "", "lognormal:180", "lognormal:0,1", "lognormal:1..,1", "@no"]
)
def test_what_is_no_length_is_refused(text: str):
    with pytest.raises(LoadTestError):
        parse_lengths(text)


@pytest.mark.parametrize("content", ["[]", "{}", '{"x": 1}', '{"5": 0}', '{"0": 1}', "no"])
def test_a_histogram_that_is_none_is_refused(content: str, tmp_path: Path):
    path = tmp_path / "lengths.json"
    path.write_text(content)

    with pytest.raises(LoadTestError, match="lengths.json"):
        parse_lengths(f"@{path}")


def test_synthetic_prompts_are_never_the_same_twice_and_the_same_for_an_index():
    work = Synthetic(parse_lengths("8-16"), token_ids=(5, 9))

    asks = [work.ask(index) for index in range(50)]

    assert len({ask.prompt for ask in asks}) == 50
    assert asks == [work.ask(index) for index in range(50)]
    assert {len(ask.prompt) for ask in asks} == set(range(8, 17))
    assert {token for ask in asks for token in ask.prompt} == {5, 6, 7, 8, 9}


def test_a_length_of_the_answer_is_made_exact():
    work = Common(texts(("p",)), {"beam": 4}, output_tokens=parse_lengths("12"))

    assert work.ask(0).options == {
        "beam": 4,
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "ignore_eos": True,
    }


def test_options_of_a_request_stand_before_those_of_all():
    work = Common(texts(("p",), temperature=0.5), {"temperature": 2.0, "top_k": 3})

    assert work.ask(0).options == {"temperature": 0.5, "top_k": 3}


def test_a_mix_has_its_shares_and_each_kind_its_options():
    kinds = map(
        parse_kind,
        (
            "70 short max_new_tokens=16",
            "20 beam beam=4",
            "10 score method=score target='a b' top_logprobs=2",
        ),
    )
    work = Mix(Common(texts(("p", "q")), {"seed": 1}), tuple(kinds))

    asks = [work.ask(index) for index in range(3000)]

    counts = Counter(ask.kind for ask in asks)
    shares = [counts[name] / 3000 for name in ("short", "beam", "score")]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.03)
    found = {ask.kind: ask for ask in asks}
    assert found["short"].options == {"seed": 1, "max_new_tokens": 16}
    assert found["beam"].options == {"seed": 1, "beam": 4}
    assert found["score"].options == {"top_logprobs": 2}, "those of a generation do not go with it"
    assert (found["score"].method, found["score"].target) == ("score", "a b")
    assert work.title == "2 prompts in turn: 70% short, 20% beam, 10% score"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a kind of requests"),
        ("70", "is not a kind of requests"),
        ("x short", "is not a kind of requests"),
        ("0 short", "must be above 0"),
        ("5 short beam", "'beam' is not NAME=VALUE"),
        ("5 short method=sing", "method 'sing' must be one of generate, score"),
    ],
)
def test_what_is_no_kind_is_refused(text: str, message: str):
    with pytest.raises(LoadTestError, match=message):
        parse_kind(text)


def test_a_value_that_is_no_json_is_a_text():
    assert parse_option("beam=4") == ("beam", 4)
    assert parse_option('stop=["a", "b"]') == ("stop", ["a", "b"])
    assert parse_option("tenant=blue") == ("tenant", "blue")


def test_requests_of_a_file_have_prompts_options_times_and_sessions(tmp_path: Path):
    (tmp_path / "a.png").touch()
    path = jsonl(
        tmp_path / "work.jsonl",
        {"prompt": "later", "at": 2.5, "options": {"beam": 2}, "kind": "slow"},
        {"prompt": [5, 6], "at": 0.0, "turns": ["and {answer}?"]},
        {"chat": [{"role": "user", "content": "hi"}], "timestamp": 500},
        {"image": "a.png", "at": 3, "method": "classify"},
        {"prompt": "s", "method": "score", "target": "t", "at": 4, "answer": {"sum_logprob": -1.5}},
    )

    work = read_requests(path)

    assert work.times == (0.0, 0.5, 2.5, 3.0, 4.0)
    first, chat, later, image, score = work.asks
    assert (first.prompt, first.turns) == ((5, 6), ("and {answer}?",))
    assert chat.prompt == ({"role": "user", "content": "hi"},)
    assert (later.options, later.kind) == ({"beam": 2}, "slow")
    assert (image.prompt, image.method) == (tmp_path / "a.png", "classify")
    assert (score.target, score.expected) == ("t", {"sum_logprob": -1.5})


def test_a_trace_of_lengths_is_made_of_drawn_tokens(tmp_path: Path):
    line = {"timestamp": 1500, "input_length": 30, "output_length": 4, "hash_ids": [1, 2]}

    (ask,) = read_requests(jsonl(tmp_path / "trace.jsonl", line), (7, 8)).asks

    assert len(ask.prompt) == 30 and set(ask.prompt) == {7, 8}
    assert ask.at == 1.5
    assert ask.options["max_new_tokens"] == ask.options["min_new_tokens"] == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"image": "no.png"}', "request 2: image no.png is no file in"),
        ('{"prompt": "a", "image": "b"}', "request 2: give one of prompt, chat, image and input"),
        ("{}", "request 2: give one of prompt"),
        ('{"prompt": "a", "at": -1}', "request 2: at: Input should be greater"),
        ('{"promt": "a"}', "request 2: promt: Extra inputs are not permitted"),
        ('{"prompt": "a", "method": "sing"}', "request 2: method:"),
        ("no json", "request 2: the line: Invalid JSON"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, message: str, tmp_path: Path):
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")

    with pytest.raises(LoadTestError, match=message):
        read_requests(path)


def test_the_next_turn_of_a_text_is_the_last_answer():
    session = Common(texts(("p",)), num_turns=3).ask(0)

    second = session.next_turn("one")
    assert second is not None and second.prompt == "one"
    third = second.next_turn("two")
    assert third is not None and third.prompt == "two"
    assert third.next_turn("three") is None


def test_a_conversation_grows_with_every_turn():
    ask = Ask(({"role": "user", "content": "hi"},), turns=("why {answer}?",))

    following = ask.next_turn("no")

    assert following is not None
    assert following.prompt == (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "why no?"},
    )


def test_answers_that_are_written_are_expected_by_the_same_requests(tmp_path: Path):
    asks = [
        Ask("a", options={"beam": 2}),
        Ask((5, 6)),
        Ask(({"role": "user", "content": "ü"},), method="generate"),
        Ask("s", method="score", target="t"),
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text(to_lines((ask, {"text": str(place)}) for place, ask in enumerate(asks)))
    known = read_requests(path).asks

    class Asked:
        title, num_different, times = "asked", len(asks), ()

        def ask(self, index: int) -> Ask:
            return asks[index]

    work = expecting(Asked(), known, path.name)

    found = [work.ask(index).expected for index in range(len(asks))]
    assert found == [{"text": str(place)} for place in range(4)]


def test_answers_to_other_requests_are_refused():
    with pytest.raises(LoadTestError, match="f.jsonl has no answer to any of the requests"):
        expecting(texts(("p",)), (Ask("q", expected={"text": "x"}),), "f.jsonl")


def test_an_answer_to_a_prompt_without_options_holds_for_all_options():
    work = expecting(texts(("p",), beam=3), (Ask("p", expected={"text": "x"}),), "f")

    assert work.ask(0).expected == {"text": "x"}


def test_prompts_are_the_lines_of_a_file(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeff3rd of\u2028Feb\r\n\nle 7 août\x0c2004\n".encode())

    assert read_lines(path) == ("3rd of\u2028Feb", "le 7 août\x0c2004")


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\n \n"])
def test_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(LoadTestError, match="prompts.txt"):
        read_lines(path)


def test_a_file_of_no_reasonable_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.touch()
    os.truncate(path, 40 * 2**30)

    with pytest.raises(LoadTestError, match="more than 268,435,456 bytes; give a part"):
        read_lines(path)
