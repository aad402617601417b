"""A run that waits says for whom, why and until when; one that would have to wait for too long stops, and its
rollouts stay open."""

import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.rollouts import JSON, FakeAgent, collection, read_jsonl, rows, scored, with_backend
from support.upstream import ChatEndpoint
from typer.testing import CliRunner

from gym_serve.cli import main
from gym_serve.cli.run_collection import ProgressDisplay
from gym_serve.rollouts import Backoff, Progress, RunnerOptions, collect
from gym_serve.rollouts.progress import Waiting
from gym_serve.types.errors import GymError, Overloaded, Unavailable, VerifierFailed, WaitTooLong

QUOTA = "http://api/v1: HTTP 429: daily quota"
GONE = "no connection to http://api/v1: Connection refused"


class Refusing:
    """Refuses each call until it is mended."""

    def __init__(self, error: GymError, times: float = float("inf")) -> None:
        self.calls = 0
        self.error = error
        self.times = times

    async def __call__(self, row: JSON) -> JSON:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return scored(row)


@pytest.mark.parametrize("count", [1, 2, 8, 40])
@pytest.mark.parametrize(
    ("error", "told", "after"),
    [
        (Overloaded(QUOTA, server="policy", retry_after=86400.0), "policy takes no calls until 2", 86400.0),
        (VerifierFailed(QUOTA, server="judge", retry_after=9.0), "judge takes no calls until 2", 9.0),
        (Overloaded(QUOTA, server="policy"), "policy takes no calls and does not say until when", None),
        (Unavailable(GONE, server="policy"), "policy takes no calls and does not say until when", None),
    ],
)
async def test_a_wait_that_is_too_long_leaves_all_rows_open(
    tmp_path: Path, count: int, error: GymError, told: str, after: float | None
) -> None:
    refusing, output = Refusing(error), tmp_path / "out.jsonl"
    options = RunnerOptions(attempts=3, timeout=0.3, backoff=Backoff(0.002, 0.01))
    work = replace(collection(refusing), options=options)
    report = await collect(rows(count), output, work)
    assert (report.complete, report.progress.finished, report.progress.failed) == (False, 0, 0)
    stop = report.operator_error
    assert type(stop) is WaitTooLong
    assert stop.message.startswith(told)
    longest = "asks 8 more times" if isinstance(error, Unavailable) else "waits 0.3 s"
    assert f"a run {longest} at most" in stop.message
    assert stop.message.endswith(error.message)
    assert (stop.server, stop.retry_after) == (error.server, after)
    if after is not None:
        assert refusing.calls <= count
    refusing.times = 0
    report = await collect(rows(count), output, work, resume=True)
    assert (report.complete, report.progress.scored) == (True, count)
    assert len(read_jsonl(output)) == count


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    "error",
    [Overloaded(QUOTA, server="policy", retry_after=1.2), Unavailable(GONE, server="policy")],
)
async def test_progress_says_for_whom_and_until_when(tmp_path: Path, count: int, error: GymError) -> None:
    seen: list[Progress] = []
    options = RunnerOptions(attempts=3, backoff=Backoff(1.2, spread=lambda: 1.0))
    work = replace(collection(Refusing(error, times=count)), options=options)
    began = time.time()
    report = await collect(rows(count), tmp_path / "out.jsonl", work, progress=seen.append)
    assert (report.complete, report.progress.scored, report.progress.waiting) == (True, count, None)
    waiting = next(progress.waiting for progress in seen if progress.waiting)
    assert (waiting.server, waiting.reason) == ("policy", error.message)
    assert 0.0 < waiting.seconds <= 1.2
    assert waiting.until[:16] in [
        time.strftime("%Y-%m-%d %H:%M", time.localtime(began + wait)) for wait in (0.0, 3.0)
    ]
    assert all(progress.waiting is None for progress in seen if progress.running)


async def test_one_agent_of_several_that_waits_does_not_stop_the_others(tmp_path: Path) -> None:
    error = Overloaded(QUOTA, retry_after=86400.0)
    agent = FakeAgent(errors={(task, 0): [error] for task in range(0, 40, 4)})
    report = await collect(rows(40), tmp_path / "out.jsonl", collection(agent, concurrency=2))
    assert (report.progress.scored, report.progress.remaining, report.progress.failed) == (30, 10, 0)
    assert isinstance(report.operator_error, WaitTooLong)


@pytest.mark.parametrize("wait", [float("nan"), float("inf"), -1.0, 1e300, "soon", True])
async def test_what_a_foreign_agent_says_of_waiting_may_be_nonsense(tmp_path: Path, wait: Any) -> None:
    async def run(row: JSON) -> JSON:
        failure = {"retry_after": wait, "server": 5, "stage": None}
        return {**row, "reward": 0.0, "_ng_failure_class": "overloaded", "failure": failure}

    options = RunnerOptions(timeout=0.05, backoff=Backoff(0.01, 0.02))
    work = replace(collection(run), options=options)
    report = await collect(rows(2), tmp_path / "out.jsonl", work)
    assert isinstance(report.operator_error, WaitTooLong)
    assert report.progress.remaining == 2


def test_the_line_of_a_run_that_waits() -> None:
    file = io.StringIO()
    waiting = Waiting("policy", f"{QUOTA}\x1b[31m", 86000.0, "2026-11-29 10:44:31+00:00")
    ProgressDisplay(Console(file=file, width=200))(Progress(8, 0, 0, 0, 0, {}, None, waiting=waiting))
    line = f"0/8  failed 0  running 0  waiting until {waiting.until} for policy: {QUOTA} [31m\n"
    assert file.getvalue() == line


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    ("error", "times"),
    [(Overloaded(QUOTA, server="judge", retry_after=0.02), 9), (Unavailable(GONE, server="judge"), 8)],
)
async def test_a_comparison_waits_for_its_judge(
    tmp_path: Path, count: int, error: GymError, times: int
) -> None:
    asked, seen = Counter[int](), list[Progress]()

    async def compare(row: JSON, body: JSON, meter: Any) -> JSON:
        asked[row["_ng_task_index"]] += 1
        if asked[row["_ng_task_index"]] <= times:
            raise error
        return {"rewards": [0.5, 0.5]}

    async def comparing() -> Any:
        return compare

    work = with_backend(collection(FakeAgent(), repeats=2), comparing=comparing)
    report = await collect(rows(count), tmp_path / "out.jsonl", work, progress=seen.append)
    assert (report.complete, report.progress.mean_reward) == (True, 0.5)
    assert asked == dict.fromkeys(range(count), times + 1)
    waiting = next(progress.waiting for progress in seen if progress.waiting)
    assert (waiting.server, waiting.reason) == ("judge", error.message)


async def test_a_comparison_that_would_wait_for_too_long_stays_open(tmp_path: Path) -> None:
    async def compare(row: JSON, body: JSON, meter: Any) -> JSON:
        raise Overloaded(QUOTA, server="judge", retry_after=86400.0)

    async def comparing() -> Any:
        return compare

    work = with_backend(collection(FakeAgent(), repeats=2), comparing=comparing)
    report = await collect(rows(1), tmp_path / "out.jsonl", work)
    assert (report.complete, type(report.operator_error)) == (False, WaitTooLong)
    assert str(report.operator_error).startswith("judge takes no calls until 2")


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    with ChatEndpoint("The answer is \\boxed{A}.") as running:
        yield running


@pytest.mark.parametrize(
    ("status", "wait", "reason"),
    [
        (429, 86400, "HTTP 429: Too Many Requests"),
        (503, 86400, "HTTP 503: Service Unavailable"),
        (429, 61, "HTTP 429: Too Many Requests"),  # for which the model's own `timeout` has room
    ],
)
def test_the_command(
    endpoint: ChatEndpoint,
    tmp_path: Path,
    status: int,
    wait: int,
    reason: str,
) -> None:
    graph = {
        "models": {"policy": {"type": "chat_model", "base_url": endpoint.url, "model": "m"}},
        "resources": {"mcqa": {"type": "mcqa"}},
        "agents": {"mcqa_agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa"}},
    }
    (tmp_path / "graph.yaml").write_text(json.dumps(graph))
    source = Path(__file__).parents[2] / "environments" / "mcqa" / "data" / "example.jsonl"
    out = tmp_path / "out.jsonl"
    asked = ["collect", str(tmp_path / "graph.yaml"), str(source), "-o", str(out), "--no-ray", "--limit", "8"]
    asked += ["--timeout", "30"]
    endpoint.refuses, endpoint.refusal_headers = status, {"Retry-After": str(wait)}
    stopped = CliRunner().invoke(main, [*asked, "--json"])
    assert stopped.exit_code == 5, stopped.output
    report = json.loads(stopped.stdout)
    assert report["rollouts"] == {"total": 8, "finished": 0, "scored": 0, "failed": 0, "earlier": 0}
    fault = report["fault"]
    assert (fault["code"], fault["server"], fault["retry_after"]) == ("wait_too_long", "policy", wait)
    assert f"{endpoint.url}/chat/completions: {reason}" in fault["message"]
    assert f"Stopped: {fault['message']} (policy)" in stopped.stderr
    assert "8 rollouts remain." in stopped.stderr
    assert len(endpoint.requests) <= 8
    endpoint.refuses = None
    done = CliRunner().invoke(main, [*asked, "--resume"])
    assert done.exit_code == 0, done.output
    assert len(read_jsonl(out)) == 8
