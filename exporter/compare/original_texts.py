"""Compares how a checkpoint reads and writes texts with how its original's tokenizer does.

A difference is refused, but where transformers runs the original's tokenizer in Python, so that
ours is a conversion, and where it takes special tokens in texts apart.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.errors import CheckpointError
from engine.json_file import parse_object, read_bounded
from engine.requests.request import Chat, ChatMessage
from engine.text.chat_format import CHAT_NAME, read_chat_format
from engine.text.chat_template import ChatTemplate, UnboundedError
from engine.text.tokenizer import Tokenizer
from engine.wording import shortened
from exporter.checkpoint import TARGET_TOKENIZER_NAME, TOKENIZER_NAME, read_config
from exporter.huggingface.tokenizers import Languages
from exporter.huggingface.tokenizers.original import load_original
from exporter.models import TransformerConfig
from exporter.samples import SEED, Tokens, TokenSampler

_SETTINGS_NAME = "tokenizer_config.json"
_NUM_DEALT, _DEALT = 24, 12  # texts of the vocabulary's tokens, and tokens of each
_REFUSAL = "no text, but a refusal"
_NO_CHAT = "its chat template makes no text of a conversation, so chats are refused"
_STATM, _TEMPLATE_BYTES = Path("/proc/self/statm"), 2**28
_SAID_BYTES = 2**20
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
_GIVEN = (_TEXTS[3], _TEXTS[8], _TEXTS[17])  # to the models, too
_CONVERSATIONS = (
    (("user", "Hello, who are you?"),),
    (("user", "One."), ("assistant", " Two. "), ("user", "Three?\n")),
    (("system", "Be brief."), ("user", "Привет, 今天 <b>x</b>")),
    (("system", "Be brief."), ("user", "One."), ("assistant", "Two."), ("user", "Three?")),
)


class Said(NamedTuple):
    """The compared parts, in words, and notes."""

    words: tuple[str, ...] = ()  # for the line
    notes: tuple[str, ...] = ()
    asked: Mapping[str, int] = {}  # options of `generate` that a person's languages ask for
    given: tuple[Tokens, ...] = ()  # some of the texts, for the models


class _Reading(NamedTuple):
    """The ids that both sides make of a text, or the text that they make of a conversation."""

    of: str
    ours: Sequence[object]
    theirs: Sequence[object]

    @property
    def differs(self) -> bool:
        """Whether they make two things of it."""
        return [*self.ours] != [*self.theirs]

    def __str__(self) -> str:
        return f"of {shortened(repr(self.of))} it makes {around(self.ours, self.theirs)}"


def compare_texts(directory: Path, checkpoint: Path, languages: Languages) -> Said:
    """Hold the tokenizer of a checkpoint, and its chat template, against those of its original.

    Raises CheckpointError where they differ, with the text and what both make of it.
    """
    if not (checkpoint / TOKENIZER_NAME).is_file():
        return Said()
    config, ours = read_config(checkpoint).model, Tokenizer(checkpoint / TOKENIZER_NAME)
    try:
        original = load_original(directory, config.source_vocab_size or config.vocab_size).tokenizer
        if languages.source is not None:
            original.src_lang = languages.source
        asked = _asked(original, languages)
        with _limited_memory():
            chats = list(_conversations(checkpoint, original))
        texts = _Texts.of(directory, config, ours, original, chats)
        found = [*texts.read(ours), *texts.read_besides(ours, checkpoint)]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a library says, its panics too
        reason = shortened(f"{type(error).__name__}: {error}".partition("\n")[0])
        return Said((), (f"the tokenizer is not compared with its original, for {reason}",))
    whose = f"{type(original).__name__} of transformers"
    for one in filter(lambda one: one.differs, chats):
        raise _refused(directory, f"the chat template is not that of {whose}: {one}")
    wrong = [i for i, one in enumerate(found) if one.differs]
    count = f"{len(found) - len(wrong)} of {len(found)}" if wrong else f"{len(found)}"
    words = (f"{count} texts", *([f"{len(chats)} conversations"] if chats else []))
    notes = [_NO_CHAT] if original.chat_template and not chats else []
    given = tuple(tuple(ours.encode(text)) for text in _GIVEN)
    if not wrong:
        return Said(words, tuple(notes), asked, given)
    differ = f"{len(wrong)} of {len(found)} texts are not read or written as by {whose}"
    if original.is_fast and not original.split_special_tokens:
        raise _refused(directory, f"{differ}: {found[wrong[0]]}")
    why = "exporter/docs/reference/tokenizers.md says what differs, and why"
    return Said(words, (*notes, f"{differ}: {found[wrong[0]]}; {why}"), asked, given)


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


def _asked(original: Any, languages: Languages) -> dict[str, int]:
    """Return how `generate` is told the language to write in."""
    if languages.target is None:
        return {}
    known = getattr(original, "lang_code_to_id", None) or original.get_vocab()
    is_start = type(original).__name__ == "MBartTokenizer"
    option = "decoder_start_token_id" if is_start else "forced_bos_token_id"
    return {option: known[languages.target]}


@dataclass(frozen=True)
class _Texts:
    """Texts that both sides read."""

    config: TransformerConfig
    whole: Sequence[str]
    parts: Sequence[str]  # without tokens around them
    written: Sequence[Tokens]  # ids of which a text is made
    lowers: bool  # letters, before transformers sees them
    original: Any

    @classmethod
    def of(
        cls,
        directory: Path,
        config: TransformerConfig,
        ours: Tokenizer,
        original: Any,
        chats: Sequence[_Reading],
    ) -> _Texts:
        """Return texts of many kinds, of the tokens of the vocabulary, and with each added one."""
        paths = directory.glob("sentence_*_config.json")  # read apart from the import
        said = (parse_object(read_bounded(path, _SAID_BYTES)) for path in paths)
        lowers = any(one.get("do_lower_case") for one in said)
        size = config.source_vocab_size or config.vocab_size
        sampler = TokenSampler(np.random.default_rng(SEED), size)
        dealt = [sampler.sample(_DEALT) for _ in range(_NUM_DEALT)]
        whole = [*_TEXTS, *map(ours.decode, dealt)]
        added = sorted(original.get_added_vocab().items(), key=lambda one: one[1])
        known = [token for token, i in added if i < size and not lowers]
        for first in range(0, len(known), _DEALT):
            whole.append("".join(f"x {one} y{one}z" for one in known[first : first + _DEALT]))
        parts = [*_TEXTS, *("".join(map(str, one.theirs)) for one in chats)]
        written = dealt if config.num_decoder_layers else ()
        return cls(config, whole, parts, written, lowers, original)

    def read(self, ours: Tokenizer) -> Iterator[_Reading]:
        """Yield what a tokenizer and the original make of each."""
        for text in self.whole:
            yield _Reading(text, ours.encode(text), self._theirs(text)["input_ids"])
        for text in self.parts:
            found = self._theirs(text, add_special_tokens=False)["input_ids"]
            yield _Reading(text, ours.encode_part(text), found)
        for ids in self.written:
            theirs = self.original.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            both = ours.decode(ids), theirs
            if not self.original.is_fast:  # it takes spaces off, which a stream has sent
                both = both[0].strip(), both[1].strip()
            yield _Reading(f"the text of {list(ids)}", *both)
        if self.config.is_of_texts:
            pair, found, named = ours.encode_with_offsets(*_PAIR), self._theirs(*_PAIR), str(_PAIR)
            yield _Reading(named, pair.ids, found["input_ids"])
            if self.config.num_token_types > 1 and "token_type_ids" in found:
                yield _Reading(f"types of {named}", pair.token_types, found["token_type_ids"])

    def read_besides(self, ours: Tokenizer, checkpoint: Path) -> Iterator[_Reading]:
        """Yield a long text that is cut, of plain words; and texts with a tokenizer for targets."""
        if (most := self.config.cut_at) is not None:
            cutting = ours.cutting(most, "left" if self.config.cuts_left else "right")
            text = _TEXTS[3] * (1 + most // 8)
            found = self._theirs(text, truncation=True, max_length=most)["input_ids"]
            yield _Reading(f"a long text, cut to {most} tokens", cutting.encode(text), found)
        if (path := checkpoint / TARGET_TOKENIZER_NAME).is_file():
            target = Tokenizer(path)
            for text in self.whole:
                found = self.original(text_target=text, add_special_tokens=False)["input_ids"]
                yield _Reading(f"target {text}", target.encode_part(text), found)

    def _theirs(self, *texts: str, **options: Any) -> Any:
        return self.original(*(one.lower() if self.lowers else one for one in texts), **options)


def _conversations(checkpoint: Path, original: Any) -> Iterator[_Reading]:
    """Yield what both sides write of conversations, without those that both refuse."""
    path, has_other = checkpoint / CHAT_NAME, bool(original.chat_template)
    if path.is_file() != has_other:
        yield _Reading("any conversation", *("no text", "a text")[:: 1 if has_other else -1])
    elif has_other:
        template, theirs = ChatTemplate(read_chat_format(path)), original.chat_template
        if isinstance(theirs, dict):
            original.chat_template = theirs.get("default", next(iter(theirs.values())))
        for turns in _CONVERSATIONS:
            chat = Chat(tuple(ChatMessage(*turn) for turn in turns))
            try:
                ours = _written(partial(template.render, chat))
            except UnboundedError:  # in transformers nothing bounds it
                continue
            said = [{"role": role, "content": content} for role, content in turns]
            parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in said]
            options = {"tokenize": False, "add_generation_prompt": True}
            found, of_parts = (
                _written(partial(original.apply_chat_template, form, **options))
                for form in (said, parts)
            )
            if ours == of_parts and ours != _REFUSAL:  # a template may take no plain texts
                found = of_parts
            if ours != _REFUSAL or any(content in found for _, content in turns):
                yield _Reading(str(said), ours, found)


def _written(write: Callable[[], str]) -> str:
    try:
        return write()
    except Exception as error:
        if isinstance(error.__cause__, UnboundedError):
            raise error.__cause__ from error
        return _REFUSAL


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Let the templates of strangers take so much memory, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not _STATM.exists():  # the system does not tell how much there is already
        yield
        return
    used = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    bounds = {used + _TEMPLATE_BYTES, soft, hard} - {resource.RLIM_INFINITY}  # a shell sets some
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
