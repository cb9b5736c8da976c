"""The options of `tokenweir generate`: one for every option of the client's generate and stream."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from tokenweir import Chat, Message, Prompt

from engine.json_file import parse_object
from engine.lines import read_text
from engine.requests.options import OPTIONS, Kind, Option
from server.cli.options import Decorator, Parsed, existing_file

_MAX_FILE_BYTES = 2**22  # the largest message that a server takes
_MAX_TOKEN_ID = 2**31 - 1  # the protocol has room for no more; the server knows the vocabulary


def _token_id(text: str) -> int:
    """Return the number; ValueError for what is not an id of any vocabulary."""
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > _MAX_TOKEN_ID:
        raise ValueError(f"{text!r} is not a token id; give a number from 0 to {_MAX_TOKEN_ID}")
    return int(text)


def _token_ids(text: str) -> tuple[int, ...]:
    """Return the numbers, between commas or spaces."""
    return tuple(map(_token_id, text.replace(",", " ").split()))


def _logit_bias(text: str) -> tuple[int, float]:
    """Return the token id and what is added to its logit."""
    token_id, is_given, bias = text.partition("=")
    try:
        number = float(bias)
    except ValueError:
        number = math.nan
    if not is_given or not math.isfinite(number):
        raise ValueError(
            f"{text!r} is not TOKEN_ID=VALUE; give a token id and a finite number, "
            "such as 17=-2.5, or --ban TOKEN_ID to keep the token out"
        )
    return _token_id(token_id), number


def _json_object(text: str) -> dict[str, Any]:
    try:
        return parse_object(text.encode())
    except ValueError as error:
        raise ValueError(f"{text!r} is not a JSON object: {error}") from error


_A_TOKEN_ID = Parsed("token id", _token_id)
_TOKEN_IDS = Parsed("token ids", _token_ids)
_JSON_OBJECT = Parsed("JSON object", _json_object)

_TYPES: Mapping[Kind, Any] = {
    "whole": int,
    "number": float,
    "id": _A_TOKEN_ID,
    "ids": _A_TOKEN_ID,
    "run": _TOKEN_IDS,
    "runs": _TOKEN_IDS,
    "biases": Parsed("token id and bias", _logit_bias),
    "text": str,
    "texts": str,
    "file": existing_file,
}
_METAVARS: Mapping[Kind, str] = {
    "id": "TOKEN_ID",
    "ids": "TOKEN_ID",
    "run": "TOKEN_IDS",
    "runs": "TOKEN_IDS",
    "biases": "TOKEN_ID=VALUE",
    "file": "FILE",
}


def _decorator(option: Option) -> Decorator:
    kind, words = option.kind, option.words
    is_repeated = kind in ("ids", "runs", "biases", "texts")
    repeated = "; may be repeated" if is_repeated else ""
    is_left_out = f"  [default: {option.left_out}]" if option.left_out else ""
    return click.option(
        option.typed,
        option.name,
        type=click.Choice(words) if words else _TYPES.get(kind),
        is_flag=kind == "flag",
        multiple=is_repeated,
        default=None,
        metavar=_METAVARS.get(kind),
        help=f"{option.help}{f'; {option.off}' if option.off else ''}{repeated}.{is_left_out}",
    )


def _of_table(*messages: str) -> list[Decorator]:
    return [_decorator(one) for one in OPTIONS if one.message.startswith(messages)]


_OPTIONS: tuple[Decorator, ...] = (
    *_of_table("decoding"),
    click.option("--prefix", "target_prefix", metavar="TEXT", help="The answer begins with it."),
    click.option(
        "--add-special-tokens/--no-special-tokens",
        default=None,
        help="Whether TEXT gets the special tokens that the model wants around it.  [default: yes]",
    ),
    click.option(
        "--truncate-prompt-tokens",
        type=int,
        help="Keep so many of the last tokens of a longer TEXT.  [default: refuse it]",
    ),
    click.option("--ids", is_flag=True, help="TEXT and --prefix are token ids, such as 5,7,9."),
    click.option("--chat", is_flag=True, help="TEXT is what a user says to a chat model."),
    click.option("--system", metavar="TEXT", help="System message of --chat."),
    click.option(
        "--chat-template-kwargs",
        type=_JSON_OBJECT,
        metavar="JSON",
        help='Variables of the template of --chat, such as {"enable_thinking": false}.',
    ),
    click.option(
        "--tool",
        "tools",
        type=_JSON_OBJECT,
        multiple=True,
        metavar="JSON",
        help='A function that the answer to --chat may call: {"type": "function", "function": '
        '{"name": ..., "parameters": ...}}; may be repeated.',
    ),
    click.option(
        "--add-generation-prompt/--no-generation-prompt",
        default=None,
        help="Whether the text of --chat ends with the beginning of an answer.  [default: yes]",
    ),
    click.option(
        "--continue-final-message",
        is_flag=True,
        default=None,
        help="The answer continues the last message of --chat.",
    ),
    *_of_table("stopping", "output"),
    click.option(
        "--without-default",
        "without_defaults",
        multiple=True,
        metavar="NAME",
        help="Ignore the model's default of this option, such as banned_tokens; * for all.",
    ),
    click.option(
        "--tokens-per-message", type=int, help="Tokens per message of the stream.  [default: 1]"
    ),
    click.option("--priority", type=int, help="Lower runs earlier.  [default: 0]"),
    click.option("--tenant", help="Tenant; capacity is shared fairly between tenants."),
    click.option(
        "--batch-invariant/--best-effort",
        default=None,
        help="The same answer whatever else runs, or refuse; or allow other last bits.",
    ),
)


def generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option for every option of the client."""
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command


_NOT_SENT = ("ids", "chat", "system")  # they say how TEXT is read


def request_options(without: Iterable[str]) -> list[click.Parameter]:
    """Return what says how a request is answered, for a command whose help is of something else.

    `without` are the names of those that mean something else there.
    """
    declared = click.command(generation_options(lambda **typed: None)).params
    found = [one for one in declared if one.name not in (*_NOT_SENT, *without)]
    for parameter in found:
        assert isinstance(parameter, click.Option)
        parameter.hidden = True
    return found


def prompt_of(text: str, typed: dict[str, Any]) -> Prompt | Chat:
    """Return what is asked of the model: text, token ids or a conversation."""
    if typed["ids"]:
        return token_ids(text)
    if not typed["chat"]:
        return text
    said: list[Message] = [{"role": "user", "content": text}]
    if typed["system"] is not None:
        said.insert(0, {"role": "system", "content": typed["system"]})
    return said


def client_options(typed: dict[str, Any]) -> dict[str, Any]:
    """Return what was typed as options of the client; files are read.

    Options that say how TEXT is read are left out.

    Raises UsageError for what click cannot see in one option alone.
    """
    options: dict[str, Any] = {
        name: read_text(value, _MAX_FILE_BYTES) if isinstance(value, Path) else value
        for name, value in typed.items()
        if name not in _NOT_SENT and value is not None and value != ()
    }
    if typed.get("ids") and typed.get("chat"):
        raise click.UsageError("--ids and --chat both say what TEXT is; leave out one of the two")
    if typed.get("system") is not None and not typed.get("chat"):
        raise click.UsageError("--system is for conversations; give --chat too, or leave it out")
    if "logit_bias" in options:
        options["logit_bias"] = _by_token_id(options["logit_bias"])
    if typed.get("ids") and "target_prefix" in options:
        options["target_prefix"] = token_ids(options["target_prefix"])
    num_outputs = options.get("num_outputs", 1)
    if "tokens_per_message" in options and num_outputs > 1:
        raise click.UsageError(
            f"--tokens-per-message {options['tokens_per_message']} is of a stream, and "
            f"--num-outputs {num_outputs} are not streamed; leave out one of the two"
        )
    return options


def token_ids(text: str) -> list[int]:
    """Return token ids that were typed as 5,7,9 or with spaces."""
    try:
        return [*_token_ids(text)]
    except ValueError as error:
        raise click.UsageError(f"--ids: {error}, several such as 5,7,9") from error


def _by_token_id(biases: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token_id, bias in biases:
        if token_id in found:
            raise click.UsageError(
                f"--logit-bias: token {token_id} has {found[token_id]:g} and {bias:g}; "
                "give one value for each token"
            )
        found[token_id] = bias
    return found
