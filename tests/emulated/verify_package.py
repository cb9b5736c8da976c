"""Verifies packages on the emulated device; takes a package and its checkpoint in turns.

Prints as JSON by package what the comparison refuses, for no kernel computes anything there, and
what the manifest says then of the device; then what it says when all that is compared is taken.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.errors import CertificateError
from engine.package.package import read_manifest
from engine.sampling.logits import StepLogits
from exporter import verify_device
from exporter.prover import draws, pair
from exporter.prover.judge import ExactJudge
from exporter.verify_device import verify_on_device
from tests.fakes.stand_in_certificate import judged

CONFIG = EngineConfig(max_num_seqs=4, device="cuda")


class AllIsTaken(ExactJudge):
    def numbers(self, *_: Any, **__: Any) -> None:
        pass

    def step(self, *_: Any, **__: Any) -> None:
        pass

    def check(self) -> None:
        self.tokens_compared, self.judged = 1, [judged()]


def some_tokens(*given: Any) -> list[StepLogits]:
    """The tokens that are found may be none at all."""
    found = generate(*given)
    return [seen._replace(top_ids=np.zeros_like(seen.top_ids)) for seen in found]


generate = pair.generate


def device_of(path: str) -> Any:
    device = read_manifest(path).certificate.device
    return device and device.model_dump()


def verify(path: str, checkpoint: str) -> dict[str, Any]:
    refusal = ""
    try:
        verify_on_device(path, checkpoint, CONFIG)
    except CertificateError as error:
        refusal = str(error)
    before = device_of(path)
    verify_device.ExactJudge = AllIsTaken  # type: ignore[attr-defined]
    pair.generate = some_tokens  # type: ignore[attr-defined]
    draws.check_draws = lambda *_: None
    again = [verify_on_device(path, checkpoint, CONFIG).summary() for _ in range(2)]
    return {"refusal": refusal, "before": before, "after": device_of(path), "again": again}


found = {}
for path, checkpoint in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    check_draws = draws.check_draws
    found[path] = verify(path, checkpoint)
    verify_device.ExactJudge = ExactJudge  # type: ignore[attr-defined]
    pair.generate, draws.check_draws = generate, check_draws  # type: ignore[attr-defined]
print(json.dumps(found))
