"""Adds to a tokenizer what is looked for before a text is cut, and what stands around a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, processors

from engine.wording import shortened
from exporter.huggingface.tokenizers.settings import Settings, Token


def add_tokens(tokenizer: Tokenizer, known: Iterable[Token], settings: Settings) -> None:
    """Make `known` tokens of the vocabulary, and those that the original lists, added ones.

    New ones get the next ids. Raises ValueError where the original gives a token another id.
    """
    flags = settings.flags()
    wanted: dict[str, int | None] = {token.content: None for token in known}
    kinds = {token.content: token for token in known}
    wanted |= settings.listed()
    there = [text for text in wanted if tokenizer.token_to_id(text) is not None]
    new = [text for text in wanted if tokenizer.token_to_id(text) is None]
    new.sort(key=lambda text: (wanted[text] is None, wanted[text] or 0))
    for text in (*there, *new):
        token = flags.get(text) or kinds.get(text) or Token(content=text)
        tokenizer.add_tokens([token.added()])
        found, given = tokenizer.token_to_id(text), wanted[text]
        if given is not None and found != given:
            raise ValueError(
                f"added token {shortened(repr(text))} is to have the id {given}, and has {found}; "
                "is the vocabulary the one of this model?"
            )


def surround(tokenizer: Tokenizer, kind: str, settings: Settings) -> None:
    """Put around a text what a class of transformers puts there, whatever a `tokenizer.json` says.

    Of other classes, what there is stays. Raises ValueError for a vocabulary without such tokens.
    """
    name = settings.text_of
    match kind:
        case "BertTokenizer" | "DistilBertTokenizer":
            begin, end = name("cls_token", "[CLS]"), name("sep_token", "[SEP]")
            put_around(tokenizer, [begin], [end], pair=[begin, "$A", end, "$B:1", f"{end}:1"])
        case "RobertaTokenizer" | "BartTokenizer":
            begin, end = name("cls_token", "<s>"), name("sep_token", "</s>")
            put_around(tokenizer, [begin], [end])
            ids = tokenizer.get_vocab()
            adds_space = bool(settings.add_prefix_space)
            tokenizer.post_processor = processors.RobertaProcessing(
                (end, ids[end]), (begin, ids[begin]), add_prefix_space=adds_space
            )
        case "XLMRobertaTokenizer" | "CamembertTokenizer":
            begin, end = name("bos_token", "<s>"), name("eos_token", "</s>")
            put_around(tokenizer, [begin], [end], pair=[begin, "$A", end, end, "$B", end])
        case "T5Tokenizer" | "MT5Tokenizer":
            end = name("eos_token", "</s>")
            put_around(tokenizer, [], [end], pair=["$A", end, "$B", end])
        case "PegasusTokenizer":
            put_around(tokenizer, [], [name("eos_token", "</s>")])


def put_around(
    tokenizer: Tokenizer,
    before: Sequence[str],
    after: Sequence[str],
    *,
    pair: Sequence[str] | None = None,
) -> None:
    """Put tokens around a text; `pair` is the whole template of two texts, else both in a row."""
    names = dict.fromkeys((*before, *after))
    ids = {name: tokenizer.token_to_id(name) for name in names}
    if missing := [name for name, found in ids.items() if found is None]:
        raise ValueError(f"its vocabulary lacks {', '.join(map(repr, missing))}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=list(pair or (*before, "$A", "$B", *after)),
        special_tokens=list(ids.items()),
    )
