"""The table of toolkits in exporter/README.md: python -m exporter.toolkits.table prints it."""

from __future__ import annotations

from exporter.huggingface.table import family_table
from exporter.toolkits.fairseq import FAIRSEQ
from exporter.toolkits.opennmt import OPEN_NMT

TOOLKITS = (OPEN_NMT, FAIRSEQ)


def toolkit_table() -> str:
    """Return what the models of every toolkit can do and where, a line each, as Markdown."""
    return family_table(TOOLKITS, ("toolkit", "architecture"))


if __name__ == "__main__":
    print(toolkit_table())
