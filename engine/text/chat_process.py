"""Applies a chat template; run in a process of its own, which its parent gives lines of JSON.

A template is a program that came with a model. It runs in the sandbox of Jinja, and as that bounds
neither time nor memory, in a process that has little of both: one that uses more is ended, and the
next conversation starts another one. This file is run by its path and imports nothing of ours.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 2  # of a processor, for one conversation
MAX_MEMORY = 2**29  # bytes
MAX_CHARS = 2**20  # of a text


class Generation(Extension):
    """`{% generation %}`, which marks what the model writes, and changes no text."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> Node:
        """Keep what is in the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> Any:
        return caller()


def main() -> None:
    """Read the format, then answer every conversation with a text or with what is wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    form = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        _allow(MAX_SECONDS)
        try:
            answer = {"text": _render(form, json.loads(line))}
        except TemplateError as error:
            answer = {"refused": f"{type(error).__name__}: {error}"[:1000]}
        except MemoryError:
            answer = {"failed": f"it takes more than {MAX_MEMORY:,} bytes of memory"}
        except Exception as error:  # of the template's program, whatever it may be
            answer = {"refused": f"{type(error).__name__}: {error}"[:1000]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _allow(seconds: int) -> None:
    """Let the system end this process once it has worked so long from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _render(form: dict[str, Any], messages: list[dict[str, str]]) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    template = environment.from_string(form["template"])
    # What transformers gives a template; tools and documents are those of no request here.
    text = template.render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **form["tokens"],
    )
    if len(text) > MAX_CHARS:
        raise TemplateError(f"its text has {len(text):,} characters, more than {MAX_CHARS:,}")
    return text


def _to_json(value: object, **options: Any) -> str:
    """Do as transformers does: no HTML, letters as they are."""
    known = ("ensure_ascii", "indent", "separators", "sort_keys")
    given = {"ensure_ascii": False} | {name: options[name] for name in known if name in options}
    return json.dumps(value, **given)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main()
