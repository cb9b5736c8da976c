"""Commands that an engine's loop carries out between two steps, beside a new TokenRequest."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.sequence import TokenRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Nothing more is wanted of a request."""

    key: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The loop is to end."""


Command = TokenRequest | Abort | Stop
