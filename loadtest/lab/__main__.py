"""Starts a study: `python -m loadtest.lab NAME`; without a name it lists them all.

Every study is a module with `main(args, prog_name)`, as commands of click are. This file needs
nothing that is to be installed, for a study may run where little is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from loadtest.errors import LoadTestError

COMMAND = "python -m loadtest.lab"


class Study(NamedTuple):
    """A study: its module, and what it finds."""

    module: str
    about: str


STUDIES = {
    "chaos": Study("loadtest.lab.chaos.command", "answers of a server to which harm is done"),
    "gpu": Study("loadtest.lab.gpu.command", "right answers on a GPU, then their speed"),
    "overhead": Study("loadtest.lab.overhead", "costs of a token and a request outside the model"),
    "overload": Study(
        "loadtest.lab.overload", "answers in time where more is asked than can be answered"
    ),
    "peers": Study("loadtest.lab.peers.command", "other engines and servers on the same work"),
    "pictures": Study("loadtest.lab.pictures.command", "pictures of the pages, from what runs"),
    "regression": Study(
        "loadtest.lab.regression", "engine and server of this checkout, and those of older ones"
    ),
}


def main(args: Sequence[str]) -> NoReturn:
    """Run the study that the first argument names, with the others."""
    if not args or args[0] in ("-h", "--help"):
        print(f"Usage: {COMMAND} NAME [OPTIONS]\n")
        print("\n".join(f"  {name:<12}{study.about}" for name, study in STUDIES.items()))
        sys.exit()
    name, *rest = args
    if name not in STUDIES:
        sys.exit(f"no study is called {name!r}; known: {', '.join(STUDIES)}")
    study: Any = importlib.import_module(STUDIES[name].module)
    try:
        sys.exit(study.main(args=rest, prog_name=f"{COMMAND} {name}"))
    except LoadTestError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
