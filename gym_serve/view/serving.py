"""`serve`: the viewer as a process: the server, and beside it the process that indexes."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from gym_serve.gateway.access import is_loopback
from gym_serve.servers.usage import Prices
from gym_serve.types.errors import BadRequest
from gym_serve.view.following import start_following
from gym_serve.view.index import drop_stale
from gym_serve.view.security import Guard
from gym_serve.view.server import application
from gym_serve.view.sources import cache_folder
from gym_serve.view.view import View


def serve(
    paths: Sequence[Path],
    *,
    host: str,
    port: int | None,
    default_port: int,
    browser: bool,
    say: Callable[[str], None],
    prices: Mapping[str, Prices] | None = None,
) -> None:
    """Show the runs of some paths until the process is interrupted.

    Args:
        port: which port; None for ``default_port``, or a free one if that is taken.
        default_port: see ``port``.
        browser: whether to open the page.
        prices: see `View`.

    Raises:
        InvalidRequest: a path does not exist, or is a file of another kind.
        BadRequest: the port is taken, or the index cannot be kept.
    """
    cache = cache_folder()
    view = View(paths, cache, prices)
    drop_stale(cache)
    listening = _listen(host, port, default_port)
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    indexing = start_following(paths, cache)
    try:
        shown = f"[{host}]" if ":" in host else host
        if host in ("0.0.0.0", "::"):
            shown = socket.gethostname()
        url = f"http://{shown}:{listening.getsockname()[1]}/" + (f"#token={token}" if token else "")

        def answering() -> None:
            say(url)
            if browser:
                threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

        with suppress(KeyboardInterrupt):
            _Server(application(view, token), answering).run(sockets=[listening])
    finally:
        listening.close()
        view.close()
        if indexing.stdin is not None:
            indexing.stdin.close()
        indexing.wait()


class _Server(uvicorn.Server):
    """Says when it answers."""

    def __init__(self, app: Guard, answering: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._answering = answering

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._answering()


def _listen(host: str, port: int | None, default_port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (default_port, 0) if port is None else (port,):
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, wanted))
            return listening
        except OSError as error:
            listening.close()
            if port is None and wanted and error.errno == errno.EADDRINUSE:
                continue
            raise BadRequest(f"cannot listen at {host}:{wanted}: {error.strerror}") from error
    raise BadRequest(f"no port of {host} is free")
