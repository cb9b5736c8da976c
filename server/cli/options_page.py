"""The page of a generation's options, from their table, the client and the command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

import click
from tokenweir import StreamOptions

from engine.config import RequestLimits
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.options import BY_NAME, OPTIONS, Option, Range
from server.cli.generation_options import request_options

_SECTIONS: Mapping[str, str] = {  # by the message that an option is in
    "decoding": "Decoding",
    "decoding.sampling": "Sampling",
    "decoding.beam": "Beam search",
    "decoding.controls": "Choice of tokens",
    "decoding.constraint": "Constraints",
    "stopping": "End of an answer",
    "output": "Contents of an answer",
}
_LIMITS = RequestLimits()
_LIMIT_NAMES = {field.name for field in fields(RequestLimits)}


def table(*head: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a table of Markdown, after an empty line."""
    yield from ("", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
    for row in rows:
        escaped = (cell.replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(escaped)} |"


def options_page() -> Iterator[str]:
    """Yield the lines of the page, in Markdown."""
    yield from ("# Options of a generation", "")
    yield "The Python client takes these options as keywords of `generate`, `generate_many` and"
    yield "`stream`. The fields are those of `GenerateRequest`. `tokenweir generate` and `tokenweir"
    yield "loadtest` have the same options, spelled as in the last column."
    yield ""
    yield "A package may have its own default of an option with a star (*). `tokenweir models`"
    yield "shows these defaults, and `without_defaults` turns them off. Limits with a name are"
    yield "settings of the server (`[limits]`)."
    for message, title in _SECTIONS.items():
        yield from ("", f"## {title}", *_remarks(message))
        head = ("option", "type", "default", "range", "meaning", "field", "command line")
        rows = (_row(option) for option in OPTIONS if option.message == message)
        yield from table(*head, rows=rows)
    yield from ("", "## The call")
    of_call = map(_row_of_call, request_options(without=BY_NAME))
    yield from table("option", "type", "meaning", "command line", rows=of_call)


def _remarks(message: str) -> Iterator[str]:
    """Yield what holds for all options of a message."""
    if message in ("decoding.sampling", "decoding.beam"):
        other = "beam search" if message == "decoding.sampling" else "sampling"
        yield from (
            "",
            f"An option of this table is refused with greedy decoding and with {other}.",
        )
    if message == "decoding.constraint":
        yield from ("", "A request has at most one of these options, with at most")
        yield f"{_LIMITS.max_constraint_chars:,} characters (`max_constraint_chars`)."


def _row_of_call(parameter: click.Parameter) -> tuple[str, ...]:
    assert isinstance(parameter, click.Option) and parameter.name and parameter.help
    typed = "/".join((*parameter.opts, *parameter.secondary_opts))
    return f"`{parameter.name}`", _type(parameter.name), parameter.help, f"`{typed}`"


def _row(option: Option) -> tuple[str, ...]:
    star = " *" if option.name in GenerationDefaults.model_fields else ""
    off = f"; {option.off}" if option.off else ""
    needs = f" Needs the capability `{option.capability}`." if option.capability else ""
    return (
        f"`{option.name}`{star}",
        _type(option.name),
        _default(option),
        _range(option),
        f"{option.help}{off}.{needs}",
        f"`{option.path}`",
        f"`{option.typed}`",
    )


def _type(name: str) -> str:
    """Return the type in the client; None is the same as leaving the option out."""
    annotation: str = StreamOptions.__annotations__[name].__forward_arg__
    return f"`{annotation.removesuffix(' | None')}`"


def _default(option: Option) -> str:
    value = option.default
    if option.kind == "flag":
        return f"`{value}`"
    if option.left_out:
        return option.left_out
    return "" if value in (None, ()) else f"`{value}`"


def _range(option: Option) -> str:
    bounds = option.bounds
    if isinstance(bounds, Range):
        return _interval(bounds)
    if option.words:
        return ", ".join(f"`{word}`" for word in option.words)
    return f"at most {getattr(_LIMITS, bounds):,} (`{bounds}`)" if bounds else ""


def _interval(bounds: Range) -> str:
    low, high = f"{bounds.low:,}", bounds.high
    if high == float("inf"):
        return f"{low} or more" if bounds.ends[0] == "[" else f"above {low}"
    if isinstance(high, str):
        named = f"{getattr(_LIMITS, high)} (`{high}`)" if high in _LIMIT_NAMES else f"`{high}`"
        return f"{low} to {named}"
    without = [
        f"without {end}"
        for end, is_open in ((low, bounds.ends[0] == "("), (f"{high:,}", bounds.ends[1] == ")"))
        if is_open
    ]
    return ", ".join((f"{low} to {high:,}", *without))
