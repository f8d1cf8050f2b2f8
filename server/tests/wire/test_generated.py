"""The generated module is what its script makes of the schema, and loads beside the SDK's own messages."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "wire.py"


def test_the_committed_module_is_what_the_script_makes():
    pytest.importorskip("grpc_tools")
    script = runpy.run_path(str(SCRIPT))
    assert {path.name for path in script["generated"]()} == {"tinker_pb2.py", "tinker_pb2.pyi"}
    assert script["main"](["--check"]) == 0


def test_the_committed_module_asks_for_no_newest_runtime():
    from twinkle_server.wire import tinker_pb2

    assert "runtime_version" not in Path(tinker_pb2.__file__).read_text("utf-8")


def test_the_messages_load_beside_the_sdks_own():
    tinker_public_pb2 = pytest.importorskip("tinker.proto.tinker_public_pb2")
    from twinkle_server.wire import tinker_pb2

    ours, theirs = tinker_pb2.DESCRIPTOR.message_types_by_name, tinker_public_pb2.DESCRIPTOR.message_types_by_name
    for name, message in ours.items():
        fields = {(field.name, field.number, field.type) for field in message.fields}
        own = {field for field in fields if field[0].startswith("twinkle_")}
        assert fields - own == {(field.name, field.number, field.type) for field in theirs[name].fields}, name
        assert all(number > 1000 for _, number, _ in own), "later versions of the SDK may use smaller numbers"
