"""A trainer's engine on a CPU: a transformer of a few thousand weights that really samples.

What it samples is bent towards a script, so that it calls tools; now and then it says something else.
Log-probabilities are those of the distribution that it samples from.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typing_extensions
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BatchFeature,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# Before Python 3.12 pydantic takes this one only, which NeMo RL and SkyRL forget.
typing.TypedDict = typing_extensions.TypedDict

TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{%- set parts = message.content if message.content is iterable and message.content is not string else [] %}

{{ message.content or '' if not parts }}
{%- for part in parts %}{{ '\x01' if part.type == 'image' else part.text }}{% endfor %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and those of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


class Sight:
    """A processor as Qwen's models have it, without the part for videos, which needs torchvision.

    A picture is 4 tokens wide and high at most.
    """

    image_token = "\x01"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        [self.image_token_id] = tokenizer(self.image_token)["input_ids"]
        self.image_processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112)
        self.apply_chat_template = tokenizer.apply_chat_template

    def __call__(self, text: list[str], images: list[Any], **options: Any) -> BatchFeature:
        shown = self.image_processor(images, return_tensors="pt")
        before, *after = text[0].split(self.image_token)
        if after:  # a trainer may ask for the tensors alone
            widths = [int(grid.prod()) // 4 for grid in shown["image_grid_thw"]]
            marks = [self.image_token * width for width in widths]
            before += "".join(mark + rest for mark, rest in zip(marks, after, strict=True))
        ids = self.tokenizer([before], add_special_tokens=False)["input_ids"]
        return BatchFeature({"input_ids": ids, **shown})


def prepare(folder: Path, graph: dict[str, Any]) -> None:
    """Write a graph, a model and its tokenizer."""
    (folder / "graph.yaml").write_text(yaml.safe_dump(graph))
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    config = Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, eos_token_id=tokenizer.eos_token_id)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


class Engine:
    """Samples from the model in a folder.

    Args:
        folder: the model's.
        said: what it is bent to say to the text of a prompt.
    """

    bend = 13.0

    def __init__(self, folder: Path, said: Callable[[str], str]) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = Qwen3ForCausalLM.from_pretrained(folder).eval()
        self._said = said

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], limit: int, temperature: float, seed: int
    ) -> tuple[list[int], list[float]]:
        """Token ids, and the log-probability of each."""
        end = self.tokenizer.eos_token_id
        said = self._said(self.tokenizer.decode(prompt))
        script = self.tokenizer(said, add_special_tokens=False)["input_ids"]
        random = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        logprobs: list[float] = []
        past, given = None, torch.tensor([prompt])
        while len(ids) < limit and end not in ids:
            output = self.model(given, past_key_values=past, use_cache=True)
            logits, past = output.logits[0, -1], output.past_key_values
            logits[script[len(ids)] if len(ids) < len(script) else end] += self.bend
            distribution = torch.log_softmax(logits.float() / max(temperature, 1e-3), dim=-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=random))
            ids.append(token)
            logprobs.append(float(distribution[token]))
            given = torch.tensor([[token]])
        return ids, logprobs
