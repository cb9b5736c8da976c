"""Writers that know nothing of a model: for tests of what an eager model makes of a guess."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exporter.prover.eager import Floats
from exporter.prover.generation_cases import Case
from exporter.samples import Tokens
from tests.exporter.conftest import VOCAB_SIZE


class Zeros:
    """Guesses badly, but for a zero here and there."""

    def write(self, cases: Sequence[Case]) -> list[Floats]:
        return [np.zeros((case.num_logits, VOCAB_SIZE)) for case in cases]

    def follow(self, cases: Sequence[Case], tokens: Sequence[Tokens]) -> list[Floats]:
        return self.write(cases)
