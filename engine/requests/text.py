"""Facts on texts that all engines share."""

from __future__ import annotations

from typing import Literal

Side = Literal["left", "right"]
MAX_INLINE_CHARS = 4096  # longer texts are tokenized off the event loop
