"""Tasks in boxes: fixtures, tools, images, Harbor's folders, the agents without a model, and no box left."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from support.environments import Bench, called, examples, said
from support.sandboxes import children, needs_bubblewrap, with_pytest
from support.waiting import until

from gym_serve import Gym
from gym_serve.cli.options import resolve_file
from gym_serve.cluster.deploy import deployed_options
from gym_serve.environments import workspace
from gym_serve.environments.workspace import Workspace, images
from gym_serve.environments.workspace.health import HealthCheck
from gym_serve.environments.workspace.images import _settings, instructions
from gym_serve.environments.workspace.rows import _PYTEST, HarborRows, SweBenchRows, harbor_benchmark
from gym_serve.environments.workspace.tasks import WorkspaceRow, task_of
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.sandbox import BoxPool, SandboxSpec, find_provider
from gym_serve.servers.transport import Call
from gym_serve.types.errors import Forbidden, GraphError, InvalidRequest, ToolFailed, Unavailable

HARBOR = Path(__file__).with_name("harbor_task")
"""What Harbor's `harbor init --task` wrote; instruction, solution and the last line of the test are ours."""

ROW = {"test_command": "test -e done", "solution": "touch done"}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    before = children()
    bench = Bench(Workspace(command_timeout=1.0, max_output_bytes=1000))
    await bench.host.start()
    yield bench
    await bench.host.stop()
    await until(lambda: children() <= before)


def test_examples_offer_the_tools_of_the_class() -> None:
    assert all("tools" not in row["responses_create_params"] for row in examples(Workspace))


@needs_bubblewrap
@pytest.mark.parametrize(
    ("commands", "output"),
    [
        (["cd /tmp", "A='a b'; export A", "echo $PWD $A"], "/tmp a b\n"),
        (["f() { echo f $1; }; shopt -s expand_aliases; x=(1 2)", "f 1; echo ${x[1]}"], "f 1\n2\n"),
        (["cd /tmp; exit 3", "pwd"], "/tmp\n"),
        (["cd /tmp; false", "echo $PWD"], "/tmp\n"),
        (["sleep 60 & echo $! > pid", "kill $(cat pid) && echo there"], "there\n"),
        (["cd /tmp; sleep 60", "pwd"], "/app\n"),
        (["readonly R=1", "echo ${R-none}"], "none\n"),
    ],
)
async def test_the_shell_is_kept(bench: Bench, commands: list[str], output: str) -> None:
    await bench.call("seed_session", ROW)
    for command in commands:
        answer = await bench.tool("bash", command=command)
    assert answer["output"] == output
    assert answer["exit_status"] == 0


@needs_bubblewrap
async def test_what_tools_answer(bench: Bench) -> None:
    await bench.call("seed_session", {**ROW, "files": {"a/b.txt": "one\ntwo\n"}})
    assert await bench.tool("read_file", path="a/b.txt") == "one\ntwo\n"
    await bench.tool("edit", path="a/b.txt", old="two", new="three")
    assert await bench.tool("read_file", path="/app/a/b.txt") == "one\nthree\n"
    slow = await bench.tool("bash", command="echo a; sleep 60")
    assert (slow["output"], slow["note"]) == (
        "a\n",
        "killed after 1 s; directory and variables are those of before",
    )
    long = await bench.tool("bash", command="seq 100000")
    assert "bytes are left out" in long["output"]
    for name, arguments, reason in (
        ("edit", {"path": "a/b.txt", "old": "e", "new": ""}, "occurs 3 times"),
        ("edit", {"path": "a/b.txt", "old": "", "new": ""}, "must occur once"),
        ("read_file", {"path": "none"}, "No such file"),
        ("read_file", {"path": "/dev/zero"}, "more than 1000 bytes"),
        ("write_file", {"path": "a/b.txt/c", "content": ""}, "(Not a directory|File exists)"),
        ("bash", {"command": "a\0b"}, "NUL"),
    ):
        with pytest.raises(ToolFailed, match=reason):
            await bench.tool(name, **arguments)


@needs_bubblewrap
async def test_tests_solution_and_verdict_are_the_environments_alone(bench: Bench) -> None:
    await bench.call("seed_session", {**ROW, "tests": {"secret": "s"}})
    seen = (
        await bench.tool("bash", command="ls -a / /tests /solution; grep -rl secret / 2>/dev/null | head -3")
    )["output"]
    assert not {"tests", "solution", "secret"} & set(seen.split())
    with pytest.raises(Forbidden, match="only the session of an oracle"):
        await bench.call("solve", {})
    assert (await bench.verify(ROW, []))["reward"] == 0.0
    assert (await bench.verify(ROW, []))["reward"] == 0.0  # asked again, from the same files
    with pytest.raises(InvalidRequest, match="no box"):
        await bench.tool("bash", command="true")


@needs_bubblewrap
async def test_an_oracle(bench: Bench) -> None:
    await bench.call("seed_session", {**ROW, "oracle": True})
    assert (await bench.call("solve", {}))["exit_status"] == 0
    assert (await bench.verify(ROW, []))["reward"] == 1.0


async def test_a_session_that_was_not_seeded(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="not seeded"):
        await bench.verify(ROW, [])


DOCKERFILE = """
# A comment
FROM ubuntu:24.04
ARG NAME=tool
ENV GREETING="hello there" \\
    PLACE=/opt/$NAME
WORKDIR /srv/app
COPY data ./data/
COPY one.txt two.txt /texts/
ADD one.txt first.txt
RUN mkdir -p $PLACE && echo "$GREETING" > $PLACE/greeting \\
    && pwd > where
RUN ["sh", "-c", "echo run >> runs"]
LABEL a=b
CMD ["sh"]
"""


@needs_bubblewrap
async def test_an_image_is_built_once(bench: Bench, tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "data").mkdir(parents=True)
    (image / "data" / "d.txt").write_text("d")
    for name in ("one", "two"):
        (image / f"{name}.txt").write_text(name)
    (image / "Dockerfile").write_text(DOCKERFILE)
    row = {**ROW, "image": str(image), "workdir": "/work"}
    show = "cd /srv/app; cat data/d.txt /texts/one.txt /texts/two.txt first.txt $PLACE/greeting where runs"
    for _ in range(2):
        await bench.call("seed_session", row)
        assert (await bench.tool("bash", command=show))["output"] == "donetwoonehello there\n/srv/app\nrun\n"
        await bench.tool("bash", command="echo more >> /srv/app/runs")
        await bench.call("close_session")
        bench.session = None
    assert len(list((tmp_path / "cache").rglob("upper"))) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("FROM a\nFROM b", "Dockerfile:2: several stages"),
        ("FROM a\nRUN b \\\n# c\n  d\n\nONBUILD RUN x", "Dockerfile:6: ONBUILD is not supported"),
    ],
)
def test_a_dockerfile_that_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(InvalidRequest, match=reason):
        list(instructions(tmp_path))


@needs_bubblewrap
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("RUN echo said; exit 7", "RUN echo said; exit 7: exit status 7: said"),
        ("COPY --from=uv /uv /bin/", "with flags, from an image or a URL"),
        ("ADD https://example.com/a /a", "with flags, from an image or a URL"),
        ("COPY ../../secret /a", r"there is no \.\./\.\./secret"),
        ("COPY none /a", "there is no none"),
        ("RUN <<EOF", "here-document"),
    ],
)
async def test_a_step_that_fails(bench: Bench, tmp_path: Path, text: str, reason: str) -> None:
    image = tmp_path / "place" / "image"
    image.mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    (image / "Dockerfile").write_text(f"FROM a\n{text}\n")
    with pytest.raises(InvalidRequest, match=reason):
        await bench.call("seed_session", {**ROW, "image": str(image)})
    layers = tmp_path / "cache" / "gym-serve" / "layers"
    assert [path.name for path in layers.rglob("*") if path.is_dir()] == []


def test_settings_of_a_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM a\nENV A 1 2\nENV B=$A\nWORKDIR /a\nWORKDIR b\nUSER dev:dev\n")
    steps = list(instructions(tmp_path))
    made = _settings(steps, SandboxSpec(env={"B": "own"}))
    assert (made.workdir, made.env, made.user) == ("/a/b", {"A": "1 2", "B": "own"}, "dev")
    assert _settings(steps, SandboxSpec(workdir="/c", user="root")).workdir == "/c"


def test_rows_of_harbor(tmp_path: Path) -> None:
    for name in ("b", "a"):
        shutil.copytree(HARBOR, tmp_path / name)
    assert [row["task"] for row in HarborRows().rows(tmp_path)] == [str(tmp_path / "a"), str(tmp_path / "b")]
    (row,) = HarborRows().rows(HARBOR)
    assert row["responses_create_params"]["input"][0]["content"].startswith("Write")
    with pytest.raises(InvalidRequest, match=r"no task\.toml"):
        list(HarborRows().rows(tmp_path / "a" / "tests"))


CONFIG = """
artifacts = ["/data", {source = "/more"}]
[environment]
cpus = 2
memory_mb = 512
storage_mb = 100
network_mode = "no-network"
env = {A = "b"}
workdir = "/w"
[agent]
user = "dev"
[verifier]
timeout_sec = 5
environment_mode = "separate"
env = {T = "1"}
"""


def test_a_configuration_of_harbor(tmp_path: Path) -> None:
    shutil.copytree(HARBOR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "task.toml").write_text(CONFIG)
    task = task_of(WorkspaceRow(task=str(tmp_path)))
    spec = SandboxSpec(
        cpus=2, memory_mb=512, disk_mb=100, network="none", env={"A": "b"}, workdir="/w", user="dev"
    )
    assert task.spec == spec
    assert (task.carried, task.carries_workdir) == (("/logs/artifacts", "/data", "/more"), False)
    assert (task.test_timeout, task.test_env, task.test_image) == (5, {"T": "1"}, tmp_path / "environment")


UNKNOWN = """
schema_verion = "1.4"
task.anything = 1
metadata.anything = {a = 1}
[environment]
memory = "1G"
skills_dir = "/skills"
healthcheck = {command = "true", retry = 1}
[verifier]
timeout = 5
environment = {cpu = 1}
[[steps]]
name = "one"
min_rewards = 1
color = 1
"""


def test_unknown_keys_of_harbor_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "task.toml"
    file.write_text(UNKNOWN)
    for _ in range(2):
        with pytest.raises(InvalidRequest):  # it has no instruction
            list(HarborRows().rows(tmp_path))
    (message,) = caplog.messages
    assert message == (
        f"{file}: unknown keys are ignored: schema_verion (did you mean schema_version?), "
        "environment.healthcheck.retry (did you mean retries?), "
        "verifier.timeout (did you mean timeout_sec?), verifier.environment.cpu (did you mean cpus?), "
        "steps.min_rewards (did you mean min_reward?), steps.color"
    )


LISTED = "network_mode = 'allowlist'\nallowed_hosts = ['PyPI.org', '*.a.test']"


@pytest.mark.parametrize(
    ("config", "agent", "tests"),
    [
        ("", "full", "full"),
        ("[environment]\nnetwork_mode = 'no-network'", "none", "none"),
        ("[environment]\nallow_internet = false", "none", "none"),
        ("[agent]\nnetwork_mode = 'no-network'", "none", "full"),
        ("[environment]\nnetwork_mode = 'no-network'\n[verifier]\nnetwork_mode = 'public'", "none", "full"),
        ("[verifier.environment]\nnetwork_mode = 'no-network'", "full", "none"),
        (f"[environment]\n{LISTED}", "allowlist: pypi.org *.a.test", "allowlist: pypi.org *.a.test"),
        (f"[agent]\n{LISTED}", "allowlist: pypi.org *.a.test", "full"),
        (
            f"[environment]\n{LISTED}\n[verifier]\nnetwork_mode = 'public'",
            "allowlist: pypi.org *.a.test",
            "full",
        ),
        (
            f"[environment]\nnetwork_mode = 'no-network'\n[agent]\n{LISTED}",
            "allowlist: pypi.org *.a.test",
            "none",
        ),
        ("[agent]\nnetwork_mode = 'allowlist'", "allowlist: ", "full"),
    ],
)
def test_a_network_for_each_phase(tmp_path: Path, config: str, agent: str, tests: str) -> None:
    shutil.copytree(HARBOR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "task.toml").write_text(config)
    task = task_of(WorkspaceRow(task=str(tmp_path)))
    assert task.test_spec is not None
    for spec, expected in ((task.spec, agent), (task.test_spec, tests)):
        hosts = f": {' '.join(spec.allowed_hosts)}" if spec.network == "allowlist" else ""
        assert f"{spec.network}{hosts}" == expected


VARIABLES = """
[environment]
network_mode = "no-network"
env = {A = "${GIVEN}", B = "${MISSING:-some: text}", C = "${HOME:-}", D = "$5 ${GIVEN}", E = "${GIVEN:-no}"}
[verifier]
env = {KEY = "${TESTED}"}
[solution]
env = {SOLVED = "${SOLVING}"}
"""


@needs_bubblewrap
async def test_what_a_task_reads_of_the_machine(tmp_path: Path) -> None:
    shutil.copytree(HARBOR, tmp_path / "task")
    for name, text in (
        ("task.toml", VARIABLES),
        ("solution/solve.sh", "echo $SOLVED > solved"),
        ("tests/test.sh", '#!/bin/sh\necho "$A $KEY $SOLVED $(cat solved)"\n'),
    ):
        (tmp_path / "task" / name).write_text(text)
    row = {"task": str(tmp_path / "task")}
    bench = Bench(Workspace(variables={"GIVEN": "given", "TESTED": "tested"}))
    await bench.host.start()
    await bench.call("seed_session", row)
    seen = await bench.tool("bash", command='echo "$A|$B|$C|$D|$E|$KEY|$SOLVED"; echo own > solved')
    assert seen["output"] == "given|some: text||$5 ${GIVEN}|given||\n"
    assert (await bench.verify(row, []))["test_output"] == "given tested  own\n"
    bench.session = None
    with pytest.raises(InvalidRequest, match=r"solution\.env\.SOLVED: it reads SOLVING, which the setting"):
        await bench.call("seed_session", {**row, "oracle": True})
    await bench.host.stop()


def test_a_variable_that_the_machine_lacks_is_a_problem_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = ["resources.workspace.variables={JUDGE_KEY: '${JUDGE_KEY}'}"]
    with pytest.raises(GraphError, match="JUDGE_KEY"):
        resolve_file("workspace", setting, None)
    monkeypatch.setenv("JUDGE_KEY", "of-the-judge")
    settings = resolve_file("workspace", setting, None).nodes["workspace"].settings
    assert Workspace.Config(**settings).variables["JUDGE_KEY"].get_secret_value() == "of-the-judge"


def test_sizes_of_older_tasks(tmp_path: Path) -> None:
    shutil.copytree(HARBOR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "task.toml").write_text("[environment]\nmemory = '2G'\nstorage = '512m'")
    spec = task_of(WorkspaceRow(task=str(tmp_path))).spec
    assert (spec.memory_mb, spec.disk_mb) == (2048, 512)


@needs_bubblewrap
async def test_the_network_of_the_agents_boxes_is_a_setting(tmp_path: Path) -> None:
    count = "grep -c : /proc/net/dev"
    shutil.copytree(HARBOR, tmp_path / "task")
    (tmp_path / "task" / "tests" / "test.sh").write_text(f"#!/bin/sh\n{count} > /logs/verifier/reward.txt\n")
    row = {"task": str(tmp_path / "task")}
    bench = Bench(Workspace(network="model"))
    await bench.host.start()
    await bench.call("seed_session", row)
    assert (await bench.tool("bash", command=count))["output"] == "1\n"  # loopback
    assert (await bench.verify(row, []))["reward"] == len(os.listdir("/sys/class/net"))
    await bench.host.stop()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("[[steps]]\nname = 'a'", "steps/a/instruction.md"),
        ("[[steps]]\nname = '../a'", "steps.0.name"),
        ("[[steps]]\nname = 'a'\n[steps.agent]\nuser = 'dev'", "steps.0.agent.user"),
        ("[environment]\ngpus = 1", "GPUs"),
        ("[environment]\nnetwork_mode = 'some'", "network_mode must be one of no-network, allowlist, public"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['https://a.test']", "a host must be"),
        ("[environment]\nallowed_hosts = ['a.test']", "allowed_hosts is for network: allowlist, got full"),
        ("[environment]\nhealthcheck = {command = 'true', retries = 0}", "healthcheck.retries"),
        ("[[environment.mcp_servers]]\nname = 'a'", "mcp_servers"),
        (
            "[verifier]\nenv = {KEY = '${SECRET}'}",
            r"task\.toml is no .* verifier\.env\.KEY: it reads SECRET, which the setting",
        ),
        (
            "[environment]\nenv = {KEY = '${HOME}'}",
            r"environment\.env\.KEY: it reads HOME, which the setting",
        ),
        ("[[steps]]\nname = 'a'\n[steps.verifier]\nenv = {KEY = '${A}'}", r"steps\.0\.verifier\.env\.KEY"),
        ("[environment]\nmemory = 'much'", "memory"),
        ("artifacts = ['relative']", None),
        ("[verifier]\ntimeout_sec = -1", "greater than 0"),
        ("[a]\n[a]", r"/task\.toml is no task that can be run here: .*line 2"),
    ],
)
def test_a_configuration_that_is_refused(tmp_path: Path, config: str, reason: str | None) -> None:
    shutil.copytree(HARBOR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "task.toml").write_text(config)
    with pytest.raises(InvalidRequest, match=reason):
        task_of(WorkspaceRow(task=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tests/test.sh", "#!/bin/sh\r\ntrue\r\n", "tests/test.sh:1 ends with CR LF"),
        ("tests/test.sh", None, "it has no tests/test.sh"),
        ("instruction.md", " \n", "instruction.md must say what to do"),
        ("instruction.md", None, "instruction.md must say what to do"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, text: str | None, reason: str) -> None:
    shutil.copytree(HARBOR, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(InvalidRequest, match=reason):
        [task_of(WorkspaceRow(task=row["task"])) for row in HarborRows().rows(tmp_path)]


@needs_bubblewrap
async def test_a_work_folder_that_nothing_can_take_over(bench: Bench, tmp_path: Path) -> None:
    shutil.copytree(HARBOR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "environment" / "Dockerfile").write_text("FROM a\n")
    with pytest.raises(InvalidRequest, match="needs a WORKDIR in its Dockerfile"):
        await bench.call("seed_session", {"task": str(tmp_path)})


@needs_bubblewrap
@pytest.mark.parametrize(
    ("script", "reward", "reason"),
    [
        ("echo 1 >reward.txt; echo '{\"reward\": 1}' >reward.json", 1.0, None),
        ("echo 0 >reward.txt; echo '{\"reward\": 1}' >reward.json", 0.0, "reward.txt says"),
        ("echo 1 >reward.txt; sh -c 'kill -9 $PPID'", 0.0, "ended with status 137"),
        ("echo there; exit 3", 0.0, "ended with status 3, and wrote no reward.json or reward.txt: there"),
    ],
)
async def test_rewards_that_a_program_may_have_written(
    bench: Bench, tmp_path: Path, script: str, reward: float, reason: str | None
) -> None:
    shutil.copytree(HARBOR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tests" / "test.sh").write_text(f"#!/bin/sh\ncd /logs/verifier\n{script}\n")
    await bench.call("seed_session", {"task": str(tmp_path)})
    verdict = await bench.verify({"task": str(tmp_path)}, [])
    assert verdict["reward"] == reward
    assert reason is None or reason in verdict["reason"]


@needs_bubblewrap
@pytest.mark.parametrize("agent", ["workspace_agent", "oracle"])
async def test_the_time_that_a_task_gives_its_agent(agent: str, tmp_path: Path) -> None:
    shutil.copytree(HARBOR, tmp_path, dirs_exist_ok=True)
    (tmp_path / "task.toml").write_text("[agent]\ntimeout_sec = 1\n")
    (tmp_path / "solution" / "solve.sh").write_text("sleep 60")
    (row,) = HarborRows().rows(tmp_path)
    with Gym.from_graph(
        "workspace", ray=False, overrides=says("sleep 60", "touch a", "touch b", None)
    ) as gym:
        [rollout] = [rollout async for rollout in gym.rollouts([row], agent=agent)]
    assert rollout["reward"] == 0.0, rollout
    if agent != "oracle":
        assert rollout["stopped_by"] == "tool_deadline"
        assert "timeout_sec" in rollout["reason"]


@needs_bubblewrap
@pytest.mark.parametrize(
    ("command", "reward", "reason"),
    [
        (
            "mkdir /out; echo 42 > /out/answer; printf '#!/bin/sh\necho 43\n' > /tool; chmod +x /tool",
            2.0,
            None,
        ),
        ("mkdir /out; echo 42 > /out/answer", 1.0, None),
        ("mkdir /out; truncate -s 65M /out/answer", 0.0, "cannot be taken over: /out/answer has more"),
    ],
)
async def test_files_that_are_artifacts(
    bench: Bench, tmp_path: Path, command: str, reward: float, reason: str | None
) -> None:
    shutil.copytree(HARBOR, tmp_path / "task")
    config = 'artifacts = ["/out/answer", "/tool"]\n[verifier]\nenvironment_mode = "separate"\n'
    (tmp_path / "task" / "task.toml").write_text(config)
    (tmp_path / "task" / "tests" / "test.sh").write_text(
        "#!/bin/sh\n(cat /out/answer; /tool) 2>/dev/null | grep -c '^4[23]$' > /logs/verifier/reward.txt\n"
    )
    row = {"task": str(tmp_path / "task")}
    await bench.call("seed_session", row)
    await bench.tool("bash", command=command)
    verdict = await bench.verify(row, [])
    assert verdict["reward"] == reward, verdict
    assert reason is None or reason in verdict["reason"]
    assert await bench.verify(row, []) == verdict


COUNT = 'cd /; echo >> tried; test "$(wc -l < tried)" -gt 2 && test ! -e /app/agent && touch ready'


@needs_bubblewrap
@pytest.mark.parametrize("place", ["", '[verifier]\nenvironment_mode = "separate"\n'])
async def test_a_box_that_becomes_healthy(bench: Bench, tmp_path: Path, place: str) -> None:
    shutil.copytree(HARBOR, tmp_path / "task")
    check = f"command = {json.dumps(COUNT)}\ninterval_sec = 0\n"
    (tmp_path / "task" / "task.toml").write_text(f"{place}[environment.healthcheck]\n{check}")
    (tmp_path / "task" / "tests" / "test.sh").write_text(
        "#!/bin/sh\nls -1 /ready /app/agent 2>/dev/null | wc -l > /logs/verifier/reward.txt\n"
    )
    row = {"task": str(tmp_path / "task")}
    await bench.call("seed_session", row)
    assert (await bench.tool("bash", command="wc -l < /tried; touch /app/agent"))["output"] == "3\n"
    verdict = await bench.verify(row, [])  # the tests share the agent's box in Harbor, or have one unchecked
    assert verdict["reward"] == (0.0 if place else 2.0), verdict


@needs_bubblewrap
@pytest.mark.parametrize(
    ("check", "tries", "reason"),
    [
        ({"retries": 2}, [2], "exit status 7: broken"),
        ({"retries": 1, "start_period_sec": 1.0, "start_interval_sec": 0.1}, range(3, 13), "exit status 7"),
        ({"retries": 1, "timeout_sec": 0.2, "command": "echo >> /tried; sleep 60"}, [1], "killed: timeout"),
    ],
)
async def test_how_often_a_health_check_tries(check: dict[str, Any], tries: Any, reason: str) -> None:
    box = await find_provider("bubblewrap").create(SandboxSpec())
    failing = {"command": "echo >> /tried; echo broken; exit 7", "interval_sec": 0.0, **check}
    problem = await HealthCheck(**failing).problem(box)
    assert problem is not None
    assert reason in problem
    assert int((await box.exec("wc -l < /tried", timeout=60)).text) in tries
    await box.close()


@needs_bubblewrap
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "[environment]\nhealthcheck = {command = 'false', retries = 1}",
            "the box of the task is not healthy",
        ),
        ("[agent]\nuser = 'nobody'\n[environment]\nhealthcheck = {command = '[ $(id -u) = 0 ]'}", None),
        (
            "[agent]\nuser = 'nobody'\n[[steps]]\nname = 'a'\n"
            "healthcheck = {command = '[ $(id -u) = 0 ]', retries = 1}",
            "the first step of the task cannot be set up: the health check",
        ),
    ],
)
async def test_an_unhealthy_box_is_a_failure(
    bench: Bench, tmp_path: Path, config: str, message: str | None
) -> None:
    shutil.copytree(HARBOR, tmp_path / "task")
    (tmp_path / "task" / "steps" / "a").mkdir(parents=True)
    (tmp_path / "task" / "steps" / "a" / "instruction.md").write_text("Do it.")
    (tmp_path / "task" / "task.toml").write_text(config)
    row = {"task": str(tmp_path / "task")}
    if message is None:
        await bench.call("seed_session", row)
    else:
        with pytest.raises(Unavailable, match=message):
            await bench.call("seed_session", row)


@needs_bubblewrap
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_a_folder_of_harbor_through_a_graph(agent: str, reward: float) -> None:
    (row,) = HarborRows().rows(HARBOR)
    before = children()
    with Gym.from_graph("workspace", ray=False) as gym:
        rollouts = [rollout async for rollout in gym.rollouts([row], agent=agent, repeats=4)]
    assert [rollout["reward"] for rollout in rollouts] == [reward] * 4
    assert json.dumps(rollouts[0]["response"]["output"]) == "[]"
    await until(lambda: children() <= before)


STEPS = """
[environment]
network_mode = "no-network"
[verifier]
env = {A = "1"}
[[steps]]
name = "first"
min_reward = 1
[[steps]]
name = "second"
healthcheck = {command = "test ! -e /sick", retries = 1}
[steps.verifier]
timeout_sec = 60
"""


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A task of two steps: the file ``one``, and with it, what the second one sets up, the file ``two``."""
    folder = tmp_path / "steps-task"
    test = 'for name in "$@"; do [ -e $name ] || exit 1; done; [ "$A" = 1 ]'
    files = {
        "task.toml": STEPS,
        "environment/Dockerfile": "FROM a\nWORKDIR /app\n",
        "tests/check.sh": test,
        "steps/first/instruction.md": "Make one.",
        "steps/first/solution/solve.sh": "touch one",
        "steps/second/instruction.md": "Make two.",
        "steps/second/workdir/setup.sh": "touch set-up",
        "steps/second/solution/solve.sh": "test -e set-up && touch two",
    }
    for name, needed in (("first", "one"), ("second", "one two set-up")):
        run = f"if sh /tests/check.sh {needed}; then echo 1; else echo 0; fi"
        files[f"steps/{name}/tests/test.sh"] = f"#!/bin/sh\n{run} > /logs/verifier/reward.txt\n"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def says(*commands: str | None) -> dict[str, Any]:
    """A model that runs commands; None is the end of a step."""
    turns = [
        said("Done.") if each is None else [called("bash", {"command": each}, f"call_{i}")]
        for i, each in enumerate(commands)
    ]
    return {"models.policy": {"type": "scripted_model", "script": turns}}


@needs_bubblewrap
@pytest.mark.parametrize(
    ("agent", "commands", "reward", "instructions"),
    [
        ("oracle", [], 1.0, ["Make two."]),
        ("nop", [], 0.0, []),
        ("workspace_agent", ["touch one", None, "touch two", None], 1.0, ["Make two."]),
        ("workspace_agent", ["touch one", None, None], 0.5, ["Make two."]),
        ("workspace_agent", ["touch two", None], 0.0, []),
        ("workspace_agent", ["rm -rf /bin/bash /usr/bin/bash; touch one", None, None], 0.5, []),
        ("workspace_agent", ["touch one /sick", None, None], 0.5, []),
    ],
)
async def test_a_task_of_steps(
    steps: Path, agent: str, commands: list[str | None], reward: float, instructions: list[str]
) -> None:
    (row,) = HarborRows().rows(steps)
    assert row["responses_create_params"]["input"][0]["content"] == "Make one."
    with Gym.from_graph("workspace", ray=False, overrides=says(*commands) if commands else {}) as gym:
        [rollout] = [rollout async for rollout in gym.rollouts([row], agent=agent)]
    assert rollout["reward"] == reward, rollout
    users = [item for item in rollout["response"]["output"] if item.get("role") == "user"]
    assert [item["content"] for item in users] == instructions


@needs_bubblewrap
async def test_an_agent_cannot_make_the_next_step_endless(steps: Path) -> None:
    (row,) = HarborRows().rows(steps)
    endless = "touch one; printf '#!/bin/sh\\nexec sleep 1000\\n' > /usr/bin/touch"
    overrides = {**says(endless, None, None), "agents.workspace_agent.verify_timeout": 10.0}
    with Gym.from_graph("workspace", ray=False, overrides=overrides) as gym:
        [rollout] = [rollout async for rollout in gym.rollouts([row], agent="workspace_agent")]
    assert rollout["reward"] == 0.5, rollout


STOPPER = "import os\nwhile 1:\n try: os.kill(-1, 19)\n except OSError: pass"


@needs_bubblewrap
async def test_what_an_agent_left_is_taken_in_time(
    bench: Bench, steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_TAKE_SECONDS", 2.0)
    row = {"task": str(steps)}
    await bench.call("seed_session", row)
    await bench.tool("bash", command=f"touch one; setsid python3 -c {shlex.quote(STOPPER)} >/dev/null 2>&1 &")
    await asyncio.sleep(0.5)
    verdict = await asyncio.wait_for(bench.verify(row, []), 30)
    # Nothing where it stopped what takes the files. If it is late, on a busy machine, what it has earned.
    assert verdict["reward"] in (0.0, 0.5)
    assert await bench.verify(row, []) == verdict


@needs_bubblewrap
async def test_steps_that_were_not_reached_are_zeros(bench: Bench, steps: Path) -> None:
    row = {"task": str(steps)}
    await bench.call("seed_session", row)
    await bench.tool("bash", command="touch one")
    for _ in range(2):  # asked again, the same
        verdict = await bench.verify(row, [])
        assert (verdict["reward"], verdict["rewards"]) == (0.5, {"reward": 0.5})
    with pytest.raises(InvalidRequest, match="no step to go on from"):
        await bench.call("next_step")


@needs_bubblewrap
async def test_a_step_whose_tests_found_no_box_is_no_zero(
    bench: Bench, steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"task": str(steps)}
    await bench.call("seed_session", row)
    await bench.tool("bash", command="touch one")
    with monkeypatch.context() as patch:
        patch.setattr(BoxPool, "take", AsyncMock(side_effect=Unavailable("no box")))
        with pytest.raises(Unavailable, match="no box"):
            await bench.verify(row, [])
    for _ in range(2):
        assert (await bench.verify(row, []))["reward"] == 0.5


def test_the_last_step_decides_if_the_task_says_so(steps: Path) -> None:
    (steps / "task.toml").write_text('multi_step_reward_strategy = "final"\n' + STEPS)
    task = task_of(WorkspaceRow(task=str(steps)))
    assert task.final
    assert [(step.least, step.task.test_timeout, len(step.task.tests)) for step in task.steps] == [
        ({"reward": 1.0}, 600.0, 2),
        ({}, 60.0, 2),
    ]


SWE_TEST = "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
SWE_PATCH = """\
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return 0
+    return a + b
"""
SWE_TEST_PATCH = """\
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -4,2 +4,6 @@
 def test_zero():
     assert add(0, 0) == 0
+
+
+def test_sum():
+    assert add(2, 3) == 5
"""


@pytest.fixture
def swe_bench(tmp_path: Path) -> Path:
    """A folder with one row of SWE-bench's form."""
    folder = tmp_path / "swe"
    image = folder / "images" / "calc-1"
    (image / "repository" / "tests").mkdir(parents=True)
    (image / "repository" / "calc.py").write_text("def add(a, b):\n    return 0\n")
    (image / "repository" / "tests" / "test_calc.py").write_text(SWE_TEST)
    with_pytest(image)
    with (image / "Dockerfile").open("a") as file:
        file.write("COPY repository /testbed/\n")
    row = {
        "instance_id": "calc-1",
        "repo": "demo/calc",
        "base_commit": "0" * 40,
        "problem_statement": "add returns 0.",
        "patch": SWE_PATCH,
        "test_patch": SWE_TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_sum"]),
        "PASS_TO_PASS": ["tests/test_calc.py::test_zero"],
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return folder


RIGHT = "printf 'def add(a, b):\\n    return a + b\\n' > calc.py"
EMPTY = "printf 'def test_zero(): pass\\ndef test_sum(): pass\\n' > tests/test_calc.py"


SKIPS = "import pytest\\ndef add(a, b):\\n    pytest.skip()\\n"
SKIPS_ALL = "import pytest\\npytest.skip(allow_module_level=True)\\n"
FORGES = "def pytest_runtest_makereport(item, call): call.excinfo = None\\n"
FORGES_ALL_BUT = FORGES.replace(
    ": ", ":\\n    if not any(word in item.nodeid for word in ('must_fail', 'test_no', 'one')): "
)
ENDS_WELL = "import os\\nif not os.path.exists('/tests/one_must_fail'): os._exit(0)\\n"
OWN_PYTEST = "main = lambda args, **_: 'test_zero' not in str(args)\\n"


@needs_bubblewrap
async def test_rows_of_swe_bench(swe_bench: Path) -> None:
    (row,) = SweBenchRows().rows(swe_bench)
    bench = Bench(Workspace())
    await bench.host.start()
    for command, reward in (
        (RIGHT, 1.0),
        ("true", 0.0),
        (f"{RIGHT}; {EMPTY}", 1.0),  # the tests are the image's and the row's
        (EMPTY, 0.0),
        (f"{RIGHT}; rm -r tests", 1.0),
        (f"{RIGHT}; rm -r tests; touch tests", 0.0),
        ("printf 'def add(a, b):\\n    return 5\\n' > calc.py", 0.0),  # what passed must pass
        (f"printf '{SKIPS}' > calc.py", 0.0),
        (f"printf '{SKIPS.replace('skip', 'xfail')}' > calc.py", 0.0),
        (f"printf '{SKIPS_ALL}' > calc.py", 0.0),
        ("printf 'import os\\nos._exit(0)\\n' > calc.py", 0.0),
        (f"printf '{FORGES}' | tee conftest.py > tests/conftest.py", 0.0),
        (f'printf "{FORGES_ALL_BUT}" | tee conftest.py > tests/conftest.py', 0.0),
        (f'printf "{ENDS_WELL}" > calc.py', 0.0),
        (f'printf "{OWN_PYTEST}" > pytest.py', 0.0),
        (f"{RIGHT}; mkdir -p xdist; touch xdist/__init__.py pytest.py", 1.0),
    ):
        await bench.call("seed_session", row)
        await bench.tool("bash", command=command)
        verdict = await bench.verify(row, [])
        assert verdict["reward"] == reward, (command, verdict)
        bench.session = None
    await bench.call("seed_session", {**row, "oracle": True})
    assert (await bench.call("solve"))["exit_status"] == 0
    assert (await bench.verify(row, []))["reward"] == 1.0
    await bench.host.stop()


@needs_bubblewrap
@pytest.mark.parametrize("must_fail", [{}, {"test_no": ""}])
async def test_slow_code_chooses_no_failure(bench: Bench, must_fail: dict[str, str]) -> None:
    row = {"test_command": "sleep 60", "must_fail": must_fail}
    await bench.call("seed_session", row)
    reply = await bench.host.dispatch(
        Call("verify", json.dumps({**row, "response": {"output": []}}).encode(), bench.session, timeout=3.0)
    )
    assert (reply.json()["reward"], reply.json()["reason"]) == (0.0, "the tests were killed: timeout")


@needs_bubblewrap
@pytest.mark.parametrize(("test", "reward"), [("exit 1", 1.0), ("sleep 60", 0.0), ("exit 0", 0.0)])
async def test_tests_that_must_fail_fail_by_themselves(test: str, reward: float) -> None:
    bench = Bench(Workspace(test_timeout=2.0))
    await bench.host.start()
    row = {"test_command": "sh /tests/it; sh /tests/no", "tests": {"no": ""}, "must_fail": {"no": test}}
    await bench.call("seed_session", row)
    verdict = await bench.verify(row, [])
    assert verdict["reward"] == reward, verdict
    await bench.call("close_session")
    await bench.host.stop()


@pytest.mark.parametrize("one_must_fail", [False, True])
@pytest.mark.parametrize(
    ("test", "passes"),
    [
        ("def test_a(): pass", True),
        ("def test_a(): assert False", False),
        ("import pytest\n@pytest.mark.xfail\ndef test_a(): assert False", True),
        ("import pytest\n@pytest.mark.xfail(strict=True)\ndef test_a(): pass", False),
        ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass", True),
        ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.skipTest('')", False),
        ("import pytest\n@pytest.mark.parametrize('x', range(3))\ndef test_a(x): pass", True),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", False),
        ("import pytest\ndef test_a(): pytest.xfail()", False),
        ("", False),
    ],
)
def test_all_of_the_tests_must_pass(tmp_path: Path, test: str, passes: bool, one_must_fail: bool) -> None:
    (tmp_path / "test_a.py").write_text(test)
    program = tmp_path / "tests" / "all_passed.py"
    program.parent.mkdir()
    program.write_bytes(_PYTEST.read_bytes())
    if one_must_fail:
        (program.parent / "one_must_fail").touch()
    command = [sys.executable, program, "test_a.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode == 0) == (passes and not one_must_fail), done.stdout


FETCHES = """#!/bin/sh
test "$1 $2 $3 $5" = "download demo@1.0 --output-dir --export" || exit 2
mkdir "$4/demo" && cp -r {task} "$4/demo/one" && echo fetched
"""


def test_a_data_set_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    with pytest.raises(InvalidRequest, match=r"demo@1\.0 is no folder here, and .* `uv tool install harbor`"):
        list(HarborRows().rows("demo@1.0"))
    (programs / "harbor").write_text(FETCHES.format(task=HARBOR))
    (programs / "harbor").chmod(0o755)
    with pytest.raises(InvalidRequest, match=r"did not fetch other@1: it ended with 2"):
        list(HarborRows().rows("other@1"))
    for _ in range(2):
        (row,) = HarborRows().rows("demo@1.0")
        assert Path(row["task"]) == tmp_path / "cache" / "gym-serve" / "harbor" / "demo@1.0" / "one"
    assert capfd.readouterr().err.count("fetched") == 1
    assert harbor_benchmark("demo@1.0")["name"] == "demo@1.0"
    assert {path.name for path in (tmp_path / "cache/gym-serve/harbor").iterdir()} == {"demo@1.0"}


@pytest.mark.parametrize("name", ["missing", "../up@1", "a/b/c@1", "-x@1", "a@", "a b@1", "/etc@1"])
def test_names_of_no_data_set(name: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a folder, or a data set of Harbor's registry"):
        list(HarborRows().rows(name))


def test_rows_that_are_not_of_swe_bench(swe_bench: Path) -> None:
    with (swe_bench / "rows.jsonl").open("a") as file:
        file.write('{"instance_id": "b"}\n')
    with pytest.raises(
        InvalidRequest, match=r"rows\.jsonl:2 is no row of SWE-bench: KeyError\('FAIL_TO_PASS'\)"
    ):
        list(SweBenchRows().rows(swe_bench))
    with pytest.raises(InvalidRequest, match=r"has no rows\.jsonl"):
        list(SweBenchRows().rows(swe_bench / "images"))


def test_layers_that_nobody_uses_are_swept(tmp_path: Path) -> None:
    def layer(name: str, days: float, size: int = 1000) -> Path:
        folder = tmp_path / name
        (folder / "upper").mkdir(parents=True)
        (folder / "upper" / "file").write_bytes(bytes(size))
        (tmp_path / f"{name}.lock").touch()
        os.utime(folder, times=(then := time.time() - days * 86400, then))
        return folder

    old, older, young = layer("a" * 32, 3), layer("b" * 32, 5), layer("c" * 32, 0.5, 5000)
    held, gone = layer("d" * 32, 9), layer("e" * 32, 7)
    lock = images._locked(held)  # another process builds it
    half = Path(f"{gone}.begun")
    gone.rename(half)
    images.sweep(tmp_path, 1e9)
    assert {older, old, young, held} <= set(tmp_path.iterdir())
    assert not half.exists()
    images.sweep(tmp_path, 7500)
    assert not older.exists()
    assert old.exists()
    assert images._used(old)
    images.sweep(tmp_path, 0)
    os.close(lock)
    images.sweep(tmp_path, 0)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {old.name, young.name}
    assert not images._used(older)


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({}, {}, None),
        ({}, {"resources": {"fast": 1}}, {"fast": 1}),
        ({"box_resource": "boxes", "max_boxes": 32}, {}, {"boxes": 32}),
        (
            {"box_resource": "boxes", "max_boxes": 32},
            {"resources": {"fast": 1}},
            {"fast": 1, "boxes": 32},
        ),
    ],
)
def test_a_replica_takes_its_boxes_from_what_a_node_has(
    settings: dict[str, Any], options: dict[str, Any], expected: dict[str, float] | None
) -> None:
    file = {
        "models": {"policy": {"type": "chat_model", "base_url": "http://127.0.0.1:9/v1", "model": "m"}},
        "resources": {"workspace": {"type": "workspace", **settings, **options}},
        "agents": {"agent": {"type": "simple_agent", "model": "policy", "resources": "workspace"}},
    }
    node = resolve(GraphSpec.model_validate(file)).nodes["workspace"]
    assert deployed_options(node).get("resources") == expected


@needs_bubblewrap
@pytest.mark.parametrize(
    "written", ["[" * 20_000, "NaN", "1e999", f"1{'0' * 400}", '{"a": 1e308, "b": 1e308}', "{}", '"1"']
)
async def test_a_reward_that_is_no_number_is_a_zero(bench: Bench, tmp_path: Path, written: str) -> None:
    shutil.copytree(HARBOR, tmp_path / "task")
    (tmp_path / "task" / "tests" / "written").write_text(written)
    copy = "#!/bin/sh\ncp /tests/written /logs/verifier/reward.json\n"
    (tmp_path / "task" / "tests" / "test.sh").write_text(copy)
    row = {"task": str(tmp_path / "task")}
    await bench.call("seed_session", row)
    verdict = await bench.verify(row, [])
    assert verdict["reward"] == 0.0
    assert "reward.json holds no reward" in verdict["reason"]


@needs_bubblewrap
@pytest.mark.parametrize("command", ["kill -STOP $$", "kill -9 $$"])
async def test_a_reward_is_not_read_while_others_may_write(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where what the tests ran stops or kills the shell that ends it."""
    box = await find_provider("bubblewrap").create(SandboxSpec())
    execute = box.exec

    async def disturbed(_: Any, **options: Any) -> Any:
        return await execute(command, **{**options, "timeout": 1})

    try:
        assert await workspace._not_ended(box) is None
        monkeypatch.setattr(box, "exec", disturbed)
        assert await workspace._not_ended(box) == "its processes cannot be ended"
    finally:
        await box.close()
