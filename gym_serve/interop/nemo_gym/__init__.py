"""NVIDIA NeMo Gym's configs, as graph files: read without NeMo Gym or OmegaConf.

    imported = import_config(["benchmarks/aime24/config.yaml"])
    print(imported.yaml())

A value that must come from outside becomes an environment variable. A resources server without a counterpart
here is hosted as it is, with the settings that it has there.

`Conversion`: the instances of a config become the servers of a graph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gym_serve.graph.classes import find_class, secrets_of
from gym_serve.graph.loading import IMPORT_PATH, TextDumper, has_literal
from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import SECTION_OF, SECTIONS, GraphSpec, name_problem, nearest
from gym_serve.interop.nemo_gym.configs import (
    MISSING,
    Translator,
    apply_directives,
    is_secret_name,
    load_configs,
    variable_name,
)
from gym_serve.interop.nemo_gym.instances import (
    FOREIGN,
    HOSTED,
    OWN_TO_NEMO_GYM,
    POLICY,
    Instance,
    calls_by_address,
    code_of,
    datasets_of,
    file_of,
    find_type,
    import_path_of,
    instances_of,
    mentions,
    reference,
    requirements_of,
    setting_name,
    settings_of,
    takes_null,
    text_setting,
)
from gym_serve.types.errors import GraphError, InvalidRequest
from gym_serve.types.requests import JSON

__all__ = ["Imported", "import_config"]


_OFF: tuple[Any, ...] = (False, "", 0, {}, [])
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-.*)?\}", re.DOTALL)


class Conversion:
    """Converts instances. ``unless_used`` is an instance to leave out if no other server of the graph refers
    to it.
    """

    def __init__(
        self,
        config: dict[str, Any],
        instances: Sequence[Instance],
        *,
        files: Sequence[Path] = (),
        skip_unknown: bool = False,
        unless_used: str | None = None,
    ) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._instances = instances
        self._files = files
        self._skip_unknown = skip_unknown
        self._unless_used = unless_used
        self._translator = Translator(config)
        self._names = self._server_names()
        self._referred: dict[str, set[str]] = {}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the graph, by name, each with the key that it stands for."""
        return self._translator.variables

    def graph(self) -> JSON:
        servers: dict[str, JSON] = {}
        unknown: list[str] = []
        for instance in self._instances:
            type_, instead = find_type(instance.kind, instance.implementation)
            code = code_of(instance, self._files) if type_ is None else None
            if type_ is not None:
                servers[instance.name] = self._server(instance, type_)
                continue
            if code is not None and not calls_by_address(instance, code):
                servers[instance.name] = self._original(instance, code)
                continue
            unknown.append(instance.name)
            complaint = f"there is no such {instance.kind} type here{instead}"
            if code is not None:
                complaint = f"it calls a model by its address, and a hosted server has none: {FOREIGN}"
            complaints = self.notes if self._skip_unknown else self.problems
            complaints.append(f"{'.'.join(instance.path)}: {complaint}")
        self._drop(servers, unknown)
        if not any(self._unless_used in self._referred.get(name, ()) for name in servers):
            servers.pop(self._unless_used or "", None)
        self.problems += self._translator.problems
        if self._instances and not servers and not self.problems:
            self.problems.append("no server is left")
        graph: JSON = {}
        for instance in self._instances:
            if instance.name in servers:
                section = graph.setdefault(SECTION_OF[instance.kind], {})
                section[self._names[instance.name]] = servers[instance.name]
        return {section: graph[section] for section in SECTIONS if section in graph}

    def _server(self, instance: Instance, type_: str) -> JSON:
        entry: JSON = {"type": type_}
        try:
            cls = find_class(instance.kind, type_)
        except GraphError as error:
            what = f"{instance.name}: {instance.implementation} of NeMo Gym is the type {type_} here"
            self.problems += [f"{what}: {problem}" for problem in error.problems]
            return entry
        open_names: set[str] = set()
        for key, value in settings_of(instance.kind, instance.implementation, instance.settings).items():
            name = setting_name(cls, key)
            if value is None:
                if name is not None and takes_null(cls, name):
                    entry[name] = None
            elif (text := text_setting(cls, key)) is not None:
                entry[text] = self._text(value, instance, (*instance.path, key))
            elif name is not None:
                open_names |= {name} if value == MISSING else set()
                entry[name] = self._value(value, instance, (*instance.path, key))
            elif value not in _OFF:
                self.notes.append(f"{instance.name}: {type_} has no setting {key!r}, it was left out")
        for leaf in list(secrets_of(cls.Config, entry)):
            name = leaf.path
            if name in entry and isinstance(leaf.value, str):
                is_required = name in open_names or cls.Config.model_fields[name].is_required()
                entry[name] = self._secret(leaf.value, instance, name, is_required=is_required)
        return entry

    def _original(self, instance: Instance, code: Path) -> JSON:
        """A server that is hosted: its own settings as they are, and the graph's names of what it calls."""
        servers: dict[str, str] = {}
        secrets: dict[str, str] = {}

        def kept(value: Any, path: tuple[str, ...]) -> Any:
            if (target := reference(value)) is not None:
                name = str(self._translator.translate(target, path))
                servers[name] = self._target(name, instance, path)
                return {**value, "name": name}
            if isinstance(value, dict):
                held = {str(key): kept(item, (*path, str(key))) for key, item in value.items()}
                return {key: item for key, item in held.items() if not taken(key, item, path)}
            if isinstance(value, list):
                return [kept(item, (*path, str(index))) for index, item in enumerate(value)]
            return self._translator.translate(value, path)

        def taken(key: str, value: Any, path: tuple[str, ...]) -> bool:
            if not is_secret_name(key) or not isinstance(value, str) or not value:
                return False
            name = ".".join([*path[len(instance.path) :], key])
            required = (match := _VARIABLE.fullmatch(value)) is None or value == f"${{{match[1]}}}"
            secrets[name] = self._secret(value, instance, name, is_required=required)
            return True

        settings = {key: v for key, v in instance.settings.items() if key not in OWN_TO_NEMO_GYM}
        config = kept(settings, instance.path)
        self.notes.append(f"{instance.name}: NeMo Gym's own server is hosted, on Python 3.12 with nemo-gym")
        if needed := requirements_of(code):
            self.notes.append(f"{instance.name}: {code.parent.name} needs packages too: {', '.join(needed)}")
        parts = {"config": config, "secrets": secrets, "servers": servers}
        return {"type": HOSTED, "server": import_path_of(instance)} | {k: v for k, v in parts.items() if v}

    def _value(self, value: Any, instance: Instance, path: tuple[str, ...]) -> Any:
        """``value`` with names in the place of NeMo Gym's references, and ``${...}`` translated."""
        if (target := reference(value)) is not None:
            return self._target(self._translator.translate(target, path), instance, path)
        if isinstance(value, dict):
            return {key: self._value(item, instance, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item, instance, (*path, str(i))) for i, item in enumerate(value)]
        return self._translator.translate(value, path)

    def _text(self, value: Any, instance: Instance, path: tuple[str, ...]) -> str:
        """What the file holds that a setting names: a graph holds the text."""
        name = self._translator.translate(value, path)
        file = file_of(instance, self._files, name) if isinstance(name, str) and "${" not in name else None
        if file is None:
            self.problems.append(f"{'.'.join(path)}: there is no file {name!r}")
            return ""
        try:
            return file.read_text(encoding="utf-8").strip().replace("${", "$${")
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(f"{'.'.join(path)}: {file} cannot be read: {error}")
            return ""

    def _target(self, target: Any, instance: Instance, path: tuple[str, ...]) -> str:
        if target in self._names:
            self._referred.setdefault(instance.name, set()).add(target)
            return self._names[target]
        if str(target).startswith("${"):
            reason = "the name of the server is left open; put it into the config"
        else:
            reason = f"there is no server {target!r}{nearest(target, self._names)}"
        self.problems.append(f"{'.'.join(path)}: {reason}")
        return str(target)

    def _secret(self, value: str, instance: Instance, name: str, *, is_required: bool) -> str:
        """A secret by a variable: it never stands in a graph file."""
        default = None if is_required else ""
        if (match := _VARIABLE.fullmatch(value)) is not None:
            return self._translator.variable(match[1], match[1], default)
        if not has_literal(value):
            return value
        variable = variable_name(f"{instance.name}_{name}")
        self.notes.append(f"{instance.name}: the {name} in the config was not copied: set {variable}")
        return self._translator.variable(variable, f"{instance.name}.{name}", default)

    def _drop(self, servers: dict[str, JSON], gone: list[str]) -> None:
        """Take out the servers that refer to one that is gone, and those that refer to them."""
        while gone:
            name = gone.pop()
            for other in [other for other, targets in self._referred.items() if name in targets]:
                if servers.pop(other, None) is not None:
                    self.notes.append(f"{other}: left out, because it refers to {name}")
                    gone.append(other)

    def _server_names(self) -> dict[str, str]:
        """The name of each instance in the graph, where not all names are possible."""
        names: dict[str, str] = {}
        taken = {instance.name for instance in self._instances}
        for instance in self._instances:
            name = instance.name
            if name_problem(name) is not None:
                name = re.sub(r"[^A-Za-z0-9_-]+", "_", name)
                # Of a long name both ends are kept: names of one family often differ at the end.
                name = name if len(name) <= 60 else f"{name[:29]}__{name[-29:]}"
                name = name if name[:1].isalpha() and name_problem(name) is None else f"s_{name}"
                name = name if name not in taken else f"{name[:55]}_{len(names)}"
                taken.add(name)
                self.notes.append(f"{instance.name}: is called {name} here; rows must use that name")
            names[instance.name] = name
        return names


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
        text = yaml.dump(self.config, Dumper=TextDumper, sort_keys=False, allow_unicode=True, width=100)
        return "\n".join([*(line.replace("\n", " ") for line in lines), text])


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
