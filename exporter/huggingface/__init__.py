"""Imports checkpoints of Hugging Face Transformers."""

from __future__ import annotations

from exporter.huggingface.families import FAMILIES
from exporter.huggingface.importer import import_checkpoint
from exporter.huggingface.tokenizers import Languages
from exporter.huggingface.writing import Imported

__all__ = ["FAMILIES", "Imported", "Languages", "import_checkpoint"]
