"""Writes the page of the models that can be imported: `python -m exporter.families`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from exporter.graphs.target import TARGETS
from exporter.huggingface.any_decoder import TITLE
from exporter.huggingface.families import FAMILIES
from exporter.huggingface.family import WRITES, Ability, Family
from exporter.toolkits.fairseq import FAIRSEQ
from exporter.toolkits.opennmt import OPEN_NMT

PAGE = Path(__file__).parent / "docs" / "reference" / "families.md"


def page() -> str:
    """Return the page, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "<!-- Made by `python -m exporter.families`. -->"
    yield from ("", "# Models that can be imported", "")
    yield "The abilities are those of the family; a checkpoint has only those of its head."
    yield "A reranker is a classifier of pairs with one score, such as a cross-encoder."
    yield "[Import a model](../how-to/import.md) lists further requirements."
    yield from ("", "The targets are those of an export. No GPU has run any of these models yet:")
    yield "[Run a model on a GPU](../../../engine/docs/how-to/gpu.md)."
    yield from ("", "## Hugging Face Transformers", "")
    yield from _head("family", "`model_type`")
    yield from map(_family, FAMILIES)
    yield _row(TITLE, ["any other"], WRITES)
    yield from ("", "## OpenNMT-py and fairseq", "")
    yield from _head("toolkit", "architecture")
    yield from map(_family, (OPEN_NMT, FAIRSEQ))
    yield from ("", "## Refused", "")
    yield "Every encoder, encoder-decoder and model of images or sound that is not listed above is"
    yield "refused, among them Whisper, CLIP, DeBERTa, ALBERT, ELECTRA and MPNet. So are layers of"
    yield "experts (Mixtral, Switch Transformers), pictures beside a text (Gemma 3, LLaVA, Mllama,"
    yield "Qwen2-VL) and relative positions in every layer (umT5)."


def _head(*names: str) -> Iterator[str]:
    heads = (*names, *get_args(Ability), "targets")
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"


def _family(family: Family) -> str:
    return _row(family.title, family.model_types, family.abilities)


def _row(title: str, types: Iterable[str], found: Sequence[Ability]) -> str:
    abilities = ("yes" if ability in found else "" for ability in get_args(Ability))
    names = ", ".join(f"`{name}`" if name != "any other" else name for name in types)
    cells = (title, names, *abilities, ", ".join(TARGETS))  # all families go to all targets
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
