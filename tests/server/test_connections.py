"""What is written to a client in the same moment leaves in one write; nothing stays behind."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator

import pytest

from server.connections import Connections, Corked

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="only Linux has it")


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A server's socket and its client's; small writes leave at once, as gRPC wants it."""
    host = request.param
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        with socket.create_connection(listening.getsockname()[:2], timeout=60) as client:
            server, _ = listening.accept()
            with server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
                yield server, client


def peer_of(server: socket.socket) -> bytes:
    """Return the address of a client as gRPC writes it."""
    host, port = server.getpeername()[:2]
    return (f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}").encode()


def received(client: socket.socket) -> bytes:
    """Return what is there now."""
    client.setblocking(False)
    try:
        return client.recv(100)
    except BlockingIOError:
        return b""
    finally:
        client.settimeout(60)


def test_writes_to_a_corked_connection_arrive_together(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    server, client = pair
    connection = Connections().of(peer_of(server))

    with Corked([connection] * 3):
        for part in (b"one ", b"two ", b"three"):
            server.send(part)
        meanwhile = received(client)

    assert (meanwhile, client.recv(100)) == (b"", b"one two three")
    server.send(b"at once")
    assert client.recv(100) == b"at once"


def test_few_calls_are_not_held_back(pair: tuple[socket.socket, socket.socket]) -> None:
    server, _ = pair
    connection = Connections().of(peer_of(server))

    with Corked([connection, Connections().of(b"ipv4:127.0.0.1:1"), connection]):
        assert not server.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK)


@pytest.mark.parametrize(("most", "is_corked"), [(3, False), (10_000, True)])
def test_among_many_files_none_is_looked_for(
    most: int,
    is_corked: bool,
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.connections._MOST_FILES", most)
    server, _ = pair
    connection = Connections().of(peer_of(server))

    with Corked([connection] * 3):
        assert bool(server.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK)) is is_corked


def test_a_connection_without_calls_is_let_go(pair: tuple[socket.socket, socket.socket]) -> None:
    server, client = pair
    connections = Connections()
    peer = peer_of(server)
    with Corked([connections.of(peer)] * 3):
        gc.collect()

    server.close()

    assert client.recv(100) == b""  # its end: nobody else has the socket


def test_a_burst_for_several_calls_arrives_with_its_end(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    server, client = pair
    connections = Connections()
    connection = connections.of(peer_of(server))
    connections.burst.begin()

    for call in ("one ", "one ", "two ", "three"):
        connection.note_write(call)
        server.send(call.encode())
    at_once = received(client)
    connections.burst.end()

    assert at_once == b"one one "
    assert client.recv(100) == b"two three"


def test_a_long_burst_goes_in_parts(pair: tuple[socket.socket, socket.socket]) -> None:
    server, client = pair
    connections = Connections()
    connection = connections.of(peer_of(server))
    connections.burst.begin()

    def write(calls: range) -> None:
        for call in calls:
            connection.note_write(call)
            server.send(b"x")

    write(range(32))
    assert received(client) == b"x"
    write(range(32, 33))

    came = b""
    while len(came) < 32:
        came += client.recv(100)


def test_what_other_threads_write_goes_at_once(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    server, client = pair
    connections = Connections()
    connection = connections.of(peer_of(server))
    begun = threading.Thread(target=connections.burst.begin)
    begun.start()
    begun.join()

    for call in range(3):
        connection.note_write(call)
        server.send(b"x")
        assert client.recv(100) == b"x"


def test_looking_for_sockets_takes_little_of_the_time(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bytes] = []
    monkeypatch.setattr("server.connections._socket_to", looks.append)
    monkeypatch.setattr("server.connections._PAUSE", 10**9)
    known = Connections()

    for number in range(10):
        known.of(b"ipv4:127.0.0.1:%d" % number).cork(True)

    assert looks == [b"ipv4:127.0.0.1:0"]


def test_calls_of_a_client_have_one_connection() -> None:
    connections = Connections()
    one, other = connections.of(b"ipv4:127.0.0.1:1"), connections.of(b"ipv4:127.0.0.1:2")

    assert connections.of(b"ipv4:127.0.0.1:1") is one
    assert other is not one


@pytest.mark.parametrize(
    "peer", [b"unix:", b"unix:/tmp/socket", b"ipv4:127.0.0.1:1", b"ipv6:%5B::1%5D:1"]
)
def test_what_has_no_socket_here_is_written_as_ever(peer: bytes) -> None:
    with Corked([Connections().of(peer)] * 3):
        pass


def test_a_client_that_goes_meanwhile_ends_nothing(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    server, client = pair
    connection = Connections().of(peer_of(server))

    with Corked([connection] * 3):
        client.close()
        server.close()
