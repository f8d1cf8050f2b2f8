"""Adapters on experts give each token what PEFT gives it where its adapter is alone, and PEFT reads their files."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rounding import FACTOR, units
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from twinkle.errors import ArgumentError, CheckpointError, Unsupported
from twinkle_torch.numerics import RoundingNoise
from twinkle_torch.segments import Segments
from twinkle_transformers.lowrank.grouped import Groups
from twinkle_transformers.lowrank.layout import Layout, Shape
from twinkle_transformers.lowrank.products import AdapterGroup, Routing
from twinkle_transformers.segments import Segmenter, recompute_contexts, routing_now
from twinkle_transformers.sites import (
    as_peft_reads,
    expert_views,
    find_expert_sites,
    find_sites,
    from_peft,
    install,
    install_experts,
    match_experts,
    to_peft,
    uninstall,
    uninstall_experts,
)

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeConfig", {}),
    "qwen2-moe": ("Qwen2MoeConfig", {"shared_expert_intermediate_size": 16}),
    "mixtral": ("MixtralConfig", {}),
    "gpt-oss": ("GptOssConfig", {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
            "v_head_dim": 6, "qk_nope_head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip
BOTH = ("experts.gate_up_proj", "experts.down_proj")
LINEAR = ["q_proj", "q_b_proj", "o_proj"]
LENGTHS = (9, 4, 1, 13)
"""Of the sequences; each is a row of its own where PEFT is alone."""


def make(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    name, changes = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(SMALL | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # transformers' grouped products are for narrower numbers
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim != 1 or not parameter.any():
                parameter.normal_(std=0.2)
    return model.to(dtype).requires_grad_(False)


class Adapter:
    """An adapter of random weights, and its configuration for PEFT."""

    def __init__(
        self, model: Any, rank: int, *, targets: Sequence[str] = BOTH, seed: int = 0, std: float = 0.3
    ) -> None:
        self.rank, self.targets = rank, list(targets)
        self.linears = {n: s for n, s in find_sites(model).items() if n.rpartition(".")[2] in LINEAR}
        everything = find_expert_sites(model)
        self.experts = {n: everything[n] for n in match_experts("a", self.config(), everything, model)}
        shapes = [(n, Shape(rank, s.fan_in, s.fan_out, 12 / rank)) for n, s in self.linears.items()]
        shapes += [(n, Shape(rank, s.fan_in, s.fan_out, 12 / rank, s.experts)) for n, s in self.experts.items()]
        self.layout = Layout.of(shapes)
        draw = torch.Generator().manual_seed(seed)
        self.flat = (torch.randn(self.layout.size, generator=draw, dtype=torch.float64) * std).to(model.dtype)

    def config(self) -> LoraConfig:
        return LoraConfig(r=self.rank, lora_alpha=12, target_modules=LINEAR, target_parameters=self.targets)

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in self.linears:
            entry = self.layout.entries[name]
            found[f"base_model.model.{name}.lora_A.weight"] = entry.down_of(flat).clone()
            found[f"base_model.model.{name}.lora_B.weight"] = entry.up_of(flat).t().contiguous()
        for name, site in self.experts.items():
            found |= to_peft(site, self.layout.entries[name], flat, self.layout.entries)
        return found

    def peft(self, kind: str, dtype: torch.dtype) -> Any:
        """Return PEFT's model with these weights."""
        model = quietly_wrapped(make(kind, dtype), self.config())
        parameters = dict(model.named_parameters())
        mine = {key.replace(".weight", ".default.weight"): value for key, value in self.tensors(self.flat).items()}
        assert mine.keys() == {name for name, value in parameters.items() if value.requires_grad}
        with torch.no_grad():
            for key, value in mine.items():
                parameters[key].copy_(value)
        return model


def quietly_wrapped(model: Any, config: LoraConfig) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


@contextmanager
def installed(model: Any) -> Iterator[None]:
    linears, experts = list(find_sites(model).values()), list(find_expert_sites(model).values())
    install(linears)
    install_experts(experts)
    yield
    uninstall(linears)
    uninstall_experts(experts)


def tokens(lengths: Sequence[int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(3, 64, (length,), generator=draw) for length in lengths]


def weigh(logits: Tensor, number: int) -> Tensor:
    """Return a scalar that depends on all logits of a sequence `[T, V]`, with other factors for each sequence."""
    draw = torch.Generator().manual_seed(number)
    return (logits * torch.randn(logits.shape, generator=draw, dtype=torch.float64).to(logits)).sum()


def fused(
    model: Any, adapter_groups: list[AdapterGroup], trained: int, lengths: Sequence[int] = LENGTHS
) -> list[Tensor]:
    """Run one pass; return the logits of each sequence, after the backward of those that are trained."""
    routing = Routing(adapter_groups, sum(lengths), trained)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with installed(model), Segmenter(model).within(Segments.of(lengths), routing):
        logits = model(torch.cat(tokens(lengths))[None], position_ids=positions, use_cache=False).logits[0]
        parts = logits.split(list(lengths))
        if trained:
            torch.stack([weigh(part, number) for number, part in enumerate(parts)]).sum().backward()
    return [part.detach() for part in parts]


def alone(model: Any, number: int, lengths: Sequence[int] = LENGTHS) -> Tensor:
    """Run one sequence by itself, backward too where something can have a gradient; return its logits."""
    logits = model(tokens(lengths)[number][None], use_cache=False).logits[0]
    if logits.requires_grad:
        weigh(logits, number).backward()
    return logits.detach()


def error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


def adapter_group(adapters: Sequence[Adapter], start: int, lengths: Sequence[int]) -> AdapterGroup:
    weights = torch.stack([adapter.flat for adapter in adapters])
    return AdapterGroup(adapters[0].layout, Groups(start, tuple(lengths)), weights, torch.zeros_like(weights))


def assert_gradients(adapter: Adapter, mine: AdapterGroup, operation: int, wrapped: Any, limit: float) -> None:
    """Compare an operation's buffer with what PEFT's parameters have."""
    assert mine.grads is not None
    parameters = dict(wrapped.named_parameters())
    named = adapter.tensors(mine.grads[operation])
    theirs = [parameters[key.replace(".weight", ".default.weight")].grad.flatten() for key in named]
    ours = [value.flatten().double() for value in named.values()]
    assert error(torch.cat(ours), torch.cat(theirs)) < limit


def rounding_of_logits(kind: str, dtype: torch.dtype) -> float:
    """Return how far rounding moves the logits of a model from those in float64: some routers compute in float32."""
    exact, near, found = make(kind), make(kind, dtype), []
    for number in range(len(LENGTHS)):
        theirs = alone(exact, number)
        with RoundingNoise(number, units=units()):
            found.append(error(alone(near, number).double(), theirs))
        found.append(error(alone(near, number).double(), theirs))
    return max(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", MODELS)
def test_two_adapters_of_different_rank_in_one_pass_are_each_as_with_peft_alone(kind: str) -> None:
    model = make(kind)
    first, second = Adapter(model, 4, seed=1), Adapter(model, 3, seed=2)
    adapter_groups = [adapter_group([first], 0, [LENGTHS[0]]), adapter_group([second], LENGTHS[0], [sum(LENGTHS[1:])])]
    logits = fused(model, adapter_groups, sum(LENGTHS))
    limit = max(1e-10, FACTOR * rounding_of_logits(kind, torch.float64))
    for adapter, mine, numbers in ((first, adapter_groups[0], [0]), (second, adapter_groups[1], [1, 2, 3])):
        wrapped = adapter.peft(kind, torch.float64)
        for number in numbers:
            assert error(logits[number], alone(wrapped, number)) < limit
        assert_gradients(adapter, mine, 0, wrapped, limit)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", MODELS)
def test_in_float32_the_numbers_are_those_of_peft_but_for_rounding(kind: str) -> None:
    model = make(kind, torch.float32)
    adapter = Adapter(model, 4, std=0.1)
    mine = adapter_group([adapter], 0, [sum(LENGTHS)])
    logits = fused(model, [mine], sum(LENGTHS))
    exact = adapter.peft(kind, torch.float64)
    theirs = [alone(exact, number) for number in range(len(LENGTHS))]
    limit = FACTOR * rounding_of_logits(kind, torch.float32)
    assert limit < 1e-4, "a fault would be as small"
    assert error(torch.cat(logits).double(), torch.cat(theirs)) < limit
    assert_gradients(adapter, mine, 0, exact, limit)


@pytest.mark.sample(2)
@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]])
def test_some_rows_see_the_base_model_alone_and_some_are_not_trained(targets: tuple[str, ...]) -> None:
    model = make("qwen3-moe")
    lengths = (6, 8, 3, 5, 7)
    one, two, reference = (Adapter(model, 4, targets=targets, seed=seed) for seed in (1, 2, 3))
    trained, last = adapter_group([one, two], 0, lengths[:2]), adapter_group([reference], 22, lengths[4:])
    last.grads = None
    logits = fused(model, [trained, last], 17, lengths)
    base = make("qwen3-moe")
    for number in (2, 3):
        assert error(logits[number], alone(base, number, lengths)) < 1e-10
    assert error(logits[4], alone(reference.peft("qwen3-moe", torch.float64), 4, lengths)) < 1e-10
    for number, adapter in enumerate((one, two)):
        wrapped = adapter.peft("qwen3-moe", torch.float64)
        assert error(logits[number], alone(wrapped, number, lengths)) < 1e-10
        assert_gradients(adapter, trained, number, wrapped, 1e-10)


def test_a_neighbour_changes_an_operation_by_rounding_at_most_and_its_nan_by_nothing() -> None:
    model = make("qwen3-moe", torch.float32)
    one, two = Adapter(model, 4, seed=1), Adapter(model, 4, seed=2)
    lonely = adapter_group([one], 0, [9])
    logits = fused(model, [lonely], 9, (9,))[0]
    two.flat.fill_(float("nan"))
    both = adapter_group([one, two], 0, [9, 12])
    beside = fused(model, [both], 21, (9, 12))
    assert error(beside[0], logits) < 2e-6
    assert lonely.grads is not None
    assert both.grads is not None
    assert error(both.grads[0], lonely.grads[0]) < 2e-6
    assert beside[1].isnan().all()


def test_a_pass_without_training_has_the_same_outputs_and_no_graph() -> None:
    model = make("gpt-oss")
    adapter = Adapter(model, 4)
    mine = adapter_group([adapter], 0, [sum(LENGTHS)])
    logits = fused(model, [mine], sum(LENGTHS))
    again = fused(model, [adapter_group([adapter], 0, [sum(LENGTHS)])], 0)
    assert all(error(a, b) < 1e-12 for a, b in zip(again, logits, strict=True))


def test_recomputed_activations_give_the_same_gradients() -> None:
    model = make("qwen3-moe")
    adapter = Adapter(model, 4)
    plain, again = (adapter_group([adapter], 0, [sum(LENGTHS)]) for _ in range(2))
    fused(model, [plain], sum(LENGTHS))
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})
    fused(model, [again], sum(LENGTHS))
    assert plain.grads is not None
    assert again.grads is not None
    assert torch.equal(again.grads, plain.grads)


def test_half_precision_by_autocast_stays_near_the_exact_numbers() -> None:
    model = make("qwen3-moe", torch.float32)
    adapter = Adapter(model, 4)
    mine = adapter_group([adapter], 0, [sum(LENGTHS)])
    exact = fused(model, [mine], sum(LENGTHS))
    half = AdapterGroup(mine.layout, mine.groups, mine.weights.bfloat16(), torch.zeros_like(mine.weights))
    with torch.autocast("cpu", torch.bfloat16):
        logits = fused(model, [half], sum(LENGTHS))
    assert error(torch.cat(logits).float(), torch.cat(exact)) < 0.1
    assert half.grads is not None
    assert half.grads.dtype == torch.float32
    assert half.grads.isfinite().all()


def test_without_adapters_on_experts_the_layer_is_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3-moe")
    layer = model.model.layers[0].mlp.experts
    adapter = Adapter(model, 4, targets=())
    passes: list[Any] = []
    own = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda *args: passes.append(routing_now()) or own(*args))
    fused(model, [adapter_group([adapter], 0, [sum(LENGTHS)])], sum(LENGTHS))
    assert sum(routing is not None for routing in passes) == 2
    passes.clear()
    with installed(model):
        assert torch.isfinite(model(tokens((4,))[0][None]).logits).all()
    assert passes == [None, None]
    with_experts = adapter_group([Adapter(model, 4)], 0, [sum(LENGTHS)])
    passes.clear()
    fused(model, [with_experts], sum(LENGTHS))
    assert not any(passes)


def test_layers_get_their_own_forward_back_and_a_replaced_one_is_refused() -> None:
    model = make("qwen3-moe")
    sites = find_expert_sites(model)
    layer = model.model.layers[0].mlp.experts
    install_experts(sites.values())
    install_experts(sites.values())
    assert "forward" in layer.__dict__
    uninstall_experts(sites.values())
    uninstall_experts(sites.values())
    assert "forward" not in layer.__dict__
    layer.forward = lambda *args: args[0]
    with pytest.raises(Unsupported, match=r"the forward of model\.layers\.0\.mlp\.experts was replaced"):
        install_experts(sites.values())
    del layer.forward
    model.model.layers[1].mlp.forward = lambda hidden_states: hidden_states
    with pytest.raises(Unsupported, match=r"the forward of model\.layers\.1\.mlp was replaced"):
        install_experts(sites.values())
    del model.model.layers[1].mlp.forward
    layer._is_expert_parallel = True
    with pytest.raises(Unsupported, match="are on several devices"):
        install_experts(sites.values())


def test_experts_that_lie_transposed_say_so_and_models_without_any_have_no_site() -> None:
    site = find_expert_sites(make("gpt-oss"))["model.layers.1.mlp.experts.gate_up_proj"]
    assert (site.experts, site.fan_in, site.fan_out, site.transposed) == (6, 32, 48, True)
    config = transformers.LlamaConfig(**{k: v for k, v in SMALL.items() if "expert" not in k})
    assert find_expert_sites(AutoModelForCausalLM.from_config(config)) == {}


def test_dropout_on_experts_is_refused_where_it_would_act() -> None:
    model = make("qwen3-moe")
    mine = adapter_group([Adapter(model, 4)], 0, [sum(LENGTHS)])
    mine.dropout = lambda name, size, dtype: torch.ones(sum(LENGTHS), size, dtype=dtype)
    with pytest.raises(Unsupported, match=r"lora_dropout must be 0 .*experts\.gate_up_proj"):
        fused(model, [mine], sum(LENGTHS))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]])
def test_peft_loads_what_is_written_here_and_its_files_are_read_here(
    kind: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = make(kind)
    adapter = Adapter(model, 3, targets=targets)
    adapter.config().save_pretrained(tmp_path)
    save_file(adapter.tensors(adapter.flat), tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(make(kind), tmp_path)
    wrapped = adapter.peft(kind, torch.float64)
    theirs, mine = get_peft_model_state_dict(loaded), get_peft_model_state_dict(wrapped)
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[key], mine[key]) for key in mine)
    assert torch.equal(alone(loaded, 0), alone(wrapped, 0))

    wrapped.save_pretrained(tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    back = adapter.flat.clone()
    for name, site in adapter.experts.items():
        entry = adapter.layout.entries[name]
        entry.down_of(back).fill_(7.0)
        from_peft(site, entry, tensors, back, adapter.layout.entries)
    assert torch.equal(back, adapter.flat)


def test_ranks_of_experts_are_never_rounded_up_and_their_matrices_are_views() -> None:
    site = find_expert_sites(make("qwen3-moe"))["model.layers.0.mlp.experts.down_proj"]
    shapes = [("linear", Shape(3, 8, 8, 1.0)), (site.name, Shape(3, site.fan_in, site.fan_out, 1.0, site.experts))]
    layout = Layout.of(shapes, rank_multiple=8)
    entry, flat = layout.entries[site.name], torch.zeros(layout.size)
    for number, (_, view) in enumerate(expert_views(site, entry, flat, layout.entries), 1):
        view.fill_(float(number))
    assert (entry.down_of(flat) == 1.0).all()
    assert (entry.up_of(flat) == 2.0).all()
    assert entry.rank == 3
    assert int((flat != 0).sum()) == 3 * site.experts * (site.fan_in + site.fan_out)


def test_files_that_do_not_fit_are_refused_by_name_and_change_nothing() -> None:
    site = find_expert_sites(make("qwen3-moe"))["model.layers.0.mlp.experts.gate_up_proj"]
    layout = Layout.of([(site.name, Shape(2, site.fan_in, site.fan_out, 1.0, site.experts))])
    entry, flat = layout.entries[site.name], torch.zeros(layout.size)
    tensors = to_peft(site, entry, torch.ones(layout.size), layout.entries)
    with pytest.raises(CheckpointError, match=r"no .*experts\.base_layer\.lora_A\.weight; the nearest is .*lora_A"):
        from_peft(site, entry, tensors, flat, [site.name, *site.later])
    larger = {key: torch.cat([value, value], int("lora_B" in key)) for key, value in tensors.items()}
    with pytest.raises(CheckpointError, match=r"lora_A.weight is \[24, 32\] in the file and \[12, 32\] here"):
        from_peft(site, entry, larger, flat, layout.entries)
    assert not flat.any()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"target_parameters": ["experts.gate_proj"]}, ArgumentError, "'experts.gate_proj' matches no parameter"),
        ({"target_parameters": ["mlp.gate.weight"]}, Unsupported, "means model.layers.0.mlp.gate.weight"),
        ({"lora_dropout": 0.1}, ArgumentError, "lora_dropout=0.1 together with target_parameters"),
        ({"use_dora": True}, ArgumentError, "use_dora=True together with target_parameters"),
    ],
)
def test_configurations_that_experts_cannot_have_are_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = make("qwen3-moe")
    config = LoraConfig(**({"target_modules": [], "target_parameters": list(BOTH)} | changes))
    with pytest.raises(error, match=words):
        match_experts("a", config, find_expert_sites(model), model)


def test_targets_match_as_in_peft() -> None:
    model = make("deepseek-v3")
    sites = find_expert_sites(model)
    for targets in (["down_proj"], ["model.layers.1.mlp.experts.gate_up_proj"], list(BOTH)):
        config = LoraConfig(target_modules=[], target_parameters=targets)
        mine = match_experts("a", config, sites, model)
        assert set(mine) == set(quietly_wrapped(make("deepseek-v3"), config).base_model.targeted_parameter_names)


def test_names_of_layers_that_became_experts_mean_what_they_mean_to_peft() -> None:
    model = make("qwen3-moe")
    given = LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    read = as_peft_reads(given, model)
    assert given.target_parameters is None
    assert match_experts("a", read, find_expert_sites(model), model) == list(find_expert_sites(model))
    theirs = quietly_wrapped(make("qwen3-moe"), given).peft_config["default"]
    for field in ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern"):
        assert getattr(read, field) == getattr(theirs, field), field
        assert getattr(as_peft_reads(read, model), field) == getattr(read, field), field
    with pytest.raises(ArgumentError, match=r"gate_proj without also targeting up_proj"):
        as_peft_reads(LoraConfig(target_modules=["gate_proj"]), model)
    plain = as_peft_reads(given, make("gpt-oss"))
    assert plain.target_modules == given.target_modules
