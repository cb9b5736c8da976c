"""Compares an imported model's defaults of generation with its original's, option by option.

The original's are those of its loaded model, as `generate` takes them. Those of the checkpoint are
put into the same words, for each is to mean there what it means here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import CertificateError
from engine.package.manifest import GenerationContract
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.request import BeamEnd
from engine.wording import listed
from exporter.checkpoint import CheckpointConfig
from exporter.compare.original_texts import around
from exporter.graphs.contracts import generation_contract
from exporter.huggingface.generation import token_ids

_MOST_LIKELY = 50  # tokens that `generate` samples among, unless it is told
_SAME: Mapping[str, tuple[str, float]] = {  # our name, and the value that changes nothing
    "temperature": ("temperature", 1.0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "typical_p": ("typical_p", 1.0),
    "renormalize_logits": ("renormalize", False),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "no_repeat_ngram_size": ("no_repeat_ngram", 0),
    "encoder_no_repeat_ngram_size": ("encoder_no_repeat_ngram", 0),
}
_EARLY_STOPPING: Mapping[BeamEnd | None, bool | str] = {
    "bound": "never",
    "estimate": False,
    "enough": True,
}


class _Row(NamedTuple):
    """An option of `generate`, and its value on both sides."""

    name: str
    there: object
    here: object


def compare_options(described: CheckpointConfig, there: Any) -> int:
    """Return how many options a checkpoint has as `there`, a GenerationConfig; 0 if it has none.

    Raises CertificateError that names those that differ, and both values.
    """
    contract = generation_contract(described.model)
    found = [*_rows(described.generation, contract, there)] if contract else []
    if differ := [f"{row.name} is {_both(row)}" for row in found if row.there != row.here]:
        raise CertificateError(f"it has other defaults of generation: {listed(differ, '; ')}")
    return len(found)


def _rows(here: GenerationDefaults, contract: GenerationContract, there: Any) -> Iterator[_Row]:
    for name, (ours, neutral) in _SAME.items():
        yield _Row(name, getattr(there, name) or neutral, getattr(here, ours) or neutral)
    width = there.num_beams or 1
    samples = bool(there.do_sample) and width == 1  # an import leaves it beside beams
    usual = _MOST_LIKELY if samples else 0
    top_k = min(usual if there.top_k is None else there.top_k, contract.vocab_size)
    yield _Row("do_sample", samples, here.strategy == "sampling")
    yield _Row("top_k", top_k, here.top_k or 0)
    yield _Row("num_beams", width, here.beam if here.strategy == "beam" else 1)
    penalty = 1.0 if there.length_penalty is None else there.length_penalty
    is_power = here.length_penalty_form != "paper"
    yield _Row("length_penalty", penalty, here.length_penalty if is_power else "the paper's")
    stopping = _EARLY_STOPPING.get(here.beam_end)
    yield _Row("early_stopping", there.early_stopping or False, stopping)
    ends = [end for end in token_ids(there.eos_token_id) if end >= 0] or [*contract.eos_token_ids]
    yield _Row("eos_token_id", sorted({*ends}), sorted({*contract.eos_token_ids}))
    banned = {*map(tuple, there.bad_words_ids or ())} - {(end,) for end in ends}
    banned |= {(token,) for token in there.suppress_tokens or ()}
    ours_banned = {*here.banned_sequences, *((token,) for token in here.banned_tokens)}
    yield _Row("bad_words_ids with suppress_tokens", sorted(banned), sorted(ours_banned))
    begin = sorted({*(there.begin_suppress_tokens or ())})
    yield _Row("begin_suppress_tokens", begin, sorted({*here.begin_banned_tokens}))
    last = min(token_ids(there.forced_eos_token_id), default=None)
    yield _Row("forced_eos_token_id", last, here.forced_end)
    start = contract.decoder_start_token_id
    forced = [] if start is None else token_ids(there.forced_bos_token_id)
    yield _Row("forced_bos_token_id", forced, [*here.forced_begin])
    most, least = there.max_new_tokens, there.min_new_tokens or 0
    if start is not None:  # which counts in both lengths; beside a prompt they count that too
        first = there.decoder_start_token_id
        yield _Row("decoder_start_token_id", start if first is None else first, start)
        if most is None and there.max_length is not None:
            most = there.max_length - 1
        least = max(least, (there.min_length or 0) - 1)
    yield _Row("max_new_tokens or max_length", most, here.max_new_tokens)
    yield _Row("min_new_tokens or min_length", least, here.min_new_tokens or 0)


def _both(row: _Row) -> str:
    if isinstance(row.here, Sequence) and isinstance(row.there, list):
        return around(row.here, row.there)
    return f"{row.here!r}, there {row.there!r}"
