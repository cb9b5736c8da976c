"""Puts the commands together and turns every failure into one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, cast

import click

from server.cli.exit_codes import DONE, FAILED, code_of, explanation
from server.cli.extras import how_to_install
from server.cli.options import Text

# Where each command is, and what it does, in the order in which a person meets them.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "demo": ("server.cli.demo:demo", "Show all of it on this machine, in a few minutes."),
    "train": ("server.cli.checkpoints:train", "Train a model and write its checkpoint."),
    "import": (
        "server.cli.checkpoints:import_",
        "Turn a model of another library into a checkpoint.",
    ),
    "average": ("server.cli.checkpoints:average", "Average the weights of checkpoints of one run."),
    "explain": ("server.cli.checkpoints:explain", "Draw what the attention heads look at."),
    "export": ("server.cli.packages:export", "Export a checkpoint to a package, proven equal."),
    "verify": ("server.cli.packages:verify", "Compare a package with its checkpoint again."),
    "diff": ("server.cli.difference:diff", "Compare two packages, or a model and its package."),
    "serve": ("server.cli.service:serve", "Serve models: packages, checkpoints, Hugging Face."),
    "cache": ("server.cli.cache:cache", "List and remove packages that were built or fetched."),
    "gateway": (
        "server.cli.gateway:gateway",
        "Run one more gateway before the workers of a service.",
    ),
    "sign": ("server.cli.sign:sign", "Sign a package."),
    "http": ("server.cli.http:http", "Answer OpenAI's and KServe's protocols over HTTP."),
    "kserve": (
        "server.cli.kserve:kserve",
        "Answer KServe's protocol over gRPC, in front of a server.",
    ),
    "token": ("server.cli.token:token", "Make a token that lets a tenant call."),
    "generate": ("server.cli.generation:generate", "Generate, printing the answer while it comes."),
    "replay": ("server.cli.replay:replay", "Ask recorded requests again, and compare the answers."),
    "score": ("server.cli.generation:score", "Print the log-probability of a given answer."),
    "classify": (
        "server.cli.predictions:classify",
        "Print the most likely labels of texts or images.",
    ),
    "label": ("server.cli.predictions:label", "Label the words of texts."),
    "embed": ("server.cli.predictions:embed", "Print the vectors of texts."),
    "models": ("server.cli.status:models", "List what a server serves."),
    "load-model": (
        "server.cli.operation:load_model",
        "Load a package beside what a server serves.",
    ),
    "traffic": ("server.cli.operation:traffic", "Give a version its share of the calls."),
    "unload-model": (
        "server.cli.operation:unload_model",
        "End a version of a model, and its processes.",
    ),
    "health": ("server.cli.status:health", "Print the health of a server, service or model."),
    "loadtest": (
        "loadtest.cli.load_test:loadtest",
        "Measure latencies and throughput of a server.",
    ),
    "bench": ("loadtest.cli.benchmark:bench", "Measure the engine on a model, without a server."),
}

INTERRUPTED = 128 + signal.SIGINT  # as shells report it


class Commands(UserDict[str, Any]):
    """Commands by name; the module of one is imported when the command is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        """Return a command; a text that is typed for it is UTF-8."""
        if isinstance(self.data[name], tuple):
            command: click.Command = resolve_name(self.data[name][0])
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
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])


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
