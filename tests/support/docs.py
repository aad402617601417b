"""The code blocks of a Markdown page, and what it takes to run them as a reader would.

A page runs in order, in a folder of its own with links to ``graphs``, ``environments`` and
``examples``. By the language of a block:

- ``python``: run in this process, all blocks of a page in one namespace.
- ``bash``: run by bash, with the commands of this virtual environment. ``serve run FILE`` as a
  whole block deploys the file on the cluster of the tests (the command itself has tests/serve_cli).
  All pages have one Ray of ``gym-serve up``, which the last of them stops.
- ``yaml``: a graph without problems; sections that a fragment leaves out are filled in. Anything else is a
  file that a command of the page takes.
- ``json``: valid JSON.
- ``text``: what the block before it prints; ``...`` stands for anything.
- ``console``: commands after ``$`` that change the machine or need another one. They are not run here,
  but by other tests: `RUN_ELSEWHERE`.

There is no block of another kind. A block whose first line is a comment with a file's name is that file:
written, and not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gym_serve.graph import GraphSpec, load_graph, resolve
from support.processes import environment

__all__ = [
    "ROOT",
    "Block",
    "blocks_of",
    "check_console",
    "check_graph",
    "gym_serve_commands",
    "is_graph",
    "matches",
    "run_bash",
    "run_python",
]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

RUN_ELSEWHERE = {
    "serve": "tests/serve_cli",
    "gym-serve up": "tests/cli/test_up.py",
    "gym-serve view": "tests/view/test_server.py",
    "gym-serve sandbox": "tests/cli/test_sandbox_command.py",
    "python3 -m venv": "tests/cli/test_first_run.py, with a wheel of its own",
    "pip install dist/gym_serve-": "tests/cli/test_first_run.py, from a wheel of its own",
    "python examples/quickstart.py": "make run, which CI runs",
    "python3.12 -m venv": "tests/interop/test_tutorial_nemo_gym.py, with the rest of its page",
    "source ": "the same",
    "pip install nemo-gym": "the Makefile, likewise",
    "cp venv/lib": "tests/interop/test_tutorial_nemo_gym.py",
    "gym-serve collect counter.yaml": "the same",
    "gym-serve import-nemo-gym venv": "the same",
    'python -c "import json': "the same",
    "ls -d": "by hand: docs/comparison.md says when",
    "gym-serve list": "the same",
    "pip download": "the same",
    "python -m zipfile": "the same",
    "gym-serve play mcqa --model local": "tests/cli/test_local_model.py, with a package of its own",
    "gym-serve eval": "tests/cli/test_evaluate.py, with an endpoint on loopback",
    "gym-serve collect harbor:tasks": "tests/sandbox/test_docker_boxes.py, where Podman is",
    "grep -": "the same",
    "cd $(python": "the same",
    "python -m verl.trainer.main_ppo": "tests/interop/test_acceptance.py, by verl's workers",
    "python -m gym_serve.interop.nemo_gym.nemo_rl": "tests/interop/test_acceptance.py, by NeMo RL's actor",
    "python -m skyrl.train": "tests/interop/test_acceptance.py, by SkyRL's trainer",
    "pip install gym-serve": "make interop, in the environment of the trainers",
    "pip install 'gym-serve[prime-rl]'": "the extra `test` has it",
    "pip install 'gym-serve[trl]'": "make test-vllm, which has TRL",
    "python -m gym_serve.interop.prime_rl": "tests/interop/test_prime_rl_client.py, by verifiers' client",
    "python -m openrlhf.cli.train_ppo_ray": "tests/interop/test_acceptance.py, by OpenRLHF's executors",
    "python train.py": "tests/interop/test_coding_agents.py, with a tiny engine",
    "make train": "tests/engines/test_trl.py, in a shorter form",
    "python examples/train_async.py": "tests/engines/test_trl.py, in a shorter form",
    "python examples/": "tests/reliability/test_topologies.py",
    "kubectl": "nowhere, for want of a Kubernetes; tests/interop/test_kuberay.py checks what it applies",
    "make image": "by hand, as it takes minutes and a builder of images",
    "docker run": "by hand, by buildah",
    "sbatch": "tests/cli/test_slurm.py, with a Slurm of one machine",
    "python -m support.shipping": "tests/reliability/test_shipping.py",
    "ray get-auth-token": "tests/reliability/test_topologies.py: the token of its Ray",
    "export RAY_AUTH_MODE=token": "the same",
    "ray start": "tests/reliability/test_topologies.py, on clusters of its own",
}
"""What stands in ``console`` blocks, and where it is run."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml|jsonl))\n")
_REQUIRED_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SERVERS: dict[str, dict[str, Any]] = {
    "models": {name: {"type": "scripted_model"} for name in ("policy", "judge")},
    "resources": {
        "weather": {"type": "simple_weather"},
        "math": {"type": "math_with_judge", "should_use_judge": False},
    },
    "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "weather"}},
}


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """Name of the file that it is, if it is one."""
        named = _FILE.match(self.text)
        return named.group(1) if named else None


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^[ >]+```", text, re.MULTILINE), (
        f"{page}: an indented block is not found, so not run"
    )
    fences = list(_FENCE.finditer(text))
    marks = re.findall(r"^(?:```|~~~)", text, re.MULTILINE)
    assert len(marks) == 2 * len(fences), f"{page}: a block is not found, so not run"
    for fence in fences:
        yield Block(text.count("\n", 0, fence.start()) + 2, *fence.groups())


def run_python(block: Block, page: str, namespace: dict[str, Any]) -> None:
    """Run a block; what it prints goes to ``sys.stdout``."""
    # The lines above keep the numbers of a traceback those of the page.
    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    exec(code, namespace)


def run_bash(block: Block, folder: Path, of_up: Path) -> str:
    """Run a block in a folder; what it printed. ``of_up`` is where `gym-serve up` notes its Ray."""
    env = environment("RAY_", "PYTEST_")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env={
            **env,
            "PATH": f"{BIN}:{env['PATH']}",
            "COLUMNS": "200",
            "XDG_STATE_HOME": str(of_up),
            "RAY_TMPDIR": os.environ["RAY_TMPDIR"],
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"line {block.line}: exit status {done.returncode}\n{done.stdout}"
    return done.stdout


def is_graph(block: Block) -> bool:
    """Whether a block of YAML is a graph or a part of one."""
    content = yaml.safe_load(block.text)
    return isinstance(content, dict) and not {"applications", *GraphSpec.model_fields}.isdisjoint(content)


def check_graph(block: Block) -> None:
    """Resolve the graphs of a block.

    Raises:
        GraphError: there are problems.
    """
    content = yaml.safe_load(block.text)
    if "applications" in content:
        names = [application["name"] for application in content["applications"]]
    else:
        names = ["default"]
        content = content | {
            section: servers | (content.get(section) or {}) for section, servers in _SERVERS.items()
        }
    env = dict.fromkeys(_REQUIRED_VARIABLE.findall(block.text), "http://127.0.0.1:9/v1")
    for name in names:
        source = load_graph(content, application=name)
        resolve(source.spec, env=env, literal_secrets=False)


def check_console(block: Block) -> None:
    """Look for the tests that run a block's commands."""
    commands = re.findall(r"^\$ (?:\w+=\S+ )*(.+)", block.text, re.MULTILINE)
    assert commands, f"line {block.line}: commands start with '$ '"
    for command in commands:
        assert command.startswith(tuple(RUN_ELSEWHERE)), f"line {block.line}: nothing runs {command!r}"


def gym_serve_commands(text: str) -> Iterator[list[str]]:
    """The words after each ``gym-serve`` in a text, up to the end of the command."""
    for command in re.findall(r"(?:^|[\s`;|&])gym-serve\b([^`\n;|&#]*)", text.replace("\\\n", " ")):
        yield shlex.split(command)


def matches(shown: str, printed: str) -> bool:
    """Whether ``shown`` is a part of ``printed``; white space at the end of lines does not matter."""
    trimmed = "\n".join(line.rstrip() for line in printed.splitlines())
    pattern = re.escape("\n".join(line.rstrip() for line in shown.splitlines())).replace(r"\.\.\.", ".*")
    return re.search(pattern, trimmed, re.DOTALL) is not None
