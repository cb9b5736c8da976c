"""The options of settings, made of their fields, and the settings that a command was given."""

from __future__ import annotations

import functools
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
from server.settings import Settings

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
    """Give a command the options of its settings, and of a file of them, as one `given`."""
    defaults = GivenSettings(command)
    options = [
        _option(name.replace(".", "__"), known, option, defaults[name].value)
        for name, known in KNOWN.items()
        if (option := COMMANDS[command].option(known)) is not None
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_settings(*args: Any, file: Path | None, print_config: bool, **typed: Any) -> Any:
            given = GivenSettings(command)
            if file is not None:
                given.read(file)
            for option in click.get_current_context().command.params:
                name = str(option.name).replace("__", ".")
                if name not in KNOWN:
                    continue
                value = typed.pop(str(option.name))
                if is_given(str(option.name)):
                    names = option.opts if value else option.secondary_opts or option.opts
                    given.give(name, value, names[0])
            return function(*args, given=given, **typed)

        decorated: Callable[..., Any] = with_settings
        for option in reversed((*options, _CONFIG, _PRINT_CONFIG)):
            decorated = option(decorated)
        return decorated

    return decorate


def settings_of(given: GivenSettings, *, is_served: bool = False) -> Settings:
    """Return the settings of the running command; if they are to be printed, it ends here.

    They are printed as a file, which is UTF-8 in every locale. `is_served` is that of a gateway.
    """
    settings = given.served() if is_served else given.settings()
    if prints_settings():
        click.echo("\n".join(given.lines()).encode())
        click.get_current_context().exit()
    return settings


def prints_settings() -> bool:
    """Return whether the running command only prints its settings."""
    return bool(click.get_current_context().params["print_config"])


def engine_option(name: str) -> Decorator:
    """Return the option of a setting of an engine, for a command that makes one by itself."""
    known = KNOWN[f"engine.{name}"]
    return _option(name, known, known.field.metadata["option"], default_of(known.field))


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
