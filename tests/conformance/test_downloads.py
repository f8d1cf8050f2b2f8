"""Line 107: weights to take away, encrypted with age: the unmodified cookbook's `weights.download`, and plain HTTP."""

from pathlib import Path

import httpx
import numpy as np
import pytest
from cookbook import execute
from server_raw import Failed, Raw, RawModel
from server_reference import Reference
from serving import Served

pyrage = pytest.importorskip("pyrage")
TOKENS = [5, 9, 4, 8, 2, 30]
FILES = {"adapter_model.safetensors", "adapter_config.json"}


@pytest.fixture
def trained(raw: Raw) -> RawModel:
    model = raw.model(lora={"rank": 4})
    model.train(TOKENS, steps=2)
    return model


def place(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"/training_runs/{run}/checkpoints/{kind}/{name}"


def fetched(raw: Raw, path: str) -> dict[str, bytes]:
    urls = raw.get(f"{place(path)}/external_weights_urls")["urls"]
    return {name: httpx.get(url, trust_env=False).content for name, url in urls.items()}


@pytest.mark.full
def test_line_107_the_cookbook_downloads_a_training_checkpoint_that_peft_reads(
    served: Served, trained: RawModel, tiny: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tinker_cookbook", reason="make install brings it")
    path, out = trained.save("start"), tmp_path / "adapter"
    call = f"weights.download(tinker_path={path!r}, output_dir={str(out)!r}, base_url={served.url!r})"
    execute(served, ["-c", f"from tinker_cookbook import weights; print({call})"], tmp_path)
    assert {file.name for file in out.iterdir()} == FILES
    # float32 of two implementations, as the export that is not encrypted
    np.testing.assert_allclose(trained.logprobs(TOKENS), Reference(tiny, out).scores(TOKENS).numpy(), atol=5e-5)
    with Raw(served.url) as raw:
        kept = [checkpoint["tinker_path"] for checkpoint in raw.get("/checkpoints")["checkpoints"]]
    assert path in kept
    assert not [each for each in kept if each.endswith("/external_weights/download")], "the export was left behind"


def test_line_107_every_name_of_an_encrypted_export_ends_in_age_and_its_identity_reads_it(
    raw: Raw, trained: RawModel
) -> None:
    identity = pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public())]
    body = {"path": "secret", "ttl_seconds": 3600, "age_encryption_recipients": recipients}
    path = raw.result(trained.submit("save_weights_external", **body))["path"]
    plain, secret = fetched(raw, trained.save_external("plain")), fetched(raw, path)
    assert set(secret) == {f"{name}.age" for name in FILES}
    assert {name: pyrage.decrypt(secret[f"{name}.age"], [identity]) for name in FILES} == plain
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(secret["adapter_config.json.age"], [pyrage.x25519.Identity.generate()])


def test_line_107_an_encrypted_export_is_renewed_and_deleted_as_others_are(raw: Raw, trained: RawModel) -> None:
    recipients = [str(pyrage.x25519.Identity.generate().to_public())]
    body = {"path": "secret", "ttl_seconds": 3600, "age_encryption_recipients": recipients}
    path = raw.result(trained.submit("save_weights_external", **body))["path"]

    def expires() -> str:
        (found,) = raw.get(f"/training_runs/{trained.id}/checkpoints")["checkpoints"]
        return str(found["expires_at"])

    before = expires()
    url = raw.get(f"{place(path)}/external_weights_urls")["urls"]["adapter_config.json.age"]
    assert raw.send(f"{place(path)}/ttl", {"ttl_seconds": 7200}, method="PUT").is_success
    assert expires() > before
    assert httpx.get(url, trust_env=False).status_code == 200
    assert raw.send(place(path), method="DELETE").is_success
    assert raw.send(f"{place(path)}/external_weights_urls", method="GET").status_code == 404


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrong", [["nobody"], ["age1qqqq"], ["ssh-ed25519 AAAA"], []])
def test_recipients_that_are_none_are_the_users_fault_and_the_model_stays_usable(
    raw: Raw, trained: RawModel, wrong: list[str]
) -> None:
    with pytest.raises(Failed, match="age_encryption_recipients") as failed:
        raw.result(trained.submit("save_weights_external", path="secret", age_encryption_recipients=wrong))
    assert failed.value.category == "user"
    assert trained.save_external("plain").endswith("/external_weights/plain")
