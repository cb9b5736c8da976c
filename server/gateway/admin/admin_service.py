"""Operates all workers of a gateway at once, and the gateway itself."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from google.protobuf.message import Message
from tokenweir.v1 import admin_service_pb2 as pb
from tokenweir.v1 import admin_service_pb2_grpc

from engine.errors import CapabilityNotSupported
from server.api import ADMIN, API_MINOR, HEALTH, RELEASE
from server.calls.running_requests import RunningRequests
from server.gateway.admin.versions import Versions
from server.gateway.backend import Answer, Backend
from server.gateway.pool import Pool
from server.gateway.traffic import ModelVersion, Traffic
from server.local_services import Context
from server.model_pages import page_of
from server.wire.worker_call import WorkerFailed

logger = logging.getLogger(__name__)

_GET_SERVER_INFO, _GET_LOAD, _ABORT, _DRAIN = (
    f"/{ADMIN}/{name}" for name in ("GetServerInfo", "GetLoad", "AbortRequests", "Drain")
)
_TIMEOUT = 2.0  # seconds; a worker that is slower is left out


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    """Asks every worker, and answers once for all of them."""

    def __init__(
        self,
        pool: Pool,
        traffic: Traffic,
        requests: RunningRequests,
        drain: Callable[[], Awaitable[None]],
        versions: Versions | None = None,
    ) -> None:
        """`drain` has the gateway refuse new calls, and returns when none runs any more.

        Without `versions` this gateway cannot start or end workers.
        """
        self._pool = pool
        self._traffic = traffic
        self._versions = versions
        self._requests = requests
        self._drain = drain
        self._instance_id = uuid.uuid4().hex
        self._start_time = datetime.now(UTC)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Return what this gateway is, and its replicas."""
        infos = await self._ask(_GET_SERVER_INFO, request, pb.GetServerInfoResponse)
        response = pb.GetServerInfoResponse(
            version=RELEASE,
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
        loads = await self._ask(_GET_LOAD, request, pb.GetLoadResponse)
        return pb.GetLoadResponse(replicas=[one for load in loads for one in load.replicas])

    async def AbortRequests(
        self, request: pb.AbortRequestsRequest, context: Context
    ) -> pb.AbortRequestsResponse:
        """End requests that wait here or run anywhere, those that came by other gateways too."""
        found = self._requests.abort(request.request_ids)
        answers = await self._ask(_ABORT, request, pb.AbortRequestsResponse)
        found.update(*(answer.aborted for answer in answers))
        logger.info("aborted: %s", ", ".join(map(ascii, sorted(found))) or "nothing")
        aborted = [one for one in dict.fromkeys(request.request_ids) if one in found]
        return pb.AbortRequestsResponse(aborted=aborted)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Refuse new calls for good; return when none runs any more, here or at a worker."""
        logger.info("draining: an operator has asked for it")
        await self._drain()
        await self._ask(_DRAIN, request, pb.DrainResponse, None)
        return pb.DrainResponse()

    async def LoadModel(
        self, request: pb.LoadModelRequest, context: Context
    ) -> pb.LoadModelResponse:
        """Load a version beside what serves; answer once it takes calls."""
        one, package = await self._operated("LoadModel").load(request)
        found = (info for info in await self._list() if ModelVersion.of(info) == one)
        info = next(found, _named(one))
        info.manifest_sha256 = bytes.fromhex(package.manifest_sha256)
        return pb.LoadModelResponse(model_info=info)

    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: Context
    ) -> pb.UnloadModelResponse:
        """End a version; answer when its processes are gone."""
        versions = self._operated("UnloadModel")
        await versions.unload(request.model, request.model_version, request.request_id)
        return pb.UnloadModelResponse()

    async def SetTraffic(
        self, request: pb.SetTrafficRequest, context: Context
    ) -> pb.SetTrafficResponse:
        """Give a version its share of the calls; answer with all versions of its model."""
        versions = self._operated("SetTraffic")
        versions.set_share(ModelVersion(request.model, request.model_version), request.share)
        await self._pool.notify()
        models = [info for info in await self._list() if info.model == request.model]
        return pb.SetTrafficResponse(models=models)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Return all versions, those that come and go too, and what they have of the calls."""
        return page_of(await self._list(), request)

    async def _list(self) -> list[pb.ModelInfo]:
        models = {ModelVersion.of(info): info for info in self._pool.models()}
        if self._versions is not None:
            states = (
                (self._versions.loading, pb.MODEL_STATE_LOADING),
                (self._versions.leaving, pb.MODEL_STATE_DRAINING),
            )
            for one, state in states:
                if one is not None:
                    models.setdefault(one, _named(one)).state = state
        for one, info in models.items():
            info.traffic.share = self._traffic.share(one)
            info.traffic.replicas = len(self._pool.serving_version(one))
        return [models[one] for one in sorted(models)]

    def _operated(self, method: str) -> Versions:
        if self._versions is None:
            what = f"{method} is not for a gateway without workers of its own"
            raise CapabilityNotSupported(what, [method])
        return self._versions

    async def _ask(
        self,
        method: str,
        request: Message,
        answer: type[Answer],
        timeout: float | None = _TIMEOUT,  # noqa: ASYNC109  # one without is no error
    ) -> list[Answer]:
        """Return what the workers answer; those that do not are left out, and logged."""

        async def one(worker: Backend) -> Answer | None:
            try:
                return await worker.ask(method, request, answer, timeout)
            except WorkerFailed as error:
                logger.warning("worker %s did not answer: %s", worker.address, error)
                return None

        answers = await asyncio.gather(*map(one, self._pool.backends))
        return [found for found in answers if found is not None]


def _named(one: ModelVersion) -> pb.ModelInfo:
    return pb.ModelInfo(model=one.model, model_version=one.version)
