"""`Vocabulary`: the tokenizer and the chat template in a GGUF file, with the methods of one of
``transformers`` that `render`, `entries` and `BatchedEngine` use.

Many small models have a template that knows no tools, and fails on a message without text. They get tools,
calls and results as text, in the form that SmolLM2, Qwen and Hermes were trained on.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gym_serve.deployments.tokenizing import CALL_CLOSE, CALL_OPENING
from gym_serve.types.errors import GraphError
from gym_serve.types.requests import JSON

_CONTROL, _USER_DEFINED = 1 << 3, 1 << 4  # llama.h: llama_token_attr
_TOOLS = """\
You have access to the following tools:

<tools>{tools}</tools>

To call one, answer with
<tool_call>
{{"name": "func_name", "arguments": {{"name": "value"}}}}
</tool_call>"""


class Vocabulary:
    """The tokenizer of a model of llama.cpp, and its chat template or another one."""

    def __init__(self, model: Any, template: str | None = None) -> None:
        self._vocab = model.get_vocab()
        self._kind = model.metadata().get("tokenizer.ggml.model")
        self.size = int(self._vocab.n_vocab)
        self.ends = frozenset(token for token in range(self.size) if self._vocab.is_eog(token))
        source = template or model.get_default_chat_template()
        if not source:
            raise GraphError("this GGUF file has no chat template: set chat_template to a file with one")
        self._takes_tools = "tools" in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise GraphError(f"the chat template is invalid: {error}") from None

    @cached_property
    def added(self) -> dict[str, int]:
        """Tokens that no other text makes, by their text."""
        named = (t for t in range(self.size) if self._vocab.get_attr(t) & (_CONTROL | _USER_DEFINED))
        return {self._vocab.get_text(token): token for token in named}

    def apply_chat_template(
        self, conversation: list[JSON], tools: list[JSON] | None = None, *, tokenize: bool, **values: Any
    ) -> str:
        """The text of a conversation; never its tokens (``tokenize``)."""
        assert not tokenize
        if not self._takes_tools:
            conversation, tools = _without_tools(conversation, tools), None
        begin, end = (self._text_of(token) for token in (self._vocab.token_bos(), self._vocab.token_eos()))
        return self._template.render(
            messages=conversation, tools=tools, bos_token=begin, eos_token=end, **values
        )

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self._vocab.tokenize(text, add_special_tokens, True)}

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, always without control tokens (``skip_special_tokens``)."""
        text: str = self._vocab.detokenize(tokens, False, False) if tokens else ""
        return text

    def convert_ids_to_tokens(self, tokens: list[int]) -> list[str]:
        return [self._vocab.get_text(token) for token in tokens]

    def _text_of(self, token: int) -> str:
        return self._vocab.get_text(token) if token >= 0 else ""

    def for_grammars(self) -> Any:
        """This vocabulary as llguidance takes it."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Words(self)), n_vocab=self.size)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token that is text; those of the others' names."""
        text: str = self._vocab.get_text(token)
        if self._vocab.get_attr(token) & (_CONTROL | _USER_DEFINED):
            return text.encode()
        if self._kind == "gpt2":
            return bytes(_BYTES[letter] for letter in text)
        if len(text) == 6 and text.startswith("<0x"):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()

    @property
    def end(self) -> int:
        return int(self._vocab.token_eos())


class _Words:
    """What llguidance's `TokenizerWrapper` asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id, self.bos_token_id = vocabulary.end, None
        self.tokens = [vocabulary.bytes_of(token) for token in range(vocabulary.size)]
        self.special_token_ids = sorted({*vocabulary.added.values(), *vocabulary.ends})

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._vocabulary(text, add_special_tokens=False)["input_ids"]


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters of bytes: printable ones stand for themselves, the others for 256 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


def _without_tools(messages: list[JSON], tools: list[JSON] | None) -> list[JSON]:
    """The conversation with its tools, calls and results as text."""
    said: list[JSON] = []
    for message in messages:
        text = message.get("content") or ""
        role = message["role"]
        if calls := message.get("tool_calls"):
            written = "\n".join(f"{CALL_OPENING}\n{_call(call)}\n{CALL_CLOSE}" for call in calls)
            text = f"{text}\n{written}" if text else written
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if said and said[-1]["role"] == "user" and said[-1]["content"].startswith("<tool_response>"):
                text = f"{said.pop()['content']}\n{text}"
        said.append({"role": "system" if role == "developer" else role, "content": text})
    if tools:
        described = _TOOLS.format(tools=json.dumps([tool.get("function", tool) for tool in tools]))
        first = said.pop(0)["content"] if said and said[0]["role"] == "system" else ""
        said.insert(0, {"role": "system", "content": f"{first}\n\n{described}" if first else described})
    return said


def _call(call: JSON) -> str:
    function = call["function"]
    return json.dumps({"name": function.get("name"), "arguments": function.get("arguments")})


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise TemplateError(message)
