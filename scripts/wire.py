"""Makes the Python module of the wire's messages from its schema, without the pin on the newest protobuf runtime.

`python scripts/wire.py` renews `tinker_pb2.py` and its stub, with `--check` it only says whether they are out of date.
Needs `grpcio-tools`, which carries protoc.
"""

import re
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "server" / "src"
SCHEMA = SOURCE / "twinkle_server" / "wire" / "tinker.proto"
PIN = re.compile(r"^_runtime_version\.ValidateProtobufRuntimeVersion\(.*?^\)\n", re.MULTILINE | re.DOTALL)
IMPORT = "from google.protobuf import runtime_version as _runtime_version\n"
VERSION = re.compile(r"^# Protobuf Python Version: .*\n", re.MULTILINE)


def unpinned(module: str) -> str:
    """Return generated code that does not ask for the runtime which made it.

    The pin refuses every older runtime of the same wire format, and the environments of users hold whatever else they
    installed; what the code calls has been there since protobuf 5.26.
    """
    return VERSION.sub("", PIN.sub("", module).replace(IMPORT, ""))


def generated() -> dict[Path, str]:
    """Run protoc, and return what each generated file should hold."""
    from grpc_tools import protoc

    name = SCHEMA.relative_to(SOURCE).as_posix()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["protoc", f"-I{SOURCE}", f"--python_out={folder}", f"--pyi_out={folder}", name]
        if protoc.main(arguments):
            raise SystemExit(f"protoc does not accept {name}")
        made = {suffix: (Path(folder) / name).with_name(f"tinker_pb2{suffix}") for suffix in (".py", ".pyi")}
        return {SCHEMA.with_name(path.name): unpinned(path.read_text("utf-8")) for path in made.values()}


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` return 1 where one is not what the schema makes."""
    stale = {path: text for path, text in generated().items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if "--check" in arguments:
            sys.stderr.write(f"{path.relative_to(SOURCE)} is out of date: run scripts/wire.py\n")
        else:
            path.write_text(text, "utf-8")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
