"""The languages of a translation model, and where their tokens stand around a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.wording import listed, shortened
from exporter.huggingface.tokenizers import languages
from exporter.huggingface.tokenizers.added import put_around
from exporter.huggingface.tokenizers.layouts import nllb_languages
from exporter.huggingface.tokenizers.settings import Settings, Token

_END = "</s>"


@dataclass(frozen=True)
class Translation:
    """How a family of models is told languages."""

    tokens: dict[str, str]  # by the language's name
    is_behind: bool  # the source's language follows its end, else it is in front
    default: str  # the source language of a model that names none
    starts_with_target: bool = False  # the decoder's start token is the target's language

    @classmethod
    def of(cls, kind: str, settings: Settings) -> Translation | None:
        """Return how models whose tokenizer is of this class are told; None: not at all."""
        match kind:
            case "MBartTokenizer":
                return cls(_same(languages.MBART), True, "en_XX", starts_with_target=True)
            case "MBart50Tokenizer":
                return cls(_same(languages.MBART50), False, "en_XX")
            case "NllbTokenizer":
                tokens = _same(nllb_languages(settings))
                return cls(tokens, settings.legacy_behaviour, "eng_Latn")
            case "M2M100Tokenizer":
                return cls({name: f"__{name}__" for name in m2m_languages(settings)}, False, "en")
        return None

    def added(self) -> list[Token]:
        """Return the tokens of all languages."""
        return [Token(content=token) for token in self.tokens.values()]

    def put_around(self, tokenizer: Tokenizer, source: str) -> None:
        """Let a source be in the language `source`."""
        token = self.tokens[self.checked(source)]
        before, after = ([], [_END, token]) if self.is_behind else ([token], [_END])
        put_around(tokenizer, before, after)

    def checked(self, language: str) -> str:
        """Return the language; ValueError if the model does not know it."""
        if language not in self.tokens:
            raise ValueError(
                f"language {shortened(repr(language))} is not one of the model's; "
                f"it knows {listed(list(self.tokens))}"
            )
        return language


def m2m_languages(settings: Settings) -> Sequence[str]:
    """Return the languages of an M2M-100."""
    return languages.WMT21 if settings.language_codes == "wmt21" else languages.M2M100


def _same(names: Sequence[str]) -> dict[str, str]:
    return {name: name for name in names}
