"""A plugin whose losses misbehave, as pip would install it: they sleep, eat memory, crash, print, and look around."""

from pathlib import Path

NAME = "acme-rogue"
_HEAD = '''"""Losses that misbehave."""

import os
import signal
import socket
import subprocess
import sys
import time

import torch

from twinkle.data_format import LossOutput
from twinkle.loss import Loss


def plain(inputs, outputs):
    """Cross entropy, so that a loss that behaves for once gives a number to compare."""
    chosen = inputs["labels"] != -100
    scale = inputs["loss_scale"] if inputs.get("loss_scale") is not None else torch.ones(chosen.shape)
    return LossOutput(-(outputs["logps"] * chosen * scale).sum(), float(chosen.sum()))


class Acme(Loss):
    """Calls `do` where it is asked to, and is cross entropy otherwise."""

    def __init__(self, bad: float = 1.0) -> None:
        self.bad = bad

    def __call__(self, inputs, outputs):
        if self.bad:
            found = self.do(inputs, outputs)
            if found is not None:
                return found
        return plain(inputs, outputs)


'''
_LOSSES = {
    "AcmePlain": "return None",
    "AcmeSleeps": "time.sleep(3600)",
    "AcmeSpins": "while True: pass",
    "AcmeEats": "kept = []\nwhile True: kept.append(torch.ones(2**20))",
    "AcmeEatsShared": "kept = []\nwhile True: kept.append(torch.ones(2**20).share_memory_())",
    "AcmeExits": "os._exit(3)",
    "AcmeQuits": "sys.exit(4)",
    "AcmeSegfaults": "os.kill(os.getpid(), signal.SIGSEGV)",
    "AcmeAborts": "os.abort()",
    "AcmeRaises": "raise RuntimeError('the moon is in the wrong phase: ' + __file__)",
    "AcmeSurrogate": "raise RuntimeError('a file named ' + os.fsdecode(bytes([0x80])))",
    "AcmeNan": "return LossOutput(outputs['logps'].sum() * float('nan'), 1.0)",
    "AcmeNanGradient": (
        "x = outputs['logps'] * 0\nreturn LossOutput(torch.where(x == 0, x.new_zeros(()), x.sqrt() / x).sum(), 1.0)"
    ),
    "AcmePrints": "line = 'x' * 2**20\nfor _ in range(1024): print(line)\nsys.stderr.write(line); sys.stdout.flush()",
    "AcmeCloses": "os.closerange(3, 256)\ntime.sleep(3600)",
    "AcmeScribbles": "for fd in range(3, 64):\n    try: os.write(fd, b'{' * 4096)\n    except OSError: pass",
    "AcmeSpawns": "subprocess.Popen(['sleep', '3600'])\nos._exit(5)",
    "AcmeOverwrites": (
        "outputs['logps'].detach().zero_(); inputs['labels'].fill_(7)\nreturn LossOutput(outputs['logps'].sum(), 1.0)"
    ),
    "AcmeText": "return 'much'",
    "AcmeDetached": "return LossOutput(outputs['logps'].detach().sum(), 1.0)",
    "AcmeOlder": "return {'loss': -outputs['logps'].sum(), 'num_tokens': 4}",
    "AcmeReadsLogits": "return LossOutput(outputs['logits'].sum(), 1.0)",
    "AcmeRandom": "return LossOutput((outputs['logps'] * torch.rand(outputs['logps'].shape)).sum(), 1.0)",
}
_LOOKS = '''
class AcmeLooks(Loss):
    """Says what it has of the engine: secrets of the environment, sockets, threads, its number."""

    def __call__(self, inputs, outputs):
        secrets = [name for name in os.environ if any(word in name for word in ("KEY", "TOKEN", "SECRET"))]
        sockets = files = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink("/proc/self/fd/" + name)
            except OSError:
                continue
            sockets += target.startswith("socket:")
            files += ".db" in target or "/data/" in target
        found = {"pid": os.getpid(), "secrets": len([s for s in secrets if s != "TOKENIZERS_PARALLELISM"])}
        return LossOutput(-outputs["logps"].sum(), 1.0, {**found, "sockets": sockets, "files": files})


class AcmeWhole(Loss):
    """Asks for whole logits."""

    require_logits = True

    def __call__(self, inputs, outputs):
        return LossOutput(outputs["logits"].sum(), 1.0)


class AcmeRich(Loss):
    """Reads everything that is sent, with gradients, and an input of its own."""

    require_entropy = True
    require_uniform_logps = True

    def __init__(self, share: float = 1.0, mode: str = "sum") -> None:
        self.share, self.mode = share, mode

    def __call__(self, inputs, outputs, fractions):
        logps, mask = outputs["logps"], (inputs["labels"] != -100).float()
        mine = torch.zeros_like(logps)
        for row, values in enumerate(fractions):
            mine[row, : len(values)] = torch.as_tensor(values)
        ratio = torch.exp((logps - logps.detach()) * mask)
        clipped = torch.minimum(ratio * mine, torch.clamp(ratio, 0.8, 1.2) * mine)
        total = (clipped + self.share * outputs["entropies"] * mask + logps.square() * mask).sum()
        total = total + (outputs["uniform_logps"] * logps * mask).sum() / 7
        return LossOutput(-total, mask.sum(), {"fractions": float(mine.sum())})
'''


def write(folder: Path, name: str = NAME, code: str | None = None, losses: dict[str, str] | None = None) -> Path:
    """Write the plugin, installed, to a folder for `sys.path`, and return it.

    Args:
        folder: where.
        name: of the plugin.
        code: of its module, in place of the losses that misbehave.
        losses: names of its losses, with their inputs as a manifest declares them.
    """
    package = name.replace("-", "_")
    if code is None:
        bodies = {n: "\n".join(f"        {line}" for line in body.splitlines()) for n, body in _LOSSES.items()}
        classes = [f"class {n}(Acme):\n    def do(self, inputs, outputs):\n{body}\n" for n, body in bodies.items()]
        code = _HEAD + "\n\n".join(classes) + "\n" + _LOOKS
        losses = {**dict.fromkeys((*_LOSSES, "AcmeLooks", "AcmeWhole"), ""), "AcmeRich": 'fractions = "float32[T]"'}
    place = folder / package
    place.mkdir(parents=True)
    (place / "__init__.py").write_text('"""Misbehaves."""\n', "utf-8")
    (place / "loss.py").write_text(code, "utf-8")
    manifest = [f'schema = 1\ncore = ">=0.1,<1"\nname = "{name}"\n']
    for loss, inputs in (losses or {}).items():
        manifest.append(
            f'[[component]]\nkind = "loss"\nname = "{loss}"\nref = "{package}.loss:{loss}"\nsummary = "{loss}"\n'
            f'runtimes = ["local", "served"]\ntenant_safe = true\ninputs = {{ {inputs} }}\n'
        )
    (place / "twinkle-plugin.toml").write_text("\n".join(manifest), "utf-8")
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    (about / "entry_points.txt").write_text(f"[twinkle]\n{package} = {package}\n", "utf-8")
    return folder
