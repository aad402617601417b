"""Schemathesis over the API of every graph that ships: what its document says holds, whatever is sent.

No server error, no undocumented status or media type, answers that fit their schemas, a request id on each,
and nothing refused that fits. What is generated is the same in every run. By hand, with more of it:
`SCHEMATHESIS_EXAMPLES=200 pytest tests/http/test_openapi.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from schemathesis.cli import schemathesis
from support.everything import JUDGE
from support.in_process import serving

from gym_serve.deployments.scripted_model import ScriptedModel
from gym_serve.graph import load_graph, resolve
from gym_serve.graph.spec import Graph
from gym_serve.servers import Operation

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "support" / "schemathesis.toml"
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "5"))
"""Examples of the fuzzing phase, for each operation."""

GRAPHS = sorted((ROOT / "graphs").glob("*.yaml"))


class Scorer(ScriptedModel):
    """Answers as a reward model does."""

    def operations(self) -> dict[str, Operation]:
        return {**super().operations(), "pooling": Operation(self._score, "Raw scores", {"type": "object"})}

    async def _score(self, body: Any) -> dict[str, Any]:
        return {"object": "list", "data": [{"index": 0, "object": "pooling", "data": [0.5]}]}


ON_A_GPU: dict[str, dict[str, Any]] = {
    "math_gpu_judge": {"gpu_judge": JUDGE},
    "reward_model": {"scorer": {"type": Scorer}},
}
"""What takes the place of engines that need a GPU."""

ON_A_CLUSTER = "^/(pressure|stats)$"
"""What replicas are asked for."""

PROCESS_PER_SESSION = {"mcp"}
"""A session, which most of these requests open, costs a second: an example of each is enough."""


def resolved(file: Path, url: str = "http://127.0.0.1:8000") -> Graph:
    """A graph that ships, without endpoints; its remote agent is the one beside it."""
    stand_ins = {f"models.{name}": model for name, model in ON_A_GPU.get(file.stem, {}).items()}
    source = load_graph(file, overrides=stand_ins)
    agent = f"{url}/{file.stem}/local_agent"
    return resolve(source.spec, source=source.path, env={"AGENT_URL": agent}, literal_secrets=False)


@lru_cache
def types_of(file: Path) -> dict[str, str]:
    """The types of the servers of a graph; what stands in for an engine is left out."""
    own = resolved(file).nodes.items()
    return {name: node.type for name, node in own if name not in ON_A_GPU.get(file.stem, {})}


def any_of(names: Iterable[str]) -> str:
    """A pattern of the paths below these servers."""
    return f"^/({'|'.join(map(re.escape, names))})/"


Check = Callable[..., None]


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str]) -> Check:
    """Runs Schemathesis on a graph; its report is the message of the failure."""

    def run(url: str, *options: str) -> None:
        with pytest.raises(SystemExit) as ended:
            schemathesis(
                [
                    *("--config-file", os.fspath(CONFIG), "run", f"{url}/openapi.json", "--no-color"),
                    *("--generation-deterministic", "--continue-on-failure", "--warnings", "off", *options),
                ]
            )
        printed = capfd.readouterr().out
        assert ended.value.code in (None, 0), printed

    return run


EVERY_RUN = {"mcqa", "quickstart", "session_counter"}
"""Graphs whose routes are tried in every run: an answer, a tool, a session. `make slow` tries all."""


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[] if file.stem in EVERY_RUN else pytest.mark.slow)
        for file in GRAPHS
    ],
)
def test_a_graph_that_ships(file: Path, check: Check) -> None:
    """Each operation with an example; those of types that no graph before it has, in all variations."""
    earlier = {type_ for before in GRAPHS[: GRAPHS.index(file)] for type_ in types_of(before).values()}
    servers = types_of(file)
    new = [name for name, type_ in servers.items() if type_ not in earlier]
    # A model is the same in every graph. The load of replicas: test_http_on_a_cluster.py.
    models = [name for name, node in resolved(file).nodes.items() if node.kind == "model"]
    excluded = [ON_A_CLUSTER, any_of(name for name in models if name not in new)]
    with serving(lambda url: {f"/{file.stem}": resolved(file, url)}) as base:
        url = f"{base}/{file.stem}"
        check(url, "--phases", "fuzzing,stateful", "-n", "1", "--exclude-path-regex", "|".join(excluded))
        if new and file.stem not in PROCESS_PER_SESSION:
            of_them = ("--include-path-regex", any_of(new), "--exclude-path-regex", ON_A_CLUSTER)
            check(url, "--phases", "coverage,fuzzing", "-n", str(EXAMPLES), *of_them)
