"""Puts the commands together and turns every failure into one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import click

from server.cli.benchmark import bench
from server.cli.checkpoints import average, explain, import_, train
from server.cli.demo import demo
from server.cli.difference import diff
from server.cli.exit_codes import DONE, FAILED, code_of, explanation
from server.cli.extras import how_to_install
from server.cli.gateway import gateway
from server.cli.generation import generate, score
from server.cli.http import http
from server.cli.kserve import kserve
from server.cli.load_test import loadtest
from server.cli.operation import load_model, traffic, unload_model
from server.cli.options import Text
from server.cli.packages import export, verify
from server.cli.predictions import classify, embed, label
from server.cli.replay import replay
from server.cli.service import serve
from server.cli.sign import sign
from server.cli.status import health, models
from server.cli.token import token

INTERRUPTED = 128 + signal.SIGINT  # as shells report it


class OrderedGroup(click.Group):
    """Lists the commands in the order in which a person meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=OrderedGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`tokenweir COMMAND --help` explains a command and shows examples. "
    "`tokenweir demo` does all of it in a few minutes.\n\n"
    f"Exit codes: {explanation()}.",
)
@click.version_option(package_name="tokenweir", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve trained Transformers: exported to ONNX, proven equal to PyTorch, batched at every
    step, streamed over gRPC.

    A model's way: train (or import) a CHECKPOINT, export it to a PACKAGE, serve the package, call
    the server.
    """


for command in (
    demo,
    train,
    import_,
    average,
    explain,
    export,
    verify,
    diff,
    serve,
    gateway,
    sign,
    http,
    kserve,
    token,
    generate,
    replay,
    score,
    classify,
    label,
    embed,
    models,
    load_model,
    traffic,
    unload_model,
    health,
    loadtest,
    bench,
):
    cli.add_command(command)
    for parameter in command.params:
        if parameter.type is click.STRING:
            parameter.type = Text()


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; a bug keeps its traceback."""
    try:
        result = cli.main(args=arguments, prog_name="tokenweir", standalone_mode=False)
        return result if isinstance(result, int) else DONE
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.UsageError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody to tell, at the interpreter's exit too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except MemoryError as error:
        return _fail(f"not enough memory ({error or 'none left'}); ask for less at once", FAILED)
    except Exception as error:
        code = code_of(error)
        if code is None:
            raise
        return _fail(_message(error), code)


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    return code


def _message(error: Exception) -> str:
    match error:
        case ModuleNotFoundError():
            return _missing_module(error)
        case OSError():
            return _system_problem(error)
        case _:
            return str(error)


def _missing_module(error: ModuleNotFoundError) -> str:
    how = how_to_install(error)
    if how is None:
        raise error
    return how


def _system_problem(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason
