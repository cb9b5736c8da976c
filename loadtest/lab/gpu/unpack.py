#!/usr/bin/env python3
"""The command on the rented machine: unpacks what was carried, and starts the check with it.

`python3 loadtest/lab/gpu/unpack.py --out DIR ...`: the arguments are those of the check. It needs
nothing but the machine's own Python. SITE is where it unpacks; what came in parts lies in CARRIED.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tarfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
_CARRY = _ROOT / ".carry"


def main() -> None:
    """Become the check."""
    site = Path(os.environ.get("SITE", "/tmp/site"))
    if not (site / "whole").is_file():
        _unpack(site)
    path = [str(site), str(_ROOT), str(_ROOT / "proto" / "python")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "CUDA_MODULE_LOADING": "LAZY",  # kernels that were left out are not looked at
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    nvidia = importlib.util.find_spec("nvidia")
    print(
        "python",
        sys.version.split()[0],
        "libraries of CUDA:",
        nvidia and list(nvidia.submodule_search_locations or ()),
        flush=True,
    )
    os.chdir(_ROOT)
    command = [sys.executable, "-m", "loadtest.lab", "gpu", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


def _unpack(site: Path) -> None:
    site.mkdir(parents=True, exist_ok=True)
    archive = _CARRY / "site.tar.xz"
    if not archive.is_file():
        carried = Path(os.environ.get("CARRIED", "/tmp/carried"))
        parts = sorted(carried.glob("site.tar.xz.*"), key=lambda path: int(path.suffix[1:]))
        archive = site / "site.tar.xz"
        archive.write_bytes(b"".join(path.read_bytes() for path in parts))
    if (
        hashlib.sha256(archive.read_bytes()).hexdigest()
        != (_CARRY / "site.sha256").read_text().strip()
    ):
        sys.exit(f"{archive} is not what was packed: name .carry in carry, or every part in a call")
    with tarfile.open(archive, "r:xz") as packed:
        packed.extractall(site, filter="data")
    (site / "whole").touch()


if __name__ == "__main__":
    main()
