"""Options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from server.cli.exit_codes import NOT_USABLE, CommandError

if TYPE_CHECKING:
    from engine.package.recognised import Stage

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """A number within bounds; click's own takes nan, which is in no range, and inf in most."""

    def __init__(self, *, allow_inf: bool = False, **bounds: Any) -> None:
        super().__init__(**bounds)
        self._allow_inf = allow_inf

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; fail for one that is none."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number) or (math.isinf(number) and not self._allow_inf):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class Parsed(click.ParamType[Any]):
    """A text that a function reads; its ValueError is wrong usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Text(click.types.StringParamType):
    """A text is UTF-8, in every locale; bytes that are none are read as the locale has them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text."""
        typed = super().convert(value, param, ctx)
        try:
            return os.fsencode(typed).decode()
        except UnicodeError:
            return typed


class ModelPath(click.Path):
    """A model on its way to be served; what is none yet is told the commands that make it one."""

    def __init__(self, *wanted: Stage, may_be_url: bool = False) -> None:
        super().__init__(exists=True, path_type=Path)
        self._wanted = wanted
        self._may_be_url = may_be_url

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or a URL as it is; fail for what is not there or something else."""
        try:
            from engine.package.recognised import recognise
        except ModuleNotFoundError:
            return value if "://" in str(value) else Path(value)  # the command names its extras

        found = recognise(value)
        is_of_hub = found.stage == "name" or str(value).startswith("hf://")
        if self._may_be_url and "://" in str(value) and not is_of_hub:
            return value
        if (problem := found.problem(*self._wanted)) is None:
            return str(value) if found.stage == "name" else Path(value)
        if not os.path.lexists(value):
            self.fail(problem, param, ctx)
        raise CommandError(problem, NOT_USABLE)


existing_directory = click.Path(exists=True, file_okay=False, path_type=Path)
existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)
package_path, checkpoint_path = ModelPath("package"), ModelPath("checkpoint")
# A package or checkpoint, or its source, see server.packages.build.
package_source = ModelPath("package", "checkpoint", "original", "name")
checkpoint_source = ModelPath("checkpoint", "original", "name")
existing_path = click.Path(exists=True, path_type=Path)
any_path = click.Path(path_type=Path)
directory_path = click.Path(file_okay=False, resolve_path=True, path_type=Path)  # made if missing
any_file = click.Path(dir_okay=False, path_type=Path)  # written if missing

timeout_option: Decorator = click.option(
    "--timeout",
    type=Number(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of a request, waiting included.",
)

model_option: Decorator = click.option(
    "--model",
    required=True,
    metavar="NAME",
    help="A model of the server; `tokenweir models` lists them.",
)

version_option: Decorator = click.option(
    "--model-version",
    metavar="VERSION",
    help="Version of the model; `tokenweir models` lists them.  [default: any]",
)

request_id_option: Decorator = click.option(
    "--request-id", metavar="UUID", help="Names the request in the server's log."
)

_MAX_NUMBER = 4096


def read_numbers(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[int, ...]:
    """Turn "1,8,32" into numbers; none if nothing was given."""
    if text is None:
        return ()
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1 or max(values) > _MAX_NUMBER:
        raise click.BadParameter(
            f"{text[:100]!r} is not a list of numbers from 1 to {_MAX_NUMBER:,}, such as 1,8,32"
        )
    return values


json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print all there is, one JSON object a line."
)


def examples(*lines: str) -> str:
    """Return an epilog that shows commands as they would be typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
