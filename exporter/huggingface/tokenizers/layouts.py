"""The families of SentencePiece tokenizers: their ids, and the tokens that they put around a text.

Each has the pieces of its model at other ids: as they are (T5, Llama, Gemma), one further on behind
`<s> <pad> </s> <unk>` (XLM-R, mBART, NLLB, as fairseq had them), 103 further on (Pegasus), or where
`vocab.json` has them (M2M-100, Marian).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.wording import listed
from exporter.huggingface.tokenizers import languages
from exporter.huggingface.tokenizers.sentencepiece_model import Piece, Prefix, SentencePieceModel
from exporter.huggingface.tokenizers.settings import CONFIG_NAME, Settings

_NLLB_CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")


@dataclass(frozen=True)
class Layout:
    """Where the pieces of a model stand, and what a text gets around it."""

    vocabulary: Sequence[Piece]  # by id
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    pair: Sequence[str] | None = None  # of two texts; None: as of one
    prefix: Prefix | None = None  # see `convert`; None: as the model says
    strips_mask: bool = False  # the mask takes the space in front of it
    notes: Sequence[str] = ()  # what a person should know


@dataclass(frozen=True)
class Given:
    """What an original says."""

    model: SentencePieceModel
    settings: Settings
    room: int  # how many ids its model has


def t5(given: Given) -> Layout:
    """Pieces, then `<extra_id_99>` down to `<extra_id_0>`."""
    pieces = given.model.pieces
    num_extra = given.settings.extra_ids
    if num_extra is None:
        num_extra = 100 if given.room >= len(pieces) + 100 else 0
    if any(piece.text == "<extra_id_0>" for piece in pieces):
        num_extra = 0
    extra = [Piece.control(f"<extra_id_{i}>") for i in reversed(range(min(num_extra, given.room)))]
    return Layout([*pieces, *extra])


def llama(given: Given) -> Layout:
    """Pieces; a text begins with `<s>`, and may end with `</s>`.

    Where `legacy` is not said, as in files that are older than it, it was the only way.
    """
    prefix: Prefix | None = None
    if given.settings.add_prefix_space is False:
        prefix = "never"
    elif given.settings.legacy is False and given.model.begins_with_space:
        prefix = "first"
    before = (
        [given.settings.text_of("bos_token", "<s>")]
        if given.settings.add_bos_token is not False
        else []
    )
    after = [given.settings.text_of("eos_token", "</s>")] if given.settings.add_eos_token else []
    return Layout(
        given.model.pieces,
        before,
        after,
        pair=[*before, "$A", *after, *before, "$B", *after],
        prefix=prefix,
        notes=_about_llama(given.settings),
    )


def _about_llama(settings: Settings) -> list[str]:
    """Say what versions of transformers read otherwise, of files older than what would say it."""
    unsaid = [name for name in ("add_bos_token", "legacy") if getattr(settings, name) is None]
    if not unsaid:
        return []
    return [
        f"{CONFIG_NAME} does not say {listed(unsaid)}: texts begin with <s>, and what follows an "
        "added token with a space, as in transformers 4; 5 takes both for false"
    ]


def gemma(given: Given) -> Layout:
    """Pieces; a text begins with `<bos>`, and with no space of its own."""
    before = (
        [given.settings.text_of("bos_token", "<bos>")]
        if given.settings.add_bos_token is not False
        else []
    )
    after = [given.settings.text_of("eos_token", "<eos>")] if given.settings.add_eos_token else []
    return Layout(
        given.model.pieces,
        before,
        after,
        pair=[*before, "$A", *after, *before, "$B", *after],
        prefix="never",
    )


def xlm_roberta(given: Given) -> Layout:
    """As in fairseq, then `<mask>`."""
    return Layout(_fairseq(given.model, ["<mask>"]), strips_mask=True)


def camembert(given: Given) -> Layout:
    """Three tokens that nothing uses, `<pad>` and `<unk>` among them, the pieces, `<mask>`."""
    begin = [*map(Piece.control, ("<s>NOTUSED", "<pad>", "</s>NOTUSED")), Piece.unknown("<unk>")]
    pieces = [Piece.control("<unk>NOTUSED"), *given.model.pieces[1:], Piece.control("<mask>")]
    return replace(xlm_roberta(given), vocabulary=[*begin, *pieces])


def mbart(given: Given) -> Layout:
    """As in fairseq, then the languages and `<mask>`; a text ends with `</s>`, its language."""
    return _translating(given, languages.MBART)


def mbart50(given: Given) -> Layout:
    """As mBART with more languages; a text begins with its language and ends with `</s>`."""
    return _translating(given, languages.MBART50)


def nllb(given: Given) -> Layout:
    """As in fairseq, then the languages and `<mask>`; the language stands where it was trained."""
    return _translating(given, nllb_languages(given.settings))


def pegasus(given: Given) -> Layout:
    """`<pad> </s>`, two masks, `<unk_2>` on, then the pieces from the third."""
    offset = 103 if given.settings.offset is None else given.settings.offset
    special = {"pad_token": "<pad>", "eos_token": "</s>"}
    names = [given.settings.text_of(*item) for item in special.items()]
    if offset:
        names.append(given.settings.text_of("mask_token_sent", "<mask_1>"))
        names.append(given.settings.text_of("mask_token", "<mask_2>"))
        names += [f"<unk_{i}>" for i in range(2, min(offset, given.room))]
    return Layout([*map(Piece.control, names), *given.model.pieces[2:]])


def nllb_languages(settings: Settings) -> Sequence[str]:
    """Return the tokens of the languages: those that the original lists, else those of NLLB-200."""
    listed = [text for text in settings.listed() if _NLLB_CODE.fullmatch(text)]
    return listed or languages.NLLB


def _translating(given: Given, codes: Iterable[str]) -> Layout:
    """Return a layout whose language is put around a text when it is known: see `translation`."""
    return Layout(_fairseq(given.model, [*codes, "<mask>"]), strips_mask=True)


def _fairseq(model: SentencePieceModel, more: Iterable[str]) -> list[Piece]:
    first = [piece.text for piece in model.pieces[:3]]
    if first != ["<unk>", "<s>", "</s>"]:
        raise ValueError(f"its first pieces are {first}, not <unk>, <s> and </s>")
    begin = [*map(Piece.control, ("<s>", "<pad>", "</s>")), Piece.unknown("<unk>")]
    return [*begin, *model.pieces[3:], *map(Piece.control, more)]


def by_vocabulary(
    model: SentencePieceModel, ids: Mapping[str, int], controls: Iterable[str]
) -> list[Piece]:
    """Return the pieces at the ids of a `vocab.json`; what the model has not is in no text.

    `controls` are found in one where a person types them.
    """
    texts = {place: text for text, place in ids.items()}
    if len(texts) != len(ids) or sorted(texts) != list(range(len(ids))):
        raise ValueError("its ids are not 0, 1, 2 and so on, each once")
    known = {piece.text: piece for piece in model.pieces if not piece.is_special}
    found = [known.get(texts[i]) or Piece.unused(texts[i]) for i in range(len(ids))]
    for text in controls:
        if text in ids:
            found[ids[text]] = Piece.control(text)
    if "<unk>" not in ids:
        raise ValueError("it has no <unk>")
    found[ids["<unk>"]] = Piece.unknown("<unk>")
    return found


SENTENCEPIECE: Mapping[str, Callable[[Given], Layout]] = {  # by the class of transformers
    "CamembertTokenizer": camembert,
    "GemmaTokenizer": gemma,
    "LlamaTokenizer": llama,
    "MBart50Tokenizer": mbart50,
    "MBartTokenizer": mbart,
    "MT5Tokenizer": t5,
    "NllbTokenizer": nllb,
    "PegasusTokenizer": pegasus,
    "T5Tokenizer": t5,
    "XLMRobertaTokenizer": xlm_roberta,
}
