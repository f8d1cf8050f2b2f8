"""A plugin with preprocessors that misbehave, as pip would install it."""

from pathlib import Path

NAME = "acme-data"
_HEAD = '''"""Preprocessors that misbehave."""

import os
import socket
import subprocess
import time

from twinkle.preprocessor import Preprocessor

'''
_BODIES = {
    "AcmeSleeps": "time.sleep(3600)",
    "AcmeEats": "kept = [bytearray(2**20) for _ in range(2**20)]",
    "AcmeCrashes": "os._exit(3)",
    "AcmeRaises": "raise RuntimeError('wrong phase of the moon in ' + __file__)",
    "AcmeReads": "return {'text': [open('/etc/passwd').read()]}",
    "AcmeReadsData": "return {'text': os.listdir(os.environ.get('ACME_DATA', '/root'))}",
    "AcmeConnects": "socket.create_connection(('127.0.0.1', 9))",
    "AcmeSpawns": "subprocess.run(['id'])",
    "AcmeSecrets": "return {'text': [str([n for n in os.environ if 'TOKEN_' in n or 'KEY' in n])] * len(rows['n'])}",
}
_UNSAFE = "AcmeUnsafe"
_CLASS = '''
class {name}(Preprocessor):
    """Misbehaves."""

    def __call__(self, rows):
        {body}

'''
_ROW = """
[[component]]
kind = "preprocessor"
name = "{name}"
ref = "acme_data.rows:{name}"
summary = "Misbehaves"
runtimes = ["local", "served"]
tenant_safe = {safe}
"""


def write(site: Path) -> Path:
    """Write the plugin below a folder of `sys.path`, and return that folder."""
    package = site / "acme_data"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", "utf-8")
    bodies = {**_BODIES, _UNSAFE: "return rows"}
    text = _HEAD + "".join(_CLASS.format(name=name, body=body) for name, body in bodies.items())
    (package / "rows.py").write_text(text, "utf-8")
    rows = "".join(_ROW.format(name=name, safe=str(name != _UNSAFE).lower()) for name in bodies)
    manifest = f'schema = 1\ncore = ">=0.1,<1"\nname = "{NAME}"\n{rows}'
    (package / "twinkle-plugin.toml").write_text(manifest, "utf-8")
    info = site / "acme_data-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[twinkle]\nacme_data = acme_data\n", "utf-8")
    return site
