"""Reads the generation options of a source: which tokens end, start, or are never written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from engine.errors import CheckpointError
from engine.wording import listed, shortened
from exporter.huggingface.family import SpecialTokens

# A model that was trained to write them would need requests that ask for them; these values change
# nothing. Length limits are not here (requests set them), nor is forced_eos_token_id: it replaces
# the last token of an answer that is cut short, which ends with the reason LENGTH here.
_NEUTRAL: Mapping[str, object] = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
}


class GenerationOptions(BaseModel):
    """`generation_config.json`; older sources have its options in `config.json`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    bad_words_ids: list[list[int]] | None = None  # sequences never to be written
    suppress_tokens: list[int] | None = None  # tokens never to be written

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Return the tokens that are never written, the end aside."""
        words = self.bad_words_ids or []
        single = {word[0] for word in words if len(word) == 1 and word[0] not in self._eos()}
        return tuple(sorted(single.union(self.suppress_tokens or [])))

    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens; CheckpointError if several tokens end a sequence."""
        eos = self._eos()
        if len(eos) > 1:
            raise CheckpointError(
                f"eos_token_id is {shortened(eos)}; supported: one id. Keep one of them in "
                "generation_config.json and give the others as stop tokens in requests"
            )
        return SpecialTokens(
            eos=eos[0] if eos else None,
            pad=self.pad_token_id,
            decoder_start=self.decoder_start_token_id,
        )

    def notes(self) -> list[str]:
        """Say which options are not taken over, because requests decide or the engine has none."""
        given: dict[str, Any] = self.model_extra or {}
        found = [
            f"{name} {shortened(given[name])}"
            for name, neutral in _NEUTRAL.items()
            if given.get(name) not in (None, neutral)
        ]
        words = [word for word in self.bad_words_ids or [] if len(word) > 1]
        found += [f"bad_words_ids {listed(words)}"] if words else []
        return [f"generation option {option} is not taken over" for option in found]

    def _eos(self) -> list[int]:
        if self.eos_token_id is None:
            return []
        return self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]


def merge_options(config: dict[str, Any], generation: dict[str, Any] | None) -> GenerationOptions:
    """Return the options of `generation_config.json`, or of `config.json` where it is absent.

    Special tokens that the former does not name come from the latter.
    """
    options = config if generation is None else generation
    fallback = {
        name: config[name]
        for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id")
        if options.get(name) is None and name in config
    }
    return GenerationOptions.model_validate({**options, **fallback})
