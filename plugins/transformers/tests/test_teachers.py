"""Calls of a teacher and distillation through the model: most probable tokens, one update however rows are cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import one_thread  # noqa: F401 - a fixture
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from uneven import uneven_rows

from twinkle.errors import ArgumentError, OperationsFailed
from twinkle.model import MultiLoraTransformersModel
from twinkle.testing import tiny_model
from twinkle_transformers.backbone import Needs, score_logits
from twinkle_transformers.model import TransformersModel

LENGTHS = (5, 9, 12, 7, 3)
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a student and of a teacher whose distributions are far from uniform."""
    student = tiny_model(tmp_path_factory.mktemp("student"), seed=1, initializer_range=0.1)
    return student, tiny_model(tmp_path_factory.mktemp("teacher"), seed=2, initializer_range=0.2)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return uneven_rows(LENGTHS)


def opened(folder: Path, **options: Any) -> TransformersModel:
    return TransformersModel(model_id=str(folder), mixed_precision="no", **options)


def pool_of(folder: Path, *names: str) -> MultiLoraTransformersModel:
    pool = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no")
    for seed, name in enumerate(names):
        pool.add_adapter_to_model(name, LORA, seed=seed)
        pool.set_loss("GKDLoss", adapter_name=name, chunk_size=4)
        pool.set_optimizer("SGD", lr=1.0, adapter_name=name)
    return pool


def trained(rows: list[dict[str, Any]]) -> torch.Tensor:
    mask = torch.zeros(len(rows), max(LENGTHS), dtype=torch.bool)
    for at, row in enumerate(rows):
        mask[at, : len(row["labels"])] = torch.tensor(row["labels"]) != -100
    return mask


def check_top(output: Any, logits: torch.Tensor, mask: torch.Tensor, count: int) -> None:
    best = logits.float().log_softmax(-1).topk(count, dim=-1)
    torch.testing.assert_close(output["topk_logprobs"][mask], best.values[mask], rtol=1e-5, atol=1e-5)
    assert torch.equal(output["topk_indices"][mask], best.indices[mask])
    assert not output["topk_logprobs"][~mask].any()
    assert not output["topk_indices"][~mask].any()
    assert output["topk_indices"].dtype == torch.int64


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_the_most_probable_tokens_are_those_of_whole_logits(
    folders: Any, rows: Any, temperature: float, size: int | None
) -> None:
    model = opened(folders[1])
    options: dict[str, Any] = {"inputs": rows, "temperature": temperature, "micro_batch_size": size}
    logits = model.forward_only(return_logits=True, **options)["logits"]
    found = model.forward_only(topk_logprobs=5, **options)
    assert "logits" not in found
    check_top(found, logits, trained(rows), 5)
    both = model.forward_only(topk_logprobs=5, return_logits=True, **options)
    assert torch.equal(both["topk_indices"], found["topk_indices"])
    plain = model.forward_only(**options)
    assert torch.allclose(found["logps"], plain["logps"], atol=1e-6)
    assert "topk_logprobs" not in plain


def test_many_adapters_find_the_most_probable_tokens_too(folders: Any, rows: Any) -> None:
    pool, mask = pool_of(folders[0], "a", "b"), trained(rows)
    for options in ({"adapter_name": "a"}, {"adapter_name": "b", "disable_lora": True}):
        logits = pool.forward_only(inputs=rows, return_logits=True, **options)["logits"]
        check_top(pool.forward_only(inputs=rows, topk_logprobs=3, micro_batch_size=2, **options), logits, mask, 3)
    names = ["a", None, "b", "a", None]
    wholes = pool.forward_only(inputs=rows, adapter_name=names, return_logits=True)
    for at, output in enumerate(pool.forward_only(inputs=rows, adapter_name=names, topk_logprobs=3)):
        check_top(output, wholes[at]["logits"], mask[at, : LENGTHS[at]], 3)


@pytest.mark.parametrize("many", [False, True], ids=["one", "pool"])
def test_what_cannot_be_asked_for_is_refused(folders: Any, rows: Any, many: bool) -> None:
    model = pool_of(folders[0], "a") if many else opened(folders[0])
    options: dict[str, Any] = {"adapter_name": "a"} if many else {}
    for count in (0, True, 2.5):
        with pytest.raises(
            ArgumentError, match=f"topk_logprobs must be an integer of at least 1, or None, got {count}"
        ):
            model.forward_only(inputs=rows, topk_logprobs=count, **options)
    with pytest.raises(ArgumentError, match="the 300 most probable tokens were requested"):
        model.forward_only(inputs=rows, topk_logprobs=300, **options)
    bare = [{"input_ids": row["input_ids"]} for row in rows]
    for given, task in ((bare, "causal_lm"), (rows, "embedding")):
        with pytest.raises(ArgumentError, match="topk_logprobs requires positions with a label"):
            model.forward_only(inputs=given, topk_logprobs=2, task=task, **options)


class Largest(TorchDispatchMode):
    """Notes the most numbers of a tensor of floats that is made inside and shows no other one."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        old = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in made if isinstance(made, tuple) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                fresh = tensor.untyped_storage().data_ptr() not in old
                self.most = max(self.most, tensor.numel() if fresh else 0)
        return made


def test_the_most_probable_tokens_of_many_positions_are_found_in_chunks(tmp_path: Path) -> None:
    model = opened(tiny_model(tmp_path, vocab_size=1000, num_hidden_layers=1))
    ids = torch.randint(0, 256, (2, 400)).tolist()
    with Largest() as found:
        model.forward_only(inputs=[{"input_ids": row, "labels": [*row[1:], -100]} for row in ids], topk_logprobs=4)
    assert found.most <= 256 * 1000


def test_log_probabilities_that_need_no_gradient_are_read_from_whole_logits_in_chunks() -> None:
    logits = torch.randn(2, 30, 50, requires_grad=True)
    batch = {"labels": torch.randint(0, 50, (2, 30))}
    with Largest() as found:
        read = score_logits(logits, batch, Needs(logits=True, logps=False, predictions=True, chunk_tokens=4))
    assert found.most <= 4 * 50
    whole = score_logits(logits, batch, Needs(logits=True, predictions=True))
    assert torch.equal(read["predictions"], whole["predictions"])
    assert torch.allclose(read["logps"], whole["logps"])
    assert (read["logps"].requires_grad, whole["logps"].requires_grad) == (False, True)


def reference(folders: Any, rows: list[dict[str, Any]], beta: float) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of the head in plain torch, float64, a row at a time, whole distributions."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).double() for f in folders)
    terms = []
    for row in rows:
        ids, kept = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"]) != -100
        log_s = student(input_ids=ids).logits[0, kept].log_softmax(-1)
        log_t = teacher(input_ids=ids).logits[0, kept].log_softmax(-1).detach()
        log_m = (beta * log_t.exp() + (1 - beta) * log_s.exp()).log()
        terms.append(beta * (log_t.exp() * (log_t - log_m)).sum() + (1 - beta) * (log_s.exp() * (log_s - log_m)).sum())
    loss = sum(terms) / sum(int((torch.tensor(row["labels"]) != -100).sum()) for row in rows)
    loss.backward()
    return loss.item(), student.get_output_embeddings().weight.grad


def forms(teacher: Any, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the same teacher in several forms; all tokens are its most probable ones."""
    logits = teacher.forward_only(inputs=rows, return_logits=True, micro_batch_size=2)["logits"]
    top = teacher.forward_only(inputs=rows, topk_logprobs=264, micro_batch_size=3)
    lists = [logits[at, : len(row["input_ids"])] for at, row in enumerate(rows)]
    return {
        "whole": {"teacher_logits": logits},
        "rows": {"teacher_logits": lists},
        "topk": {"teacher_topk_logprobs": top["topk_logprobs"], "teacher_topk_indices": top["topk_indices"]},
        "lists": {
            "teacher_topk_logprobs": [table[: LENGTHS[at]].tolist() for at, table in enumerate(top["topk_logprobs"])],
            "teacher_topk_indices": [table[: LENGTHS[at]].tolist() for at, table in enumerate(top["topk_indices"])],
        },
    }


@pytest.mark.full
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_update_is_that_of_plain_torch_however_the_rows_are_cut(folders: Any, rows: Any, side: str) -> None:
    loss, gradient = reference(folders, rows, beta=0.3)
    teacher = opened(folders[1])
    if side == "left":
        teacher.set_processor("InputProcessor", padding_side="left")
    for form, given in forms(teacher, rows).items() if side == "right" else [("whole", left_form(teacher, rows))]:
        for size in (None, 1, 2, 4):
            student = opened(folders[0])
            student.set_loss("GKDLoss", beta=0.3, chunk_size=4)
            if side == "left":
                student.set_processor("InputProcessor", padding_side="left")
            output = student.forward_backward(inputs=rows, micro_batch_size=size, **given)
            student.clip_grad_norm(0)
            found = student.model.get_output_embeddings().weight.grad
            assert output["loss"] == pytest.approx(loss, rel=1e-5), (form, size)
            assert torch.allclose(found.double(), gradient, atol=1e-6), (form, size)
            assert "logits" not in output


def left_form(teacher: Any, rows: Any) -> dict[str, Any]:
    return {"teacher_logits": teacher.forward_only(inputs=rows, return_logits=True, micro_batch_size=2)["logits"]}


@pytest.mark.full
def test_adapters_of_a_pool_learn_from_a_teacher_in_one_pass_what_each_learns_alone(folders: Any, rows: Any) -> None:
    teacher = opened(folders[1])
    given = forms(teacher, rows)
    alone: dict[str, torch.Tensor] = {}
    for name, mine in (("a", [0, 2, 4]), ("b", [1, 3])):
        pool = pool_of(folders[0], "a", "b")
        logits = given["whole"]["teacher_logits"][mine]
        pool.forward_backward(inputs=[rows[at] for at in mine], adapter_name=name, teacher_logits=logits)
        pool.clip_grad_and_step(0, adapter_name=name)
        alone[name] = pool.pool.tenants[name].flat.detach().clone()
    names = ["a", "b", "a", "b", "a"]
    for form, size in (("whole", None), ("rows", 1), ("topk", None), ("lists", 2)):
        pool = pool_of(folders[0], "a", "b")
        before = pool.pool.tenants["a"].flat.detach().clone()
        outputs = pool.forward_backward(inputs=rows, adapter_name=names, micro_batch_size=size, **given[form])
        pool.clip_grad_and_step(0, adapter_name=["a", "b"])
        assert "logits" not in outputs[0]
        for name, wanted in alone.items():
            assert torch.allclose(pool.pool.tenants[name].flat, wanted, atol=1e-5), (form, name)
        assert float((alone["a"] - before).abs().max()) > 1e-3


@pytest.mark.parametrize("many", [False, True], ids=["one", "pool"])
def test_a_micro_batch_without_a_trained_token_is_like_the_others(folders: Any, rows: Any, many: bool) -> None:
    """An empty completion: nothing to find, nothing to learn, also where it comes alone."""
    model = pool_of(folders[0], "a") if many else opened(folders[0])
    options: dict[str, Any] = {"adapter_name": "a"} if many else {}
    model.set_loss("GKDLoss", **options)
    given = [*rows[:2], {**rows[2], "labels": [-100] * LENGTHS[2]}, *rows[3:]]
    tops, losses = [], []
    for size in (None, 1):
        tops.append(model.forward_only(inputs=given, topk_logprobs=4, micro_batch_size=size, **options))
        teacher = {"teacher_topk_logprobs": tops[0]["topk_logprobs"] - 1.0}
        teacher["teacher_topk_indices"] = tops[0]["topk_indices"]
        losses.append(model.forward_backward(inputs=given, micro_batch_size=size, **teacher, **options)["loss"])
        model.zero_grad(flush=True, **options)
    assert torch.allclose(tops[0]["topk_logprobs"], tops[1]["topk_logprobs"], atol=1e-5)
    assert not tops[1]["topk_indices"][2].any()
    assert losses[0] > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_whole_logits_are_not_kept_beyond_the_loss(folders: Any, rows: Any) -> None:
    """Neither the student's nor the teacher's: micro-batches, and steps that accumulate, would add up."""
    student = opened(folders[0])
    student.set_loss("GKDLoss")
    given = {"teacher_logits": torch.zeros(len(rows), max(LENGTHS), 264)}
    output = student.forward_backward(inputs=rows, micro_batch_size=2, **given)
    assert "logits" not in output
    [group] = student.optimizer_group.values()
    assert group.train_status.unseen
    for item in group.train_status.unseen:
        assert "logits" not in item.outputs
        assert "teacher_logits" not in item.loss_kwargs
    kept = student.forward_backward(inputs=rows, micro_batch_size=2, return_logits=True, **given)
    assert kept["logits"].shape == (len(rows), max(LENGTHS), 264)


def test_a_teacher_for_other_rows_is_refused_before_anything_is_computed(folders: Any, rows: Any) -> None:
    student, pool = opened(folders[0]), pool_of(folders[0], "a")
    student.set_loss("GKDLoss")
    few = {"teacher_logits": torch.zeros(4, max(LENGTHS), 264)}
    with pytest.raises(ArgumentError, match="teacher_logits has 4 entries, the batch has 5 rows"):
        student.forward_backward(inputs=rows, micro_batch_size=2, **few)
    with pytest.raises(ArgumentError, match="teacher_logits has 4 entries, the batch has 5 rows"):
        pool.forward_backward(inputs=rows, adapter_name="a", micro_batch_size=2, **few)
    wide = {"teacher_logits": torch.zeros(5, max(LENGTHS), 300)}
    with pytest.raises(ArgumentError, match="teacher_logits are over 300 tokens, the student's logits over 264"):
        student.forward_backward(inputs=rows, micro_batch_size=2, **wide)
    with pytest.raises(OperationsFailed, match="teacher_logits are over 300 tokens"):
        pool.forward_backward(inputs=rows, adapter_name=["a"] * 5, **wide)
