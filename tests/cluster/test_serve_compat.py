"""Ray's private parts: that they do what `serve_compat` uses them for. No cluster."""

from ray import serve
from ray.serve._private.config import DeploymentConfig

from gym_serve.cluster.serve_compat import with_version


@serve.deployment(max_ongoing_requests=7)
class Server:
    pass


def test_a_version_stays_when_serve_writes_its_own() -> None:
    versioned = with_version(Server, "v1")
    config = versioned._deployment_config
    assert isinstance(config, DeploymentConfig)
    config.version = "of the whole application"
    config.max_ongoing_requests = 8
    assert (config.version, config.max_ongoing_requests) == ("v1", 8)
    sent = DeploymentConfig.from_proto_bytes(config.to_proto_bytes())
    assert (sent.version, sent.max_ongoing_requests) == ("v1", 8)


def test_the_deployment_that_was_given_is_left_alone() -> None:
    versioned = with_version(Server, "v1")
    given = Server._deployment_config
    assert (type(given), given.version, given.max_ongoing_requests) == (DeploymentConfig, None, 7)
    assert versioned.name == Server.name
