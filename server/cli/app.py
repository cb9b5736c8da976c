"""Puts the commands together and turns every failure into one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Any, cast

import click

from server.cli.exit_codes import DONE, FAILED, code_of, explanation
from server.cli.extras import how_to_install
from server.cli.options import Text

# By the module that has them, in the order in which a person meets them.
_COMMANDS_OF: Mapping[str, Mapping[str, str]] = {
    "server.cli.demo": {"demo": "Show all of it on this machine, in a few minutes."},
    "server.cli.models.checkpoints": {
        "train": "Train a model and write its checkpoint.",
        "import": "Turn a model of another library into a checkpoint.",
        "average": "Average the weights of checkpoints of one run.",
        "explain": "Draw what the attention heads look at.",
    },
    "server.cli.models.packages": {
        "export": "Export a checkpoint to a package, proven equal.",
        "verify": "Compare a package with its checkpoint again.",
    },
    "server.cli.models.difference": {"diff": "Compare two packages, or a model and its package."},
    "server.cli.serving.service": {"serve": "Serve models: packages, checkpoints, Hugging Face."},
    "server.cli.serving.cache": {"cache": "List and remove packages that were built or fetched."},
    "server.cli.serving.gateway": {
        "gateway": "Run one more gateway before the workers of a service.",
    },
    "server.cli.serving.sign": {"sign": "Sign a package."},
    "server.cli.serving.adapters": {
        "http": "Answer OpenAI's and KServe's protocols over HTTP.",
        "kserve": "Answer KServe's protocol over gRPC, in front of a server.",
    },
    "server.cli.serving.token": {"token": "Make a token that lets a tenant call."},
    "server.cli.calls.generation": {
        "generate": "Generate, printing the answer while it comes.",
        "score": "Print the log-probability of a given answer.",
    },
    "server.cli.calls.replay": {"replay": "Ask recorded requests again, and compare the answers."},
    "server.cli.calls.predictions": {
        "classify": "Print the most likely labels of texts or images.",
        "label": "Label the words of texts.",
        "embed": "Print the vectors of texts.",
    },
    "server.cli.calls.operation": {
        "models": "List what a server serves.",
        "load-model": "Load a package beside what a server serves.",
        "traffic": "Give a version its share of the calls.",
        "unload-model": "End a version of a model, and its processes.",
        "health": "Print the health of a server, service or model.",
    },
    "loadtest.cli.load_test": {"loadtest": "Measure latencies and throughput of a server."},
    "loadtest.cli.benchmark": {"bench": "Measure the engine on a model, without a server."},
}
COMMANDS: Mapping[str, str] = {
    name: help for commands in _COMMANDS_OF.values() for name, help in commands.items()
}

INTERRUPTED = 128 + signal.SIGINT  # as shells report it


class Commands(UserDict[str, Any]):
    """Commands by name; the module of one is imported when the command is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        """Return a command; a text that is typed for it is UTF-8."""
        if isinstance(self.data[name], str):
            (module,) = (module for module, names in _COMMANDS_OF.items() if name in names)
            function = f"{name}_" if iskeyword(name) else name.replace("-", "_")
            command: click.Command = getattr(import_module(module), function)
            for parameter in command.params:
                if parameter.type is click.STRING:
                    parameter.type = Text()
            self.data[name] = command
        return cast(click.Command, self.data[name])


class LazyGroup(click.Group):
    """Lists commands without importing them, in their order."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    commands=Commands(COMMANDS),
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
        # The reader of our output has gone; there is nobody to tell, at the interpreter's exit too.
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
            if (how := how_to_install(error)) is None:
                raise error
            return how
        case OSError():
            reason = error.strerror or str(error)
            return f"{error.filename}: {reason}" if error.filename else reason
        case _:
            return str(error)
