"""Calls of functions are found in texts of every format, wherever their pieces are cut."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any, get_args

import pytest

from engine.text.chat_format import ToolFormat
from server.adapters.http.openai.tool_calls import CallReader

AB = '{"a": "}<\\"/", "b": [1, {"c": null}]}'
# A text, the content in it, and the names and arguments of its calls.
TEXTS: dict[ToolFormat, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        ("hello <b> </tool_call> <tool_ca", "hello <b> </tool_call> <tool_ca", []),
        (f'<tool_call>\n{{"name": "f", "arguments": {AB}}}\n</tool_call>', "", [("f", AB)]),
        (f'So:\n<tool_call>{{"arguments" : {AB}, "name":"f", "x": {{}}}}</tool_call>\n'
         '<tool_call>\n{"name": "g"}\n</tool_call>\n', "So:\n", [("f", AB), ("g", "{}")]),
        ('\n\n<tool_call>\n{"name": "f", "parameters": "{\\"a\\": 1}"}\n</tool_call>then', "then",
         [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),  # cut
        ('<tool_call>{"name": "f", ', '<tool_call>{"name": "f", ', []),
        ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', "", [("f", "{}")]),
        *((text, text, []) for text in (
            "<tool_call>\n<function=f>\n</function>\n</tool_call> and more",
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
            '<tool_call>{"a": 1, "b": 2}</tool_call>',
            '<tool_call>{"name" "f"}</tool_call>',
            "<tool_call>{}</tool_call>",
            '<tool_call>{"name": ' + "[" * 9999 + "}",
            " \n",
        )),
    ],
    "llama3_json": [
        ("hello {", "hello {", []),
        (f'{{"name": "f", "parameters": {AB}}}', "", [("f", AB)]),
        (f' <|python_tag|>{{"type": "function", "name": "f", "parameters": {AB}}}; '
         '{"name": "g", "parameters": {}}', "", [("f", AB), ("g", "{}")]),
        ('{"name": "f", "parameters": {}} and', " and", [("f", "{}")]),
        ('{"name": "Ann", "age": 5}\n', '{"name": "Ann", "age": 5}\n', []),
        ("<|python_tag|>print(1)", "print(1)", []),
        ("", "", []),
    ],
    "mistral": [
        ("hello [TOOL_CALL]", "hello [TOOL_CALL]", []),
        (f'[TOOL_CALLS] [{{"name": "f", "arguments": {AB}}}, {{"name": "g", "arguments": {{}}}}]',
         "", [("f", AB), ("g", "{}")]),
        (f"So [TOOL_CALLS]f[ARGS]{AB}[TOOL_CALLS]g{{}}", "So ", [("f", AB), ("g", "{}")]),
        (f"[TOOL_CALLS]f[CALL_ID]123[ARGS]{AB}", "", [("f", AB)]),
        ("[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
        ("[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ],
}  # fmt: skip
CASES = [(form, *case) for form, cases in TEXTS.items() for case in cases]


def read(form: str, pieces: Iterable[str], **options: bool) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls as a client of OpenAI's puts them together."""
    reader, calls = CallReader(form, **options), []
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
    for delta in deltas:
        for said in delta.get("tool_calls", ()):
            if said["index"] == len(calls):
                assert (said["type"], len(said["id"])) == ("function", 9)
                calls.append(dict(said["function"]))
            else:
                calls[said["index"]]["arguments"] += said["function"]["arguments"]
    assert reader.num_calls >= len(calls)
    content = "".join(delta.get("content", "") for delta in deltas)
    return content, [(one["name"], one["arguments"]) for one in calls]


def test_every_format_is_tried_here():
    assert {*TEXTS} == {*get_args(ToolFormat)}


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_and_what_is_said_beside_them_are_found(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
):
    assert read(form, [text]) == (content, calls)
    assert read(form, text) == (content, calls)  # a character at a time


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_pieces_may_be_cut_anywhere(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
):
    for cut in range(min(len(text), 200)):
        assert read(form, (text[:cut], text[cut:])) == (content, calls)
        assert read(form, (text[:cut], text[cut : cut + 3], text[cut + 3 :])) == (content, calls)


def test_arguments_are_handed_on_as_they_come():
    reader = CallReader("hermes")

    found = [
        reader.push(one) for one in ('<tool_call>{"name": "f", "arguments": {"a"', ": 1", "}}")
    ]

    (begun,), (more,), (last,) = found
    assert begun["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a"'}
    assert more == {"tool_calls": [{"index": 0, "function": {"arguments": ": 1"}}]}
    assert last == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}


def test_content_is_held_back_no_longer_than_it_may_be_the_beginning_of_a_call():
    reader = CallReader("hermes")

    said = [reader.push(one) for one in ("a <", "b> <tool", "box>")]

    assert said == [[{"content": "a "}], [{"content": "<b> "}], [{"content": "<toolbox>"}]]


def test_one_call_alone_is_left_where_several_are_not_wanted():
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'

    assert read("hermes", [text], is_single=True) == ("", [("f", "{}")])
    assert read("hermes", text, is_single=True) == ("", [("f", "{}")])


def test_ids_are_those_that_mistrals_templates_take():
    reader: Any = CallReader("mistral")

    (delta,) = reader.push('[TOOL_CALLS][{"name": "f", "arguments": {}}')

    call_id = delta["tool_calls"][0]["id"]
    assert len(call_id) == 9 and {*call_id} <= {*string.ascii_letters, *string.digits}
