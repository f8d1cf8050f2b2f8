"""Every way to call a model of many adapters, and what it returns: losses, metrics, stages, templates, dtypes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import (
    Alone,
    Row,
    distance,
    flat_of,
    folder,  # noqa: F401 - a fixture
    lora,
    make_rows,
    open_pool,
)
from rounding import assert_near, rounding_of
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.errors import ArgumentError, TrainingStateError
from twinkle_transformers.model import TransformersModel

ROWS = {name: make_rows(2, (9, 6), seed=at) for at, name in enumerate(("a", "b", "c"))}
MIXED = [row for name in "abc" for row in ROWS[name]]
NAMES = ["a", "a", "b", "b", "c", "c"]
LITTLE = 1e-3
"""A learning rate at which steps amplify rounding by little: at 0.1, each step multiplies it by a hundred."""


def three_adapters(folder: Path, **options: Any) -> Any:
    model = open_pool(folder, **options)
    for at, name in enumerate(("a", "b", "c")):
        model.add_adapter_to_model(name, lora(2 + at), seed=at)
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    return model


@pytest.fixture
def model(folder: Path) -> Any:
    return three_adapters(folder)


def weights_of(model: Any, name: str) -> dict[str, torch.Tensor]:
    return model.get_state_dict(adapter_name=name)  # type: ignore[no-any-return]


# losses


@pytest.mark.full
def test_losses_of_three_kinds_in_one_call_are_their_formulas_on_peft_s_logps(folder: Path) -> None:
    model = three_adapters(folder)
    model.set_loss("GRPOLoss", epsilon=0.2, adapter_name="b")
    model.set_loss("DPOLoss", beta=0.1, adapter_name="c")
    with torch.no_grad():
        reference = [
            output["logps"].tolist() for output in model.forward_only(inputs=ROWS["c"], adapter_name=[None] * 2)
        ]
    outputs = model.forward_backward(
        inputs=MIXED, adapter_name=NAMES, advantages=[None, None, 1.5, -0.5, None, None],
        ref_logps=[None] * 4 + reference,
    )  # fmt: skip
    peft = {name: Alone(folder, lora(2 + at), weights_of(model, name)) for at, name in enumerate("abc")}
    counts = {"a": 13, "b": 2, "c": 1}

    def expected() -> list[torch.Tensor]:
        losses = {"a": -torch.cat([peft["a"].logps(row) for row in ROWS["a"]]).sum() / 13}
        means = [peft["b"].logps(row).sum() / (len(row["labels"]) - 1) for row in ROWS["b"]]
        losses["b"] = -(1.5 * (means[0] - means[0].detach() + 1) - 0.5 * (means[1] - means[1].detach() + 1)) / 2
        chosen, rejected = (peft["c"].logps(row).sum() - sum(o) for row, o in zip(ROWS["c"], reference, strict=True))
        losses["c"] = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
        for name, loss in losses.items():
            peft[name].optimizer.zero_grad()
            (loss * counts[name]).backward()  # type: ignore[no-untyped-call]
        logps = torch.cat([peft[name].logps(row).detach() for name, row in zip(NAMES, MIXED, strict=True)])
        gradients = [grad.clone() for name in "abc" for grad in peft[name].gradients().values()]
        return [logps, torch.stack([losses[name].detach() for name in NAMES]), *gradients]

    assert [output["num_tokens"] for output in outputs] == [counts[name] for name in NAMES]
    views = {name: model.pool.tenants[name].views() for name in "abc"}
    values = [torch.cat([output["logps"] for output in outputs]), torch.tensor([o["loss"] for o in outputs])]
    values += [views[name][key].grad for name in "abc" for key in peft[name].parameters]
    assert_near(values, expected(), rounding_of(expected))


@pytest.mark.full
def test_rows_without_adapter_are_a_reference_in_the_same_pass(folder: Path) -> None:
    model = three_adapters(folder)
    outputs = model.forward_backward(inputs=[*MIXED, *MIXED], adapter_name=[*NAMES, *[None] * 6])
    base = TransformersModel(model_id=str(folder), mixed_precision="no")
    for row, output in zip(MIXED, outputs[6:], strict=True):
        expected = base.forward_only(inputs=[row])["logps"][0]
        torch.testing.assert_close(output["logps"], expected, rtol=0, atol=2e-5)
        assert "loss" not in output
        assert not output["logps"].requires_grad
    disabled = model.forward_only(inputs=MIXED, adapter_name=NAMES, disable_lora=True)
    alone = model.forward_only(inputs=ROWS["a"], adapter_name="a", disable_lora=True)
    for row in range(6):
        assert distance(disabled[row]["logps"], outputs[6 + row]["logps"]) < 2e-6
    assert distance(alone["logps"][0], outputs[6]["logps"]) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("budget", [10, 10_000])
def test_the_base_as_reference_is_what_it_computes_by_itself(folder: Path, budget: int) -> None:
    advantages = [None, None, 1.0, -1.0, None, None]

    def opened(size: int) -> Any:
        made = three_adapters(folder, tokens_per_pass=size)
        made.set_loss("GRPOLoss", beta=0.5, adapter_name="b")
        made.set_loss("DPOLoss", beta=0.3, adapter_name="c")
        return made

    def gradients() -> list[torch.Tensor]:
        made = opened(10_000)
        made.forward_backward(
            inputs=MIXED, adapter_name=NAMES, advantages=advantages, ref_logps=[None, None, *["base"] * 4]
        )
        return [flat_of(made, name).grad for name in "abc"]

    model, other = (opened(size) for size in (budget, 10_000))
    reference = [output["logps"].tolist() for output in other.forward_only(inputs=MIXED, adapter_name=[None] * 6)]
    outputs = model.forward_backward(
        inputs=MIXED, adapter_name=NAMES, advantages=advantages, ref_logps=[None, None, *["base"] * 4]
    )
    expected = other.forward_backward(
        inputs=MIXED, adapter_name=NAMES, advantages=advantages, ref_logps=[None, None, *reference[2:]]
    )
    for mine, given in zip(outputs, expected, strict=True):
        assert mine["loss"] == pytest.approx(given["loss"], rel=1e-5, abs=1e-6)
    ours, theirs = ([flat_of(each, name).grad for name in "abc"] for each in (model, other))
    assert_near(ours, theirs, rounding_of(gradients))


@pytest.mark.full
def test_a_tensor_of_arguments_is_cut_with_the_rows(folder: Path) -> None:
    model = three_adapters(folder)
    for name in "ab":
        model.set_loss("GRPOLoss", adapter_name=name)
    rows, names = [ROWS["a"][0], ROWS["b"][0], ROWS["a"][1]], ["a", "b", "a"]
    old = torch.full((3, 9), -5.0)
    outputs = model.forward_backward(
        inputs=rows, adapter_name=names, advantages=torch.tensor([1.0, 2.0, 3.0]), old_logps=old
    )
    other = three_adapters(folder)
    other.set_loss("GRPOLoss", adapter_name="a")

    def alone() -> list[torch.Tensor]:
        other.zero_grad(adapter_name="a", flush=True)
        output = other.forward_backward(
            inputs=ROWS["a"], adapter_name="a", advantages=torch.tensor([1.0, 3.0]), old_logps=old[[0, 2]]
        )
        return [torch.tensor(output["loss"]), flat_of(other, "a").grad.clone()]

    theirs = alone()
    limit = max(rounding_of(alone))  # a single number may move by nothing in a few draws
    assert_near([torch.tensor(outputs[0]["loss"]), flat_of(model, "a").grad], theirs, [limit, limit])


# what one name returns


@pytest.mark.full
def test_one_name_returns_what_a_model_with_one_adapter_returns(folder: Path, tmp_path: Path) -> None:
    model = three_adapters(folder)
    model.set_optimizer("AdamW", lr=LITTLE, adapter_name="a")
    model.save("a", str(tmp_path), adapter_name="a")
    rows = make_rows(3, (9, 4), seed=9)

    def trained(call: Any, step: Any, metrics: Any, embed: Any) -> dict[str, torch.Tensor]:
        """Return all outputs and metrics of four steps, by name."""
        found: dict[str, torch.Tensor] = {}
        for number, options in enumerate(({}, {"return_logits": True}, {"temperature": 0.7}, {"micro_batch_size": 2})):
            for key, value in call(inputs=rows, **options).items():
                found[f"{number} {key}"] = torch.as_tensor(value, dtype=torch.float32).clone()
                if key == "logits":  # what a plain model computes on padding says nothing
                    found[f"{number} {key}"][1, 4:] = 0
            step()
            for key, value in metrics(True).items():
                if key in ("loss", "grad_norm", "accuracy", "learning_rate"):
                    found[f"{number} metric {key}"] = torch.tensor(float(value))
        return found | {"embeddings": embed(inputs=rows, task="embedding")["embeddings"]}

    def plain() -> dict[str, torch.Tensor]:
        one = TransformersModel(model_id=str(folder), mixed_precision="no")
        one.add_adapter_to_model("a", str(tmp_path / "a"))
        one.set_optimizer("AdamW", lr=LITTLE)
        return trained(one.forward_backward, one.clip_grad_and_step, one.calculate_metric, one.forward_only)

    calls = (model.forward_backward, model.clip_grad_and_step, model.calculate_metric, model.forward_only)
    ours, theirs = trained(*(partial(call, adapter_name="a") for call in calls)), plain()
    assert ours.keys() == theirs.keys()
    limits = rounding_of(lambda: list(plain().values()))
    tensors = [limit for limit, value in zip(limits, theirs.values(), strict=True) if value.ndim]
    # A single number may move by nothing in a few draws, and then has the limit of what it is made of.
    limits = [max(limit, *tensors) if not value.ndim else limit for limit, value in zip(
        limits, theirs.values(), strict=True)]  # fmt: skip
    assert_near(list(ours.values()), list(theirs.values()), limits)


def test_outputs_of_several_adapters_are_rows_in_the_caller_s_order(model: Any) -> None:
    order = [3, 0, 5, 2, 4, 1]
    outputs = model.forward_only(
        inputs=[MIXED[at] for at in order], adapter_name=[NAMES[at] for at in order], return_logits=True
    )
    for at, output in zip(order, outputs, strict=True):
        length = len(MIXED[at]["input_ids"])
        assert output["logits"].shape == (length, 264)
        assert output["logps"].shape == (length,)
        alone = model.forward_only(inputs=[MIXED[at]], adapter_name=NAMES[at])["logps"][0]
        assert distance(output["logps"], alone) < 2e-6
        labels = torch.tensor(MIXED[at]["labels"][:-1])
        whole = output["logits"].log_softmax(-1)[:-1].gather(-1, labels[:, None])[:, 0]
        torch.testing.assert_close(whole, output["logps"][:-1], rtol=0, atol=2e-5)


@pytest.mark.full
def test_embeddings_of_several_adapters_are_each_row_s_own(model: Any) -> None:
    outputs = model.forward_only(inputs=MIXED, adapter_name=NAMES, task="embedding")
    for row, name, output in zip(MIXED, NAMES, outputs, strict=True):
        alone = model.forward_only(inputs=[row], adapter_name=name, task="embedding")["embeddings"][0]
        assert distance(output["embeddings"], alone) < 2e-6


def test_an_embedding_is_whole_however_long_the_rows_are(model: Any) -> None:
    """The hidden size is 64, and so is the length of the longest row."""
    rows = make_rows(2, (64, 10), seed=1)
    vectors = model.forward_only(inputs=rows, adapter_name=["a", "a"], task="embedding")
    assert [vector["embeddings"].shape for vector in vectors] == [(64,), (64,)]


@pytest.mark.parametrize("left", [False, True])
def test_a_collated_batch_keeps_its_padding(folder: Path, left: bool) -> None:
    model, rows = three_adapters(folder), make_rows(2, (9, 6), seed=1)
    names = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    filled = [row | {"attention_mask": [1] * len(row["labels"])} for row in rows]
    batch = {}
    for key, fill in names.items():
        padding = [[fill] * (12 - len(row[key])) for row in filled]
        batch[key] = torch.tensor(
            [p + row[key] if left else row[key] + p for p, row in zip(padding, filled, strict=True)]
        )
    if left:
        model.set_processor("InputProcessor", padding_side="left", adapter_name="a")
    output = model.forward_only(inputs=batch, adapter_name="a")["logps"]
    plain = model.forward_only(inputs=rows, adapter_name="b", disable_lora=True)["logps"]
    assert output.shape == (2, 12)
    mine = model.forward_only(inputs=batch, adapter_name="a", disable_lora=True)["logps"]
    for at, row in enumerate(rows):
        size = len(row["labels"])
        part = mine[at, 12 - size :] if left else mine[at, :size]
        torch.testing.assert_close(part, plain[at, :size], rtol=0, atol=1e-5)


@pytest.mark.parametrize("call", ["forward_only", "forward_backward"])
def test_no_rows_are_no_outputs_or_an_error_that_says_so(model: Any, call: str) -> None:
    assert getattr(model, call)(inputs=[], adapter_name=[]) == []


# one stage after the other


@pytest.mark.full
def test_the_stages_one_by_one_are_the_step_in_one_call(folder: Path) -> None:
    staged, whole = three_adapters(folder), three_adapters(folder)
    for model in (staged, whole):
        model.set_optimizer("SGD", lr=LITTLE, adapter_name="a")
    for step in range(3):
        rows = make_rows(3, (9, 5), seed=step)
        staged.forward(inputs=rows, adapter_name="a")
        staged.forward_backward(inputs=ROWS["b"], adapter_name="b")  # others come between
        loss = staged.calculate_loss(adapter_name="a")
        staged.backward(adapter_name="a")
        staged.clip_grad_norm(0.5, adapter_name="a")
        staged.step(adapter_name="a")
        staged.zero_grad(adapter_name="a")
        staged.lr_step(adapter_name="a")
        assert loss == pytest.approx(whole.forward_backward(inputs=rows, adapter_name="a")["loss"], rel=1e-6)
        whole.clip_grad_and_step(0.5, adapter_name="a")
        metrics = staged.calculate_metric(True, adapter_name="a"), whole.calculate_metric(True, adapter_name="a")
        for key in ("loss", "grad_norm", "accuracy"):
            assert metrics[0][key] == pytest.approx(metrics[1][key], rel=1e-5)
    assert distance(flat_of(staged, "a"), flat_of(whole, "a")) < 1e-5


@pytest.mark.full
def test_two_adapters_may_be_between_forward_and_backward_at_once(folder: Path) -> None:
    model, other = three_adapters(folder), three_adapters(folder)
    for name in "ab":
        model.forward(inputs=ROWS[name], adapter_name=name)
    for name in "ab":
        model.calculate_loss(adapter_name=name)
    for name in "ba":
        model.backward(adapter_name=name)
    for name in "ab":
        other.forward_backward(inputs=ROWS[name], adapter_name=name)
        assert torch.equal(flat_of(model, name).grad, flat_of(other, name).grad)


def test_a_backward_without_its_forward_is_refused(model: Any) -> None:
    with pytest.raises(TrainingStateError, match="there is no forward"):
        model.backward(adapter_name="a")
    model.forward(inputs=ROWS["a"], adapter_name="a")
    with pytest.raises(TrainingStateError, match="no loss was calculated"):
        model.backward(adapter_name="a")
    model.forward(inputs=ROWS["a"], adapter_name="a")
    model.calculate_loss(adapter_name="a")
    model.backward(adapter_name="a")
    with pytest.raises(TrainingStateError, match="there is no forward"):
        model.backward(adapter_name="a")


def test_a_staged_loss_without_a_gradient_is_refused(model: Any) -> None:
    model.set_loss(lambda inputs, outputs: {"loss": outputs["logps"].detach().sum(), "num_tokens": 1}, adapter_name="a")
    model.forward(inputs=ROWS["a"], adapter_name="a")
    model.calculate_loss(adapter_name="a")
    with pytest.raises(TrainingStateError, match="has no gradient"):
        model.backward(adapter_name="a")
    assert flat_of(model, "a").grad is None


def test_a_backward_after_the_weights_changed_is_refused(model: Any) -> None:
    model.forward(inputs=ROWS["a"], adapter_name="a")
    model.calculate_loss(adapter_name="a")
    model.forward_backward(inputs=ROWS["a"], adapter_name=["a", "a"])
    model.clip_grad_and_step(adapter_name="a")
    with pytest.raises(TrainingStateError, match="weights"):
        model.backward(adapter_name="a")


def test_an_adapter_that_took_the_name_of_a_removed_one_has_no_forward_of_it(model: Any) -> None:
    model.forward(inputs=ROWS["a"], adapter_name="a")
    model.calculate_loss(adapter_name="a")
    model.remove_adapter("a")
    model.add_adapter_to_model("a", lora(2), seed=0)
    with pytest.raises(TrainingStateError, match="there is no forward"):
        model.backward(adapter_name="a")


def test_an_evaluation_of_one_adapter_has_metrics_of_its_own(folder: Path) -> None:
    model = three_adapters(folder)
    model.forward_backward(inputs=ROWS["a"], adapter_name="a")
    before = model.optimizer_group["a"].denominator, flat_of(model, "a").grad.clone()
    losses = []
    for seed in (1, 2):
        model.forward_only(inputs=make_rows(2, 9, seed), adapter_name="a", micro_batch_size=seed)
        losses.append(model.calculate_loss(adapter_name="a"))
    metrics = model.calculate_metric(False, adapter_name="a")
    assert float(metrics["loss"]) == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert model.optimizer_group["a"].denominator == before[0]
    assert torch.equal(flat_of(model, "a").grad, before[1])


def test_a_loss_is_never_that_of_an_earlier_forward(model: Any) -> None:
    model.forward_only(inputs=ROWS["a"], adapter_name="a")
    first = model.calculate_loss(adapter_name="a")
    model.forward_only(inputs=[*ROWS["b"], *ROWS["b"]], adapter_name=["a", "a", "b", "b"])
    with pytest.raises(TrainingStateError, match="there is no forward to score"):
        model.calculate_loss(adapter_name="a")
    assert first > 0


def test_metrics_are_each_adapter_s_own(folder: Path) -> None:
    model = three_adapters(folder)
    outputs = model.forward_backward(inputs=MIXED, adapter_name=NAMES)
    norms = model.clip_grad_and_step(adapter_name=["a", "b", "c"])
    for at, name in enumerate("abc"):
        metrics = model.calculate_metric(True, adapter_name=name)
        assert float(metrics["loss"]) == pytest.approx(outputs[2 * at]["loss"], rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(norms[at], rel=1e-5)


@pytest.mark.full
def test_steps_of_a_list_wait_for_each_adapter_s_accumulation(folder: Path) -> None:
    model = three_adapters(folder)
    for step in range(1, 7):
        model.forward_backward(inputs=MIXED, adapter_name=NAMES)
        norms = model.clip_grad_and_step(
            adapter_name=["a", "b", "c"], gradient_accumulation_steps=None if step > 1 else 2
        )
        assert [norm > 0 for norm in norms] == [step % 2 == 0] * 3
    assert [model.optimizer_group[name].updates for name in "abc"] == [3, 3, 3]
    model.forward_backward(inputs=ROWS["a"], adapter_name="a")
    assert model.clip_grad_and_step(adapter_name=["a"], flush=True)[0] > 0


# rows, templates, processors


def test_each_adapter_encodes_with_its_own_template(folder: Path) -> None:
    model = three_adapters(folder)
    model.set_template("Template", max_length=8, truncation_strategy="right", adapter_name="b")
    talk = {"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four five"}]}
    outputs = model.forward_only(inputs=[talk, talk, talk], adapter_name=["a", "b", None])
    sizes = [len(output["logps"]) for output in outputs]
    assert sizes[1] == 8 < sizes[0] == sizes[2]


@pytest.mark.full
def test_rows_padded_on_the_left_have_the_same_numbers(folder: Path) -> None:
    right, left = three_adapters(folder), three_adapters(folder)
    for name in "ab":
        left.set_processor("InputProcessor", padding_side="left", adapter_name=name)
    for model in (right, left):
        for name in "ab":
            model.set_loss("GRPOLoss", adapter_name=name)
    rows = make_rows(3, (5, 12, 9), seed=2)
    old = torch.full((3, 12), -5.0)
    one = right.forward_backward(
        inputs=rows, adapter_name="a", advantages=[1.0, -1.0, 0.5], old_logps=old, micro_batch_size=2
    )
    two = left.forward_backward(
        inputs=rows, adapter_name="a", advantages=[1.0, -1.0, 0.5], old_logps=old, micro_batch_size=2
    )
    for at, row in enumerate(rows):
        size = len(row["labels"])
        torch.testing.assert_close(two["logps"][at, 12 - size :], one["logps"][at, :size], rtol=0, atol=1e-6)
    assert distance(flat_of(left, "a").grad, flat_of(right, "a").grad) < 2e-6
    outputs = left.forward_only(inputs=rows, adapter_name=["a", "a", "b"])
    assert [len(output["logps"]) for output in outputs] == [5, 12, 9]


@pytest.mark.full
def test_packed_rows_train_as_the_rows_in_them(folder: Path) -> None:
    rows = make_rows(4, (5, 12, 9, 2), seed=2)
    plain, packed = three_adapters(folder), three_adapters(folder)
    packed.set_processor("InputProcessor", padding_free=True, adapter_name="a")
    one = plain.forward_backward(inputs=rows, adapter_name="a")
    two = packed.forward_backward(inputs=rows, adapter_name="a")
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert distance(flat_of(packed, "a").grad, flat_of(plain, "a").grad) < 2e-6


# sampling settings, names


def test_calls_name_their_adapter(model: Any) -> None:
    for call in (
        lambda: model.forward_only(inputs=ROWS["a"]),
        lambda: model.clip_grad_and_step(),
        lambda: model.set_optimizer("AdamW"),
        lambda: model.calculate_metric(True),
        lambda: model.zero_grad(),
        lambda: model.save("x"),
    ):
        with pytest.raises(ArgumentError, match=r"adapter_name is required.*\['a', 'b', 'c'\]"):
            call()


def test_temperature_divides_the_logits(model: Any) -> None:
    row: list[Row] = ROWS["a"][:1]
    cold = model.forward_only(inputs=row, adapter_name=["a"], temperature=0.5)[0]
    whole = model.forward_only(inputs=row, adapter_name=["a"], return_logits=True)[0]["logits"]
    labels = torch.tensor(row[0]["labels"][:-1])
    expected = (whole / 0.5).log_softmax(-1)[:-1].gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(cold["logps"][:-1], expected, rtol=0, atol=5e-5)
