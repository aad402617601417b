"""`vllm_engine`: vLLM inside a replica, for policies, judges and reward models.

The replica holds vLLM's engine and vLLM's own application, and calls that in its own process: chat template,
parsers and sampling are vLLM's. With ``runner: pooling`` it answers ``classify`` and ``pooling`` instead. Not
``ray.serve.llm``: it pins its own vLLM, has no Responses route and no token routes. ``num_gpus`` is for each
of ``tensor_parallel_size`` workers, which get a bundle of the replica's placement group each.

vLLM inside a replica: policies, judges and reward models (see `server`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from gym_serve.deployments.chat_streams import Whole, joined
from gym_serve.deployments.token_model import EngineModel, missing_model
from gym_serve.deployments.vllm_engine._vllm import command_line, problem_of
from gym_serve.deployments.vllm_engine.transport import InProcess
from gym_serve.servers.base import Operation
from gym_serve.servers.context import closing
from gym_serve.servers.model import PauseMode
from gym_serve.types.errors import BadRequest, GraphError, InvalidRequest, NotFound, Unavailable
from gym_serve.types.requests import JSON

__all__ = ["VLLMEngine"]


_TAKEN = {
    "model": "model",
    "served_model_name": "model",
    "runner": "runner",
    "tensor_parallel_size": "tensor_parallel_size",
    "reasoning_parser": "reasoning_parser",
    "enable_lora": "lora_adapters",
    "worker_extension_cls": "weight_updates",
    "distributed_executor_backend": "tensor_parallel_size",
}
_GENERATING = ("v1/completions", "detokenize", "inference/v1/generate", "v1/chat/completions/render")
_POOLING = ("classify", "pooling", "score", "v1/embeddings")
_EXTENSION = "gym_serve.deployments.vllm_engine.worker_extension.WeightsExtension"
_STREAMING = ("stream", "stream_options")


class VLLMEngine(EngineModel):
    """A model on vLLM in the server's own process."""

    requires: ClassVar[Mapping[str, str]] = {"vllm": "gym-serve[vllm]"}

    class Config(EngineModel.Config):
        model: str
        """Folder or name of the model."""
        runner: Literal["generate", "pooling"] = "generate"
        """``generate`` text, or score it with ``pooling`` (reward models, classifiers)."""
        tensor_parallel_size: int = Field(1, ge=1)
        """GPUs that share the model; ``num_gpus`` is for each."""
        engine_args: JSON = Field(default_factory=dict)
        """Further engine arguments with vLLM's names, e.g. ``{max_model_len: 8192}``."""
        tool_call_parser: str | None = None
        """How the model writes tool calls, e.g. ``hermes``; None leaves them in the text."""
        reasoning_parser: str | None = None
        """How it writes its reasoning, e.g. ``qwen3``."""
        chat_template: str | None = None
        """File of a chat template to use instead of the model's."""
        lora_adapters: dict[str, str] = Field(default_factory=dict)
        """Folders of LoRA adapters by name; a request names one as its ``model``, else it is answered by the
        model without any."""
        drain_timeout: float = Field(30.0, ge=0)
        """Seconds that running generations get when the server stops."""

        @field_validator("engine_args")
        @classmethod
        def _known(cls, settings: JSON) -> JSON:
            problems = [problem for name in settings if (problem := problem_of(name, _TAKEN))]
            if problems:
                raise ValueError("; ".join(problems))
            return settings

    config: Config

    @classmethod
    def preflight(cls, config: Config) -> Iterable[str]:
        yield from super().preflight(config)
        yield from missing_model("model", config.model)
        for name, folder in config.lora_adapters.items():
            yield from missing_model(f"lora_adapters.{name}", folder)

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name, **settings)
        self._running: Any = None
        self._http: InProcess | None = None
        self._asleep = False

    @classmethod
    def deployment_options(cls, settings: Mapping[str, Any], options: Mapping[str, Any]) -> JSON:
        workers, gpus = int(settings.get("tensor_parallel_size", 1)), options.get("num_gpus") or 0
        if workers == 1 or not gpus or options.get("placement_group_bundles"):
            return {}
        kind = {f"accelerator_type:{a}": 0.001 for a in [options.get("accelerator_type")] if a}
        first = {"CPU": float(options.get("num_cpus", 1)), "GPU": float(gpus), **kind}
        rest = [{"GPU": float(gpus), **kind} for _ in range(workers - 1)]
        # The workers take the GPUs of the bundles; the replica itself takes none.
        return {"num_gpus": 0, "accelerator_type": None, "placement_group_bundles": [first, *rest]}

    async def start(self) -> None:
        """Start the engine and generate once, so that the first call finds it warm."""
        try:
            from gym_serve.deployments.vllm_engine import _vllm

            on_ray = self.config.tensor_parallel_size > 1 and not _vllm.is_cpu()
            self._running = await _vllm.start_engine(self.command_line(on_ray=on_ray), on_ray=on_ray)
        except ModuleNotFoundError as error:
            raise GraphError(
                f"vllm_engine needs {error.name} where its replicas run: pip install 'gym-serve[vllm]' "
                "(on a CPU, see docs/engines.md)"
            ) from None
        except SystemExit:
            raise GraphError("vLLM does not take its arguments; the replica's log has its message") from None
        self.ends = self._running.ends
        self._http = InProcess(self._running.app)
        if self.config.runner == "generate":
            await self._http.post("/v1/completions", {"model": self.name, "prompt": [0], "max_tokens": 1})
        else:
            await self._engine.llm.check_health()

    async def stop(self) -> None:
        if self._running is not None:
            llm, self._running = self._running.llm, None
            await asyncio.to_thread(llm.shutdown, self.config.drain_timeout)

    async def check_health(self) -> None:
        await super().check_health()
        await self._engine.llm.check_health()

    def model_names(self) -> list[str]:
        return [self.name, *self.config.lora_adapters]

    def command_line(self, *, on_ray: bool = False) -> list[str]:
        """The engine's arguments as vLLM's command line has them."""
        config = self.config
        arguments: JSON = {
            "model": config.model,
            "served_model_name": self.name,
            "runner": config.runner,
            "tensor_parallel_size": config.tensor_parallel_size,
            "distributed_executor_backend": "ray" if on_ray else None,
            "reasoning_parser": config.reasoning_parser,
            "worker_extension_cls": _EXTENSION if config.weight_updates else None,
            "chat_template": config.chat_template,
            "disable_log_stats": True,
        }
        if config.runner == "generate":
            # Trainers need the probabilities of the distribution that was sampled from.
            arguments |= {"logprobs_mode": "processed_logprobs", "enable_scale_out": True}
            arguments |= {"enable_prompt_tokens_details": True}  # usage says what the prefix cache had
        if config.tool_call_parser is not None:
            arguments |= {"enable_auto_tool_choice": True, "tool_call_parser": config.tool_call_parser}
        if config.lora_adapters:
            adapters = [{"name": name, "path": path} for name, path in config.lora_adapters.items()]
            arguments |= {"enable_lora": True, "lora_modules": adapters}
        return command_line({**arguments, **config.engine_args})

    def operations(self) -> dict[str, Operation]:
        operations = super().operations()
        pooling = self.config.runner == "pooling"
        if pooling:
            kept = ("v1/models", "weights/update", "weights/pause", "weights/resume")
            operations = {op: operation for op, operation in operations.items() if op in kept}
        body = {"type": "object"}
        for op in _POOLING if pooling else _GENERATING:
            operations[op] = Operation(partial(self._pass_on, op), f"vLLM's /{op}", body, body)
        if self.config.engine_args.get("enable_sleep_mode"):
            operations["weights/sleep"] = Operation(self._op_sleep, "Give the GPU's memory free", None, body)
            operations["weights/wake"] = Operation(self._op_wake, "Take it back, and go on", None, body)
        return operations

    async def complete(self, chat: JSON, prompt: list[int] | None) -> JSON | None:
        body = self._chat(chat, prompt)
        completion: JSON | None = await self._client.post("/v1/chat/completions", body)
        return completion

    async def stream(self, chat: JSON, prompt: list[int] | None) -> AsyncGenerator[JSON | Whole, None]:
        body = self._chat(chat, prompt) | {"stream": True, "stream_options": {"include_usage": True}}
        async with closing(joined(self._client.stream("/v1/chat/completions", body))) as items:
            async for item in items:
                yield item

    def _chat(self, chat: JSON, prompt: list[int] | None) -> JSON:
        body = {key: value for key, value in chat.items() if key not in _STREAMING and value is not None}
        body["model"] = self._model_of(chat)
        if not body.get("top_logprobs"):
            body.pop("top_logprobs", None)
        else:
            body["logprobs"] = True  # Responses implies it, chat refuses the one without the other
        if self.config.return_token_ids:
            body |= {"return_token_ids": True, "logprobs": True}
        if prompt is not None:
            body["kv_transfer_params"] = {"prompt_token_ids": prompt}  # vLLM's way to give a chat its tokens
        return body

    async def render(self, chat: JSON, messages: list[JSON]) -> list[int]:
        template = {k: chat[k] for k in ("tools", "chat_template_kwargs") if chat.get(k)}
        body = {"model": self.name, "messages": messages, "add_generation_prompt": True, **template}
        answer = await self._client.post("/tokenize", body)
        tokens: list[int] = answer["tokens"] if answer is not None else []
        return tokens

    async def load(self, weights: Path | bytes) -> None:
        if self._asleep:
            raise BadRequest(f"{self.name} sleeps, and its weights are not on the GPU: wake it first")
        if self._engine.frozen_head:
            raise BadRequest(
                "on a CPU, vLLM keeps the old output layer of a model with tied embeddings: "
                "use one with tie_word_embeddings: false"
            )
        llm = self._engine.llm
        if isinstance(weights, bytes):
            await llm.collective_rpc("load_named_tensors", args=(weights,))
        elif not await asyncio.to_thread(weights.exists):
            raise BadRequest(f"no weights at {weights} on the machine of this replica")
        else:
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})
        if self.config.runner == "generate":
            await llm.reset_prefix_cache()

    @property
    def running(self) -> int:
        from gym_serve.deployments.vllm_engine._vllm import unfinished

        return unfinished(self._engine.llm)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.llm.pause_generation(mode=mode)

    async def resume(self) -> None:
        if not self._asleep:
            await self._engine.llm.resume_generation()

    async def _op_sleep(self, body: Any) -> JSON:
        """Move the weights to the machine's memory and drop the cache; generations wait, and are computed
        again from their tokens when the engine wakes.
        """
        async with self._updating:
            await self._engine.llm.sleep(level=1, mode="keep")
            self._asleep = True
        return {"asleep": True}

    async def _op_wake(self, body: Any) -> JSON:
        async with self._updating:
            await self._engine.llm.wake_up()
            self._asleep = False
            if self._held:
                await self.pause("keep")
        return {"asleep": False}

    @property
    def _engine(self) -> Any:
        if self._running is None:
            raise Unavailable("the engine is not running: call start() first")
        return self._running

    def _model_of(self, body: JSON) -> str:
        adapters, model = self.config.lora_adapters, body.get("model")
        if not adapters or model in (None, "", self.name, self.config.model):
            return self.name
        if not isinstance(model, str) or model not in adapters:
            raise NotFound(f"model: {str(model)[:100]!r} is none of {', '.join(self.model_names())}")
        return model

    async def _pass_on(self, op: str, body: Any) -> Any:
        if not isinstance(body, dict):
            raise InvalidRequest(f"the body of {op} must be an object, got {type(body).__name__}")
        params = {key: value for key, value in body.items() if key not in _STREAMING}
        answer = await self._client.post(f"/{op}", {**params, "model": self._model_of(body)})
        if answer is None:
            raise BadRequest("the prompt does not fit the model's context")
        return answer

    @property
    def _client(self) -> InProcess:
        if self._http is None:
            raise Unavailable("the engine is not running: call start() first")
        return self._http
