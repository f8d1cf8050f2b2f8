"""Classes and objects of components are sent by name, and only if the service can build the same."""

from typing import Any

import pytest
import torch

from twinkle.errors import ArgumentError
from twinkle.loss import CrossEntropyLoss as TheirLoss
from twinkle.loss import DPOLoss, Loss
from twinkle.metric import Accuracy as TheirMetric
from twinkle.metric import Metric
from twinkle.preprocessor import GSM8KProcessor, Preprocessor, SelfCognitionProcessor
from twinkle.processor import InputProcessor
from twinkle_client.data import sendable
from twinkle_client.naming import component_for


class CrossEntropyLoss(Loss):
    """A loss of the script, with the name of a component."""

    def __call__(self, inputs: Any, outputs: Any, **_: Any) -> Any:
        raise RuntimeError


class Accuracy(Metric):
    """A metric of the script, with the name of a component."""

    def accumulate(self, inputs: Any, outputs: Any, **_: Any) -> None:
        """Do nothing."""

    def calculate(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def reset(self) -> None:
        """Do nothing."""


def test_classes_of_plugins_are_sent_by_name() -> None:
    assert component_for("set_loss", TheirLoss, {"dft": True}) == ("CrossEntropyLoss", {"dft": True})
    assert component_for("add_metric", TheirMetric, {}) == ("Accuracy", {})
    assert component_for("set_optimizer", torch.optim.AdamW, {"lr": 1.0}) == ("AdamW", {"lr": 1.0})
    assert component_for("set_processor", InputProcessor, {}) == ("InputProcessor", {})


@pytest.mark.parametrize(("method", "own"), [("set_loss", CrossEntropyLoss), ("add_metric", Accuracy)])
def test_a_class_of_the_script_is_never_replaced_by_a_component_of_its_name(method: str, own: type) -> None:
    for given in (own, own()):
        with pytest.raises(ArgumentError, match=method):
            component_for(method, given, {})
    with pytest.raises(ArgumentError, match=rf"the component '{own.__name__}' is another class"):
        component_for(method, own, {})


def test_objects_are_sent_by_name_and_arguments() -> None:
    assert component_for("set_loss", DPOLoss(beta=0.3), {}) == ("DPOLoss", {"beta": 0.3})
    with pytest.raises(ArgumentError, match="it has its arguments already; leave beta out"):
        component_for("set_loss", DPOLoss(), {"beta": 0.3})
    changed = DPOLoss()
    changed.unknown = 1  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"the loss DPOLoss cannot be sent as an object, .*give its name"):
        component_for("set_loss", changed, {})


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (GSM8KProcessor(), {}),
        (GSM8KProcessor(system="Be brief.", add_assistant=True), {"system": "Be brief.", "add_assistant": True}),
        (SelfCognitionProcessor("Nova", ("实验室", "Lab")), {"model_name": "Nova", "model_author": ["实验室", "Lab"]}),
    ],
)
def test_preprocessors_are_sent_as_published_scripts_give_them(given: Any, arguments: dict[str, Any]) -> None:
    content = {"kind": "preprocessor", "name": type(given).__name__, "arguments": arguments}
    assert sendable(given) == {"$component": content}


def test_code_of_the_script_is_refused() -> None:
    class GSM8KProcessor(Preprocessor):  # type: ignore[misc]
        """A preprocessor of the script."""

        def __call__(self, rows: Any) -> Any:
            return rows

    for own in (GSM8KProcessor(), lambda rows: rows):
        with pytest.raises(ArgumentError, match="cannot run on the service"):
            sendable(own)
    with pytest.raises(ArgumentError, match="the service cannot have it"):
        sendable(GSM8KProcessor)
