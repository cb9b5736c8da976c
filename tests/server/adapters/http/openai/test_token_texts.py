"""Every token has its part of a text, however text and tokens come."""

from __future__ import annotations

import pytest

from server.adapters.http.openai.token_texts import TokenTexts

Message = tuple[str, list[bytes]]  # a text, and the tokens that come with it
AE = [b"\xc3", b"\xa9"]  # é


@pytest.mark.parametrize(
    ("messages", "parts"),
    [([("So a", [b"So", b" a"])], ["So", " a"]),
     ([("So a", [b" So", b" a"])], ["So", " a"]),  # no space before the first word
     ([("So a", [b"<s>", b"So", b"<pad>", b" a", b"</s>"])], ["", "So", "", " a", ""]),
     ([("é!", [*AE, b"!"])], ["", "é", "!"]),
     ([("", AE[:1]), ("é!a", [AE[1], b"!", b"a"])], ["", "é", "!", "a"]),  # a part of a character
     ([("\ufffdab", [b"\xff", b"a", b"b"])], ["\ufffd", "a", "b"]),
     ([("\ufffdab", [b"\xe6", b"a", b"b"])], ["", "\ufffda", "b"]),
     ([("a", [b"a", b"ST"]), ("STx!", [b"x", b"!"])], ["a", "", "STx", "!"]),  # may stop
     ([("aS", [b"aST"]), ("T", [b"</s>"])], ["aS", "T"]),
     ([("a", [b"a", b"<pad>"]), ("bc", [b"b", b"c"])], ["a", "", "b", "c"]),
     ([("a", [b"a", b"ST"]), ("", [b"OP"])], ["a", "", ""]),  # has stopped
     ([("other", [b"x", b"y"])], ["", "other"])],
)  # fmt: skip
def test_parts_are_those_of_the_tokens(messages: list[Message], parts: list[str]) -> None:
    texts = TokenTexts()

    found = [part for text, pieces in messages for part in texts.push(text, pieces)]

    assert found == parts


def test_text_without_a_token_is_that_of_earlier_ones() -> None:
    texts = TokenTexts()
    texts.push("", AE)

    assert texts.push("é", []) == []
    assert texts.push("ab", [b"a", b"b"]) == ["a", "b"]
