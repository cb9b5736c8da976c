"""Imports checkpoints of the translation toolkits OpenNMT-py and fairseq."""

from __future__ import annotations

from exporter.toolkits.importer import import_toolkit_checkpoint, is_toolkit_checkpoint

__all__ = ["import_toolkit_checkpoint", "is_toolkit_checkpoint"]
