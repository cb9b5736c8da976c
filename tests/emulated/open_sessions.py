"""Loads graphs on the emulated device as the engine does; prints as JSON what it said of each."""

from __future__ import annotations

import json
import sys

from engine.device import open_device
from engine.errors import TokenweirError
from engine.session import create_session

device = open_device()
found = {}
for path in sys.argv[1:]:
    try:
        create_session(path, device=device)
        found[path] = "loaded"
    except TokenweirError as error:
        found[path] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
