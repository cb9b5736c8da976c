"""Imports checkpoints of Hugging Face Transformers."""

from __future__ import annotations

from exporter.huggingface.importer import CONVERTERS, Imported, import_checkpoint

__all__ = ["CONVERTERS", "Imported", "import_checkpoint"]
