"""Writes the answer of a chat as one of OpenAI's responses, whole or as its events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping

from tokenweir import GeneratedSequence, Result

from server.adapters.http.errors import HttpError
from server.adapters.http.openai.chat import ChatForm
from server.adapters.http.openai.streams import Writer, event
from server.adapters.http.requests import Json

# The items that are texts: how their ids begin, and their part.
_TEXTS: Mapping[str, tuple[str, Json]] = {
    "message": ("msg_", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}),
    "reasoning": ("rs_", {"type": "reasoning_text", "text": ""}),
}
_WELL = ("stop", "tool_calls")
_INCOMPLETE = {"length": "max_output_tokens"}  # other ends keep their names


class ResponseForm(ChatForm):
    """A conversation, whose whole answer has its texts and calls in the order of a stream."""

    def choice(self, index: int, sequence: GeneratedSequence, result: Result) -> Json:
        return {"chunks": self.chunks(index, sequence, result)}


class ResponseWriter(Writer):
    """Writes one answer. Its items come one after the other: texts, and calls of functions."""

    def __init__(self, echoed: Json, response_id: str, model: str) -> None:
        """`echoed` is the part of the request that stands in the answer."""
        self._response: Json = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **echoed,
        }
        self._output: list[Json] = self._response["output"]
        self._pieces: list[str] = []  # the text of the last item so far
        self._logprobs: list[Json] = []  # its own
        self._new_logprobs: list[Json] = []  # are in no event yet
        self._is_open = False  # the last item is
        self._num_events = 0
        self._reason = ""

    def whole(self, body: Json) -> Json:
        (choice,) = body["choices"]
        self.more(body | {"choices": choice["chunks"]})
        self.end()
        return self._response

    def begin(self) -> bytes:
        named = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._response) for name in named)

    def more(self, chunk: Json) -> bytes:
        self._response["usage"] = _usage(chunk["usage"]) if "usage" in chunk else None
        found: list[bytes] = []
        for choice in chunk["choices"]:
            self._reason = choice["finish_reason"] or self._reason
            delta = choice["delta"]
            if said := delta.get("reasoning_content"):
                found += self._text("reasoning", said)
            if (said := delta.get("content")) is not None:
                self._new_logprobs += (choice["logprobs"] or {}).get("content", [])
                if said or self._is_in("message"):
                    found += self._text("message", said)
            for call in delta.get("tool_calls") or ():
                found += self._call(call)
        return b"".join(found)

    def end(self) -> bytes:
        found = [*([] if self._output else self._text("message", ""))]
        is_well = self._reason in _WELL
        status = "completed" if is_well else "incomplete"
        found += self._close(status)
        self._response["status"] = status
        if not is_well:
            reason = _INCOMPLETE.get(self._reason, self._reason)
            self._response["incomplete_details"] = {"reason": reason}
        found.append(self._event(f"response.{status}", response=self._response))
        return b"".join(found)

    def failed(self, error: HttpError) -> bytes:
        others = "invalid_prompt" if error.status < 500 else "server_error"
        code = "rate_limit_exceeded" if error.status == 429 else others
        found = b"".join(self._close("incomplete"))
        self._response["status"] = "failed"
        self._response["error"] = {"code": code, "message": error.message}
        return found + self._event("response.failed", response=self._response)

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self._output[-1]["type"] == kind

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        begin, part = _TEXTS[kind]
        if not self._is_in(kind):
            more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._open({"type": kind, "id": _id(begin), **more, "content": []})
            yield self._event_of_item("response.content_part.added", content_index=0, part=part)
        self._pieces.append(text)
        told: Json = {}
        if kind == "message":
            told, self._new_logprobs = {"logprobs": self._new_logprobs}, []
            self._logprobs += told["logprobs"]
        name = f"response.{part['type']}.delta"
        yield self._event_of_item(name, content_index=0, delta=text, **told)

    def _call(self, call: Json) -> Iterator[bytes]:
        function = call["function"]
        if "id" in call:
            named = {"id": _id("fc_"), "call_id": call["id"], "name": function["name"]}
            yield from self._open({"type": "function_call", **named, "arguments": ""})
        if arguments := function["arguments"]:
            self._pieces.append(arguments)
            yield self._event_of_item("response.function_call_arguments.delta", delta=arguments)

    def _open(self, item: Json) -> Iterator[bytes]:
        yield from self._close("completed")
        self._output.append(item | {"status": "in_progress"})
        self._is_open = True
        yield self._event("response.output_item.added", **self._place(), item=self._output[-1])

    def _close(self, status: str) -> Iterator[bytes]:
        """End the last item, if it has not ended."""
        if not self._is_open:
            return
        item, text, logprobs = self._output[-1], "".join(self._pieces), self._logprobs
        self._is_open, self._pieces, self._logprobs = False, [], []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            name = "response.function_call_arguments.done"
            yield self._event_of_item(name, arguments=text)
        else:
            told = {"logprobs": logprobs} if item["type"] == "message" else {}
            part = _TEXTS[item["type"]][1] | {"text": text} | told
            item["content"] = [part]
            name = f"response.{part['type']}.done"
            yield self._event_of_item(name, content_index=0, text=text, **told)
            yield self._event_of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", **self._place(), item=item)

    def _place(self) -> Json:
        return {"output_index": len(self._output) - 1}

    def _event_of_item(self, name: str, **more: object) -> bytes:
        return self._event(name, item_id=self._output[-1]["id"], **self._place(), **more)

    def _event(self, name: str, **more: object) -> bytes:
        self._num_events += 1
        return event({"type": name, "sequence_number": self._num_events - 1, **more})


def _id(begin: str) -> str:
    return begin + uuid.uuid4().hex


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
