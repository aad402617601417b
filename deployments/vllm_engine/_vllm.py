"""All that gym_serve uses of vLLM's inside, in one place: of versions 0.32 and 0.33.

vLLM's engine arguments in a graph file: checked by name, and written as its command line has them.

The names are read from the source of the installed vLLM, without importing it, which takes seconds and
may want a GPU. Where none is installed (a driver, a laptop), its replicas check.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import orjson

from gym_serve.types.errors import GraphError
from gym_serve.types.requests import JSON

# Read by vLLM when it is imported. Measured on two cores: pinned threads fight for one core, and a
# third process doubles the time to start.
_CPU_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Engine(NamedTuple):
    """A running engine, with vLLM's own application around it. ``frozen_head``: a change of weights would
    leave the output layer as it was.
    """

    llm: Any
    app: Any
    ends: frozenset[int]
    frozen_head: bool


def is_cpu() -> bool:
    """Whether this process sees no GPU."""
    import torch

    return not torch.cuda.is_available()


async def start_engine(words: list[str], *, on_ray: bool) -> Engine:
    """Start an engine in this process by the words of vLLM's command line, with vLLM's application;
    ``on_ray``: in the bundles of this replica's placement group. Raises GraphError: there is no parser of a
    name.
    """
    if is_cpu():
        for name, value in _CPU_ENV.items():
            os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    make_arg_parser, validate_parsed_serve_args = _parser()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    _check_parsers(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    context = UsageContext.OPENAI_API_SERVER
    config = engine_args.create_engine_config(usage_context=context)
    if on_ray:
        from ray.util import get_current_placement_group

        config.parallel_config.placement_group = get_current_placement_group()
    llm = AsyncLLM.from_vllm_config(
        vllm_config=config, usage_context=context, disable_log_stats=engine_args.disable_log_stats
    )
    try:
        tasks = await llm.get_supported_tasks()
        app = build_app(args, tasks, llm.model_config)
        await init_app_state(llm, app.state, args, tasks)
    except BaseException:
        llm.shutdown()  # or its process would stay
        raise
    app.state.server = SimpleNamespace()  # vLLM's error handler tells its web server to exit
    tied = bool(getattr(llm.model_config.hf_text_config, "tie_word_embeddings", False))
    return Engine(llm, app, _ends(llm), tied and is_cpu())


def unfinished(llm: Any) -> int:
    """Requests that the engine has to do, waiting ones included."""
    return int(llm.output_processor.get_num_unfinished_requests())


def tool_parser(name: str, tokenizer: Any) -> tuple[Callable[[str, JSON], tuple[str, list[JSON]]], bool]:
    """A function that splits an answer's text and its tool calls, by one of vLLM's parsers; and whether the
    text must have special tokens. Raises GraphError: there is no parser of this name.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    _check_parsers(SimpleNamespace(tool_call_parser=name))
    from vllm.tool_parsers import ToolParserManager

    parser = ToolParserManager.get_tool_parser(name)(tokenizer)

    def split(text: str, chat: JSON) -> tuple[str, list[JSON]]:
        request = ChatCompletionRequest(messages=chat["messages"], tools=chat.get("tools"))
        parsed = parser.extract_tool_calls(text, request)
        calls = [call.model_dump(include={"id", "type", "function"}) for call in parsed.tool_calls]
        return (parsed.content or "", calls) if parsed.tools_called else (text, [])

    any_tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    probe = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=[any_tool])
    return split, not parser.adjust_request(probe).skip_special_tokens


def _parser() -> tuple[Any, Any]:
    try:
        from vllm.entrypoints.common import cli_args  # 0.33
    except ImportError:
        from vllm.entrypoints.launchers import cli_args  # 0.32
    return cli_args.make_arg_parser, cli_args.validate_parsed_serve_args


def _check_parsers(args: Any) -> None:
    """vLLM itself would find out when the engine runs."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    managers = {"tool_call_parser": ToolParserManager, "reasoning_parser": ReasoningParserManager}
    for setting, manager in managers.items():
        name, parsers = getattr(args, setting, None), sorted(manager.list_registered())
        if name and name not in parsers:
            near = difflib.get_close_matches(name, parsers, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(parsers)}"
            raise GraphError(f"{setting}: vLLM has no {name!r}{hint}")


def _ends(llm: Any) -> frozenset[int]:
    generation = llm.model_config.try_get_generation_config() or {}
    ids = generation.get("eos_token_id") or []
    own = getattr(llm.tokenizer, "eos_token_id", None)
    return frozenset([*(ids if isinstance(ids, list) else [ids]), own]) - {None}


_CLASSES = ("EngineArgs", "AsyncEngineArgs")


@lru_cache(maxsize=1)
def known_names() -> frozenset[str]:
    """Names of the installed vLLM's engine arguments; empty where there is none."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return frozenset()
    folders = list(spec.submodule_search_locations or []) if spec else []
    source = Path(folders[0], "engine", "arg_utils.py") if folders else None
    if source is None or not source.is_file():
        return frozenset()
    classes = [n for n in ast.parse(source.read_bytes()).body if isinstance(n, ast.ClassDef)]
    fields = [field for c in classes if c.name in _CLASSES for field in c.body]
    targets = [f.target for f in fields if isinstance(f, ast.AnnAssign)]
    return frozenset(t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_"))


def problem_of(name: str, taken: Mapping[str, str]) -> str | None:
    """What is wrong with the name of an engine argument; None if nothing is known to be. ``taken`` are the
    names that settings of the server stand for.
    """
    if name in taken:
        return f"{name} is set by {taken[name]!r} of this server"
    names = known_names()
    if not names or name in names:
        return None
    near = difflib.get_close_matches(name, names, n=1)
    return f"vLLM has no engine argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments as vLLM's parser reads them. None is "as by default"."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            words += [f"--{option}", *map(_word, value)]
        else:
            words += [f"--{option}", _word(value)]
    return words


def _word(value: Any) -> str:
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else str(value)
