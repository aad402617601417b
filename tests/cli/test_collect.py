"""`gym-serve collect` and `reverify` against one running graph; what attaches or is stopped is a process."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.upstream import ChatEndpoint
from support.waiting import wait_until
from typer.testing import CliRunner

from gym_serve import Gym
from gym_serve.cli import main

ROWS = Path(__file__).parents[2] / "environments" / "mcqa" / "data" / "example.jsonl"
GYM_SERVE = [sys.executable, "-c", "from gym_serve.cli import main; main()"]
GRAPH: dict[str, Any] = {
    "models": {"policy": {"type": "scripted_model", "latency": 0.3}},
    "resources": {"mcqa": {"type": "mcqa"}, "weather": {"type": "simple_weather"}},
    "agents": {
        "mcqa_agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa", "inline": ["mcqa"]},
        "weather_agent": {"type": "simple_agent", "model": "policy", "resources": "weather"},
    },
    "default_agent": "mcqa_agent",
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ChatEndpoint]:
    with ChatEndpoint("The answer is \\boxed{A}.") as running:
        yield running


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The command changes how often garbage is collected, for its own process: not for those of the tests."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.fixture(scope="module")
def gym(deploy: Any, endpoint: ChatEndpoint) -> Gym:
    chat = {"type": "chat_model", "base_url": endpoint.url, "model": "m"}
    behind = {"type": "simple_agent", "model": "chat", "resources": "mcqa", "inline": ["mcqa"]}
    graph = {
        **GRAPH,
        "models": {**GRAPH["models"], "chat": chat},
        "agents": {**GRAPH["agents"], "chat_agent": behind},
    }
    running: Gym = deploy(graph, name="collected")
    return running


def environment() -> dict[str, str]:
    # Of now: Ray has put its authentication mode into it when the cluster was started.
    return {**os.environ, "COLUMNS": "200"}


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The command in this process, which spares the imports; `start` runs it in one of its own."""
    ran = CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "200"})
    return subprocess.CompletedProcess(arguments, ran.exit_code, ran.stdout, ran.stderr)


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [*GYM_SERVE, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_refused_key_burns_no_row(gym: Gym, endpoint: ChatEndpoint, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    asked = ("collect", ROWS, "--url", gym.url, "-o", out, "--repeats", 4, "--agent", "chat_agent")
    total = 4 * len(example())
    endpoint.refuses, endpoint.refuses_after = 401, 20
    stopped = run(*asked, "--concurrency", 4)
    assert stopped.returncode == 5, stopped.stderr
    assert f"20 of {total} rollouts: 20 scored, 0 failed" in stopped.stdout
    assert "HTTP 401: Unauthorized" in stopped.stderr
    assert (
        f"{total - 20} rollouts remain. Fix the problem, then run the same command with --resume."
        in stopped.stderr
    )
    assert len(endpoint.requests) <= 24
    assert (len(records(out)), records(tmp_path / "out_failures.jsonl")) == (20, [])
    endpoint.refuses = 404
    stopped = run(*asked, "--resume", "--max-failures", 2, "--concurrency", 1, "--json")
    assert stopped.returncode == 5, stopped.stderr
    report = json.loads(stopped.stdout)
    assert report["fault"]["code"] == "endpoint_misconfigured"
    assert report["rollouts"]["scored"] == 20
    endpoint.refuses = 400
    failed = run(*asked, "--resume")
    assert failed.returncode == 5, failed.stderr
    assert "20 rollouts in a row failed alike, with bad_request in the model stage" in failed.stderr
    assert records(tmp_path / "out_failures.jsonl") == []
    endpoint.refuses = None
    done = run(*asked, "--retry-failed")
    assert done.returncode == 0, done.stderr
    assert f"{total} of {total} rollouts: {total} scored, 0 failed" in done.stdout
    assert set(keys(out).values()) == {1}
    assert len(records(out)) == total


def test_top_shows_it_by_its_name_address_and_url(gym: Gym, endpoint: ChatEndpoint) -> None:
    gym.run(ROWS, limit=2, agent="chat_agent")
    points = gym.stats()["metrics"]["gym_serve_rollouts_total"]
    scored = int(sum(point["value"] for point in points if point["labels"]["outcome"] == "scored"))
    address = ray.get_runtime_context().gcs_address
    for target in (["collected", "--address", address], ["--url", gym.url]):
        shown = run("top", *target, "--interval", "0.2")
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        assert lines[0] == (gym.url if "--url" in target else "collected")
        assert f"  {scored} scored" in lines[1]
        assert ["chat", endpoint.url, "up"] in map(str.split, lines)
        assert {"policy", "chat", "weather", "chat_agent"} <= {line.partition(" ")[0] for line in lines}


def keys(path: Path) -> Counter[str]:
    return Counter(record["_ng_rollout_id"] for record in records(path))


def example() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_over_http_with_tables(gym: Gym, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run("collect", ROWS, "--url", gym.url, "-o", out, "--repeats", "mcqa_agent=2,_default=1")
    assert result.returncode == 0, result.stderr
    assert f"{gym.url}/ui" in result.stderr.splitlines()[0]
    rows = len(example())
    assert len(keys(out)) == len(records(out)) == 2 * rows
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:3] == ["name", "scored", "mean"]
    assert lines[1][:2] == ["mcqa_agent", f"{2 * rows}/{2 * rows}"]
    assert "metric, by NeMo Gym's definition" in result.stdout
    assert "majority@2/accuracy" in result.stdout
    assert f"{2 * rows} of {2 * rows} rollouts: {2 * rows} scored, 0 failed; {out}" in result.stdout
    assert f"{2 * rows}/{2 * rows}" in result.stderr.splitlines()[-1]


def test_attached_by_its_name_and_failures_in_json(gym: Gym, tmp_path: Path) -> None:

    rows = write(tmp_path / "rows.jsonl", [*example()[:3], {**example()[0], "options": 7}])
    out = tmp_path / "out.jsonl"
    address = ray.get_runtime_context().gcs_address
    process = start("collect", rows, "--attach", gym.name, "--address", address, "-o", out, "--json")
    stdout, stderr = process.communicate()
    assert process.returncode == 3, stderr
    report = json.loads(stdout)
    assert (report["ok"], report["complete"]) == (False, True)
    assert report["rollouts"] == {"total": 4, "finished": 4, "scored": 3, "failed": 1, "earlier": 0}
    (failure,) = report["failures"]
    assert failure["kind"] == "invalid_request"
    assert (failure["attempts"], failure["terminal"]) == (1, 1)
    assert "options" in failure["first"]
    assert report["files"]["rollouts"] == str(out)
    assert report["metrics"][0]["agent_ref"] == {"name": "mcqa_agent"}
    assert report["mean_reward"] == sum(record["reward"] for record in records(out)) / 3
    assert report["coverage"] == {"scored": 3, "masked": 0, "asked": 4}
    assert report["metrics"][0]["coverage"] == {"scored": 3, "asked": 4}


def test_a_kill_and_then_resume_gives_every_rollout_once(gym: Gym, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    command = ["collect", ROWS, "--url", gym.url, "-o", out, "--repeats", 2, "--concurrency", 2]
    process = start(*command)
    wait_until(lambda: out.exists() and out.stat().st_size > 5_000)
    process.kill()
    process.communicate()
    refused = run(*command)
    assert refused.returncode == 1
    assert "resume it (--resume), or write to another file" in refused.stderr
    result = run(*command[:-2], "--resume", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["rollouts"]["earlier"] > 0
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(subprocess.run(["gzip", "-dc", out], capture_output=True, check=True).stdout)
    found = keys(plain)
    assert set(found.values()) == {1}
    assert len(found) == 2 * len(example()) == report["rollouts"]["scored"]
    changed = run(*command, "--resume", "--seed", 7)
    assert changed.returncode == 1
    assert "seed: was null, is 7" in changed.stderr


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_once_drains_and_twice_cancels(gym: Gym, tmp_path: Path, signals: int) -> None:
    out = tmp_path / "out.jsonl"
    # At this concurrency half a minute's work, however late the signals come.
    repeats = 28
    command = ["collect", ROWS, "--url", gym.url, "-o", out, "--repeats", repeats, "--concurrency", 4]
    process = start(*command)
    wait_until(lambda: out.exists() and out.stat().st_size)
    process.send_signal(signal.SIGINT)
    if signals == 2:
        assert process.stderr is not None
        wait_until(lambda: "Stopping" in process.stderr.readline())
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    finished = len(records(out))
    assert f"{finished} of {repeats * len(example())} rollouts" in stdout
    assert records(tmp_path / "out_failures.jsonl") == []
    result = run(*command[:-2], "--resume")
    assert result.returncode == 0, result.stderr
    assert set(keys(out).values()) == {1}
    assert len(records(out)) == repeats * len(example())


def test_bad_rows_are_all_named_and_nothing_starts(gym: Gym, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    good = json.dumps(example()[0])
    rows.write_text(f'{good}\n{{"a": NaN}}\n[]\n{good[:-5]}\n')
    result = run("collect", rows, "--url", gym.url, "-o", out)
    assert result.returncode == 1
    for line, reason in ((2, "NaN"), (3, "JSON object"), (4, "not JSON")):
        assert f"{rows}:{line}: " in result.stderr
        assert reason in result.stderr
    assert not records(out)
    as_json = run("collect", rows, "--url", gym.url, "-o", out, "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["error"]["code"] == "invalid_request"
    result = run("collect", rows, "--url", gym.url, "-o", out, "--skip-invalid")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("left out: ") == 3
    assert len(records(out)) == 1


def test_shards_are_the_whole(gym: Gym, tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for part in (1, 2):
        out = tmp_path / f"{part}.jsonl"
        options = [
            "--shard",
            f"{part}/2",
            "--limit",
            9,
            "--param",
            "temperature=0.5",
            "--agent",
            "mcqa_agent",
        ]
        assert run("collect", ROWS, "--url", gym.url, "-o", out, *options).returncode == 0
        found += keys(out)
        assert {r["responses_create_params"]["temperature"] for r in records(out)} == {0.5}
    assert sorted(found.items()) == sorted((f"{n}-0", 1) for n in range(9))
    parts, whole = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"], tmp_path / "whole.jsonl"
    merged = run("merge", *parts, "-o", tmp_path / "all.jsonl", "--url", gym.url, "--json")
    assert merged.returncode == 0, merged.stderr
    once = run("collect", ROWS, "--url", gym.url, "-o", whole, "--limit", 9, "--json")
    assert json.loads(merged.stdout)["rollouts"] == json.loads(once.stdout)["rollouts"]
    names = [set(json.loads(report.stdout)["metrics"][0]["agent_metrics"]) for report in (merged, once)]
    assert names[0] == names[1]


def test_reverify_scores_again_where_the_verifier_can(gym: Gym, tmp_path: Path) -> None:
    stored, out = tmp_path / "stored.jsonl", tmp_path / "again.jsonl"
    rollouts = gym.run(ROWS)
    # The rewards on file are wrong, as those of an old verifier.
    write(stored, [{**rollout, "reward": 9.0} for rollout in rollouts])
    result = run("reverify", stored, "--url", gym.url, "-o", out, "--json")
    assert result.returncode == 0, result.stderr
    rewards = {record["_ng_rollout_id"]: record["reward"] for record in records(out)}
    assert rewards == {rollout["_ng_rollout_id"]: rollout["reward"] for rollout in rollouts}
    assert {r["_ng_rollout_id"]: r["response"] for r in records(out)} == {
        r["_ng_rollout_id"]: r["response"] for r in rollouts
    }
    write(stored, [{**rollouts[0], "agent_ref": {"name": "weather_agent"}}, example()[0]])
    refused = run("reverify", stored, "--url", gym.url, "-o", tmp_path / "no.jsonl")
    assert refused.returncode == 1
    assert f"{stored}:1: weather cannot score a stored response" in refused.stderr
    assert f"{stored}:2: `response` is missing" in refused.stderr


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ("row.jsonl", [], "cannot read row.jsonl: No such file"),
        (
            "rows.jsonl",
            ["--agent", "mcqa"],
            "no agent 'mcqa' in graph.yaml; it has mcqa_agent, weather_agent",
        ),
        ("rows.jsonl", ["--max-cost", "1"], "prices"),
        ("rows.jsonl", ["-o", "used.jsonl"], "used.jsonl holds a run"),
    ],
)
def test_rows_and_output_are_looked_at_before_a_graph_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Gym, "from_graph", lambda *_, **__: pytest.fail("a graph was started"))
    Path("graph.yaml").write_text(json.dumps(GRAPH))
    write(tmp_path / "rows.jsonl", example())
    Path("used.jsonl").write_text("{}\n")
    before = set(tmp_path.iterdir())
    result = CliRunner().invoke(main, ["collect", "graph.yaml", rows, "-o", "out.jsonl", *options])
    assert result.exit_code == 1
    assert said in result.output
    assert set(tmp_path.iterdir()) <= before | {tmp_path / "used_failures.jsonl"}
