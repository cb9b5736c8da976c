"""How near texts are to references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF


class Likeness(NamedTuple):
    """How near texts are to references, 0 to 100."""

    chrf: float  # characters, Popović 2015
    bleu: float  # words, Papineni et al. 2002


def likeness(texts: Sequence[str], references: Sequence[str]) -> Likeness:
    """Compare texts with one reference each, by the usual definitions of sacrebleu (Post 2018)."""
    chrf = CHRF().corpus_score(list(texts), [list(references)]).score
    bleu = BLEU().corpus_score(list(texts), [list(references)]).score
    return Likeness(chrf, bleu)
