"""Settings of Python and of gRPC that a process needs to relay or answer many calls."""

from __future__ import annotations

import functools
import gc
import os
import sys

from engine.errors import ConfigError

# Seconds after which a thread lets another one go on: the threads of gRPC do little, and the event
# loop has more to do than that.
_SWITCH_SECONDS = 0.0005
_EXPERIMENTS = "GRPC_EXPERIMENTS"
# By default several threads of gRPC pass on all that clients and workers send: forty switches
# between threads an answer. Without them a thread of the gateway reads each connection itself, and
# a refusal costs a fifth less.
_NO_THREADS = "-event_engine_listener,-event_engine_client"


@functools.cache  # once a process
def prepare_to_relay() -> None:
    """Import gRPC without threads of its own; raise ConfigError if that has been done with them.

    gRPC reads the variable when it is imported. Ray's own gRPC in this process must not, and so the
    variable is taken back.
    """
    before = os.environ.get(_EXPERIMENTS, "")
    wanted = ",".join(dict.fromkeys(filter(None, [*before.split(","), *_NO_THREADS.split(",")])))
    if "grpc" in sys.modules and not {*_NO_THREADS.split(",")} <= {*before.split(",")}:
        raise ConfigError(
            f"gRPC was imported before {_EXPERIMENTS} could be set, by what runs this command; "
            f"run it without that, or with {_EXPERIMENTS}={wanted}"
        )
    os.environ[_EXPERIMENTS] = wanted
    import grpc  # noqa: F401

    if before:
        os.environ[_EXPERIMENTS] = before
    else:
        del os.environ[_EXPERIMENTS]
    switch_threads_often()


def switch_threads_often() -> None:
    """Switch between the threads of this process more often than Python does by default."""
    sys.setswitchinterval(_SWITCH_SECONDS)


def keep_what_is_there() -> None:
    """Freeze for the garbage collector all that was made so far: a server keeps it to its end.

    Modules and models are hundreds of thousands of objects. To look at all of them again and again
    was a sixth of what a gateway does, and stopped its streams for as long as it took.
    """
    gc.collect()
    gc.freeze()
