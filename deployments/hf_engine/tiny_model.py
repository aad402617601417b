"""A tiny model with random weights: the default of `hf_engine`, and what the tests of engines run on.

    python -m gym_serve.deployments.hf_engine.tiny_model FOLDER

It is made from this file alone, always the same one: a Qwen3 of 0.2 M parameters, a byte-level BPE tokenizer
and a chat template in Qwen's style. ``<tool_call>`` and ``<think>`` are added tokens and not special ones, as
with Qwen: parsers have to see them in the text.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from gym_serve.types.errors import GraphError

_NAME = "tiny-qwen3-1"  # of the folder in the cache: another number for another model
_VOCABULARY = 640
_END, _START, _TEXT_END = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
_ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")

_CORPUS = """\
You are a helpful assistant. You may call one or more functions to assist with the user query.
What is the weather in Paris? The weather in Berlin is sunny, and it is twelve degrees outside.
{"name": "get_weather", "arguments": {"city": "London", "unit": "celsius", "days": 3}}
{"type": "function", "function": {"name": "add", "description": "Add two numbers", "parameters": {}}}
Let me think about this step by step. First, we compute 12 + 30 = 42, so the answer is \\boxed{42}.
Which of these is right? A, B, C or D? The correct answer is (C), because all the others are wrong.
def solve(numbers): return sum(number for number in numbers if number > 0)
"""

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call functions, described within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call, return a JSON object with its name and arguments:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role in ('system', 'developer') and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.last %}
{{- '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}
{%- endif %}
{{- (message.content or '').strip() }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # the chat template. Like Qwen's, it shows no reasoning but the last turn's


def tiny_model() -> Path:
    """The folder of the tiny model, made at first use in ``$XDG_CACHE_HOME/gym_serve``. Raises GraphError:
    the packages of the extra are missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gym_serve"
    folder = cache / _NAME
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{_NAME}-", dir=cache))
    try:
        make_tiny_model(scratch)
        scratch.rename(folder)  # another process may have been quicker
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def make_tiny_model(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the tiny model into a folder. Raises GraphError: the packages of the extra are missing."""
    try:
        import torch
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise GraphError(f"hf_engine needs {error.name}: pip install 'gym-serve[hf]'") from None
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [_TEXT_END, _START, _END]
    bpe.train_from_iterator(
        _CORPUS.splitlines(keepends=True),
        trainers.BpeTrainer(
            vocab_size=_VOCABULARY - len(_ADDED),
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in _ADDED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=_END, pad_token=_TEXT_END, additional_special_tokens=[_START]
    )
    tokenizer.chat_template = TEMPLATE
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention for CPUs has
        max_position_embeddings=4096,
        tie_word_embeddings=False,  # vLLM on a CPU does not refresh a tied head when weights change
        initializer_range=0.2,  # at the usual 0.02, logits are nearly flat, and greedy output is noise
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


if __name__ == "__main__":
    print(make_tiny_model(sys.argv[1]))
