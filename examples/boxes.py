"""A small task with a tool, and a small model to learn it: what `train_grpo.py` trains.

    python examples/boxes.py FOLDER     # makes the model

Boxes of four colours hold one of four things each, anew in every episode. The question is what one of them
holds; who looks into it knows, who does not must guess. The model begins as one that has read conversations
and understood nothing: it writes well-formed calls and answers at random, and so is right one time in four.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from gym_serve import ResourcesServer, Verdict, VerifyRequest, tool

Colour = Literal["red", "green", "blue", "gold"]
COLOURS: tuple[Colour, ...] = ("red", "green", "blue", "gold")
THINGS = ("apple", "coin", "key", "ring")


class BoxesRequest(VerifyRequest):
    """A row with the response to it."""

    box: Colour
    """The box that the question is about."""


class Boxes(ResourcesServer):
    """What is in a box? Reward 1.0 for the right thing, else 0.0."""

    class Config(ResourcesServer.Config):
        """Settings."""

        delay: float = Field(0.0, ge=0)
        """Mean seconds that a look takes, exponentially distributed: most are quick, and some are not."""

    config: Config

    class Session(BaseModel):
        """The boxes of an episode."""

        contents: dict[str, str] = {}

    async def seed(self, row: dict[str, Any], session: Session) -> None:
        """Fill the boxes."""
        session.contents = {colour: random.choice(THINGS) for colour in COLOURS}

    @tool
    async def look(self, box: Colour, session: Session) -> str:
        """Look into a box.

        Args:
            box: Its colour.
        """
        if self.config.delay:
            await asyncio.sleep(random.expovariate(1 / self.config.delay))
        return session.contents[box]

    async def verify(self, request: BoxesRequest, session: Session) -> Verdict:
        """Compare the answer with what is in the box."""
        return Verdict(reward=float(request.response.last_text.strip() == session.contents[request.box]))


ROWS = [{"prompt": f"What is in the {colour} box?", "box": colour} for colour in COLOURS]
"""One question for each box."""

WORDS = (*COLOURS, *THINGS, "user", "assistant", "What", "is", "in", "the", "box?")
CALL, CALL_END = '<tool_call>{"name": "look", "arguments": {"box": "', '"}}</tool_call>'
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

SENSE = 0.4
"""Share of the turns that make sense in the conversations that the model has read."""

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + ' ' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "look", "arguments": {"box": "' + call.function.arguments.box + '"}}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant ' }}{%- endif %}
"""
"""The chat template."""


def make_policy(folder: str | Path, *, seed: int = 0, steps: int = 500) -> Path:
    """Write the model: a Qwen3 of 0.1 M parameters, trained for seconds on conversations of random turns.

    Args:
        folder: created if it is not there.
        seed: of its weights and of the conversations.
        steps: batches that it reads.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        initializer_range=0.2,  # at the usual 0.02, so small a model takes long to attend to anything
        **ids,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        draw = random.Random(seed)
        texts = list(islice(_conversations(tokenizer, draw), 2000))
        for _ in range(steps):
            read = tokenizer(draw.sample(texts, 32), padding=True, return_tensors="pt")["input_ids"]
            model(read, labels=read.masked_fill(read == tokenizer.pad_token_id, -100)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _tokenizer() -> Any:
    """Every byte is a token, and so is each word and each part of a call."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([START, END, PAD])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in (CALL, CALL_END)])
    bpe.add_tokens([AddedToken(word, lstrip=True, rstrip=True, normalized=False) for word in WORDS])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    made.chat_template = TEMPLATE
    return made


def _conversations(tokenizer: Any, draw: random.Random) -> Iterator[str]:
    """Conversations whose form is right and whose turns make sense now and then."""
    while True:
        row = draw.choice(ROWS)
        messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
        seen = ""
        while draw.random() < 0.5:
            box = row["box"] if draw.random() < SENSE else draw.choice(COLOURS)
            seen = draw.choice(THINGS)
            call = {"function": {"name": "look", "arguments": {"box": box}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": seen})
        answer = seen if seen and draw.random() < SENSE else draw.choice(THINGS)
        messages.append({"role": "assistant", "content": answer})
        yield tokenizer.apply_chat_template(messages, tokenize=False)


if __name__ == "__main__":
    print(make_policy(sys.argv[1]))
