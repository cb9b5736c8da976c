"""The record of one call that runs a model: for the log, the metrics and its trace."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from engine.requests.events import GenerationEvent, RequestFinished, SequenceFinished, Timing, Usage

OK = "OK"


@dataclass(frozen=True, slots=True)
class Part:
    """One input of a call, answered."""

    usage: Usage
    timing: Timing
    num_sequences: int = 1

    @property
    def seconds_per_token(self) -> float | None:
        """Return the mean time between two tokens of a sequence; None without a second one."""
        num_gaps = self.usage.output_tokens / self.num_sequences - 1
        return self.timing.decode / num_gaps if num_gaps > 0 else None


@dataclass(slots=True, eq=False)
class CallRecord:
    """Written by what answers the call, read once it has ended."""

    method: str  # without its service
    arrived: float  # seconds since 1970
    traceparent: str = ""
    request_id: str = ""
    model: str = ""  # that is served here
    tenant: str = ""
    waited: float | None = None  # seconds at the gateway before it arrived; None: it has told none
    parts: list[Part] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)  # all sequences'
    status: str = OK  # the name of a grpc.StatusCode
    reason: str = ""  # ErrorInfo's, if it has failed
    error: str = ""
    seconds: float = 0.0  # from its arrival to its end
    _num_sequences: int = 0  # the current input's

    def note(self, event: GenerationEvent) -> None:
        """Note an end, of a sequence or of an input."""
        match event:
            case SequenceFinished():
                self.finish_reasons.append(event.reason.value)
                self._num_sequences += 1
            case RequestFinished():
                self.answered(event.usage, event.timing, self._num_sequences)
                self._num_sequences = 0

    def answered(self, usage: Usage, timing: Timing, num_sequences: int = 1) -> None:
        """Note that an input is answered."""
        self.parts.append(Part(usage, timing, max(1, num_sequences)))

    @property
    def input_tokens(self) -> int:
        """Tokens of all inputs that were answered."""
        return sum(part.usage.input_tokens for part in self.parts)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(part.usage.output_tokens for part in self.parts)


_current: ContextVar[CallRecord] = ContextVar("call_record")


def current_record() -> CallRecord:
    """Return the record of the call that is being answered."""
    return _current.get()


def begin_record(record: CallRecord) -> None:
    """Let this be the record of the call that is being answered."""
    _current.set(record)
