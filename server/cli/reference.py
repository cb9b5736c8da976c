"""Writes the pages of reference of server and protocol: `python -m server.cli.reference`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import click
import grpc
from tokenweir._errors import error_from_call

import server
from engine import errors
from engine.setting import told_bounds
from server.adapters.http.counts import HTTP_REQUESTS
from server.adapters.http.errors import http_error
from server.cli.app import COMMANDS, cli
from server.cli.exit_codes import MEANINGS
from server.cli.options_page import options_page, table
from server.given_settings import KNOWN, SECTIONS, Known, as_toml, default_of
from server.status import STATUS_CODES, status_code
from server.telemetry.metrics import GATEWAY_METRICS, WORKER_METRICS, Metric

ROOT = Path(server.__file__).parents[1]
_WIDTH = 100  # columns of the helps
_WITH_RETRY = (errors.CannotMeet, errors.Overloaded, errors.Unavailable)


def pages() -> dict[str, str]:
    """Return the pages by their file, from the root of the repository, in Markdown."""
    contents: Mapping[str, Callable[[], Iterable[str]]] = {
        "server/docs/reference/cli.md": _cli,
        "server/docs/reference/settings.md": _settings,
        "server/docs/reference/metrics.md": _metrics,
        "server/docs/reference/errors.md": _errors,
        "proto/docs/options.md": options_page,
    }
    begin = f"<!-- Made by `python -m {__spec__.name}`. -->"
    return {file: "\n".join([begin, "", *lines()]) + "\n" for file, lines in contents.items()}


def _cli() -> Iterator[str]:
    yield from ("# Commands", "", "The help of every command, as `--help` prints it.")
    rows = ((f"[`{name}`](#tokenweir-{name})", text) for name, (_, text) in COMMANDS.items())
    yield from table("command", "", rows=rows)
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
        yield from table("setting", "option", "default", "", rows=rows)


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
        rows = (_metric(metric, more) for metric in metrics)
        yield from table("metric", "type", "labels", "", rows=rows)


def _metric(metric: Metric, more_labels: tuple[str, ...]) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in (*metric.labels, *more_labels))
    return f"`{metric.exported}`", metric.kind, labels, metric.help


def _errors() -> Iterator[str]:
    yield from ("# Errors", "", "## Calls", "")
    yield "A failed call has a gRPC code and details: a `google.rpc.ErrorInfo` with the reason and"
    yield "the request id. Some have a `google.rpc.RetryInfo` with the time to wait before a retry."
    kinds = {kind.reason: kind for kind in STATUS_CODES if "reason" in vars(kind)}
    head = ("reason", "gRPC code", "HTTP", "retry", "meaning")
    yield from table(*head, rows=map(_error, kinds.values()))
    yield from ("", "## Exit codes of commands")
    yield from table("code", "", rows=((str(code), text) for code, text in MEANINGS.items()))


def _error(kind: type[errors.TokenweirError]) -> tuple[str, ...]:
    code = status_code(kind)
    http = http_error(error_from_call(_FailedCall(code))).status
    retry = "yes" if issubclass(kind, _WITH_RETRY) else ""
    meaning = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    return f"`{kind.reason}`", f"`{code.name}`", str(http), retry, meaning


class _FailedCall(grpc.RpcError):
    """A failed call, as a client sees it."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return ""

    def trailing_metadata(self) -> tuple[()]:
        return ()


if __name__ == "__main__":
    for file, page in pages().items():
        (ROOT / file).write_text(page)
