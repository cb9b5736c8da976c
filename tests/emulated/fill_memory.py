"""Runs a decoder on the emulated device when hardly any of its memory is left; prints the error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from engine.cuda.device import open_device
from engine.errors import TokenweirError
from tests.emulated.bound_calls import bound
from tests.emulated.look_at_graph import SIZES

device = open_device()
binding = bound(device.create_session(Path(sys.argv[1])), device, {**SIZES, "tokens": 1})
free, total = device.runtime.free_memory()
os.environ["EMU_MEMORY"] = str(total - free + 1000)
try:
    binding.run()
    print(json.dumps("it has run"))
except TokenweirError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
