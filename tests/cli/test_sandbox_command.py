"""`gym-serve sandbox` and `--sandbox`: live boxes, a box with a shell, the provider of a graph."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from click.testing import Result
from support.environments import Bench
from support.sandboxes import needs_bubblewrap
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.environments.workspace import Workspace
from gym_serve.sandbox.live import folder_of_sockets

ROW = {"prompt": "", "test_command": "test -e done", "tests": {"hidden": ""}, "solution": "touch done"}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def invoke(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(main, ["sandbox", *words], input=text)


@needs_bubblewrap
async def test_live_boxes_are_listed_and_run_commands() -> None:
    bench = Bench(Workspace(name="tasks"))
    await bench.host.start()
    await bench.call("seed_session", ROW)
    (box,) = json.loads((await asyncio.to_thread(invoke, "list", "--json")).stdout)["boxes"]
    assert {key: box[key] for key in ("environment", "provider", "use")} == {
        "environment": "tasks",
        "provider": "bubblewrap",
        "use": "agent",
    }
    assert 0 <= box["memory_mb"] < 100
    assert 0 <= box["age"] < 60
    assert f"{box['id']}  " in (await asyncio.to_thread(invoke, "list")).stdout
    for words, status, output in (
        (("BOX", "pwd; exit 3"), 3, "/app\n"),
        (("BOX", "echo", "-n", "$HOME"), 0, "$HOME"),
        (("BOX", "kill -9 $$"), 137, ""),
        (("--timeout", "0.3", "BOX", "echo a; sleep 60"), 137, "a\n"),
    ):
        named = [word.replace("BOX", box["id"][:6]) for word in words]
        done = await asyncio.to_thread(invoke, "exec", *named)
        assert (done.exit_code, done.stdout) == (status, output)
    refused = await asyncio.to_thread(invoke, "exec", box["id"], "no-such-program", "a")
    assert (refused.exit_code, "no program no-such-program" in refused.stderr) == (1, True)
    assert oct(folder_of_sockets().stat().st_mode)[-3:] == "700"
    await bench.call("close_session")
    assert (await asyncio.to_thread(invoke, "list")).stdout == "There is no live box.\n"
    await bench.host.stop()
    assert list(folder_of_sockets().iterdir()) == []


def test_a_socket_that_a_killed_owner_left_goes() -> None:
    folder_of_sockets().mkdir(parents=True)
    left = folder_of_sockets() / "1-a.sock"
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(left))
    done = invoke("exec", "3f", "true")
    assert (done.exit_code, "0 live boxes have an id that begins with '3f'" in done.stderr) == (1, True)
    assert not left.exists()


@needs_bubblewrap
def test_the_box_of_a_task_with_a_shell(tmp_path: Path) -> None:
    done = invoke("debug", json.dumps(ROW), text="cd /tmp\npwd; touch /app/done\nls /tests\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "/tmp",
        "ls: cannot access '/tests': No such file or directory",
        "reward 1",
    ]


def test_a_folder_with_several_tasks_has_no_box(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
        (tmp_path / "tasks" / name / "task.toml").touch()
        (tmp_path / "tasks" / name / "instruction.md").write_text("Do it.")
    done = invoke("debug", f"harbor:{tmp_path}/tasks")
    assert (done.exit_code, "has several tasks: name the folder of one" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["workspace", "ROWS", "--no-ray", "--sandbox", "no-such"], "there is no provider 'no-such'"),
        (["mcqa", "ROWS", "--sandbox", "docker"], "no environment of the graph has sandboxes"),
        (["ROWS", "--url", "http://127.0.0.1:1", "--sandbox", "docker"], "changes a graph file"),
    ],
)
def test_a_provider_that_cannot_be_chosen(words: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "agent_ref": {"name": "nop"}}) + "\n")
    words = [word.replace("ROWS", str(tmp_path / "rows.jsonl")) for word in words]
    done = CliRunner().invoke(main, ["collect", *words, "-o", str(tmp_path / "o.jsonl")])
    assert done.exit_code != 0
    assert reason in " ".join(done.stderr.replace("│", " ").split()), done.output
