"""Requests per second of the model server, which the other benchmarks use: it must never limit them.

    python -m benchmarks.model_server [--clients 2] [--connections 64] [--seconds 5]

Client processes keep connections busy, each with one request at a time, as wrk does: raw bytes of a chat
request of 1 KB out, and the next one when anything comes back. Where they share the cores with the server,
what counts is the rate per second of the server's CPU, i.e. what it would serve on a core of its own.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import cast
from urllib.parse import urlsplit

import orjson
import psutil

from benchmarks.harness.work import model_behaviour, rows
from benchmarks.loopback import run_model_server


def request() -> bytes:
    """A chat request."""
    (row,) = rows(1)
    params = row["responses_create_params"]
    body = orjson.dumps({"model": "loopback", "messages": params["input"], "tools": params["tools"]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: loopback\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Client(asyncio.Protocol):
    """One connection; `answers` counts."""

    def __init__(self) -> None:
        self.answers = 0
        self._request = request()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """An answer, which is small enough to come in one piece."""
        self.answers += 1
        self._transport.write(self._request)


async def load(port: int, connections: int, seconds: float) -> int:
    """Answers to all connections of one client process."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(connections)]
    await asyncio.sleep(seconds)
    return sum(client.answers for client in clients)


def client_process(port: int, connections: int, seconds: float, result: Connection) -> None:
    """Body of a client process."""
    result.send(asyncio.run(load(port, connections, seconds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--connections", type=int, default=64, help="connections of each")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with run_model_server(model_behaviour()) as server:
        port = urlsplit(server.url).port
        process = psutil.Process(server.pid)
        cpu, started = sum(process.cpu_times()[:2]), time.perf_counter()
        results = []
        for _ in range(arguments.clients):
            receive, send = context.Pipe(duplex=False)
            context.Process(
                target=client_process, args=(port, arguments.connections, arguments.seconds, send)
            ).start()
            results.append(receive)
        answers = sum(result.recv() for result in results)
        seconds, cpu = time.perf_counter() - started, sum(process.cpu_times()[:2]) - cpu
    result = {
        "settings": vars(arguments),
        "per_second": answers / arguments.seconds,
        "per_cpu_second": answers / cpu,
    }
    print(orjson.dumps({**result, "share_of_a_core": cpu / seconds}, option=orjson.OPT_INDENT_2).decode())


if __name__ == "__main__":
    main()
