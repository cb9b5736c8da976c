"""The page of the HTTP server, and what its script asks for."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenweir import AsyncClient, ReplicaInfo, ReplicaLoad, ServerInfo, Unavailable
from tokenweir.v1 import admin_service_pb2

from engine.one_pass.prediction import Prediction, PredictionItem
from loadtest.lab.pictures.browser import CHROMIUM, Tab, browser_tab
from server.adapters.config import HttpConfig
from server.adapters.http.page.load_history import LoadHistory
from tests.fakes.engines import (
    FakeGenerator,
    FakePredictor,
    generation_package,
    prediction_package,
    running_worker,
)
from tests.fakes.http_calls import Caller, http_of, http_server
from tests.fakes.scripted_server import fail, scripted_server

PNG = b"\x89PNG and so on"
STARTED = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
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
    *engines: Any, admin_token: str | None = None, admin: Any = None, port: int = 0
) -> AsyncIterator[Caller]:
    config = HttpConfig(port=port, grace=1, admin_token=admin_token)
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

    assert (status, "--admin HOST:PORT" in found["problem"]) == (200, True)


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
    admin.loads += (ReplicaLoad("three", "tags", 1, 0, 0, 0.75, 20.0),)

    async def told(token: str | None) -> tuple[list[str], float]:
        async with page_of(FakeGenerator(), admin=admin, admin_token=token) as caller:
            async with asyncio.timeout(60):
                while not (found := (await get(caller, "/page/load", token))[1])["now"]:
                    await asyncio.sleep(0.05)
        return [one["model"] for one in found["now"]], found["history"][-1]["cache_percent"]

    assert await told(None) == (["dates", "dates"], 50.0)
    assert await told("tw_ops") == (["dates", "dates", "tags"], 75.0)


async def test_the_load_of_ten_minutes_is_remembered_and_no_more():
    clock = iter(range(0, 10_000, 5))
    history = LoadHistory(FakeAdmin(), clock.__next__)  # type: ignore[arg-type]

    for _ in range(241):
        await history.look()

    times = [moment.time for moment in history.moments()]
    assert [times[0], times[-1]] == [600, 1200]


async def test_an_admin_port_that_does_not_answer_is_named_until_it_does():
    admin = FakeAdmin()
    history = LoadHistory(admin)  # type: ignore[arg-type]
    await history.look()
    admin.fails = True
    await history.look()

    assert history.problem.endswith("the admin port: UNAVAILABLE: nobody answers")
    assert (history.now(), history.workers, len([*history.moments()])) == ([], (), 1)

    admin.fails = False
    await history.look()
    assert (history.problem, len(history.now())) == ("", 2)


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


class Reranker(FakePredictor):
    """Scores a passage by its length."""

    def __init__(self) -> None:
        super().__init__(
            prediction_package("order", task="classify", takes="text", labels=["fits"])
        )

    async def predict(self, items: Sequence[PredictionItem], **options: Any) -> Prediction:
        self.logits = (float(len(items[0].text_pair or "")),)
        return await super().predict(items, **options)


def eyes() -> FakePredictor:
    return FakePredictor(prediction_package("eyes", task="classify"))


def chatting() -> FakeGenerator:
    generator = FakeGenerator(generation_package("talk"))
    generator.capabilities += ("chat",)
    return generator


async def predicted(caller: Caller, **body: object) -> tuple[int, Any]:
    async with caller.session.post(f"{caller.url}/page/predict", json=body) as found:
        return found.status, await found.json()


async def test_a_text_or_a_picture_is_classified_labelled_or_embedded_for_the_page():
    picture = base64.b64encode(PNG).decode()
    async with page_of(FakePredictor(), eyes()) as caller:
        _, classes = await predicted(caller, model="eyes", task="classify", image=picture)
        _, spans = await predicted(caller, model="tags", task="label", input="ab cd")
        _, vector = await predicted(caller, model="tags", task="embed", input="ab")

    assert [one["label"] for one in classes["labels"]] == ["DET", "VERB", "NOUN"]
    assert [(one["start_byte"], one["end_byte"]) for one in spans["spans"]] == [(0, 2), (3, 5)]
    assert spans["usage"]["input_tokens"] == 5
    assert vector["values"] == pytest.approx([0.6, 0.8])


async def test_the_passage_of_a_pair_and_the_way_of_labelling_reach_the_engine():
    reranker, tagger = Reranker(), FakePredictor()
    async with page_of(reranker, tagger) as caller:
        body = {"model": "order", "task": "classify", "input": "why", "text_pair": "so"}
        assert (await predicted(caller, **body))[0] == 200
        body = {"model": "tags", "task": "label", "input": "ab cd", "aggregation": "simple"}
        status, found = await predicted(caller, **body)

    assert (reranker.items[0].content, reranker.items[0].text_pair) == ("why", "so")
    assert (status, len(found["spans"])) == (200, 1)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"task": "classify"}, 400, "input or image: give one of them"),
        ({"task": "classify", "input": "a", "image": "aa=="}, 400, "input or image"),
        ({"task": "label", "image": "aa=="}, 400, "pictures have no words"),
        ({"task": "guess", "input": "a"}, 400, "task: Input should be 'classify', 'label' or"),
        ({"task": "classify", "image": "not base64"}, 400, "image: "),
        ({"task": "classify", "image": "YWJj"}, 400, "no PNG or JPEG image; send one"),
        ({"task": "label", "input": "a"}, 400, "model eyes cannot label"),
        ({"task": "classify", "image": "YWJj", "model": "no"}, 404, "no model 'no' here"),
        ({"task": "classify", "image": "YWJj", "top": 3}, 400, "top is not an option"),
    ],
)
async def test_what_cannot_be_predicted_is_refused_as_everywhere(
    body: dict[str, object], status: int, said: str
):
    async with page_of(eyes()) as caller:
        found = await predicted(caller, **{"model": "eyes", **body})

    assert found[0] == status
    assert said in found[1]["error"]["message"]


async def test_the_page_predicts_for_the_caller_and_within_the_bound_of_a_body():
    with scripted_server() as script:
        script.answers["Classify"] = lambda _, context: fail(
            context, grpc.StatusCode.UNAUTHENTICATED, "no token"
        )
        config = HttpConfig(port=0, grace=1, max_body_bytes=200)
        async with http_server(script.address, config) as caller:
            url, theirs = f"{caller.url}/page/predict", {"Authorization": "Bearer theirs"}
            body = {"model": "m", "task": "classify", "input": "a"}
            async with caller.session.post(url, json=body, headers=theirs) as found:
                assert found.status == 401
            too_long = await predicted(caller, **{**body, "input": "a" * 300})

    assert dict(script.metadata[0])["authorization"] == "Bearer theirs"
    assert too_long[0] == 413


@asynccontextmanager
async def seen(url: str, profile: Path, width: int = 1280) -> AsyncIterator[Tab]:
    """Look at the page until its models are there; at the end nothing may have gone wrong."""
    async with browser_tab(profile) as tab:
        await tab.resize(width)
        await tab.open(url)
        yield tab
        await tab.evaluate("0")  # raises the page's errors so far
        refusals = "Failed to load resource"  # the browser's word for a status such as 400
        assert [one for one in tab.complaints if not one.startswith(refusals)] == []


async def tried(tab: Tab, model: str, way: str, *texts: str) -> None:
    """Choose a model, type into the fields of a way to try it, and send."""
    await tab.until(f"document.querySelector('[data-model={model}]')")
    await tab.evaluate(f"document.querySelector('[data-model={model}]').click()")
    if await tab.evaluate("document.querySelector('.ways') !== null"):
        await tab.evaluate(f"document.querySelector('.ways [data-way={way}]').click()")
    for place, text in enumerate(texts):
        field = f"document.querySelectorAll('[data-way={way}] .prompt')[{place}]"
        await tab.evaluate(f"{field}.value = {json.dumps(text)}")
    await tab.evaluate(f"document.querySelector('form[data-way={way}] .send').click()")


async def text_of(tab: Tab, selector: str) -> Any:
    return await tab.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


@in_browser
async def test_a_browser_shows_health_load_and_a_model_in_plain_words(tmp_path: Path):
    async with page_of(FakeGenerator(), FakePredictor(), admin=FakeAdmin()) as caller:
        async with seen(caller.url, tmp_path) as tab:
            await tab.until("document.querySelectorAll('#models button').length === 2")
            await tab.until("document.querySelectorAll('#workers tr').length === 2")
            health, summary = [await text_of(tab, one) for one in ("#health", "#summary")]
            load = await text_of(tab, "#load")
            generator = await text_of(tab, "#about")
            await tab.evaluate("document.querySelector('[data-model=tags]').click()")
            labeller = await text_of(tab, "#about")
            widths = []
            for width in (1280, 420):
                await tab.resize(width)
                overflow = "document.documentElement.scrollWidth - innerWidth"
                widths.append(await tab.evaluate(overflow))

    assert (health, summary) == ("Serving", "2 models ready")
    assert re.findall(r"\d[\d.]*(?: %)?", load)[:4] == ["4", "1", "70", "50 %"]
    assert "96 of 96" in generator and "answers while they are made" in generator
    assert "39 of 40" in labeller and "token's score" not in labeller
    assert "SCORES DIFFER" not in labeller.upper()
    assert max(widths) <= 0


# The least contrast of a text that is shown with the ground behind it (WCAG 2.2, 1.4.3).
LEAST_CONTRAST = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const color = parts(getComputedStyle(one).backgroundColor);
      if (color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  const shown = [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility()
    && [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
  return shown.map((one) => {
    const [low, high] = [parts(getComputedStyle(one).color), ground(one)].map(light)
      .sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), one.tagName + "." + one.className];
  }).sort((a, b) => a[0] - b[0])[0];
})()"""


@in_browser
async def test_a_browser_shows_every_text_readably_in_the_light_and_in_the_dark(tmp_path: Path):
    grounds, least = [], []
    async with page_of(FakeGenerator(), FakePredictor(), admin=FakeAdmin()) as caller:
        async with seen(caller.url, tmp_path) as tab:
            await tab.until("document.querySelectorAll('#workers tr').length === 2")
            for scheme in ("light", "dark"):
                feature = {"name": "prefers-color-scheme", "value": scheme}
                await tab.call("Emulation.setEmulatedMedia", features=[feature])
                ground = "getComputedStyle(document.body).backgroundColor"
                grounds.append(await tab.evaluate(ground))
                for model in ("dates", "tags"):
                    await tab.evaluate(f"document.querySelector('[data-model={model}]').click()")
                    least.append(await tab.evaluate(LEAST_CONTRAST))

    assert grounds[0] != grounds[1]
    assert min(contrast for contrast, _ in least) >= 4.5, least


@in_browser
async def test_a_browser_shows_the_meaning_of_a_number_on_hover_and_on_focus(tmp_path: Path):
    async with page_of(FakeGenerator(), admin=FakeAdmin()) as caller:
        async with seen(caller.url, tmp_path) as tab:
            await tab.until("document.querySelector('#load [data-help]')")
            unexplained = await tab.evaluate(
                "[...document.querySelectorAll('.tile dt, .facts:not(.wide) dt')]"
                ".filter((one) => !one.querySelector('[data-help]')).length"
            )
            await tab.evaluate("document.querySelector('#load [data-help]').focus()")
            focused = await text_of(tab, "#tip")
            described = await tab.evaluate(
                "document.activeElement.getAttribute('aria-describedby')"
            )
            await tab.evaluate("document.activeElement.blur()")
            hidden = await tab.evaluate("document.getElementById('tip').hidden")
            place = await tab.evaluate(
                "(({x, y}) => [x + 3, y + 3])(document.querySelector('#about [data-help]')"
                ".getBoundingClientRect())"
            )
            await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
            await tab.until("!document.getElementById('tip').hidden")
            hovered = await text_of(tab, "#tip")

    assert (unexplained, described, hidden) == (0, "tip", True)
    assert focused.startswith("Sequences that are worked on")
    assert hovered.startswith("A longer input is refused")


@in_browser
async def test_a_browser_tells_of_an_import_in_words_with_its_meaning(tmp_path: Path):
    package = prediction_package()
    found = package.manifest.certificate.model_copy(
        update={"original": "compared with BertModel of transformers 5: 9 inputs within 2.3e-07"}
    )
    manifest = package.manifest.model_copy(update={"certificate": found})
    imported = FakePredictor(package.model_copy(update={"manifest": manifest}))
    async with page_of(imported) as caller:
        async with seen(caller.url, tmp_path) as tab:
            await tab.until("document.querySelector('#about .note')")
            said = await text_of(tab, "#about .note")
            meaning = await tab.evaluate(
                "document.querySelector('#about .note [data-help]').dataset.help"
            )

    assert said.startswith("Imported: compared with BertModel")
    assert said.endswith("within 2.3\u00a0×\u00a010⁻⁷.")
    assert meaning.startswith("Before the export, the imported model is compared with its original")


@in_browser
async def test_a_browser_streams_an_answer_as_text_and_stops_it(tmp_path: Path):
    async with page_of(FakeGenerator()) as caller:
        async with seen(caller.url, tmp_path) as tab:
            await tried(tab, "dates", "generate", "<b>a</b> b")
            await tab.until("document.querySelector('.result .figures')")
            answer = await tab.evaluate("document.querySelector('.answer').textContent")
            bold = await tab.evaluate("document.querySelectorAll('.answer b').length")

            await tried(tab, "dates", "generate", "a HOLD")
            await tab.until("document.querySelector('.answer').textContent === 'a '")
            busy = await tab.evaluate("document.querySelector('.send').disabled")
            await tab.evaluate("document.querySelector('.stop').click()")
            await tab.until("!document.querySelector('.send').disabled")
            stopped = await text_of(tab, ".problem")

            await tried(tab, "dates", "generate", "w " * 17)
            await tab.until("document.querySelector('.problem').innerText.includes('17 tokens')")
            refused = await text_of(tab, ".problem")

    assert (answer, bold, busy, stopped) == ("<b>a</b> b ", 0, True, "Stopped.")
    assert refused == "Refused. prompt: 17 tokens, at most 16"


@in_browser
async def test_a_browser_chats_in_turns(tmp_path: Path):
    talk = chatting()
    turns = "[...document.querySelectorAll('.turns .said')].map((one) => one.textContent)"
    async with page_of(talk) as caller:
        async with seen(caller.url, tmp_path) as tab:
            for number, said in enumerate(("hello you", "and again"), 1):
                await tried(tab, "talk", "chat", said)
                await tab.until(f"document.querySelectorAll('.turns .figures').length === {number}")
            shown = await tab.evaluate(turns)
            await tried(tab, "talk", "chat", "w " * 17)
            await tab.until("!document.querySelector('.problem').hidden")
            kept = await tab.evaluate("document.querySelector('[data-way=chat] .prompt').value")
            after_refusal = await tab.evaluate(turns)
            await tab.evaluate("document.querySelector('.again').click()")
            anew = await tab.evaluate(turns)

    assert shown == ["hello you", "hello you ", "and again", "and again "]
    assert (after_refusal, kept, anew) == (shown, "w " * 17, [])
    messages = talk.requests[1].prompt.messages  # type: ignore[union-attr]
    assert [(one.role, one.content) for one in messages] == [
        ("user", "hello you"),
        ("assistant", "hello you "),
        ("user", "and again"),
    ]


@in_browser
async def test_a_browser_tries_each_kind_of_model_that_gives_no_text(tmp_path: Path):
    tagger = FakePredictor()
    moods = FakePredictor(prediction_package("moods", task="classify", takes="text"))
    vectors = FakePredictor(prediction_package("vectors", task="embed", labels=[]))
    engines = (tagger, moods, vectors, Reranker(), eyes())
    async with page_of(*engines) as caller:
        async with seen(caller.url, tmp_path, 420) as tab:
            await tried(tab, "tags", "label", "<i>é</i> runs")
            await tab.until("document.querySelector('mark')")
            spans = await tab.evaluate(
                "[...document.querySelectorAll('mark')].map((one) => one.textContent)"
            )
            await tried(tab, "moods", "classify", "fine")
            await tab.until("document.querySelectorAll('.bars li').length === 3")
            classes = await text_of(tab, ".bars")

            await tried(tab, "vectors", "similarity", "one", "two")
            await tab.until("document.querySelector('.score')")
            score = await text_of(tab, ".score strong")

            await tried(tab, "order", "rank", "why", "a\nlonger one\nbcd")
            await tab.until("document.querySelector('ol.bars')")
            order = await tab.evaluate(
                "[...document.querySelectorAll('ol.bars .name')].map((one) => one.textContent)"
            )

            await tab.evaluate("document.querySelector('[data-model=eyes]').click()")
            data = json.dumps([*PNG])
            await tab.evaluate(
                f"""(() => {{
                const files = new DataTransfer(), input = document.querySelector(".file");
                files.items.add(new File([new Uint8Array({data})], "p.png", {{type: "image/png"}}));
                input.files = files.files;
                input.dispatchEvent(new Event("change"));
                }})()"""
            )
            await tab.evaluate("document.querySelector('form[data-way=classify] .send').click()")
            await tab.until("document.querySelectorAll('.bars li').length === 3")
            digit = await text_of(tab, ".bars")
            overflow = await tab.evaluate("document.documentElement.scrollWidth - innerWidth")

    assert spans == ["<i>é</i>DET", "runsDET"]
    assert classes.split() == ["DET", "66.5", "%", "VERB", "24.5", "%", "NOUN", "9", "%"]
    assert (score, order) == ("1.000", ["longer one", "bcd", "a"])
    assert digit == classes
    assert overflow <= 0


@in_browser
async def test_a_browser_asks_for_a_key_where_one_is_needed_and_keeps_it_nowhere(tmp_path: Path):
    def models(request: object, context: grpc.ServicerContext) -> object:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer theirs":
            fail(context, grpc.StatusCode.UNAUTHENTICATED, "show a token")
        return admin_service_pb2.ListModelsResponse(
            models=[
                admin_service_pb2.ModelInfo(
                    model="new",
                    model_version="1",
                    state=admin_service_pb2.MODEL_STATE_FAILED,
                    message="a file is missing",
                    capabilities=["generate"],
                )
            ]
        )

    with scripted_server() as script:
        script.answers["ListModels"] = models
        async with http_server(script.address) as caller:
            async with browser_tab(tmp_path) as tab:
                await tab.open(caller.url)
                await tab.until("!document.getElementById('keys').hidden")
                asked = await text_of(tab, "#banner")
                await tab.evaluate("document.getElementById('key').value = 'theirs'")
                await tab.evaluate("document.querySelector('#keys .main').click()")
                await tab.until("document.querySelector('[data-model=new]')")
                await tab.until("document.getElementById('keys').hidden")
                failed = await text_of(tab, "#try")
                stored = await tab.evaluate(
                    "localStorage.length + sessionStorage.length + document.cookie.length"
                )

    assert "asks for an API key" in asked and "show a token" in asked
    assert "Could not be loaded. a file is missing" in failed
    assert stored == 0


@in_browser
async def test_a_browser_says_that_the_server_is_gone_until_it_is_back(tmp_path: Path):
    async with browser_tab(tmp_path) as tab:
        async with page_of(FakeGenerator()) as caller:
            await tab.open(caller.url)
            await tab.until("document.querySelector('[data-model=dates]')")
            port = int(caller.url.rpartition(":")[2])
        await tab.evaluate("document.querySelector('#banner button').click()")
        await tab.until("document.getElementById('health').innerText === 'No answer'")
        gone = await text_of(tab, "#banner")
        await tried(tab, "dates", "generate", "a")
        await tab.until("!document.querySelector('.problem').hidden")
        unsent = await text_of(tab, ".problem")
        async with page_of(FakeGenerator(), port=port):
            await tab.evaluate("document.querySelector('#banner button').click()")
            await tab.until("document.getElementById('health').innerText === 'Serving'")
            hidden = await tab.evaluate("document.getElementById('banner').hidden")

    assert f"No answer from 127.0.0.1:{port}" in gone
    assert (unsent.startswith("No answer."), hidden) == (True, True)
