"""`resolve`: every problem of a graph, at once, each with its path and a way out."""

import types
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest
from support.graph_fakes import (
    FakeAgent,
    FakeEnvironment,
    FakeModel,
    Unsure,
    graph,
    problems,
    resolved,
    with_policy,
)

from gym_serve.graph import classes
from gym_serve.graph.loading import load_graph
from gym_serve.types.errors import GraphError


def test_every_problem_at_once() -> None:
    content = {
        "models": {
            "policy": {"type": FakeModel, "model": "${M}", "base_url": "${URL}"},
            "run": {"type": FakeModel, "model": "m", "num_gpu": 1},
            "2nd": None,
            "lost": {"modle": "m"},
        },
        "resources": {
            "math": {"type": FakeEnvironment, "judge": "math_agent", "judges": ["policy", "polcy"]}
        },
        "agents": {
            "math_agent": {
                "type": FakeAgent,
                "modle": "policy",
                "resources": 3,
                "inline": ["math", "policy"],
            },
            "policy": {"type": FakeAgent},
        },
        "agnets": {},
        "default_agent": "math_agnet",
    }
    assert problems(content, source="g.yaml") == [
        "agnets: unknown key; did you mean 'agents'?",
        "models.policy.model: environment variable M is not set; "
        "export it, put it into .env, or write ${M:-default}",
        "models.policy.base_url: environment variable URL is not set; "
        "export it, put it into .env, or write ${URL:-default}",
        "models.run: the name is reserved for a route of the graph; choose another",
        "models.run.num_gpu: unknown setting; did you mean 'num_gpus'?",
        "models.2nd: a name must start with a letter and have only letters, digits, _ and -, at most 63",
        "models.2nd: must be a mapping with a `type`, got null",
        "models.lost: `type` is missing; write a short name, package.module:Class, or http",
        "agents.math_agent.model: a required setting is missing",
        "agents.math_agent.modle: unknown setting; did you mean 'model'?",
        "agents.math_agent.resources: must be the name of an environment, got a number",
        "agents.policy: the name is taken by models.policy",
        "resources.math.judge: must be a model, got 'math_agent', which is an agent",
        "resources.math.judges[1]: unknown server 'polcy'; did you mean 'policy'?",
        "agents.math_agent.inline[0]: 'math' cannot run inside 'math_agent', which has no reference to it",
        "agents.math_agent.inline[1]: 'policy' cannot run inside 'math_agent', which has no reference to it",
        "default_agent: unknown agent 'math_agnet'; did you mean 'math_agent'?",
    ]


def test_the_error_names_the_file() -> None:
    with pytest.raises(GraphError) as caught:
        resolved({"x": 1}, source="graphs/g.yaml")
    assert str(caught.value).startswith("1 problem in graphs/g.yaml:\n  - x: unknown key")


def test_sections_and_keys_of_other_forms() -> None:
    content = {
        "models": [1],
        "resources": None,
        "agents": {"a": {"type": FakeAgent, 1: 2}, True: {}},
        "extends": None,
    }
    assert problems(content) == [
        "models: must be a mapping of servers by name, got a list",
        "agents.a.1: a key must be a string; quote it",
        "agents.a.model: a required setting is missing",
        "agents.a.resources: a required setting is missing",
        "agents.True: a name must be a string; quote it",
        "agents.True: `type` is missing; write a short name, package.module:Class, or http",
    ]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (
            {"model": None},
            "model: must be the name of a model server, or an object like ModelClient",
        ),
        ({"episode_timeout": 0}, "episode_timeout: must be greater than 0, got 0"),
    ],
)
def test_a_setting_left_empty_and_a_time_limit_of_nothing(setting: dict[str, Any], problem: str) -> None:
    content = graph()
    content["agents"]["math_agent"] |= setting
    assert f"agents.math_agent.{problem}" in problems(content)


@pytest.mark.parametrize("name", [5, None, [], ""])
def test_the_name_of_an_application_is_a_text(name: Any) -> None:
    content = {"applications": [{"name": name, "import_path": "gym_serve.graph:app", "args": graph()}]}
    with pytest.raises(GraphError, match=r"applications: `name` must be a text, got .*; quote it"):
        load_graph(content)


@pytest.mark.parametrize(
    "name",
    [
        "run",
        "health",
        "docs",
        "graph",
        "redoc",
        "gateway",
        "v1",
        "server_instances",
        "sign-in",
        "ui",
        "episodes",
    ],
)
def test_routes_are_no_names(name: str) -> None:
    content = graph(models={name: {"type": FakeModel, "model": "m"}})
    content["agents"]["math_agent"]["model"] = name
    assert problems(content) == [
        f"models.{name}: the name is reserved for a route of the graph; choose another"
    ]


@pytest.mark.parametrize("name", ["a b", "a/b", "a.b", "-a", "ä", "openapi.json", "", "a" * 64, "a\n"])
def test_names_that_no_url_could_hold(name: str) -> None:
    assert len(problems({"models": {name: {"type": FakeModel, "model": "m"}}})) == 1


def test_cycles_are_named() -> None:
    content = graph()
    content["agents"] |= {
        "a": {"type": FakeAgent, "model": "policy", "resources": "math", "critic": "b"},
        "b": {"type": FakeAgent, "model": "policy", "resources": "math", "critic": "c"},
        "c": {"type": FakeAgent, "model": "policy", "resources": "math", "critic": "b"},
        "self": {"type": FakeAgent, "model": "policy", "resources": "math", "critic": "self"},
    }
    assert problems(content) == [
        "agents.b: its references form a cycle: b -> c -> b",
        "agents.self: its references form a cycle: self -> self",
    ]


def test_inline() -> None:
    content = graph(models={"policy": {"type": "http", "url": "http://h"}})
    content["agents"]["math_agent"]["inline"] = ["policy", "maths"]
    assert problems(content) == [
        "agents.math_agent.inline[0]: 'policy' cannot run inside 'math_agent': it is remote (type: http)",
        "agents.math_agent.inline[1]: unknown server 'maths'; did you mean 'math'?",
    ]
    content["agents"]["math_agent"]["inline"] = "math"
    assert problems(content) == ["agents.math_agent.inline: must be a list of server names, got a string"]


def test_what_one_problem_hides_adds_no_other() -> None:
    content = graph(models={"policy": {"type": "no_such_type", "modle": 1}})
    content["agents"]["math_agent"] |= {"resources": "${R}", "inline": ["math"], "max_steps": "${S}"}
    first, *others = problems(content)
    assert first.startswith("models.policy.type: unknown type 'no_such_type'; known: ")
    assert others == [
        "agents.math_agent.resources: environment variable R is not set; "
        "export it, put it into .env, or write ${R:-default}",
        "agents.math_agent.max_steps: environment variable S is not set; "
        "export it, put it into .env, or write ${S:-default}",
    ]


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (
            "scripted_modle",
            "unknown type 'scripted_modle'; did you mean 'scripted_model'?; or write package.module",
        ),
        ("mcqa", "'mcqa' belongs under 'resources', not here"),
        (FakeAgent, "'support.graph_fakes:FakeAgent' belongs under 'agents', not here"),
        (dict, "'builtins:dict' is not a server class; derive it from ModelServer"),
        ("json:loads", "'json:loads' is not a server class; derive it from ModelServer"),
        ("a b:c", "'a b:c' is not an import path; write package.module:Class"),
        (
            "no_such_pkg.env:Env",
            "cannot import no_such_pkg.env:Env: No module named 'no_such_pkg'; install it, or",
        ),
        ("support.graph_fakes:Nope", "cannot import support.graph_fakes:Nope: AttributeError: "),
        (3, "must be a short name or an import path package.module:Class, got a number"),
    ],
)
def test_types_that_cannot_be_used(type_: Any, expected: str) -> None:
    content = graph(models={"policy": {"type": type_}})
    (problem,) = problems(content)
    assert problem.startswith(f"models.policy.type: {expected}")


def test_a_module_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gs_broken_env.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = problems(graph(resources={"math": {"type": "gs_broken_env:E"}}))
    wanted = "resources.math.type: cannot import gs_broken_env:E: ZeroDivisionError: division by zero ("
    assert problem.startswith(wanted)
    assert problem.endswith("gs_broken_env.py:1)")


def test_packages_are_read_once_for_all_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def read(group: str) -> EntryPoints:
        reads.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(classes, "entry_points", read)
    monkeypatch.syspath_prepend(tmp_path)
    unknown = graph(resources={name: {"type": f"gs_new_{name}"} for name in ("math", *"abcd")})
    assert len(problems(unknown)) == 5
    assert len(reads) == len(classes.GROUPS)
    installed = tmp_path / "gs_new-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: gs-new\nVersion: 1.0\n")
    target = "gym_serve.environments.mcqa:Mcqa"
    (installed / "entry_points.txt").write_text(f"[gym_serve.environments]\ngs_new_a = {target}\n")
    assert len(problems(unknown)) == 4


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise ModuleNotFoundError("No module named 'Math_Verify.core'", name="Math_Verify.core")

    owner = types.SimpleNamespace(
        name="some-pkg", requires=["ray>=2", "math-verify[antlr4]>=0.8; extra == 'math'"]
    )
    entry = types.SimpleNamespace(value="some_pkg:Env", load=load, dist=owner)
    found = types.SimpleNamespace(names={"extra_env"}, select=lambda name: [entry])
    monkeypatch.setattr(classes, "_registered", lambda group, packages: found)
    (problem,) = problems(graph(resources={"math": {"type": "extra_env"}}))
    assert "No module named 'Math_Verify.core' (" in problem  # and the line that imports it
    assert problem.endswith("; pip install 'some-pkg[math]'")


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({"temperature": -1}, "models.policy.temperature: must be greater than or equal to 0, got -1"),
        ({"model": "a b"}, "models.policy.model: no spaces in a b"),
        (
            {"logins": [{"user": "u", "pasword": "x"}]},
            "models.policy.logins[0].password: a required setting is missing",
        ),
        ({"headers": 3}, "models.policy.headers: must be a valid dictionary, got 3"),
        ({"num_replicas": 0}, "models.policy.num_replicas: must be greater than or equal to 1, got 0"),
    ],
)
def test_settings_that_do_not_fit(settings_: dict[str, Any], expected: str) -> None:
    assert problems(with_policy(**settings_))[0] == expected


def test_a_validator_that_breaks_shows_nothing() -> None:
    (problem,) = problems(graph(models={"policy": {"type": Unsure, "model": "hunter2"}}))
    assert problem == "models.policy: a validator of Unsure.Config failed with KeyError"


@pytest.mark.parametrize(
    "url", ["ftp://h", "h:80", "http://", "http://u:hunter2@h", "http://h?x=hunter2", 3, "http://[h"]
)
def test_urls_of_remote_servers(url: Any) -> None:
    found = problems(graph(models={"policy": {"type": "http", "url": url}}))
    assert [problem.partition(":")[0] for problem in found] == ["models.policy.url"]
    assert "hunter2" not in str(found)
    assert problems(graph(models={"policy": {"type": "http", "url": "http://h", "num_replicas": 1}})) == [
        "models.policy.num_replicas: unknown setting; known: url, headers, api_key"
    ]


def test_options_of_the_gateway() -> None:
    assert problems({**with_policy(), "gateway": {"num_replica": 2, "num_cpus": -1}}) == [
        "gateway.num_cpus: must be greater than or equal to 0, got -1",
        "gateway.num_replica: unknown setting; did you mean 'num_replicas'?",
    ]
    assert problems({**with_policy(), "gateway": {"max_request_bytes": 0}}) == [
        "gateway.max_request_bytes: must be greater than or equal to 1, got 0"
    ]
    assert problems({**with_policy(), "insecure": "perhaps"}) == [
        "insecure: must be true or false, got 'perhaps'"
    ]
    assert problems({**with_policy(), "auth_token": ["${A:-}", 7]}) == [
        "auth_token[1]: must be a non-empty string, got a number; leave the key out for an open graph"
    ]
    assert problems({**with_policy(), "gateway": 2}) == [
        "gateway: must be a mapping of Serve options, got a number"
    ]
