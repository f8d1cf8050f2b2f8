"""A merged model is PEFT's, to the rounding of float32; other tensors keep their bytes, and memory stays bounded."""

import asyncio
import hashlib
import json
import shutil
import tracemalloc
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from ledger_engine import ENGINE, MODEL
from safetensors.numpy import load_file, save_file
from server_inside import Inside, inside

from twinkle.errors import ConfigError
from twinkle_server.checkpoints import merging
from twinkle_server.checkpoints.links import byte_range
from twinkle_server.checkpoints.merging import ADAPTER, CONFIG, CannotMerge, merge
from twinkle_server.cli.server import main as server
from twinkle_server.engine.files import publish, verify
from twinkle_server.settings import Settings
from twinkle_server.store.opening import Store, open_store
from twinkle_server.store.records import Checkpoint, Session
from twinkle_server.tenancy.keys import change, issue

RANK, WIDE, DEEP, WORDS = 3, 12, 8, 20
LAYERS = {"model.layers.0.mlp.up_proj": (WIDE, DEEP), "model.layers.0.mlp.down_proj": (DEEP, WIDE)}
RNG = np.random.default_rng(0)


def base_model(folder: Path, dtype: str = "F32", tied: bool = False, shards: int = 1) -> Path:
    """Write weights like those of a model, in one file or several."""
    folder.mkdir(parents=True)
    tensors = {f"{name}.weight": RNG.normal(size=shape).astype(np.float32) for name, shape in LAYERS.items()}
    tensors |= {"model.norm.weight": np.ones(DEEP, np.float32)}
    tensors["model.embed_tokens.weight"] = RNG.normal(size=(WORDS, DEEP)).astype(np.float32)
    if not tied:
        tensors["lm_head.weight"] = RNG.normal(size=(WORDS, DEEP)).astype(np.float32)
    if dtype == "F16":
        tensors = {name: value.astype(np.float16) for name, value in tensors.items()}
    config = {"model_type": "x", "tie_word_embeddings": tied, "_name_or_path": str(folder)}
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files = (
        {f"model-{at}.safetensors": names[at::shards] for at in range(shards)}
        if shards > 1
        else {merging.SINGLE: names}
    )
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    if shards > 1:
        places = {name: file for file, part in files.items() for name in part}
        (folder / merging.INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return folder


def adapter(folder: Path, modules: dict[str, tuple[int, int]], **config: Any) -> Path:
    folder.mkdir(parents=True)
    matrices = {}
    for name, (rows, columns) in modules.items():
        matrices[f"base_model.model.{name}.lora_A.weight"] = RNG.normal(size=(RANK, columns)).astype(np.float32)
        matrices[f"base_model.model.{name}.lora_B.weight"] = RNG.normal(size=(rows, RANK)).astype(np.float32)
    save_file(matrices, folder / ADAPTER)
    (folder / CONFIG).write_text(json.dumps({"lora_alpha": 32.0, "r": RANK, "bias": "none", **config}))
    return folder


def weights(folder: Path) -> dict[str, Any]:
    """Return all tensors of a model, as transformers finds them: a single file comes before an index."""
    files = {merging.SINGLE}
    if not (folder / merging.SINGLE).exists():
        files = set(json.loads((folder / merging.INDEX).read_text())["weight_map"].values())
    return {name: value for file in files for name, value in load_file(folder / file).items()}


def merged(base: Path, changes: Path, output: Path) -> dict[str, Any]:
    output.mkdir(parents=True)
    merge(base, changes, output)
    return weights(output)


def delta(changes: Path, module: str, scale: float) -> Any:
    found = load_file(changes / ADAPTER)
    a, b = (found[f"base_model.model.{module}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    return scale * (b @ a)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 32 / RANK),
        ({"use_rslora": True}, 32 / RANK**0.5),
        ({"alpha_pattern": {"up_proj": 6.0, "down_proj": 6.0}}, 6 / RANK),
    ],
)
def test_adapted_weights_change_by_the_product_and_all_others_not_at_all(
    shards: int, config: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    base, changes = base_model(tmp_path / "base", shards=shards), adapter(tmp_path / "a", LAYERS, **config)
    before, after = weights(base), merged(base, changes, tmp_path / "out")
    assert set(before) == set(after)
    for name, value in before.items():
        module = name.removesuffix(".weight")
        expected = value
        if module in LAYERS:
            expected = (value.astype(np.float64) + delta(changes, module, scale)).astype(np.float32)
        np.testing.assert_array_equal(after[name], expected, strict=True)
    assert str(base) not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_head_of_its_own_is_written_where_the_base_shares_it(shards: int, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", tied=True, shards=shards)
    changes = adapter(tmp_path / "a", {"lm_head": (WORDS, DEEP)})
    before, after = weights(base), merged(base, changes, tmp_path / "out")
    np.testing.assert_array_equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    expected = before["model.embed_tokens.weight"] + delta(changes, "lm_head", 32 / RANK)
    np.testing.assert_array_equal(after["lm_head.weight"], expected.astype(np.float32))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    index = json.loads((tmp_path / "out" / merging.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    base, changes = base_model(tmp_path / "base", "F16"), adapter(tmp_path / "a", LAYERS)
    before, after = weights(base), merged(base, changes, tmp_path / "out")
    for module in LAYERS:
        exact = before[f"{module}.weight"].astype(np.float64) + delta(changes, module, 32 / RANK)
        np.testing.assert_array_equal(after[f"{module}.weight"], exact.astype(np.float16), strict=True)


def test_bfloat16_is_rounded_to_the_nearest_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    values = np.concatenate([RNG.normal(size=4000), [1.00390625, 1.01171875, 0.0, -0.0, 3.3e38]]).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(merging._to_bfloat16(values.astype(np.float64)), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda base, a: (a / CONFIG).write_text(json.dumps({"lora_alpha": 1, "use_dora": True})), "use_dora"),
        (lambda base, a: (a / CONFIG).write_text(json.dumps({"lora_alpha": 1, "bias": "all"})), "bias"),
        (lambda base, a: (a / ADAPTER).unlink(), "no plain adapter files"),
        (lambda base, a: (a / ADAPTER).write_bytes(b"\0" * 20), "not a readable safetensors"),
        (lambda base, a: (base / merging.SINGLE).unlink(), "no safetensors weights"),
        (lambda base, a: (base / "config.json").write_text('{"quantization_config": {"bits": 4}}'), "quantized"),
        (lambda base, a: save_file({"x": np.ones(1)}, base / merging.SINGLE), "0 weights for the adapted layer"),
        (lambda base, a: save_file({f"{n}.weight": np.ones((2, 2)) for n in LAYERS}, base / merging.SINGLE), "shape"),
        (lambda base, a: save_file({f"{n}.weight": np.ones(s, np.int32) for n, s in LAYERS.items()},
                                   base / merging.SINGLE), "type I32"),
        (lambda base, a: save_file({f"{n}.weight": np.full(s, 65504, np.float16) for n, s in LAYERS.items()},
                                   base / merging.SINGLE), "not finite in F16"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_told(change: Callable[[Path, Path], Any], words: str, tmp_path: Path) -> None:
    base, changes = base_model(tmp_path / "base"), adapter(tmp_path / "a", LAYERS, lora_alpha=3e5)
    change(base, changes)
    with pytest.raises(CannotMerge, match=words) as refused:
        merged(base, changes, tmp_path / "out")
    assert str(tmp_path) not in str(refused.value)


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_PIECE", 2**14)
    size = 2048
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    save_file({"up.weight": np.zeros((size, size), np.float32)}, tmp_path / "base" / merging.SINGLE)
    changes = adapter(tmp_path / "a", {"up": (size, size)})
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    merge(tmp_path / "base", changes, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * size * size / 8, f"{peak} bytes for a tensor of {4 * size * size}"


@pytest.mark.full
def test_a_merged_model_is_that_of_peft(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from twinkle.testing import tiny_model

    base = tiny_model(tmp_path / "tiny", "qwen3")
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
        ).merge_and_unload()
    (tmp_path / "out").mkdir()
    merge(base, tmp_path / "adapter", tmp_path / "out")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = reference.state_dict()
    assert set(ours.state_dict()) == set(expected)
    changed = 0
    for name, value in ours.state_dict().items():
        # both round to float32: PEFT the product and the sum, we the sum alone; products are below 64 here
        torch.testing.assert_close(value, expected[name], rtol=0, atol=4 * 64 * 2**-24)
        changed += not torch.equal(value, AutoModelForCausalLM.from_pretrained(base).state_dict()[name])
    assert changed == 5
    tokens = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(ours(tokens).logits, reference(tokens).logits, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("Who") == AutoTokenizer.from_pretrained(base).encode(
        "Who"
    )


@pytest.mark.full
def test_a_merged_model_with_an_untied_head_computes_what_the_adapter_did(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    from twinkle.testing import tiny_model

    config = AutoConfig.from_pretrained(tiny_model(tmp_path / "tiny", "qwen3"))
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / merging.SINGLE)

    def opened() -> Any:  # in float64, so that only the merged weights are rounded, once, to float32
        return AutoModelForCausalLM.from_pretrained(tmp_path / "tied", dtype=torch.float64)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = ["q_proj", "down_proj", "lm_head"]
        settings = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        adapted = PeftModel(opened(), settings)
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    (tmp_path / "out").mkdir()
    merge(tmp_path / "tied", tmp_path / "adapter", tmp_path / "out")
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected, found, base = (model(tokens).logits for model in (adapted, merged_model, opened()))
    change = (expected - base).norm()
    assert change > 0.1 * base.norm(), "the adapter changes much"
    # Weights are off by 2**-24 of their size; a thousandth of the change is far above that, and far below a lost head.
    assert (found - expected).norm() < 1e-3 * change


def test_parts_of_a_file_are_what_the_standard_says() -> None:
    assert byte_range("bytes=0-9", 100) == (0, 9)
    assert byte_range("bytes=90-", 100) == (90, 99)
    assert byte_range("bytes=-10", 100) == (90, 99)
    assert byte_range("bytes=-1000", 100) == (0, 99)
    assert byte_range("bytes=50-1000", 100) == (50, 99)
    for whole in (None, "bytes=5-1", "bytes=0-1,5-6", "lines=1-2", "bytes=-", "bytes=a-b"):
        assert byte_range(whole, 100) is None
    for outside in ("bytes=100-", "bytes=100-200", "bytes=-0"):
        with pytest.raises(IndexError):
            byte_range(outside, 100)


FOLDER = f"checkpoints/{'1' * 32}"


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[Inside, Store, dict[str, str]]]:
    """Run a service whose tenant ana has a checkpoint `s:train:0/sampler_weights/a`; also yield its store and keys."""
    base, data = tmp_path / "base", tmp_path / "data"
    shutil.copytree(base_model(tmp_path / "weights"), base)
    for path in MODEL.iterdir():
        if path.name != "config.json":
            shutil.copy(path, base / path.name)
    data.mkdir()
    store = open_store(data)
    try:
        keys = {name: await issue(store, name) for name in ("ana", "ben")}
        made = publish(data / FOLDER, lambda folder: _fill(folder, tmp_path), {"kind": "sampler_weights"})
        await store.sessions.create(Session("s", "ana", 1.0, 1.0))
        for kind in ("sampler_weights", "weights"):
            checkpoint = Checkpoint("ana", "s:train:0", kind, "a", FOLDER, made.size, made.digest, "m", RANK, 1.0)
            await store.checkpoints.create(checkpoint)
    finally:
        store.close()
    settings = Settings(str(base), data, name="m", backend=ENGINE, auth=True)
    async with inside(settings) as service:
        service.client.headers["X-API-Key"] = keys["ana"]
        yield service, service.service._store, keys


def _fill(folder: Path, tmp_path: Path) -> None:
    for path in adapter(tmp_path / "a", LAYERS).iterdir():
        shutil.copy(path, folder / path.name)


SOURCE = "tinker://s:train:0/sampler_weights/a"
URL = "http://127.0.0.1/twinkle/merge"


async def ended(service: Inside, job: dict[str, Any]) -> dict[str, Any]:
    for _ in range(600):
        found = (await service.client.get(f"{URL}/{job['id']}")).json()
        if found["status"] in ("done", "failed"):
            return dict(found)
        await asyncio.sleep(0.05)
    raise AssertionError(f"the merge did not end: {found}")


def test_a_tenant_merges_downloads_and_resumes(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as (service, store, keys):
            get = service.client.get
            job = (await service.client.post(URL, json={"path": SOURCE})).json()
            again = (await service.client.post(URL, json={"path": SOURCE})).json()
            assert again["id"] == job["id"], "a repeated request starts nothing"
            found = await ended(service, job)
            assert (found["status"], found["error"]) == ("done", None)
            assert found["path"] == "tinker://s:train:0/external_weights/a-merged"
            assert found["done_bytes"] == found["total_bytes"] == found["size_bytes"]
            target = tmp_path / "fetched"
            target.mkdir()
            for name, url in found["urls"].items():
                whole = await get(url)
                assert whole.headers["accept-ranges"] == "bytes"
                half = len(whole.content) // 2
                first = await get(url, headers={"Range": f"bytes=0-{half - 1}"})
                rest = await get(url, headers={"Range": f"bytes={half}-", "If-Range": whole.headers["etag"]})
                assert (first.status_code, rest.status_code) == (206, 206)
                assert rest.headers["content-range"] == f"bytes {half}-{len(whole.content) - 1}/{len(whole.content)}"
                (target / name).write_bytes(first.content + rest.content)
                assert hashlib.sha256(first.content + rest.content).hexdigest() == whole.headers["etag"].strip('"')
                other = await get(url, headers={"Range": "bytes=1-", "If-Range": '"other"'})
                assert (other.status_code, other.content) == (200, whole.content)
                outside = await get(url, headers={"Range": f"bytes={len(whole.content)}-"})
                assert outside.status_code == 416
            expected = merged(tmp_path / "base", tmp_path / "a", tmp_path / "out")
            for name, value in weights(target).items():
                np.testing.assert_array_equal(value, expected[name])
            listed = [entry["tinker_path"] for entry in (await get("/checkpoints")).json()["checkpoints"]]
            assert found["path"] in listed
            late = (await service.client.post(URL, json={"path": SOURCE})).json()
            assert late["status"] == "done", "it exists already"
            events = (await get("/audit", params={"event_type": "checkpoint.merge"})).json()["entries"]
            assert len(events) == 3
            service.client.headers["X-API-Key"] = keys["ben"]
            assert (await get(f"{URL}/{job['id']}")).status_code == 404
            assert (await get(URL)).json() == {"merges": []}
            assert (await service.client.post(URL, json={"path": SOURCE})).status_code == 404
            folder = (await store.checkpoints.any_tenant(_path(found["path"]))).folder
            assert verify(tmp_path / "data" / folder).facts["kind"] == "merged"

    asyncio.run(story())


def _path(text: str) -> Any:
    from twinkle_server.ids import CheckpointPath

    return CheckpointPath.parse(text)


def test_a_merge_that_may_not_be_or_fails_leaves_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as (service, store, _):
            post = service.client.post
            for body, status in (
                ({"path": SOURCE.replace("sampler_weights", "weights")}, 400),
                ({"path": SOURCE + "x"}, 404),
                ({"path": SOURCE, "nme": "b"}, 422),
                ({"path": SOURCE, "name": "../b"}, 400),
                ({"path": SOURCE, "ttl_seconds": 5}, 400),
            ):
                answer = await post(URL, json=body)
                assert answer.status_code == status, (body, answer.text)
            await change(store, "ana", {"bytes": 3000})
            await asyncio.sleep(1.1)
            answer = await post(URL, json={"path": SOURCE})
            assert answer.status_code == 403
            assert "the merged model has" in answer.json()["detail"]
            await change(store, "ana", {"bytes": None})
            await asyncio.sleep(1.1)
            (tmp_path / "base" / "config.json").write_text('{"quantization_config": {"bits": 4}}')
            assert (await post(URL, json={"path": SOURCE})).status_code == 400
            (tmp_path / "base" / "config.json").write_text("{}")
            shutil.rmtree(tmp_path / "data" / FOLDER)
            failed = await ended(service, (await post(URL, json={"path": SOURCE})).json())
            assert failed["status"] == "failed"
            assert "no plain adapter files" in failed["error"]
            assert str(tmp_path) not in json.dumps(failed)
            assert list((tmp_path / "data" / "checkpoints").iterdir()) == []

    asyncio.run(story())


def test_an_operator_merges_into_a_folder(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path):
            pass

    asyncio.run(story())
    words = ["merge", SOURCE, "--data", str(tmp_path / "data"), "--model", str(tmp_path / "base")]
    result = CliRunner().invoke(server, [*words, "--to", str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    expected = merged(tmp_path / "base", tmp_path / "a", tmp_path / "out")
    for name, value in weights(tmp_path / "merged").items():
        np.testing.assert_array_equal(value, expected[name])
    again = CliRunner().invoke(server, [*words, "--to", str(tmp_path / "merged")])
    assert isinstance(again.exception, ConfigError)
