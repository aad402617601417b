"""NeMo Gym's implementations and their settings, under the names that they have here."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, get_args

from gym_serve.graph.classes import GROUPS, field_names
from gym_serve.graph.spec import nearest
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Kind

__all__ = [
    "HOSTED",
    "KINDS",
    "find_type",
    "is_own_to_nemo_gym",
    "setting_name",
    "settings_of",
    "takes_null",
    "text_setting",
]

KINDS: dict[str, Kind] = {
    "responses_api_models": "model",
    "resources_servers": "resources",
    "responses_api_agents": "agent",
}
"""NeMo Gym's types of server, and what they are here."""

HOSTED = "nemo_gym"
"""The type here that hosts a resources server of NeMo Gym."""

_TYPES = {
    ("model", "vllm_model"): "chat_model",
    ("model", "inference_provider"): "chat_model",
    ("model", "local_vllm_model"): "vllm_engine",
    ("resources", "example_single_tool_call"): "simple_weather",
    ("resources", "example_multi_step"): "multi_step_synonyms",
    ("resources", "example_session_state_mgmt"): "session_counter",
    ("resources", "example_tool_call_multireward"): "tool_call_multireward",
    ("resources", "single_step_tool_use_with_argument_comparison"): "tool_argument_comparison",
    ("agent", "non_executing_simple_agent"): "single_turn_agent",
    ("agent", "tool_simulation_agent"): "single_turn_agent",
}
# Their workplace_assistant is another office: its rows name records that ours does not have.
_OTHERS = frozenset({("resources", "openenv"), ("resources", "workplace_assistant")})
"""Types of ours that are something else than NeMo Gym's of the same name."""
_FROM_OUTSIDE: dict[tuple[Kind, str], dict[str, str]] = {
    ("model", "vllm_model"): {"base_url": "???"},
    ("model", "genrm_model"): {"base_url": "???"},
    ("resources", "google_search"): {"google_api_key": "???", "google_cx": "???"},
}
"""Settings that are required and that some of NeMo Gym's configs leave to the command line."""
_AS_THERE: dict[tuple[Kind, str], dict[str, Any]] = {
    ("resources", "text_to_sql"): {"check_execution": False},  # NeMo Gym runs no query
}
"""Settings that give NeMo Gym's verdicts where the defaults here go further."""
_SETTINGS = {
    "judge_endpoint_max_concurrency": "judge_max_concurrency",
    "openai_base_url": "base_url",
    "openai_api_key": "api_key",
    "openai_model": "model",
    "return_token_id_information": "return_token_ids",
    "request_prompt_and_generation_token_ids": "inline_token_ids",
    "model_server": "model",
    "resources_server": "resources",
}
_OWN_TO_NEMO_GYM = frozenset(
    {
        "entrypoint",
        "host",
        "port",
        "num_workers",
        "domain",
        "verified",
        "description",
        "value",
        "datasets",
    }
)
_REASONING = (
    "uses_reasoning_parser",
    "uses_interleaved_reasoning",
    "preserve_reasoning_in_assistant_content",
)


def find_type(kind: Kind, implementation: str) -> tuple[str | None, str]:
    """The type here of an implementation of NeMo Gym.

    Returns:
        its name, or None and the rest of a message: the nearest names, or why ours of that name does not do.
    """
    known = sorted(entry_points(group=GROUPS[kind]).names)
    name = _TYPES.get((kind, implementation), implementation)
    if (kind, implementation) in _OTHERS:
        return None, (
            f"; gym_serve's {implementation} is another one: to host NeMo Gym's, import the config from a "
            "checkout of NeMo Gym, or install nemo-gym"
        )
    if name not in known:
        return None, nearest(implementation, known)
    return name, ""


def settings_of(kind: Kind, implementation: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings of an implementation that mean something here, under its names."""
    left_open = _FROM_OUTSIDE.get((kind, implementation), {})
    given = {**left_open, **{key: v for key, v in settings.items() if v is not None or key not in left_open}}
    kept = {key: value for key, value in given.items() if not is_own_to_nemo_gym(key)}
    kept |= _AS_THERE.get((kind, implementation), {})
    if kind == "model" and implementation in ("vllm_model", "local_vllm_model"):
        kept |= _reasoning(kept)
        kept = {key: value for key, value in kept.items() if key not in _REASONING}
    for key, value in kept.items():
        # NeMo Gym wants an input there, and ignores it.
        if key.endswith("responses_create_params") and isinstance(value, dict) and not value.get("input"):
            kept[key] = {name: item for name, item in value.items() if name != "input"} or None
    return kept


def is_own_to_nemo_gym(key: str) -> bool:
    """Whether a setting says where NeMo Gym runs a server, or describes it to people."""
    return key in _OWN_TO_NEMO_GYM


def setting_name(cls: type[Server], key: str) -> str | None:
    """The name that a setting has in a class; None if it has none."""
    stem = key.removesuffix("_server").removesuffix("_model")
    known = field_names(cls.Config)
    return next((name for name in (key, _SETTINGS.get(key, key), stem) if name in known), None)


def takes_null(cls: type[Server], name: str) -> bool:
    """Whether null means something else for a setting than leaving it out."""
    field = cls.Config.model_fields[name]
    return type(None) in get_args(field.annotation) and field.default is not None


def text_setting(cls: type[Server], key: str) -> str | None:
    """The setting of a class for what a file holds that ``key`` names (``judge_prompt_template_fpath``)."""
    name = key.removesuffix("_fpath")
    return name if name != key and name in field_names(cls.Config) else None


def _reasoning(settings: dict[str, Any]) -> dict[str, Any]:
    """NeMo Gym's three switches for reasoning, as the two settings here."""
    parses, interleaves, keeps_tags = (settings.get(key) for key in _REASONING)
    found: dict[str, Any] = {}
    if isinstance(parses, bool):
        found["parse_think_tags"] = parses
    if keeps_tags is True or parses is False:
        found["reasoning_input"] = "think_tags"
    elif interleaves is False:
        found["reasoning_input"] = "drop"
    return found
