"""Imports checkpoints of Hugging Face Transformers."""

from __future__ import annotations

from exporter.huggingface.families import FAMILIES
from exporter.huggingface.importer import Imported, import_checkpoint

__all__ = ["FAMILIES", "Imported", "import_checkpoint"]
