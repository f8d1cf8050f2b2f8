"""A loss from a hub that is revoked while the service runs is dropped within a minute; everything else goes on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from server_raw import Failed, Raw, row
from serving import Served

from twinkle.testing import tiny_model

SECONDS = 60.0
"""In which the documentation promises it."""
LOSS = '''
import os
from pathlib import Path

from twinkle.data_format import LossOutput
from twinkle.loss import Loss

Path(os.environ["TWINKLE_STATE_DIR"], "imported-by").write_text(str(os.getpid()))

class Focal(Loss):
    """Negative log-likelihood of the trained tokens."""
    def __call__(self, inputs, outputs, **kwargs):
        trained = inputs["labels"] != -100
        return LossOutput(-(outputs["logps"] * trained).sum(), int(trained.sum()))
'''
MANIFEST = """
schema = 1
core = ">=0.1,<1"
name = "acme-focal"

[[component]]
kind = "loss"
name = "Focal"
ref = ".focal:Focal"
summary = "A loss for tests"
runtimes = ["local", "served"]
tenant_safe = true
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An operator's own files, all named."""
    return {
        "TWINKLE_LOCK": str(tmp_path / "twinkle.lock"),
        "TWINKLE_CONFIG": str(tmp_path / "operator.toml"),
        "TWINKLE_CACHE_DIR": str(tmp_path / "cache"),
        "TWINKLE_STATE_DIR": str(tmp_path / "state"),
    }


@pytest.mark.full
def test_a_revoked_loss_is_dropped_from_a_running_service(tmp_path: Path, environment: dict[str, str]) -> None:
    def twinkle(*arguments: str) -> str:
        command = [sys.executable, "-m", "twinkle.cli", "plugins", *arguments]
        done = subprocess.run(command, env={**os.environ, **environment}, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    folder, operator = tmp_path / "acme-focal", Path(environment["TWINKLE_CONFIG"])
    folder.mkdir()
    (folder / "focal.py").write_text(LOSS)
    (folder / "twinkle-plugin.toml").write_text(MANIFEST)
    operator.write_text("")
    twinkle("add", f"file://{folder}", "--yes")
    public = twinkle("keygen", "key.pem")
    twinkle("revoke", "revoked.json", "hf://other/thing", "--reason", "it steals tokens", "--key", "key.pem")
    operator.write_text(f'[[trust.revoked]]\nlist = "revoked.json"\ned25519 = "{public}"\n')
    model = tiny_model(tmp_path / "model", "qwen3")
    command = [sys.executable, "-m", "twinkle.cli", "serve", str(model), "--data", str(tmp_path / "data")]
    service = Served(tmp_path / "data", [*command, "--port", "0", "--no-auth"], environment)
    try:
        service.start()
        with Raw(service.url) as raw:
            tenant = raw.model()
            assert tenant.forward_backward([row([1, 2, 3])], "Focal")
            twinkle("revoke", "revoked.json", f"file://{folder}", "--reason", "it leaks rewards", "--key", "key.pem")
            end, refusal = time.monotonic() + SECONDS, ""
            while not refusal and time.monotonic() < end:
                try:
                    tenant.forward_backward([row([1, 2, 3])], "Focal")
                    time.sleep(0.5)
                except Failed as error:
                    refusal = str(error)
            assert refusal.startswith("user: loss_fn 'Focal' is no longer available")
            assert "it was revoked: 'it leaks rewards' (list number 2)" in refusal
            assert tenant.forward_backward([row([1, 2, 3])]), "other losses go on, for the same tenant"
            loader = Path(environment["TWINKLE_STATE_DIR"], "imported-by").read_text()
            while Path("/proc", loader).exists() and time.monotonic() < end:
                time.sleep(0.1)
            assert not Path("/proc", loader).exists(), "the process that imported it ended as well"
        service.stop()
        service.start()
        with Raw(service.url) as raw, pytest.raises(Failed, match="it leaks rewards"):
            raw.model().forward_backward([row([1, 2, 3])], "Focal")
    finally:
        service.stop()
