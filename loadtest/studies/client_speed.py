"""The study of the load test itself: how many streamed messages one process takes on one core.

`python -m loadtest.studies.client_speed --out loadtest/results/client-speed` has a server of its
own, which sends the same messages over and over as bytes, on the second core. The load test has the
first one, with all of its threads. It reads every stream as it reads a real one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import grpc
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

from loadtest.arrival.arrival import ClosedLoop
from loadtest.config import LoadConfig
from loadtest.runner import run
from loadtest.studies.heading import write_result
from loadtest.work.ask import Work, texts
from loadtest.work.common import Common

_OURS, _SERVER = 0, 1  # cores


@dataclass(frozen=True)
class Speed:
    """Measurements of one run."""

    num_messages: int  # with tokens
    seconds: float
    processor_seconds: float  # all threads of the load test

    @property
    def per_second(self) -> float:
        return self.num_messages / self.seconds


def measure(address: str, work: Work, num_streams: int, num_requests: int) -> Speed:
    """Read so many streams; RuntimeError if one of them fails."""
    config = LoadConfig(address, "m", ClosedLoop(num_streams), num_requests)
    began, processor = time.monotonic(), time.process_time()
    report = run(config, work)
    used = Speed(
        sum(len(record.token_times) for record in report.records),
        time.monotonic() - began,
        time.process_time() - processor,
    )
    if report.num_failed:
        raise RuntimeError(f"{report.num_failed} requests failed: {report.summary.errors}")
    return used


def serve(num_tokens: int) -> None:
    """Answer every stream with so many tokens, a message each, until the input ends."""
    messages = [one.SerializeToString() for one in _stream(num_tokens)]
    answer: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
        lambda request, context: iter(messages)
    )
    handler = grpc.method_handlers_generic_handler(
        "tokenweir.v1.GenerationService", {"GenerateStream": answer}
    )
    server = grpc.server(ThreadPoolExecutor(max_workers=64), handlers=[handler])
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None).wait()


def _stream(num_tokens: int) -> Iterator[pb.GenerateStreamResponse]:
    for number in range(1, num_tokens + 1):
        tokens = common_pb2.TokenIds(ids=[number])
        delta = pb.GenerateStreamResponse.Delta(text=" word", tokens=tokens)
        yield pb.GenerateStreamResponse(sequence_number=number, delta=delta)
    end = pb.GenerateStreamResponse.Finished(finish_reason=common_pb2.FINISH_REASON_LENGTH)
    yield pb.GenerateStreamResponse(sequence_number=num_tokens + 1, finished=end)
    usage = common_pb2.Usage(input_tokens=1, output_tokens=num_tokens)
    summary = pb.GenerateStreamResponse.Summary(usage=usage)
    yield pb.GenerateStreamResponse(sequence_number=num_tokens + 2, summary=summary)


@contextmanager
def _served(num_tokens: int) -> Iterator[str]:
    """Run the server on its core, in a process of its own; yield its address."""
    code = f"from loadtest.studies.client_speed import serve; serve({num_tokens})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        os.sched_setaffinity(process.pid, {_SERVER})
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@click.command()
@click.option("--streams", type=click.IntRange(1), default=32, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Without an ending.")
def main(streams: int, tokens: int, requests: int, rounds: int, out: Path) -> None:
    """Read streams whose answers are dropped, then streams whose answers are kept, in turns."""
    os.sched_setaffinity(0, {_OURS})
    works: dict[str, Work] = {"read": texts(("p",)), "kept": Common(texts(("p",)), num_turns=2)}
    found: dict[str, list[Speed]] = {name: [] for name in works}
    with _served(tokens) as address:
        for _ in range(rounds):
            for name, work in works.items():
                turns = 2 if name == "kept" else 1
                found[name].append(measure(address, work, streams, requests // turns))
    for name, speeds in found.items():
        click.echo(f"{name}: {_median(speeds):,.0f} messages/s on one core")
    document = {
        "messages_per_second": {name: round(_median(one)) for name, one in found.items()},
        "rounds": {name: [asdict(speed) for speed in one] for name, one in found.items()},
    }
    write_result("loadtest.studies.client_speed", document, out)


def _median(speeds: list[Speed]) -> float:
    return statistics.median(speed.per_second for speed in speeds)


if __name__ == "__main__":
    main()
