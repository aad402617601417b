"""Secrets in graphs: refused where they would show, and never shown."""

from pydantic import SecretStr
from support.graph_fakes import (
    graph,
    problems,
    resolved,
    with_policy,
)

SECRETS = {
    "api_key": "hunter2",
    "headers": {"X": "hunter2", "Y": "${K:-hunter2}", "Z": "Bearer ${K:-}"},
    "logins": [{"user": "u", "password": "hunter2"}],
}


def test_secrets_written_out_are_problems_in_a_file() -> None:
    remote = {"type": "http", "url": "http://h", "headers": {"A": "hunter2"}, "api_key": "${K}"}
    content = {**with_policy(**SECRETS), "auth_token": "hunter2"}
    content["resources"]["math"] = remote
    found = problems(content, literal_secrets=False, env={"K": "k"})
    assert [problem.partition(":")[0] for problem in found] == [
        "models.policy.api_key",
        "models.policy.headers.X",
        "models.policy.headers.Y",
        "models.policy.logins[0].password",
        "resources.math.headers.A",
        "auth_token",
    ]
    assert all("write a secret as ${NAME}" in problem for problem in found)
    assert "hunter2" not in str(found)
    del content["resources"]["math"]["headers"]
    assert resolved(content, env={"K": "k"}).nodes["policy"].settings["api_key"] == SecretStr("hunter2")


def test_a_secret_is_in_no_message() -> None:
    # The validator of `model` quotes its input, which is also the secret.
    content = with_policy(api_key="${K}", model="${K}")
    (problem,) = problems(content, env={"K": "hunter2 x"}, literal_secrets=False)
    assert problem == "models.policy.model: no spaces in **********"
    content = {**with_policy(api_key=["hunter2"], headers={"X": 12345}), "auth_token": 12345}
    found = str(problems(content))
    assert "hunter2" not in found
    assert "12345" not in found


def test_an_empty_token_never_opens_a_graph() -> None:
    assert problems(graph(auth_token="")) == [
        "auth_token: must be a non-empty string, got an empty one; leave the key out for an open graph"
    ]
    assert problems(graph(auth_token="${T}"), env={"T": ""}) == [
        "auth_token: environment variable T is empty; export it, put it into .env, or write ${T:-default}"
    ]
