"""Serve's own policy, on what the replicas report."""

import pickle
import warnings
from typing import Any

import pytest
from ray.serve import config as serve_config

from gym_serve.cluster.autoscaling import CALLS, SESSIONS, by_calls, by_sessions
from gym_serve.cluster.deploy import build
from gym_serve.cluster.serve_compat import autoscaling_config


def context(
    sessions: list[float],
    *,
    target: float = 8,
    requests: float = 0,
    calls: float = 0,
    goal: int | None = None,
) -> Any:
    policy = "gym_serve.cluster.autoscaling:by_sessions"
    return serve_config.AutoscalingContext(
        deployment_id=None, deployment_name="env", app_name="app",
        current_num_replicas=len(sessions), target_num_replicas=len(sessions) if goal is None else goal,
        running_replicas=[], total_num_requests=requests, total_queued_requests=requests,
        aggregated_metrics={SESSIONS: dict(enumerate(sessions)), CALLS: {0: calls}}, raw_metrics={},
        capacity_adjusted_min_replicas=0, capacity_adjusted_max_replicas=9, policy_state={},
        last_scale_up_time=None, last_scale_down_time=None, current_time=0.0,
        config=autoscaling_config(policy, min_replicas=0, max_replicas=9, target_ongoing_requests=target),
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    ("sessions", "wanted"),
    [([8], 1), ([32], 4), ([9, 7], 2), ([8, 8, 8, 8], 4), ([1, 1, 0, 0], 0.25), ([0.1], 0.0125), ([0, 0], 0)],
)
def test_as_many_replicas_as_sessions_need(sessions: list[float], wanted: float) -> None:
    """Serve rounds up, so that one session keeps one replica."""
    assert by_sessions(context(sessions))[0] == pytest.approx(wanted)


def test_calls_that_serve_counts_do_not_matter() -> None:
    assert by_sessions(context([8, 8], requests=1000))[0] == 2
    assert by_calls(context([0, 0, 0], requests=1000, calls=16))[0] == pytest.approx(2)


def test_replicas_that_have_not_reported_yet() -> None:
    silent = context([8])
    silent.aggregated_metrics = {}
    assert by_sessions(silent)[0] == 0


def test_a_request_at_serve_wakes_a_deployment_without_replicas() -> None:
    assert by_sessions(context([], requests=1))[0] == 1
    assert by_sessions(context([], requests=0, goal=0))[0] == 0
    assert by_sessions(context([], requests=0, goal=2))[0] == 2  # they are starting


def test_the_controller_needs_no_gym_serve() -> None:
    policy: Any = autoscaling_config("gym_serve.cluster.autoscaling:by_calls").policy
    pickled = policy.get_serialized_policy_def()
    assert b"ray.serve" in pickled
    opcodes = pickle.loads(pickled)
    assert opcodes.__name__ == "by_calls"
    assert b"cgym_serve" not in pickled


def test_reports_come_within_the_window_and_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = "gym_serve.cluster.autoscaling:by_calls"
        assert autoscaling_config(policy, look_back_period_s=6.0).metrics_interval_s == 2.0
        assert autoscaling_config(policy).metrics_interval_s == 10.0


@pytest.mark.parametrize(
    ("options", "policy", "target"),
    [
        ({"target_sessions": 8}, "by_sessions", 8),
        ({"target_ongoing_requests": 3}, "by_calls", 3),
        ({}, "by_sessions", 64),
    ],
)
def test_the_options_of_a_graph(options: dict[str, Any], policy: str, target: float) -> None:
    from gym_serve.graph import GraphSpec, resolve

    env = {"type": "mcqa", "autoscaling": {"min_replicas": 0, "max_replicas": 4, **options}}
    application = build(resolve(GraphSpec(resources={"env": env})))
    (deployment,) = [d for d in _deployments(application) if d.name == "env"]
    config = deployment._deployment_config.autoscaling_config
    assert config.policy.policy_function.endswith(policy)
    assert (config.target_ongoing_requests, config.min_replicas, config.max_replicas) == (target, 0, 4)
    assert deployment._deployment_config.max_queued_requests == 16_384


def test_the_gateway_goes_by_the_requests_that_serve_sees() -> None:
    from gym_serve.graph import GraphSpec, resolve

    options = {"num_cpus": 1, "autoscaling": {"max_replicas": 4, "target_ongoing_requests": 100}}
    deployment = build(resolve(GraphSpec(gateway=options)))._bound_deployment
    config = deployment._deployment_config.autoscaling_config
    assert config.policy.policy_function == "ray.serve.autoscaling_policy:default_autoscaling_policy"
    assert (config.target_ongoing_requests, config.max_replicas) == (100, 4)
    assert deployment.ray_actor_options["num_cpus"] == 1


def _deployments(application: Any) -> list[Any]:
    handles = application._bound_deployment.init_args[1]
    return [bound._bound_deployment for bound in handles.values()]
