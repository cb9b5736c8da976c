"""Errors that keep a load test from being run."""

from __future__ import annotations


class LoadTestError(Exception):
    """A load test cannot be run as asked; the message says what to change."""

    exit_code = 3  # a command that it ends exits with it


class NoServerError(LoadTestError):
    """Nobody answers at the address."""

    exit_code = 4
