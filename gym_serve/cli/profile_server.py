"""`gym-serve profile-server`: a flame graph of what a running server does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gym_serve.cli import local_ray
from gym_serve.cli.completion import servers
from gym_serve.cli.lifecycle import ClusterOption, GraphOption, graph_of
from gym_serve.cli.options import JsonOption
from gym_serve.cli.printing import echo, print_json


def profile_server(
    server: Annotated[
        str,
        typer.Argument(metavar="SERVER", help="Name of a server in a running graph.", autocompletion=servers),
    ],
    *,
    seconds: Annotated[float, typer.Option(min=1, max=300, help="How long to sample.")] = 10,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="The file: .svg or .json. [default: SERVER.svg]"),
    ] = None,
    graph: GraphOption = None,
    address: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sample where the CPU time of a server goes, in all of its replicas, while it works.

    The result is a flame graph that any browser shows. With the ending .json it is a file for
    https://www.speedscope.app, which also has the order of time, and threads and replicas side by side.

    Exit status: 0, or 1 if no graph has the server or its machine allows no profile.

    Example: gym-serve profile-server math_agent --seconds 10
    """
    local_ray.connect(address)
    name = graph_of(server, graph)
    # Imported here: Ray reads the environment, which `local_ray` sets, at import.
    import orjson

    from gym_serve.graph.flame_graph import flame_graph
    from gym_serve.graph.profiling import profile_server as sample

    profile = asyncio.run(sample(name, server, seconds))
    path = output or Path(f"{server}.svg")
    path.write_bytes(orjson.dumps(profile) if path.suffix == ".json" else flame_graph(profile).encode())
    counts = [len(thread["samples"]) for thread in profile["profiles"]]
    if as_json:
        print_json({"ok": True, "file": str(path), "threads": len(counts), "samples": sum(counts)})
    else:
        where = "at speedscope.app" if path.suffix == ".json" else "in a browser"
        echo(f"{path}: {sum(counts):,} samples of {len(counts)} threads; open it {where}")
