"""A graph is ready once Serve's proxy knows its route, too."""

import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from gym_serve.client import deployed
from gym_serve.cluster.starting import free_port
from gym_serve.graph import load_graph, resolve

# What Serve's proxy says of its routes while it starts, before it hears of a graph, and after that.
STARTS = (503, b"Route table is not populated yet.")
OTHERS, KNOWN = (200, b'{"/a":"a"}'), (200, b'{"/a":"a","/b":"b"}')


@pytest.fixture
def answers() -> list[tuple[int, bytes]]:
    """What the proxy has yet to answer; the last one again and again."""
    return [STARTS, OTHERS, OTHERS, KNOWN, OTHERS]


@pytest.fixture
def proxy(answers: list[tuple[int, bytes]]) -> Iterator[str]:
    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/-/routes"
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def launch(monkeypatch: pytest.MonkeyPatch, url: str) -> list[str]:
    """Launch a graph that Serve runs at once; the names of the applications that it was asked to run."""
    run: list[str] = []
    monkeypatch.setattr(deployed, "_run", lambda _, name, prefix: run.append(name))
    monkeypatch.setattr(deployed, "preflight", lambda *_, **__: [])
    monkeypatch.setattr(deployed, "running_version", lambda name: None)
    monkeypatch.setattr(deployed, "http_address", lambda: url)
    graph = resolve(load_graph({"models": {"m": {"type": "scripted_model"}}}).spec)
    deployed.launch(graph, "b", "/b", owned=True)
    return run


def test_waits_for_its_route(
    monkeypatch: pytest.MonkeyPatch, proxy: str, answers: list[tuple[int, bytes]]
) -> None:
    launch(monkeypatch, proxy)
    assert answers == [OTHERS]


@pytest.mark.timeout(60)
def test_waits_for_no_proxy_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed, "_ROUTE_SECONDS", math.inf)  # if it did, it would not end
    assert launch(monkeypatch, f"http://127.0.0.1:{free_port()}") == ["b"]


def test_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, proxy: str, answers: list[tuple[int, bytes]]
) -> None:
    monkeypatch.setattr(deployed, "_ROUTE_SECONDS", 0.2)
    answers[:] = [OTHERS, STARTS]
    launch(monkeypatch, proxy)
    assert answers == [STARTS]  # it has asked
