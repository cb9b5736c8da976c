"""Large blocks that are freed between others go back to the system at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exporter.prover.heap import free_large_blocks_at_once

STATUS = Path("/proc/self/status")
SIZE = 6 * 2**20  # glibc by itself would keep such blocks in its heap, once one was freed


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is told by Linux")
def test_freed_blocks_between_others_take_no_memory() -> None:
    free_large_blocks_at_once()
    blocks = [np.ones(SIZE, np.uint8) for _ in range(20)]
    before = _resident()

    del blocks[::2]

    assert before - _resident() > 8 * SIZE


def _resident() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
