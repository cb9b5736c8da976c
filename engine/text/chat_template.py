"""Makes the text of a conversation, as the model was trained with it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

from engine.requests.request import Chat
from engine.text.chat_format import ChatFormat

_PROGRAM = Path(__file__).with_name("chat_process.py")


class ChatTemplate:
    """Applies the template of a model in a process of its own, which the first text starts.

    Any thread may ask; one conversation is turned into a text after the other.
    """

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def render(self, chat: Chat) -> str:
        """Return the text, up to where the answer begins.

        Raises ValueError, saying why, if the template refuses the conversation, or takes more time
        or memory than it is given.
        """
        asked = [{"role": one.role, "content": one.content} for one in chat.messages]
        with self._lock:
            process = self._process = self._process or self._start()
            answer = self._answer(process, json.dumps(asked))
        if "text" in answer:
            return answer["text"]
        raise ValueError(
            f"the model's chat template refuses it: {answer['refused']}"
            if "refused" in answer
            else f"the model's chat template fails: {answer['failed']}"
        )

    def close(self) -> None:
        """End the process, if there is one; the next text starts another."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _answer(self, process: subprocess.Popen[str], line: str) -> dict[str, str]:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer: dict[str, str] = json.loads(process.stdout.readline())
        except (ValueError, OSError):  # nothing comes of one that was ended
            self._end(process)
            return {"failed": "it takes too much time or memory, send a shorter conversation"}
        return answer

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        assert process.stdin is not None
        process.stdin.write(self._form.model_dump_json() + "\n")
        return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        process.kill()
        process.communicate()
