"""The environment of child processes: variables without secrets, and their end together with the service."""

import ctypes
import re
import signal
import sys
from collections.abc import Mapping

_PASSED_ON = re.compile(
    r"PATH|HOME|USER|SHELL|TZ|TERM|TMPDIR|TEMP|TMP|LANG|LANGUAGE|LC_\w+|VIRTUAL_ENV|LD_\w+|XDG_\w+|PYTHON\w*|COVERAGE\w*"
    r"|(OMP|MKL|OPENBLAS|KMP|GOMP|NUMEXPR|TORCH\w*|PYTORCH|CUDA|NVIDIA|NCCL|ROCM|HIP|ASCEND|TRITON|HF|TRANSFORMERS|TOKENIZERS"
    r"|MODELSCOPE|TWINKLE|FAILPOINT)(_\w+)?"
)
_SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASSW|CREDENTIAL|COOKIE|_AUTH")


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an engine needs: known names, except those that sound like secrets."""
    return {
        name: value
        for name, value in environment.items()
        if _PASSED_ON.fullmatch(name) and not _SECRET.search(name.upper())
    }


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the service dies."""
    if not sys.platform.startswith("linux"):
        return  # elsewhere, the closed socket ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
