"""Notes for the record of a call, made of what engines say."""

from __future__ import annotations

from engine.requests.events import GenerationEvent, RequestFinished, SequenceFinished, Timing, Usage
from server.wire.work_pb2 import Record


def note(record: Record, event: GenerationEvent) -> None:
    """Note an end, of a sequence or of an input."""
    match event:
        case SequenceFinished():
            record.finish_reasons.append(event.reason.value)
        case RequestFinished():
            noted = sum(part.num_sequences for part in record.parts)
            answered(record, event.usage, event.timing, len(record.finish_reasons) - noted)


def answered(record: Record, usage: Usage, timing: Timing, num_sequences: int = 1) -> None:
    """Note that an input is answered."""
    record.parts.add(
        input_tokens=usage.input_tokens,
        cached_input_tokens=usage.cached_input_tokens,
        output_tokens=usage.output_tokens,
        num_sequences=num_sequences,
        queue=timing.queue,
        prefill=timing.prefill,
        decode=timing.decode,
        time_to_first_token=timing.time_to_first_token,
    )
