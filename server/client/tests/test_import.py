"""What the import of the client costs."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "peft", "datasets", "numpy.testing", "fastapi", "vllm", "ray")


def test_it_imports_no_heavy_package() -> None:
    code = f"import sys, twinkle_client; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
