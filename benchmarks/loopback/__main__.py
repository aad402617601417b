"""`python -m benchmarks.loopback`: serve until interrupted; prints the URL first."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from typing import Any

from benchmarks.loopback import FAULTS, Behaviour, Fault
from benchmarks.loopback.server import Model, ModelProtocol
from gym_serve.types.errors import InvalidRequest


async def serve(behaviour: Behaviour, port: int, *, until_eof: bool) -> None:
    """Serve on loopback; with ``until_eof``, until standard input ends."""
    model = Model(behaviour)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ModelProtocol(model), "127.0.0.1", port, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    if until_eof:
        await asyncio.to_thread(sys.stdin.read)
    else:
        await server.serve_forever()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed: it serves half as much again."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def fault(text: str) -> tuple[Fault, int]:
    """``kind=N``."""
    kind, _, every = text.partition("=")
    for known in FAULTS:
        if kind == known:
            return known, int(every)
    raise ValueError(text)


def main() -> None:
    """The command."""
    default = Behaviour()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loopback", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes any that is free")
    parser.add_argument("--latency-ms", type=float, default=default.latency_ms, help="time for an answer")
    parser.add_argument("--token-latency-ms", type=float, default=0.0, help="between two tokens of a stream")
    parser.add_argument("--turns", type=int, default=default.turns, help="turns that call tools")
    parser.add_argument("--calls-per-turn", type=int, default=default.calls_per_turn, help="calls in each")
    parser.add_argument("--tool", default=default.tool, help="name of the tool")
    parser.add_argument("--arguments", default=default.arguments, help="of every call, as JSON")
    parser.add_argument("--answer", default=default.answer, help="text of the last turn")
    parser.add_argument("--tokens", type=int, default=0, help="send so many token ids per turn")
    parser.add_argument(
        "--fault",
        type=fault,
        action="append",
        default=[],
        metavar="KIND=N",
        help=f"let every N-th request fail; KIND is one of {', '.join(FAULTS)}; may be repeated",
    )
    parser.add_argument("--until-eof", action="store_true", help="stop when standard input ends")
    given = vars(parser.parse_args())
    port, until_eof, faults = given.pop("port"), given.pop("until_eof"), dict(given.pop("fault"))
    try:
        behaviour = Behaviour(**given, faults=faults)
    except InvalidRequest as error:
        parser.error(error.message)
    with contextlib.suppress(KeyboardInterrupt):
        run(serve(behaviour, port, until_eof=until_eof))


main()
