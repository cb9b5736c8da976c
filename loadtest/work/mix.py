"""Several kinds of requests in shares, such as 70 % short, 20 % with four beams, 10 % scores."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast, get_args

import numpy as np
from pydantic import JsonValue

from loadtest.errors import LoadTestError
from loadtest.work.ask import Ask, Derived, Method

_FORM = "give SHARE NAME OPTION=VALUE ..., such as '20 beam beam=4'"


@dataclass(frozen=True)
class Kind:
    """One kind of requests: what is asked as the work says, and how this kind asks it."""

    share: float  # against the other kinds'
    name: str
    options: Mapping[str, JsonValue]
    method: Method | None = None
    target: str | None = None  # target of a score

    def of(self, ask: Ask) -> Ask:
        """Return a request in this kind; options of another call do not go with it."""
        target = ask.target if self.target is None else self.target
        method = self.method or ask.method
        before = ask.options if method == ask.method else {}
        options = {**before, **self.options}
        return replace(ask, kind=self.name, method=method, target=target, options=options)


@dataclass(frozen=True)
class Mix(Derived):
    """Requests of a work, each of a kind that is drawn for its index."""

    kinds: tuple[Kind, ...]
    seed: int = 0

    @property
    def title(self) -> str:
        total = sum(kind.share for kind in self.kinds)
        parts = ", ".join(f"{kind.share / total:.0%} {kind.name}" for kind in self.kinds)
        return f"{self.work.title}: {parts}"

    def ask(self, index: int) -> Ask:
        """Return one request."""
        drawn = np.random.default_rng((self.seed, index)).random()
        place = int(np.searchsorted(self._bounds, drawn, side="right"))
        return self.kinds[min(place, len(self.kinds) - 1)].of(self.work.ask(index))

    @cached_property
    def _bounds(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        shares = np.array([kind.share for kind in self.kinds])
        return np.cumsum(shares / shares.sum())


def parse_kind(text: str) -> Kind:
    """Return a kind from `SHARE NAME OPTION=VALUE ...`; LoadTestError for what is none.

    `method` and `target` are not options of a call: they say which it is, and what it scores.
    """
    try:
        share, name, *assignments = shlex.split(text)
        number = float(share)
    except ValueError as error:
        raise LoadTestError(f"{text[:100]!r} is not a kind of requests; {_FORM}") from error
    if not 0 < number < float("inf"):
        raise LoadTestError(f"the share of {text[:100]!r} must be above 0; {_FORM}")
    options = dict(parse_option(assignment) for assignment in assignments)
    method, target = options.pop("method", None), options.pop("target", None)
    if method is not None and method not in get_args(Method):
        raise LoadTestError(f"method {method!r} must be one of {', '.join(get_args(Method))}")
    return Kind(
        number, name, options, cast(Method | None, method), None if target is None else str(target)
    )


def parse_option(text: str) -> tuple[str, JsonValue]:
    """Return name and value of `NAME=VALUE`; a value that is no JSON is a text."""
    name, is_given, value = text.partition("=")
    if not is_given or not name.isidentifier():
        raise LoadTestError(f"{text[:100]!r} is not NAME=VALUE; give an option, such as beam=4")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
