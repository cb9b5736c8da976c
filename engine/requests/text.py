"""Text as engines see it: encodings and protocols, which `engine.text` fulfils."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from engine.requests.request import Chat, Reasoning

Side = Literal["left", "right"]
MAX_INLINE_CHARS = 4096  # longer texts are tokenized off the event loop


@dataclass(frozen=True)
class Encoding:
    """A text as token ids; one entry a token in each field."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]  # first byte and one past the last, in the UTF-8 text
    special: tuple[bool, ...]  # added by the tokenizer, such as [CLS]
    token_types: tuple[int, ...]  # 0; the second text of a pair may have 1
    continues: tuple[bool, ...] = ()  # goes on with the word of the token before it


class Piece(NamedTuple):
    """The result of one push."""

    text: str  # may be sent now; never retracted
    stop: str | None  # the stop string that ended the text, if one did


class Detokenizer(Protocol):
    """The text of one sequence while its tokens arrive, cut at the first stop string."""

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the next tokens in; after a match nothing is taken any more."""

    def finish(self) -> Piece:
        """Return what was held back, now that the sequence has ended; it may hold a match, too."""

    def ignore_stops(self) -> None:
        """Take stop strings that become complete from now on as plain text."""

    def fork(self) -> Detokenizer:
        """Return a copy that goes its own way."""


class GenerationTokenizer(Protocol):
    """The tokenizer of a generating engine."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the model wants around it."""

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a text that is a part of another: no special tokens around it."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds in the middle of a text."""

    def source_token_bytes(self, token_id: int) -> bytes:
        """Return the same of a token that is read."""

    def is_special(self, token_id: int) -> bool:
        """Say whether a token is left out of texts, such as that of a language."""

    def detokenizer(
        self,
        stop_strings: Sequence[str],
        *,
        include_stop: bool,
        min_new_tokens: int,
        skip_special: bool,
    ) -> Detokenizer:
        """Return the empty text of a sequence, with special tokens unless they are skipped.

        A stop string that is completed by an earlier token than `min_new_tokens` is plain text.
        """


class ChatTemplate(Protocol):
    """Makes texts of conversations; `engine.text.chat_template` in production."""

    def render(self, chat: Chat) -> str:
        """Return the text, up to where the answer begins; any thread asks.

        Raises ValueError, saying why, for a conversation that the model's template refuses.
        """

    def problem_of(self, variables: Collection[str]) -> str | None:
        """Return what is wrong with variables of a conversation, by their names."""

    def problem_of_tools(self, chat: Chat) -> str | None:
        """Return what is wrong with functions that a conversation may call, or has called."""

    def reasoning_behind(self, end: str) -> Reasoning | None:
        """Return how an answer begins with reasoning, by the end of its prompt; None: with none."""

    @property
    def tool_format(self) -> str | None:
        """Return how the model writes calls of functions, one of `engine.text.chat_format`."""


class ItemTokenizer(Protocol):
    """The tokenizer of a one-pass engine."""

    def cutting(self, most: int, side: Side) -> ItemTokenizer:
        """Return one that cuts what has more tokens, of a pair the longer text."""

    def encode_with_offsets(self, text: str, text_pair: str | None = None) -> Encoding:
        """Return ids and where each token stands in its text; special tokens stand at (0, 0)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens and ids that have no token are left out."""
