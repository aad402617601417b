"""The reference: the same work by hand, without sessions that survive, typed failures or a journal.

An agent and an environment, each a FastAPI application in a uvicorn process, which call with aiohttp, and a
loop that collects their rollouts: what one would write in an afternoon.
"""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

__all__ = ["serve"]


def serve(app: FastAPI) -> None:
    """Serve an application on loopback, on a port that is free, until terminated; prints its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=600)
        uvicorn.Server(config).run(sockets=[listening])
