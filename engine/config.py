"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import ConfigError
from engine.request import RequestLimits


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine takes on at once."""

    max_num_seqs: int = 32  # sequences in the running batch = slots of the cache
    max_num_batched_tokens: int = 1024  # tokens computed in one step, decode and prefill together
    prefill_chunk_size: int = 128  # prompts are cut at multiples of it, whatever else runs
    max_queue_size: int = 256  # requests waiting; one more is refused
    max_waiting_tokens: int = 262_144  # that waiting requests may come to cost; more are refused
    reuse_prefixes: bool = True  # compute a tenant's equal beginnings and sources once
    num_threads: int = 0  # of onnxruntime; 0: one per core
    max_step_seconds: float = 8.0  # an engine longer in one step counts as hung; inf: never
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
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
        if self.max_num_batched_tokens < self.max_num_seqs + self.prefill_chunk_size:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs + prefill_chunk_size ({self.max_num_seqs} + "
                f"{self.prefill_chunk_size}), or a full batch would never take in a prompt"
            )
