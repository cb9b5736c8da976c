"""A server without Ray on the GPU, and the load test against it.

A worker whose engine has a process for itself, and a gateway before it; the load test goes against
the gateway, as `tokenweir loadtest` of a user does.
"""

from __future__ import annotations

import json
import sys

from loadtest.lab.gpu.models import make_package, serve_unproven, shape_of
from loadtest.lab.gpu.part import Found, Outcome, Settings
from loadtest.lab.gpu.speed import work_of
from loadtest.lab.line_process import LineProcess
from loadtest.lab.serve import tokenweir
from loadtest.lab.stand_in.model import NAME

_SECONDS, _WARM_UP = 10, 3  # a load test's length
_QUICK_SECONDS, _QUICK_WARM_UP = 2, 0.5
_SHARE = 0.05  # answers that are asked again alone


def served(settings: Settings, shape: str, form: str) -> Outcome:
    """Serve a shape and load it with as many requests at once as are told."""
    package = make_package(settings, f"{shape}.{form}")
    most = max(settings.concurrencies)
    serve_unproven(package, (most,))
    num_prompt, num_new = work_of(settings, shape)
    seconds, warm_up = (_QUICK_SECONDS, _QUICK_WARM_UP) if settings.quick else (_SECONDS, _WARM_UP)
    found: Found = {}
    with (
        _process("worker", most, package) as worker,
        _process("gateway", most, worker.read()) as gateway,
    ):
        address = gateway.read()
        for concurrency in settings.concurrencies:
            target = package.with_name("load.json")
            target.unlink(missing_ok=True)
            code, said = tokenweir(
                *("loadtest", "--server", address, "--model", NAME, "--json", target),
                *("--concurrency", concurrency, "--duration", seconds, "--warmup", warm_up),
                *("--input-tokens", num_prompt, "--output-tokens", num_new, "--verify", _SHARE),
                *("--token-ids", f"2-{shape_of(shape, quick=settings.quick)['vocab_size'] - 1}"),
            )
            report = json.loads(target.read_text()) if target.is_file() else {}
            kept = ("summary", "checks", "versions", "invalid")  # and not every request
            kept_of = {name: report[name] for name in kept if name in report}
            found[str(concurrency)] = {"exit_code": code, "said": said, **kept_of}
            print(f"{concurrency} at once: exit code {code}", flush=True)
    bad = [f"{n} at once: {one['said']}" for n, one in found.items() if one["exit_code"]]
    rates = [f"{n}: {_said(one)}" for n, one in found.items()]
    return Outcome("; ".join([*rates, *bad]), found, not bad)


def _said(report: Found) -> str:
    if (summary := report.get("summary")) is None:
        return "no report"
    first = summary["time_to_first_token"]
    return f"{summary['output_tokens_per_second']:,.0f} tokens/s" + (
        f", first token {1e3 * first['p50']:.1f} ms" if first else ""
    )


def _process(kind: str, *arguments: object) -> LineProcess:
    """Start a process of a server; the first that it says is its address."""
    module = "loadtest.lab.stand_in.process"
    return LineProcess([sys.executable, "-m", module, kind, *map(str, arguments)])
