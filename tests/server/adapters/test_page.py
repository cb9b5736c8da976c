"""The page of the HTTP server, and what its script asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenweir import AsyncClient, ReplicaInfo, ReplicaLoad, ServerInfo, Unavailable

from loadtest.lab.pictures.browser import CHROMIUM, browser_tab
from server.adapters.config import HttpConfig
from server.adapters.http.load_history import LoadHistory
from tests.fakes.engines import FakeGenerator, FakePredictor, running_worker
from tests.fakes.http_calls import Caller, http_of, http_server
from tests.fakes.scripted_server import fail, scripted_server

STARTED = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
LOAD = ReplicaLoad("one", "dates", 3, 1, 9, 0.25, 50.0)


class FakeAdmin:
    """An admin port with scripted answers."""

    def __init__(self) -> None:
        self.loads = (LOAD, ReplicaLoad("two", "dates", 1, 0, 0, 0.5, 20.0))
        self.fails = False

    async def load(self) -> tuple[ReplicaLoad, ...]:
        if self.fails:
            raise Unavailable("nobody answers", code=grpc.StatusCode.UNAVAILABLE)
        return self.loads

    async def server_info(self) -> ServerInfo:
        replicas = tuple(ReplicaInfo(name, "1", STARTED) for name in ("one", "two"))
        return ServerInfo("1", 0, "gateway", STARTED, (), replicas)


@asynccontextmanager
async def page_of(
    *engines: Any, admin_token: str | None = None, admin: Any = None
) -> AsyncIterator[Caller]:
    config = HttpConfig(port=0, grace=1, admin_token=admin_token)
    async with running_worker(*engines) as (_, address):
        async with AsyncClient(address, max_attempts=1) as client:
            async with http_of(client, config, admin) as caller:
                yield caller


async def get(caller: Caller, path: str, token: str | None = None) -> tuple[int, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with caller.session.get(f"{caller.url}{path}", headers=headers) as found:
        return found.status, await found.json()


async def test_the_page_has_all_that_it_needs_and_its_policy_lets_in_nothing_else():
    async with http_server("127.0.0.1:1") as caller:
        async with caller.session.get(f"{caller.url}/") as found:
            html, headers = await found.text(), found.headers

    assert headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(
        rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";")
    )
    assert rules["default-src"] == "'none'"
    assert re.fullmatch("'sha256-[^ ']+'", rules["script-src"])
    assert re.fullmatch("'sha256-[^ ']+'", rules["style-src"])
    assert not re.search(r"(src|href)=.(?!data:,)|innerHTML|@import|url\(|style=", html)
    assert set(re.findall("https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}


async def test_models_are_told_with_their_certificates():
    async with page_of(FakeGenerator(), FakePredictor()) as caller:
        status, found = await get(caller, "/page/models")

    assert (status, found["health"]) == (200, "SERVING")
    dates, tags = found["models"]
    assert (dates["model"], dates["model_version"], dates["state"]) == ("dates", "7", "ready")
    assert dates["parity"]["tokens_equal"] == dates["parity"]["tokens_compared"] == 96
    assert dates["parity"]["toolchain"]["torch"] == "2.13.0"
    assert tags["labels"] == ["NOUN", "VERB", "DET"]


async def test_models_are_told_to_who_may_list_them():
    with scripted_server() as script:
        script.answers["ListModels"] = lambda _, context: fail(
            context, grpc.StatusCode.UNAUTHENTICATED, "no token"
        )
        async with http_server(script.address) as caller:
            status, found = await get(caller, "/page/models", "theirs")

    assert (status, "no token" in found["error"]["message"]) == (401, True)
    assert dict(script.metadata[0])["authorization"] == "Bearer theirs"


async def test_without_an_admin_port_there_is_no_load_and_the_answer_says_so():
    async with http_server("127.0.0.1:1") as caller:
        status, found = await get(caller, "/page/load")

    assert (status, "--admin HOST:PORT" in found["error"]["message"]) == (404, True)


async def test_load_and_workers_are_told_to_who_has_the_token_of_operators():
    async with page_of(FakeGenerator(), admin=FakeAdmin(), admin_token="tw_ops") as caller:
        assert (await get(caller, "/page/load"))[0] == 401
        assert (await get(caller, "/page/load", "tw_other"))[0] == 401
        status, found = await get(caller, "/page/load", "tw_ops")

    assert (status, found["problem"]) == (200, "")
    assert found["now"][0]["replica_id"] == "one"
    assert found["workers"][0]["start_time"] == "2026-01-02T03:04:00+00:00"
    (moment,) = found["history"]
    assert (moment["running"], moment["waiting"]) == (4, 1)
    assert (moment["tokens_per_second"], moment["cache_percent"]) == (70.0, 50.0)


async def test_without_such_a_token_the_load_is_told_to_who_may_list_models():
    with scripted_server() as script:
        script.answers["ListModels"] = lambda _, context: fail(
            context, grpc.StatusCode.UNAUTHENTICATED, "no token"
        )
        async with AsyncClient(script.address, max_attempts=1) as client:
            admin: Any = FakeAdmin()
            async with http_of(client, HttpConfig(port=0, grace=1), admin) as caller:
                status, _ = await get(caller, "/page/load", "theirs")

    assert status == 401
    assert dict(script.metadata[0])["authorization"] == "Bearer theirs"


async def test_the_load_is_that_of_the_models_that_who_calls_may_list():
    admin = FakeAdmin()
    admin.loads += (ReplicaLoad("three", "tags", 1, 0, 0, 0.5, 20.0),)

    async def told(token: str | None) -> list[str]:
        async with page_of(FakeGenerator(), admin=admin, admin_token=token) as caller:
            async with asyncio.timeout(60):
                while not (found := (await get(caller, "/page/load", token))[1])["now"]:
                    await asyncio.sleep(0.05)
        return [one["model"] for one in found["now"]]

    assert await told(None) == ["dates", "dates"]
    assert await told("tw_ops") == ["dates", "dates", "tags"]


async def test_the_load_of_ten_minutes_is_remembered_and_no_more():
    clock = iter(range(0, 10_000, 5))
    history = LoadHistory(FakeAdmin(), clock.__next__)  # type: ignore[arg-type]

    for _ in range(241):
        await history.look()

    assert [history.moments[0].time, history.moments[-1].time] == [600, 1200]


async def test_an_admin_port_that_does_not_answer_is_named_until_it_does():
    admin = FakeAdmin()
    history = LoadHistory(admin)  # type: ignore[arg-type]
    await history.look()
    admin.fails = True
    await history.look()

    assert history.problem == "the admin port: UNAVAILABLE: nobody answers"
    assert (history.now, history.workers, len(history.moments)) == ((), (), 1)

    admin.fails = False
    await history.look()
    assert (history.problem, len(history.now)) == ("", 2)


async def test_a_failure_while_looking_at_the_load_is_logged_and_not_the_last_look(
    caplog: pytest.LogCaptureFixture,
):
    class Failing(FakeAdmin):
        async def load(self) -> tuple[ReplicaLoad, ...]:
            if not caplog.text:
                raise ZeroDivisionError("a bug")
            return self.loads

    async with page_of(FakeGenerator(), admin=Failing()) as caller:
        async with asyncio.timeout(60):
            while not (await get(caller, "/page/load"))[1]["workers"]:
                await asyncio.sleep(0.05)

    assert "a bug" in caplog.text


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_a_browser_shows_models_load_and_the_stream_of_a_prompt(tmp_path: Path):
    admin = FakeAdmin()
    async with page_of(FakeGenerator(), FakePredictor(), admin=admin) as caller:
        async with browser_tab(tmp_path) as tab:
            await tab.resize(1280)
            await tab.open(caller.url)
            await tab.until("document.querySelectorAll('#models article').length === 2")
            await tab.until("document.querySelectorAll('#workers tr').length === 2")
            models = await tab.evaluate("document.getElementById('models').innerText")
            charts = await tab.evaluate("document.querySelectorAll('#charts polyline').length")
            health = await tab.evaluate("document.getElementById('health').textContent")

            await tab.evaluate("document.getElementById('prompt').value = '<b>a</b> b'")
            await tab.evaluate("document.getElementById('send').click()")
            await tab.until("document.getElementById('figures').textContent")
            answer = await tab.evaluate("document.getElementById('answer').textContent")
            bold = await tab.evaluate("document.querySelectorAll('#answer b').length")
            widths = []
            for width in (1280, 400):
                await tab.resize(width)
                overflow = "document.documentElement.scrollWidth - innerWidth"
                widths.append(await tab.evaluate(overflow))

            await tab.evaluate("document.getElementById('prompt').value = 'a HOLD'")
            await tab.evaluate("document.getElementById('send').click()")
            await tab.until("document.getElementById('answer').textContent === 'a '")
            await tab.evaluate("document.getElementById('stop').click()")
            await tab.until("document.getElementById('problem').textContent === 'stopped'")
            await tab.evaluate("0")  # raises the page's errors so far

    assert "100 of 100 tokens equal, in 12 cases" in models
    assert (charts, health) == (4, "serving")
    assert (answer, bold) == ("<b>a</b> b ", 0)
    assert max(widths) <= 0
    assert tab.complaints == []
