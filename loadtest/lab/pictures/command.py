"""Makes the pictures of the pages from what runs: `python -m loadtest.lab pictures`.

A server of the date model is asked by a load test; its web page and the load test's page are
looked at by Chromium, which `apt install chromium` brings.
"""

from __future__ import annotations

import asyncio
import io
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
from PIL import Image

from loadtest.errors import LoadTestError
from loadtest.lab.peers.chart import write_png
from loadtest.lab.pictures.browser import Tab, browser_tab
from loadtest.lab.serve import ROOT, TOKENWEIR, free_port, served
from loadtest.result_file import write_atomically

SPEED = Path("loadtest/docs/pictures/relative-speed.png")
ATTENTION = Path("exporter/docs/pictures/attention.png")
LOAD_TEST = Path("loadtest/docs/pictures/load-test.png")
WEB_PAGE = Path("server/docs/pictures/web-page.png")
RESULT = Path("loadtest/results/gpt2.json")  # what SPEED draws
MAX_BYTES = 150_000
_TEXT = "3rd of Feb, 1998"
_WIDTH = 1280  # pixels
_MAX_COLOURS = 128
_LOAD = (
    "loadtest --model dates --rate 10-60 --duration 40 --warmup 5 --slo ttft=200ms,e2e=1s "
    "--verify 0.05 --seed 1"
).split()


@click.command()
@click.option("--package", type=click.Path(exists=True, path_type=Path), default="packages/dates")
@click.option(
    "--checkpoint", type=click.Path(exists=True, path_type=Path), default="checkpoints/dates"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=ROOT,
    help="Where the folders of the pages are.  [default: this checkout]",
)
def main(package: Path, checkpoint: Path, out: Path) -> None:
    """Make all pictures: the chart of speeds, attention, the load test's page, the web page."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_png(ROOT / RESULT, scratch / "speed.png")
        _keep((scratch / "speed.png").read_bytes(), out / SPEED)
        heads = scratch / "heads.png"
        _run("explain", str(checkpoint), _TEXT, "--out", str(heads))
        _keep(heads.read_bytes(), out / ATTENTION)
        port, page = free_port(), scratch / "load-test.html"
        options = ("--http-port", str(port), "--admin-port", "0")
        with served(package.absolute(), replicas=2, options=options) as server:
            reach = ("--server", server.address, "--admin", str(server.admin))
            _run(*_LOAD, *reach, "--html", str(page))
            _keep(_look_at(f"http://127.0.0.1:{port}/", _ask, scratch), out / WEB_PAGE)
        _keep(_look_at(page.as_uri(), _read, scratch), out / LOAD_TEST)


async def _ask(tab: Tab) -> None:
    """Ask the date model on the web page, and wait for the end of its answer."""
    form = "document.querySelector('form[data-way=generate]"
    await tab.until("document.querySelectorAll('#workers tr').length === 2")
    await tab.evaluate("document.querySelector('[data-model=dates]').click()")
    await tab.evaluate("document.querySelector('.ways [data-way=generate]')?.click()")
    await tab.evaluate(f"{form} .prompt').value = '{_TEXT}'")
    await tab.evaluate(f"{form} .send').click()")
    await tab.until("document.querySelector('.result .figures')")


async def _read(tab: Tab) -> None:
    """Leave out the settings, which are a long table below the pictures."""
    await tab.until("document.images.length && [...document.images].every(one => one.complete)")
    await tab.evaluate("document.querySelector('.settings').remove()")


def _look_at(url: str, prepare: Callable[[Tab], Awaitable[None]], scratch: Path) -> bytes:
    async def look() -> bytes:
        async with browser_tab(scratch / "profile") as tab:
            await tab.resize(_WIDTH)
            await tab.open(url)
            await prepare(tab)
            return await tab.picture()

    return asyncio.run(look())


def _run(*words: str) -> None:
    """Run a command of ours; a load test that misses a bound is a picture too."""
    ended = subprocess.run((*TOKENWEIR, *words), cwd=ROOT, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        raise LoadTestError(f"tokenweir {words[0]} failed: {ended.stderr.strip()}")


def _keep(png: bytes, path: Path) -> None:
    """Write a picture with few colours, which pages need, as a small file."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    small = io.BytesIO()
    image.quantize(_MAX_COLOURS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    if len(small.getvalue()) > MAX_BYTES:
        raise LoadTestError(
            f"{path.name} has {len(small.getvalue()):,} bytes, more than {MAX_BYTES:,}: show less"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, small.getvalue())
    click.echo(f"written: {path} ({image.width} x {image.height}, {len(small.getvalue()):,} bytes)")
