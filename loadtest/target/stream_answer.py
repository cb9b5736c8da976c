"""Puts the messages of a stream together to an answer that can be compared bit for bit."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import cast

from google.protobuf.message import Message
from pydantic import JsonValue
from tokenweir.received import enum_name
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from loadtest.work.ask import Answer

FINISH_REASON = common_pb2.FinishReason.DESCRIPTOR


class StreamAnswer:
    """Takes the messages as they come, however tokens are spread over them."""

    def __init__(self) -> None:
        self._text: dict[int, str] = defaultdict(str)
        self._ids: dict[int, list[int]] = defaultdict(list)
        self._rest: dict[int, list[Message]] = defaultdict(list)  # parts that few ask for
        self._ends: dict[int, pb.GenerateStreamResponse.Finished] = {}

    def add(self, message: pb.GenerateStreamResponse) -> None:
        """Take a message; deltas and ends of sequences count."""
        delta = message.delta
        if message.HasField("finished"):
            self._ends[message.finished.index] = message.finished
        elif message.HasField("delta"):
            self._text[delta.index] += delta.text
            self._ids[delta.index].extend(delta.tokens.ids)
            self._rest[delta.index].extend(delta.logprobs)

    def answer(self) -> Answer:
        """Return the first sequence's fields, and the others' under "others" if there are any."""
        first, *others = [self._sequence(index) for index in sorted(self._ends)]
        return {**first, "others": cast(JsonValue, others)} if others else first

    def _sequence(self, index: int) -> dict[str, JsonValue]:
        end = self._ends[index]
        whole = end.sequence  # set by beam search and best_of, which stream nothing
        rest = [*self._rest[index], *whole.logprobs]
        found: dict[str, JsonValue] = {
            "text": self._text[index] + whole.text,
            "token_ids": [*self._ids[index], *whole.tokens.ids],
            "finish_reason": enum_name(FINISH_REASON, end.finish_reason or whole.finish_reason),
            "sum_logprob": end.sum_logprob or whole.sum_logprob,
            "score": whole.score,
        }
        if rest or whole.alignment:
            found["details"] = digest([*rest, pb.Sequence(alignment=whole.alignment)])
        return found


def digest(messages: Iterable[Message]) -> str:
    """Return a digest of messages: equal for equal bits of all their numbers."""
    sha = hashlib.sha256()
    for message in messages:
        sha.update(message.SerializeToString(deterministic=True))
    return sha.hexdigest()
