"""`Gymnasium`: an environment of the Gymnasium library, played by text.

The same row always begins the same episode. An invalid action costs a turn; too many of them in a row end the
episode. An environment of `gymnasium.spaces.Text` uses its own texts, the toy-text ones have a `Describe`
here; for all others the numbers themselves are shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
from gymnasium import spaces
from pydantic import BaseModel, Field, PositiveInt, TypeAdapter

from gym_serve.environments.gymnasium import EpisodeState, GymnasiumServer, Step
from gym_serve.servers import VerifyRequest
from gym_serve.types.errors import GraphError, InvalidRequest
from gym_serve.types.requests import JSON, parse

Describe = Callable[[Any, Any], str]
"""Takes an environment (unwrapped) and an observation: the observation in words."""


class Language(NamedTuple):
    """How an environment is spoken to; ``actions`` are named in the order of their numbers, None for any
    text.
    """

    rules: str
    describe: Describe
    actions: Sequence[str] | None


def language_of(environment: Any) -> Language:
    """The language of an environment. Raises ValueError: its actions are neither text nor a numbered list."""
    unwrapped, space = environment.unwrapped, environment.action_space
    if type(unwrapped).__name__ in _LANGUAGES:
        return _LANGUAGES[type(unwrapped).__name__]
    if isinstance(space, spaces.Text):
        return Language("", lambda _, observation: str(observation), None)
    if isinstance(space, spaces.Discrete):
        numbers = range(int(space.start), int(space.start) + int(space.n))
        return Language("", _numbers, list(map(str, numbers)))
    raise ValueError(f"actions of {space} have no text: wrap the environment, to make its action space Text")


def _numbers(environment: Any, observation: Any) -> str:
    return f"Observation: {getattr(observation, 'tolist', lambda: observation)()}"


def _frozen_lake(environment: Any, observation: Any) -> str:
    return _map([[cell.decode() for cell in line] for line in environment.desc], observation)


def _cliff_walking(environment: Any, observation: Any) -> str:
    letters = [["C" if cell else "." for cell in line] for line in environment._cliff]
    letters[-1][-1] = "G"
    return _map(letters, observation)


def _map(letters: list[list[str]], observation: Any) -> str:
    rows, columns = len(letters), len(letters[0])
    row, column = divmod(int(observation), columns)
    letters[row][column] = "P"
    ground = "\n".join(map(" ".join, letters))
    return f"{ground}\nYou are in row {row + 1} of {rows}, column {column + 1} of {columns}."


def _blackjack(environment: Any, observation: Any) -> str:
    total, dealer, ace = (int(value) for value in observation)
    usable = ", with an ace that counts 11" if ace else ""
    return f"Your cards add up to {total}{usable}. The dealer shows {'an ace' if dealer == 1 else dealer}."


_LANGUAGES = {
    "FrozenLakeEnv": Language(
        "You (P) cross a frozen lake from S to G over frozen ground (F). A hole (H) ends the game. If the "
        "ice is slippery, you may slide to the side of where you want to go.",
        _frozen_lake,
        ("left", "down", "right", "up"),
    ),
    "CliffWalkingEnv": Language(
        "You (P) walk to the goal (G). Each step costs 1; a step into the cliff (C) costs 100 and takes you "
        "back to the start.",
        _cliff_walking,
        ("up", "right", "down", "left"),
    ),
    "BlackjackEnv": Language(
        "You play blackjack against a dealer who draws up to 17. Over 21 you lose. A face card counts 10, "
        "an ace 11 or 1.",
        _blackjack,
        ("stand", "hit"),
    ),
}  # by the class of the environment, whatever it is registered as


_OPEN, _CLOSE = "<action>", "</action>"
_MAX_ACTION = 10_000


class _Start(BaseModel):
    seed: int | None = Field(default=None, ge=0, lt=1 << 32)
    """Seed of the episode; without one it follows from the prompt."""
    options: JSON | None = None  # options of the environment's ``reset``


class _Row(BaseModel):
    verifier_metadata: _Start | None = None


_ROW: TypeAdapter[_Row] = TypeAdapter(_Row)


class Game(EpisodeState):
    """An episode of a Gymnasium environment; ``invalid`` counts invalid actions in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.environment: Any = None
        self.language: Language | None = None
        self.observation = ""
        self.invalid = 0


class Gymnasium(GymnasiumServer):
    """A Gymnasium environment: the reward is the sum of the steps' rewards."""

    class Config(GymnasiumServer.Config):
        env_id: str
        """Id of a registered environment; ``package.module:Id`` imports the module first."""
        env_kwargs: dict[str, Any] = Field(default_factory=dict)
        """Arguments of `gymnasium.make`."""
        max_episode_steps: PositiveInt | None = None
        """Steps after which an episode is cut short; None for the environment's own limit."""
        max_invalid_actions: PositiveInt = 3
        """Invalid actions in a row that cut an episode short."""
        invalid_action_reward: float = 0.0
        """Reward of an invalid action: below the worst of a game whose rewards are negative, or it is best
        not to play."""

    config: Config

    Session = Game

    async def start(self) -> None:
        try:  # whether it can be made
            environment = await asyncio.to_thread(self._make)
            language_of(environment)
            environment.close()
        except Exception as error:
            raise GraphError(f"env_id: {self.config.env_id}: {type(error).__name__}: {error}") from error
        await super().start()

    def reset(self, row: JSON, session: Game) -> tuple[str, JSON]:
        """Make the environment, and begin. Raises InvalidRequest: ``verifier_metadata.seed`` or ``.options``
        do not fit.
        """
        start = parse(_ROW, row, "row").verifier_metadata or _Start()
        seed = _seed_of(row) if start.seed is None else start.seed
        session.environment = self._make()
        session.language = language_of(session.environment)
        try:
            observation, _ = session.environment.reset(seed=seed, options=start.options)
        except (TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"verifier_metadata.options: {type(error).__name__}: {error}") from None
        # A Discrete action space draws too, where the environment does.
        session.environment.action_space.seed(seed)
        session.observation = self._described(session, observation)
        texts = (session.language.rules, session.observation, _how_to(session.language))
        return "\n\n".join(filter(None, texts)), {"seed": seed}

    def step(self, request: VerifyRequest, session: Game) -> Step:
        language = session.language
        assert language is not None  # set by `reset`, which opened the session
        action = _action_in(request.response.output_text)
        played = _played(action, language, session.environment.action_space)
        if played is None:
            session.invalid += 1
            return Step(
                observation=f"That was no action. {_how_to(language)}\n\n{session.observation}",
                reward=self.config.invalid_action_reward,
                truncated=session.invalid >= self.config.max_invalid_actions,
                info={"invalid_action": True},
            )
        session.invalid = 0
        observation, reward, terminated, truncated, _ = session.environment.step(played)
        session.observation = self._described(session, observation)
        over = bool(terminated or truncated)
        return Step(
            observation=None if over else f"{session.observation}\n\n{_how_to(language)}",
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info={"action": action, "state": session.observation},
        )

    async def close(self, session: Game) -> None:
        if session.environment is not None:
            await asyncio.to_thread(session.environment.close)

    def _make(self) -> Any:
        config = self.config
        options: JSON = {"max_episode_steps": config.max_episode_steps, "disable_env_checker": True}
        return gymnasium.make(config.env_id, **options, **config.env_kwargs)

    @staticmethod
    def _described(session: Game, observation: Any) -> str:
        assert session.language is not None
        return session.language.describe(session.environment.unwrapped, observation)


def _seed_of(row: JSON) -> int:
    prompt = json.dumps((row.get("responses_create_params") or {}).get("input"), sort_keys=True)
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big")


def _how_to(language: Language) -> str:
    actions = "your action" if language.actions is None else " or ".join(language.actions)
    return f"Answer with {_OPEN}...{_CLOSE}, with {actions} inside."


def _action_in(text: str) -> str | None:
    """What stands in the last action tag; None if there is none, or it is too long."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    action = text[start + len(_OPEN) : end].strip() if start >= 0 else None
    return None if action is None or len(action) > _MAX_ACTION else action


def _played(action: str | None, language: Language, space: Any) -> Any:
    """The action as the environment takes it; None if it is invalid."""
    if action is None or language.actions is None:
        return action if action is not None and space.contains(action) else None
    names = [name.casefold() for name in language.actions]
    return int(space.start) + names.index(action.casefold()) if action.casefold() in names else None
