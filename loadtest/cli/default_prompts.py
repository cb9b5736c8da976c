"""Default prompts of a load test, by the kind of model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenweir import Client, ModelInfo, TokenweirClientError

from loadtest.work.ask import Ask, InTurn, Work, texts
from server.cli.calls.server_options import Server
from server.cli.typed_dates import TYPED_DATES

SENTENCES = (
    "The river rose overnight, and by morning the lower road was closed.",
    "I would not see this film again, although the music is wonderful.",
    "Ms Okafor flies from Lagos to Berlin on Tuesday.",
    "How long does it take to bake bread at this height?",
    "Our second order came late, and the box was open.",
    "A weir raises the level of a river without stopping it.",
    "The committee meets in Geneva in the first week of June.",
    "Nothing in the report explains why the bridge was built there.",
)
_PICTURES, _SIDE = 8, 224  # pixels


@contextmanager
def default_prompts(server: Server, model: str) -> Iterator[Work]:
    """Give pictures to a model that takes such, conversations to one that has them, else texts.

    Models that generate are given dates, those of the demo, and others sentences. If the server
    does not tell, dates are asked.
    """
    info = _told(server, model)
    if info is not None and info.architecture == "vision-encoder":
        with tempfile.TemporaryDirectory(prefix="tokenweir-") as folder:
            asks = tuple(Ask(path) for path in _draw(Path(folder)))
            yield InTurn(f"{len(asks)} drawn pictures in turn", asks)
    elif info is not None and "chat" in info.capabilities:
        said = [({"role": "user", "content": one},) for one in SENTENCES]
        yield InTurn(f"{len(said)} conversations in turn", tuple(Ask(one) for one in said))
    elif info is not None and "generate" not in info.capabilities:
        yield texts(SENTENCES)
    else:
        yield texts(tuple(TYPED_DATES))


def _told(server: Server, model: str) -> ModelInfo | None:
    """Return what a server says of a model; what keeps it from that, the test itself will meet."""
    arguments: dict[str, Any] = {**server.client_arguments, "max_attempts": 1}
    if "://" in server.address:  # it speaks another protocol
        return None
    try:
        with Client(server.address, **arguments) as client:
            return next((one for one in client.models() if one.model == model), None)
    except (TokenweirClientError, ValueError):
        return None


def _draw(folder: Path) -> Iterator[Path]:
    """Yield pictures of soft noise, each another one."""
    for number in range(_PICTURES):
        noise = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        path = folder / f"{number}.png"
        Image.fromarray(noise).resize((_SIDE, _SIDE)).save(path)
        yield path
