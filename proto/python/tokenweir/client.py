"""The calls of a server, for threads (Client) and for asyncio (AsyncClient)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Self, Unpack

import grpc
import grpc.aio

from tokenweir import _requests as requests
from tokenweir._calls import AsyncCalls, AsyncStubs
from tokenweir._channel import CLOSED, Metadata, call_metadata, far_end
from tokenweir._errors import closed_under_way, deadline_after, typed_errors
from tokenweir._options import Chat, Prompt, StreamOptions
from tokenweir._streams import Resumption
from tokenweir._sync_calls import Calls, Stubs
from tokenweir.received import SeenMessages
from tokenweir.v1 import generation_service_pb2


class Client(Calls):
    """Calls a server from ordinary code; safe to share between threads."""

    def __init__(
        self,
        address: str | None = None,
        *,
        channel: grpc.Channel | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: Metadata = (),
        timeout: float | None = 60.0,
        max_attempts: int = 3,
    ) -> None:
        """Prepare a channel to `address` ("host:port"); nothing is sent before the first call.

        With `credentials` it is encrypted. `channel` is used in place of one to an address, and is
        closed with the client; its own options say what is retried. `token` says who calls, and
        `metadata` goes with every call too. `timeout` is the deadline of a call in seconds, None
        for no deadline; `max_attempts` is the number of times that a call is tried in all, 1 for no
        retry. A stream that broke goes on where it broke as often, too.
        """
        end = far_end(address, channel, credentials, max_attempts)
        super().__init__(call_metadata(metadata, token), timeout, max_attempts)
        self._stubs = Stubs(end if isinstance(end, grpc.Channel) else end.channel())
        self._closed = False

    def close(self) -> None:
        """Close the channel; what still runs on it ends with Cancelled."""
        self._closed = True
        self._stubs.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> Stubs:
        if self._closed:
            raise ValueError(CLOSED)
        return self._stubs


class AsyncClient(AsyncCalls):
    """Calls a server from asyncio; the channel is opened by the first call, on its event loop."""

    def __init__(
        self,
        address: str | None = None,
        *,
        channel: grpc.aio.Channel | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: Metadata = (),
        timeout: float | None = 60.0,
        max_attempts: int = 3,
    ) -> None:
        """Take the arguments of Client; a `channel` is one of grpc.aio."""
        self._end = far_end(address, channel, credentials, max_attempts)
        super().__init__(call_metadata(metadata, token), timeout, max_attempts)
        self._closed = False
        self._stubs: AsyncStubs | None = None

    async def stream_messages(
        self,
        model: str,
        prompt: Prompt | Chat,
        max_attempts: int,
        admitted: asyncio.Event | None = None,
        **options: Unpack[StreamOptions],
    ) -> AsyncIterator[generation_service_pb2.GenerateStreamResponse]:
        """Generate, and yield the messages of the protocol as they come, of any number of outputs.

        A stream that breaks goes on as that of `stream`, as often as `max_attempts` says here.
        `admitted` is set when the server has begun with it.
        """
        request = requests.stream_request(model, prompt, options)
        deadline = deadline_after(options.get("timeout", self._timeout))
        method = self._open().generation.GenerateStream
        resumption = Resumption(method, self._metadata, request, deadline, max_attempts)
        call, seen = resumption.begin(), SeenMessages()
        try:
            with typed_errors(deadline):
                if admitted is not None and await call.initial_metadata():  # not empty of ours
                    admitted.set()
                while True:
                    try:
                        async for message in call:
                            seen.add(message)
                            yield message
                        break
                    except grpc.RpcError as error:
                        pause = resumption.pause_after(error)
                    if seen.is_complete:
                        break
                    await asyncio.sleep(pause)
                    call = resumption.go_on(seen)
                if self._closed:  # grpcio 1.72 ends the loop as if all had come
                    raise closed_under_way()
        finally:
            call.cancel()

    async def stream_events(
        self, model: str, prompt: Prompt | Chat, **options: Unpack[StreamOptions]
    ) -> AsyncIterator[generation_service_pb2.GenerateStreamResponse]:
        """Generate, and yield the messages of the protocol as they come, unchecked.

        For measurements: no object and no task is made per message, and a stream that breaks ends
        with the error, which a measurement must not hide. That of `stream_messages` goes on.
        """
        request = requests.stream_request(model, prompt, options)
        timeout = options.get("timeout", self._timeout)
        deadline = deadline_after(timeout)
        method = self._open().generation.GenerateStream
        call = method(request, timeout=timeout, metadata=self._metadata)
        try:
            with typed_errors(deadline):
                async for message in call:
                    yield message
                if self._closed:  # grpcio 1.72 ends the loop as if all had come
                    raise closed_under_way()
        finally:
            call.cancel()

    def calling_as(
        self,
        token: str | None = None,
        metadata: Metadata = (),
        stream_attempts: int | None = None,
    ) -> AsyncClient:
        """Return a client of the same channel that calls with another token, if one is given.

        `metadata` goes with its calls beside that of this client, which alone is to be closed. Its
        streams go on where one broke, as often as `stream_attempts` says, if that is given.
        Raises ValueError for a token that no header can carry.
        """
        stubs = self._open()
        own = self._metadata
        if token is not None:
            own = tuple(entry for entry in own if entry[0] != "authorization")
        other = AsyncClient(
            channel=stubs.channel,
            token=token,
            metadata=(*own, *metadata),
            timeout=self._timeout,
            max_attempts=stream_attempts or self._max_attempts,
        )
        other._stubs = stubs
        return other

    async def close(self) -> None:
        """Close the channel; what still runs on it ends with Cancelled."""
        self._closed = True
        if self._stubs is not None:
            await self._stubs.channel.close()
        elif isinstance(self._end, grpc.aio.Channel):
            await self._end.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _open(self) -> AsyncStubs:
        # Not in __init__: a channel belongs to the event loop that runs when it is made.
        if self._closed:
            raise ValueError(CLOSED)
        if self._stubs is None:
            end = self._end
            channel = end if isinstance(end, grpc.aio.Channel) else end.async_channel()
            self._stubs = AsyncStubs(channel)
        return self._stubs
