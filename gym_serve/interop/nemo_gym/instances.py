"""The server instances of a config, each ``name: {server type: {implementation: settings}}``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gym_serve.interop.nemo_gym.types import KINDS
from gym_serve.servers.clients import Kind
from gym_serve.types.requests import JSON

__all__ = ["POLICY", "Instance", "datasets_of", "instances_of", "mentions", "reference"]

POLICY = "policy_model"
"""The model that NeMo Gym's configs refer to, and leave to the command line."""


@dataclass(frozen=True)
class Instance:
    """A server of NeMo Gym.

    Attributes:
        name: its name.
        kind: what it is.
        section: NeMo Gym's word for that.
        implementation: which server of that kind.
        settings: its keys.
    """

    name: str
    kind: Kind
    section: str
    implementation: str
    settings: dict[str, Any]

    @property
    def path(self) -> tuple[str, str, str]:
        """Where its settings stand in the config."""
        return self.name, self.section, self.implementation


def instances_of(config: dict[str, Any], problems: list[str]) -> Iterator[Instance]:
    """The instances of a config; other keys are values that instances refer to.

    Args:
        config: the config, directives applied.
        problems: takes what looks like an instance and is none.
    """
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


def datasets_of(instance: Instance) -> Iterator[JSON]:
    """The data sets that an agent's config names; graphs have none, so they are told apart."""
    datasets = instance.settings.get("datasets")
    for dataset in datasets if isinstance(datasets, list) else []:
        if isinstance(dataset, dict):
            yield {
                "agent": instance.name,
                **{
                    name: dataset[key]
                    for name, key in (
                        ("name", "name"),
                        ("type", "type"),
                        ("rows", "jsonl_fpath"),
                        ("repeats", "num_repeats"),
                        ("prompt", "prompt_config"),
                    )
                    if dataset.get(key) is not None
                },
            }
