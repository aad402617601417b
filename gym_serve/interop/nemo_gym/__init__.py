"""NVIDIA NeMo Gym's configs, as graph files: read without NeMo Gym or OmegaConf.

    imported = import_config(["benchmarks/aime24/config.yaml"])
    print(imported.yaml())

A value that must come from outside becomes an environment variable. A resources server without a counterpart
here is hosted as it is, with the settings that it has there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from gym_serve.graph.loading import IMPORT_PATH
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.interop.nemo_gym.configs import apply_directives, load_configs
from gym_serve.interop.nemo_gym.conversion import Conversion
from gym_serve.interop.nemo_gym.instances import POLICY, datasets_of, instances_of, mentions
from gym_serve.types.errors import GraphError, InvalidRequest
from gym_serve.types.requests import JSON

__all__ = ["Imported", "import_config"]

_POLICY_CONFIG = {
    "responses_api_models": {
        "vllm_model": {
            "base_url": "${policy_base_url}",
            "api_key": "${policy_api_key}",
            "model": "${policy_model_name}",
        }
    }
}


@dataclass(frozen=True)
class Imported:
    """A graph made from configs of NeMo Gym: ``variables`` are those that it needs or takes, each with NeMo
    Gym's key, and ``notes`` say what differs from the configs.
    """

    config: JSON
    sources: tuple[str, ...]
    variables: dict[str, str]
    datasets: list[JSON]
    notes: list[str]

    def yaml(self) -> str:
        """The text of the graph file; its comment names the variables."""
        lines = [f"# Imported from NeMo Gym: {', '.join(self.sources)}"]
        if self.variables:
            lines.append("# Environment variables:")
            lines += [f"#   {name}" for name in self.variables]
        text = yaml.dump(self.config, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
        return "\n".join([*(line.replace("\n", " ") for line in lines), text])


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as prompts, as they are read."""

    def text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.text)


def import_config(
    paths: Sequence[str | Path], *, name: str | None = None, skip_unknown: bool = False
) -> Imported:
    """Make a graph from configs; later ones override earlier ones. With ``skip_unknown``, servers that can be
    neither replaced nor hosted are left out, with all that refer to them. Raises InvalidRequest: a config
    cannot be read or followed; GraphError: every problem of the servers.
    """
    files = [Path(path) for path in paths]
    source = ", ".join(map(str, files))
    config = load_configs(files)
    is_policy_added = POLICY not in config and mentions(config, POLICY)
    if is_policy_added:
        config[POLICY] = _POLICY_CONFIG
    try:
        config = apply_directives(config)
    except InvalidRequest as error:
        raise InvalidRequest(f"{source}: {error.message}") from None
    problems: list[str] = []
    instances = list(instances_of(config, problems))
    if not instances:
        problems.append("the configs have no servers")
    conversion = Conversion(
        config,
        instances,
        files=files,
        skip_unknown=skip_unknown,
        unless_used=POLICY if is_policy_added else None,
    )
    graph = conversion.graph()
    problems += conversion.problems
    if not problems:
        problems = _problems_of(graph)
    if problems:
        raise GraphError(problems, source=source)
    if is_policy_added and POLICY in graph.get("models", {}):
        conversion.notes.insert(0, f"{POLICY} is in none of the configs: a chat_model was put in its place")
    stem = files[0].stem if files[0].stem != "config" else files[0].resolve().parent.name
    name = name or re.sub(r"[^A-Za-z0-9_-]+", "_", stem) or "nemo_gym"
    application = {"name": name, "route_prefix": f"/{name}", "import_path": IMPORT_PATH, "args": graph}
    return Imported(
        {"applications": [application]},
        tuple(map(str, files)),
        conversion.variables,
        [dataset for instance in instances for dataset in datasets_of(instance)],
        conversion.notes,
    )


def _problems_of(graph: JSON) -> list[str]:
    """What is wrong with a graph, apart from variables that are not set here."""
    try:
        resolve(GraphSpec.model_validate(graph), literal_secrets=False)
    except GraphError as error:
        unset = [problem for problem in error.problems if "environment variable " in problem]
        # What a server's settings lack together may be one of those variables.
        unsure = {".".join(problem.split(".")[:2]) for problem in unset}
        return [p for p in error.problems if p not in unset and p.partition(": ")[0] not in unsure]
    return []
