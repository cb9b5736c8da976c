"""Keys that packages are signed with, made as a user makes them."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_key(path: Path, curve: str = "prime256v1") -> tuple[Path, Path]:
    """Return a private key, and its public one."""
    public = path.with_suffix(".pub")
    making = ["openssl", "ecparam", "-genkey", "-noout", "-name", curve, "-out", path]
    subprocess.run(making, check=True)
    subprocess.run(["openssl", "pkey", "-in", path, "-pubout", "-out", public], check=True)
    return path, public
