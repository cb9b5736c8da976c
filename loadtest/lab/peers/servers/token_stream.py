"""Streams the tokens of any engine by our protocol, as far as a load test asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

# Takes a prompt and the number of tokens to come; yields some of them at a time.
Generate = Callable[[Sequence[int], int], AsyncIterator[Sequence[int]]]


async def stream(
    request: pb.GenerateStreamRequest, generate: Generate
) -> AsyncIterator[pb.GenerateStreamResponse]:
    """Yield the messages that answer a request: greedy search for a fixed number of tokens.

    Raises ValueError for a request without token ids or without that number.
    """
    asked = request.request
    prompt = [*asked.inputs[0].tokens.ids] if asked.inputs else []
    num_new = asked.stopping.max_new_tokens
    if not prompt or num_new < 1:
        raise ValueError("give token ids, and max_new_tokens of at least 1")
    number = num_out = 0
    async for token_ids in generate(prompt, num_new):
        number, num_out = number + 1, num_out + len(token_ids)
        delta = pb.GenerateStreamResponse.Delta(tokens=common_pb2.TokenIds(ids=token_ids))
        yield pb.GenerateStreamResponse(sequence_number=number, delta=delta)
    reason = common_pb2.FINISH_REASON_LENGTH
    finished = pb.GenerateStreamResponse.Finished(finish_reason=reason)
    yield pb.GenerateStreamResponse(sequence_number=number + 1, finished=finished)
    usage = common_pb2.Usage(input_tokens=len(prompt), output_tokens=num_out)
    summary = pb.GenerateStreamResponse.Summary(usage=usage)
    yield pb.GenerateStreamResponse(sequence_number=number + 2, summary=summary)
