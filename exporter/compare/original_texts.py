"""Compares how a checkpoint reads texts and conversations with how its original's tokenizer does.

A difference is refused, but where the original has no tokenizer.json, so that ours is a conversion
that follows older libraries, or where ours reads that file as it is and transformers does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.errors import CheckpointError
from engine.json_file import parse_object
from engine.requests.request import Chat, ChatMessage
from engine.requests.text import Side
from engine.text.chat_format import CHAT_NAME, read_chat_format
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.wording import shortened
from exporter.checkpoint import CONFIG_NAME, TARGET_TOKENIZER_NAME, TOKENIZER_NAME, read_config
from exporter.huggingface.sentence_texts import read_sentence_texts
from exporter.huggingface.tokenizers import Languages
from exporter.models import TransformerConfig
from exporter.samples import SEED, Deck

_SETTINGS_NAME = "tokenizer_config.json"
_NUM_DEALT, _DEALT = 24, 12  # texts of the vocabulary's tokens, and tokens of each
_SHOWN = 16  # ids, or characters, around the first difference
_TEXTS = (
    "",
    " ",
    "x",
    "The quick brown fox jumps over the lazy dog.",
    "THE QUICK BROWN FOX",
    " a space in front, two  inside and one behind ",
    "\ttabs\tand\nnew lines\r\n\n",
    "naïve café, São Paulo, Ærøskøbing, Straße",
    "Привет, мир! Как дела?",
    "Καλημέρα κόσμε, ΟΔΟΣ",
    "今天天气很好。東京は晴れです。",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "🙂 smiles 🎉👩‍👩‍👧",
    "e\u0301 and \u00e9, \ufb01 and \uff21",
    "3.14159, 2,718 and 1e-9",
    "https://example.org/path?query=1#part",
    "def f(x):\n    return x ** 2",
    "don't can't we'll I'm",
    "unbelievablyextraordinarilylongcompoundword",
)
_PAIR = (_TEXTS[3], _TEXTS[10])
_CONVERSATIONS = (
    (("user", "Hello, who are you?"),),
    (("user", "One."), ("assistant", " Two. "), ("user", "Three?\n")),
    (("system", "Be brief."), ("user", "Привет, 今天 <b>x</b>")),
    (("system", "Be brief."), ("user", "One."), ("assistant", "Two."), ("user", "Three?")),
)


class Said(NamedTuple):
    """What was compared."""

    words: tuple[str, ...] = ()  # for the line
    notes: tuple[str, ...] = ()


class _Reading(NamedTuple):
    """Ids of a text on both sides, or of its beginning or end."""

    text: str
    ours: Sequence[int]
    theirs: Sequence[int]


class _Rendering(NamedTuple):
    """A conversation as both sides write it; None: not at all."""

    said: object
    ours: str | None
    theirs: str | None


def compare_texts(directory: Path, checkpoint: Path, languages: Languages) -> Said:
    """Hold the tokenizer of a checkpoint, and its chat template, against those of its original.

    Raises CheckpointError where they differ, with the text and what both make of it.
    """
    if not (checkpoint / TOKENIZER_NAME).is_file():
        return Said()
    config, ours = read_config(checkpoint).model, Tokenizer(checkpoint / TOKENIZER_NAME)
    try:
        original = _load(directory, languages)
        chats = list(_renderings(checkpoint, original))
        texts = _Texts.of(directory, config, ours, original, chats)
        found = [*texts.read(ours), *texts.cut(ours), *_targets(checkpoint, original, texts)]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a library says, its panics too
        reason = shortened(str(error).strip().partition("\n")[0] or type(error).__name__)
        return Said((), (f"the tokenizer is not compared with its original: {reason}",))
    whose = f"{type(original).__name__} of transformers"
    for said, one, other in chats:
        if one != other:
            raise _refused(
                directory,
                f"the chat template is not that of {whose}: of {said} it makes "
                f"{around(one or '', other or '')}",
            )
    wrong = [i for i, one in enumerate(found) if list(one.ours) != list(one.theirs)]
    count = f"{len(found) - len(wrong)} of {len(found)}" if wrong else f"{len(found)}"
    words = (f"{count} texts", *([f"{len(chats)} conversations"] if chats else []))
    if not wrong:
        return Said(words)

    def differs(i: int) -> str:
        return (
            f"{len(wrong)} of {len(found)} texts have other ids than those of {whose}: of "
            f"{shortened(repr(found[i].text))} it makes {around(found[i].ours, found[i].theirs)}"
        )

    if (path := directory / TOKENIZER_NAME).is_file():
        in_file = list(texts.read(Tokenizer(path)))
        for i in wrong:
            if i >= len(in_file) or list(found[i].ours) != list(in_file[i].ours):
                raise _refused(directory, differs(i))
    return Said(words, (f"{differs(wrong[0])}; exporter/README.md says what differs, and why",))


def _refused(directory: Path, differs: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: {differs}; please report it with {_SETTINGS_NAME}, or save the tokenizer "
        "again with transformers (`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`), or "
        "import with --no-comparison"
    )


def around(ours: Sequence[object], theirs: Sequence[object]) -> str:
    """Show both sides from a little before the first difference on."""
    pairs = zip(ours, theirs, strict=False)
    least = min(len(ours), len(theirs))
    start = max(0, next((i for i, (a, b) in enumerate(pairs) if a != b), least) - 2)
    one, other = (shortened(repr(side[start:][:_SHOWN])) for side in (ours, theirs))
    return f"{one}, there {other}" + (f" (from {start + 1} on)" if start else "")


def _load(directory: Path, languages: Languages) -> Any:
    from transformers import AutoTokenizer

    original = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    if languages.source is not None:
        original.src_lang = languages.source
    return original


@dataclass(frozen=True)
class _Texts:
    """Texts that both sides read."""

    config: TransformerConfig
    whole: Sequence[str]
    parts: Sequence[str]  # without tokens around them
    lowers: bool  # letters, before transformers sees them
    original: Any

    @classmethod
    def of(
        cls,
        directory: Path,
        config: TransformerConfig,
        ours: Tokenizer,
        original: Any,
        chats: Sequence[_Rendering],
    ) -> _Texts:
        """Return texts of many kinds, of the tokens of the vocabulary, and with each added one."""
        said = read_sentence_texts(directory, parse_object((directory / CONFIG_NAME).read_bytes()))
        lowers, size = bool(said and said.lowers), config.source_vocab_size or config.vocab_size
        deck = Deck(np.random.default_rng(SEED), size)
        whole = [*_TEXTS, *(ours.decode(deck.deal(_DEALT)) for _ in range(_NUM_DEALT))]
        added = sorted(original.get_added_vocab().items(), key=lambda one: one[1])
        known = [token for token, i in added if i < size and not lowers]
        for first in range(0, len(known), _DEALT):
            whole.append("".join(f"x {one} y{one}z" for one in known[first : first + _DEALT]))
        parts = [*_TEXTS, *(one.theirs for one in chats if one.theirs)]
        return cls(config, whole, parts, lowers, original)

    def read(self, ours: Tokenizer) -> Iterator[_Reading]:
        """Yield what a tokenizer and the original make of each."""
        for text in self.whole:
            yield _Reading(text, ours.encode(text), self._theirs(text)["input_ids"])
        for text in self.parts:
            found = self._theirs(text, add_special_tokens=False)["input_ids"]
            yield _Reading(text, ours.encode_part(text), found)
        if self.config.family == "bert":
            pair, found, named = ours.encode_with_offsets(*_PAIR), self._theirs(*_PAIR), str(_PAIR)
            yield _Reading(named, pair.ids, found["input_ids"])
            if self.config.num_token_types > 1 and "token_type_ids" in found:
                yield _Reading(f"types of {named}", pair.token_types, found["token_type_ids"])

    def cut(self, ours: Tokenizer) -> Iterator[_Reading]:
        """Yield a long text, of a model that cuts it: plain words, all of which are read alike."""
        if (most := self.config.cut_at) is not None:
            side: Side = "left" if self.config.cuts_left else "right"
            text = _TEXTS[3] * (1 + most // 8)
            found = self._theirs(text, truncation=True, max_length=most)["input_ids"]
            reading = ours.cutting(most, side).encode(text)
            yield _Reading(f"a long text, cut to {most} tokens", reading, found)

    def _theirs(self, *texts: str, **options: Any) -> Any:
        return self.original(*(one.lower() if self.lowers else one for one in texts), **options)


def _targets(checkpoint: Path, original: Any, texts: _Texts) -> Iterator[_Reading]:
    """Yield texts to be written, of a model that has a tokenizer of its own for them."""
    if (path := checkpoint / TARGET_TOKENIZER_NAME).is_file():
        target = Tokenizer(path)
        for text in texts.whole:
            found = original(text_target=text, add_special_tokens=False)["input_ids"]
            yield _Reading(f"target {text}", target.encode_part(text), found)


def _renderings(checkpoint: Path, original: Any) -> Iterator[_Rendering]:
    """Yield the conversations that both sides render."""
    path, has_other = checkpoint / CHAT_NAME, bool(original.chat_template)
    if path.is_file() != has_other:
        told = "a template" if path.is_file() else None, "a template" if has_other else None
        yield _Rendering("a conversation", *told)
        return
    if not has_other:
        return
    template = ChatTemplate(read_chat_format(path))
    for turns in _CONVERSATIONS:
        said = [{"role": role, "content": content} for role, content in turns]
        with suppress(Exception):  # some refuse a role, and that is theirs to say
            yield _Rendering(
                said,
                template.render(Chat(tuple(ChatMessage(*turn) for turn in turns))),
                original.apply_chat_template(said, tokenize=False, add_generation_prompt=True),
            )
