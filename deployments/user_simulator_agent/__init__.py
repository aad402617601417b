"""`user_simulator_agent`: the policy and a model that plays the user, in turns, until the user is done.

The policy's side is the loop of `simple_agent`, once per turn; the user's answers are ``user`` messages in
``response.output``, so all of it is one trajectory. A first message that the user model makes up joins the
input instead. The rollout's ``user_transcript`` is the conversation as the user saw it, and its
``conversation_end`` why it ended: ``user`` (a stop phrase), ``tool`` (a stop tool), ``max_turns``,
``incomplete`` (the policy was cut off) or ``no_answer``. A failure of the user's model fails the rollout;
where that model does not take what the policy wrote, as a text beyond its context, or says nothing to it, it
hears less of it.

To the model that plays the user, the roles are reversed, and it sees the agent's messages alone.

A policy that talks with a simulated user.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import Field

from gym_serve.deployments.simple_agent import SimpleAgent
from gym_serve.judging import BrokenReply, ask_within
from gym_serve.servers import Episode, ModelClient
from gym_serve.types.errors import BadRequest, Unavailable
from gym_serve.types.protocols import TOKEN_KEYS, is_overflow_answer
from gym_serve.types.requests import JSON, message_text

__all__ = ["UserSimulatorAgent"]


_PERSONA = """\
You play a user who talks to an assistant. You are not the assistant: never answer for it, and never say \
that you are a model. Write one short message at a time, as a person would. Say only what your situation \
below gives you, and do not say all of it at once. When you have got what you came for, or when it is clear \
that the assistant cannot help, write ###STOP### and nothing else."""


class UserSimulatorAgent(SimpleAgent):
    """A conversation with a simulated user; the policy calls tools as in `simple_agent`."""

    class Config(SimpleAgent.Config):
        """Settings of the conversation. ``max_steps`` and ``max_empty_turns`` hold for each answer."""

        user: ModelClient
        """The model that plays the user."""
        persona: str = _PERSONA
        """The user's system prompt. The row's ``user_scenario``, a text or an object, is added."""
        user_params: dict[str, Any] = Field(default_factory=dict)
        """Further keys of the user's Responses bodies: ``temperature``, ``max_output_tokens``, ..."""
        max_turns: int = Field(20, ge=1)
        """Answers of the policy per episode at most."""
        stop_phrases: tuple[str, ...] = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
        """Texts with which the user ends the conversation."""
        stop_tools: tuple[str, ...] = ()
        """Tools that end the conversation when the policy has called them."""

    config: Config

    async def act(self, episode: Episode) -> None:
        user = SimulatedUser(self.config.user, self._persona(episode.row), self.config.user_params)
        episode.fields["user_transcript"] = user.transcript
        await self._open(episode, user)
        episode.fields["conversation_end"] = await self._converse(episode, user)

    async def _open(self, episode: Episode, user: SimulatedUser) -> None:
        params: JSON = episode.row["responses_create_params"]
        content = params["input"]
        items: list[JSON] = [_message(content)] if isinstance(content, str) else list(content)
        for item in items:
            user.remembers(item)
        if items and items[-1].get("role") not in ("system", "developer", "assistant"):
            return
        opening = episode.row.get("initial_user_message")
        if isinstance(opening, str) and not any(item.get("role") == "user" for item in items):
            added = _message(opening)
            user.remembers(added)
        else:
            added = _message(await self._say(episode, user))
        episode.append_prompt([added])
        episode.fields["responses_create_params"] = {**params, "input": [*items, added]}

    async def _converse(self, episode: Episode, user: SimulatedUser) -> str:
        for turn in range(1, self.config.max_turns + 1):
            start = len(episode.items)
            await super().act(episode)
            answer = episode.items[start:]
            if text := spoken(answer).strip():
                user.hears(text)
            if episode.incomplete:
                return "incomplete"
            if any(call.get("name") in self.config.stop_tools for call in self.pending(answer)):
                return "tool"
            if not text or answer[-1].get("type") == "function_call_output":
                return "no_answer"
            if turn == self.config.max_turns:
                break
            words = await self._say(episode, user)
            if any(phrase in words for phrase in self.config.stop_phrases):
                return "user"
            episode.append_items([_message(words)])
        return "max_turns"

    async def _say(self, episode: Episode, user: SimulatedUser) -> str:
        return await episode.stage("model", user.speak)

    def _persona(self, row: JSON) -> str:
        scenario = row.get("user_scenario")
        if not scenario:
            return self.config.persona
        text = scenario if isinstance(scenario, str) else orjson.dumps(scenario).decode()
        return f"{self.config.persona}\n\n{text}"


def _message(text: str) -> JSON:
    return {"type": "message", "role": "user", "content": text}


_GREETING = "Hi! How can I help you today?"


class SimulatedUser:
    """A user with a persona, its system prompt; ``params`` are further keys of its bodies, and ``transcript``
    is the conversation as the user sees it.
    """

    def __init__(self, model: ModelClient, persona: str, params: JSON) -> None:
        self._model = model
        self._params = params
        self.transcript: list[JSON] = [{"role": "system", "content": persona}]

    def hears(self, text: str) -> None:
        self.transcript.append({"role": "user", "content": text})

    def remembers(self, item: JSON) -> None:
        """An item of the conversation before the model played the user; only messages matter."""
        if item.get("role") == "user":
            self._greeted()
            self.transcript.append({"role": "assistant", "content": message_text(item)})
        elif item.get("role") == "assistant":
            self.hears(message_text(item))

    async def speak(self) -> str:
        """The user's next message. Raises Unavailable: the model said nothing; GymError: it could not be
        reached.
        """
        self._greeted()
        heard = (len(one["content"]) for one in self.transcript if one.get("role") == "user")
        items = await ask_within(self._answer, max(heard, default=0))
        self.transcript += items
        return spoken(items)

    async def _answer(self, chars: int) -> list[JSON]:
        """What it says to the transcript, with so many characters of each text of the policy. Raises
        BadRequest: the model does not take it; Unavailable: it said nothing.
        """
        heard = [
            {**one, "content": one["content"][:chars]} if one.get("role") == "user" else one
            for one in self.transcript
        ]
        response = await self._model.responses({**self._params, "input": heard})
        if is_overflow_answer(response):
            raise BadRequest("the conversation does not fit the context of the model that plays the user")
        output = [item for item in response["output"] if isinstance(item, dict)]
        items = [{key: value for key, value in item.items() if key not in TOKEN_KEYS} for item in output]
        if not spoken(items).strip():
            raise Unavailable("the model that plays the user said nothing", stage="model") from BrokenReply()
        return items

    def _greeted(self) -> None:
        # Chat templates want the conversation to begin with a message to the model.
        if len(self.transcript) == 1:
            self.hears(_GREETING)


def spoken(items: list[JSON]) -> str:
    """What a person hears of output items: the text of the assistant's messages."""
    messages = (item for item in items if item.get("type", "message") == "message")
    return "\n\n".join(message_text(item) for item in messages if item.get("role") == "assistant")
