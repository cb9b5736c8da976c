"""Addresses of packages."""

from __future__ import annotations

from pathlib import Path


def is_remote(address: Path | str) -> bool:
    """Return whether a package is to be fetched, and not read where it lies."""
    return "://" in str(address) and not isinstance(address, Path)
