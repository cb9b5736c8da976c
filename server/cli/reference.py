"""Writes the pages of reference of server and protocol: `python -m server.cli.reference`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import click
import grpc.aio
from tokenweir import StreamOptions
from tokenweir._errors import error_from_call

import server
from engine import errors
from engine.config import RequestLimits
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.options import BY_NAME, OPTIONS, Option, Range
from engine.setting import told_bounds
from server.adapters.http.counts import HTTP_REQUESTS
from server.adapters.http.errors import http_error
from server.calls.status import STATUS_CODES, status_code
from server.cli.app import COMMANDS, cli
from server.cli.calls.generation_options import request_options
from server.cli.exit_codes import MEANINGS
from server.given_settings import KNOWN, SECTIONS, Known, as_toml, default_of
from server.telemetry.metrics import GATEWAY_METRICS, WORKER_METRICS

ROOT = Path(server.__file__).parents[1]
_WIDTH = 100  # columns of the helps
_OPTION_SECTIONS: Mapping[str, str] = {  # by the message that an option is in
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
_WITH_RETRY = (errors.CannotMeet, errors.Overloaded, errors.Unavailable)


def pages() -> dict[str, str]:
    """Return the pages by their file, from the root of the repository, in Markdown."""
    contents: Mapping[str, Callable[[], Iterable[str]]] = {
        "server/docs/reference/cli.md": _cli,
        "server/docs/reference/settings.md": _settings,
        "server/docs/reference/metrics.md": _metrics,
        "server/docs/reference/errors.md": _errors,
        "proto/docs/options.md": _options,
    }
    begin = f"<!-- Made by `python -m {__spec__.name}`. -->"
    return {file: "\n".join([begin, "", *lines()]) + "\n" for file, lines in contents.items()}


def _cli() -> Iterator[str]:
    yield from ("# Commands", "", "The help of every command, as `--help` prints it.")
    rows = ((f"[`{name}`](#tokenweir-{name})", text) for name, text in COMMANDS.items())
    yield from _table("command", "", rows=rows)
    top = click.Context(cli, info_name="tokenweir", terminal_width=_WIDTH, **cli.context_settings)
    for name in COMMANDS:
        yield from _help(cli.commands[name], name, top)


def _help(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, parent, info_name=name, terminal_width=_WIDTH)
    yield from ("", f"## {context.command_path}", "", "```text", command.get_help(context), "```")
    if isinstance(command, click.Group):
        for below, one in command.commands.items():
            yield from _help(one, below, context)


def _settings() -> Iterator[str]:
    yield from ("# Settings", "", "`tokenweir serve --config FILE` reads a TOML file of these,")
    yield "and so do `gateway`, `http` and `kserve`. Options override it; one that `serve` lacks"
    yield "is named with its command. Times are in seconds."
    for section, owner in SECTIONS.items():
        yield from ("", f"## [{section}]", "", f"{owner.__doc__}")
        rows = (_setting(known) for known in KNOWN.values() if known.section == section)
        yield from _table("setting", "option", "default", "", rows=rows)


def _setting(known: Known) -> tuple[str, ...]:
    told, default = known.field.metadata, default_of(known.field)
    option = f"`{told['option']}`" if told["option"] else ""
    if option and (command := _command_of(known)) != "serve":
        option += f" of `{command}`"
    value = told.get("unset", "") if default in (None, ()) else f"`{as_toml(default)}`"
    bounds = f" Must be {told_bounds(told)}." if told_bounds(told) else ""
    return f"`{known.field.name}`", option, value, f"{told['help']}{bounds}"


def _command_of(known: Known) -> str:
    """Return the first command that has the option of a setting."""
    name = f"{known.section}__{known.field.name}"
    for command in ("serve", "gateway", "http"):
        if name in {param.name for param in cli.commands[command].params}:
            return command
    return "kserve"


def _metrics() -> Iterator[str]:
    yield from ("# Metrics", "", "`--metrics-port` serves them at `/metrics`, for Prometheus.")
    yield "Times are in seconds. A histogram has the suffixes `_bucket`, `_sum` and `_count`."
    yield "Metrics that vLLM has too have its names, with `tokenweir_` in the place of `vllm:`."
    yield "Requests refused by a gateway are in no metric of a worker."
    for title, metrics, more in (
        ("Workers and models", WORKER_METRICS, ("worker",)),
        ("Gateway", GATEWAY_METRICS, ()),
        ("HTTP server, at `/metrics` of its own port", (HTTP_REQUESTS,), ()),
    ):
        yield from ("", f"## {title}")
        rows = [
            (
                f"`{metric.exported}`",
                metric.kind,
                ", ".join(f"`{label}`" for label in (*metric.labels, *more)),
                metric.help,
            )
            for metric in metrics
        ]
        yield from _table("metric", "type", "labels", "", rows=rows)


def _errors() -> Iterator[str]:
    yield from ("# Errors", "", "## Calls", "")
    yield "A failed call has a gRPC code and details: a `google.rpc.ErrorInfo` with the reason and"
    yield "the request id. Some have a `google.rpc.RetryInfo` with the time to wait before a retry."
    kinds = {kind.reason: kind for kind in STATUS_CODES if "reason" in vars(kind)}
    head = ("reason", "gRPC code", "HTTP", "retry", "meaning")
    yield from _table(*head, rows=map(_error, kinds.values()))
    yield from ("", "## Exit codes of commands")
    yield from _table("code", "", rows=((str(code), text) for code, text in MEANINGS.items()))


def _error(kind: type[errors.TokenweirError]) -> tuple[str, ...]:
    code = status_code(kind)
    failed = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
    http = http_error(error_from_call(failed)).status
    retry = "yes" if issubclass(kind, _WITH_RETRY) else ""
    meaning = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    return f"`{kind.reason}`", f"`{code.name}`", str(http), retry, meaning


def _options() -> Iterator[str]:
    """Yield the lines of the page, in Markdown."""
    yield from ("# Options of a generation", "")
    yield "The Python client takes these options as keywords of `generate`, `generate_many` and"
    yield "`stream`. The fields are those of `GenerateRequest`. `tokenweir generate` and `tokenweir"
    yield "loadtest` have the same options, spelled as in the last column."
    yield ""
    yield "A package may have its own default of an option with a star (*). `tokenweir models`"
    yield "shows these defaults, and `without_defaults` turns them off. Limits with a name are"
    yield "settings of the server (`[limits]`)."
    for message, title in _OPTION_SECTIONS.items():
        yield from ("", f"## {title}", *_remarks(message))
        head = ("option", "type", "default", "range", "meaning", "field", "command line")
        rows = (_option(option) for option in OPTIONS if option.message == message)
        yield from _table(*head, rows=rows)
    yield from ("", "## The call")
    of_call = map(_option_of_call, request_options(without=BY_NAME))
    yield from _table("option", "type", "meaning", "command line", rows=of_call)


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


def _option_of_call(parameter: click.Parameter) -> tuple[str, ...]:
    assert isinstance(parameter, click.Option) and parameter.name and parameter.help
    typed = "/".join((*parameter.opts, *parameter.secondary_opts))
    return f"`{parameter.name}`", _type(parameter.name), parameter.help, f"`{typed}`"


def _option(option: Option) -> tuple[str, ...]:
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
    if not isinstance(bounds, Range):
        if option.words:
            return ", ".join(f"`{word}`" for word in option.words)
        return f"at most {getattr(_LIMITS, bounds):,} (`{bounds}`)" if bounds else ""
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


def _table(*head: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a table of Markdown, after an empty line."""
    yield from ("", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
    for row in rows:
        escaped = (cell.replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    for file, page in pages().items():
        (ROOT / file).write_text(page)
