"""One node of the graph in place of PEFT's layer: the same numbers, PEFT's names, and PEFT's own way when in doubt."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.helpers import disable_input_dtype_casting
from peft.tuners import lora
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from twinkle.kernel import kernelize, unkernelize
from twinkle.testing import tiny_model
from twinkle_transformers import adapters
from twinkle_transformers.memory import saved_bytes
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.sampling.adapters import LiveAdapters

IN, OUT, RANK = 24, 40, 4


class Base(nn.Module):
    """A model of one layer."""

    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.q: nn.Module = Conv1D(OUT, IN) if kind == "Conv1D" else nn.Linear(IN, OUT, bias=bias)

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.q(x, **kwargs)


def pair(kind: str = "Linear", bias: bool = True, dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Any, Any]:
    """Return one model twice: as ours computes it and as PEFT does."""
    torch.manual_seed(0)
    wanted = {"r": RANK, "lora_alpha": 6, "target_modules": ["q"], "init_lora_weights": False} | config
    base = Base(kind, bias).to(dtype)
    if kind == "Conv1D":
        nn.init.normal_(base.q.bias)  # type: ignore[arg-type]
    theirs = peft.get_peft_model(base, peft.LoraConfig(fan_in_fan_out=kind == "Conv1D", **wanted))
    if dtype == torch.float64:
        theirs = theirs.double()
    ours = copy.deepcopy(theirs)
    adapters.fuse_layers(ours)
    return ours, theirs


def layer(model: Any) -> Any:
    return model.base_model.model.q


def numbers(model: Any, x: Tensor, call: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Return output and gradients; dropout masks are those of one seed."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    y = (call or model)(x)
    torch.manual_seed(6)
    y.backward(torch.randn(y.shape, dtype=torch.float64).to(y.dtype))
    assert x.grad is not None
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}


def error(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest norm-relative difference."""
    assert mine.keys() == wanted.keys()
    pairs = ((mine[k].detach().double(), wanted[k].detach().double()) for k in wanted)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def is_one_node(y: Tensor) -> bool:
    """Say whether nothing but views lies between an output and our node."""
    node: Any = y.grad_fn
    return type(node).__name__ == "_AdaptedBackward"


# numbers


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
@pytest.mark.parametrize("shape", [(IN,), (7, IN), (3, 5, IN), (2, 3, 5, IN), (0, IN), (2, 0, IN)], ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(kind: str, shape: tuple[int, ...]) -> None:
    ours, _ = pair(kind, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    got = numbers(ours, x)
    part = layer(ours)
    w = part.base_layer.weight.t() if kind == "Conv1D" else part.base_layer.weight
    a, b, s = part.lora_A["default"].weight, part.lora_B["default"].weight, 6 / RANK
    torch.manual_seed(6)
    g = torch.randn(*shape[:-1], OUT, dtype=torch.float64).view(-1, OUT)
    rows = x.view(-1, IN)
    wanted = {
        "y": (rows @ w.t() + part.base_layer.bias + s * rows @ a.t() @ b.t()).view(*shape[:-1], OUT),
        "x": (g @ w + s * g @ b @ a).view(shape),
        "base_model.model.q.lora_A.default.weight": s * (g @ b).t() @ rows,
        "base_model.model.q.lora_B.default.weight": s * g.t() @ (rows @ a.t()),
    }
    assert error(got, wanted) < 1e-12


@pytest.mark.sample(2)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-7), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bias", [True, False])
def test_numbers_are_pefts(dtype: torch.dtype, limit: float, dropout: float, bias: bool) -> None:
    ours, theirs = pair(dtype=dtype, bias=bias, lora_dropout=dropout)
    x = torch.randn(3, 50, IN, dtype=dtype)
    assert is_one_node(ours(x))
    assert error(numbers(ours, x), numbers(theirs, x)) < limit
    assert error(numbers(ours.eval(), x), numbers(theirs.eval(), x)) < limit
    with torch.no_grad():
        assert error({"y": ours(x)}, {"y": theirs(x)}) < limit


def test_float32_is_as_near_to_float64_as_pefts() -> None:
    ours, theirs = pair()
    x = torch.randn(3, 200, IN)
    exact = numbers(copy.deepcopy(theirs).double(), x.double())
    mine, peers = numbers(ours, x), numbers(theirs, x)
    for key in exact:
        assert error({"": mine[key]}, {"": exact[key]}) < 1.2 * error({"": peers[key]}, {"": exact[key]}), key


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_under_autocast_numbers_are_no_further_from_the_truth_than_pefts(base: torch.dtype, dropout: float) -> None:
    ours, theirs = pair(dtype=base, lora_dropout=dropout)
    truth, x = copy.deepcopy(theirs).double(), torch.randn(4, 100, IN).bfloat16()
    exact = numbers(truth, x.double()) if not dropout else None
    with torch.autocast("cpu", torch.bfloat16):
        assert is_one_node(ours(x))
        mine, peers = numbers(ours, x), numbers(theirs, x)
    assert {k: v.dtype for k, v in mine.items()} == {k: v.dtype for k, v in peers.items()}
    if exact is None:
        assert error(mine, peers) < 1e-2
        return
    for key in exact:
        assert error({"": mine[key]}, {"": exact[key]}) < 1.1 * error({"": peers[key]}, {"": exact[key]})


@pytest.mark.parametrize("form", ["transposed", "cut", "expanded"])
def test_rows_may_lie_anywhere_in_memory(form: str) -> None:
    ours, theirs = pair(dtype=torch.float64)
    x = torch.randn(6, 5, 2 * IN, dtype=torch.float64)
    x = {"transposed": x[..., :IN].transpose(0, 1), "cut": x[::2, 1:, ::2], "expanded": x[:, :1, :IN].expand(6, 5, IN)}[
        form
    ]
    for model in (ours, theirs):
        model.zero_grad()
    mine, peers = ours(x), theirs(x)
    torch.testing.assert_close(mine, peers, rtol=0, atol=1e-12)
    g = torch.randn(5, mine.shape[0], OUT, dtype=torch.float64).transpose(0, 1)[:, : mine.shape[1]]
    mine.backward(g.expand_as(mine) if g.shape == mine.shape else torch.ones_like(mine))
    peers.backward(g.expand_as(mine) if g.shape == mine.shape else torch.ones_like(mine))
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-11, msg=name)


def test_gradients_add_up_and_hooks_on_parameters_see_them() -> None:
    ours, _ = pair(dtype=torch.float64)
    x, seen = torch.randn(5, IN, dtype=torch.float64), []
    weight = layer(ours).lora_B["default"].weight
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    for part in (x[:2], x[2:]):
        ours(part).sum().backward()
    torch.testing.assert_close(weight.grad, sum(seen))
    weight.grad = None
    ours(x).sum().backward()
    torch.testing.assert_close(weight.grad, seen[0] + seen[1])


@pytest.mark.parametrize("drops", [False, True])
def test_the_gradient_has_a_gradient(drops: bool) -> None:
    torch.manual_seed(0)
    x, down, up = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 3), (2, 3), (3, 2)))
    weight, mask = torch.randn(3, 3, dtype=torch.float64), torch.tensor([[0.0, 2.0, 2.0], [2.0, 0.0, 2.0]]).double()

    def function(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return adapters.lora_linear(x, weight, None, down, up, 0.7, (lambda x: x * mask) if drops else None)

    assert torch.autograd.gradcheck(function, (x, down, up))
    assert torch.autograd.gradgradcheck(function, (x, down, up))


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B", "both", "x"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    results = []
    for model in pair(dtype=torch.float64):
        part, x = layer(model), torch.ones(3, IN, dtype=torch.float64, requires_grad=frozen != "x")
        for name in ("lora_A", "lora_B"):
            getattr(part, name).requires_grad_(frozen not in (name, "both"))
        model(x).pow(2).sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for mine, peers in zip(*results, strict=True):
        torch.testing.assert_close(mine, peers) if peers is not None else None
        assert (mine is None) == (peers is None)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_recomputation_changes_no_number(dropout: float) -> None:
    ours, _ = pair(dtype=torch.float64, lora_dropout=dropout)
    x = torch.randn(6, IN, dtype=torch.float64)
    again = numbers(ours, x, lambda x: checkpoint(ours, x, use_reentrant=False))
    assert all(torch.equal(v, again[k]) for k, v in numbers(ours, x).items())


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_no_more_is_kept_for_the_backward_than_by_peft(cast: bool, dropout: float) -> None:
    kept = []
    for model in pair(dtype=torch.bfloat16 if cast else torch.float32, lora_dropout=dropout):
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        x = torch.randn(64, IN, dtype=torch.bfloat16 if cast else torch.float32, requires_grad=True)

        def forward(_: int, model: Any = model, x: Tensor = x) -> object:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                return model(x)

        kept.append(saved_bytes(forward, 0, own))
    assert kept[0] <= kept[1]
    if not dropout:
        assert kept[0] == 64 * (IN + RANK) * (2 if cast else 4)


# calls that go PEFT's own way


def _two(model: Any) -> None:
    torch.manual_seed(3)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


def _elsewhere(model: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q"], init_lora_weights=False))
    model.set_adapter("other")
    del layer(model).lora_A["other"]


ODD: dict[str, Callable[[Any], object]] = {
    "two active": _two,
    "active elsewhere": _elsewhere,
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "trained base": lambda model: layer(model).base_layer.weight.requires_grad_(),
    "trained bias": lambda model: layer(model).base_layer.bias.requires_grad_(),
    "hook on the base": lambda model: layer(model).base_layer.register_forward_hook(lambda m, i, y: y * 2),
    "hook on A": lambda model: layer(model).lora_A["default"].register_forward_hook(lambda m, i, y: y * 2),
    "hook before B": lambda model: layer(model).lora_B["default"].register_forward_pre_hook(lambda m, i: i[0] * 2),
    "hook on B's gradient": lambda model: (
        layer(model).lora_B["default"].register_full_backward_hook(lambda m, i, o: (i[0] * 3,))
    ),
    "another base forward": lambda model: setattr(
        layer(model).base_layer, "forward", lambda x: x.repeat(1, 2)[:, :OUT]
    ),
    "another class of B": lambda model: setattr(layer(model).lora_B["default"], "__class__", _Doubled),
    "another dropout": lambda model: layer(model).lora_dropout.update({"default": _Negated()}),
    "wider adapter": lambda model: layer(model).lora_A.double() and layer(model).lora_B.double(),
}


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class _Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", ODD)
def test_whatever_is_not_plain_is_computed_by_peft(change: str) -> None:
    both = pair()
    x, results = torch.randn(5, IN), []
    for model in both:
        ODD[change](model)
        results.append(numbers(model, x))
    assert all(torch.equal(results[0][k], v) for k, v in results[1].items())
    assert not is_one_node(both[0](x.requires_grad_()))


@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"lora_bias": True}, {"init_lora_weights": "pissa"}, {"use_rslora": True}],
    ids=lambda c: next(iter(c)),
)
def test_every_configuration_computes_what_it_does_in_peft(config: dict[str, Any]) -> None:
    ours, theirs = pair(**config)
    x = torch.randn(5, IN)
    assert error(numbers(ours, x), numbers(theirs, x)) < 3e-7
    assert is_one_node(ours(x)) == (config.keys() <= {"init_lora_weights", "use_rslora"})


def test_several_adapters_in_one_batch_are_pefts_affair() -> None:
    results = []
    for model in pair():
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q"], lora_alpha=9))
        torch.manual_seed(1)
        nn.init.normal_(layer(model).lora_B["other"].weight)
        nn.init.normal_(layer(model).lora_A["other"].weight)
        results.append(model.eval()(torch.ones(3, IN), adapter_names=["default", "other", "__base__"]))
    assert torch.equal(*results)
    assert not torch.equal(results[0][0], results[0][2])


def test_float64_stays_wide_under_autocast() -> None:
    ours, theirs = pair(dtype=torch.float64)
    x = torch.randn(5, IN, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.float64
        assert torch.equal(ours(x), theirs(x))


def test_inputs_of_another_dtype_are_pefts_affair() -> None:
    ours, theirs = pair(dtype=torch.bfloat16)
    x = torch.randn(5, IN).bfloat16()
    assert ours(x).dtype == theirs(x).dtype == torch.bfloat16
    assert torch.equal(ours(x), theirs(x))
    ours, theirs = pair()
    with pytest.raises(RuntimeError, match="dtype"), disable_input_dtype_casting(ours):
        ours(x)


def test_functions_of_torch_func_see_through_the_layer() -> None:
    ours, theirs = pair(dtype=torch.float64)
    x = torch.randn(5, IN, dtype=torch.float64)
    found = []
    for model in (ours, theirs):
        parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

        def loss(values: dict[str, Tensor], row: Tensor, model: Any = model) -> Any:
            return torch.func.functional_call(model, values, (row,)).pow(2).sum()

        found.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x))
    assert error(*found) < 1e-12


# what PEFT's users do with the model


def test_names_parameters_and_text_are_unchanged() -> None:
    _, theirs = pair()
    before, keys, text = [id(p) for p in theirs.parameters()], list(theirs.state_dict()), repr(theirs)
    adapters.fuse_layers(theirs)
    adapters.fuse_layers(theirs)
    assert ([id(p) for p in theirs.parameters()], list(theirs.state_dict()), repr(theirs)) == (before, keys, text)
    assert isinstance(layer(theirs), lora.Linear)
    assert type(layer(theirs)).__mro__[1] is lora.Linear


def test_adapters_are_switched_merged_and_taken_off_as_ever(tmp_path: Path) -> None:
    ours, theirs = pair(dtype=torch.float64)
    x = torch.randn(5, IN, dtype=torch.float64)
    torch.manual_seed(2)
    ours.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q"], init_lora_weights=False))
    ours.double()
    first = ours(x)
    ours.set_adapter("other")
    assert is_one_node(ours(x))
    assert not torch.allclose(ours(x), first)
    ours.set_adapter("default")
    torch.testing.assert_close(ours(x), theirs(x))
    with ours.disable_adapter():
        torch.testing.assert_close(ours(x), layer(theirs).base_layer(x))
    assert is_one_node(ours(x))
    ours.merge_adapter(["default"])
    torch.testing.assert_close(ours(x), theirs(x))
    ours.unmerge_adapter()
    torch.testing.assert_close(ours(x), theirs(x))
    ours.base_model.model.q.set_scale("default", 2.0)
    theirs.base_model.model.q.set_scale("default", 2.0)
    assert is_one_node(ours(x))
    torch.testing.assert_close(ours(x), theirs(x))
    ours.delete_adapter("other")
    ours.base_model.model.q.set_scale("default", 1.0)
    ours.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(Base("Linear", True).double(), str(tmp_path), autocast_adapter_dtype=False)
    assert all(torch.equal(v.double(), ours.state_dict()[k]) for k, v in loaded.state_dict().items() if "lora_" in k)
    plain = ours.unload()
    assert type(plain.q) is nn.Linear
    torch.testing.assert_close(plain(x), layer(theirs).base_layer(x))


def test_merge_and_unload_leaves_plain_layers() -> None:
    ours, theirs = pair(dtype=torch.float64)
    x = torch.randn(5, IN, dtype=torch.float64)
    plain = ours.merge_and_unload()
    assert type(plain.q) is nn.Linear
    torch.testing.assert_close(plain(x), theirs(x))


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_computes_with_its_own_weights(way: Callable[[Any], Any]) -> None:
    ours, _ = pair()
    x = torch.randn(5, IN)
    copied, before = way(ours), ours(x).detach()
    assert torch.equal(copied(x), before)
    assert is_one_node(copied(x))
    with torch.no_grad():
        layer(copied).lora_B["default"].weight.add_(1.0)
    assert torch.equal(ours(x), before)
    assert not torch.equal(copied(x), before)


def test_a_kernel_takes_the_place_of_the_layer_and_gives_it_back() -> None:
    ours, _ = pair()
    x = torch.randn(5, IN)
    before = ours(x)
    kernelize(ours, {lora.Linear: lambda part, x: x})
    assert torch.equal(ours(x), x)
    unkernelize(ours)
    assert torch.equal(ours(x), before)
    kernelize(ours, {nn.Linear: lambda part, x: 2 * nn.functional.linear(x, part.weight, part.bias)})
    assert not is_one_node(ours(x))
    assert not torch.allclose(ours(x), before)
    unkernelize(ours)
    assert torch.equal(ours(x), before)


def test_a_compiler_sees_pefts_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    x = torch.randn(5, IN)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(ours(x), theirs(x))
    assert not is_one_node(ours(x))


# models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def rows(seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (5, 9, 3, 7)]
    return [{"input_ids": row, "labels": [*row[1:], -100]} for row in ids]


LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.mark.full
@pytest.mark.parametrize("recompute", [True, False])
def test_five_steps_of_a_model_are_those_of_peft(folder: Path, recompute: bool) -> None:
    torch.manual_seed(1)
    model = TransformersModel(
        model_id=str(folder), mixed_precision="no", dtype="float64", gradient_checkpointing=recompute
    )
    model.add_adapter_to_model("default", LORA)
    model.model.double()
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64),
        peft.LoraConfig(**LORA, task_type="CAUSAL_LM"),
    ).double()
    theirs.load_state_dict(model.model.state_dict())
    model.set_optimizer("SGD", lr=0.1, weight_decay=0.0)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for seed in range(5):
        model.forward_backward(inputs=rows(seed))
        model.clip_grad_and_step(max_grad_norm=0)
        total = torch.zeros((), dtype=torch.float64)
        for row in rows(seed):
            log_p = theirs(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
            total = total - log_p[:-1].gather(-1, torch.tensor(row["labels"][:-1])[:, None]).sum()
        (total / sum(len(row["labels"]) - 1 for row in rows(seed))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    mine = {n: p.detach() for n, p in model.model.named_parameters() if p.requires_grad}
    assert error(mine, {n: p.detach() for n, p in theirs.named_parameters() if p.requires_grad}) < 1e-6


def test_every_adapted_layer_of_a_model_is_one_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = adapters.lora_linear

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(adapters, "lora_linear", counted)
    model = TransformersModel(model_id=str(folder), mixed_precision="bf16", gradient_checkpointing=False)
    model.add_adapter_to_model("a", LORA)
    model.add_adapter_to_model("b", LORA | {"lora_dropout": 0.2})
    model.set_optimizer("SGD", lr=0.1)
    for name in ("a", "b"):
        calls.clear()
        model.forward_backward(inputs=rows(), adapter_name=name)
        assert len(calls) == 2 * 7
    calls.clear()
    model.forward_only(inputs=rows(), disable_lora=True)
    assert not calls
    model.forward_only(inputs=rows(), adapter_name="a")
    assert len(calls) == 2 * 7


def test_an_engine_on_the_same_layers_is_no_hindrance(folder: Path) -> None:
    from twinkle.data_format import SamplingParams
    from twinkle_transformers.sampler import TorchSampler

    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    model.add_adapter_to_model("default", LORA)
    before = model.forward_only(inputs=rows())["logps"]
    sampler = TorchSampler(model=model)
    sampler.sample(inputs=[{"input_ids": [1, 2, 3]}], sampling_params=SamplingParams(max_tokens=2))
    assert LiveAdapters().version(model.model, "default").layout.size
    y = layer_of(model)(torch.ones(1, 64, requires_grad=True))
    assert is_one_node(y)
    for mine, wanted in zip(model.forward_only(inputs=rows())["logps"], before, strict=True):
        assert torch.equal(mine, wanted)


def layer_of(model: TransformersModel) -> Any:
    return model.model.base_model.model.model.layers[0].self_attn.q_proj
