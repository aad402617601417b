"""`gym-serve dataset push`: by the hub's own client to a hub that is an API alone, and to stores."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import Result
from typer.testing import CliRunner

from gym_serve.cli import main

constants = pytest.importorskip("huggingface_hub.constants", reason="pip install 'gym-serve[data]'")


Repositories = dict[str, dict[str, Any]]


class Hub(BaseHTTPRequestHandler):
    """The three calls of a push; ``repositories``: what was made, and what is in it."""

    repositories: Repositories

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_right" and b"broken" not in body:
            return self._answer(401, {"error": "Invalid username or password."})
        if b"broken" in body:
            return None
        if self.path == "/api/repos/create":
            made = json.loads(body)
            name = f"{made['organization']}/{made['name']}"
            self.repositories[name] = {
                "private": made.get("private", made.get("visibility") == "private"),
                "type": made["type"],
                "files": {},
            }
            return self._answer(200, {"url": f"{constants.ENDPOINT}/datasets/{name}"})
        name, _, call = self.path.removeprefix("/api/datasets/").partition("/main")[0].rpartition("/")
        if call == "preupload":
            files = [
                {**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        for line in body.splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                content = base64.b64decode(part["value"]["content"])
                self.repositories[name]["files"][part["value"]["path"]] = content
        return self._answer(
            200,
            {
                "success": True,
                "commitOid": "1",
                "commitUrl": f"{constants.ENDPOINT}/datasets/{name}/commit/1",
            },
        )

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repositories]:
    class OneHub(Hub):
        repositories: Repositories = {}  # noqa: RUF012

    with ThreadingHTTPServer(("127.0.0.1", 0), OneHub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        threading.Thread(target=server.serve_forever).start()
        yield OneHub.repositories
        server.shutdown()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "out.jsonl").write_text('{"reward":1.0}\n')
    (tmp_path / "out_run.json").write_text("{}")
    return [str(tmp_path / "out.jsonl"), str(tmp_path / "out_run.json")]


def push(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["dataset", "push", *arguments])


@pytest.mark.parametrize("options", [(), ("--public",)])
def test_to_the_hub(hub: Repositories, files: list[str], options: tuple[str, ...]) -> None:
    done = push(*files, "--to", "ada/rollouts", *options, "--json")
    assert done.exit_code == 0, done.output
    assert orjson.loads(done.stdout)["place"].endswith("/datasets/ada/rollouts")
    content = {"out.jsonl": b'{"reward":1.0}\n', "out_run.json": b"{}"}
    assert hub == {"ada/rollouts": {"private": not options, "type": "dataset", "files": content}}


def test_to_a_store(tmp_path: Path, files: list[str]) -> None:
    done = push(*files, "--to", f"file://{tmp_path}/store/a")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "store" / "a" / "out.jsonl").read_text() == '{"reward":1.0}\n'


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("ada/rollouts", "the hub refused ada/rollouts: 401 Invalid username or password.; HF_TOKEN must be"),
        ("a b/c", "--to must be ORGANISATION/NAME or a URL, got 'a b/c'"),
        ("nosuch://x", "nosuch://x: Protocol not known: nosuch"),
        ("broken/rollouts", "the hub cannot be reached: Server disconnected"),
    ],
)
def test_what_cannot_be_pushed_is_told(
    hub: Repositories,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    place: str,
    problem: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    done = push(*files, "--to", place)
    assert done.exit_code == 1
    assert problem in " ".join(done.output.split())


def test_files_are_there_once(hub: Repositories, tmp_path: Path, files: list[str]) -> None:
    done = push("none.jsonl", *files, "--to", "ada/rollouts")
    assert "none.jsonl: no such file" in done.output
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "out.jsonl").touch()
    done = push(str(tmp_path / "a" / "out.jsonl"), *files, "--to", "ada/rollouts")
    assert "two files are called out.jsonl" in done.output
    assert hub == {}
