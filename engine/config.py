"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from engine.errors import ConfigError

Device = Literal["cpu", "cuda"]

DEFAULT_NUM_SEQS = 32
MOST_CHOSEN_SEQS = 256  # more are to be asked for: an empty row of a device costs what others do

# Limits of what every request has; the others forbid an option where they are 0.
_AT_LEAST_ONE = frozenset({"max_num_outputs", "max_inputs", "max_image_bytes", "max_image_pixels"})


@dataclass(frozen=True)
class RequestLimits:
    """The largest values a request may ask for."""

    max_num_outputs: int = 8
    max_best_of: int = 16
    max_beam_width: int = 16
    max_logprobs: int = 20
    max_logit_biases: int = 1024
    max_banned_tokens: int = 1024
    max_forced_tokens: int = 64  # that an output begins with
    max_constraint_chars: int = 65536  # all its texts together
    max_choices: int = 256
    max_stop_strings: int = 16
    max_stop_string_chars: int = 256
    max_stop_token_ids: int = 64
    max_inputs: int = 64
    max_image_bytes: int = 10 << 20
    max_image_pixels: int = 1 << 24  # a small file can hold a huge image; as RGB 48 MiB

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            least = int(limit.name in _AT_LEAST_ONE)
            if value < least:
                raise ConfigError(f"{limit.name} ({value}) must be at least {least}")

    @property
    def most_sequences(self) -> int:
        """The most sequences that may run for one prompt."""
        return max(self.max_num_outputs, self.max_best_of, self.max_beam_width)


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine takes on at once."""

    # Sequences in the running batch = slots of the cache; 0: as many as a device has memory for.
    max_num_seqs: int = DEFAULT_NUM_SEQS
    max_num_batched_tokens: int = 1024  # tokens computed in one step, decode and prefill together
    prefill_chunk_size: int = 128  # prompts are cut at multiples of it, whatever else runs
    max_queue_size: int = 256  # requests waiting; one more is refused
    max_waiting_tokens: int = 262_144  # that waiting requests may come to cost; more are refused
    reuse_prefixes: bool = True  # compute a tenant's equal beginnings and sources once
    num_threads: int = 0  # onnxruntime's; 0: one per core
    # An engine longer in one step counts as hung, unless that is less than four times what a full
    # step took when the model was tried out; inf: never.
    max_step_seconds: float = 8.0
    device: Device | None = None  # None: what the package was made for
    # Whether a model that generates has a process for itself, beside that of the event loop; None:
    # on a GPU, which would wait for it. On a CPU both want the same cores.
    own_process: bool | None = None
    gpu_memory_utilization: float = 0.9  # share of the device's memory
    # Rows of a decode call on a device, rising: the smallest that holds the batch is taken.
    # (): one, of max_num_seqs. With several a row is no longer computed alike in every batch.
    decode_buckets: tuple[int, ...] = ()
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "prefill_chunk_size",
            "max_queue_size",
            "max_waiting_tokens",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} ({value}) must be at least 1")
        if not self.max_step_seconds > 0:
            raise ConfigError(f"max_step_seconds ({self.max_step_seconds}) must be above 0")
        if self.num_threads < 0:
            raise ConfigError(f"num_threads ({self.num_threads}) must be 0, one per core, or more")
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
        if self.max_num_seqs < 0:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) must be 1 or more, or 0: as many as there is "
                "memory for"
            )
        least = self.max_num_seqs or 1
        if self.max_num_batched_tokens < least + self.prefill_chunk_size:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs + prefill_chunk_size ({least} + "
                f"{self.prefill_chunk_size}), or a full batch would never take in a prompt"
            )

    def _check_device(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization ({self.gpu_memory_utilization}) must be above 0 and at "
                "most 1, the whole memory; 0.9 leaves room for what onnxruntime takes beside it"
            )
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
