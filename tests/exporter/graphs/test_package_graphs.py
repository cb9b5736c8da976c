"""A traced model takes memory until it is written, and no longer."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from torch import nn

from engine.package.manifest import PackageFormat
from exporter.checkpoint import load_checkpoint
from exporter.graphs.package_graphs import write_package_graphs
from tests.exporter.conftest import MakeCheckpoint


@pytest.mark.usefixtures("traced_anew")
def test_no_weight_of_the_traced_copy_is_kept(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(make_checkpoint("bert"))
    before = _weights()

    write_package_graphs(checkpoint, PackageFormat(), tmp_path)
    gc.collect()

    assert not _weights() - before


def _weights() -> set[int]:
    return {id(one) for one in gc.get_objects() if isinstance(one, nn.Parameter)}
