"""Episodes of three environments, texts of others, seeds, invalid actions, and the routes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.docs import ROOT
from support.environments import Bench, examples, said

pytest.importorskip("gymnasium", reason="needs the extra gymnasium")

import gymnasium

from gym_serve.environments.gymnasium import Gymnasium, GymnasiumServer, Step
from gym_serve.environments.gymnasium.games import _action_in, language_of
from gym_serve.graph import load_graph
from gym_serve.servers import VerifyRequest
from gym_serve.types.errors import Conflict, GraphError, InvalidRequest, SessionNotFound, ToolFailed

LAKE = {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}}
ROW = {"responses_create_params": {"input": "Play."}}


class Echo(gymnasium.Env[str, str]):
    """An environment of texts: ends at "bye", breaks at "crash"."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(5)

    def __init__(self) -> None:
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "Hello.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            raise RuntimeError("broken")
        return f"You said {action}.", 0.5, action == "bye", False, {}

    def close(self) -> None:
        self.closed = True


gymnasium.register(id="Echo-v0", entry_point=Echo)


class Table(Bench):
    """A session in which actions are played."""

    async def begin(self, row: dict[str, Any] = ROW) -> str:
        return str((await self.call("reset", row))["observation"])

    async def play(self, action: str) -> dict[str, Any]:
        output = said(f"Hm. <action>{action}</action>")
        step: dict[str, Any] = await self.call("step", {**ROW, "response": {"output": output}})
        return step


async def test_over_the_lake() -> None:
    table = Table(Gymnasium(**LAKE))
    assert "P F F F\nF H F H\nF F F H\nH F F G" in await table.begin()
    for action in ("down", "down", "right", "RIGHT", "down"):
        step = await table.play(action)
        assert (step["reward"], step["terminated"], step["truncated"]) == (0.0, False, False)
    assert "row 4 of 4, column 3 of 4" in step["observation"]
    assert (await table.play("right"))["terminated"]
    verdict = await table.verify(ROW, [])
    assert (verdict["reward"], verdict["terminated"], verdict["truncated"]) == (1.0, True, False)
    with pytest.raises(Conflict, match="the episode is over"):
        await table.play("left")


async def test_along_the_cliff() -> None:
    table = Table(Gymnasium(env_id="CliffWalking-v1"))
    assert "P C C C C C C C C C C G" in await table.begin()
    assert (await table.play("right"))["reward"] == -100.0
    for action in ("up", *["right"] * 11, "down"):
        step = await table.play(action)
    assert step["terminated"]
    assert (await table.verify(ROW, []))["reward"] == -113.0


async def test_a_hand_of_blackjack() -> None:
    table = Table(Gymnasium(env_id="Blackjack-v1"))
    assert "Your cards add up to" in await table.begin()
    step = await table.play("stand")
    assert step["terminated"]
    assert step["reward"] in (-1.0, 0.0, 1.0)


@pytest.mark.parametrize("row", examples(Gymnasium), ids=lambda row: row["verifier_metadata"]["seed"])
async def test_a_row_begins_the_same_game_every_time(row: dict[str, Any]) -> None:
    games = []
    for _ in range(2):
        table = Table(Gymnasium(env_id="Blackjack-v1"))
        games.append((await table.begin(row), await table.play("hit")))
    assert games[0] == games[1]


async def test_other_prompts_begin_other_games() -> None:
    rows = [{"responses_create_params": {"input": f"Game {number}"}} for number in range(20)]
    assert len({await Table(Gymnasium(env_id="Blackjack-v1")).begin(row) for row in rows}) > 5


async def test_what_is_no_action_is_asked_again_and_in_the_end_cut_short() -> None:
    table = Table(Gymnasium(**LAKE, invalid_action_reward=-0.1))
    await table.begin()
    for action in ("fly", "", "fly"):
        step = await table.play(action)
        assert (step["reward"], step["info"]) == (-0.1, {"invalid_action": True})
        assert "That was no action." in step["observation"]
        assert "P F F F" in step["observation"]
    assert step["truncated"]


@pytest.mark.parametrize(("name", "best"), [("cliff_walking", -13.0), ("blackjack", -1.0)])
async def test_not_to_play_brings_less_than_a_good_or_a_lost_game(name: str, best: float) -> None:
    graph = load_graph(ROOT / "graphs" / f"{name}.yaml").spec
    settings = {key: value for key, value in graph.resources[name].items() if key != "type"}
    table = Table(Gymnasium(**settings))
    await table.begin()
    steps = [await table.play("fly") for _ in range(3)]
    assert steps[-1]["truncated"]
    assert sum(step["reward"] for step in steps) < best


async def test_a_valid_action_forgives_invalid_ones() -> None:
    table = Table(Gymnasium(**LAKE))
    await table.begin()
    for action in ("x", "x", "down", "x", "x", "up"):
        assert not (await table.play(action))["truncated"]


async def test_a_limit_of_steps() -> None:
    table = Table(Gymnasium(**LAKE, max_episode_steps=2))
    await table.begin()
    assert not (await table.play("left"))["truncated"]
    assert (await table.play("left"))["truncated"]


async def test_texts_of_an_environments_own() -> None:
    table = Table(Gymnasium(env_id="Echo-v0"))
    assert (await table.begin()).startswith("Hello.")
    assert (await table.play("hi"))["observation"].startswith("You said hi.")
    assert (await table.play("too long"))["info"] == {"invalid_action": True}
    with pytest.raises(ToolFailed, match="broken"):
        await table.play("crash")
    assert (await table.play("bye"))["terminated"]
    assert (await table.verify(ROW, []))["reward"] == 1.0


async def test_a_closed_episode_closes_its_environment() -> None:
    table = Table(Gymnasium(env_id="Echo-v0"))
    await table.begin()
    server = table.host.server
    assert isinstance(server, Gymnasium)
    assert table.session is not None
    environment = server.sessions.get(table.session).state.environment.unwrapped
    assert not environment.closed
    await table.call("close")
    await table.call("close")
    assert environment.closed
    assert len(server.sessions) == 0


async def test_numbers_for_what_has_no_words() -> None:
    environment = Echo()
    environment.action_space = gymnasium.spaces.Discrete(3, start=5)
    language = language_of(environment)
    assert language.actions == ["5", "6", "7"]
    assert language.describe(environment, (1, 2)) == "Observation: (1, 2)"
    environment.action_space = gymnasium.spaces.Box(0, 1)
    with pytest.raises(ValueError, match="have no text"):
        language_of(environment)


@pytest.mark.parametrize("env_id", ["NoSuchGame-v1", "no_such_module:Game-v1"])
async def test_an_environment_that_cannot_be_made(env_id: str) -> None:
    with pytest.raises(GraphError, match="env_id"):
        await Gymnasium(env_id=env_id).start()


@pytest.mark.parametrize("metadata", [{"seed": -1}, {"seed": "x"}, {"seed": 1 << 32}, {"options": 3}])
async def test_rows_that_begin_nothing(metadata: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await Table(Gymnasium(**LAKE)).begin({**ROW, "verifier_metadata": metadata})


async def test_a_step_needs_an_episode() -> None:
    with pytest.raises(SessionNotFound):
        await Table(Gymnasium(**LAKE)).play("down")


async def test_a_server_of_ones_own() -> None:
    class Guess(GymnasiumServer):
        async def reset(self, row: dict[str, Any], session: Any) -> tuple[None, dict[str, Any]]:
            return None, {"range": 10}

        async def step(self, request: VerifyRequest, session: Any) -> Step:
            right = "7" in request.response.output_text
            return Step(observation="No.", reward=float(right), terminated=right)

    table = Table(Guess())
    assert (await table.call("reset", ROW))["info"]["range"] == 10
    assert (await table.play("3"))["observation"] == "No."
    assert (await table.play("7"))["terminated"]


@given(st.text("<action>/ up"))
def test_any_text_has_an_action_or_none(text: str) -> None:
    action = _action_in(text)
    assert action is None or action in text
