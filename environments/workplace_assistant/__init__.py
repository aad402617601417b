"""`WorkplaceAssistant`: tasks in an office, graded by the state that it ends in.

The verifier runs the calls of the response in a fresh office, the row's solution in another one, and compares
the two. Any way to the right end state is right, and an additional call is wrong if it changes anything.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator

from gym_serve.environments.workplace_assistant.tools import Office, OfficeTools, differing_tables
from gym_serve.grading import arguments_of
from gym_serve.metrics import Breakdown, MetricSpec, Score
from gym_serve.servers import ResourcesServer, Verdict, VerifyRequest
from gym_serve.types.errors import InvalidRequest, Rejected
from gym_serve.types.requests import JSON, parse

_MAX_CALLS = 500


class SolutionCall(BaseModel):
    """A call of the row's solution."""

    name: str
    arguments: Annotated[str, BeforeValidator(lambda a: json.dumps(a) if isinstance(a, dict) else a)] = "{}"
    """Its arguments as JSON; an object will do as well."""


class WorkplaceRequest(VerifyRequest):
    """A row with the response to it."""

    ground_truth: list[SolutionCall]  # calls that lead to the right end state; none: nothing is to be changed
    category: str | None = None


class WorkplaceVerdict(Verdict):
    """The reward and what it was given for."""

    differing_tables: list[str]  # tables whose end state is wrong
    num_calls: int
    num_failed_calls: int


class WorkplaceAssistant(OfficeTools, ResourcesServer):
    """Tasks in an office: reward 1.0 for the right end state, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    extra_arguments: ClassVar[Literal["forbid"]] = "forbid"  # as the original's, which are plain functions
    metrics: ClassVar[MetricSpec] = MetricSpec(
        scores=(Score("accuracy"),), breakdowns=(Breakdown("category", prefix="category_"),)
    )

    class Session(Office):
        """The office of an episode."""

    async def verify(self, request: WorkplaceRequest) -> WorkplaceVerdict:
        """Compare the office after the response's calls with that after the solution's."""
        wanted = Office()
        for index, call in enumerate(request.ground_truth):
            try:
                await self._apply(call.model_dump(), wanted)
            except Rejected as error:
                raise InvalidRequest(f"ground_truth.{index}: {error.message}") from None
        office = Office()
        failed = 0
        calls = request.response.function_calls
        tools = request.responses_create_params.get("tools")
        offered = [tool.get("name") for tool in tools if isinstance(tool, dict)] if tools else None
        for item in calls[:_MAX_CALLS]:
            try:
                if offered is not None and item.get("name") not in offered:
                    raise InvalidRequest("the row does not offer this tool")
                await self._apply(item, office)
            except Rejected:
                failed += 1  # it changed nothing, and the model was told
        different = differing_tables(wanted, office)
        reason = f"these tables should be otherwise: {', '.join(different)}" if different else None
        if len(calls) > _MAX_CALLS:  # what the others did is not looked at
            reason = f"there are {len(calls)} calls; at most {_MAX_CALLS} can be right"
        return WorkplaceVerdict(
            reward=float(reason is None),
            reason=reason,
            differing_tables=different,
            num_calls=len(calls),
            num_failed_calls=failed,
        )

    async def _apply(self, call: JSON, office: Office) -> None:
        name = call.get("name")
        spec = self.tools.get(name) if isinstance(name, str) else None
        decoded = arguments_of(call)
        if spec is None or decoded is None:
            raise InvalidRequest(
                f"there is no tool {str(name)[:100]!r}, or its arguments are not a JSON object"
            )
        arguments: Any = parse(spec.arguments, decoded, "arguments")
        values = {field: getattr(arguments, field) for field in type(arguments).model_fields}
        await getattr(self, spec.name)(**values, session=office)
