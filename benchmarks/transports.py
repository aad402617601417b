"""What one call between two processes costs, by transport: an echo of 1 KB.

    python -m benchmarks.transports [--calls 3000] [--rounds 5]

Prints a table: calls per second one after the other, the same with 64 under way, and the microseconds of CPU
per call of both processes together. Transports take turns in every round; figures are medians.

- handle: a Serve deployment handle, by gRPC and by value, its router on the caller's loop (Serve's quickest).
- grpc: one unary call of grpc.aio per call.
- grpc stream: one bidirectional stream of grpc.aio for all calls.
- websocket: what gym_serve uses, `Channel` and `Listener`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio

from gym_serve.cluster.routing.rpc import Address, Channel, Listener
from gym_serve.servers.transport import Call, Reply

BODY = b"x" * 1000
Echo = Callable[[], Awaitable[Any]]
Cpu = Callable[[], Awaitable[float]]


def cpu_seconds() -> float:
    """CPU that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class EchoService(grpc.GenericRpcHandler):
    """Echoes bytes over grpc.aio, and tells the CPU that its process has used."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        async def unary(body: bytes, context: Any) -> bytes:
            return body

        async def stream(bodies: Any, context: Any) -> Any:
            async for body in bodies:
                yield body

        async def cpu(body: bytes, context: Any) -> bytes:
            return repr(cpu_seconds()).encode()

        name = details.method.removeprefix("/echo/")
        if name == "stream":
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler({"unary": unary, "cpu": cpu}[name])


def serve_echo(pipe: Connection) -> None:
    """The other process: a gRPC server and a `Listener`."""

    async def run() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((EchoService(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

        async def dispatch(call: Call) -> Reply:
            return Reply(200, call.body)

        async def stream(call: Call) -> AsyncIterator[bytes]:
            yield call.body

        address = await Listener(dispatch, stream, lambda: 0).start("127.0.0.1")
        pipe.send((port, address))
        await server.wait_for_termination()

    asyncio.run(run())


class HandleEcho:
    """The same behind a Serve handle."""

    async def echo(self, body: bytes) -> bytes:
        return body

    async def cpu(self) -> float:
        return cpu_seconds()


def stream_echo(call: Any) -> Echo:
    """Echoes over one stream, whose answers come in order."""
    waiting: list[asyncio.Future[bytes]] = []

    async def read() -> None:
        while (body := await call.read()) is not grpc.aio.EOF:
            waiting.pop(0).set_result(body)

    reader = asyncio.ensure_future(read())
    writing = asyncio.Lock()

    async def echo() -> bytes:
        assert not reader.done()
        answer = asyncio.get_running_loop().create_future()
        async with writing:  # grpc.aio takes one write at a time
            waiting.append(answer)
            await call.write(BODY)
        return await answer

    return echo


async def measure(echo: Echo, cpu: Cpu, calls: int) -> tuple[float, float, float]:
    """Calls per second alone, with 64 under way, and then the CPU per call in microseconds."""
    started = time.perf_counter()
    for _ in range(calls):
        await echo()
    alone = calls / (time.perf_counter() - started)

    async def some() -> None:
        for _ in range(calls // 64):
            await echo()

    before, started = cpu_seconds() + await cpu(), time.perf_counter()
    await asyncio.gather(*(some() for _ in range(64)))
    elapsed = time.perf_counter() - started
    used = cpu_seconds() + await cpu() - before
    done = calls // 64 * 64
    return alone, done / elapsed, 1e6 * used / done


async def compare(port: int, address: Address, calls: int, rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """The figures of every round, by transport."""
    from ray import serve

    deployed = serve.run(serve.deployment(max_ongoing_requests=1000)(HandleEcho).bind(), route_prefix="/echo")
    deployed._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
    options = {"_by_reference": False, "request_serialization": "pickle", "response_serialization": "pickle"}
    handle = deployed.options(method_name="echo", **options)
    handle_cpu = deployed.options(method_name="cpu", **options)

    async with AsyncExitStack() as stack:
        grpc_channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        unary, cpu = grpc_channel.unary_unary("/echo/unary"), grpc_channel.unary_unary("/echo/cpu")
        channel = await Channel.open(address)
        stack.push_async_callback(channel.close)
        call = Call("echo", BODY)

        async def other_cpu() -> float:
            return float(await cpu(b""))

        async def replica_cpu() -> float:
            return float(await handle_cpu.remote())

        ways: dict[str, tuple[Echo, Cpu]] = {
            "replica": (lambda: handle.remote(BODY), replica_cpu),  # type: ignore[arg-type, return-value]
            "grpc": (lambda: unary(BODY), other_cpu),
            "grpc stream": (stream_echo(grpc_channel.stream_stream("/echo/stream")()), other_cpu),
            "websocket": (lambda: channel.call(call), other_cpu),
        }
        found: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, (echo, used) in ways.items():
                found[way].append(await measure(echo, used, calls))
        serve.shutdown()  # type: ignore[no-untyped-call]  # while the loop of its handles runs
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=serve_echo, args=(there,), daemon=True)
    other.start()
    port, address = here.recv()

    import ray

    ray.init(log_to_driver=False, logging_level="error")
    found = asyncio.run(compare(port, address, arguments.calls, arguments.rounds))
    ray.shutdown()
    other.terminate()
    print("| transport | one after the other, calls/s | 64 under way, calls/s | CPU per call, µs |")
    print("| --- | --- | --- | --- |")
    for way, rounds in found.items():
        alone, together, cpu = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"| {way} | {alone:,.0f} | {together:,.0f} | {cpu:,.0f} |")


if __name__ == "__main__":
    main()
