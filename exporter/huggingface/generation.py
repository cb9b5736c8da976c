"""Reads the generation options of an original: special tokens, and defaults of requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.options import OPTIONS
from engine.requests.request import BeamEnd
from engine.wording import listed, shortened
from exporter.huggingface.family import SpecialTokens
from exporter.huggingface.reading import reading_by_transformers
from exporter.models import TransformerConfig

Ids = int | list[int] | None

_LIKELIEST = 50  # that transformers samples among, where an original that samples says nothing
_BEAM_ENDS: Mapping[bool | str, BeamEnd] = {
    "never": "bound",
    False: "estimate",
    True: "enough",
}
# A model that was trained to need them would need requests that ask for them; these values change
# nothing.
NEUTRAL: Mapping[str, object] = {
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "penalty_alpha": None,
    "exponential_decay_length_penalty": None,
    "forced_decoder_ids": None,
    "sequence_bias": None,
    "stop_strings": None,
    "guidance_scale": 1.0,
    "constraints": None,
    "force_words_ids": None,
    "token_healing": False,
    "watermarking_config": None,
    "max_time": None,
    "dola_layers": None,
}


class GenerationOptions(BaseModel):
    """`generation_config.json`; older originals have its options in `config.json`."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    eos_token_id: Ids = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    renormalize_logits: bool | None = None  # which changes the scores of beams alone
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None  # runs of tokens never to be written
    suppress_tokens: list[int] | None = None  # tokens never to be written
    begin_suppress_tokens: list[int] | None = None
    forced_bos_token_id: Ids = None
    forced_eos_token_id: Ids = None
    max_length: int | None = None  # counts the prompt, or the start token
    max_new_tokens: int | None = None
    min_length: int | None = None  # likewise
    min_new_tokens: int | None = None

    @field_validator("eos_token_id", "pad_token_id")
    @classmethod
    def _is_none_below_zero(cls, given: Ids) -> Ids:
        """Take an id that no token has for none, as older Llamas have it."""
        return None if isinstance(given, int) and given < 0 else given

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end a sequence."""
        return token_ids(self.eos_token_id)

    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens, of several that end a sequence the first."""
        ends = self.eos_token_ids
        return SpecialTokens(
            eos=ends[0] if ends else None,
            pad=self.pad_token_id,
            decoder_start=self.decoder_start_token_id,
        )

    def defaults(self, config: TransformerConfig) -> GenerationDefaults:
        """Return what `generate` would do for a model, where a request says nothing else.

        Raises ValidationError for values that no request may have.
        """
        if not config.num_decoder_layers:
            return GenerationDefaults()
        found: dict[str, Any] = {
            option.name: value
            for option in OPTIONS
            if option.generate in GenerationOptions.model_fields
            and (value := getattr(self, option.generate)) not in (None, option.default)
        }
        width = self.num_beams or 1
        samples = bool(self.do_sample) and width == 1
        top_k = _LIKELIEST if self.top_k is None and samples else self.top_k
        words = [tuple(word) for word in self.bad_words_ids or []]
        single = {word[0] for word in words if len(word) == 1} - {*self.eos_token_ids}
        most, least, forced = self.max_new_tokens, self.min_new_tokens, list[int]()
        if config.num_encoder_layers:  # a start token counts in the limits that count all
            if most is None and self.max_length is not None:
                most = self.max_length - 1
            least = max(least or 0, (self.min_length or 0) - 1)
            forced = token_ids(self.forced_bos_token_id)
        found |= {
            "strategy": "beam" if width > 1 else "sampling" if samples else None,
            "temperature": None if self.temperature in (None, 0, 1) else self.temperature,
            "top_k": min(top_k, config.vocab_size) if top_k else None,
            "beam": width if width > 1 else None,
            "length_penalty": 1.0 if self.length_penalty is None else self.length_penalty,
            "beam_end": _BEAM_ENDS[self.early_stopping or False],
            "banned_tokens": tuple(sorted(single.union(self.suppress_tokens or []))),
            "banned_sequences": tuple(word for word in words if len(word) != 1),
            "begin_banned_tokens": tuple(self.begin_suppress_tokens or ()),
            "forced_begin": tuple(forced),
            "forced_end": min(token_ids(self.forced_eos_token_id), default=None),
            "max_new_tokens": most,
            "min_new_tokens": least or None,
        }
        return GenerationDefaults.model_validate(found)

    def notes(self, config: TransformerConfig) -> list[str]:
        """Say which options are not taken over, because requests decide or the engine has none."""
        given: dict[str, Any] = self.model_extra or {}
        found = [
            f"{name} {shortened(given[name])}"
            for name, neutral in NEUTRAL.items()
            if given.get(name) not in (None, neutral)
        ]
        if config.num_decoder_layers and not config.num_encoder_layers:
            counted = {"max_length": self.max_length, "min_length": self.min_length}
            found += [f"{name} {n}, which counts the prompt," for name, n in counted.items() if n]
            if self.forced_bos_token_id is not None:
                found.append(f"forced_bos_token_id {shortened(self.forced_bos_token_id)}")
        if self.do_sample and (self.num_beams or 1) > 1:
            found.append("do_sample beside num_beams")
        return [f"generation option {option} is not taken over" for option in found]


def read_options(
    config: Mapping[str, Any], generation: dict[str, Any] | None, path: Path
) -> GenerationOptions:
    """Return the options of `generation_config.json`, or of `config.json` where it is absent.

    Special tokens that the former, which is at `path`, does not name come from the latter.
    """
    with reading_by_transformers(path) as transformers:
        kind = transformers.GenerationConfig
        read = kind.from_model_config(dict(config)) if generation is None else kind(**generation)
        found = {**read.to_dict(), **(generation or {})}  # in which nothing has become an object
    for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if found.get(name) is None:
            found[name] = config.get(name)
    return GenerationOptions.model_validate(found)


def about_tasks(*options: Mapping[str, Any] | None) -> list[str]:
    """Say what the files of an original set for one task, or put in front of its texts."""
    found = []
    for given in options:
        tasks = (given or {}).get("task_specific_params")
        named = {"": {"prefix": (given or {}).get("prefix")}}
        named |= tasks if isinstance(tasks, dict) else {}
        for task, values in named.items():
            said = values.items() if isinstance(values, dict) else ()
            told = [f"{name} {value!r}" for name, value in said if value not in (None, "")]
            if told:
                found.append(f"{task}: {listed(told)}" if task else listed(told))
    if not found:
        return []
    return [
        "not taken over, a prefix is yours to put in front of texts, and options of a task are "
        f"yours to ask for: {listed(list(dict.fromkeys(found)), '; ')}"
    ]


def token_ids(given: Ids) -> list[int]:
    """Return what an option says that may be one token, several or none."""
    if given is None:
        return []
    return given if isinstance(given, list) else [given]
