"""A headless Chromium that tests and pictures drive, by its own protocol for developers."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.errors import LoadTestError

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
).split()
_UNTIL = "new Promise(done => {{const look = () => ({}) ? done() : setTimeout(look, 20); look();}})"


class Tab:
    """A page in the browser; `complaints` are of its scripts, and of what its policy forbids."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=30)
            if message.get("id") == number:
                if "error" in message:
                    raise LoadTestError(f"the browser refuses {method}: {message['error']}")
                return message["result"]  # type: ignore[no-any-return]
            self._note(message)

    async def open(self, url: str) -> None:
        """Go to a page, and wait until all of it is there."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # it has no window
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, of a promise what it comes to."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise LoadTestError(f"the page fails at {expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a condition holds."""
        await asyncio.wait_for(self.evaluate(_UNTIL.format(condition)), 60)

    async def resize(self, width: int, height: int = 900) -> None:
        """Give the page a width, in pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    async def picture(self) -> bytes:
        """Return the page as it looks, down to its end, as PNG."""
        root = "document.documentElement.getBoundingClientRect()"
        await self.resize(*await self.evaluate(f"[innerWidth, Math.ceil({root}.height)]"))
        found = await self.call("Page.captureScreenshot")
        return base64.b64decode(found["data"])

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(params["exceptionDetails"]["exception"]["description"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(params["entry"]["text"])


@asynccontextmanager
async def browser_tab(profile: Path) -> AsyncIterator[Tab]:
    """Start a browser with an empty profile, and yield its page."""
    if CHROMIUM is None:
        raise LoadTestError("there is no Chromium on the PATH; install it: apt install chromium")
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, *_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}"),
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None, "it is a pipe"
    try:
        port = await asyncio.wait_for(_port(process.stderr), 60)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as found:
                pages = [one for one in await found.json() if one["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as ws:
                yield Tab(ws)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.communicate()


async def _port(stderr: asyncio.StreamReader) -> str:
    while line := (await stderr.readline()).decode():
        if (found := re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line)) is not None:
            return found[1]
    raise LoadTestError("the browser did not start")
