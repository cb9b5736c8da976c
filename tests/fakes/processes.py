"""Workers in processes of their own, to be killed, stopped or blocked by a test."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@dataclass
class Process:
    """A worker in a process of its own."""

    process: asyncio.subprocess.Process
    address: str

    async def next_prompt(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        return line.decode().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """Freeze it: its kernel still takes what is sent, nothing answers."""
        self.process.send_signal(signal.SIGSTOP)


@asynccontextmanager
async def worker_process(*capabilities: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.fakes.worker_process",
        *capabilities,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 240)).decode().strip()
        yield Process(process, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
