"""`resolve`: what sound graphs become, and that any content is resolved or refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from support.graph_fakes import (
    FakeAgent,
    FakeEnvironment,
    FakeModel,
    graph,
    resolved,
)

from gym_serve.graph.resolving import resolve
from gym_serve.graph.spec import GraphSpec
from gym_serve.types.errors import GraphError


def test_nodes() -> None:
    content = graph(
        models={
            "policy": {
                "type": FakeModel,
                "model": "${M}",
                "api_key": "${K}",
                "temperature": "0.5",
                "num_gpus": 1,
            }
        }
    )
    content["agents"]["math_agent"] |= {
        "inline": ["math"],
        "num_replicas": "${N:-2}",
        "ray_resources": {"tpu": 1},
    }
    result = resolved(content, env={"M": "q", "K": "sk-1"}, literal_secrets=False)
    policy, math, agent = result.nodes.values()
    assert (policy.name, policy.kind, policy.type) == ("policy", "model", "support.graph_fakes:FakeModel")
    assert policy.cls is FakeModel
    assert policy.settings == {"model": "q", "api_key": SecretStr("sk-1"), "temperature": 0.5}
    assert (policy.options.num_gpus, policy.references, policy.inline) == (1, {}, ())
    assert (math.kind, math.settings) == ("resources", {})
    assert agent.references == {"model": "policy", "resources": "math"}
    assert agent.settings == agent.references
    assert agent.inline == ("math",)
    assert (agent.options.num_replicas, agent.options.resources) == (2, {"tpu": 1})
    assert result.default_agent == "math_agent"
    assert result.auth_tokens == ()


def test_references_in_lists_mappings_and_unions() -> None:
    content = graph(
        resources={"math": {"type": FakeEnvironment, "judges": ["policy", "b"], "panel": {"strict": "b"}}}
    )
    content["models"]["b"] = {"type": FakeModel, "model": "n"}
    content["agents"]["second"] = {
        "type": FakeAgent,
        "model": "b",
        "resources": "math",
        "critic": "math_agent",
    }
    result = resolved(content)
    assert result.nodes["math"].references == {"judges[0]": "policy", "judges[1]": "b", "panel.strict": "b"}
    assert result.nodes["second"].references["critic"] == "math_agent"
    assert result.default_agent is None


def test_types_by_import_path_and_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gs_user_env.py").write_text(
        "from support.graph_fakes import FakeEnvironment\n\n"
        "class Outer:\n    class Mine(FakeEnvironment): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    content = graph(resources={"math": {"type": "gs_user_env:Outer.Mine"}})
    content["agents"]["math_agent"]["type"] = "simple_agent"
    nodes = resolved(content).nodes
    assert nodes["math"].cls is sys.modules["gs_user_env"].Outer.Mine
    assert nodes["math"].type == "gs_user_env:Outer.Mine"
    assert nodes["math_agent"].cls is not None
    assert nodes["math_agent"].cls.__name__ == "SimpleAgent"


def test_a_remote_server() -> None:
    remote = {"type": "http", "url": "https://h:1/x/", "headers": {"X-Team": "${T}"}, "api_key": "${K}"}
    node = resolved(graph(models={"policy": remote}), env={"T": "t", "K": "k"}, literal_secrets=False).nodes[
        "policy"
    ]
    assert (node.cls, node.url, node.settings) == (None, "https://h:1/x", {})
    assert {key: value.get_secret_value() for key, value in node.headers.items()} == {
        "X-Team": "t",
        "Authorization": "Bearer k",
    }


def test_extends_and_dotenv_stand_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("GS_RESOLVE_M=from-dotenv\n")
    (tmp_path / "base.yaml").write_text(
        "models: {policy: {type: 'support.graph_fakes:FakeModel', model: '${GS_RESOLVE_M}'}}"
    )
    result = resolve(GraphSpec(extends="base.yaml"), base_dir=tmp_path)
    assert result.nodes["policy"].settings == {"model": "from-dotenv"}


def test_default_agent_and_auth_token() -> None:
    content = graph(default_agent="${A:-math_agent}", auth_token="${T}")
    result = resolved(content, env={"T": "secret"}, literal_secrets=False)
    assert result.default_agent == "math_agent"
    assert result.auth_tokens == (SecretStr("secret"),)
    assert resolved(graph(auth_token="plain")).auth_tokens == (SecretStr("plain"),)
    assert resolved(graph(auth_token="${T:-}", default_agent="${A:-}")).auth_tokens == ()


def test_several_tokens_of_which_some_are_not_given() -> None:
    content = graph(auth_token=["${NEW}", "${OLD:-}", "${OLDER:-}"])
    result = resolved(content, env={"NEW": "n", "OLDER": "o"}, literal_secrets=False)
    assert result.auth_tokens == (SecretStr("n"), SecretStr("o"))


def test_insecure_is_a_choice_of_its_own() -> None:
    assert not resolved(graph()).insecure
    assert resolved(graph(insecure=True)).insecure
    assert resolved(graph(insecure="${OPEN}"), env={"OPEN": "true"}).insecure
    assert not resolved(graph(insecure="${OPEN:-}")).insecure


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.sampled_from(["a", "b", "c", "${X}", "${Y:-a}", "", "http://h"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "max_replicas"]), inner)
    ),
    max_leaves=4,
)
_KEYS = [
    "model",
    "resources",
    "judge",
    "judges",
    "panel",
    "critic",
    "api_key",
    "headers",
    "logins",
    "inline",
    "if",
]
_KEYS += ["then", "else", "url", "autoscaling", "num_replicas", "runtime_env", "session_ttl", "typo"]
_TYPES = st.sampled_from([FakeModel, FakeEnvironment, FakeAgent, "http", "nope", None])
_SERVERS = st.builds(
    lambda type_, keys: {"type": type_, **keys},
    _TYPES,
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=5),
)
_SECTIONS = (
    st.dictionaries(st.sampled_from(["a", "b", "c", "run", 1]), _SERVERS | _VALUES, max_size=3) | _VALUES
)
_SPECS = st.dictionaries(st.sampled_from(["models", "resources", "agents"]), _SECTIONS) | st.dictionaries(
    st.sampled_from(["default_agent", "auth_token", "unknown"]), _VALUES
)


@settings(deadline=None)
@given(_SPECS, st.booleans())
def test_any_content_resolves_or_is_a_graph_error(content: dict[str, Any], literal_secrets: bool) -> None:
    try:
        result = resolved(content, literal_secrets=literal_secrets)
    except GraphError:
        return
    json.dumps(result.public())
    assert set(result.order()) == set(result.nodes)
