"""Files of a checkpoint that were changed are refused wherever they are read; a base model that was changed, too."""

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from twinkle.digests import check_digests
from twinkle.errors import CheckpointError, ModelLoadError
from twinkle.hub.fingerprint import commit_of, fingerprint
from twinkle.testing import tiny_model
from twinkle_transformers.model import TransformersModel
from twinkle_transformers.pool.multi import MultiLoraTransformersModel
from twinkle_transformers.sampler import TorchSampler

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def build(folder: Path, lora: bool = True) -> TransformersModel:
    torch.manual_seed(3)
    model = TransformersModel(model_id=str(folder), mixed_precision="no")
    if lora:
        model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-2)
    return model


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    return Path(str(build(folder).save("saved", str(tmp_path), save_optimizer=True)))


def spoil(file: Path) -> None:
    """Overwrite 64 bytes of the data of a safetensors file with random ones; it is still read without an error."""
    raw = bytearray(file.read_bytes())
    raw[-200:-136] = random.Random(5).randbytes(64)
    file.write_bytes(raw)
    load_file(file)


READERS: dict[str, Callable[[Path, Path], object]] = {
    "resume": lambda folder, saved: build(folder).resume_from_checkpoint(str(saved)),
    "load": lambda folder, saved: build(folder).load(str(saved)),
    "add": lambda folder, saved: build(folder).add_adapter_to_model("other", str(saved)),
    "pool": lambda folder, saved: MultiLoraTransformersModel(
        model_id=str(folder), mixed_precision="no"
    ).add_adapter_to_model("a", str(saved)),
    "sampler": lambda folder, saved: TorchSampler(model_id=str(folder)).add_adapter_to_sampler("a", str(saved)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("reader", READERS)
def test_64_random_bytes_in_an_adapter_are_refused(folder: Path, saved: Path, reader: str) -> None:
    READERS[reader](folder, saved)
    expected = json.loads((saved / "digests.json").read_text())["files"][WEIGHTS]["sha256"]
    spoil(saved / WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS} was changed .* says {expected}; restore .* remove "):
        READERS[reader](folder, saved)


def test_a_full_model_is_checked_when_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    saved = Path(str(build(folder, lora=False).save("full", str(tmp_path), save_optimizer=True)))
    TransformersModel(model_id=str(saved), mixed_precision="no")
    spoil(saved / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors was changed since it was saved"):
        TransformersModel(model_id=str(saved), mixed_precision="no")
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed since it was saved"):
        build(folder, lora=False).resume_from_checkpoint(str(saved))


def test_a_chat_template_that_was_changed_is_refused_with_the_model_beside_it(folder: Path, tmp_path: Path) -> None:
    saved = Path(str(build(folder, lora=False).save("full", str(tmp_path), save_optimizer=True)))
    with (saved / "chat_template.jinja").open("a") as file:
        file.write("{{ 'be rude' }}")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja was changed since it was saved"):
        TransformersModel(model_id=str(saved), mixed_precision="no")
    (saved / "chat_template.jinja").unlink()
    TransformersModel(model_id=str(saved), mixed_precision="no")


def test_a_change_on_purpose_is_accepted_without_the_digests(
    folder: Path, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(saved / WEIGHTS)
    (saved / "digests.json").unlink()
    with caplog.at_level(logging.INFO):
        build(folder).resume_from_checkpoint(str(saved))
    told = [record.getMessage() for record in caplog.records if "digests.json" in record.getMessage()]
    assert told == [f"{saved} has no digests.json, so its files are used without a check"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "files": {}}', '{"format": 1, "files": {"../x": {}}}'])
def test_digests_that_cannot_be_read_are_refused(folder: Path, saved: Path, text: str) -> None:
    (saved / "digests.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"digests\.json cannot be read"):
        build(folder).resume_from_checkpoint(str(saved))


def test_other_readers_take_the_folder(folder: Path, saved: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, saved)
    assert peft.get_peft_model_state_dict(loaded).keys() == load_file(saved / WEIGHTS).keys()


def test_a_changed_base_model_is_not_resumed_on(folder: Path, saved: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved")
    build(moved).resume_from_checkpoint(str(saved))  # a copy elsewhere is the same model
    spoil(moved / "model.safetensors")
    before, now = fingerprint(folder), fingerprint(moved)
    with pytest.raises(CheckpointError, match=rf"fingerprint {before}\), but .*fingerprint {now}\).*--lora.init_from"):
        build(moved).resume_from_checkpoint(str(saved))
    build(moved).load(str(saved))  # on purpose: weights alone


def test_a_checkpoint_of_an_older_version_does_not_say_its_base(folder: Path, saved: Path) -> None:
    file = saved / "trainer_state.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "base"}))
    (saved / "digests.json").unlink()
    build(folder).resume_from_checkpoint(str(saved))


def test_a_fingerprint_covers_the_header_and_blocks_of_large_files(tmp_path: Path) -> None:
    """Of a file above 4 MiB 65 spans are read; what replaces a whole tensor changes some of them."""
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    data = random.Random(1).randbytes(8 * 2**20)
    head = (64).to_bytes(8, "little") + b"h" * 64
    file.write_bytes(head + data)
    first = fingerprint(tmp_path)
    seen = {first}
    for begin in (8, len(head), len(head) + 4 * 2**20, len(head) + 8 * 2**20 - 300_000):
        changed = bytearray(head + data)
        changed[begin : begin + 300_000] = bytes(300_000)
        file.write_bytes(changed)
        seen.add(fingerprint(tmp_path))
    file.write_bytes(head + data + b"x")
    seen.add(fingerprint(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    file.write_bytes(head + data)
    seen.add(fingerprint(tmp_path))
    assert len(seen) == 7


def test_a_pipe_among_the_weights_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read: it is a pipe"):
        fingerprint(tmp_path)


@pytest.mark.timeout(60)  # a reader that waits for the pipe would wait for ever
def test_a_pipe_in_the_place_of_the_digests_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "digests.json")
    with pytest.raises(CheckpointError, match=r"digests\.json cannot be read \(.*it is a pipe, not a regular file"):
        check_digests(tmp_path)


def test_the_commit_of_a_hubs_folder_is_known(tmp_path: Path) -> None:
    assert commit_of(tmp_path / "snapshots" / ("a" * 40)) == "a" * 40
    assert commit_of(tmp_path / "snapshots" / "main") == commit_of(tmp_path) == ""
