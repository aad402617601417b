"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import socket

from gym_serve.routing.starting import free_port


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
