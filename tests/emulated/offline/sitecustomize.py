"""Python imports this first: what would leave the machine is told, and refused."""

from __future__ import annotations

import sys

_REACHED = "reaches for the network"
_HERE = ("127.0.0.1", "::1", "localhost", None, "")


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # else a path, on this machine
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in _HERE:
        sys.stderr.write(f"{_REACHED}: {event} {host!r}\n")
        raise OSError(f"{_REACHED}: {host!r}")


sys.addaudithook(_refuse)
