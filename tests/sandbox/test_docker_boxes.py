"""Boxes of Docker's API, on a Podman of the test's own; the promises of `test_boxes`, by another provider."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.podman import BUSYBOX, PYTHON, containers, needs_podman, podman
from support.sandboxes import ON_THE_FIRST
from support.waiting import until

from gym_serve import AsyncGym, Gym
from gym_serve.sandbox import (
    Listens,
    Sandbox,
    SandboxProvider,
    SandboxRefused,
    SandboxSpec,
    egress,
    find_provider,
)
from gym_serve.sandbox.docker_boxes import ContainerBox, DockerBox
from gym_serve.types.errors import GraphError, InvalidRequest, SessionLost

pytestmark = [needs_podman, pytest.mark.slow]

LONG = 60.0
Create = Callable[..., Awaitable[Sandbox]]


@pytest.fixture(scope="module")
def daemon() -> Iterator[str]:
    with podman() as url:
        yield url


@pytest.fixture
def provider(daemon: str, monkeypatch: pytest.MonkeyPatch) -> SandboxProvider:
    monkeypatch.setenv("DOCKER_HOST", daemon)
    return find_provider("docker")


@pytest.fixture(params=[BUSYBOX, PYTHON])
async def create(provider: SandboxProvider, request: pytest.FixtureRequest) -> AsyncIterator[Create]:
    boxes: list[Sandbox] = []

    async def create(**spec: Any) -> Sandbox:
        boxes.append(
            await provider.create(SandboxSpec(**{"image": request.param, "workdir": "/app", **spec}))
        )
        return boxes[-1]

    yield create
    for box in boxes:
        await box.close()
    await until(lambda: not containers())


def test_a_daemon_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(GraphError, match=r"no daemon of Docker or Podman at unix:///.*none\.sock"):
        find_provider("docker")


@pytest.mark.parametrize(
    ("command", "options", "status", "output"),
    [
        ("echo $PWD $A; id -u; exit 3", {"env": {"A": "b c"}}, 3, "/app b c\n0\n"),
        (["printf", "%s.", "a b", "$HOME"], {}, 0, "a b.$HOME."),
        ("cat; pwd", {"stdin": b"given\n", "cwd": "/tmp"}, 0, "given\n/tmp\n"),
        ("kill -TERM $$", {}, -signal.SIGTERM, ""),
        ("echo out; echo error >&2", {}, 0, "out\nerror\n"),
        ("sleep 100 & echo left behind", {}, 0, "left behind\n"),
        ("id -u", {"user": "agent"}, 0, "1000\n"),
    ],
)
async def test_a_command(
    create: Create, command: str | list[str], options: dict[str, Any], status: int, output: str
) -> None:
    done = await (await create()).exec(command, timeout=LONG, **options)
    assert (done.status, done.text, done.ended, done.cut) == (status, output, "exit", False)


async def test_a_command_at_its_time_limit_is_killed_with_all_that_it_started(create: Create) -> None:
    box = await create()
    done = await box.exec("echo before; (sleep 77 &) ; sleep 78", timeout=1)
    assert (done.status, done.ended, done.stdout) == (-signal.SIGKILL, "timeout", b"before\n")
    assert b"sleep 7" not in (await box.exec("ps", timeout=LONG)).stdout


async def test_a_command_that_is_given_up_is_killed(create: Create) -> None:
    box = await create()
    waiting = asyncio.create_task(box.exec("sleep 77", timeout=LONG))
    await asyncio.sleep(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert b"sleep 7" not in (await box.exec("ps", timeout=LONG)).stdout


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\n")
    writer.close()


async def test_a_box_with_the_model_reaches_nothing_else(create: Create) -> None:
    box = await create(network="model")
    assert isinstance(box, Listens)
    listener = await box.listen()
    async with (
        await asyncio.start_server(greet, sock=listener) as answering,
        await asyncio.start_server(greet, "0.0.0.0", 0) as server,
    ):
        port, open_port = (each.sockets[0].getsockname()[1] for each in (answering, server))
        done = await box.exec(f"nc 127.0.0.1 {port} </dev/null; ls /sys/class/net", timeout=LONG)
        assert done.stdout.split() == [b"hello", b"lo"]
        for address in (f"127.0.0.1 {open_port}", f"10.0.0.1 {open_port}", "1.1.1.1 53"):
            assert not (await box.exec(f"nc -w 2 {address} </dev/null", timeout=LONG)).ok


async def test_a_box_with_a_list_of_hosts(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(text=request.host)

    loop = asyncio.get_running_loop()
    async with await loop.create_server(web.Server(answer), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(egress, "_HTTP", port)
        box = await create(network="allowlist", allowed_hosts=["localhost", "127.0.0.1"])
        assert (await box.exec("ls /sys/class/net", timeout=LONG)).stdout == b"lo\n"
        code = 'import urllib.request as u; print(u.urlopen("http://{}/").read())'
        get = f"wget -q -O - http://{{}}/ 2>&1 || python3 -c '{code}'"
        for host, seen in ((f"localhost:{port}", b"localhost"), (f"other.test:{port}", b"403")):
            done = await box.exec(get.replace("{}", host), timeout=LONG, env={"NO_PROXY": "", "no_proxy": ""})
            assert seen in done.stdout + done.stderr, done


@pytest.mark.parametrize(
    ("network", "mark", "reason"),
    [
        ("none", None, "the network of the box is none"),
        ("model", "another", "the daemon's processes are not those of this machine"),
    ],
)
async def test_a_box_that_cannot_listen(create: Create, network: str, mark: str | None, reason: str) -> None:
    box = await create(network=network)
    assert isinstance(box, ContainerBox | DockerBox)
    box._mark = mark or box._mark
    with pytest.raises(SandboxRefused, match=reason):
        await box.listen()


async def test_output_is_bounded(create: Create) -> None:
    done = await (await create()).exec("seq 100000", timeout=LONG, output_limit=100)
    assert done.cut
    assert len(done.stdout) < 200
    assert (done.stdout[:4], done.stdout[-13:]) == (b"1\n2\n", b"99999\n100000\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ["nothing"]}, "there is no program nothing"),
        ({"command": "true", "cwd": "/none"}, "(there is no folder|No such file or directory:) .?/none"),
        ({"command": "true", "user": "nobody"}, "(unable to find|the box has no) user nobody"),
    ],
)
async def test_what_a_box_cannot_do(create: Create, options: dict[str, Any], message: str) -> None:
    box = await create()
    with pytest.raises(SandboxRefused, match=message):
        await box.exec(**options, timeout=LONG)
    assert (await box.exec("true", timeout=LONG)).ok


@pytest.mark.parametrize("status", [0, 127])
async def test_a_command_that_repeats_its_mark(create: Create, status: int) -> None:
    done = await (await create()).exec(f"echo $GYM_SERVE_COMMAND >&2; exit {status}", timeout=LONG)
    assert (done.status, done.ended) == (status, "exit")


async def test_files(create: Create) -> None:
    box, data = await create(), bytes(range(256)) * 4096
    await box.exec("mkdir -p a; ln -s /etc/passwd a/link", timeout=LONG)
    await box.write("/app/a/link", data, mode=0o755)
    assert await box.read("/app/a/link") == data
    assert (await box.exec("test -x a/link && grep -c agent /etc/passwd", timeout=LONG)).text == "1\n"
    await box.put("/app/b", await box.get("/app/a"))
    await box.put("/app/b", await box.get("/app/a"), clear=True)
    assert (await box.exec("ls b", timeout=LONG)).text == "link\n"
    for refused in (box.read("/app/a/link", limit=10), box.read("/none"), box.get("/none")):
        with pytest.raises(SandboxRefused):
            await refused


async def test_what_a_command_can_do_to_the_first_process(provider: SandboxProvider) -> None:
    box = await provider.create(SandboxSpec(image=PYTHON, workdir="/app"))
    done = await box.exec(["python3", "-c", ON_THE_FIRST], timeout=LONG)
    assert (done.status, done.text) == (0, "")
    assert (await box.exec("echo goes on", timeout=LONG)).ok
    await box.close()


async def test_a_closed_box(create: Create) -> None:
    box = await create()
    await box.close()
    await box.close()
    with pytest.raises(SessionLost, match="it was closed"):
        await box.exec("true", timeout=LONG)


async def test_a_box_that_somebody_removes(create: Create) -> None:
    box = await create()
    subprocess.run(["podman", "rm", "-f", *containers()], check=True, capture_output=True)  # noqa: ASYNC221
    with pytest.raises(SessionLost, match="the box is gone"):
        await box.exec("true", timeout=LONG)


async def test_images(provider: SandboxProvider) -> None:
    with pytest.raises(InvalidRequest, match="a box of localhost/none does not start"):
        await provider.create(SandboxSpec(image="localhost/none"))
    with pytest.raises(InvalidRequest, match="made of an image"):
        await provider.create(SandboxSpec())


OWNER = """
import asyncio
from gym_serve.sandbox import SandboxSpec, find_provider

async def main():
    provider = find_provider("docker")
    boxes = [await provider.create(SandboxSpec(image="IMAGE")) for _ in range(4)]
    print("ready", flush=True)
    await asyncio.gather(*(box.exec("sleep 1000", timeout=1000) for box in boxes))

asyncio.run(main())
""".replace("IMAGE", BUSYBOX)


async def test_nothing_is_left_of_an_owner_that_is_killed(provider: SandboxProvider) -> None:
    for _ in range(5):
        owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)  # noqa: ASYNC220
        assert owner.stdout is not None
        try:
            with owner.stdout:
                assert await asyncio.to_thread(owner.stdout.readline) == b"ready\n"
            assert len(containers()) == 4
        finally:
            owner.kill()
            owner.wait()
        assert await until(lambda: not containers()) < 10


DOCKERFILE = f"FROM {BUSYBOX}\nWORKDIR /app\nCOPY names.txt .\nRUN sort names.txt > sorted.txt\n"


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_a_task_of_its_own_image(
    provider: SandboxProvider, tmp_path: Path, agent: str, reward: float
) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "names.txt").write_text("b\na\n")
    row = {
        "responses_create_params": {"input": "Append a line to sorted.txt."},
        "image": str(tmp_path),
        "test_command": "test $(wc -l <sorted.txt) = 3 && grep -q hidden /tests/word",
        "tests": {"word": "hidden"},
        "solution": "#!/bin/sh\necho c >> sorted.txt",
    }
    settings = {"resources.workspace.sandbox": "docker"}
    with Gym.from_graph("workspace", ray=False, overrides=settings) as gym:
        (rollout,) = await AsyncGym.of(gym).run([row], agent=agent)
    assert (rollout.reward, rollout.failure) == (reward, None), rollout
    assert not containers()


ASKS = """
port=$(echo $OPENAI_BASE_URL | sed 's/.*://; s/.v1//')
printf '%s\\r\\n' "POST /v1/responses HTTP/1.1" "host: a" "x-api-key: $OPENAI_API_KEY" "connection: close" \\
  "content-type: application/json" "content-length: 31" "" >asked
printf '%s' '{"model":"policy","input":"Hi"}' >>asked
{ cat asked; sleep 3; } | nc 127.0.0.1 $port >answer
cat answer; cat /opt/asks/name >>answer
"""


async def test_the_program_of_a_harness(provider: SandboxProvider, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("ARG BASE=none\nFROM $BASE\nCOPY name /opt/asks/\n")
    (tmp_path / "name").write_text("of the image")
    row = {
        "responses_create_params": {"input": "Ask."},
        "test_command": "grep -q Hello answer && grep -q 'of the image' answer && test ! -e /opt/asks",
    }
    agent = {"command": ["/bin/sh", "-c", ASKS], "box": True, "image": str(tmp_path)}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
    graph = {
        "models": {"policy": {"type": "scripted_model", "script": [[said]]}},
        "resources": {"workspace": {"type": "workspace", "sandbox": "docker", "image": BUSYBOX}},
        "agents": {"a": {"type": "harness_agent", "model": "policy", "resources": "workspace", **agent}},
    }
    with Gym.from_graph(graph, ray=False) as gym:
        (rollout,) = await AsyncGym.of(gym).run([row])
    assert rollout.reward == 1.0, rollout["harness"]
    assert rollout["harness"]["exit_status"] == 0
    assert rollout["response"]["output"][0]["generation_token_ids"]
