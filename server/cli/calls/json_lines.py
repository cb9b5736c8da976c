"""Prints what the client returns as JSON, one object a line."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import click


def print_json(value: object) -> None:
    """Print a dataclass, or what JSON has, as one line of UTF-8; bytes as URL-safe base64."""
    click.echo(json.dumps(plain(value), ensure_ascii=False, separators=(",", ":")).encode())


def plain(value: object) -> object:
    """Return a value as JSON has it; bytes are URL-safe base64, numbers that it has not texts."""
    match value:
        case bytes():
            return base64.urlsafe_b64encode(value).decode()
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
        case Mapping():
            return {key: plain(one) for key, one in value.items()}
        case list() | tuple():
            return [plain(one) for one in value]
        case _ if is_dataclass(value):
            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return value
