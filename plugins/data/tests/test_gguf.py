"""GGUF files become Hugging Face folders once, with the same numbers."""

import json
import os
import threading
from pathlib import Path

import pytest

from twinkle.errors import ModelLoadError
from twinkle.hub import local_model
from twinkle.testing import CHATML, tiny_model
from twinkle_data import gguf

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")


def write_gguf(path: Path, source: Path) -> None:
    """Write a tiny llama of `source` as float32 GGUF, by the format's own rules (q and k rows are permuted)."""
    import gguf as library
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = library.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokens = json.loads((source / "tokenizer.json").read_text())
    names = sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].get)
    names += [entry["content"] for entry in tokens["added_tokens"]]
    names.append("ab")  # a byte-pair vocabulary needs at least one merge
    names += [f"<unused{n}>" for n in range(config["vocab_size"] - len(names))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(names)
    writer.add_token_types([3 if name.startswith("<") and len(name) > 1 else 1 for name in names])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_chat_template(CHATML)
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, tensor in load_file(source / "model.safetensors").items():
        name = key.removesuffix(".weight")
        if name.startswith("model.layers."):
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            name = f"blk.{layer}.{parts[part]}"
            if part.endswith(("q_proj", "k_proj")):
                count = heads if part.endswith("q_proj") else kv_heads
                size = tensor.shape[0] // count // 2
                tensor = tensor.reshape(count, 2, size, -1).swapaxes(1, 2).reshape(tensor.shape)
        else:
            name = outer[name]
        writer.add_tensor(f"{name}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def file(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf"
    write_gguf(path, source)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache, monkeypatch):
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(cache))


def test_the_conversion_keeps_every_number(file, source):
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    converted = AutoModelForCausalLM.from_pretrained(local_model(file), dtype="auto")
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert converted.dtype == torch.bfloat16
        assert torch.equal(original(ids).logits, converted(ids).logits)


def test_tokenizer_and_template_come_along(file):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(local_model(file))
    text = "Twinkle, twinkle — 星"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.eos_token_id == 258
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_folder_says_how_to_stop(file):
    assert json.loads((local_model(file) / "generation_config.json").read_text())["eos_token_id"] == 258


def test_a_folder_with_one_gguf_counts_as_it(file):
    assert local_model(file.parent) == local_model(file)


def test_the_second_time_nothing_is_converted(file, monkeypatch):
    first = local_model(file)
    monkeypatch.setattr(gguf, "_convert", lambda *_: pytest.fail("converted again"))
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("hashed again"))
    assert local_model(file) == first


def test_a_changed_file_is_another_model(file, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    before = gguf.digest(copy)
    assert before == gguf.digest(file)
    changed = bytearray(copy.read_bytes())
    changed[-1] ^= 1
    copy.write_bytes(changed)
    os.utime(copy, ns=(1, 1))
    assert gguf.digest(copy) != before


def test_two_that_ask_at_once_convert_once(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path))
    calls = []
    convert = gguf._convert
    monkeypatch.setattr(gguf, "_convert", lambda *args: (calls.append(args), convert(*args)))
    threads = [threading.Thread(target=local_model, args=(file,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert (local_model(file) / "model.safetensors").is_file()


def test_it_says_that_it_takes_a_while_and_is_quiet_otherwise(file, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path))
    with caplog.at_level("INFO", logger="twinkle"):
        local_model(file)
    assert "converting tiny.F32.gguf" in caplog.text
    assert capfd.readouterr().out == ""
    assert "%|" not in capfd.readouterr().err


def test_a_damaged_file_leaves_nothing_behind(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TWINKLE_CACHE_DIR", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match=r"broken\.gguf.*damaged"):
        local_model(broken)
    kept = tmp_path / "cache" / "models" / "gguf"
    assert [path for path in kept.iterdir() if path.is_dir()] == []


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "not.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        local_model(path)


def test_a_part_of_a_split_file_is_refused(tmp_path):
    path = tmp_path / "big-00001-of-00003.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="one part of a split"):
        local_model(path)
