"""Reads what an original says of its tokenizer, beside the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from tokenizers import AddedToken

from engine.json_file import parse_object, read_bounded
from engine.wording import problems_of

CONFIG_NAME = "tokenizer_config.json"
SPECIAL_NAME = "special_tokens_map.json"
ADDED_NAME = "added_tokens.json"
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MAX_BYTES = 2**24


class Token(BaseModel):
    """A token by its text, and how it is looked for."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False  # looked for behind the normalizer
    special: bool = True  # left out of texts that are written

    def added(self) -> AddedToken:
        """Return it as the library has it."""
        return AddedToken(**self.model_dump())


Named = str | Token | None


class ListedToken(Token):
    """A token of a list that says which are special."""

    normalized: bool = True
    special: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_flags(cls, given: Any) -> Any:
        is_special = isinstance(given, dict) and given.get("special")
        return {"normalized": False, **given} if is_special else given


class NamedTemplate(BaseModel):
    """One of several chat templates."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    template: str


class Settings(BaseModel):
    """`tokenizer_config.json`, with what `special_tokens_map.json` says where that counts."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    tokenizer_class: str = ""
    bos_token: Named = None
    eos_token: Named = None
    unk_token: Named = None
    pad_token: Named = None
    cls_token: Named = None
    sep_token: Named = None
    mask_token: Named = None
    mask_token_sent: Named = None
    own_tokens: dict[str, str | Token] = {}  # by names that a model alone has
    additional_special_tokens: tuple[str | Token, ...] = ()
    added_tokens_decoder: dict[int, ListedToken] = {}  # by id; of older files `added_tokens.json`
    is_old: bool = False  # a file that lists no added tokens
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None  # a space behind each added token, as in front of the text
    legacy_behaviour: bool = False  # NLLB: the source language behind the text
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool = True
    extra_ids: int | None = None
    offset: int | None = None
    src_lang: str | None = None
    language_codes: str = "m2m100"
    separate_vocabs: bool = False
    truncation_side: Literal["left", "right"] | None = None
    clean_up_tokenization_spaces: bool = False  # in what is written
    chat_template: str | tuple[NamedTemplate, ...] | None = None

    def text_of(self, name: str, default: str) -> str:
        """Return the token that a field names, or the default of its class."""
        named = getattr(self, name)
        return default if named is None else named.content if isinstance(named, Token) else named

    def named_tokens(self, unsaid: Mapping[str, str]) -> dict[str, str]:
        """Return the special tokens that have a name, by it; `unsaid`: if nothing is said of it."""
        said = {name: getattr(self, name) for name in _NAMES if name in self.model_fields_set}
        found = {**unsaid, **said, **self.own_tokens}
        return {name: text_of(token) for name, token in found.items() if token is not None}

    def listed(self) -> dict[str, int | None]:
        """Return the added tokens that are named, with the id that they are to have, if any."""
        found: dict[str, int | None] = {
            text_of(one): None for one in self.additional_special_tokens
        }
        return found | {token.content: i for i, token in sorted(self.added_tokens_decoder.items())}

    def within(self, room: int) -> tuple[Settings, list[str]]:
        """Return them without the added tokens whose ids are not below `room`, and these."""
        over = {token.content for i, token in self.added_tokens_decoder.items() if i >= room}
        kept = {i: token for i, token in self.added_tokens_decoder.items() if i < room}
        extra = tuple(one for one in self.additional_special_tokens if text_of(one) not in over)
        changed = {"added_tokens_decoder": kept, "additional_special_tokens": extra}
        return self.model_copy(update=changed), sorted(over)

    def flags(self) -> Mapping[str, Token]:
        """Return how tokens are looked for, where it is said."""
        named = [getattr(self, name) for name in _NAMES]
        named += (*self.additional_special_tokens, *self.own_tokens.values())
        found = {token.content: token for token in named if isinstance(token, Token)}
        return found | {token.content: token for token in self.added_tokens_decoder.values()}


def text_of(token: str | Token) -> str:
    """Return the text of a token."""
    return token if isinstance(token, str) else token.content


def read_settings(directory: Path) -> Settings:
    """Read the settings of a directory; ValueError says which file is wrong, and how.

    Settings that list the added tokens by id are all there is to transformers; else the older files
    count, before what the settings say.
    """
    content = _read(directory / CONFIG_NAME)
    is_old = "added_tokens_decoder" not in content
    if is_old:
        content |= _read(directory / SPECIAL_NAME)
    # A token that is null is not that of its class.
    known = {name: v for name, v in content.items() if v is not None or name in _NAMES}
    # transformers 5 has a list, or names, of what were additional special tokens.
    extra = known.pop("extra_special_tokens", None)
    if isinstance(extra, list) and extra:
        known["additional_special_tokens"] = extra
    flat = {n: v for n, v in known.items() if n.endswith("_token") and isinstance(v, str | dict)}
    tables = (known.get("model_specific_special_tokens"), flat, extra)
    own = {name: v for one in tables if isinstance(one, dict) for name, v in one.items()}
    known["own_tokens"] = {name: v for name, v in own.items() if name not in _NAMES}
    try:
        settings = Settings.model_validate(known)
        return _with_older(settings, _read(directory / ADDED_NAME)) if is_old else settings
    except ValidationError as error:
        raise ValueError(problems_of(error, CONFIG_NAME)) from error


def _with_older(settings: Settings, ids: Mapping[str, object]) -> Settings:
    """Return the settings with the tokens of `added_tokens.json`: special if they are named."""
    named = {text_of(one) for one in settings.additional_special_tokens}
    named.update(settings.named_tokens({}).values())
    found = {
        i: ListedToken(content=text, special=text in named, normalized=False)
        for text, i in TypeAdapter(dict[str, int]).validate_python(ids).items()
    }
    return settings.model_copy(update={"added_tokens_decoder": found, "is_old": True})


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return parse_object(read_bounded(path, _MAX_BYTES))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
