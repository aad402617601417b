"""`SimulatedUser`: the other side of a conversation, played by a model.

To the model that plays the user, the roles are reversed: what the agent said is a ``user`` message, and the
user's own words are ``assistant`` messages. It is shown the agent's messages alone, as a person would be:
neither reasoning, nor calls, nor what the tools said, nor the agent's instructions.
"""

from __future__ import annotations

from typing import Any

from gym_serve.servers import ModelClient
from gym_serve.types.errors import Unavailable
from gym_serve.types.protocols import TOKEN_KEYS
from gym_serve.types.requests import JSON, message_text

__all__ = ["SimulatedUser", "spoken"]

_GREETING = "Hi! How can I help you today?"


class SimulatedUser:
    """A user with a persona.

    Args:
        model: plays the user.
        persona: its system prompt: who the user is, what they want, and when they are done.
        params: further keys of its Responses bodies (sampling).

    Attributes:
        transcript: the conversation as the user sees it; no training tokens.
    """

    def __init__(self, model: ModelClient, persona: str, params: JSON) -> None:
        self._model = model
        self._params = params
        self.transcript: list[JSON] = [{"role": "system", "content": persona}]

    def hears(self, text: str) -> None:
        """The agent said ``text``."""
        self.transcript.append({"role": "user", "content": text})

    def remembers(self, item: JSON) -> None:
        """An item of the conversation before the model played the user; only messages matter."""
        if item.get("role") == "user":
            self._greeted()
            self.transcript.append({"role": "assistant", "content": message_text(item)})
        elif item.get("role") == "assistant":
            self.hears(message_text(item))

    async def speak(self) -> str:
        """The user's next message.

        Raises:
            Unavailable: the model said nothing.
            GymError: it could not be reached.
        """
        self._greeted()
        response = await self._model.responses({**self._params, "input": self.transcript})
        items: list[Any] = response["output"]
        said = [
            {key: value for key, value in item.items() if key not in TOKEN_KEYS}
            for item in items
            if isinstance(item, dict)
        ]
        text = spoken(said)
        if not text.strip():
            raise Unavailable("the model that plays the user said nothing", stage="model")
        self.transcript += said
        return text

    def _greeted(self) -> None:
        # Chat templates want the conversation to begin with a message to the model.
        if len(self.transcript) == 1:
            self.hears(_GREETING)


def spoken(items: list[JSON]) -> str:
    """What a person hears of output items: the text of the assistant's messages."""
    messages = (item for item in items if item.get("type", "message") == "message")
    return "\n\n".join(message_text(item) for item in messages if item.get("role") == "assistant")
