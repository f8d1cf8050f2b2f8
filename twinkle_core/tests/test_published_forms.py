"""Published forms of core: mesh ranks of absent dimensions, the platform, errors of values, paths of models."""

import pytest

from twinkle import DeviceMesh, Platform
from twinkle.errors import ArgumentError, TwinkleError


def test_ranks_of_absent_dimensions_are_none() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=1)
    assert mesh.dp_rank == 0
    assert [mesh.fsdp_rank, mesh.tp_rank, mesh.pp_rank, mesh.cp_rank, mesh.ep_rank] == [None] * 5
    assert (mesh.data_rank, mesh.tp_world_size, mesh.get_slice(3)) == (0, 1, slice(0, 3))
    assert mesh.is_pp_last_rank()
    assert DeviceMesh.from_sizes(fsdp_size=1, ep_size=1).ep_rank == 0


def test_the_platform_has_its_published_name() -> None:
    assert Platform.get_platform() is Platform.get()
    assert Platform.get_platform("cuda") is Platform.get("GPU")


def test_an_argument_error_is_a_type_error_and_a_value_error() -> None:
    assert issubclass(ArgumentError, TypeError)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentError, TwinkleError)


def test_models_have_their_published_paths() -> None:
    from twinkle.model import transformers
    from twinkle.model.transformers.moe.router_replay import RouterReplayAction

    assert dir(transformers) == ["MultiLoraTransformersModel", "TransformersModel"]
    assert RouterReplayAction("replay_forward") is RouterReplayAction.REPLAY_FORWARD == "replay_forward"
    with pytest.raises(AttributeError, match="NoSuchModel"):
        _ = transformers.NoSuchModel


def test_published_paths_lead_to_the_same_objects() -> None:
    import twinkle
    from twinkle import infra, utils

    assert utils.DeviceMesh is twinkle.DeviceMesh
    assert infra.initialize is twinkle.initialize
    assert {getattr(utils, name).__module__.partition(".")[0] for name in dir(utils)} == {"twinkle"}
    with pytest.raises(AttributeError, match="torch_utils"):
        _ = utils.torch_utils


def test_remote_code_is_trusted_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import twinkle
    from twinkle.errors import NotTrusted

    monkeypatch.delenv("TWINKLE_TRUST_REMOTE_CODE", raising=False)
    assert not twinkle.trust_remote_code()
    twinkle.check_unsafe(1, "GRPOLoss", {"lr": [1e-4]}, name=None)
    for arguments, text in (((len,), "argument 0 is"), (({"a": [1, dict]},), r"argument 0\['a'\]\[1\] is")):
        with pytest.raises(NotTrusted, match=text):
            twinkle.check_unsafe(*arguments)
    with pytest.raises(PermissionError, match="'loss' is"):
        twinkle.check_unsafe(loss=lambda: 0)
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    assert twinkle.trust_remote_code()
    twinkle.check_unsafe(len)


def test_a_notifier_needs_only_a_call() -> None:
    from twinkle.notifier import Notifier, secrets_of

    class Plain(Notifier):
        def __call__(self, message: str) -> None: ...

    class Kept(Plain):
        def __init__(self, token: str, room: str = "one", hidden: int = 0) -> None:
            self.token, self.room = token, room

    assert (repr(Plain()), Plain().to_dict(), type(Plain.from_dict({}))) == ("Plain()", {}, Plain)
    notifier = Kept("12345")
    assert Kept.from_dict(notifier.to_dict()).token == "12345"
    assert repr(notifier) == "Kept(token='***', room='one')"
    assert secrets_of(notifier) == ["12345"]
