"""`TransformersModel(share_prefixes=True)`: a group's prompt goes through the model once, with the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.errors import ArgumentError, Unsupported
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel

PROMPTS = [list(range(20, 60)), [7] * 24]
TAILS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def group() -> list[Any]:
    """Two prompts with four completions each, as a sampler gives them back."""
    rows = []
    for prompt in PROMPTS:
        for tail in TAILS:
            ids = prompt + tail
            labels = [-100] * (len(prompt) - 1) + tail + [-100]
            rows.append({"input_ids": ids, "labels": labels})
    return rows


def build(folder: Path, shares: Any, gradient_checkpointing: bool = False) -> TransformersModel:
    torch.manual_seed(0)
    model = TransformersModel(
        model_id=str(folder), dtype="float64", mixed_precision="no", share_prefixes=shares,
        gradient_checkpointing=gradient_checkpointing,
    )  # fmt: skip
    model.add_adapter_to_model("default", {"r": 4, "target_modules": "all-linear", "init_lora_weights": False})
    model.model.double()
    model.set_loss("GRPOLoss", beta=0.1)
    model.set_optimizer("SGD", lr=1.0, weight_decay=0.0)
    return model


def tokens_seen(model: TransformersModel) -> list[int]:
    """Return a list that grows by the number of tokens of each forward of the model's body."""
    seen: list[int] = []
    model.backbone.body.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("processor", [{}, {"padding_side": "left"}, {"padding_free": True}], ids=str)
@pytest.mark.parametrize("size", [None, 4])
def test_a_step_of_grpo_is_the_same_and_reads_each_prompt_once(folder: Path, processor: Any, size: int | None) -> None:
    rows, count = group(), len(PROMPTS) * len(TAILS)
    draw = torch.Generator().manual_seed(1)
    advantages = torch.randn(count, generator=draw).tolist()
    old = [[-float(x) for x in torch.rand(sum(y != -100 for y in r["labels"]), generator=draw) * 9] for r in rows]
    found: dict[bool, Any] = {}
    for shares in (False, True):
        model = build(folder, shares)
        model.set_processor("InputProcessor", **processor)
        model.forward_only(inputs=rows[:2])  # the model is tried on a few tokens first
        seen = tokens_seen(model)
        ref = model.forward_only(inputs=rows, disable_lora=True, micro_batch_size=size)["logps"]
        how = {"old_logps": old, "advantages": advantages, "ref_logps": ref}
        out = model.forward_backward(inputs=rows, micro_batch_size=size, temperature=0.7, **how)
        model.clip_grad_and_step(max_grad_norm=0)
        found[shares] = out["logps"], out["loss"], model.get_state_dict()
        if shares:
            assert sum(seen) == 2 * (40 + 24 + 2 * sum(map(len, TAILS)))
    torch.testing.assert_close(found[True][0], found[False][0], rtol=1e-7, atol=1e-7)  # norms are float32
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-7)
    for name, weight in found[False][2].items():
        torch.testing.assert_close(found[True][2][name], weight, rtol=1e-6, atol=1e-7, msg=name)


def test_recomputed_activations_see_the_same_stream(folder: Path) -> None:
    losses = []
    for shares in (False, True):
        model = build(folder, shares, gradient_checkpointing=True)
        model.set_loss("CrossEntropyLoss")
        for _ in range(2):
            losses.append(model.forward_backward(inputs=group())["loss"])
            model.clip_grad_and_step()
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-7)


@pytest.mark.parametrize(
    "rows",
    [
        [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, {"input_ids": [4, 5], "labels": [5, -100]}],
        [{"input_ids": list(range(40)), "labels": [*range(1, 40), -100], "position_ids": list(range(5, 45))}] * 2,
    ],
    ids=["nothing in common", "positions of their own"],
)
def test_rows_that_share_nothing_are_computed_as_ever(folder: Path, rows: list[Any]) -> None:
    logps = [build(folder, shares).forward_only(inputs=rows)["logps"] for shares in (False, True)]
    assert torch.equal(*logps)


def test_a_model_that_keeps_a_state_along_the_row_computes_rows_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build(folder, False).forward_only(inputs=group())["logps"]
    model = build(folder, "auto")
    monkeypatch.setattr(type(model.backbone.segmenter), "check_prefixes", lambda self: "it carries a state")
    seen = tokens_seen(model)
    assert torch.equal(model.forward_only(inputs=group())["logps"], plain)
    assert sum(seen) == 8 * 45


def test_sharing_by_name_is_an_error_on_a_model_that_cannot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_DISABLE_FAST_PATHS", "prefixes")
    with pytest.raises(Unsupported, match=r'prefixes is disabled by TWINKLE_DISABLE_FAST_PATHS.*share_prefixes="auto"'):
        build(folder, True).forward_only(inputs=group())
    with pytest.raises(ArgumentError, match=r'share_prefixes must be True, False or "auto", got \'always\''):
        build(folder, "always")
