"""Changes rows on the host and on the emulated device; prints as JSON how often by type."""

from __future__ import annotations

import json

from engine.cuda.device import open_device
from tests.engine.row_changes import run_random_changes

COUNT = 300

allocate = open_device().cache_memory
print(
    json.dumps(
        {
            "fp32": run_random_changes(allocate, "fp32", seed=1, count=COUNT),
            "fp16": run_random_changes(allocate, "fp16", seed=2, count=COUNT),
            "bf16": run_random_changes(allocate, "bf16", seed=3, count=COUNT),
            "int8": run_random_changes(allocate, "int8", seed=4, count=COUNT),
        }
    )
)
