"""Turns the items of a prediction request into model inputs, or names everything wrong in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig, RequestLimits
from engine.errors import FieldViolation, InvalidRequest
from engine.one_pass.image import load_image
from engine.one_pass.prediction import PredictionItem
from engine.package.manifest import Contract, EncodingContract, ImageContract
from engine.requests.checks import raise_if_any
from engine.requests.token_ids import check_token_ids
from engine.text.tokenizer import Encoding, Tokenizer
from engine.wording import listed, shortened

_PIXELS_PER_TOKEN = 16 * 16


@dataclass(frozen=True, eq=False)
class EncodedItem:
    """An item, or a window of one, as the model reads it; equal lengths can be run together."""

    values: NDArray[Any]  # token ids (length,), or pixel values
    length: int  # tokens; 0 for an image
    cost: int  # tokens it counts as in budgets
    token_types: NDArray[Any] | None = None  # (length,), where the graph takes them
    spans: tuple[tuple[int, int], ...] = ()  # labeller: bytes of each token that is kept
    kept: tuple[int, ...] | None = None  # labeller: places of the tokens that are not special
    continues: tuple[bool, ...] = ()  # labeller: which of them go on with a word
    place: int = 0  # among the items of the request


class ItemEncoder:
    """Checks and encodes items for one model; `encode` raises InvalidRequest for all at once."""

    def __init__(self, model: Contract, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self._task = model.task
        self._text = model.encoding
        self._image = model.image
        self._tokenizer = tokenizer
        self._limits = config.limits
        self._max_window_tokens = config.max_waiting_tokens  # per request

    def encode(self, items: Sequence[PredictionItem], path: str) -> list[EncodedItem]:
        """Return what the model reads, in order; `path` is where the items stand in the request."""
        self.check_count(items, path)
        encoded: list[EncodedItem] = []
        violations: dict[FieldViolation, None] = {}  # that of a stride is one for all items
        num_tokens, most = 0, self._max_window_tokens
        for i, item in enumerate(items):
            try:
                found = self._encode_item(item, f"{path}[{i}]")
            except InvalidRequest as error:
                violations.update(dict.fromkeys(error.violations))
                continue
            encoded += [replace(part, place=i) for part in found]
            num_tokens += sum(part.cost for part in found) if len(found) > 1 else 0
            if num_tokens > most:
                what = f"{num_tokens} tokens in windows are more than {most}"
                raise _invalid(path, f"{what}; send fewer texts at once, or a smaller stride")
        raise_if_any([*violations])
        return encoded

    def check_count(self, items: Sequence[PredictionItem], path: str) -> None:
        """Raise InvalidRequest unless there is a fair number of items."""
        if not items:
            raise _invalid(path, "no item is given; give at least one")
        if len(items) > self._limits.max_inputs:
            raise _invalid(
                path,
                f"{len(items)} items are more than {self._limits.max_inputs}; send more requests",
            )

    def _encode_item(self, item: PredictionItem, path: str) -> list[EncodedItem]:
        if item.prompt_name and not isinstance(item.content, str):
            raise _invalid("prompt_name", "a prompt stands in front of a text, and there is none")
        if self._image is not None:
            return [_encode_image(item, self._image, path, self._limits)]
        assert self._text is not None and self._tokenizer is not None
        if isinstance(item.content, bytes):
            raise _invalid(f"{path}.image", "this model takes text, not images; give a text")
        if isinstance(item.content, str):
            return self._encode_text(item.content, item, self._text, path)
        return [self._encode_ids(item.content, item.text_pair, self._text, path)]

    def _encode_text(
        self, text: str, item: PredictionItem, contract: EncodingContract, path: str
    ) -> list[EncodedItem]:
        pair, tokenizer = item.text_pair, self._tokenizer
        assert tokenizer is not None
        if pair is not None and self._task == "label":
            raise _invalid(f"{path}.text_pair", "a labeller takes one text; leave it out")
        if item.truncation is not None:
            if item.stride is not None:
                what = "windows keep the whole text, and truncation cuts it"
                raise _invalid("stride", f"{what}; give one of the two")
            tokenizer = tokenizer.cutting(contract.max_len, item.truncation)
        found = tokenizer.encode_with_offsets(_prompt(item.prompt_name, contract) + text, pair)
        if not found.ids:  # a blank text has those of special tokens, if its model puts any there
            raise _invalid(f"{path}.text", f"{text[:40]!r} has no token of this model; give words")
        types = contract.num_token_types
        if types and max(found.token_types) >= types:
            raise _invalid(
                f"{path}.text_pair", "this model takes one text, not a pair; leave it out"
            )
        parts: Iterable[tuple[Encoding, Sequence[int]]]
        if item.stride is not None:
            parts = self._windows(found, item.stride, contract.max_len, path)
        else:
            way_out = "shorten or split it, or ask with truncate for a part of it"
            way_out += ", with stride for all of it" if self._task == "label" else ""
            _check_length(len(found.ids), contract.max_len, f"{path}.text", way_out)
            parts = [(found, [i for i, special in enumerate(found.special) if not special])]
        return [
            EncodedItem(
                values=np.array(part.ids),
                length=len(part.ids),
                cost=len(part.ids),
                token_types=_types(part.token_types, contract),
                spans=tuple(part.offsets[i] for i in kept),
                kept=tuple(kept) if self._task == "label" else None,
                continues=tuple(part.continues[i] for i in kept),
            )
            for part, kept in parts
        ]

    def _windows(
        self, text: Encoding, stride: int, max_len: int, path: str
    ) -> Iterator[tuple[Encoding, Sequence[int]]]:
        """Yield the windows of a text, one if it fits, and the places that each answers for.

        A token that neighbours share is answered for by the window in which it stands farther from
        the edge.
        """
        num_tokens = text.special.count(False)
        room = max_len - len(text.ids) + num_tokens
        if not 0 <= stride < room:
            what = f"windows hold {room} tokens of a text and share fewer"
            raise _invalid("stride", f"{stride} is outside 0 to {room - 1}; {what}")
        starts = range(0, max(1, num_tokens - stride), room - stride)
        if len(starts) * max_len > self._max_window_tokens and len(starts) > 1:
            most = f"more than {self._max_window_tokens} tokens"
            what = f"{len(starts)} windows of {max_len} tokens are {most}"
            raise _invalid(f"{path}.text", f"{what}; split it, or ask for a smaller stride")
        before = (*text.special, False).index(False)  # special tokens
        behind = before + num_tokens
        half = (stride + 1) // 2
        for start in starts:
            first = half if start else 0
            last = num_tokens - start if start == starts[-1] else starts.step + half
            at, end = before + start, min(before + start + room, behind)
            parts = {
                name: values[:before] + values[at:end] + values[behind:]
                for name, values in vars(text).items()
            }
            yield Encoding(**parts), range(before + first, before + last)

    def _encode_ids(
        self, ids: tuple[int, ...], pair: str | None, contract: EncodingContract, path: str
    ) -> EncodedItem:
        if pair is not None:
            raise _invalid(f"{path}.text_pair", "it goes with a text, not with token ids")
        if self._task == "label":
            raise _invalid(f"{path}.tokens", "labels are placed in a text; give the text, not ids")
        if not ids:
            raise _invalid(f"{path}.tokens.ids", "no token id is given; give at least one")
        _check_length(len(ids), contract.max_len, f"{path}.tokens.ids")
        raise_if_any(
            check_token_ids(ids, contract.vocab_size, lambda i, _: f"{path}.tokens.ids[{i}]")
        )
        types = _types((0,) * len(ids), contract)
        return EncodedItem(np.array(ids), len(ids), len(ids), types)


def _prompt(name: str | None, contract: EncodingContract) -> str:
    if not name:
        return contract.prompts.get(contract.default_prompt or "", "") if name is None else ""
    if name not in contract.prompts:
        known = f"it has {listed(contract.prompts)}" if contract.prompts else "leave it out"
        raise _invalid("prompt_name", f"{shortened(name)} is no prompt of this model; {known}")
    return contract.prompts[name]


def _types(types: tuple[int, ...], contract: EncodingContract) -> NDArray[Any] | None:
    """Return the types of tokens for a graph that takes them, None for one that does not."""
    return np.array(types) if contract.num_token_types > 1 else None


def _encode_image(
    item: PredictionItem, contract: ImageContract, path: str, limits: RequestLimits
) -> EncodedItem:
    if not isinstance(item.content, bytes):
        field = "text" if isinstance(item.content, str) else "tokens"
        raise _invalid(f"{path}.{field}", "this model takes images; give a PNG or JPEG")
    if item.text_pair is not None:
        raise _invalid(f"{path}.text_pair", "an image has no second text; leave it out")
    pixels = load_image(item.content, contract, path=f"{path}.image", limits=limits)
    return EncodedItem(pixels, length=0, cost=max(1, contract.size**2 // _PIXELS_PER_TOKEN))


def _check_length(given: int, allowed: int, path: str, way_out: str = "shorten it") -> None:
    if given > allowed:
        what = f"{given} tokens are more than {allowed}, the model's limit"
        raise _invalid(path, f"{what}; {way_out}")


def _invalid(path: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, description)])
