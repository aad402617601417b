"""`StructuredOutputs`: documents and tool calls that have to fit a schema.

Only the form is scored, never the content. A model's mistake is a reward of 0 with an ``error_type``, also if
the document is too large for the validator. A row with a broken schema is `InvalidRequest`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import PositiveFloat, PositiveInt

from gym_serve.environments.structured_outputs.worker import MAX_CHARS, Checked, Document, Format
from gym_serve.metrics import Breakdown, MetricSpec, Score
from gym_serve.servers import ResourcesServer, Response, Verdict, VerifyRequest
from gym_serve.types.errors import InvalidRequest
from gym_serve.workers import WorkerPool, WorkFailed

_WORK = Path(__file__).with_name("worker.py")

_OfText = Literal["empty_response", "parse_error", "validation_error", "limit_exceeded", "api_error"]
_OfCalls = Literal["missing_tool_call", "multiple_tool_calls", "wrong_tool_name"]
ErrorType = _OfText | _OfCalls | Literal["tool_arguments_parse_error", "missing_tool_payload_key"]


class StructuredRequest(VerifyRequest):
    """A row with the response to it. Its further keys describe the data and split the metrics."""

    schema_str: str  # the schema as JSON (draft 2020-12)
    strict: bool = True
    """Every listed property is required, and no other is allowed; see README.md. Else the schema as it is."""
    schema_type: Format = "json"  # format of the document in the text
    response_mode: str | None = "text"
    """``tool_call``: the value is the arguments of a function call; else it is the text."""
    tool_name: str | None = None  # name that the call has to have; None for any
    tool_payload_key: str | None = None
    """The argument that holds the value; None if all arguments are the value."""


class StructuredVerdict(Verdict):
    """The reward, and why it is 0."""

    error_type: ErrorType | None = None
    error_message: str | None = None


class _Fault(NamedTuple):
    kind: ErrorType
    message: str


_STYLES = (
    *("response_mode", "tool_schema_mode", "tool_choice", "parallel_tool_calls", "num_tools"),
    *("has_distractors", "instruction_layout", "instruction_detail_level", "system_instruction_style"),
    *("tool_name_style", "distractor_style", "tool_union_mode"),
)
_DESCRIPTIONS = (
    Breakdown("schema_type", missing="unknown"),
    Breakdown("problem_type"),
    Breakdown("schema_repr", prefix="repr_"),
    *(Breakdown(field, prefix=f"{field}_") for field in _STYLES),
)


class StructuredOutputs(ResourcesServer):
    """Documents and tool calls: reward 1.0 if they fit the row's schema, else 0.0."""

    reverify_mode: ClassVar[Literal["stateless"]] = "stateless"
    metrics: ClassVar[MetricSpec] = MetricSpec(scores=(Score("accuracy"),), breakdowns=_DESCRIPTIONS)

    class Config(ResourcesServer.Config):
        xml_coerce_types: bool = True
        """Read the text of XML elements as the types of the schema; else all of them are strings."""
        validation_timeout_seconds: PositiveFloat = 5.0
        """Seconds of CPU time that checking one answer may take; one that takes longer is wrong."""
        num_workers: PositiveInt = 2
        """Processes that do it, each using up to one core; read at the start only."""
        worker_memory_mb: PositiveInt = 1024
        """Address space of one such process in MiB; read at the start only."""

    config: Config

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        config = self.config
        self._pool = self.manage(
            WorkerPool("validation", _WORK, config.num_workers, memory_bytes=config.worker_memory_mb << 20)
        )

    async def verify(self, request: StructuredRequest) -> StructuredVerdict:
        """Find the value, and check it against the schema."""
        text = self._text_of(request)
        fault = await self._fault_of(text, request) if isinstance(text, str) else text
        if fault is None:
            return StructuredVerdict(reward=1.0)
        message = fault.message[:500]
        reason = f"{fault.kind.replace('_', ' ')}: {message}"
        return StructuredVerdict(reward=0.0, reason=reason, error_type=fault.kind, error_message=message)

    def _text_of(self, request: StructuredRequest) -> str | _Fault:
        if request.response_mode == "tool_call":
            return _arguments(request.response, request.tool_name)
        text = request.response.output_text
        if not text.strip():
            return _Fault("empty_response", "there is no text")
        limit = MAX_CHARS[request.schema_type]
        return text if len(text) <= limit else _Fault("parse_error", f"longer than {limit} characters")

    async def _fault_of(self, text: str, request: StructuredRequest) -> _Fault | None:
        called = request.response_mode == "tool_call"
        document: Document = {
            "schema": request.schema_str,
            "strict": request.strict,
            "text": text,
            "format": None if called else request.schema_type,
            "key": (request.tool_payload_key or None) if called else None,
            "coerce": self.config.xml_coerce_types,
        }
        try:
            checked: Checked = await self._pool.run(
                document, cpu_seconds=self.config.validation_timeout_seconds
            )
        except WorkFailed as failure:
            return _Fault("limit_exceeded", f"to check it, {failure}")
        if "fault" not in checked:
            return None
        if checked["fault"] == "invalid_row":
            raise InvalidRequest(checked["message"])
        return _Fault(checked["fault"], checked["message"])


def _arguments(response: Response, tool: str | None) -> str | _Fault:
    """The arguments of the only function call of a response, or what is wrong with it."""
    if failure := (response.model_extra or {}).get("error"):
        return _Fault("api_error", str(failure))
    calls = response.function_calls
    names = ", ".join(str(call.get("name")) for call in calls[:10])
    if not calls:
        return _Fault("missing_tool_call", "there is no function call")
    if len(calls) > 1:
        return _Fault("multiple_tool_calls", f"one function call is expected, not {names}")
    if tool and names != tool:
        return _Fault("wrong_tool_name", f"a call of {tool} is expected, not {names}")
    raw = calls[0].get("arguments")
    arguments = "{}" if raw is None or str(raw).strip() in ("", "null") else str(raw)
    limit = MAX_CHARS["json"]
    if len(arguments) > limit:
        return _Fault("tool_arguments_parse_error", f"longer than {limit} characters")
    return arguments
