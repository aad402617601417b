"""`Gym`: deploying, joining, attaching, changing endpoints live, and leaving Ray as it was found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from support.upstream import ChatEndpoint

from gym_serve import AsyncGym, BadRequest, ClusterMismatch, Conflict, GraphError, Gym, NotFound, Unavailable

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "environments" / "mcqa" / "data" / "example.jsonl"
GRAPH: dict[str, Any] = {
    "models": {"policy": {"type": "scripted_model", "environments": ["mcqa"]}},
    "resources": {"mcqa": {"type": "mcqa"}},
    "agents": {
        "mcqa_agent": {"type": "simple_agent", "model": "policy", "resources": "mcqa", "inline": ["mcqa"]}
    },
}
QUESTION = {
    "responses_create_params": {"input": [{"role": "user", "content": "Pick one: A) no B) yes"}]},
    "options": [{"A": "no"}, {"B": "yes"}],
    "expected_answer": "B",
    "grading_mode": "strict_single_letter_boxed",
    "own": {"key": [1, 2.5, None, "é"]},
    "_rowidx": 17,
}


@pytest.fixture(scope="module")
def gym(deploy: Any) -> Gym:
    return deploy(GRAPH, name="first")


async def test_rollouts_come_back_with_the_whole_row_and_the_metadata(gym: Gym) -> None:
    found = [r async for r in gym.rollouts([QUESTION, QUESTION | {"_rowidx": 18}], repeats=3)]
    assert len(found) == 6
    for rollout in found:
        assert {k: rollout[k] for k in QUESTION if k != "_rowidx"} == {
            k: QUESTION[k] for k in QUESTION if k != "_rowidx"
        }
        assert rollout["_ng_rollout_id"] == f"{rollout['_ng_task_index']}-{rollout['_ng_rollout_index']}"
        assert rollout["response"]["output"][-1]["generation_log_probs"]
        assert rollout["response"]["usage"]["output_tokens"] > 0
    assert Counter(r["_rowidx"] for r in found) == {17: 3, 18: 3}
    assert len({r["_ng_rollout_id"] for r in found}) == 6


@ray.remote
def rewards_in_a_task(gym: Gym) -> list[float]:
    return [rollout["reward"] for rollout in gym.run([QUESTION], repeats=2)]


@ray.remote
class Trainer:
    """An actor with an async method, as trainers have them: its event loop runs."""

    def __init__(self, gym: Gym) -> None:
        self.gym = gym

    async def rewards(self) -> tuple[list[float], str]:
        blocking = [rollout["reward"] for rollout in self.gym.run([QUESTION])]
        awaited = [rollout["reward"] for rollout in await AsyncGym.of(self.gym).run([QUESTION])]
        return blocking + awaited, repr(self.gym)


def test_it_goes_into_tasks_and_actors_which_attach_to_the_same_graph(gym: Gym) -> None:
    expected = [rollout["reward"] for rollout in gym.run([QUESTION], repeats=2)]
    assert ray.get(rewards_in_a_task.remote(gym)) == expected
    rewards, shown = ray.get(Trainer.remote(gym).rewards.remote())
    assert rewards == expected[:1] * 2
    assert shown == repr(gym) == "<Gym 'first': a graph on a Ray cluster, servers policy, mcqa, mcqa_agent>"
    assert gym.run([QUESTION])[0]["reward"] == expected[0]  # nothing that they do takes it down


async def test_the_shipped_data_gets_rewards_that_are_neither_all_0_nor_all_1(gym: Gym) -> None:
    rewards = Counter([r["reward"] async for r in gym.rollouts(ROWS, repeats=4)])
    assert set(rewards) == {0.0, 1.0}


def test_run_keeps_the_order_and_is_deterministic(gym: Gym) -> None:
    rows = [QUESTION | {"_rowidx": n} for n in range(20)]
    first, second = gym.run(rows), gym.run(rows)
    assert [r["_rowidx"] for r in first] == list(range(20))
    for rollout in first + second:
        del rollout["_ng_latency_s"], rollout["_ng_timeline"], rollout["response"]["created_at"]
    assert first == second


async def test_run_examples_gives_awaitables_in_the_order_of_completion(gym: Gym) -> None:
    rows = [QUESTION | {"_rowidx": n} for n in range(10)]
    pairs = [await pair for pair in gym.run_examples(rows)]
    assert sorted(row["_rowidx"] for row, _ in pairs) == list(range(10))
    assert all(result["_rowidx"] == row["_rowidx"] and "reward" in result for row, result in pairs)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"agent_ref": {"type": "responses_api_agents", "name": "nobody"}}, "not_found"),
        ({"responses_create_params": {"input": "?", "temprature": 1}}, "invalid_request"),
        ({"options": 7}, "invalid_request"),
        ({"responses_create_params": None}, "invalid_request"),
    ],
)
async def test_a_bad_row_is_a_failed_rollout_and_ends_no_run(
    gym: Gym, row: dict[str, Any], kind: str
) -> None:
    rollouts = [r async for r in gym.rollouts([QUESTION, QUESTION | row, QUESTION])]
    assert Counter(r.get("_ng_failure_class") for r in rollouts) == {None: 2, kind: 1}
    (failed,) = (r for r in rollouts if "failure" in r)
    assert failed["_ng_failure_terminal"] is True
    assert failed["mask_sample"] is True


def test_health_handle_and_url(gym: Gym, cluster: str) -> None:
    assert gym.url == f"{cluster}/first"
    assert {s["state"] for s in gym.health().values()} == {"ready"}
    assert gym.handle("policy").deployment_name == "policy"
    with pytest.raises(NotFound, match="polcy"):
        gym.handle("polcy")


def test_the_same_graph_is_joined_and_left_running(gym: Gym) -> None:
    with Gym.from_graph(GRAPH, name="first") as joined:
        assert "reward" in joined.run([QUESTION])[0]
    with Gym.attach("first") as attached:
        assert "reward" in attached.run([QUESTION])[0]
    with Gym.connect(gym.url) as connected:
        assert "failure" not in connected.run([QUESTION])[0]
        with pytest.raises(BadRequest, match="HTTP"):
            connected.handle("policy")
    assert "first" in serve.status().applications
    with pytest.raises(BadRequest, match="first cannot be changed here: it belongs to process"):
        Gym.attach("first").policy.set_endpoints("policy", ["http://x/v1"])


def test_another_graph_under_a_name_that_is_taken_is_refused(gym: Gym) -> None:
    with pytest.raises(Conflict, match="first"):
        Gym.from_graph(GRAPH, name="first", overrides=["models.policy.skill=0.1"])
    assert "reward" in gym.run([QUESTION])[0]
    with pytest.raises(NotFound, match="third"):
        Gym.attach("third")


def test_another_beside_it_changes_its_endpoints_live_and_alone_goes(gym: Gym) -> None:
    with ChatEndpoint("\\boxed{A}") as wrong, ChatEndpoint("\\boxed{B}") as right:
        policy = {"type": "chat_model", "base_url": wrong.url, "model": "none", "num_replicas": 2}
        graph = {**GRAPH, "models": {"policy": policy}}
        with Gym.from_graph(graph, name="second", overrides={"models.policy.model": "old"}) as second:
            assert set(serve.status().applications) >= {"first", "second"}
            assert [r["reward"] for r in second.run([QUESTION] * 8)] == [0.0] * 8
            second.policy.set_endpoints("policy", [right.url], model_name="new")
            assert [r["reward"] for r in second.run([QUESTION] * 8)] == [1.0] * 8
            assert len(wrong.requests) == len(right.requests) == 8
            models = [{r["model"] for r in endpoint.requests} for endpoint in (wrong, right)]
            assert models == [{"old"}, {"new"}]
            with pytest.raises(BadRequest, match="base_url"):
                second.policy.set_endpoints("mcqa_agent", ["http://x/v1"])
    assert "second" not in serve.status().applications
    assert gym.run([QUESTION])[0]["_ng_rollout_id"] == "0-0"
    assert ray.is_initialized()


def test_addresses_that_cannot_work_say_what_to_do(gym: Gym, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match=r"Gym\.connect"):
        Gym.from_graph(GRAPH, address="ray://somewhere:10001", name="x")
    with pytest.raises(BadRequest, match="already connected"):
        Gym.from_graph(GRAPH, address="10.255.255.1:6379", name="x")

    def mismatch(**_: object) -> None:
        # Ray 2.60's text, see ray._private.utils.check_version_info.
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.55.0\n    Python: 3.12.1\n"
            "This process on node 10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
        )

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", mismatch)
    with pytest.raises(
        ClusterMismatch, match=r"Ray 2\.55\.0, Python 3\.12\.1; this process runs Ray 2\.60\.0"
    ) as raised:
        Gym.from_graph(GRAPH, address="auto", name="x")
    assert "pip install 'ray[serve]==2.55.0'" in raised.value.message

    def nothing(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", nothing)
    with pytest.raises(Unavailable, match="ray start --head"):
        Gym.from_graph(GRAPH, address="auto", name="x")


def test_a_graph_with_problems_starts_nothing(gym: Gym) -> None:
    with pytest.raises(GraphError) as raised:
        Gym.from_graph(
            {"agents": {"a": {"type": "simple_agent", "model": "x", "resources": "y"}}}, name="bad"
        )
    assert len(raised.value.problems) == 2
    assert "bad" not in serve.status().applications
