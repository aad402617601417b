"""Pictures of prompts and of tools, on their way to the trainer's engine and into its samples."""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.bells import answered
from support.eyes import MARK, PROMPT, SEEN, SHOWN, WIDTH, Eyes, seen_graph, seen_row
from support.letters import Letters

from gym_serve import PolicyAnswer, PolicyRequest
from gym_serve.training.episodes import Adapter, Episodes
from gym_serve.training.samples import fitted, samples
from gym_serve.training.skyrl import Generator
from gym_serve.training.verl import AgentLoop
from gym_serve.types.errors import BadRequest, InvalidRequest
from gym_serve.types.media import opened

URLS = [PROMPT["image_url"], SHOWN["image_url"]]
COLOURS = [(255, 0, 0), (0, 0, 255)]


async def episode(row: Mapping[str, Any], processor: Any = None) -> tuple[Any, list[PolicyRequest]]:
    asked: list[PolicyRequest] = []

    async def generate(request: PolicyRequest, context: object) -> PolicyAnswer:
        asked.append(request)
        return await answered(request)

    episodes = Episodes(seen_graph(), Letters(), generate, processor=processor or Eyes())
    try:
        (rollout,) = await episodes.run_all([dict(row)], attempts=1)
    finally:
        episodes.close()
    return rollout, asked


async def test_the_engine_and_the_sample_have_each_picture_at_its_place() -> None:
    rollout, asked = await episode(seen_row())
    assert (rollout.reward, rollout.failure) == (1.0, None)
    first, second = asked
    assert (list(first.pictures), list(second.pictures)) == (URLS[:1], URLS)
    assert (first.prompt_ids.count(SEEN), second.prompt_ids.count(SEEN)) == (WIDTH, 2 * WIDTH)
    (sample,) = samples(rollout)
    assert sample.input_ids[: len(second.prompt_ids)] == second.prompt_ids
    assert sample.pictures == URLS
    trained = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert SEEN not in trained


async def test_a_text_that_spells_the_mark_shifts_no_picture() -> None:
    rollout, asked = await episode(seen_row(f"ring {MARK}{MARK}"))
    assert rollout.failure is None
    assert [request.prompt_ids.count(SEEN) for request in asked] == [WIDTH, 2 * WIDTH]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "input_image", "image_url": "https://example.org/a.png"}, "data: URLs alone"),
        ({"type": "input_image", "image_url": "data:image/png;base64,aGk="}, "cannot be read"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "text and pictures"),
    ],
)
async def test_what_cannot_be_seen_is_refused_and_never_left_out(part: dict[str, Any], problem: str) -> None:
    rollout, asked = await episode(seen_row("ring", part))
    assert (rollout["_ng_failure_class"], asked) == ("bad_request", [])
    assert problem in str(rollout.failure)


async def test_a_policy_without_eyes_refuses_pictures() -> None:
    rollout, _ = await episode(seen_row(), processor=object())
    assert "reads text only" in str(rollout.failure)


@pytest.mark.parametrize("limits", [(20, 500), (500, 40)])
async def test_a_cut_sample_has_no_picture_and_is_not_trained_on(limits: tuple[int, int]) -> None:
    (sample,) = samples((await episode(seen_row()))[0])
    cut = fitted(sample, *limits)
    assert (cut.media, sum(cut.loss_mask), cut.failure is None) == ([], 0, False)


async def test_a_trainer_of_pictures_is_given_no_sound() -> None:
    (sample,) = samples((await episode(seen_row()))[0])
    sample.media.append({"type": "input_audio"})
    with pytest.raises(InvalidRequest, match="not input_audio"):
        _ = sample.pictures


def test_a_picture_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_serve.types.media._MOST_PIXELS", 100)
    with pytest.raises(BadRequest, match="at most 100 pixels"):
        opened(URLS[0])


async def test_verl_is_given_the_pictures() -> None:
    asked: list[dict[str, Any]] = []

    async def generate(**given: Any) -> Any:
        asked.append(given)
        answer = await answered(PolicyRequest(given["prompt_ids"], given["sampling_params"]))
        return SimpleNamespace(
            token_ids=answer.token_ids, log_probs=answer.logprobs, stop_reason="completed", extra_fields={}
        )

    rollout = SimpleNamespace(prompt_length=300, response_length=300, calculate_log_probs=True)
    config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    servers = SimpleNamespace(generate=generate)
    loop = AgentLoop(config, servers, Letters(), Eyes(), graph=seen_graph(), attempts=1)
    [output] = await loop.outputs({}, extra_info={"row": json.dumps(seen_row())}, uid="a")
    colours = [[image.getpixel((50, 60)) for image in given["image_data"]] for given in asked]
    assert colours == [COLOURS[:1], COLOURS]
    assert [image.getpixel((50, 60)) for image in output["multi_modal_data"]["images"]] == COLOURS
    assert (output["prompt_ids"] + output["response_ids"]).count(SEEN) == 2 * WIDTH


class SkyRLsEngines:
    """SkyRL's client of its engines: a picture is rendered by itself, and generated from at its place."""

    def __init__(self, mark: int = SEEN) -> None:
        self.mark = mark
        self.rendered: list[list[str]] = []
        self.asked: list[dict[str, Any]] = []

    async def render_chat_completion(self, payload: dict[str, Any]) -> dict[str, Any]:
        [message] = payload["json"]["messages"]
        urls = [part["image_url"]["url"] for part in message["content"]]
        self.rendered.append(urls)
        places = [{"offset": 1 + i * (WIDTH + 2), "length": WIDTH} for i in range(len(urls))]
        features = {
            "mm_hashes": {"image": urls},
            "mm_placeholders": {"image": places},
            "kwargs_data": {"image": urls},
        }
        return {"token_ids": [1, *[self.mark] * WIDTH, 2] * len(urls), "features": features}

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        self.asked.append(batch)
        [prompt] = batch["prompt_token_ids"]
        answer = await answered(PolicyRequest(prompt, batch["sampling_params"]))
        return {
            "response_ids": [answer.token_ids],
            "stop_reasons": [answer.finish_reason],
            "response_logprobs": [answer.logprobs],
        }


def skyrls_batch(*rows: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompts": [[]] * len(rows),
        "env_extras": [{"row": json.dumps(row)} for row in rows],
        "sampling_params": {"max_tokens": 300, "logprobs": 1},
        "trajectory_ids": [SimpleNamespace(instance_id="a", repetition_id=i) for i in range(len(rows))],
    }


async def test_skyrl_is_given_the_pictures() -> None:
    engines = SkyRLsEngines()
    generator = Generator(seen_graph(), engines, Letters(), processor=Eyes(), attempts=1)
    output = await generator.generate(skyrls_batch(seen_row()))
    assert engines.rendered == [URLS[:1], URLS]
    for asked, urls in zip(engines.asked, engines.rendered, strict=True):
        [prompt], [features] = asked["prompt_token_ids"], asked["mm_features"]
        assert features["kwargs_data"]["image"] == urls
        places = [
            place
            for one in features["mm_placeholders"]["image"]
            for place in range(one["offset"], one["offset"] + one["length"])
        ]
        assert places == [i for i, token in enumerate(prompt) if token == SEEN]
    assert output["pixel_values"] == [COLOURS]
    assert output["image_grid_thw"] == [[[1, 4, 4]] * 2]
    assert (output["prompt_token_ids"][0] + output["response_ids"][0]).count(SEEN) == 2 * WIDTH


async def test_skyrl_has_a_picture_for_a_failure_without_tokens() -> None:
    unread = {
        "prompt": [{"role": "user", "content": [{**PROMPT, "image_url": "data:image/png;base64,aGk="}]}]
    }
    generator = Generator(seen_graph(), SkyRLsEngines(), Letters(), processor=Eyes(), attempts=1)
    output = await generator.generate(skyrls_batch(unread, seen_row()))
    assert output["stop_reasons"] == ["error", "stop"]
    assert [sum(mask) > 0 for mask in output["loss_masks"]] == [False, True]
    assert output["pixel_values"] == [COLOURS, COLOURS]
    assert output["response_ids"][0] == output["response_ids"][1]


async def test_skyrl_is_told_that_its_batches_have_pictures_everywhere_or_nowhere() -> None:
    generator = Generator(seen_graph(), SkyRLsEngines(), Letters(), processor=Eyes(), attempts=1)
    with pytest.raises(InvalidRequest, match="in every rollout or in none"):
        await generator.generate(skyrls_batch(seen_row(), {"prompt": "refuse"}))
    output = await generator.generate(skyrls_batch({"prompt": "refuse"}))
    assert output["pixel_values"] is None


async def test_skyrls_engines_must_see_a_picture_as_the_processor_does() -> None:
    engines = SkyRLsEngines(mark=SEEN + 1)
    generator = Generator(seen_graph(), engines, Letters(), processor=Eyes(), attempts=1)
    output = await generator.generate(skyrls_batch(seen_row()))
    assert (output["stop_reasons"], engines.asked) == (["error"], [])


async def test_skyrl_trains_models_of_qwens_kind_alone() -> None:
    class Tiles(Eyes):
        def image_processor(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
            return {"pixel_values": super().image_processor(images, return_tensors)["pixel_values"]}

    generator = Generator(seen_graph(), SkyRLsEngines(), Letters(), processor=Tiles(), attempts=1)
    with pytest.raises(InvalidRequest, match="Tiles gives pixel_values"):
        await generator.generate(skyrls_batch(seen_row()))


@pytest.mark.parametrize(
    ("processor", "part", "problem"),
    [
        (None, PROMPT, "takes text only, got input_image"),
        (Eyes(), {"type": "input_audio", "input_audio": {}}, "takes text and pictures, got input_audio"),
    ],
)
async def test_a_trainer_is_told_at_once_what_its_policy_is_not_given(
    processor: Any, part: dict[str, Any], problem: str
) -> None:
    adapter = Adapter(seen_graph())
    episodes = adapter.episodes(Letters(), answered, processor=processor)
    with pytest.raises(InvalidRequest, match=problem):
        await adapter.outcome({"prompt": [{"role": "user", "content": [part]}]}, None, {})
    episodes.close()
