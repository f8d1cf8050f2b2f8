"""All parameters trained through the client: as locally, with the service for itself, and through kills."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_rows import CONFIG, rows
from serving import pool

from twinkle.testing import tiny_model
from twinkle_client import MultiLoraTransformersModel, TransformersModel, TwinkleClient, vLLMSampler
from twinkle_client.errors import OperationFailed, Reserved
from twinkle_transformers.model import TransformersModel as LocalModel

SETTINGS = {"times": {"snapshot": 0.2}, "snapshot_steps": 1, "name": "tiny", "full_parameters": True}


def numbers(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, np.float64)


def script(model: Any, steps: int = 3) -> list[Any]:
    """Accumulation, a scheduler, metrics, an evaluation; losses, log-probabilities and weights."""
    model.set_optimizer("AdamW", lr=1e-3, weight_decay=0.1)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=4)
    seen: list[Any] = []
    for step in range(steps):
        for half in range(2):
            output = model.forward_backward(inputs=rows(2 * step + half, 12, 7, 9))
            seen += [output["loss"], output["logps"], output["num_tokens"]]
            model.clip_grad_and_step(gradient_accumulation_steps=2)
        metrics = model.calculate_metric(is_training=True)
        seen += [metrics[name] for name in ("loss", "grad_norm", "learning rate")]
    seen.append(model.forward(inputs=rows(40, 6, 11))["logps"])
    seen.append(model.calculate_loss())
    model.backward()
    seen.append(model.clip_grad_norm(0.5, gradient_accumulation_steps=1))
    model.step()
    model.zero_grad()
    model.lr_step()
    seen.append(model.forward_only(inputs=rows(50, 8, 8))["logps"])
    seen += [model.calculate_loss(), model.calculate_metric(is_training=False)["loss"]]
    state = model.get_state_dict()
    return [*seen, *(state[name] for name in sorted(state))]


def close(found: list[Any], expected: list[Any], tolerance: float = 1e-6) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(numbers(one), numbers(other), rtol=tolerance, atol=tolerance)


def test_all_parameters_are_trained_as_locally(client: TwinkleClient, base: Path) -> None:
    model = TransformersModel(client=client)
    found = script(model, 1)
    close(found, script(LocalModel(model_id=str(base), mixed_precision="no"), 1))
    fresh = [p for p in LocalModel(model_id=str(base), mixed_precision="no").get_state_dict().values()]
    assert len(found) > len(fresh)

    with pytest.raises(
        OperationFailed, match="must have an entry for each of 2 tokens"
    ):  # a failed call changes nothing
        model.forward_backward(inputs=[{"input_ids": [5, 6], "labels": [6]}])
    saved = model.save("whole", save_optimizer=True, consumed_train_samples=7)
    after = model.forward_only(inputs=rows(60, 9))["logps"]
    model.forward_backward(inputs=rows(61, 9))
    model.clip_grad_and_step()
    assert np.abs(model.forward_only(inputs=rows(60, 9))["logps"] - after).max() > 1e-6
    assert model.resume_from_checkpoint(saved)["consumed_train_samples"] == 7
    np.testing.assert_array_equal(model.forward_only(inputs=rows(60, 9))["logps"], after)
    model.unload()

    adapted = MultiLoraTransformersModel(client=client)
    adapted.add_adapter_to_model("a", CONFIG, seed=1)
    untouched = LocalModel(model_id=str(base), mixed_precision="no").forward_only(inputs=rows(60, 9))["logps"]
    np.testing.assert_allclose(adapted.forward_only(rows(60, 9))["logps"], untouched.numpy(), atol=1e-6)
    again = TransformersModel(client=client)
    again.load(saved)
    np.testing.assert_allclose(again.forward_only(inputs=rows(60, 9))["logps"], after, atol=1e-6)
    again.unload()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_kills_of_engine_and_service_change_no_number(tmp_path: Path, base: Path) -> None:
    def train(url: str, between: Any = None) -> list[Any]:
        with TwinkleClient(url, session_heartbeat_interval=1.0) as client:
            model = TransformersModel(client=client)
            model.set_optimizer("AdamW", lr=1e-3)
            seen: list[Any] = []
            for step in range(4):
                for half in range(2):
                    seen.append(model.forward_backward(inputs=rows(2 * step + half, 9, 6))["loss"])
                    if between is not None:
                        between(step, half)
                    model.clip_grad_and_step(gradient_accumulation_steps=2)
            seen.append(model.calculate_metric(is_training=True)["loss"])
            state = model.get_state_dict()
            model.unload()
            return [*map(float, seen), *(np.asarray(state[name]).tobytes() for name in sorted(state))]

    service = pool(tmp_path / "data", base, SETTINGS).start()

    def kill(step: int, half: int) -> None:
        if (step, half) == (1, 0):
            assert service.kill_engine()
        if (step, half) == (2, 0):  # in the middle of an accumulation
            port = service.url.rpartition(":")[2]
            service.kill()
            service.command[-1] = service.command[-1].replace('"port": 0', f'"port": {port}')
            service.start()

    try:
        calm = train(service.url)
        assert train(service.url, kill) == calm
    finally:
        service.kill()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_other_keys_are_refused_until_it_ends(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "model")
    service = pool(tmp_path / "data", base, {**SETTINGS, "auth": True}).start()
    try:
        first, second = service.new_key("first"), service.new_key("second")
        with (
            TwinkleClient(service.url, first) as one,
            TwinkleClient(service.url, second, retry_seconds=2.0) as two,
        ):
            busy = MultiLoraTransformersModel(client=two)
            busy.add_adapter_to_model("a", CONFIG)
            whole = TransformersModel(client=one)
            with pytest.raises(Reserved, match="1 models of others are in use"):
                whole.forward_only(inputs=rows(1, 5))
            busy.remove_adapter("a")
            expected = whole.forward_only(inputs=rows(1, 5))["logps"]
            sampler = vLLMSampler(client=two)
            with pytest.raises(Reserved, match="reserved for a full-parameter training"):
                busy.add_adapter_to_model("b", CONFIG)
            with pytest.raises(Reserved):
                sampler.sample({"input_ids": [5, 6]}, {"max_tokens": 2})
            whole.unload()
            busy.add_adapter_to_model("b", CONFIG)
            sampler.sample({"input_ids": [5, 6]}, {"max_tokens": 2})
            np.testing.assert_allclose(busy.forward_only(rows(1, 5))["logps"], expected, atol=1e-6)
    finally:
        service.kill()


@pytest.mark.full
def test_operators_must_allow_it(tmp_path: Path) -> None:
    service = pool(tmp_path / "data", tiny_model(tmp_path / "model"), {"name": "tiny"}).start()
    try:
        with (
            TwinkleClient(service.url) as client,
            pytest.raises(OperationFailed, match="serve --allow-full-parameters"),
        ):
            TransformersModel(client=client).set_optimizer("AdamW")
    finally:
        service.kill()
