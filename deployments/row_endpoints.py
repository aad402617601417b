"""`RowEndpointModel`: a model whose endpoint a rollout may bring with it, and who may bring which.

A trainer that hands out an endpoint per episode names it in the row (``_ng_model``). The request then goes
there, with the row's key and headers and none of the server's own (`gym_serve.deployments.connections`).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from gym_serve.deployments.endpoints import EndpointConfig
from gym_serve.deployments.upstream import UpstreamModel
from gym_serve.servers.context import current
from gym_serve.types.errors import BadRequest, EndpointMisconfigured
from gym_serve.types.model_endpoint import MODEL_FIELD, ModelEndpoint


class RowEndpointModel(UpstreamModel):
    """Base class of the models behind HTTP endpoints that rows may replace."""

    class Config(EndpointConfig):
        row_endpoints: bool | list[str] = False
        """Whether a rollout may bring the endpoint of its model with it (``_ng_model`` of its row, or
        ``rollouts(..., endpoint=)``), instead of this server's: ``true`` for any, or the hosts that may be
        named (``10.0.0.7`` or ``10.0.0.7:8000``). It gets the row's key, never this server's."""
        row_endpoints_over_http: bool = False
        """Likewise for rows that come through the graph's HTTP address: whoever may call the graph can then
        make it send requests to those hosts."""

    config: Config

    def check_endpoint(self, endpoint: ModelEndpoint) -> None:
        allowed = self.config.row_endpoints
        if not allowed:
            raise EndpointMisconfigured(
                f"{self.name} takes no endpoint from rows: set `row_endpoints` if their source is trusted"
            )
        if endpoint.over_http and not self.config.row_endpoints_over_http:
            raise BadRequest(f"{self.name} takes no endpoint (`{MODEL_FIELD}`) over HTTP")
        address = urlsplit(endpoint.base_url)
        if allowed is not True and not {address.netloc, address.hostname} & set(allowed):
            raise BadRequest(f"{self.name} takes no endpoint at {address.netloc}; see `row_endpoints`")

    @property
    def model_name(self) -> str:
        endpoint = current().endpoint
        return (endpoint and endpoint.model) or self.config.model
