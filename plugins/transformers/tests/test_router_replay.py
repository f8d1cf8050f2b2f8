"""Experts that routers chose are recorded, and replayed exactly: padded, packed, in micro-batches and recomputed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from twinkle.data_format import SamplingParams
from twinkle.errors import ArgumentError, DataError, TrainingStateError, Unsupported
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.transformers.moe.router_replay import RouterReplayAction
from twinkle.processor import InputProcessor
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model, tiny_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 256, "bos_token_id": 257,
    "eos_token_id": 258, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "qk_nope_head_dim": 8, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeConfig", {}),
    "qwen3-moe-with-dense-layer": ("Qwen3MoeConfig", {"mlp_only_layers": [0]}),
    "qwen2-moe": ("Qwen2MoeConfig", {"shared_expert_intermediate_size": 16}),
    "mixtral": ("MixtralConfig", {}),
    "olmoe": ("OlmoeConfig", {"num_key_value_heads": 4}),
    "gpt-oss": ("GptOssConfig", {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "deepseek-v3": ("DeepseekV3Config", {**MLA, "first_k_dense_replace": 1}),
}
ROWS = [
    {"input_ids": [5, 9, 77, 30, 21, 8, 14], "labels": [9, 77, 30, 21, 8, 14, -100]},
    {"input_ids": [40, 3, 200], "labels": [3, 200, -100]},
    {"input_ids": [5, 9, 77, 31, 60], "labels": [9, 77, 31, 60, -100]},
]


def saved(folder: Path, kind: str) -> Path:
    name, changes = MODELS[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(SMALL | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim != 1 or not parameter.any():
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("qwen"), "qwen3-moe")


def opened(folder: Path, **options: Any) -> TransformersModel:
    options = {"mixed_precision": "no", "enable_router_replay": True, **options}
    return TransformersModel(model_id=str(folder), **options)


def shifted(experts: Tensor) -> list[Tensor]:
    """Return, for each row, other experts than the recorded ones."""
    return [(experts[row, : len(ROWS[row]["input_ids"])].long() + 1) % 6 for row in range(len(ROWS))]


def with_routes(routes: list[Any]) -> list[dict[str, Any]]:
    return [{**row, "routed_experts": table} for row, table in zip(ROWS, routes, strict=True)]


class FollowsGiven:
    """The reference: experts get prescribed indices, with weights from the formula of Qwen3-MoE."""

    def __init__(self, model: nn.Module, tables: Tensor) -> None:
        self.handles = []
        blocks = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeSparseMoeBlock"]
        for layer, block in enumerate(blocks):
            self.handles.append(block.experts.register_forward_pre_hook(self.hook(block.gate, tables[:, layer])))

    def hook(self, gate: Any, indices: Tensor) -> Any:
        def run(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            weights = (args[0] @ gate.weight.T).softmax(-1).gather(-1, indices)
            return args[0], indices, weights / weights.sum(-1, keepdim=True)

        return run

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize(
    "kind", [*list(MODELS)[:2], *(pytest.param(k, marks=pytest.mark.full) for k in list(MODELS)[2:])]
)
def test_a_recorded_routing_is_replayed_and_decides(kind: str, tmp_path: Path) -> None:
    model = opened(saved(tmp_path, kind))
    plain = model.forward_only(inputs=ROWS)
    recorded = model.forward_only(inputs=ROWS, router_replay_action=RouterReplayAction.RECORD)
    torch.testing.assert_close(recorded["logps"], plain["logps"], rtol=0, atol=0)
    routes = recorded["routed_experts"]
    layers = 2 if kind in ("qwen3-moe-with-dense-layer", "deepseek-v3") else 3
    assert routes.shape == (3, 7, layers, 2)
    assert routes.dtype == torch.int16
    assert bool((routes[1, 3:] == -1).all())
    same = model.forward_only(inputs=with_routes(list(routes)), router_replay_action="replay_forward")
    torch.testing.assert_close(same["logps"], plain["logps"], rtol=0, atol=0)
    assert torch.equal(same["routed_experts"], routes)
    others = shifted(routes)
    moved = model.forward_only(inputs=with_routes(others), router_replay_action="replay_forward")
    for row, table in enumerate(others):
        assert torch.equal(moved["routed_experts"][row, : len(table)].long(), table)
    assert float((moved["logps"] - plain["logps"]).abs().max()) > 1e-3
    torch.testing.assert_close(model.forward_only(inputs=ROWS)["logps"], plain["logps"], rtol=0, atol=0)


def test_the_recorded_experts_are_the_best_of_the_routers_own_logits(qwen: Path) -> None:
    model = opened(qwen)
    routes = model.forward_only(inputs=ROWS[:1], router_replay_action="record")["routed_experts"][0]
    with torch.no_grad():
        logits = model.model(torch.tensor([ROWS[0]["input_ids"]]), output_router_logits=True).router_logits
    expected = torch.stack([scores.topk(2).indices for scores in logits], 1)
    assert torch.equal(routes.long().sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize(
    "how", ["padded", "packed", "recomputed", *(pytest.param(how, marks=pytest.mark.full) for how in ("left", "micro"))]
)
def test_loss_and_gradients_are_those_of_the_prescribed_experts(qwen: Path, how: str) -> None:
    model = opened(qwen, gradient_checkpointing=how == "recomputed")
    routes = opened(qwen).forward_only(inputs=ROWS, router_replay_action="record")["routed_experts"]
    others = shifted(routes)
    if how in ("left", "packed"):
        model.set_processor(InputProcessor, **({"padding_side": "left"} if how == "left" else {"padding_free": True}))
    model.set_optimizer("SGD", lr=0.0)
    size = 2 if how == "micro" else None
    out = model.forward_backward(
        inputs=with_routes(others), router_replay_action=RouterReplayAction.REPLAY_FORWARD, micro_batch_size=size
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    total = torch.zeros(())
    for row, table in zip(ROWS, others, strict=True):
        follows = FollowsGiven(reference, table)
        log_p = reference(torch.tensor([row["input_ids"]])).logits[0, :-1].log_softmax(-1)
        total = total - log_p.gather(-1, torch.tensor(row["labels"][:-1])[:, None]).sum()
        follows.remove()
    count = sum(len(row["labels"]) - 1 for row in ROWS)
    assert out["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    total.backward()
    found = dict(model.model.named_parameters())
    checked = 0
    for name, parameter in reference.named_parameters():
        if name.endswith(("mlp.gate.weight", "gate_up_proj", "down_proj", "q_proj.weight")):
            assert float(parameter.grad.abs().max()) > 0
            torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked == 12


def test_rows_without_a_record_are_routed_by_the_model(qwen: Path) -> None:
    model = opened(qwen)
    routes = model.forward_only(inputs=ROWS, router_replay_action="record")["routed_experts"]
    plain = model.forward_only(inputs=ROWS)["logps"]
    mixed = [ROWS[0], with_routes(shifted(routes))[1], {**ROWS[2], "routed_experts": None}]
    out = model.forward_only(inputs=mixed, router_replay_action="replay_forward")
    torch.testing.assert_close(out["logps"][[0, 2]], plain[[0, 2]], rtol=1e-6, atol=1e-6)
    assert float((out["logps"][1] - plain[1]).abs().max()) > 1e-3
    part = shifted(routes)[0]
    part[2:] = -1
    out = model.forward_only(inputs=[{**ROWS[0], "routed_experts": part}], router_replay_action="replay_forward")
    assert torch.equal(out["routed_experts"][0, :2].long(), part[:2])
    unread = [{**ROWS[0], "routed_experts": "nothing reads this"}]
    torch.testing.assert_close(model.forward_only(inputs=unread)["logps"], plain[:1], rtol=1e-6, atol=1e-6)
    nothing = opened(qwen, enable_router_replay=False).forward_only(inputs=ROWS, router_replay_action="replay_forward")
    torch.testing.assert_close(nothing["logps"], plain, rtol=1e-6, atol=1e-6)
    assert "routed_experts" not in nothing


def test_routes_of_all_layers_and_of_packed_rows_are_read(qwen: Path, tmp_path: Path) -> None:
    model = opened(saved(tmp_path, "qwen3-moe-with-dense-layer"))
    routes = model.forward_only(inputs=ROWS, router_replay_action="record")["routed_experts"]
    wide = [torch.nn.functional.pad(table, (0, 0, 1, 0)) for table in shifted(routes)]  # a dense layer comes first
    out = model.forward_only(inputs=with_routes(wide), router_replay_action="replay_forward")
    assert torch.equal(out["routed_experts"][0].long(), shifted(routes)[0])
    pack = {
        "input_ids": [*ROWS[0]["input_ids"], *ROWS[1]["input_ids"]], "labels": [*ROWS[0]["labels"], *ROWS[1]["labels"]],
        "position_ids": [*range(7), *range(3)], "routed_experts": torch.cat(shifted(routes)[:2]).numpy(),
    }  # fmt: skip
    packed = model.forward_only(inputs=[pack], router_replay_action="replay_forward")
    torch.testing.assert_close(packed["logps"], out["logps"][:2], rtol=1e-5, atol=1e-5)
    assert torch.equal(packed["routed_experts"], out["routed_experts"][:2])


def test_routes_that_do_not_fit_are_refused(qwen: Path) -> None:
    model = opened(qwen)
    routes = model.forward_only(inputs=ROWS[:1], router_replay_action="record")["routed_experts"][0]
    for wrong, text in (
        (routes[:4], r"7 tokens.*needs \[7, 3 layers, 2 experts\]"),
        (routes[:, :2], r"\[7, 2, 2\]"),
        (routes + 6, "below 6"),
        (torch.zeros_like(routes), "2 different experts"),
        ("text", "not numbers"),
    ):
        with pytest.raises(DataError, match=text):
            model.forward_only(inputs=[{**ROWS[0], "routed_experts": wrong}], router_replay_action="replay_forward")
    with pytest.raises(ArgumentError, match="replay_forward"):
        model.forward_only(inputs=ROWS, router_replay_action="replay")
    with pytest.raises(ValueError, match="recomputes activations"):
        model.forward_backward(inputs=ROWS, router_replay_action=RouterReplayAction.REPLAY_BACKWARD)
    with pytest.raises(TrainingStateError, match="enable_router_replay=True"):
        opened(qwen, enable_router_replay=False).forward_only(inputs=ROWS, router_replay_action="record")


def test_models_without_routers_that_follow_are_refused(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="LlamaForCausalLM has no router"):
        opened(tiny_model(tmp_path / "dense"))
    with pytest.raises(Unsupported, match="rows of several callers"):
        MultiLoraTransformersModel(model_id=str(qwen), enable_router_replay=True)
    config = transformers.DeepseekV2Config(
        **(SMALL | MLA | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1})
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "grouped")
    with pytest.raises(Unsupported, match="groups of experts"):
        opened(tmp_path / "grouped")


def test_the_sampler_records_what_the_trainer_replays(qwen: Path) -> None:
    sampler = TorchSampler(
        str(qwen), engine_args={"enable_return_routed_experts": True, "dtype": "float32"}, prefill_tokens=4
    )
    prompts = [{"input_ids": [5, 9, 77, 30, 21] * 5 + [k]} for k in (1, 2, 3)]  # prefixes are shared between slots
    params = SamplingParams(max_tokens=6, seed=3, stop=[], logprobs=1, num_samples=2)
    responses = sampler.sample(prompts, params)
    again = sampler.sample(prompts[:1], params)  # from the prefix cache
    assert again[0].cached_tokens
    rows, old = [], []
    for response in (*responses, *again):
        for sequence in response.sequences:
            assert sequence.new_input_feature is not None
            assert sequence.routed_experts is sequence.new_input_feature["routed_experts"]
            assert sequence.routed_experts.shape == (len(sequence.new_input_feature["input_ids"]) - 1, 3, 2)
            rows.append(sequence.new_input_feature)
            old.append([pair[0][1] for pair in sequence.logprobs or []])
    model = opened(qwen)
    without = [{k: v for k, v in row.items() if k != "routed_experts"} for row in rows]
    trainer = model.forward_only(inputs=without, router_replay_action="record")["routed_experts"]
    for row, table in zip(rows, trainer, strict=True):
        sampled = torch.as_tensor(row["routed_experts"])
        assert torch.equal(sampled.sort(-1).values, table[: len(sampled)].sort(-1).values)
    model.set_loss("GRPOLoss")
    out = model.forward_backward(
        inputs=rows, old_logps=old, advantages=[1.0, -1.0] * 4, router_replay_action="replay_forward"
    )
    for row, table in zip(rows, out["routed_experts"], strict=True):
        sampled = torch.as_tensor(row["routed_experts"])
        assert torch.equal(sampled, table[: len(sampled)])
    assert model.clip_grad_norm() > 0


def test_a_sampler_that_cannot_record_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="has no router"):
        TorchSampler(str(tiny_model(tmp_path)), engine_args={"enable_return_routed_experts": True})
