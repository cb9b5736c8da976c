"""The options of `tokenweir generate`: one for every option of the client's generate and stream."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.json_file import parse_object
from engine.lines import read_text
from server.cli.options import existing_file

if TYPE_CHECKING:
    from tokenweir import Chat, Message, Prompt

_MAX_FILE_BYTES = 2**22  # the largest message that a server takes
_MAX_TOKEN_ID = 2**31 - 1  # what the protocol has room for; the server knows the vocabulary


class _TokenId(click.ParamType[int]):
    name = "token id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; fail for what is not an id of any vocabulary."""
        if not re.fullmatch(r"[0-9]{1,10}", str(value)) or int(value) > _MAX_TOKEN_ID:
            self.fail(
                f"{value!r} is not a token id; give a number from 0 to {_MAX_TOKEN_ID}", param, ctx
            )
        return int(value)


class _LogitBias(click.ParamType[tuple[int, float]]):
    name = "token id and bias"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Return the token id and what is added to its logit."""
        token_id, is_given, bias = str(value).partition("=")
        try:
            number = float(bias)
        except ValueError:
            number = math.nan
        if not is_given or not math.isfinite(number):
            self.fail(
                f"{value!r} is not TOKEN_ID=VALUE; give a token id and a finite number, "
                "such as 17=-2.5, or --ban TOKEN_ID to keep the token out",
                param,
                ctx,
            )
        return _token_id.convert(token_id, param, ctx), number


class _TokenIds(click.ParamType[tuple[int, ...]]):
    name = "token ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers, between commas or spaces."""
        parts = str(value).replace(",", " ").split()
        return tuple(_token_id.convert(part, param, ctx) for part in parts)


class _JsonObject(click.ParamType[dict[str, Any]]):
    name = "JSON object"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """Return the object."""
        try:
            return parse_object(str(value).encode())
        except ValueError as error:
            self.fail(f"{value!r} is not a JSON object: {error}", param, ctx)


_token_id = _TokenId()

_OPTIONS = (
    click.option(
        "--strategy",
        type=click.Choice(["greedy", "sampling", "beam"]),
        help="Of decoding.  [default: what other options imply, or the model's]",
    ),
    click.option("--temperature", type=float, help="Above 0; asks for sampling."),
    click.option("--top-k", type=int, help="Sample among so many tokens; 0: all."),
    click.option("--top-p", type=float, help="Sample among this share of probability."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the best."),
    click.option("--typical-p", type=float, help="Sample among this share of typical tokens."),
    click.option("--seed", type=int, help="The same seed gives the same samples."),
    click.option("--best-of", type=int, help="Sample so many, print the best."),
    click.option("--beam", type=int, metavar="WIDTH", help="Beam search with so many hypotheses."),
    click.option("--length-penalty", type=float, help="Of beam search.  [default: 0.6]"),
    click.option("--length-power", type=float, help="p of n^p in place of --length-penalty."),
    click.option(
        "--beam-end",
        type=click.Choice(["bound", "estimate", "enough", "limit"]),
        help="When beam search ends: no other can win, or seems to; enough ended; at the limit.",
    ),
    click.option(
        "--renormalize/--no-renormalize",
        default=None,
        help="Let tokens that bans leave to beam search add up to 1.  [default: no-renormalize]",
    ),
    click.option("--num-outputs", type=int, help="Answers to print; not streamed if many."),
    click.option("--repetition-penalty", type=float, help="On tokens seen so far; 1: off."),
    click.option("--frequency-penalty", type=float, help="On each use in the answer; 0: off."),
    click.option("--presence-penalty", type=float, help="On tokens that the answer has; 0: off."),
    click.option("--no-repeat-ngram", type=int, help="Repeat no run of so many tokens; 0: off."),
    click.option(
        "--logit-bias",
        type=_LogitBias(),
        multiple=True,
        metavar="TOKEN_ID=VALUE",
        help="Add to the logit of a token; may be repeated.",
    ),
    click.option(
        "--ban",
        "banned_tokens",
        type=_token_id,
        multiple=True,
        metavar="TOKEN_ID",
        help="Never write this token; may be repeated.",
    ),
    click.option(
        "--ban-run",
        "banned_sequences",
        type=_TokenIds(),
        multiple=True,
        metavar="TOKEN_IDS",
        help="Never write these tokens in a row, such as 5,7; may be repeated.",
    ),
    click.option(
        "--ban-begin",
        "begin_banned_tokens",
        type=_token_id,
        multiple=True,
        metavar="TOKEN_ID",
        help="Do not begin with this token; may be repeated.",
    ),
    click.option(
        "--encoder-no-repeat-ngram",
        type=int,
        help="Write no run of so many tokens that the source has; 0: off.",
    ),
    click.option(
        "--forced-begin",
        type=_TokenIds(),
        metavar="TOKEN_IDS",
        help="The answer begins with these tokens, such as 5,7.",
    ),
    click.option(
        "--forced-end",
        type=_token_id,
        metavar="TOKEN_ID",
        help="The last token where an answer is cut at the limit.",
    ),
    click.option(
        "--json-schema", type=existing_file, metavar="FILE", help="The answer is JSON that fits it."
    ),
    click.option("--regex", help="The answer matches it."),
    click.option(
        "--grammar", type=existing_file, metavar="FILE", help="The answer is a sentence of it."
    ),
    click.option("--choice", multiple=True, help="The answer is one of these; to be repeated."),
    click.option("--prefix", "target_prefix", metavar="TEXT", help="The answer begins with it."),
    click.option("--ids", is_flag=True, help="TEXT and --prefix are token ids, such as 5,7,9."),
    click.option("--chat", is_flag=True, help="TEXT is what a user says to a chat model."),
    click.option("--system", metavar="TEXT", help="With --chat: what the model is told first."),
    click.option(
        "--chat-template-kwargs",
        type=_JsonObject(),
        metavar="JSON",
        help='With --chat: variables of the template, such as {"enable_thinking": false}.',
    ),
    click.option("--max-new-tokens", type=int, help="At most so many.  [default: model's]"),
    click.option("--min-new-tokens", type=int, help="No end before so many."),
    click.option("--stop", multiple=True, help="Stop at this string; may be repeated."),
    click.option(
        "--stop-token",
        "stop_token_ids",
        type=_token_id,
        multiple=True,
        metavar="TOKEN_ID",
        help="Stop at this token; may be repeated.",
    ),
    click.option("--include-stop", is_flag=True, help="Print what it stopped at, too."),
    click.option("--ignore-eos", is_flag=True, help="Continue past the end; for measurements."),
    click.option("--logprobs", type=int, help="Print every token with so many alternatives."),
    click.option(
        "--prompt-logprobs",
        type=int,
        help="The same for the prompt, or for --prefix of an encoder-decoder.",
    ),
    click.option(
        "--alignment", is_flag=True, help="Print which source token each token looks at most."
    ),
    click.option(
        "--without-default",
        "without_defaults",
        multiple=True,
        metavar="NAME",
        help="Not the model's default of this option, such as banned_tokens; * for all.",
    ),
    click.option(
        "--skip-special-tokens/--keep-special-tokens",
        default=None,
        help="Print no special tokens, such as <|im_end|>.  [default: skip-special-tokens]",
    ),
    click.option("--tokens-per-message", type=int, help="Of the stream.  [default: 1]"),
    click.option(
        "--allow-partial", is_flag=True, help="At the deadline or a drain print what there is."
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

    What says how TEXT is read is left out.

    Raises UsageError for what click cannot see in one option alone.
    """
    options: dict[str, Any] = {
        name: read_text(value, _MAX_FILE_BYTES) if isinstance(value, Path) else value
        for name, value in typed.items()
        if name not in _NOT_SENT
        and value is not None
        and value != ()
        and not _is_unset_flag(name, value)
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
        return [_token_id.convert(part, None, None) for part in text.replace(",", " ").split()]
    except click.BadParameter as error:
        raise click.UsageError(f"--ids: {error.message}, several such as 5,7,9") from error


def _is_unset_flag(name: str, value: object) -> bool:
    """Say whether it is False because nobody typed it; some options can be typed as False."""
    may_be_false = "renormalize", "batch_invariant", "skip_special_tokens"
    return value is False and name not in may_be_false


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
