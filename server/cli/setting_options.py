"""The options of settings, made of their fields, and the settings that a command was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
from click.core import ParameterSource

from server.cli.options import (
    Decorator,
    Number,
    directory_path,
    existing_file,
    read_numbers,
)
from server.given_settings import COMMANDS, KNOWN, GivenSettings, Known, default_of

_CONFIG = click.option(
    "--config",
    "file",
    type=existing_file,
    metavar="FILE",
    help="File of settings in TOML; options override it.",
)
_PRINT_CONFIG = click.option(
    "--print-config",
    is_flag=True,
    help="Print every setting and where it comes from, as a FILE for --config; serve nothing.",
)


def setting_options(command: str) -> Decorator:
    """Give a command the options of its settings, and of a file of them."""
    defaults = GivenSettings(command)
    options = [
        _option(name.replace(".", "__"), known, option, defaults[name].value)
        for name, known in KNOWN.items()
        if (option := COMMANDS[command].option(known)) is not None
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((*options, _CONFIG, _PRINT_CONFIG)):
            function = option(function)
        return function

    return decorate


def engine_option(name: str) -> Decorator:
    """Return the option of a setting of an engine, for a command that makes one by itself."""
    known = KNOWN[f"engine.{name}"]
    return _option(name, known, known.field.metadata["option"], default_of(known.field))


def given_settings(command: str, file: Path | None, typed: Mapping[str, Any]) -> GivenSettings:
    """Return the settings of a file, and of those options of a command that were in fact typed."""
    given = GivenSettings(command)
    if file is not None:
        given.read(file)
    context = click.get_current_context()
    for option in context.command.params:
        name = str(option.name).replace("__", ".")
        if name in KNOWN and is_given(str(option.name)):
            value = typed[str(option.name)]
            names = option.opts if value else option.secondary_opts or option.opts
            given.give(name, value, names[0])
    return given


def print_settings(given: GivenSettings) -> None:
    """Print them as a file, which is UTF-8 in every locale."""
    click.echo("\n".join(given.lines()).encode())


def is_given(option: str) -> bool:
    """Return whether an option of the running command was typed, or is in the environment."""
    source = click.get_current_context().get_parameter_source(option)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def _option(parameter: str, known: Known, option: str, default: Any) -> Decorator:
    told, is_shown = known.field.metadata, default not in (None, ())
    unset = "" if is_shown or "unset" not in told else f"  [default: {told['unset']}]"
    return click.option(
        option,
        parameter,
        default=default if is_shown else None,
        show_default=is_shown and (known.type is not bool or "/" in option),
        help=f"{told['help']}{unset}",
        **{"metavar": told.get("metavar"), **_type(known.type, told, is_flag="/" not in option)},
    )


def _type(kind: Any, told: Mapping[str, Any], *, is_flag: bool) -> dict[str, Any]:
    """Return what click takes for a type and its bounds."""
    if kind is bool:
        return {"is_flag": True} if is_flag else {}
    if kind == tuple[int, ...]:
        return {"callback": read_numbers, "metavar": "N,..."}
    if get_origin(kind) is Union or isinstance(kind, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    low, high = told.get("ge", told.get("gt")), told.get("le")
    if get_origin(kind) is Literal:
        return {"type": click.Choice(get_args(kind))}
    if kind is int:
        return {"type": click.IntRange(low, high)}
    if kind is float:
        allow_inf = told.get("allow_inf_nan", True)
        number = Number(min=low, min_open="gt" in told, max=high, allow_inf=allow_inf)
        return {"type": number}
    if kind is Path:
        is_file = told["metavar"] != "DIRECTORY"
        return {"type": existing_file if is_file else directory_path}
    return {"type": kind}
