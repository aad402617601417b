"""The choice of ``if`` between two forms of a server."""

from typing import Any

import pytest
from support.graph_fakes import (
    FakeModel,
    graph,
    problems,
    resolved,
)

CHOICE = {
    "if": "${URL:-}",
    "then": {"type": FakeModel, "model": "${M}", "base_url": "${URL}"},
    "else": {"type": FakeModel, "model": "small"},
    "temperature": 0.5,
}


def test_the_choice_of_if() -> None:
    content = graph(models={"policy": CHOICE})
    assert resolved(content).nodes["policy"].settings == {"model": "small", "temperature": 0.5}
    chosen = resolved(content, env={"URL": "u", "M": "big"}).nodes["policy"]
    assert chosen.settings == {"model": "big", "base_url": "u", "temperature": 0.5}
    assert problems(content, env={"URL": "u"}) == [
        "models.policy.then.model: environment variable M is not set; "
        "export it, put it into .env, or write ${M:-default}"
    ]


@pytest.mark.parametrize(
    ("value", "branch"),
    [
        ("yes", "then"),
        (True, "then"),
        (2, "then"),
        ("False", "else"),
        ("0", "else"),
        (None, "else"),
        (0, "else"),
    ],
)
def test_what_counts_as_no(value: Any, branch: str) -> None:
    content = graph(models={"policy": {**CHOICE, "if": value, "then": {"type": FakeModel, "model": "big"}}})
    assert resolved(content).nodes["policy"].settings["model"] == {"then": "big", "else": "small"}[branch]


def test_a_server_without_its_branch_is_not_in_the_graph() -> None:
    content = graph()
    content["models"]["judge"] = {"if": "${J:-}", "then": {"type": FakeModel, "model": "${J}"}}
    content["resources"]["math"] |= {"if": "${J:-}", "then": {"judge": "judge"}}
    assert list(resolved(content).nodes) == ["policy", "math", "math_agent"]
    assert resolved(content, env={"J": "x"}).nodes["math"].references == {"judge": "judge"}


def test_problems_of_a_choice() -> None:
    broken = {"if": 1, "then": {"type": FakeModel, "modle": "m", "autoscaling": {"max_replica": 1}}}
    content = graph(
        models={"policy": broken, "b": {"then": {}, "type": FakeModel, "model": "m"}, "c": {"if": "${X}"}}
    )
    content["models"]["d"] = {"if": 1, "then": [1]}
    assert problems(content) == [
        "models.policy.model: a required setting is missing",
        "models.policy.then.modle: unknown setting; did you mean 'model'?",
        "models.policy.then.autoscaling.max_replicas: a required setting is missing",
        "models.policy.then.autoscaling.max_replica: unknown setting; did you mean 'max_replicas'?",
        "models.b.then: needs an 'if' beside it",
        "models.c.if: environment variable X is not set; export it, put it into .env, or write ${X:-default}",
        "models.d.then: must be a mapping, got a list",
    ]
