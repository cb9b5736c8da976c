"""Verifies packages on the emulated device; takes a package and its checkpoint in turns.

Prints as JSON by package what the comparison refuses, for no kernel computes anything there, and
what the manifest says then of the device; then what it says when all that is compared is taken.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from exporter.certificate import device as certify_device
from exporter.certificate import draws as certify_draws
from exporter.certificate.comparison import Comparison
from exporter.certificate.half_comparison import HalfComparison
from exporter.certificate.sides import Sides

from engine.config import EngineConfig
from engine.errors import CertificateError
from engine.package.manifest import HalfPrecision
from engine.package.package import read_manifest
from exporter.verify_device import verify_on_device
from tests.stand_in_certificate import HALF

CONFIG = EngineConfig(max_num_seqs=4, device="cuda")


class AllIsTaken(Comparison):
    def step(self, *_: Any) -> None:
        self.tokens_compared = self.tokens_equal = self.tokens_compared + 1

    def logits(self, *_: Any) -> None:
        self.tokens_compared = self.tokens_equal = self.tokens_compared + 1

    def values(self, *_: Any) -> None:
        pass

    def alignment(self, *_: Any) -> None:
        pass


class HalfIsTaken(HalfComparison):
    def case(self, *_: Any) -> None:
        pass

    def values(self, *_: Any) -> None:
        pass

    def result(self) -> HalfPrecision:
        return HALF  # what is found is beyond what a manifest may say


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
    certify_device.Comparison = certify_device.LossyComparison = AllIsTaken  # type: ignore
    certify_device.HalfComparison = HalfIsTaken  # type: ignore
    Sides._check_ids = lambda *_: None  # type: ignore
    certify_draws.check_draws = lambda *_: None
    again = [verify_on_device(path, checkpoint, CONFIG).summary() for _ in range(2)]
    return {"refusal": refusal, "before": before, "after": device_of(path), "again": again}


found = {}
for path, checkpoint in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    comparisons = vars(certify_device).copy()
    checks = Sides._check_ids, certify_draws.check_draws
    found[path] = verify(path, checkpoint)
    vars(certify_device).update(comparisons)
    Sides._check_ids, certify_draws.check_draws = checks  # type: ignore
print(json.dumps(found))
