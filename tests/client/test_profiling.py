"""What a running server does: its flame graph, and the stats of its graph."""

from __future__ import annotations

import asyncio
import threading
from xml.etree import ElementTree

import httpx
import pytest

from gym_serve import Gym
from gym_serve.graph.flame_graph import flame_graph
from gym_serve.graph.profiling import PROFILE, dispatch_profile, joined, profile_server
from gym_serve.servers.transport import Call, encode
from gym_serve.types.errors import BadRequest, Unavailable


def test_the_profiles_of_replicas_are_joined() -> None:
    def file(*frames: str) -> dict[str, object]:
        stacks = [[*range(len(frames))], [0]]
        thread = {"type": "sampled", "name": "Main", "samples": stacks, "weights": [0.01, 0.01]}
        return {"shared": {"frames": [{"name": frame} for frame in frames]}, "profiles": [thread]}

    found = joined({"r1": file("run", "act"), "r2": file("run", "verify", "parse")}, "math")
    assert [frame["name"] for frame in found["shared"]["frames"]] == ["run", "act", "run", "verify", "parse"]
    assert [(p["name"], p["samples"]) for p in found["profiles"]] == [
        ("r1 Main", [[0, 1], [0]]),
        ("r2 Main", [[2, 3, 4], [2]]),
    ]


def test_a_flame_graph_has_each_function_on_its_caller_as_wide_as_its_time() -> None:
    names = ["run", "act", "<script>", "verify"]
    stacks = {(0, 1, 2): 0.5, (0, 1): 0.25, (0, 3): 0.25, (0, *[1] * 3000): 0.0001}
    profile = {
        "name": "math",
        "shared": {"frames": [{"name": name, "file": "gym_serve/a.py", "line": 7} for name in names]},
        "profiles": [{"samples": [*map(list, stacks)], "weights": [*stacks.values()]}],
    }
    picture = ElementTree.fromstring(flame_graph(profile))
    boxes = {}
    for group in picture.findall("{*}g"):
        title, rectangle, _ = group
        assert title.text is not None
        boxes[title.text.split()[0]] = [float(rectangle.attrib[key]) for key in ("x", "y", "width")]
    assert boxes.keys() == {"all", *names}
    widths = [boxes[name][2] for name in ("all", "act", "<script>", "verify")]
    assert widths == pytest.approx([1180, 885, 590, 295], abs=1)
    for upper, lower in [("run", "all"), ("act", "run"), ("verify", "run"), ("<script>", "act")]:
        assert boxes[upper][1] < boxes[lower][1]
        assert boxes[upper][0] >= boxes[lower][0]


@pytest.mark.parametrize("seconds", [0, 1000])
async def test_a_profile_has_a_limit(seconds: float) -> None:
    with pytest.raises(BadRequest, match="`seconds` must be above 0 and at most 300"):
        await profile_server("any", "agent", seconds)


async def test_a_process_samples_itself() -> None:
    ended = threading.Event()

    def busy_function() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy_function, name="busy")
    thread.start()
    try:
        reply = await dispatch_profile(Call(PROFILE, encode({"seconds": 1})), "r1")
    finally:
        ended.set()
        thread.join()
    if reply.status != 200:
        pytest.skip(f"this machine allows no profile: {reply.body!r}")
    found = joined({reply.json()["replica"]: reply.json()["profile"]}, "any")
    assert any(frame["name"].endswith("busy_function") for frame in found["shared"]["frames"])
    assert all(profile["name"].startswith("r1 ") for profile in found["profiles"])


def test_the_profile_of_a_server_shows_its_code(cluster: str) -> None:
    with Gym.from_graph("graphs/weather.yaml", name="profiled") as gym:
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                gym.run("environments/simple_weather/data/example.jsonl", repeats=10)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            profile = asyncio.run(profile_server("profiled", "weather_agent", 2))
        except Unavailable as error:
            if "py-spy failed" not in error.message:
                raise
            pytest.skip(f"this machine allows no profile: {error.message}")
        finally:
            ended.set()
            thread.join()
    files = {frame["file"] for frame in profile["shared"]["frames"]}
    assert any(file.endswith("gym_serve/servers/agent.py") for file in files), files


def test_the_stats_of_a_graph_count_its_rollouts_and_cpu_time(cluster: str) -> None:
    with Gym.from_graph("graphs/weather.yaml", name="counted_by_stats") as gym:
        rollouts = gym.run("environments/simple_weather/data/example.jsonl", repeats=4)
        stats = gym.stats()
        shown = httpx.get(f"{gym.url}/stats").json()
    [scored] = stats["metrics"]["gym_serve_rollouts_total"]
    assert (scored["labels"], scored["value"]) == (
        {"agent": "weather_agent", "outcome": "scored"},
        len(rollouts),
    )
    assert {"run", "other"} <= stats["servers"]["weather_agent"]["cpu_seconds"].keys()
    assert shown.keys() == stats.keys()
    assert shown["metrics"]["gym_serve_rollouts_total"] == [scored]
