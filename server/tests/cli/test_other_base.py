"""A data folder that is served under another name: what belongs to the other base model is not used with this one."""

from pathlib import Path

import pytest
from server_raw import PROTOBUF, Raw, RawModel, pass_body, row
from serving import ledger

HANGING = 66


def test_runs_of_another_base_model_cannot_be_used(tmp_path: Path) -> None:
    one, two = (ledger(tmp_path / "data", {"name": name}) for name in ("one", "two"))
    one.start()
    try:
        with Raw(one.url) as raw:
            model = raw.model(base_model="one")
            model.forward_backward([row([5, 6, 7])])
            path = model.save("kept")
        assert one.stop() == 0
        two.start()
        with Raw(two.url) as raw:
            body = pass_body(model.id, model.last + 1, [row([5, 6, 7])])
            refused = raw.send("/forward_backward", body, headers={"Content-Type": PROTOBUF})
            assert refused.status_code == 410, refused.text
            assert "belongs to the base model 'one', but this service serves 'two'" in refused.text
            listed = raw.http.get(f"{two.url}/v1/models").json()["data"]
            assert [entry["id"] for entry in listed] == ["two"]
            for name in (model.id, f"{model.id}/kept", path):
                answer = raw.http.get(f"{two.url}/v1/models/{name}")
                assert answer.status_code == 404
                assert "belongs to the base model 'one'" in answer.text
        assert two.stop() == 0
        one.start()
        with Raw(one.url) as raw:
            RawModel(raw, model.id, model.last).forward_backward([row([5, 6, 7])])
    finally:
        one.kill()
        two.kill()


@pytest.mark.full
def test_operations_of_another_base_model_must_end_first(tmp_path: Path) -> None:
    one = ledger(tmp_path / "data", {"name": "one", "extra": {"hang": [HANGING]}})
    two = ledger(tmp_path / "data", {"name": "two"})
    one.start()
    try:
        with Raw(one.url) as raw:
            raw.model(base_model="one").submit_pass([row([HANGING, 6, 7])])
        one.kill()
        with pytest.raises(AssertionError, match="1 operations of models of another base model have not ended"):
            two.start()
    finally:
        one.kill()
        two.kill()
