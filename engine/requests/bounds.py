"""Bounds of options that hold for every server, whatever its own limits are."""

from __future__ import annotations

MAX_LENGTH_PENALTY = 10.0  # beyond it only the length counts, and powers of it overflow
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # logits must stay finite
MAX_LOGIT_BIAS = 1e4
