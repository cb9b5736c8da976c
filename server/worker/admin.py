"""Answers what operators and routers ask of one worker, and ends what they want to end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

from google.protobuf.message import Message
from tokenweir.v1 import admin_service_pb2 as pb
from tokenweir.v1 import admin_service_pb2_grpc

from engine.errors import CapabilityNotSupported
from server.api import API_MINOR, FEATURES, RELEASE
from server.calls.running_requests import RunningRequests
from server.config import WorkerConfig
from server.local_services import Context
from server.model_pages import page_of
from server.worker import admin_answers as answers
from server.worker.admission import WorkerAdmission
from server.worker.catalog import Catalog


def _not_of_a_worker(method: str) -> Any:
    what = f"{method} is not for a worker; ask at the admin port of `tokenweir serve`"

    async def refuse(service: AdminService, request: Message, context: Context) -> NoReturn:
        raise CapabilityNotSupported(what, [method])

    return refuse


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    """Tells the models and the load of a worker, aborts requests and drains it.

    It serves what it was started with, and answers what it is sent.
    """

    LoadModel, UnloadModel, SetTraffic = map(
        _not_of_a_worker, ("LoadModel", "UnloadModel", "SetTraffic")
    )

    def __init__(
        self,
        catalog: Catalog,
        config: WorkerConfig,
        admission: WorkerAdmission,
        requests: RunningRequests,
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        """`drain` has the worker refuse new calls, and returns when none runs any more."""
        self._catalog = catalog
        self._config = config
        self._start_time = datetime.now(UTC)
        self._admission = admission
        self._requests = requests
        self._drain = drain

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Return what this server is."""
        response = pb.GetServerInfoResponse(
            version=RELEASE,
            api_minor=API_MINOR,
            instance_id=self._catalog.replica_id,
            features=FEATURES,
        )
        response.start_time.FromDatetime(self._start_time)
        return response

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Return the models by name."""
        return page_of(self.models(), request)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """Return how busy every model is."""
        return pb.GetLoadResponse(
            replicas=[
                answers.replica_load(engine.load(), model=name, replica_id=self._catalog.replica_id)
                for name, engine in self._catalog.engines.items()
            ]
        )

    async def AbortRequests(
        self, request: pb.AbortRequestsRequest, context: Context
    ) -> pb.AbortRequestsResponse:
        """End the requests of these ids that run or wait here."""
        found = self._requests.abort(request.request_ids)
        aborted = [one for one in dict.fromkeys(request.request_ids) if one in found]
        return pb.AbortRequestsResponse(aborted=aborted)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Refuse new calls for good; return when none runs any more."""
        await self._drain()
        return pb.DrainResponse()

    def models(self) -> list[pb.ModelInfo]:
        """Return all models, by name."""
        return [self._model_info(name) for name in self._catalog.engines]

    def _model_info(self, name: str) -> pb.ModelInfo:
        engine, state, message = self._catalog.engines[name], pb.MODEL_STATE_READY, ""
        if engine.is_warming:
            state = pb.MODEL_STATE_WARMING
        elif not engine.healthy:
            state, message = pb.MODEL_STATE_FAILED, "the engine reports itself unhealthy"
        elif self._admission.draining:
            state = pb.MODEL_STATE_DRAINING
        return answers.model_info(
            self._catalog.served(name, engine),
            state=state,
            message=message,
            config=self._config,
        )
