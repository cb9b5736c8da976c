"""Results of the client, as one line of JSON."""

from __future__ import annotations

import json

import pytest
from tokenweir import GeneratedSequence, PositionLogprobs, TokenLogprob

from server.cli.calls.json_lines import print_json


def test_dataclasses_are_objects_in_the_order_of_their_fields_and_bytes_are_url_safe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = TokenLogprob(7, b"\xff\xfe\xfd", -0.5, 1)
    sequence = GeneratedSequence(
        "é", (7,), "eos", None, -0.5, logprobs=(PositionLogprobs(token, ()),)
    )

    print_json(sequence)

    line = capsys.readouterr().out
    assert line.startswith('{"text":"é","token_ids":[7],"finish_reason":"eos","matched_stop":null,')
    assert json.loads(line)["logprobs"][0]["chosen"]["piece"] == "__79"


def test_numbers_that_json_has_not_are_texts(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"values": (float("inf"), -float("inf"), float("nan"), 1.5)})

    assert json.loads(capsys.readouterr().out)["values"] == ["Infinity", "-Infinity", "NaN", 1.5]
