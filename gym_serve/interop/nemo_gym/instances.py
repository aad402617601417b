"""NeMo Gym's servers: the instances in a config, their types and settings here, and their code.

A resources server without a counterpart here is hosted if its code is found, as
``resources_servers/{implementation}/{entrypoint}`` above one of the configs or in the NeMo Gym that is
installed. Nothing is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from gym_serve.graph.classes import GROUPS, field_names
from gym_serve.servers.base import Server
from gym_serve.servers.clients import Kind
from gym_serve.types.requests import JSON

KINDS: dict[str, Kind] = {
    "responses_api_models": "model",
    "resources_servers": "resources",
    "responses_api_agents": "agent",
}  # NeMo Gym's types of server, and what they are here

HOSTED = "nemo_gym"  # the type here that hosts a resources server of NeMo Gym

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
# Their harness_agent runs a program in a sandbox of the task's image.
_OTHERS = frozenset(
    {("resources", "openenv"), ("resources", "workplace_assistant"), ("agent", "harness_agent")}
)  # types of ours that are something else than NeMo Gym's of the same name
_FROM_OUTSIDE: dict[tuple[Kind, str], dict[str, str]] = {
    ("model", "vllm_model"): {"base_url": "???"},
    ("model", "genrm_model"): {"base_url": "???"},
    ("resources", "google_search"): {"google_api_key": "???", "google_cx": "???"},
}  # settings that are required and that some of NeMo Gym's configs leave to the command line
_AS_THERE: dict[tuple[Kind, str], dict[str, Any]] = {
    ("resources", "text_to_sql"): {"check_execution": False}  # NeMo Gym runs no query
}  # settings that give NeMo Gym's verdicts where the defaults here go further
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
FOREIGN = "docs/foreign-environments.md"  # the page about what can be hosted
_CANNOT = f"of NeMo Gym's servers, {{}}s cannot be hosted: {FOREIGN} lists those with a counterpart"
_INSTEAD: dict[Kind, str] = {
    "model": _CANNOT.format("model"),
    "resources": "to host NeMo Gym's, import the config from a checkout of NeMo Gym, or install nemo-gym",
    "agent": f"{_CANNOT.format('agent')}, and docs/harnesses.md runs a program such as a coding agent",
}  # what to do with a server that has no counterpart
OWN_TO_NEMO_GYM = frozenset(
    {"entrypoint", "host", "port", "num_workers", "domain", "verified", "description", "value", "datasets"}
)  # settings that say where NeMo Gym runs a server, or describe it to people
_REASONING = (
    *("uses_reasoning_parser", "uses_interleaved_reasoning"),
    "preserve_reasoning_in_assistant_content",
)


def find_type(kind: Kind, implementation: str) -> tuple[str | None, str]:
    """The type here of an implementation of NeMo Gym. Its name, or None and what to do without one."""
    names = sorted(entry_points(group=GROUPS[kind]).names)
    name = _TYPES.get((kind, implementation), implementation)
    is_other = (kind, implementation) in _OTHERS
    if name in names and not is_other:
        return name, ""
    other = f"; gym_serve's {implementation} is another one" if is_other else ""
    return None, f"{other}; {_INSTEAD[kind]}"


def settings_of(kind: Kind, implementation: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings of an implementation that mean something here, under its names."""
    left_open = _FROM_OUTSIDE.get((kind, implementation), {})
    values = {**left_open, **{key: v for key, v in settings.items() if v is not None or key not in left_open}}
    kept = {key: value for key, value in values.items() if key not in OWN_TO_NEMO_GYM}
    kept |= _AS_THERE.get((kind, implementation), {})
    if kind == "model" and implementation in ("vllm_model", "local_vllm_model"):
        kept |= _reasoning(kept)
        kept = {key: value for key, value in kept.items() if key not in _REASONING}
    for key, value in kept.items():
        # NeMo Gym wants an input there, and ignores it.
        if key.endswith("responses_create_params") and isinstance(value, dict) and not value.get("input"):
            kept[key] = {name: item for name, item in value.items() if name != "input"} or None
    return kept


def setting_name(cls: type[Server], key: str) -> str | None:
    """The name that a setting has in a class; None if it has none."""
    stem = key.removesuffix("_server").removesuffix("_model")
    fields = field_names(cls.Config)
    return next((name for name in (key, _SETTINGS.get(key, key), stem) if name in fields), None)


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
    reasoning: dict[str, Any] = {}
    if isinstance(parses, bool):
        reasoning["parse_think_tags"] = parses
    if keeps_tags is True or parses is False:
        reasoning["reasoning_input"] = "think_tags"
    elif interleaves is False:
        reasoning["reasoning_input"] = "drop"
    return reasoning


POLICY = "policy_model"  # the model that NeMo Gym's configs refer to, and leave to the command line


@dataclass(frozen=True)
class Instance:
    """A server of NeMo Gym; ``section`` is NeMo Gym's word for its kind."""

    name: str
    kind: Kind
    section: str
    implementation: str
    settings: dict[str, Any]

    @property
    def path(self) -> tuple[str, str, str]:
        return self.name, self.section, self.implementation


def instances_of(config: dict[str, Any], problems: list[str]) -> Iterator[Instance]:
    """The instances of a config; ``problems`` receives a message for each invalid one."""
    for name, value in config.items():
        sections = [section for section in KINDS if isinstance(value, dict) and section in value]
        if not sections:
            continue
        implementations = value[sections[0]]
        # A leftover of NeMo Gym's for runs without a model.
        if isinstance(implementations, dict) and len(implementations) > 1:
            implementations = {k: v for k, v in implementations.items() if k != "dummy_model"}
        if len(sections) > 1 or not isinstance(implementations, dict) or len(implementations) != 1:
            problems.append(f"{name} must have one server type with one implementation")
            continue
        ((implementation, settings),) = implementations.items()
        if not isinstance(settings, dict | None):
            problems.append(f"{name}.{sections[0]}.{implementation} must be a mapping of settings")
            continue
        yield Instance(name, KINDS[sections[0]], sections[0], str(implementation), settings or {})


def reference(value: Any) -> str | None:
    """The name in ``{type: responses_api_models, name: judge}``; None for any other value."""
    if isinstance(value, dict) and value.keys() == {"type", "name"} and value["type"] in KINDS:
        return str(value["name"])
    return None


def mentions(value: Any, text: str) -> bool:
    """Whether a text stands somewhere in a config as a value."""
    if isinstance(value, dict):
        return any(mentions(item, text) for item in value.values())
    return any(mentions(item, text) for item in value) if isinstance(value, list) else value == text


_DATASET = {"name": "name", "type": "type"} | {
    "rows": "jsonl_fpath",
    "repeats": "num_repeats",
    "prompt": "prompt_config",
}


def datasets_of(instance: Instance) -> Iterator[JSON]:
    """The data sets that an agent's config names; graphs have none, so they are reported separately."""
    datasets = instance.settings.get("datasets")
    for dataset in datasets if isinstance(datasets, list) else []:
        if isinstance(dataset, dict):
            fields = {name: dataset.get(key) for name, key in _DATASET.items()}
            yield {"agent": instance.name, **{name: v for name, v in fields.items() if v is not None}}


_OWN = ("-e", "nemo-gym", "nemo_gym")  # NeMo Gym itself, as its own servers name it


def code_of(instance: Instance, configs: Iterable[Path]) -> Path | None:
    """The file of a resources server's class; None if there is none, or the server is of another kind."""
    if instance.kind != "resources" or not instance.implementation.isidentifier():
        return None
    file = Path(instance.section, instance.implementation, _entrypoint(instance))
    folders = [folder for config in configs for folder in config.resolve().parents]
    places = (folder / file for folder in (*folders, *_installed(instance.section)))
    return next((path for path in places if path.is_file()), None)


def file_of(instance: Instance, configs: Iterable[Path], name: str) -> Path | None:
    """A file that a setting of a server names, in the folder of its code, else of the configs or above; or
    None.
    """
    code = code_of(instance, configs)
    folders = [code.parent] if code is not None else []
    folders += [folder for config in configs for folder in config.resolve().parents]
    return next((file for folder in folders if (file := folder / name).is_file()), None)


def import_path_of(instance: Instance) -> str:
    """The module of the server's class."""
    return f"{instance.section}.{instance.implementation}.{Path(_entrypoint(instance)).stem}"


_BY_ADDRESS = re.compile(r"\b(get_server_url|_build_server_base_url)\(")


def calls_by_address(instance: Instance, code: Path) -> bool:
    """Whether a server asks where another one listens, instead of calling it by NeMo Gym's client."""
    refers = any("server" in key and value for key, value in instance.settings.items())
    texts = (file.read_text("utf-8", "replace") for file in code.parent.glob("*.py"))
    return refers and any(map(_BY_ADDRESS.search, texts))


def requirements_of(code: Path) -> list[str]:
    """The packages that the server needs beside NeMo Gym, as its ``requirements.txt`` has them."""
    file = code.with_name("requirements.txt")
    if not file.is_file():
        return []
    lines = (line.partition(" #")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and line[0] != "#" and not line.startswith(_OWN)]


def _entrypoint(instance: Instance) -> str:
    entrypoint = instance.settings.get("entrypoint")
    name = Path(entrypoint).name if isinstance(entrypoint, str) else ""
    return name if Path(name).stem.isidentifier() else "app.py"


def _installed(package: str) -> Iterator[Path]:
    """Folders in which a package of NeMo Gym's wheel lies."""
    spec = find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(place).parent
