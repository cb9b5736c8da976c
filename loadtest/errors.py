"""Errors that keep a load test from being run."""

from __future__ import annotations


class LoadTestError(Exception):
    """A load test cannot be run as asked; the message says what to change."""


class NoServerError(LoadTestError):
    """Nobody answers at the address."""
