"""A process of gym_serve's own takes the open files that it may have, and needs no more."""

import asyncio
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.upstream import ChatEndpoint

_CODE = """
import resource
from gym_serve.servers.runner import tune_process
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
tune_process()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 20) or hard == resource.RLIM_INFINITY)
"""


ROWS = Path(__file__).parents[2] / "environments" / "mcqa" / "data" / "example.jsonl"


class SlowEndpoint(ChatEndpoint):
    """Takes so long that all rollouts would have a connection at once."""

    async def _complete(self, request: Any) -> Any:
        await asyncio.sleep(0.3)
        return await super()._complete(request)


def test_the_soft_limit_of_open_files_is_raised() -> None:
    told = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    assert told.stdout == "True\n"


@pytest.mark.parametrize("files", [140, 110])
def test_a_run_with_more_calls_than_open_files(tmp_path: Path, files: int) -> None:
    """Further calls wait for a connection, or are tried again at no cost; the report needs files as well."""
    with SlowEndpoint("C") as endpoint:
        policy = {"type": "chat_model", "base_url": endpoint.url, "model": "m"}
        agents = {"mcqa_agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa"}}
        graph = {"models": {"policy": policy}, "resources": {"mcqa": {"type": "mcqa"}}, "agents": agents}
        (tmp_path / "graph.json").write_text(json.dumps(graph))
        command = "from gym_serve.cli import main; main()"
        options = ["--repeats", "20", "--concurrency", "280", "--no-ray", "--json", "-o", "out.jsonl"]
        done = subprocess.run(
            [sys.executable, "-c", command, "collect", "graph.json", str(ROWS), *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["complete"], report
    assert (tmp_path / "out_failures.jsonl").read_text() == ""
