"""A model is loaded whole or not at all, quietly, and each failure names its file or its weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinkle import Platform
from twinkle.errors import ArgumentError, ModelLoadError
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.testing import tiny_model
from twinkle_transformers.loading import dtype_of, load_model, read_header


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(source, tmp_path):
    """A copy of the model that a test may damage."""
    return shutil.copytree(source, tmp_path / "copy")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_every_weight_is_the_one_in_the_file(source, capfd):
    model, folder = load_model(source)
    assert folder == source
    assert not model.training
    saved = load_file(source / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "bf16", "torch.bfloat16"])
def test_dtypes_are_named_as_people_name_them(source, dtype):
    assert load_model(source, dtype=dtype)[0].dtype == torch.bfloat16


def test_auto_keeps_the_saved_dtype(source):
    assert load_model(source, dtype="auto")[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat61", "int8", "", torch.int8, None])
def test_a_wrong_dtype_is_refused(dtype):
    with pytest.raises(ArgumentError, match="dtype must be"):
        dtype_of(dtype)


def test_a_misspelt_dtype_names_the_nearest():
    with pytest.raises(ArgumentError, match="did you mean 'bfloat16'"):
        dtype_of("bfloat61")


def test_the_class_may_be_chosen_by_name_or_given(source):
    from transformers import LlamaForCausalLM

    assert type(load_model(source, model_cls="LlamaForCausalLM")[0]) is LlamaForCausalLM
    assert type(load_model(source, model_cls=LlamaForCausalLM)[0]) is LlamaForCausalLM


def test_a_misspelt_class_names_the_nearest(source):
    with pytest.raises(ArgumentError, match="nearest: LlamaForCausalLM"):
        load_model(source, model_cls="LlamaForCausalLN")


def test_something_that_is_no_model_class_is_refused(source):
    with pytest.raises(ArgumentError, match="a transformers model class with from_pretrained"):
        load_model(source, model_cls=int)


def test_fields_of_the_configuration_may_be_changed(source):
    assert load_model(source, attn_implementation="eager", rms_norm_eps=0.5)[0].config.rms_norm_eps == 0.5


def test_an_unknown_keyword_names_the_nearest(source):
    with pytest.raises(ArgumentError, match="nearest: attn_implementation"):
        load_model(source, attn_implementatio="eager")


def test_a_configuration_of_another_type_is_refused(source):
    with pytest.raises(ArgumentError, match="config must be a transformers configuration, got a dict"):
        load_model(source, config={})


def test_a_missing_folder_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="not found"):
        load_model(tmp_path / "nothing")


def test_a_truncated_file_is_named_with_its_lengths(folder):
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 100)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors is truncated.*{size - 100} bytes.*{size};"):
        load_model(folder)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (16).to_bytes(8, "little") + b"this is no json!"])
def test_a_file_of_something_else_is_named(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is"):
        load_model(folder)


def test_a_folder_without_weights_says_so(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        load_model(folder)


def test_every_shard_is_looked_at(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    split = {name: names[index % 2] for index, name in enumerate(sorted(weights))}
    for shard in names:
        parts = {name: tensor for name, tensor in weights.items() if split[name] == shard}
        save_file(parts, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": split}))
    model, _ = load_model(folder)
    assert torch.equal(model.state_dict()["lm_head.weight"], weights["lm_head.weight"])

    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-4])
    with pytest.raises(ModelLoadError, match=r"00002-of-00002\.safetensors is truncated"):
        load_model(folder)
    (folder / names[1]).unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_model(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"index\.json is corrupt"):
        load_model(folder)


def test_missing_weights_are_never_made_up(folder, capfd):
    change_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"1 weights .* are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)
    assert capfd.readouterr() == ("", "")


def test_left_over_weights_are_named(folder):
    change_weights(folder, lambda weights: weights.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.raises(ModelLoadError, match=r"have no place in LlamaForCausalLM: model\.extra\.weight"):
        load_model(folder)


def test_weights_of_another_shape_are_named_with_both(folder):
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is \[63\], LlamaForCausalLM has \[64\]"):
        load_model(folder)


def test_tied_weights_are_not_missing(tmp_path):
    folder = tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in read_header(folder / "model.safetensors")
    model, _ = load_model(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_unknown_architecture_names_the_nearest(folder):
    change_config(folder, model_type="llamma")
    with pytest.raises(ModelLoadError, match=r"does not support the architecture 'llamma'; nearest: llama"):
        load_model(folder)


def test_a_model_of_another_task_asks_for_its_class(folder):
    change_config(folder, model_type="vit", architectures=["ViTModel"])
    with pytest.raises(ModelLoadError, match=r"is not a causal language model.*model_cls="):
        load_model(folder)


def test_code_in_the_folder_does_not_run_unasked(folder):
    change_config(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.M"})
    (folder / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelLoadError, match="trust_remote_code=True"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_configuration_is_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("native", "precision", "dtype"), [(True, "bf16", torch.bfloat16), (False, "no", torch.float32)]
)
@pytest.mark.parametrize("kind", [TransformersModel, MultiLoraTransformersModel])
def test_the_default_precision_is_what_the_device_computes_natively(
    kind, native, precision, dtype, source, monkeypatch
):
    monkeypatch.setattr(Platform.get(), "computes_bfloat16", lambda: native)
    model = kind(model_id=str(source))
    assert model.mixed_precision == precision
    assert kind(model_id=str(source), dtype="bfloat16").mixed_precision == "bf16"
    with model._loaded.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
