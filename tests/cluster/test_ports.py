"""Ports for servers that cannot choose one themselves."""

import socket

import pytest

from gym_serve.cluster.starting import check_port, free_port
from gym_serve.types.errors import Unavailable


def test_the_usual_port_if_it_is_free() -> None:
    usual = free_port()
    assert free_port(usual) == usual


def test_another_port_if_the_usual_one_is_taken() -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((host, free_port())) as server:
            taken = server.getsockname()[1]
            assert free_port(taken) != taken


def test_no_port_that_linux_gives_to_connections() -> None:
    assert all(1024 < free_port() < 32_768 for _ in range(50))


def test_a_port_in_use_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}: Address already in use; give another port"):
            check_port(port)
    check_port(port)
