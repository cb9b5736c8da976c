"""Operates all workers of a gateway at once, and the gateway itself."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib import metadata
from typing import TypeVar

from grpc import aio
from tokenweir.v1 import admin_service_pb2 as pb
from tokenweir.v1 import admin_service_pb2_grpc

from engine.errors import CapabilityNotSupported
from server.api import API_MINOR, HEALTH
from server.gateway.backend import Backend
from server.gateway.pool import Pool
from server.interceptors import Context
from server.running_requests import RunningRequests

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TIMEOUT = 2.0  # seconds; a worker that is slower is left out


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    """Asks every worker, and answers once for all of them."""

    def __init__(
        self, pool: Pool, requests: RunningRequests, drain: Callable[[], Awaitable[None]]
    ) -> None:
        """`drain` has the gateway refuse new calls, and returns when none runs any more."""
        self._pool = pool
        self._requests = requests
        self._drain = drain
        self._instance_id = uuid.uuid4().hex
        self._start_time = datetime.now(UTC)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Return what this gateway is, and its replicas."""
        infos = await self._ask(
            lambda worker: worker.admin.GetServerInfo(request, timeout=_TIMEOUT)
        )
        response = pb.GetServerInfoResponse(
            version=metadata.version("tokenweir"),
            api_minor=API_MINOR,
            instance_id=self._instance_id,
            features=(HEALTH,),
            replicas=[
                pb.GetServerInfoResponse.Replica(
                    replica_id=info.instance_id, version=info.version, start_time=info.start_time
                )
                for info in infos
            ],
        )
        response.start_time.FromDatetime(self._start_time)
        return response

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Return the load of all workers together."""
        loads = await self._ask(lambda worker: worker.admin.GetLoad(request, timeout=_TIMEOUT))
        return pb.GetLoadResponse(replicas=[one for load in loads for one in load.replicas])

    async def AbortRequests(
        self, request: pb.AbortRequestsRequest, context: Context
    ) -> pb.AbortRequestsResponse:
        """End requests that wait here or run anywhere, those that came by other gateways too."""
        found = self._requests.abort(request.request_ids)
        answers = await self._ask(
            lambda worker: worker.admin.AbortRequests(request, timeout=_TIMEOUT)
        )
        found.update(*(answer.aborted for answer in answers))
        logger.info("aborted: %s", ", ".join(map(ascii, sorted(found))) or "nothing")
        aborted = [one for one in dict.fromkeys(request.request_ids) if one in found]
        return pb.AbortRequestsResponse(aborted=aborted)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Refuse new calls for good; return when none runs any more, here or at a worker."""
        logger.info("draining: an operator has asked for it")
        await self._drain()
        await self._ask(lambda worker: worker.admin.Drain(request))
        return pb.DrainResponse()

    async def LoadModel(
        self, request: pb.LoadModelRequest, context: Context
    ) -> pb.LoadModelResponse:
        """Refuse: models are loaded at start."""
        raise _not_there("LoadModel")

    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: Context
    ) -> pb.UnloadModelResponse:
        """Refuse: models are unloaded at the end."""
        raise _not_there("UnloadModel")

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Refuse: everybody may ask that, at the public port."""
        what = "ListModels is answered at the public port"
        raise CapabilityNotSupported(what, ["ListModels"])

    async def _ask(self, ask: Callable[[Backend], Awaitable[T]]) -> list[T]:
        """Return what the workers answer; those that do not are left out, and logged."""
        workers = self._pool.backends
        asked = await asyncio.gather(*(_answer(ask, worker) for worker in workers))
        return [answer for answer in asked if answer is not None]


async def _answer(ask: Callable[[Backend], Awaitable[T]], worker: Backend) -> T | None:
    try:
        return await ask(worker)
    except aio.AioRpcError as error:
        logger.warning("worker %s did not answer: %s", worker.address, error.details())
        return None


def _not_there(method: str) -> CapabilityNotSupported:
    return CapabilityNotSupported(f"{method} is not in this version of the server", [method])
