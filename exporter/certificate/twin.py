"""Graphs of the bodies that a package has, with other numbers, for as long as they are compared."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.package.manifest import PackageFormat
from exporter.checkpoint import Checkpoint
from exporter.graphs.package_graphs import build_package_graphs, write_graphs
from exporter.graphs.target import target_of


@contextmanager
def twin_graphs(
    checkpoint: Checkpoint, form: PackageFormat, numbers: PackageFormat
) -> Iterator[Path]:
    """Write the graphs that a checkpoint has in `form`, but with `numbers`, into a directory."""
    with tempfile.TemporaryDirectory(prefix="tokenweir-twin-") as name:
        same = target_of(form).functions[form.precision]
        write_graphs(build_package_graphs(checkpoint, numbers, same), Path(name))
        yield Path(name)
