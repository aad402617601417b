"""What stands before the gateway, Serve's proxy or HAProxy, tells it when a client leaves.

HAProxy as Serve starts it does not where a body follows its headers in a packet of its own: see docs/http.md.
"""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from support import haproxy


def told(http: httpx.Client, question: str) -> int:
    """What the model counts."""
    answer = http.post("/told/v1/responses", json={"input": question}).json()
    return int(answer["output"][-1]["content"][0]["text"])


def test_the_way_of_these_tests(url: str) -> None:
    port = urlsplit(url).port
    sockets = psutil.net_connections("tcp4")
    pids = {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == port}
    name = "haproxy" if haproxy.ENABLED else "ray::ProxyActor"
    assert {psutil.Process(pid).name() for pid in pids} == {name}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_leaves_frees_its_slot(http: httpx.Client, url: str, stream: bool) -> None:
    parts = urlsplit(url)
    body = json.dumps({"input": "hang", "stream": stream}).encode()
    headers = f"Host: {parts.netloc}\r\nContent-Length: {len(body)}\r\n"
    head = f"POST {parts.path}/told/v1/responses HTTP/1.1\r\n{headers}\r\n"
    before = told(http, "cancelled?")
    with socket.create_connection((parts.hostname, parts.port)) as client:
        client.sendall(head.encode())
        time.sleep(0.2)  # else both may be read at once, and HAProxy misses nothing then
        client.sendall(body)
        while not told(http, "hanging?"):
            pass  # the time limit of the test ends it
    while told(http, "hanging?"):
        pass
    assert told(http, "cancelled?") == before + 1
