"""Models by a word of the command line: an endpoint, a provider's name, or weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gym_serve.evaluation.local_weights import local_weights
from gym_serve.graph.spec import RESERVED_NAMES
from gym_serve.types.errors import InvalidRequest

FORMS = (
    "openai/NAME, anthropic/NAME, URL#NAME (Chat Completions), responses+URL#NAME (Responses), vllm:PATH, "
    "hf:PATH, llama_cpp:PATH, PATH.gguf, local, litellm:NAME, or scripted, the embedded stand-in"
)

LOCAL = "local"
"""The model whose weights come from a package."""

_LONGEST = 22  # of a server's name: with that of a benchmark it is the name of an agent, 63 at most


class Model(NamedTuple):
    """A model that is evaluated."""

    label: str
    """As the user wrote it, without what belongs to the address: it stands in tables."""
    server: str
    """Name of its server in the graph."""
    settings: dict[str, Any]
    """Its ``type`` and settings; keys stand in variables."""

    @property
    def needs_ray(self) -> bool:
        return bool(self.settings["type"] == "vllm_engine")


def read_models(texts: Iterable[str]) -> list[Model]:
    """The models of ``--model``, each with a name of its own. Raises InvalidRequest: a text is no model."""
    models: dict[str, Model] = {}
    for text in texts:
        label, settings = _read(text)
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", label.rpartition("/")[2]).strip("-")[:_LONGEST] or "model"
        name = name if name[0].isalpha() and name not in RESERVED_NAMES else f"m-{name}"
        server, number = name, 1
        while server in models:
            number += 1
            server = f"{name}-{number}"
        models[server] = Model(label, server, settings)
    return list(models.values())


def settings_of(model: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``type`` and settings of a model: as they are given, or those of a word. Raises InvalidRequest: a
    text is no model."""
    return _read(model)[1] if isinstance(model, str) else model


def _read(text: str) -> tuple[str, dict[str, Any]]:
    scheme, _, rest = text.partition(":")
    provider, _, name = text.partition("/")
    if text == "scripted":
        return text, {"type": "scripted_model"}
    if text == LOCAL:
        card = {"temperature": 0.2, "top_p": 0.9}  # what SmolLM2's model card advises
        return text, {"type": "llama_cpp_engine", "model": str(local_weights()), "extra_body": card}
    if (scheme == "llama_cpp" and rest) or (text.endswith(".gguf") and "#" not in text):
        path = rest if scheme == "llama_cpp" else text
        return Path(path).stem, {"type": "llama_cpp_engine", "model": str(Path(path).expanduser().absolute())}
    if scheme == "litellm" and rest:
        return rest, {"type": "litellm_model", "model": rest}
    if scheme == "vllm" and rest:
        return rest.rstrip("/"), {"type": "vllm_engine", "model": rest}
    if scheme == "hf" and rest:
        return rest.rstrip("/"), {"type": "hf_engine", "model": rest}
    if provider == "openai" and name:
        return name, {"type": "openai_model", "model": name, "api_key": "${OPENAI_API_KEY}"}
    if provider == "anthropic" and name:
        base_url = "https://api.anthropic.com/v1"
        return name, {
            "type": "chat_model",
            "model": name,
            "base_url": base_url,
            "api_key": "${ANTHROPIC_API_KEY}",
        }
    url, mark, name = text.partition("#")
    kind = "openai_model" if url.startswith("responses+") else "chat_model"
    url = url.removeprefix("responses+")
    if mark and name and url.startswith(("http://", "https://")):
        return name, {"type": kind, "model": name, "base_url": url, "api_key": "${POLICY_API_KEY:-EMPTY}"}
    raise InvalidRequest(f"--model must be {FORMS}; got {text!r}")
