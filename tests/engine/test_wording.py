"""A message names the first of many things, and says how many there are."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from engine.wording import listed, problems_of, shortened, size_of


class Sizes(BaseModel):
    model_config = ConfigDict(extra="forbid")

    width: int
    height: int


class Square(BaseModel):
    width: int

    @model_validator(mode="after")
    def _check(self) -> Square:
        raise ValueError(
            "; ".join(f"{n} is wrong for the reason that has this number" for n in "ab" * 9)
        )


def test_few_things_are_all_named() -> None:
    assert listed(["a", "b"]) == "a, b"


def test_of_many_things_the_first_are_named_and_the_others_counted() -> None:
    found = listed(range(3_000_000))

    assert found.startswith("0, 1, 2, ")
    assert found.endswith(", 31, and 2,999,968 more")
    assert len(listed(["x" * 10**6] * 100)) < 32 * 310


def test_a_long_value_is_cut() -> None:
    assert shortened("x" * 10**6) == "x" * 297 + "..."


def test_problems_that_a_check_found_together_are_all_told_in_its_own_words() -> None:
    with pytest.raises(ValidationError) as caught:
        Square.model_validate({"width": 1})

    message = problems_of(caught.value, "square.json")

    assert message.startswith("square.json: a is wrong")
    assert message.count("is wrong for the reason that has this number") == 18


def test_every_wrong_field_is_named_with_what_was_given() -> None:
    with pytest.raises(ValidationError) as caught:
        Sizes.model_validate({"width": "wide"})

    message = problems_of(caught.value, "sizes.json")

    assert message.startswith("width: Input should be a valid integer")
    assert "got 'wide'; height: Field required" in message


def test_a_line_does_not_grow_with_what_is_wrong() -> None:
    given = {f"{'k' * 1000}{i}": "v" * 1000 for i in range(1000)}
    with pytest.raises(ValidationError) as caught:
        Sizes.model_validate(given)

    message = problems_of(caught.value, "sizes.json")

    assert len(message) < 16_000 and message.endswith("; and 970 more")


def test_a_value_neither_breaks_the_line_nor_controls_the_terminal() -> None:
    assert shortened("one\ntwo\x1b[31m\ud800 é") == r"one\ntwo\x1b[31m\ud800 é"
    assert len(shortened("\n" * 10**6)) == 300


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (38_123_456, "38.1 MB"),
        (110.4e9, "110 GB"),
        (1.07e9, "1.1 GB"),
        (2.5e12, "2,500 GB"),
    ],
)
def test_sizes_have_a_unit(num_bytes: float, text: str) -> None:
    assert size_of(num_bytes) == text
