"""Weights on their way to a sampler: it samples with what was trained, and nothing of the trainer is written."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import units
from threads import one_thread  # noqa: F401 - a fixture

from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.errors import ArgumentError, MeshError, Unsupported
from twinkle.sampler import TorchSampler
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.pool.multi import MultiLoraTransformersModel
from twinkle_transformers.sampling.runner import Runner

ROWS: list[Any] = [{"input_ids": [1, 2, 3]}, {"input_ids": list(range(7, 40))}]
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
KINDS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": LORA,
    "rslora": {**LORA, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "dora": {**LORA, "use_dora": True},
    "head": {**LORA, "target_modules": ["q_proj", "lm_head"]},
    "embedding": {**LORA, "target_modules": ["embed_tokens", "down_proj"]},
    "saved": {**LORA, "modules_to_save": ["lm_head"]},
    "bias": {**LORA, "target_modules": ["q_proj"], "lora_bias": True},
}
ALONE = ("full", "lora", "rslora", "head")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention has biases, and whose head is not its embedding."""
    place = tmp_path_factory.mktemp("model")
    return tiny_model(place, initializer_range=0.08, attention_bias=True, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tied"), "gemma2", initializer_range=0.08, tie_word_embeddings=True)


def trainer(folder: Path, config: Any, steps: int = 1) -> TransformersModel:
    torch.manual_seed(3)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    if config:
        model.add_adapter_to_model("default", config)
    model.set_optimizer("SGD", lr=0.05, weight_decay=0.0)
    train(model, steps)
    return model


def train(model: Any, steps: int = 1, **kwargs: Any) -> None:
    rows: list[Any] = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}]
    for _ in range(steps):
        model.forward_backward(inputs=rows, **kwargs)
        model.clip_grad_and_step(**kwargs)


def apart(model: Any, sampler: Any, temperature: float = 0.7, sampled: Any = "", **scored: Any) -> float:
    """Return how far the log-probabilities of drawn tokens are from the trainer's."""
    params = {"max_tokens": 6, "temperature": temperature, "seed": 1, "logprobs": 1, "stop": []}
    most = 0.0
    for row, response in zip(ROWS, sampler.sample(ROWS, params, adapter_name=sampled), strict=True):
        (sequence,) = response.sequences
        before, ids = len(row["input_ids"]) - 1, [*row["input_ids"], *sequence.tokens]
        rows = [{"input_ids": ids, "labels": [-100] * before + ids[before + 1 :] + [-100]}]
        logps = model.forward_only(inputs=rows, temperature=temperature, **scored)["logps"][0, before:-1]
        found = torch.tensor([pairs[0][1] for pairs in sequence.logprobs])
        most = max(most, float((logps - found).abs().max()))
    return most


def state(module: torch.nn.Module) -> list[tuple[str, int, int, int, bytes]]:
    """Return what says that nobody wrote to a module: place, number of writes and bytes of each parameter."""
    return [
        (name, id(p), p.data_ptr(), p._version, p.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for name, p in module.named_parameters()
    ]


@pytest.mark.sample(6)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_sync_log_probabilities_are_the_trainers(folder: Path, kind: str, merge: bool) -> None:
    model, sampler = trainer(folder, KINDS[kind]), TorchSampler(folder)
    manager = CheckpointEngineManager(model, sampler)
    assert apart(model, sampler) > 0.01
    if not merge and kind not in ALONE:
        with pytest.raises(Unsupported, match=r"'default' has .*use merge_and_sync=True"):
            manager.sync_weights(merge_and_sync=False)
        return
    for _ in range(3):
        before = state(model.model)
        manager.sync_weights(merge_and_sync=merge)
        assert state(model.model) == before
        assert apart(model, sampler) < 1e-5
        assert apart(model, sampler, temperature=1.0) < 1e-5
        train(model)
        assert apart(model, sampler) > 1e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
def test_merged_weights_are_those_of_peft(folder: Path, kind: str) -> None:
    model, sampler = trainer(folder, KINDS[kind]), TorchSampler(folder)
    CheckpointEngineManager(model, sampler).sync_weights()
    found = {name: weight.clone() for name, weight in sampler.model.named_parameters()}
    wanted = dict(model.model.merge_and_unload().named_parameters())
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, wanted[name].detach(), rtol=0.0, atol=2e-6, msg=name)


@pytest.mark.full
def test_layers_whose_weight_lies_the_other_way_are_merged(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from twinkle.testing import tiny_tokenizer

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=264, n_positions=64, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for lora in ({**LORA, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}, None):
        model, sampler = trainer(tmp_path, lora), TorchSampler(tmp_path)
        CheckpointEngineManager(model, sampler).sync_weights()
        assert apart(model, sampler) < 1e-5


def test_half_precision_gets_the_merged_numbers_rounded_once(folder: Path) -> None:
    model, sampler = trainer(folder, LORA), TorchSampler(folder, dtype="bfloat16")
    CheckpointEngineManager(model, sampler).sync_weights()
    layer = model.model.get_base_model().model.layers[0].mlp.up_proj
    down, up = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
    base, scale = layer.weight.detach().double(), layer.scaling["default"]
    exact = base + scale * up @ down
    # Of the float32 product with `down` (its error is bounded by the sizes of its terms) and of the sum.
    terms = scale * (up.abs() @ down.abs()).amax(-1, keepdim=True)
    error = torch.finfo(torch.float32).eps * ((LORA["r"] + 2 * units()) * terms + exact.abs())
    low, high = (exact - error).bfloat16(), (exact + error).bfloat16()
    assert float((low == high).double().mean()) > 0.99, "or the bounds say little"
    found = sampler.model.get_submodule("model.layers.0.mlp.up_proj").weight
    assert bool(((low <= found) & (found <= high)).all())
    twice = base.bfloat16() + (scale * up @ down).bfloat16()
    assert not bool(((low <= twice) & (twice <= high)).all()), "or nothing is shown"


@pytest.mark.full
@pytest.mark.parametrize("merge", [True, False])
def test_adapters_of_a_pool_are_sent_by_name(folder: Path, merge: bool) -> None:
    model = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no")
    for seed, name in enumerate(("a", "b")):
        model.add_adapter_to_model(name, LORA, seed=seed)
        model.set_optimizer("SGD", lr=0.05, adapter_name=name)
    sampler = TorchSampler(folder)
    manager = CheckpointEngineManager(model, sampler)
    for name in ("a", "b"):
        before = state(model.model)
        manager.sync_weights(merge_and_sync=merge, adapter_name=name)
        assert state(model.model) == before
        assert apart(model, sampler, adapter_name=name) < 1e-5
    if not merge:
        assert apart(model, sampler, sampled="a", adapter_name="a") < 1e-5
    with pytest.raises(ArgumentError, match=r"adapter_name is required .*'a', 'b'"):
        manager.sync_weights()


@pytest.mark.full
def test_a_shared_sampler_is_frozen_by_a_sync_and_the_base_never_written(folder: Path) -> None:
    model = trainer(folder, LORA)
    model.add_adapter_to_model("other", LORA)
    model.set_optimizer("SGD", lr=0.05)
    sampler = TorchSampler(model=model)
    manager = CheckpointEngineManager(model, sampler)
    train(model)
    assert apart(model, sampler) < 1e-5, "until the first sync it follows the live adapter"
    for merge in (True, False):
        before = state(model.model)
        manager.sync_weights(merge_and_sync=merge)
        assert state(model.model) == before
        assert apart(model, sampler) < 1e-5
        train(model)
        assert apart(model, sampler) > 1e-4
        assert apart(model, sampler, sampled="other") > 1e-4
        assert apart(model, sampler, sampled="default", adapter_name="default") < 1e-5
        model._adapters.select("other")


@pytest.mark.full
def test_a_shared_pool_is_frozen_adapter_by_adapter(folder: Path) -> None:
    model = MultiLoraTransformersModel(model_id=str(folder), mixed_precision="no")
    for name in ("a", "b"):
        model.add_adapter_to_model(name, LORA)
        model.set_optimizer("SGD", lr=0.05, adapter_name=name)
    sampler = TorchSampler(model=model)
    CheckpointEngineManager(model, sampler).sync_weights(adapter_name="a")
    for name in ("a", "b"):
        train(model, adapter_name=name)
    assert apart(model, sampler, sampled="a", adapter_name="a") > 1e-4
    assert apart(model, sampler, sampled="b", adapter_name="b") < 1e-5


def test_a_full_model_that_is_shared_is_followed_and_its_prompts_are_read_anew(folder: Path) -> None:
    model = trainer(folder, None)
    sampler = TorchSampler(model=model)
    manager = CheckpointEngineManager(model, sampler)
    for _ in range(2):
        train(model)
        manager.sync_weights()
        assert sampler.sample(ROWS[1], {"max_tokens": 1})[0].cached_tokens == 0
        assert apart(model, sampler) < 1e-5


@pytest.mark.parametrize("merge", [True, False])
def test_prompts_are_read_anew_after_each_sync(folder: Path, merge: bool) -> None:
    model, sampler = trainer(folder, LORA), TorchSampler(folder)
    manager = CheckpointEngineManager(model, sampler)
    for _ in range(2):
        manager.sync_weights(merge_and_sync=merge)
        known = [sampler.sample(ROWS[1], {"max_tokens": 1})[0].cached_tokens for _ in range(2)]
        assert known == [0, 32]


@pytest.mark.sample(2)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("stepwise", [True, False])
def test_a_stream_that_runs_ends_with_the_weights_that_it_began_with(
    folder: Path, merge: bool, stepwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not stepwise:
        monkeypatch.setattr(Runner, "_refusal", lambda self: "it is to be sampled call by call")
    model, sampler = trainer(folder, LORA), TorchSampler(folder)
    manager = CheckpointEngineManager(model, sampler)
    manager.sync_weights(merge_and_sync=merge)
    params = {"max_tokens": 12, "temperature": 0, "stop": []}
    before = sampler.sample(ROWS[0], params)[0].sequences[0].tokens
    running = sampler.submit(ROWS[0], params)
    if stepwise:
        assert next(running.tokens()) == before[0]
    train(model, 5)
    manager.sync_weights(merge_and_sync=merge)
    after = sampler.sample(ROWS[0], params)[0].sequences[0].tokens
    assert running.result().sequences[0].tokens == before != after


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_tied_embeddings_go_over_once_and_stay_tied(tied: Path, kind: str) -> None:
    model, sampler = trainer(tied, KINDS[kind]), TorchSampler(tied)
    CheckpointEngineManager(model, sampler).sync_weights()
    assert sampler.model.lm_head.weight is sampler.model.model.embed_tokens.weight
    assert apart(model, sampler) < 1e-5


UNTIES = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # PEFT warns of it too


@pytest.mark.sample(2)
@UNTIES
@pytest.mark.parametrize("kind", ["head", "embedding", "saved"])
def test_an_adapter_on_one_of_two_tied_weights_is_not_merged_into_both(tied: Path, kind: str) -> None:
    model, sampler = trainer(tied, KINDS[kind], steps=0), TorchSampler(tied)
    before = state(sampler.model)
    with pytest.raises(Unsupported, match=r"one weight for lm_head.weight and model.embed_tokens.weight"):
        CheckpointEngineManager(model, sampler).sync_weights()
    assert state(sampler.model) == before


@pytest.mark.full
@UNTIES
def test_an_adapter_on_a_tied_head_is_sent_alone(tied: Path) -> None:
    model, sampler = trainer(tied, KINDS["head"], steps=0), TorchSampler(tied)
    CheckpointEngineManager(model, sampler).sync_weights(merge_and_sync=False)
    assert apart(model, sampler) < 1e-5


@pytest.mark.parametrize("merge", [True, False])
def test_a_sampler_of_another_model_is_left_as_it_was(folder: Path, tmp_path: Path, merge: bool) -> None:
    other = tiny_model(tmp_path / "other", attention_bias=True, intermediate_size=96, tie_word_embeddings=False)
    fewer = tiny_model(tmp_path / "fewer", num_hidden_layers=1, attention_bias=True, tie_word_embeddings=False)
    more = tiny_model(tmp_path / "more", num_hidden_layers=3, attention_bias=True, tie_word_embeddings=False)
    model = trainer(folder, LORA)
    for place, says in (
        (other, r"(gate|up|down)_proj\.weight arrived as torch.float32 \[.*the sampler has torch.float32 \["),
        (fewer, r"no 'model\.layers\.1"),
        (more, r"model\.layers\.2.* did not arrive"),
    ):
        sampler = TorchSampler(place)
        before = state(sampler.model)
        with pytest.raises(ArgumentError, match=says):
            CheckpointEngineManager(model, sampler).sync_weights(merge_and_sync=merge)
        assert state(sampler.model) == before


@pytest.mark.full
def test_a_sync_that_fails_in_the_middle_changes_nothing_and_the_next_one_succeeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinkle_transformers.sync.terms import Term

    model, sampler = trainer(folder, LORA), TorchSampler(folder)
    manager = CheckpointEngineManager(model, sampler)
    manager.sync_weights(merge_and_sync=False)
    before, calls = state(sampler.model), []

    def merged(self: Term, weight: torch.Tensor) -> torch.Tensor:
        calls.append(weight)
        if len(calls) == 5:
            raise MemoryError("no room for a merged weight")
        return weight

    with monkeypatch.context() as patched:
        patched.setattr(Term, "merged", merged)
        with pytest.raises(MemoryError, match="no room"):
            manager.sync_weights()
    assert state(sampler.model) == before
    assert apart(model, sampler) < 1e-5
    train(model)
    manager.sync_weights()
    assert apart(model, sampler) < 1e-5


@pytest.mark.full
def test_the_base_goes_over_again_after_it_was_merged(folder: Path) -> None:
    model, sampler = trainer(folder, LORA), TorchSampler(folder)
    manager = CheckpointEngineManager(model, sampler)
    for merge in (False, True, False, False):
        manager.sync_weights(merge_and_sync=merge)
        assert apart(model, sampler) < 1e-5
        train(model)


def test_what_a_shared_sampler_cannot_freeze_is_refused(folder: Path) -> None:
    model = trainer(folder, KINDS["dora"])
    sampler = TorchSampler(model=model)
    with pytest.raises(Unsupported, match=r"cannot be published .*weights of its own \(model_id=\)"):
        CheckpointEngineManager(model, sampler).sync_weights()
    assert apart(model, sampler) < 1e-5
    with pytest.raises(Unsupported, match="shares the weights of a live model"):
        CheckpointEngineManager(trainer(folder, None), sampler).sync_weights()


def test_it_can_be_called_where_an_event_loop_runs(folder: Path) -> None:
    model, sampler = trainer(folder, LORA), TorchSampler(folder)

    async def loop() -> None:
        CheckpointEngineManager(model, sampler).sync_weights()

    asyncio.run(loop())
    assert apart(model, sampler) < 1e-5


def test_what_cannot_be_connected_is_said_at_once(folder: Path) -> None:
    sampler = TorchSampler(folder)
    with pytest.raises(ArgumentError, match="model is a TorchSampler, which has no send_weights"):
        CheckpointEngineManager(sampler, sampler)
    with pytest.raises(MeshError, match="'TPU' is unknown"):
        CheckpointEngineManager(trainer(folder, None, steps=0), sampler, "TPU")


@pytest.mark.full
def test_several_managers_may_share_a_model_or_a_sampler(folder: Path) -> None:
    model, samplers = trainer(folder, LORA), [TorchSampler(folder), TorchSampler(folder)]
    managers = [CheckpointEngineManager(model, sampler) for sampler in (*samplers, samplers[0])]
    for merges in ((False, True, False), (False, False, True), (False, True, True)):
        for manager, merge in zip(managers, merges, strict=True):
            manager.sync_weights(merge_and_sync=merge)
            assert apart(model, manager.sampler) < 1e-5
        train(model)


def test_a_version_that_somebody_holds_is_not_written_by_later_syncs(folder: Path) -> None:
    model, sampler = trainer(folder, LORA), TorchSampler(folder)
    manager = CheckpointEngineManager(model, sampler)
    held = []
    for _ in range(5):
        manager.sync_weights(merge_and_sync=False)
        version: Any = sampler._source.pick("", None, None).version
        held.append((version, version.flat.clone()))
        train(model)
    assert len({version.flat.data_ptr() for version, _ in held}) == 5
    assert all(torch.equal(version.flat, numbers) for version, numbers in held)
    del held, version
    places = set()
    for _ in range(4):
        manager.sync_weights(merge_and_sync=False)
        places.add(sampler._source.pick("", None, None).version.flat.data_ptr())
    assert len(places) < 4
