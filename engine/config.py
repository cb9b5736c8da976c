"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from engine.errors import ConfigError
from engine.setting import check_bounds, setting

Device = Literal["cpu", "cuda"]

DEFAULT_NUM_SEQS = 32
MOST_CHOSEN_SEQS = 256  # more are to be asked for: an empty row of a device costs what others do


@dataclass(frozen=True)
class RequestLimits:
    """The largest values a request may ask for; a limit of 0 forbids the option."""

    max_num_outputs: int = setting(8, "Outputs of a prompt.", ge=1)
    max_best_of: int = setting(16, "Samples of a prompt, of which the best are returned.", ge=0)
    max_beam_width: int = setting(16, "Beams of a prompt.", ge=0)
    max_logprobs: int = setting(20, "Alternatives of a token.", ge=0)
    max_logit_biases: int = setting(1024, "Tokens with a bias.", ge=0)
    max_banned_tokens: int = setting(1024, "Tokens that may not be generated.", ge=0)
    max_forced_tokens: int = setting(64, "Tokens that an output begins with.", ge=0)
    max_constraint_chars: int = setting(65536, "Characters of a constraint, all its texts.", ge=0)
    max_choices: int = setting(256, "Texts to choose from.", ge=0)
    max_stop_strings: int = setting(16, "Texts that end an output.", ge=0)
    max_stop_string_chars: int = setting(256, "Characters of such a text.", ge=0)
    max_stop_token_ids: int = setting(64, "Tokens that end an output.", ge=0)
    max_inputs: int = setting(64, "Inputs of a call.", ge=1)
    max_image_bytes: int = setting(10 << 20, "Bytes of an image.", ge=1)
    max_image_pixels: int = setting(  # as RGB 48 MiB
        1 << 24, "Pixels of an image; a small file can hold a huge one.", ge=1
    )

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def most_sequences(self) -> int:
        """The most sequences that may run for one prompt."""
        return max(self.max_num_outputs, self.max_best_of, self.max_beam_width)


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine takes on at once."""

    # Also the slots of the cache.
    max_num_seqs: int = setting(
        DEFAULT_NUM_SEQS,
        "Sequences decoded at once, per model; 0: as many as a device has memory for.",
        ge=0,
    )
    max_num_batched_tokens: int = setting(
        1024, "Tokens computed in one step, decode and prefill together.", ge=1
    )
    prefill_chunk_size: int = setting(
        128, "Prompts are cut at multiples of it, whatever else runs.", ge=1
    )
    max_queue_size: int = setting(256, "Requests that wait; one more is refused.", ge=1)
    max_waiting_tokens: int = setting(
        262_144, "Tokens that waiting requests may cost together; more are refused.", ge=1
    )
    reuse_prefixes: bool = setting(
        True, "Compute equal beginnings and sources of a tenant's requests once."
    )
    num_threads: int = setting(
        0, "Threads of each worker; 0: its share of the cores.", option="--threads", ge=0, le=1024
    )
    max_step_seconds: float = setting(
        8.0,
        "Time of a step after which a worker counts as hung and is replaced, but at least four "
        "times what a full step took at the start. inf: never.",
        option="--max-step-seconds",
        metavar="SECONDS",
        gt=0,
    )
    device: Device | None = setting(
        None,
        "Device of the models.",
        option="--device",
        unset="what their package was made for",
    )
    # On a GPU the event loop would wait for the model. On a CPU both want the same cores.
    own_process: bool | None = setting(
        None,
        "Run each model that generates in a process of its own.",
        unset="on a GPU only",
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Share of a GPU's memory; workers and models on one GPU divide it.",
        option="--gpu-memory-utilization",
        metavar="SHARE",
        gt=0,
        le=1,
    )
    # The smallest that holds the batch is taken. (): one, of max_num_seqs.
    decode_buckets: tuple[int, ...] = setting(
        (),
        "Rows of a decode call on a GPU, rising; with several, answers may depend on the batch.",
        option="--decode-buckets",
        unset="one number, all that a worker decodes at once",
    )
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_num_seqs()
        self._check_device()

    @property
    def most_num_seqs(self) -> int:
        """The most sequences at once: those asked for, or the most that the engine would choose."""
        most = min(MOST_CHOSEN_SEQS, self.max_num_batched_tokens - self.prefill_chunk_size)
        return self.max_num_seqs or most

    def most_items(self, num_tokens: int) -> int:
        """Return how many items of a one-pass model run at once that cost so many tokens each."""
        return max(1, min(self.max_num_seqs, self.max_num_batched_tokens // num_tokens))

    def with_num_seqs(self, num_seqs: int) -> EngineConfig:
        """Return the settings with so many sequences, unless a number was asked for."""
        return self if self.max_num_seqs else replace(self, max_num_seqs=num_seqs)

    def with_buckets(self, buckets: tuple[int, ...]) -> EngineConfig:
        """Return the settings for decode calls of these numbers of rows; for none, as they are."""
        if not buckets:
            return self
        several = buckets if len(buckets) > 1 else ()
        return replace(self, max_num_seqs=buckets[-1], decode_buckets=several)

    def device_for(self, target: Device) -> Device:
        """Return where a package for this target runs; ConfigError if it cannot be there."""
        if self.device == "cuda" and target == "cpu":
            raise ConfigError(
                "device (cuda) cannot run a package for target cpu; export it with "
                "`tokenweir export --target cuda`, or leave the device out"
            )
        return self.device or target

    def has_own_process(self, device: Device) -> bool:
        """Return whether a model that generates on this device has a process for itself."""
        return device == "cuda" if self.own_process is None else self.own_process

    def _check_num_seqs(self) -> None:
        least = self.max_num_seqs or 1
        if self.max_num_batched_tokens < least + self.prefill_chunk_size:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs + prefill_chunk_size ({least} + "
                f"{self.prefill_chunk_size}), or a full batch would never take in a prompt"
            )

    def _check_device(self) -> None:
        buckets = self.decode_buckets
        if any(low >= high for low, high in zip((0, *buckets), buckets, strict=False)):
            raise ConfigError(
                f"decode_buckets {buckets} must be 1 or more and rise, such as (1, 8, 32)"
            )
        if buckets and buckets[-1] != self.max_num_seqs:
            raise ConfigError(
                f"decode_buckets {buckets} must end with max_num_seqs ({self.max_num_seqs}): "
                f"set that to {buckets[-1]}, or end them with it"
            )
