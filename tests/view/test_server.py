"""The viewer as people start it: a process, its index, and its API over real HTTP."""

import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest
from view.made import failed, rollout, start, until_indexed, url_of, viewer, write

from gym_serve.metrics import Failures
from gym_serve.metrics.estimators import pass_curve
from gym_serve.rollouts.analysis import Comparison, RunScores
from gym_serve.rollouts.journal import Header
from gym_serve.servers.usage import Prices
from gym_serve.view.statistics import compare_runs, read_summary
from gym_serve.view.view import View


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    write(folder / "one.jsonl", [rollout(task, index) for task in range(3) for index in range(4)])
    write(folder / "one_failures.jsonl", [failed(2, 4)])
    write(folder / "two.jsonl", [rollout(task, index, reward=1.0) for task in range(3) for index in range(2)])
    write(folder.parent / "secret.jsonl", [rollout(9, 9)])
    return folder


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with viewer(folder, cache=tmp_path_factory.mktemp("cache")) as client:
        until_indexed(client, 19)
        yield client


@pytest.fixture(scope="module")
def runs(client: httpx.Client) -> dict[str, str]:
    """Ids of the runs by name."""
    return {run["name"]: run["id"] for run in get(client, "api/runs")["runs"]}


def get(client: httpx.Client, path: str, **query: Any) -> Any:
    return client.get(path, params=query).raise_for_status().json()


def test_runs_have_their_failures_with_them(client: httpx.Client, folder: Path) -> None:
    runs = get(client, "api/runs")["runs"]
    assert [(run["name"], run["rollouts"], run["problems"]) for run in runs] == [
        ("one.jsonl", 13, []),
        ("two.jsonl", 6, []),
    ]
    sizes = [(folder / name).stat().st_size for name in ("one.jsonl", "one_failures.jsonl")]
    assert runs[0]["bytes"] == runs[0]["indexed_bytes"] == sum(sizes)


def test_a_row_of_the_table(client: httpx.Client, runs: dict[str, str]) -> None:
    found = get(client, "api/rollouts", run=runs["one.jsonl"], where="task = 2 and attempt = 3")
    assert found["columns"] == [{"name": "score", "type": "number"}, {"name": "extracted", "type": "text"}]
    assert found["total"] == 1
    assert found["rows"] == [
        {
            **{"run": runs["one.jsonl"], "n": 11, "id": "2-3", "task": "2", "attempt": 3},
            **{"agent": "weather_agent", "environment": "weather", "reward": 1.0, "failure": None},
            **{"turns": 2, "tools": ["get_weather"], "tokens": 23, "input_tokens": 20, "output_tokens": 3},
            **{
                "seconds": 2.5,
                "version": "17",
                "last_version": "18",
                "behind": 1,
                "prompt": "Question 2: rain?",
                "marks": [],
            },
            "fields": {"score": 0.5, "extracted": "answer 3"},
        }
    ]


def test_sorts_over_several_runs_are_merged(client: httpx.Client) -> None:
    whole = get(client, "api/rollouts", sort="-seconds", limit=1000)
    assert [row["seconds"] for row in whole["rows"]] == sorted(
        (row["seconds"] for row in whole["rows"]), reverse=True
    )
    pages = [
        get(client, "api/rollouts", sort="-seconds", offset=at, limit=5)["rows"] for at in range(0, 20, 5)
    ]
    assert [row for page in pages for row in page] == whole["rows"]
    assert whole["total"] == 19


def test_what_is_missing_comes_last(client: httpx.Client) -> None:
    for sort in ("reward", "-reward"):
        assert get(client, "api/rollouts", sort=sort)["rows"][-1]["failure"] == "model_timeout"


def test_tasks_have_their_attempts_beside_one_another(client: httpx.Client, runs: dict[str, str]) -> None:
    found = get(client, "api/tasks", run=runs["one.jsonl"], sort="-attempts")
    assert found["total"] == 3
    first = found["rows"][0]
    assert (first["task"], first["attempts"], first["solved"], first["mean_reward"]) == ("2", 5, 2, 0.5)
    assert (first["spread"], first["longest"], first["prompt"]) == (1.0, 24, "Question 2: rain?")
    assert [(at["n"], at["failure"]) for at in first["rollouts"]][-1] == (10**9, "model_timeout")


def test_a_summary(client: httpx.Client, runs: dict[str, str]) -> None:
    found = get(client, "api/summary", run=runs["one.jsonl"])
    (run,) = found["runs"]
    assert (run["rollouts"], run["scored"], run["failed"], run["mean_reward"]) == (13, 12, 1, 0.5)
    assert run["pass_at_k"] == {"1": 0.5, "2": pytest.approx(5 / 6), "4": 1.0}
    assert run["failures"] == {"model_timeout": 1}
    assert run["versions"] == {"17": 13}
    assert found["facets"]["last_version"] == {"18": 13}
    assert (run["behind"], run["straddling"]) == ({"mean": 1.0, "most": 1}, 13)
    assert run["cost"] is None
    assert sum(run["histogram"]["counts"]) == 12
    assert run["over_time"][-1] == {"at": 1_795_413_977.4, "rollouts": 13, "mean_reward": 0.5, "failed": 1}
    assert found["facets"]["tool"] == {"get_weather": 12}
    assert found["facets"]["environment"] == {"weather": 13}


@pytest.mark.parametrize(
    "where", ["", "reward >= 0", "fields.score < 0.3", "fields.score >= 0.5 and tool('a')", "reward > 9"]
)
def test_a_summary_is_what_the_rows_say(tmp_path: Path, where: str) -> None:
    dice = random.Random(4)
    made = []
    for at in range(600):
        one = rollout(at // 6, at % 6, _ng_latency_s=dice.choice([0.0, dice.expovariate(0.2), 900.0]))
        one["reward"] = float(dice.random() < 0.4) if at < 300 else round(dice.uniform(-1, 2), 3)
        one["score"] = dice.random()
        one["response"]["output"][0]["name"] = dice.choice("abc")
        one["_ng_timeline"]["steps"][3][-1] = {"version": str(dice.randrange(17, 20))}
        made.append(one)
    path = write(tmp_path / "out.jsonl", made)
    write(tmp_path / "out_failures.jsonl", [failed(at, 7) for at in range(20)])
    with View([path], tmp_path / "cache") as view:
        view.index()
        for chosen in (where, f"({where or 'turns > 0'}) and n < 300"):  # of these, all rewards are 0 or 1
            rows = list(view.rollouts(chosen))
            found = view.summary(chosen)
            (told,) = found["runs"]
            rewards = [row["reward"] for row in rows if row["reward"] is not None]
            assert (told["rollouts"], told["scored"]) == (len(rows), len(rewards))
            assert told["straddling"] == sum(row["version"] != row["last_version"] for row in rows)
            tools = Counter(tool for row in rows for tool in row["tools"])
            assert found["facets"]["tool"] == tools
            assert told["failures"] == Counter(row["failure"] for row in rows if row["failure"])
            seconds = sorted(row["seconds"] for row in rows)
            expected = {
                f"p{share}": seconds[len(seconds) * share // 100] if rows else None for share in (50, 90)
            }
            assert {name: told["seconds"][name] for name in expected} == expected
            edges, counts = told["histogram"]["edges"], told["histogram"]["counts"]
            assert sum(counts) == len(rewards)
            assert counts[-1] == sum(reward >= edges[-2] for reward in rewards)
            tasks: dict[str, list[float]] = {}
            for row in sorted(rows, key=lambda row: row["attempt"]):
                if row["reward"] is not None:
                    tasks.setdefault(row["task"], []).append(row["reward"])
            means = [sum(of) / len(of) for of in tasks.values()]
            assert told["mean_reward"] == (pytest.approx(sum(means) / len(means)) if means else None)
            curves = [pass_curve(of) for of in tasks.values()]
            for k, passed in told["pass_at_k"].items():
                of = [curve[int(k) - 1] for curve in curves if len(curve) >= int(k)]
                assert passed == pytest.approx(sum(of) / len(of))
            binary = all(reward in (0, 1) for reward in rewards)
            assert bool(told["pass_at_k"]) == bool(rewards and binary)
            methods = {None, "wilson" if binary else "bootstrap"}
            assert told["interval_method"] in methods


def test_how_far_a_rollout_is_behind_the_newest_version(tmp_path: Path) -> None:
    """Lines are in order of completion: a rollout that began long ago is behind what later ones have seen."""

    def made(task: int, first: int, last: int) -> dict[str, Any]:
        told = rollout(task, 0)
        steps = told["_ng_timeline"]["steps"]
        steps[1][-1], steps[3][-1] = {"version": str(first)}, {"version": str(last)}
        return told

    spans = [(3, 3), (4, 5), (3, 4), (6, 6), (2, 6)]
    path = write(tmp_path / "out.jsonl", [made(task, *span) for task, span in enumerate(spans)])
    write(tmp_path / "out_failures.jsonl", [failed(9, 0)])
    with View([path], tmp_path / "cache") as view:
        view.index()
        found = [(row["version"], row["last_version"], row["behind"]) for row in view.rollouts()]
        assert found == [
            *(("3", "3", 0), ("4", "5", 1), ("3", "4", 2), ("6", "6", 0), ("2", "6", 4)),
            ("17", "18", None),
        ]
        assert [row["n"] for row in view.rollouts("behind >= 2 and last_version >= 4")] == [2, 4]
        summary = view.summary("last_version < 18")["runs"][0]
        assert (summary["behind"], summary["straddling"]) == ({"mean": 1.4, "most": 4}, 3)
        with open(path, "ab") as file:  # the newest version is known after a new start, too
            file.write(orjson.dumps(made(5, 1, 2)) + b"\n")
    with View([path], tmp_path / "cache") as view:
        view.index()
        assert [row["behind"] for row in view.rollouts("task = 5")] == [5]
        assert list(view.to_pandas("task = 5")["behind"]) == [5]


def test_costs_of_models_whose_prices_are_known(tmp_path: Path) -> None:
    policy = {"calls": 2, "input_tokens": 1000, "cached_tokens": 400, "output_tokens": 500}
    judge = {"calls": 1, "input_tokens": 2000, "output_tokens": 0, "unreported": 1}
    usage = {"model": {"policy": policy}, "verify": {"policy": policy, "judge": judge}}
    path = write(tmp_path / "out.jsonl", [rollout(0, index, model_usage=usage) for index in range(4)])
    header = Header.new(
        **{"input": {}, "expansion": {}, "graph": {}, "rollouts": 4, "problems": 0, "source": ""},
        prices={"policy": {"input": 1.0, "output": 10.0, "cached_input": 0.5}},
    )
    header.write(tmp_path / "out_run.json")

    def cost(where: str = "", **prices: Prices) -> Any:
        with View([path], tmp_path / "cache", prices) as view:
            view.index()
            return view.summary(where)["runs"][0]["cost"]

    one = 2 * (600 * 1.0 + 400 * 0.5 + 500 * 10.0) / 1e6
    found = cost()
    assert found == {
        **{"total": pytest.approx(4 * one), "models": {"policy": found["total"]}},
        **{"per_rollout": pytest.approx(one), "per_solved_task": pytest.approx(4 * one)},
        **{"unpriced": ["judge"], "unreported": 4},
    }
    assert cost("reward = 0")["per_solved_task"] is None
    whole = cost(judge=Prices(input=2.0, output=1.0))
    assert (whole["unpriced"], whole["models"]["judge"]) == ([], pytest.approx(4 * 2000 * 2.0 / 1e6))
    assert cost(policy=Prices(input=0.0, output=0.0))["total"] == 0.0
    (tmp_path / "out_run.json").write_text('{"prices": {"policy": {"input": -1, "output": "x"}}}')
    assert cost() is None
    assert cost(other=Prices(input=1.0, output=1.0)) is None
    with viewer(path, "--price", "policy=1/10/0.5", cache=tmp_path / "cache") as client:
        until_indexed(client, 4)
        assert get(client, "api/summary")["runs"][0]["cost"] == found


def test_a_comparison(client: httpx.Client, runs: dict[str, str]) -> None:
    found = get(client, "api/compare", left=runs["one.jsonl"], right=runs["two.jsonl"])
    assert found["counts"] == {"better": 3, "worse": 0, "same": 0, "only_left": 0, "only_right": 0}
    assert found["difference"] == {"mean": 0.5, "interval": [0.5, 0.5]}
    assert found["tasks"][0]["flipped"] == "better"


SIDES = {
    "one": [(0, 0, 1.0), (1, 0, 0.0), (2, 0, 1.0), (2, 1, None), (3, 0, None)],
    "two": [(0, 0, 1.0), (1, 0, 1.0), (2, 0, 0.0), (4, 0, 1.0)],
}


@pytest.mark.parametrize("failures", ["mask", "zero"])
def test_the_viewer_and_diff_compare_alike(tmp_path: Path, failures: Failures) -> None:
    """Failures, an attempt that was made good, a masked rollout, and a task of another data set."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for name, made in SIDES.items():
        scored = [{**rollout(task, index), "reward": r} for task, index, r in made if r is not None]
        scored.append({**rollout(0, 9), "reward": 0.0, "mask_sample": True})
        lost = [failed(task, index) for task, index, r in made if r is None]
        lines[name] = [*scored, *lost, failed(0, 0)]
        if name == "two":
            scored[1]["responses_create_params"] = {"input": "A question of another data set"}
        write(tmp_path / f"{name}.jsonl", scored)
        write(tmp_path / f"{name}_failures.jsonl", lines[name][len(scored) :])
    scores = [RunScores(failures=failures) for _ in SIDES]
    for of, name in zip(scores, SIDES, strict=True):
        of.add(lines[name])
    summary = Comparison(*scores).summary(0)
    with View([tmp_path / "one.jsonl", tmp_path / "two.jsonl"], tmp_path / "cache") as view:
        view.index()
        found = compare_runs(*view.runs.values(), failures=failures)
    assert found["other_prompt"] == summary.different_prompts == 1
    counts = found["counts"]
    assert counts["better"] + counts["worse"] + counts["same"] == summary.paired_tasks == 2
    assert (counts["only_left"], counts["only_right"]) == (summary.only_a, summary.only_b)
    assert (counts["better"], counts["worse"]) == (summary.fixed, summary.broken)
    estimate = summary.estimates[0]
    assert found["difference"] == {"mean": estimate.difference, "interval": [estimate.low, estimate.high]}
    assert found["interval_method"] == "paired bootstrap"
    assert list(found["coverage"].values()) == [of.coverage()._asdict() for of in scores]
    assert found["coverage"]["left"] == {"scored": 3, "asked": 6}


@pytest.mark.parametrize(("failures", "mean"), [("mask", 2 / 3), ("zero", 0.375)])
def test_coverage_stands_beside_the_score(tmp_path: Path, failures: Failures, mean: float) -> None:
    path = write(
        tmp_path / "out.jsonl",
        [
            *({**rollout(t, i), "reward": r} for t, i, r in SIDES["one"] if r is not None),
            {**rollout(0, 9), "reward": 0.0, "mask_sample": True, "reason": "left out"},
        ],
    )
    write(tmp_path / "out_failures.jsonl", [failed(2, 1), failed(2, 1), failed(3, 0), failed(0, 0)])
    with View([path], tmp_path / "cache") as view:
        view.index()
        (told,) = read_summary(list(view.runs.values()), failures=failures)["runs"]
        masked = next(view.rollouts("failure = 'masked'"))
    assert (told["scored"], told["asked"], told["masked"], told["failed"]) == (3, 6, 1, 4)
    assert told["mean_reward"] == pytest.approx(mean)
    assert told["interval_method"] == "wilson"
    assert (masked["reward"], masked["failure"], masked["fields"]["reason"]) == (None, "masked", "left out")


@pytest.mark.parametrize("own", ["text", None, 1, []])
def test_a_rows_own_failure_is_none(tmp_path: Path, own: Any) -> None:
    """S13: a key of the data set that has the name of one of ours."""
    path = write(tmp_path / "out.jsonl", [{"failure": own, **rollout(0, 1)}])
    with View([path], tmp_path / "cache") as view:
        view.index()
        (row,) = view.rollouts()
        assert (row["reward"], row["failure"]) == (1.0, None)
        assert view.summary()["runs"][0]["asked"] == 1


def test_a_rollout(client: httpx.Client, runs: dict[str, str]) -> None:
    found = get(client, f"api/rollout/{runs['one.jsonl']}/1")
    user, call, result, said = found["items"]
    assert (user["role"], user["kind"], user["text"], user["turn"]) == (
        *("user", "message", "Question 0: rain?"),
        None,
    )
    assert (call["kind"], call["name"], call["arguments"], call["turn"]) == (
        *("call", "get_weather", {"city": "Paris"}),
        0,
    )
    assert (result["role"], result["kind"], result["text"], result["call_id"]) == (
        "tool",
        "result",
        "rain",
        "c1",
    )
    assert (said["text"], said["turn"]) == ("It rains in task 0.", 1)
    assert found["verdict"]["fields"] == {"score": 0.5, "extracted": "answer 1"}
    assert found["row"] == {"agent_ref": {"name": "weather_agent"}, "own": {"line": 0}}
    assert found["judge"] == [
        {"model": "policy", "prompt": "Is it right?", "answer": "Yes.", "seconds": 8e-6}
    ]
    assert [step["kind"] for step in found["timeline"]["steps"]][:2] == ["seed", "model"]
    assert [at["n"] for at in found["neighbours"]["attempts"]] == [0, 1, 2, 3]
    assert found["branches"] == []
    assert found["cut"] == []


def test_a_failed_rollout_says_why(client: httpx.Client, runs: dict[str, str]) -> None:
    found = get(client, f"api/rollout/{runs['one.jsonl']}/{10**9}")
    assert (found["failure"]["class"], found["failure"]["message"]) == ("model_timeout", "too slow")
    assert found["verdict"]["reward"] is None


def test_raw_is_the_line(client: httpx.Client, folder: Path, runs: dict[str, str]) -> None:
    raw = client.get(f"api/rollout/{runs['one.jsonl']}/2/raw")
    assert raw.headers["content-type"] == "text/plain; charset=utf-8"
    assert raw.content == (folder / "one.jsonl").read_bytes().splitlines()[2]


def test_tokens_of_each_call(client: httpx.Client, runs: dict[str, str]) -> None:
    first, second = get(client, f"api/rollout/{runs['one.jsonl']}/1/tokens")["turns"]
    assert (first["prompt_tokens"], first["reused"], first["drift"]) == (3, 0, 0)
    assert [token["id"] for token in first["tokens"]] == [4, 5]
    assert (second["reused"], second["drift"]) == (5, 0)
    assert second["tokens"] == [
        {"id": 7, "logprob": -0.3, "trained": True, "version": "17", "text": None, "entropy": None}
    ]
    assert second["advantage"] == pytest.approx(0.5 / (3**-0.5 + 1e-4), rel=1e-6)


def test_tokens_of_branches(tmp_path: Path) -> None:
    """Each branch begins anew; what it repeats of another as context is shown there alone."""
    made = rollout(0, 0)
    call, result, said = made["response"]["output"]
    helper = {**said, "prompt_token_ids": [9, 9], "generation_token_ids": [8], "weight_version": "18"}
    torn = {**helper, "generation_log_probs": []}
    made["branches"] = [
        {"input": [], "response": {"output": [helper]}},
        {"input": [], "context": 2, "response": {"output": [call, result, {**said, "weight_version": "19"}]}},
    ]
    broken = {**made, "branches": [made["branches"][0], {"input": [], "response": {"output": [torn]}}]}
    with viewer(write(tmp_path / "out.jsonl", [made, broken]), cache=tmp_path / "cache") as client:
        run = until_indexed(client, 2)[0]["id"]
        found = get(client, f"api/rollout/{run}/0/tokens")
        other = get(client, f"api/rollout/{run}/1/tokens")
    told = [(turn["turn"], turn["branch"], turn["reused"], turn["drift"]) for turn in found["turns"]]
    assert told == [(0, 0, 0, 0), (1, 0, 5, 0), (2, 1, 0, 0), (3, 2, 0, 0)]
    assert [turn["tokens"][0]["version"] for turn in found["turns"][1:]] == ["17", "18", "19"]
    assert (found["total"], found["problem"]) == (4, None)
    assert [turn["branch"] for turn in other["turns"]] == [0, 0, 1]
    assert other["problem"].startswith("branches[1].response.output[0]")


def test_a_bad_filter_says_where(client: httpx.Client) -> None:
    answer = client.get("api/rollouts", params={"where": "reward >= 0.5 and rewrad = 1"})
    assert answer.status_code == 400
    assert answer.json()["error"]["position"] == 18
    assert "did you mean reward?" in answer.json()["error"]["message"]


def test_suggestions_have_the_fields_of_the_verifier(client: httpx.Client) -> None:
    assert get(client, "api/suggestions", prefix="fields.")["names"] == ["fields.score", "fields.extracted"]


def test_a_verdict_is_corrected_beside_the_file(
    client: httpx.Client, folder: Path, runs: dict[str, str]
) -> None:
    path = f"api/annotations/{runs['two.jsonl']}/3"
    empty = {"tags": [], "comment": "", "reward": None, "by": "", "at": None}
    assert get(client, path) == empty
    given = {"tags": ["wrong"], "comment": "It did not look.", "reward": 0.0, "by": "Ada"}
    assert client.put(path, json=given).status_code == 403
    put = client.put(path, json=given, headers={"X-Gym-Serve": "1"})
    assert put.status_code == 200, put.text
    assert {key: put.json()[key] for key in given} == given
    (line,) = (folder / "two.annotations.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["id"] == "1-1"
    (row,) = get(client, "api/rollouts", where="tag('wrong')")["rows"]
    assert (row["n"], row["marks"]) == (3, ["wrong"])
    assert get(client, "api/rollouts", where="not tag('wrong')")["total"] == 18
    exported = client.get("api/annotations.jsonl", params={"run": runs["two.jsonl"]})
    assert orjson.loads(exported.content)["comment"] == "It did not look."
    bad = client.put(path, json={"reward": "x"}, headers={"X-Gym-Serve": "1"})
    assert bad.status_code == 422


def test_other_sites_and_other_files_are_out_of_reach(client: httpx.Client, runs: dict[str, str]) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "10.0.0.1"):
        assert client.get("api/runs", headers={"Host": host}).status_code == 403, host
    for host in ("localhost", "127.0.0.1:1", "[::1]:80"):
        assert client.get("api/runs", headers={"Host": host}).status_code == 200, host
    one = runs["one.jsonl"]
    for path in (
        *("api/rollout/secret/0", "api/rollout/..%2f..%2fsecret.jsonl/0", f"api/rollout/{one}/-1"),
        *(f"api/rollout/{one}/99", "static/../server.py", "static/%2e%2e/server.py", "static/..%2fserver.py"),
        *("static//etc/passwd", "nothing", f"api/rollout/{one}/{10**30}", f"api/annotations/{one}/99"),
    ):
        assert client.get(path).status_code == 404, path


def test_every_answer_has_the_headers(client: httpx.Client) -> None:
    for path in ("", "api/runs", "nothing", "api/rollouts?where=(", "api/rollout/x/1/raw"):
        headers = client.get(path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_elsewhere_a_token_is_needed(folder: Path, tmp_path: Path) -> None:
    with viewer(folder / "one.jsonl", "--host", "0.0.0.0", cache=tmp_path) as client:
        port = client.base_url.port
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as stranger:
            assert stranger.get("api/runs").status_code == 401
            assert stranger.get("api/runs", headers={"Authorization": "Bearer x"}).status_code == 401
            told = {"Authorization": client.headers["authorization"]}
            assert stranger.get("api/runs", headers=told).status_code == 200


def test_a_file_is_followed_while_it_is_written(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "grows.jsonl", [rollout(0, 0)])
    with viewer(path, cache=tmp_path / "cache") as client:
        until_indexed(client, 1)
        line = orjson.dumps(rollout(0, 1))
        with open(path, "ab", buffering=0) as file:
            file.write(line[:100])
            run = until_indexed(client, 1)[0]
            file.write(line[100:] + b"\n")
            run = until_indexed(client, 2)[0]
        assert run["problems"] == []
        write(tmp_path / "grows_failures.jsonl", [failed(0, 2)])
        until_indexed(client, 3)
        assert get(client, "api/rollouts", where="failure is not null")["total"] == 1


def test_ctrl_c_ends_it_and_what_it_started(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0)])
    with start(path, cache=tmp_path / "cache", stderr=subprocess.PIPE) as process:
        assert url_of(process).startswith("http://127.0.0.1:")
        (indexing,) = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, told = process.communicate(timeout=30)
        assert process.returncode == 0
        assert told == b""
        assert not indexing.is_running()


def test_an_index_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [rollout(0, 0)])
    (tmp_path / "file").touch()
    with start(path, cache=tmp_path / "file") as process:
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert b"name another folder by XDG_CACHE_HOME" in told


def test_a_viewer_lives_on_when_a_file_goes(tmp_path: Path) -> None:
    kept = write(tmp_path / "kept.jsonl", [rollout(0, 0)])
    gone = write(tmp_path / "gone.jsonl", [rollout(0, 0)])
    with viewer(kept, gone, cache=tmp_path / "cache") as client:
        until_indexed(client, 2)
        gone.unlink()
        names = {run["name"]: run["id"] for run in get(client, "api/runs")["runs"]}
        assert client.get(f"api/rollout/{names['gone.jsonl']}/0").status_code == 404
        assert client.get(f"api/rollout/{names['kept.jsonl']}/0").status_code == 200
