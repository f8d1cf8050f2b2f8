"""Many adapters in one pass get, bit for bit or to rounding, what each gets alone: in a pool of its own, and with PEFT.

For rows of equal length the numbers are the same bits on a CPU with one thread where its products round alike at any
number of rows; the tests measure whether they do. Elsewhere they agree to rounding, which the tests measure too.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from pools import (
    LINEAR,
    VOCABULARY,
    Alone,
    Row,
    distance,
    flat_of,
    folder,  # noqa: F401 - a fixture
    lora,
    make_rows,
    moments_of,
    open_pool,
)
from rounding import FACTOR, USELESS, assert_near, measured_rounding, rounding_of, rounds_alike, units
from threads import one_thread  # noqa: F401 - a fixture
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle.engine import Operation, OperationResult
from twinkle.testing import tiny_model
from twinkle_torch.numerics import RoundingNoise

VERSION = f"torch {torch.__version__}"
ROUNDS = 10


class Tenant:
    """What one adapter trains, and how: no two are alike."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"t{number}"
        self.rank = (4, 1, 8, 3)[number % 4]
        targets = (LINEAR, ["q_proj", "v_proj"], LINEAR, [*LINEAR[4:], "lm_head"], LINEAR)[number % 5]
        self.config = lora(self.rank, lora_alpha=4 + number, target_modules=targets, use_rslora=number % 3 == 1)
        self.kind = ("cross entropy", "grpo", "dpo", "cross entropy")[number % 4]
        self.steps = 2 if number % 4 == 3 else 1
        self.optimizer: dict[str, Any] = {"optimizer_cls": "AdamW", "lr": 2e-3 * (1 + number % 7)}
        if number % 8 == 5:
            self.optimizer = {"optimizer_cls": "SGD", "lr": 0.1, "momentum": 0.9}
        if number % 8 == 6:
            self.optimizer = {"optimizer_cls": "Muon", "lr": 1e-3}

    def join(self, model: Any) -> None:
        model.add_adapter_to_model(
            self.name, self.config, seed=100 + self.number, gradient_accumulation_steps=self.steps
        )
        model.set_optimizer(adapter_name=self.name, **self.optimizer)
        if self.number % 3 == 0:
            model.set_lr_scheduler("StepLR", step_size=2, gamma=0.5, adapter_name=self.name)
        if self.number % 3 == 1:
            model.set_lr_scheduler("CosineAnnealingLR", T_max=7, adapter_name=self.name)
        if self.kind == "grpo":
            model.set_loss("GRPOLoss", beta=0.1, adapter_name=self.name)
        if self.kind == "dpo":
            model.set_loss("DPOLoss", beta=0.3, adapter_name=self.name)

    def rows(self, length: int | tuple[int, ...], round_: int, count: int = 2) -> list[Row]:
        if isinstance(length, tuple):
            turn = self.number % len(length)
            length = (*length[turn:], *length[:turn])
        return make_rows(count, length, seed=1000 * self.number + round_)

    def arguments(self, rows: list[Row]) -> dict[str, Any]:
        """Return the loss's arguments, one entry a row."""
        draw = torch.Generator().manual_seed(self.number)
        lists = [(torch.randn(len(row["input_ids"]), generator=draw) - 5).tolist() for row in rows]
        if self.kind == "grpo":
            return {"advantages": [1.0 - 2 * (i % 2) for i in range(len(rows))], "ref_logps": lists}
        return {"ref_logps": lists} if self.kind == "dpo" else {}


def together(tenants: list[Tenant], batches: list[list[Row]]) -> dict[str, Any]:
    """Return the arguments of one call for the rows of all tenants, in turn: t0, t1, ..., t0, t1, ..."""
    count = len(batches[0])
    found: dict[str, Any] = {"inputs": [], "adapter_name": [], "advantages": [], "ref_logps": []}
    for row in range(count):
        for tenant, rows in zip(tenants, batches, strict=True):
            own = tenant.arguments(rows)
            found["inputs"].append(rows[row])
            found["adapter_name"].append(tenant.name)
            for key in ("advantages", "ref_logps"):
                found[key].append(own[key][row] if key in own else None)
    return {key: value for key, value in found.items() if any(entry is not None for entry in value)}


def bits(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return 0.0 for the same bits, and how far they are apart otherwise, which is never 0."""
    return 0.0 if torch.equal(one, other) else max(distance(one, other), 1e-30)


def train_together(
    folder: Path, tenants: list[Tenant], length: int | tuple[int, ...], **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Train tenants in one pass, and return the model and what each round gave."""
    model = open_pool(folder, **options)
    for tenant in tenants:
        tenant.join(model)
    seen: list[dict[str, Any]] = []
    for round_ in range(ROUNDS if len(tenants) <= 8 else 2):
        batches = [tenant.rows(length, round_) for tenant in tenants]
        outputs = model.forward_backward(**together(tenants, batches))
        gradients = [flat_of(model, t.name).grad.clone() for t in tenants]
        norms = model.clip_grad_and_step(0.5, adapter_name=[t.name for t in tenants])
        seen.append({"outputs": outputs, "gradients": gradients, "norms": norms, "batches": batches})
    return model, seen


def numbers_of(model: Any, seen: list[dict[str, Any]], tenants: list[Tenant], at: int) -> list[tuple[str, Any]]:
    """Return every number that one of the tenants has of a training together, by kind, in order."""
    found: list[tuple[str, Any]] = []
    for now in seen:
        mine = [now["outputs"][row * len(tenants) + at] for row in range(len(now["batches"][at]))]
        for output in mine:
            found += [("logps", output["logps"]), ("loss", torch.tensor(output["loss"]))]
        found.append(("gradient", now["gradients"][at]))
        if now["norms"][at]:
            found.append(("norm", torch.tensor(now["norms"][at])))
    return found + ending_of(model, tenants[at].name)


def ending_of(model: Any, name: str) -> list[tuple[str, Any]]:
    moments = moments_of(model, name).items()
    return [("weights", flat_of(model, name).data), *((key.rpartition(".")[2], value) for key, value in moments)]


def numbers_alone(folder: Path, seen: list[dict[str, Any]], tenant: Tenant, at: int, **options: Any) -> Any:
    """Return a tenant's model in a pool of its own, and the same numbers as `numbers_of`."""
    alone = open_pool(folder, **options)
    tenant.join(alone)
    found: list[tuple[str, Any]] = []
    for now in seen:
        rows = now["batches"][at]
        output = alone.forward_backward(inputs=rows, adapter_name=tenant.name, **tenant.arguments(rows))
        for row, given in enumerate(rows):
            logps = output["logps"][row, : len(given["input_ids"])]
            found += [("logps", logps), ("loss", torch.tensor(output["loss"]))]
            assert now["outputs"][row * len(now["batches"]) + at]["num_tokens"] == output["num_tokens"]
        found.append(("gradient", flat_of(alone, tenant.name).grad.clone()))
        alone.clip_grad_and_step(0.5, adapter_name=tenant.name)
        if now["norms"][at]:
            found.append(("norm", torch.tensor(alone.optimizer_group[tenant.name].last_grad_norm)))
    return alone, found + ending_of(alone, tenant.name)


def compare_with_alone(
    folder: Path, count: int, length: int | tuple[int, ...], *, equal: bool = False, **options: Any
) -> None:
    """Train tenants in one pass and each in a pool of its own, and compare everything at each round.

    Where bits are not `equal`, limits are what noise of the size of rounding does to the same training. Some trainings
    are chaotic (AdamW divides small gradients by their own size): once noise moves a tenant by more than a fault might,
    its later numbers say nothing and are left out.
    """
    tenants = [Tenant(number) for number in range(count)]
    model, seen = train_together(folder, tenants, length, **options)
    noisy: Any = None
    if not equal:
        with RoundingNoise(0, units=units()):
            noisy = train_together(folder, tenants, length, **options)
    compared = total = 0
    for at, tenant in enumerate(tenants):
        alone, theirs = numbers_alone(folder, seen, tenant, at, **options)
        ours = numbers_of(model, seen, tenants, at)
        limits = [0.0] * len(ours) if equal else limits_of(ours, numbers_of(*noisy, tenants, at))
        first = next(place for place, (kind, _) in enumerate(ours) if kind == "gradient") + 1
        assert len(limits) >= first, "the first round says something in any case"
        for place, ((kind, one), (_, other), limit) in enumerate(zip(ours, theirs, limits, strict=False)):
            where = (tenant.name, kind, place, limit, VERSION)
            assert torch.equal(one, other) if equal else distance(one, other) <= limit, where
        compared, total = compared + len(limits), total + len(ours)
        group, other_group = model.optimizer_group[tenant.name], alone.optimizer_group[tenant.name]
        assert group.updates == other_group.updates == len(seen) // tenant.steps
        assert group.learning_rates() == other_group.learning_rates()
    assert compared > 0.6 * total


def limits_of(ours: list[tuple[str, Any]], noisy: list[tuple[str, Any]]) -> list[float]:
    """Return how far each number may be off, up to the first of which noise leaves nothing to compare.

    One draw may leave a single number as it was, so that losses have the limit of log-probabilities, and all else that
    of gradients, the largest so far.
    """
    largest = {True: EPSILON, False: EPSILON}
    found: list[float] = []
    for (kind, one), (_, other) in zip(noisy, ours, strict=True):
        scores = kind in ("logps", "loss")
        largest[scores] = max(largest[scores], distance(one, other))
        if FACTOR * largest[scores] >= USELESS:
            break
        found.append(FACTOR * largest[scores])
    return found


EPSILON = float(torch.finfo(torch.float32).eps)


def compare_equal_lengths(folder: Path, count: int, length: int, **options: Any) -> None:
    """Demand the same bits where products round alike, and otherwise what rounding allows after some updates."""
    model = open_pool(folder)
    weights = [site.module.weight for site in model.pool.sites.values()]
    rows = 2 * max(8, length)  # what an adapter alone has, padded to 8
    compare_with_alone(folder, count, length, equal=rounds_alike(weights, rows, count * rows), **options)


@pytest.mark.full
@pytest.mark.parametrize("length", [8, 13])
def test_after_five_updates_adapters_of_equal_lengths_have_the_bits_that_each_has_alone(
    folder: Path, length: int
) -> None:
    compare_equal_lengths(folder, 8, length, share_prefixes=False)


@pytest.mark.full
def test_sixteen_adapters_in_one_pass_have_the_bits_that_each_has_alone(folder: Path) -> None:
    compare_equal_lengths(folder, 16, 11)


@pytest.mark.full
def test_rows_of_fewer_than_eight_tokens_have_the_bits_that_they_have_alone(folder: Path) -> None:
    compare_equal_lengths(folder, 4, 3)


@pytest.mark.full
def test_packed_rows_of_mixed_lengths_are_as_near_to_those_alone_as_rounding_allows(folder: Path) -> None:
    compare_with_alone(folder, 5, (5, 31, 2, 9, 17))


def test_a_chunk_of_the_head_is_never_left_with_a_few_rows_that_take_another_kernel(folder: Path) -> None:
    """3 adapters with 86 trained tokens each are 258: the head's chunks have 256."""
    model = open_pool(folder)
    names = ["a", "b", "c"]
    rows = {name: make_rows(1, 87, seed=at) for at, name in enumerate(names)}
    for at, name in enumerate(names):
        model.add_adapter_to_model(name, lora(), seed=at)

    def fused() -> list[torch.Tensor]:
        for name in names:
            model.zero_grad(adapter_name=name, flush=True)
        model.forward_backward(inputs=[rows[name][0] for name in names], adapter_name=names)
        return [flat_of(model, name).grad.clone() for name in names]

    ours, theirs = fused(), []
    for name in names:
        model.zero_grad(adapter_name=name, flush=True)
        model.forward_backward(inputs=rows[name], adapter_name=name)
        theirs.append(flat_of(model, name).grad.clone())
    if rounds_alike([site.module.weight for site in model.pool.sites.values()], 86, 3 * 87):
        assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True)), VERSION
    else:
        assert_near(theirs, ours, rounding_of(fused), VERSION)


class Products(TorchDispatchMode):
    """Counts matrix products with some weights."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = {weight.data_ptr(): name for name, weight in weights.items()}
        self.counts = dict.fromkeys(weights, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"):
            for tensor in args:
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in self.names:
                    self.counts[self.names[tensor.data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_pass_multiplies_with_each_base_weight_once_each_way_whatever_the_number_of_adapters(
    folder: Path, count: int
) -> None:
    model = open_pool(folder, gradient_checkpointing=False)
    for number in range(count):
        model.add_adapter_to_model(f"t{number}", lora(1 + number % 3), seed=number)
    rows, names = make_rows(count + 1, (9, 5, 12), seed=0), [*(f"t{number}" for number in range(count)), None]
    weights = {name: site.module.weight for name, site in model.pool.sites.items()}
    model.forward_only(inputs=rows, adapter_name=names)  # the first pass of a model looks whether it can do this
    with Products(weights) as products:
        model.forward_only(inputs=rows, adapter_name=names)
    assert products.counts == dict.fromkeys(weights, 1)
    with Products(weights) as products:
        model.forward_backward(inputs=rows, adapter_name=names)
    first = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    expected = dict.fromkeys(weights, 2) | dict.fromkeys(first, 1)  # nothing below them is trained
    assert products.counts == expected | {"lm_head": 3}  # the base's row, which has no metrics, is scored apart


def train_beside_peft(folder: Path, config: Any, seed: int = 5, steps: int = 5) -> None:
    model = open_pool(folder)
    model.add_adapter_to_model("a", config, seed=seed)
    model.set_optimizer("AdamW", lr=1e-2, adapter_name="a")
    batches = [make_rows(3, (9, 4, 12), seed=step) for step in range(steps)]
    start = {name: value.clone() for name, value in model.get_state_dict(adapter_name="a").items()}
    names = sorted(start)

    def by_peft() -> tuple[list[tuple[str, Any]], dict[str, torch.Tensor]]:
        """Return all numbers of the training, and the gradient of each matrix at its first step."""
        alone, found = Alone(folder, config, start, lr=1e-2, weight_decay=0.01), list[tuple[str, Any]]()
        first: dict[str, torch.Tensor] = {}
        for rows in batches:
            found += [("loss", torch.tensor(alone.backward(rows)))]
            found += [("logps", alone.logps(row).detach()) for row in rows]
            gradients = {name: grad.clone() for name, grad in alone.gradients().items()}
            first = first or gradients
            found += [("gradient", joined(gradients)), ("norm", torch.tensor(alone.step(0.7)))]
            found += [("weights", joined(alone.weights()))]
        return found, first

    def joined(tensors: Any) -> torch.Tensor:
        return torch.cat([tensors[name].detach().flatten() for name in names])

    ours: list[tuple[str, Any]] = []
    first: dict[str, torch.Tensor] = {}
    for rows in batches:
        output = model.forward_backward(inputs=rows, adapter_name="a")
        ours += [("loss", torch.tensor(output["loss"]))]
        logps = zip(output["logps"], rows, strict=True)
        ours += [("logps", row_logps[: len(row["input_ids"])].clone()) for row_logps, row in logps]
        gradients = {name: view.grad.clone() for name, view in model.pool.tenants["a"].views().items()}
        first = first or gradients
        model.clip_grad_and_step(0.7, adapter_name="a")
        ours += [("gradient", joined(gradients))]
        ours += [("norm", torch.tensor(model.optimizer_group["a"].last_grad_norm))]
        ours += [("weights", joined(model.get_state_dict(adapter_name="a")))]
    theirs, wanted = by_peft()
    with RoundingNoise(0, units=units()):
        noisy, moved = by_peft()
    limits = limits_of(theirs, noisy)
    assert len(limits) > len(theirs) // steps, "the first step, and its update, say something in any case"
    for place, ((kind, one), (_, other), limit) in enumerate(zip(ours, theirs, limits, strict=False)):
        assert distance(one, other) <= limit, (kind, place)
    limit = FACTOR * max(distance(moved[name], wanted[name]) for name in names)
    assert limit < USELESS
    for name in names:
        assert distance(first[name], wanted[name]) <= limit, name


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 8},
    "rank pattern": {"rank_pattern": {"q_proj": 2, r".*\.1\.mlp\.down_proj": 6}, "alpha_pattern": {"v_proj": 32}},
    "last names": {"target_modules": ["q_proj", "down_proj"]},
    "regex": {"target_modules": r"model\.layers\.1\..*(k|v|up)_proj"},
    "some layers": {"layers_to_transform": [1], "target_modules": ["q_proj", "o_proj"]},
    "excluded": {"exclude_modules": ["gate_proj", "model.layers.0.mlp.up_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "no B": {"init_lora_weights": True},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_trains_as_peft_trains_it(folder: Path, name: str) -> None:
    train_beside_peft(folder, LoraConfig(**(lora() | CONFIGS[name])), steps=5 if name in ("plain", "head") else 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ({"train_mlp": False, "train_unembed": False}, LINEAR[:4]),
        ({"train_attn": False, "train_unembed": False}, LINEAR[4:]),
        ({"train_attn": False, "train_mlp": False}, ["lm_head"]),
        ({}, [*LINEAR, "lm_head"]),
        ({"train_unembed": False}, LINEAR),
    ],
)
def test_families_of_layers_are_what_they_say(folder: Path, families: dict[str, bool], expected: list[str]) -> None:
    model = open_pool(folder)
    families = {"train_attn": True, **families}
    model.add_adapter_to_model("a", {"r": 2, **families})
    adapted = {name.rpartition(".")[2] for name in model.pool.tenants["a"].plan.layout.entries}
    assert adapted == set(expected)
    assert set(model.get_peft_config_dict("a")["target_modules"]) == set(expected)


def gradients_of(
    folder: Path, rows: list[Row], call: dict[str, Any] | None = None, **options: Any
) -> list[torch.Tensor]:
    """Return logps and gradient of one adapter, and of a second one beside it."""
    model = open_pool(folder, **options)
    found = []
    for at, name in enumerate(("a", "b")):
        model.add_adapter_to_model(name, lora(2 + 3 * at), seed=at)
    outputs = model.forward_backward(
        inputs=rows + rows, adapter_name=["a"] * len(rows) + ["b"] * len(rows), **(call or {})
    )
    found.append(torch.cat([output["logps"] for output in outputs]))
    return [*found, flat_of(model, "a").grad, flat_of(model, "b").grad]


@pytest.mark.sample(2)
@pytest.mark.parametrize("budget", [1, 17, 40, 100_000])
def test_numbers_do_not_depend_on_the_tokens_of_a_pass(folder: Path, budget: int) -> None:
    rows = make_rows(6, (9, 4, 21, 1, 13), seed=3)
    whole = gradients_of(folder, rows, share_prefixes=False)
    limits = measured_rounding(partial(gradients_of, folder, rows, share_prefixes=False))
    cut = gradients_of(folder, rows, share_prefixes=False, tokens_per_pass=budget)
    for one, other, limit in zip(cut, whole, limits, strict=True):
        assert distance(one, other) <= FACTOR * limit


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_numbers_do_not_depend_on_the_micro_batch_size(folder: Path, size: int) -> None:
    rows = make_rows(6, (9, 4, 21, 1, 13), seed=3)
    whole = gradients_of(folder, rows)
    limits = measured_rounding(partial(gradients_of, folder, rows))
    cut = gradients_of(folder, rows, {"micro_batch_size": size})
    for one, other, limit in zip(cut, whole, limits, strict=True):
        assert distance(one, other) <= FACTOR * limit


@pytest.mark.full
def test_recomputation_changes_no_bit(folder: Path) -> None:
    rows = make_rows(4, (9, 16), seed=3)
    kept = gradients_of(folder, rows, gradient_checkpointing=False)
    again = gradients_of(folder, rows, gradient_checkpointing=True)
    assert all(torch.equal(one, other) for one, other in zip(again, kept, strict=True)), VERSION


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_shared_prefixes_change_nothing_beyond_rounding(tmp_path: Path, architecture: str) -> None:
    """Groups as GRPO has them: the rows of a group begin with one prompt, and one row is a prefix of another."""
    folder = tiny_model(tmp_path, architecture)
    rows: list[Row] = []
    for group in range(3):
        prompt = make_rows(1, 20 + group, seed=group)[0]["input_ids"]
        for answer in make_rows(4, (7, 3, 7, 12), seed=10 + group):
            ids = prompt + answer["input_ids"]
            rows.append({"input_ids": ids, "labels": [-100] * (len(prompt) - 1) + ids[len(prompt) :] + [-100]})
    rows.append({"input_ids": rows[0]["input_ids"][:-2], "labels": [*rows[0]["labels"][:-3], -100]})
    alone = gradients_of(folder, rows, share_prefixes=False)
    shared = gradients_of(folder, rows, share_prefixes=True)
    limits = measured_rounding(partial(gradients_of, folder, rows, share_prefixes=False))
    for one, other, limit in zip(shared, alone, limits, strict=True):
        assert distance(one, other) <= FACTOR * limit


def test_shared_prefixes_are_computed_once(folder: Path) -> None:
    model = open_pool(folder)
    model.add_adapter_to_model("a", lora())
    prompt, rows = list(range(1, 33)), []
    for answer in range(4):
        ids = [*prompt, 100 + answer, 101, 102]
        rows.append({"input_ids": ids, "labels": [-100] * 31 + ids[32:] + [-100]})
    for share, computed in ((True, 32 + 4 * 3), (False, 4 * 35)):
        model.pool.passes.share_prefixes = share
        [result] = model.pool.run([Operation("a", "forward", rows)])
        assert isinstance(result, OperationResult)
        assert (result.usage.tokens, result.usage.computed) == (4 * 35, computed)


def test_the_loss_of_an_untrained_adapter_is_that_of_the_base(folder: Path) -> None:
    model = open_pool(folder)
    model.add_adapter_to_model("a", lora(init_lora_weights=True))
    row = make_rows(1, 12, seed=1)
    base, mine = model.forward_only(inputs=row + row, adapter_name=[None, "a"])
    assert torch.equal(base["logps"], mine["logps"])
    assert -float(base["logps"].sum()) / 11 == pytest.approx(math.log(VOCABULARY), rel=0.1)
