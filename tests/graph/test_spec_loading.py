"""Reading graph files: strict YAML, Serve configs, extends and overrides."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gym_serve.graph.loading import graph_names, load_graph, merged, parse_yaml
from gym_serve.graph.spec import GraphSpec
from gym_serve.types.errors import GraphError

SERVE_CONFIG = """
proxy_location: EveryNode
applications:
  - {name: other, import_path: my_pkg:app, route_prefix: /other}
  - name: math
    route_prefix: /math
    import_path: gym_serve.graph:app
    args:
      models: {policy: {type: a, model: m}}
"""

NO_GRAPH = (
    "a graph file must be a mapping with `applications` (a Serve config) "
    "or `models`, `resources` and `agents`"
)


def write(path: Path, text: str) -> Path:
    path.write_text(dedent(text))
    return path


def problems(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(GraphError) as caught:
        load_graph(*args, **kwargs)
    return caught.value.problems


def test_a_serve_config(tmp_path: Path) -> None:
    file = write(tmp_path / "g.yaml", SERVE_CONFIG)
    source = load_graph(file)
    assert (source.name, source.route_prefix, source.path, source.base_dir) == (
        "math",
        "/math",
        str(file),
        tmp_path,
    )
    assert source.spec.raw() == {"models": {"policy": {"type": "a", "model": "m"}}}


def test_bare_args_and_their_defaults(tmp_path: Path) -> None:
    source = load_graph(str(write(tmp_path / "g.yaml", "agents: {a: {type: t}}")))
    assert (source.name, source.route_prefix) == ("default", "/")
    assert source.spec.agents == {"a": {"type": "t"}}
    assert load_graph({"agents": {}}).path is None


def test_a_spec_is_taken_as_it_is() -> None:
    spec = GraphSpec(models={"a": {"type": "t"}}, unknown=1)
    assert load_graph(spec).spec.raw() == {"models": {"a": {"type": "t"}}, "unknown": 1}


def test_one_of_several_graphs(tmp_path: Path) -> None:
    file = write(
        tmp_path / "g.yaml",
        """
        applications:
          - {name: a, route_prefix: /a, import_path: "gym_serve.graph:app", args: {}}
          - {name: beta, route_prefix: /b, import_path: "gym_serve.graph:app", args: {}}
        """,
    )
    assert load_graph(file, application="beta").route_prefix == "/b"
    assert graph_names(file) == ["a", "beta"]
    assert problems(file) == [
        "applications: several graphs (a, beta); choose one with application=NAME (--application NAME)"
    ]
    assert problems(file, application="bete") == ["applications: unknown graph 'bete'; did you mean 'beta'?"]
    extending = write(tmp_path / "extending.yaml", "extends: g.yaml")
    assert problems(extending) == ["extends: g.yaml holds several graphs (a, beta); it must hold one"]
    assert graph_names(extending) == ["default"]


def test_two_graphs_of_one_name(tmp_path: Path) -> None:
    graph = '{name: a, import_path: "gym_serve.graph:app", args: {}}'
    file = write(tmp_path / "g.yaml", f"applications: [{graph}, {graph}]")
    assert problems(file) == ["applications: two graphs have the name 'a'; rename one"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", f"{NO_GRAPH}, got a list"),
        ("", f"{NO_GRAPH}, got null"),
        ("applications: {}", "`applications` must be a list of mappings, got a mapping"),
        (
            "applications: [{import_path: x}]",
            "applications: none is a graph; a graph has import_path: gym_serve.graph:app",
        ),
        (
            "applications: [{import_path: 'gym_serve.graph:app'}]",
            "applications.default.args: must be a mapping that holds the graph, got null",
        ),
        (
            "applications: [{import_path: 'gym_serve.graph:app', route_prefix: math, args: {}}]",
            "applications.default.route_prefix: must be a path that starts with /, got 'math'",
        ),
    ],
)
def test_files_that_hold_no_graph(tmp_path: Path, content: str, expected: str) -> None:
    file = write(tmp_path / "g.yaml", content)
    with pytest.raises(GraphError) as caught:
        load_graph(file)
    assert caught.value.problems == [expected]
    assert caught.value.source == str(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert problems(tmp_path / "no.yaml") == [f"no such file: {tmp_path / 'no.yaml'}"]
    assert problems(tmp_path) == ["cannot be read: Is a directory"]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    assert problems(tmp_path / "binary.yaml") == ["must be a text in UTF-8; save it as one"]


# Strict YAML


def test_every_key_that_stands_twice_is_named_with_its_lines() -> None:
    text = dedent(
        """\
        models:
          policy: {type: a, type: b}
          judge: {}
          policy: {}
        agents:
          - {x: 1, x: 2}
        """
    )
    with pytest.raises(GraphError) as caught:
        parse_yaml(text)
    assert caught.value.problems == [
        "models.policy.type: the key is repeated, in line 2 and line 2",
        "models.policy: the key is repeated, in line 2 and line 4",
        "agents[0].x: the key is repeated, in line 6 and line 6",
    ]


def test_anchors_and_merge_keys_work() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\nd: *a"
    assert parse_yaml(text) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 1, "y": 2},
        "d": {"x": 1, "y": 2},
    }


def test_a_node_inside_itself() -> None:
    with pytest.raises(GraphError, match=r"a\.b: line 1: the alias refers to a node that contains it"):
        parse_yaml("a: &a {b: *a}")


@pytest.mark.parametrize(
    "text",
    [
        "key: *hunter2",
        "key: !hunter2 x",
        "key: !<hunter2> x",
        "key: !hunter2!x y",
        "key: 'hunter2",
        "key: [hunter2",
        "key: hunter2: x",
        "key: `hunter2`",
        "key: %hunter2",
        "hunter2\nkey: x",
        "? [hunter2]\n: x",
        "key: 2024-13-45 # hunter2",
        "key: hunter2\x00",
        "--- hunter2\n--- x",
        "[" * 5000 + "hunter2",
    ],
)
def test_messages_never_quote_the_file(text: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse_yaml(text)
    assert "hunter2" not in str(caught.value)
    assert "invalid YAML" in caught.value.problems[0]


# extends


def test_extends_merges_and_null_deletes(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", SERVE_CONFIG)
    (tmp_path / "sub").mkdir()
    write(
        tmp_path / "sub" / "mid.yaml",
        "extends: ../base.yaml\nmodels: {judge: {type: j}, policy: {num_gpus: 1}}",
    )
    file = write(
        tmp_path / "top.yaml",
        "extends: sub/mid.yaml\nmodels: {judge: null, policy: {model: n, api_key: null}}",
    )
    assert load_graph(file).spec.raw() == {
        "models": {"policy": {"type": "a", "model": "n", "num_gpus": 1, "api_key": None}}
    }


def test_extends_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "extends: b.yaml")
    write(tmp_path / "b.yaml", "extends: ./a.yaml")
    assert problems(tmp_path / "a.yaml") == ["extends: the files form a cycle: a.yaml -> b.yaml -> a.yaml"]


def test_problems_of_the_base_name_the_base(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "a: 1\na: 2")
    with pytest.raises(GraphError) as caught:
        load_graph(write(tmp_path / "g.yaml", "extends: base.yaml"))
    assert caught.value.source == str(tmp_path / "base.yaml")
    assert caught.value.problems == ["extends: a: the key is repeated, in line 1 and line 2"]
    assert problems({"extends": 3}) == ["`extends` must be the path of a graph file, got a number"]


def test_merged() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": None}, "d": [2], "e": None}) == {
        "a": {"c": 2},
        "d": [2],
        "e": None,
    }


# Overrides


def graph() -> dict[str, Any]:
    return {"agents": {"a": {"type": "t", "max_steps": 1, "model": "m"}}}


def test_overrides_from_the_command_line_are_yaml() -> None:
    source = load_graph(
        graph(),
        overrides=[
            "agents.a.max_steps=3",
            "agents.a.model=x=y",
            "agents.a.autoscaling.max_replicas=2",
            "default_agent=a",
        ],
    )
    assert source.spec.raw() == {
        "agents": {"a": {"type": "t", "max_steps": 3, "model": "x=y", "autoscaling": {"max_replicas": 2}}},
        "default_agent": "a",
    }


def test_overrides_replace_delete_and_leave_the_source_alone() -> None:
    own = graph()
    source = load_graph(
        own, overrides={"agents.a.model": None, "agents.a.options": {"x": 1}, "agents.a.other": None}
    )
    assert source.spec.agents == {"a": {"type": "t", "max_steps": 1, "options": {"x": 1}, "other": None}}
    assert own == graph()


def test_overrides_reach_what_is_extended(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", SERVE_CONFIG)
    file = write(tmp_path / "g.yaml", "extends: base.yaml")
    assert load_graph(file, overrides=["models.policy.model=n"]).spec.models["policy"]["model"] == "n"


def test_overrides_that_name_nothing_are_all_reported() -> None:
    found = problems(
        graph(), overrides={"agents.b.x": 1, "agnts.a.x": 1, "models.a": {}, "agents.a.type.x": 1}
    )
    assert found == [
        "agents.b.x: unknown server 'b'; known: a",
        "agnts.a.x: unknown key 'agnts'; did you mean 'agents'?",
        "models.a: unknown server 'a'",
        "agents.a.type.x: 'type' must be a mapping, got a string",
    ]


def test_overrides_that_are_no_overrides() -> None:
    assert problems(graph(), overrides=["agents.a.x"]) == [
        "agents.a.x: an override must be path=value, e.g. agents.math_agent.max_steps=3"
    ]
    assert problems(graph(), overrides=["agents.a.x=[hunter2"]) == [
        "agents.a.x: the value is not valid YAML; quote it"
    ]
