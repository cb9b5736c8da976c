"""Loads and unloads versions of models while others serve, one after the other."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

from tokenweir.v1.admin_service_pb2 import LoadModelRequest

from engine.errors import (
    FieldViolation,
    InvalidRequest,
    LoadFailed,
    OperationInProgress,
    OperationRefused,
    PackageError,
)
from server.gateway.pool import Pool
from server.gateway.traffic import ModelVersion, Traffic, check_share
from server.settings import MAX_REPLICAS

if TYPE_CHECKING:  # a gateway by itself reads no package
    from server.packages.pinned import PinnedPackage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CREDENTIALS = re.compile(r"://[^/@]*@")  # in a URL
_JOIN_TIMEOUT = 30.0  # seconds in which workers that have started take calls
_NUM_REMEMBERED = 100  # unloads, by the ids of their requests
logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Group:
    """Workers that are started together: each has all the packages."""

    name: str  # among the groups of a service
    packages: Mapping[str, PinnedPackage]  # by the name of the model
    replicas: int = 0  # 0: as the server was started with

    @property
    def versions(self) -> tuple[ModelVersion, ...]:
        """The versions that each of the workers serves."""
        return tuple(
            ModelVersion(model, one.manifest.version) for model, one in self.packages.items()
        )


class Deployment(Protocol):
    """Starts and ends workers; `RayDeployment` in production."""

    def read(self, address: str) -> PinnedPackage:
        """Check a package where it lies; PackageError says what is wrong. Called in a thread."""

    async def start(self, group: Group) -> Sequence[str]:
        """Start workers; return the addresses of all once they are warm, for `Pool.sync`.

        Raises LoadFailed if they do not start; then `end` is to be called.
        """

    async def end(self, group: Group) -> None:
        """Drain workers within the server's grace; return when their processes are gone."""


@dataclass
class _Operation:
    """A load or unload that runs."""

    what: str
    request_id: str
    task: asyncio.Task[PinnedPackage | None] = field(init=False)


class Versions:
    """The groups of workers of a service, and what of them takes calls."""

    def __init__(self, pool: Pool, traffic: Traffic, deployment: Deployment, first: Group) -> None:
        """`first` was started with the server."""
        self._pool = pool
        self._traffic = traffic
        self._deployment = deployment
        self._groups = [first]
        self._operation: _Operation | None = None
        self._unloaded: dict[tuple[str, str], None] = {}  # recent, with request ids
        self.loading: ModelVersion | None = None
        self.leaving: ModelVersion | None = None

    async def load(self, order: LoadModelRequest) -> tuple[ModelVersion, PinnedPackage]:
        """Load a version beside what serves; return it once it takes calls.

        Raises InvalidRequest for a package or field that cannot be used, OperationRefused if
        another package is served as this version, LoadFailed if its workers do not start,
        OperationInProgress.
        """
        check_share(order.share)
        if not 0 <= order.replicas <= MAX_REPLICAS:
            what = f"{order.replicas} must be 1 to {MAX_REPLICAS}, or 0 for as many as at the start"
            raise InvalidRequest([FieldViolation("replicas", what)])
        address = _CREDENTIALS.sub("://", order.package)  # refused addresses are logged too
        what = f"the load of {address}"
        package = await self._alone(what, order.request_id, lambda: self._load(order))
        assert package is not None, "a load returns what it has loaded"
        return _version(order, package), package

    async def unload(self, model: str, version: str, request_id: str = "") -> None:
        """Send a version no new calls, let those that run end, and end its processes.

        Raises NotFound if it is not loaded, OperationRefused if nothing would be left,
        OperationInProgress.
        """
        what = f"the unload of {ModelVersion(model, version)}"
        asked = what, request_id
        if not request_id or asked not in self._unloaded:
            await self._alone(*asked, lambda: self._unload(model, version, asked))

    def set_share(self, one: ModelVersion, share: float) -> None:
        """Give a version its share of the calls; raises as `Traffic.set_share`."""
        if one == self.loading:
            raise OperationRefused(f"{one} is being loaded; it takes calls when it is ready")
        self._traffic.set_share(one, share)
        logger.info("traffic: %s takes %g %% of the calls without a version", one, share)

    async def close(self) -> None:
        """Give up what runs: the server ends."""
        if self._operation is not None:
            self._operation.task.cancel()
            await asyncio.wait([self._operation.task])

    async def _alone(
        self,
        what: str,
        request_id: str,
        work: Callable[[], Awaitable[PinnedPackage | None]],
    ) -> PinnedPackage | None:
        """Do something that goes on whatever becomes of the call, if nothing else is done.

        The same request, asked again, waits for what it has begun.
        """
        running = self._operation
        is_same = running is not None and (running.what, running.request_id) == (what, request_id)
        if running is not None and not (request_id and is_same):
            raise OperationInProgress(f"{running.what} runs; ask again when it has ended")
        if running is None:
            running = self._operation = _Operation(what, request_id)
            running.task = asyncio.create_task(self._logged(what, work), name=what)
        return await asyncio.shield(running.task)

    async def _logged(
        self, what: str, work: Callable[[], Awaitable[PinnedPackage | None]]
    ) -> PinnedPackage | None:
        logger.info("%s begins", what)
        try:
            result = await work()
        except Exception as error:
            logger.error("%s has failed: %s", what, error)
            raise
        finally:
            self._operation = self.loading = self.leaving = None
        logger.info("%s is done", what)
        return result

    async def _load(self, order: LoadModelRequest) -> PinnedPackage:
        package = await self._read(order)
        one = _version(order, package)
        if (loaded := self._find(one)) is not None:
            if loaded.packages[one.model].manifest_sha256 == package.manifest_sha256:
                return package
            raise OperationRefused(
                f"{one} is served already, from {loaded.packages[one.model].address}, which is "
                "another package; export the new one with --version"
            )
        if not order.validate_only:
            self.loading = one
            group = self._new_group({one.model: package}, order.replicas)
            self._traffic.close(one)
            try:
                await self._start(group)
            except BaseException:
                self._traffic.forget(one)
                raise
            self._groups.append(group)
            self._traffic.open(one, order.share)
            await self._pool.notify()
        return package

    async def _read(self, order: LoadModelRequest) -> PinnedPackage:
        """Return a package that is as it was ordered; InvalidRequest for any other."""
        if not order.package:
            what = "is empty; give the directory of a package, as the server sees it, or a URL"
            raise InvalidRequest([FieldViolation("package", what)])
        try:
            package = await asyncio.to_thread(self._deployment.read, order.package)
        except PackageError as error:
            raise InvalidRequest([FieldViolation("package", str(error))]) from error
        if order.model and not _NAME.fullmatch(order.model):
            what = f"{order.model[:64]!a} may have letters, digits, '_', '.' and '-' only"
            raise InvalidRequest([FieldViolation("model", what)])
        if order.model_version and order.model_version != (version := package.manifest.version):
            what = f"the package is version {version}, not {order.model_version[:64]!a}"
            raise InvalidRequest([FieldViolation("model_version", what)])
        return package

    async def _unload(self, model: str, version: str, asked: tuple[str, str]) -> None:
        one = self._named(model, version)
        group = self._find(one)
        if group is None:
            self._traffic.refuse(one)
        if len([v for other in self._groups for v in other.versions]) == 1:
            raise OperationRefused(
                f"{one} is all that is served; load another version first, or stop the server"
            )
        self.leaving = one
        share = self._traffic.close(one)
        await self._pool.notify()
        rest = {model: p for model, p in group.packages.items() if model != one.model}
        try:
            if rest:  # other models of these processes go on in new ones
                following = self._new_group(rest, group.replicas)
                await self._start(following)
                self._groups.append(following)
        except BaseException:
            self._traffic.open(one, share)
            await self._pool.notify()
            raise
        self._groups.remove(group)
        await self._deployment.end(group)
        self._traffic.forget(one)
        self._unloaded[asked] = None
        if len(self._unloaded) > _NUM_REMEMBERED:
            del self._unloaded[next(iter(self._unloaded))]

    def _new_group(self, packages: Mapping[str, PinnedPackage], replicas: int) -> Group:
        """Return a group of the lowest number that is free: what runs them keeps every name."""
        taken = {group.name for group in self._groups}
        number = next(n for n in count(1) if str(n) not in taken)
        return Group(str(number), packages, replicas)

    async def _start(self, group: Group) -> None:
        """Start workers and wait until they serve; what fails leaves none of them."""
        try:
            addresses = await self._deployment.start(group)
            async with asyncio.timeout(_JOIN_TIMEOUT):
                await self._pool.wait_for(addresses)
        except TimeoutError:
            await self._deployment.end(group)
            what = f"its workers ({', '.join(addresses)}) have started, and do not answer"
            raise LoadFailed(what) from None
        except BaseException:
            await self._deployment.end(group)
            raise

    def _find(self, one: ModelVersion) -> Group | None:
        return next((group for group in self._groups if one in group.versions), None)

    def _named(self, model: str, version: str) -> ModelVersion:
        """Return the version that is meant; where none is named there must be one only."""
        versions = [v for group in self._groups for v in group.versions if v.model == model]
        if version or not versions:
            return ModelVersion(model, version)
        if len(versions) > 1:
            names = ", ".join(v.version for v in versions)
            what = f"is empty, and of {model} there are {names}; name one of them"
            raise InvalidRequest([FieldViolation("model_version", what)])
        return versions[0]


def _version(order: LoadModelRequest, package: PinnedPackage) -> ModelVersion:
    return ModelVersion(order.model or package.manifest.name, package.manifest.version)
