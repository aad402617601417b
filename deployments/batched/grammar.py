"""Structured outputs: the tokens that a generation may take next, by https://github.com/guidance-ai/llguidance.

Grammars are compiled and matched outside Python, without backtracking, and llguidance bounds the cost. In a
regular expression or a choice, text that the tokenizer has as an added token in angle brackets, such as
``<tool_call>``, does not match that token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_serve.deployments.tokenizing import CALL_CLOSE, CALL_OPENING
from gym_serve.types.errors import BadRequest
from gym_serve.types.requests import JSON

_JSON_STYLE: Any = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""As `json.dumps` writes, or compact: a model may not fill its answer with white space."""


class Constraint:
    """The state of one generation."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def forbid(self, scores: NDArray[np.float64]) -> None:
        """Put -inf into ``scores`` where the next token would leave the grammar."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(scores)].astype(bool)
        if allowed.any():  # none: it gave up, which `take` tells
            scores[: len(allowed)][~allowed] = -np.inf
            scores[len(allowed) :] = -np.inf

    def take(self, token: int) -> BadRequest | None:
        """Go on by a token; why it cannot, if so: matching became too expensive."""
        if self._matcher.consume_token(token):
            return None
        return BadRequest(f"the structured output cannot be matched: {self._matcher.get_error()[:300]}")


class Grammars:
    """The constraints of a model's generations. ``words`` makes llguidance's form of its ``vocabulary``
    tokens; ``added`` are those that no other text makes; ``ends`` end a turn.
    """

    def __init__(
        self, words: Callable[[], Any], added: Collection[str], vocabulary: int, ends: frozenset[int]
    ) -> None:
        self._make_words = words
        self._added = added
        self.vocabulary = vocabulary
        self.ends = ends
        self._words: Any = None

    def constraint(self, chat: Mapping[str, Any]) -> Constraint | None:
        """What a chat body asks for; None if nothing. It may take a second. Raises BadRequest: the grammar is
        wrong or too large, or llguidance is not installed.
        """
        wanted = self._forced_call(chat) or _wanted(chat)
        if wanted is None:
            return None
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise BadRequest(f"structured outputs need {error.name}: pip install llguidance") from None
        kind, value = wanted
        if kind == "regex":
            grammar = LLMatcher.grammar_from_regex(value)
        elif kind == "grammar":
            grammar = LLMatcher.grammar_from_lark(value)
        else:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(value), defaults=_JSON_STYLE)
        if self._words is None:
            self._words = self._make_words()
        matcher = LLMatcher(self._words, grammar, log_level=0)
        if matcher.is_error():
            raise BadRequest(f"structured output: {matcher.get_error()[:300]}")
        return Constraint(matcher)

    def _forced_call(self, chat: Mapping[str, Any]) -> tuple[str, Any] | None:
        """One call of a tool, where ``tool_choice`` is ``required`` or names one."""
        choice = chat.get("tool_choice")
        if choice in (None, "auto", "none"):
            return None
        named = choice.get("function") if isinstance(choice, dict) else {}
        name = named.get("name") if isinstance(named, dict) else None
        functions = [tool.get("function") for tool in chat.get("tools") or [] if isinstance(tool, dict)]
        tools = [tool for tool in functions if isinstance(tool, dict) and name in (None, tool.get("name"))]
        if not tools or (choice != "required" and name is None):
            raise BadRequest(f"`tool_choice` must name a tool of this request, got {str(choice)[:100]}")
        schema = {"anyOf": [_call_schema(tool) for tool in tools], "x-guidance": _JSON_STYLE}
        begin, end = (self._literal(mark) for mark in (CALL_OPENING, CALL_CLOSE))
        return "grammar", f'start: {begin} "\\n" call "\\n" {end}\ncall: %json {json.dumps(schema)}'

    def _literal(self, mark: str) -> str:
        """A mark in a grammar: the token that it is, or its text."""
        return mark if mark in self._added else json.dumps(mark)


def _call_schema(tool: JSON) -> JSON:
    parameters = tool.get("parameters")
    arguments = parameters if isinstance(parameters, dict) and parameters else {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.get("name")}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _wanted(chat: Mapping[str, Any]) -> tuple[str, Any] | None:
    """``json``, ``regex`` or ``grammar``, and its schema or text, from the fields of a chat body."""
    fields = ("response_format", "structured_outputs")
    constraints = [(field, chat[field]) for field in fields if chat.get(field)]
    if not constraints:
        return None
    if len(constraints) > 1:
        raise BadRequest("give response_format or structured_outputs, one of the two")
    field, value = constraints[0]
    if not isinstance(value, dict):
        raise BadRequest(f"{field} must be an object")
    return _of_format(value) if field == "response_format" else _of_vllm(value)


def _of_format(form: JSON) -> tuple[str, Any] | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json", {"type": "object"}
    described = form.get("json_schema")
    schema = described.get("schema", {}) if isinstance(described, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise BadRequest("`response_format` must be {type: json_schema, json_schema: {schema: {...}}}")
    return "json", schema


def _of_vllm(options: JSON) -> tuple[str, Any]:
    """vLLM's ``structured_outputs``; a grammar is in llguidance's variant of Lark."""
    match {key: value for key, value in options.items() if value is not None}:
        case {"json": dict() as schema, **rest} if not rest:
            return "json", schema
        case {"json_object": True, **rest} if not rest:
            return "json", {"type": "object"}
        case {"choice": [str(), *_] as choices, **rest} if not rest and set(map(type, choices)) == {str}:
            return "grammar", "start: " + " | ".join(map(json.dumps, choices))
        case {"regex": str() as regex, **rest} if not rest:
            return "regex", regex
        case {"grammar": str() as grammar, **rest} if not rest:
            return "grammar", grammar
    raise BadRequest("`structured_outputs` must be one of json, json_object, choice, regex and grammar")
