"""How a server is deployed: the options of Ray Serve that any server of a graph takes.

They stand beside the settings of a server and keep Serve's names. None is "as by default".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import to_jsonable_python
from typing_extensions import Self

__all__ = ["MASK", "AutoscalingOptions", "GatewayOptions", "ServerOptions"]

MASK = "**********"
"""What stands where a secret was; the same as pydantic's."""

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_FORM = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

_SESSIONS = 64.0  # Serve's own default, 2 requests, suits a GPU model


class AutoscalingOptions(BaseModel):
    """How many replicas there are, by load. Delays are in seconds."""

    model_config = _FORM

    max_replicas: Annotated[int, Field(ge=1)]
    """Most replicas."""
    min_replicas: _Count | None = None
    """Fewest replicas; 0 scales to zero when idle. Serve's default is 1."""
    initial_replicas: _Count | None = None
    """Replicas at the start."""
    target_sessions: _Positive | None = None
    """Live sessions per replica that are aimed at; for agents and models, their calls. 64 if neither
    this nor ``target_ongoing_requests`` is given."""
    target_ongoing_requests: _Positive | None = None
    """Calls per replica that are aimed at, the waiting ones included, instead."""
    upscale_delay_s: _Amount | None = None
    """How long the load must be high before replicas are added."""
    downscale_delay_s: _Amount | None = None
    """How long the load must be low before replicas are removed."""
    downscale_to_zero_delay_s: _Amount | None = None
    """The same for the last replica."""
    upscaling_factor: _Positive | None = None
    """Multiplies each step up."""
    downscaling_factor: _Positive | None = None
    """Multiplies each step down."""
    look_back_period_s: _Positive | None = None
    """Window over which the load is measured."""
    aggregation_function: Literal["mean", "max", "min"] | None = None
    """How the load within the window becomes one number."""

    @property
    def fewest(self) -> int:
        """``min_replicas`` as it holds."""
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def sessions(self) -> float | None:
        """``target_sessions`` as it holds; None where ``target_ongoing_requests`` does instead."""
        if self.target_ongoing_requests is not None:
            return None
        return _SESSIONS if self.target_sessions is None else self.target_sessions

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low = self.fewest
        if low > self.max_replicas:
            raise ValueError(f"min_replicas ({low}) is more than max_replicas ({self.max_replicas})")
        if self.initial_replicas is not None and not low <= self.initial_replicas <= self.max_replicas:
            raise ValueError(
                f"initial_replicas ({self.initial_replicas}) is not between min_replicas ({low}) "
                f"and max_replicas ({self.max_replicas})"
            )
        if self.target_sessions is not None and self.target_ongoing_requests is not None:
            raise ValueError("target_sessions and target_ongoing_requests exclude each other: leave one out")
        return self


class ServerOptions(BaseModel):
    """Serve options of one server, each with Serve's name and meaning."""

    model_config = _FORM

    num_replicas: Annotated[int, Field(ge=1)] | None = None
    """Fixed number of replicas."""
    autoscaling: AutoscalingOptions | None = None
    """Number of replicas by load, instead."""
    max_ongoing_requests: Annotated[int, Field(ge=1)] | None = None
    """Calls that one replica works on at the same time (4,096)."""
    max_queued_requests: Annotated[int, Field(ge=-1)] | None = None
    """Calls that may wait at one replica (16,384); the caller of a further one is told to come back
    later (`Overloaded`). -1 is no limit."""
    num_cpus: _Amount | None = None
    """CPU cores per replica."""
    num_gpus: _Amount | None = None
    """GPUs per replica; a part of one shares it."""
    memory: _Amount | None = None
    """Memory per replica, in bytes."""
    resources: dict[str, _Amount] | None = Field(
        default=None, validation_alias=AliasChoices("resources", "ray_resources")
    )
    """Ray's custom resources per replica. Written ``ray_resources`` for a server that has a
    setting ``resources``, as agents do."""
    accelerator_type: str | None = None
    """Kind of GPU, e.g. ``H100``."""
    runtime_env: dict[str, Any] | None = Field(default=None, repr=False)
    """Ray's runtime environment of the replicas."""
    placement_group_bundles: Annotated[list[dict[str, _Amount]], Field(min_length=1)] | None = None
    """Resources that each replica reserves; the replica runs in the first bundle."""
    placement_group_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None
    """How the bundles are placed on nodes."""
    max_replicas_per_node: Annotated[int, Field(ge=1, le=100)] | None = None
    """Most replicas on one node."""
    health_check_period_s: _Positive | None = None
    """Seconds between health checks."""
    health_check_timeout_s: _Positive | None = None
    """Seconds until a health check has failed."""
    graceful_shutdown_timeout_s: _Amount | None = None
    """Seconds that a replica gets to finish its requests before it is killed."""
    graceful_shutdown_wait_loop_s: _Amount | None = None
    """Seconds between looks whether it has finished."""

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        pairs = [("num_replicas", "autoscaling"), ("placement_group_bundles", "max_replicas_per_node")]
        for one, other in pairs:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"{one} and {other} exclude each other: leave one out")
        if self.placement_group_strategy is not None and self.placement_group_bundles is None:
            raise ValueError("placement_group_strategy needs placement_group_bundles")
        return self

    def public(self) -> dict[str, Any]:
        """The options that are given, as JSON can hold them; environment variables are masked."""
        options: dict[str, Any] = to_jsonable_python(self, exclude_none=True, fallback=str)
        variables = options.get("runtime_env", {}).get("env_vars")
        if isinstance(variables, dict):
            options["runtime_env"]["env_vars"] = dict.fromkeys(variables, MASK)
        return options


class GatewayOptions(ServerOptions):
    """Serve options of the deployment that answers HTTP, and its own."""

    max_request_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Longest body of a request, in bytes; a longer one is refused with 413."""
