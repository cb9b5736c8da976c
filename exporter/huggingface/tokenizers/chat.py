"""Reads the chat template of an original."""

from __future__ import annotations

from pathlib import Path

from engine.json_file import read_bounded
from engine.text.chat_format import MAX_TEMPLATE_CHARS, ChatFormat
from exporter.huggingface.tokenizers.settings import Settings
from exporter.huggingface.tokenizers.unsaid import UNSAID

TEMPLATE_NAME = "chat_template.jinja"


def read_chat(directory: Path, settings: Settings, kind: str) -> ChatFormat | None:
    """Return how a conversation becomes a text; None: the original does not say.

    `kind` is the class of its tokenizer; "" for one that has no tokens of its own.
    """
    template = _template(directory / TEMPLATE_NAME, settings)
    if template is None:
        return None
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"its chat template has more than {MAX_TEMPLATE_CHARS:,} characters")
    return ChatFormat(template=template, tokens=settings.named_tokens(UNSAID.get(kind, {})))


def _template(path: Path, settings: Settings) -> str | None:
    """Return the template of the file, else of the settings: the default one of several."""
    if path.is_file():
        return read_bounded(path, 4 * MAX_TEMPLATE_CHARS).decode()
    given = settings.chat_template
    if given is None or isinstance(given, str):
        return given
    named = {one.name: one.template for one in given}
    return named.get("default", given[0].template if given else None)
