"""Kills while a script trains through the client: every call is carried out once, and no bit changes."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_rows import CONFIG, rows
from server_fates import Fate, Killer
from server_proxy import Proxy, proxied
from serving import Served, pool

from twinkle.testing import tiny_model
from twinkle_client import MultiLoraTransformersModel, TwinkleClient

TIMES = ("speed", "total time elapse")
SETTINGS = {"times": {"poll": 1.0, "gap_fail": 120.0, "snapshot": 0.3}, "snapshot_steps": 2, "name": "tiny"}
ROUNDING = {"MKL_CBWR": "COMPATIBLE"}


def script(url: str, steps: int, between: Any = None) -> list[Any]:
    """Train with every kind of call, and return all that was answered."""
    seen: list[Any] = []
    with TwinkleClient(url, session_heartbeat_interval=1.0) as client:
        model = MultiLoraTransformersModel(client=client)
        model.add_adapter_to_model("a", CONFIG, gradient_accumulation_steps=2, seed=7)
        model.set_optimizer("AdamW", lr=1e-2)
        model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=1, num_training_steps=steps)
        for step in range(steps):
            for half in range(2):
                seen.append(model.forward_backward(rows(2 * step + half, 6, 9)))
                if between is not None:
                    between(step, half)
                seen.append(model.clip_grad_and_step())
            seen.append(model.forward_only(rows(100 + step, 7)))
            seen.append(model.calculate_loss())
            seen.append(model.calculate_metric(is_training=True))
            seen.append(model.calculate_metric(is_training=False))
        seen.append(model.get_state_dict())
        seen.append(model.resume_from_checkpoint(model.save("last", save_optimizer=True)))
    return [bits(value) for value in seen]


def bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items() if name not in TIMES}
    return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_killed_engine_changes_no_bit(service: Served) -> None:
    calm = script(service.url, 2)

    def kill(step: int, half: int) -> None:
        if (step, half) == (1, 0):
            assert service.kill_engine()

    assert script(service.url, 2, kill) == calm


async def disturbed(service: Served, fate: Fate, steps: int) -> list[Any]:
    """Run the script while fate does to the service what it does."""
    proxy = Proxy(service.url)
    async with proxied(proxy):
        watching = asyncio.create_task(fate.watch(service, proxy))
        try:
            return await asyncio.to_thread(script, proxy.url, steps)
        finally:
            watching.cancel()
            [ended] = await asyncio.gather(watching, return_exceptions=True)
            if isinstance(ended, Exception):
                raise ended


@pytest.mark.full
@pytest.mark.timeout(900)
def test_kills_of_engine_and_service_change_no_bit(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    calm_service = pool(tmp_path / "calm", model, SETTINGS, **ROUNDING).start()
    try:
        calm = script(calm_service.url, 6)
    finally:
        calm_service.kill()
    service, fate = pool(tmp_path / "killed", model, SETTINGS, **ROUNDING).start(), Killer(1, 4, 3.0)
    try:
        for _ in range(8):
            assert asyncio.run(disturbed(service, fate, 6)) == calm
            if not fate.left:
                break
    finally:
        service.kill()
    assert not fate.left


@pytest.mark.full
def test_tenants_of_both_protocols_share_the_service_at_once(service: Served) -> None:
    """Their numbers are those that they have alone."""
    from server_sdk import opened, row, trainer

    alone = script(service.url, 2)
    results: dict[str, Any] = {}

    def native(name: str) -> None:
        results[name] = script(service.url, 2)

    def tinker() -> None:
        with opened(service.url) as client:
            training = trainer(client, "tiny", rank=4)
            for _ in range(4):
                training.forward_backward([row([5, 6, 7, 8])], "cross_entropy").result()
                results["tinker"] = training.forward([row([5, 6, 7, 8])], "cross_entropy").result().metrics

    threads = [threading.Thread(target=native, args=(name,)) for name in ("one", "two")]
    threads.append(threading.Thread(target=tinker))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for name in ("one", "two"):
        for found, expected in zip(results[name], alone, strict=True):
            close(found, expected)
    assert results["tinker"]


def close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value)
    elif isinstance(expected, tuple):
        np.testing.assert_allclose(
            np.frombuffer(found[1], np.float32), np.frombuffer(expected[1], np.float32), rtol=1e-4, atol=1e-5
        )
    else:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
