"""Imported models are held against Hugging Face; their certificates are those of any model."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def certificates_of_few_cases(few_cases: None) -> None:
    """Let the certificates of all packages here try few cases, but in tests marked long."""
