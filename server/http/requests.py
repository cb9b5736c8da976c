"""What OpenAI's requests say, in the options of our client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator
from tokenweir import StreamOptions

# Nothing of an answer depends on these.
_HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {  # values that say the same as nothing
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools
    "functions": ([],),
    "modalities": (["text"],),
    "use_beam_search": (False,),
}
_RENAMED: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_outputs",
}
_NOT_TAKEN = frozenset(  # those of the door, of who calls, and those that have a name above
    {"request_id", "timeout", "tenant", "priority", "stop_strings", *_RENAMED.values()}
)
# Our client's own options, which OpenAI does not have, under their own names.
OWN_OPTIONS = frozenset(StreamOptions.__annotations__) - _NOT_TAKEN
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")

Tokens = Annotated[list[int], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1)]
Prompts = str | Tokens | Texts | Annotated[list[Tokens], Field(min_length=1)]


class OpenAiRequest(BaseModel):
    """A request; `own` are the options that only our server knows."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str

    @model_validator(mode="after")
    def _refuse_unknown(self) -> OpenAiRequest:
        for name, value in (self.model_extra or {}).items():
            is_neutral = value is None or value in _NEUTRAL.get(name, ())
            if not (name in _HARMLESS or name in self._own_names() or is_neutral):
                raise ValueError(f"{name} is not an option of this server; leave it out")
        return self

    @property
    def own(self) -> dict[str, Any]:
        """The options of ours that were given."""
        extra = self.model_extra or {}
        return {name: extra[name] for name in self._own_names() if extra.get(name) is not None}

    def _own_names(self) -> frozenset[str]:
        return frozenset()


class StreamDetails(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    include_obfuscation: bool | None = None  # nothing is added here, which may be asked for


class GenerationRequest(OpenAiRequest):
    """What completions have in common."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamDetails | None = None

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def options(self) -> StreamOptions:
        """The options of our client; what is left out has the model's default.

        Raises ValueError for a bias whose token is not a number.
        """
        typed = self.model_dump(exclude={"model", "stream", "stream_options", *self._apart()})
        said = {
            _RENAMED.get(name, name): typed[name]
            for name in type(self).model_fields
            if typed.get(name) is not None
        } | self.own
        if self.logit_bias is not None:
            said["logit_bias"] = {int(token): value for token, value in self.logit_bias.items()}
        if self.temperature == 0:  # the most likely token, whatever else is said of sampling
            said = {name: said[name] for name in said if name not in _OF_SAMPLING}
            said.setdefault("strategy", "greedy")
        return cast(StreamOptions, said)

    def _apart(self) -> set[str]:
        """Return the fields that are not options."""
        return set()

    def _own_names(self) -> frozenset[str]:
        return OWN_OPTIONS


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Prompts
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more."""
        return listed(self.prompt)

    @property
    def options(self) -> StreamOptions:
        """As the base's; `best_of` that chooses nothing is left out."""
        said = super().options
        if self.best_of == (self.n or 1):
            said.pop("best_of", None)
        return said

    def _apart(self) -> set[str]:
        return {"prompt"}


def listed(prompts: Prompts) -> list[str | list[int]]:
    """Return one prompt or several as several."""
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)
