"""`TransformersModel` on a service: without an adapter, all parameters of the model are trained."""

from typing import Any

from twinkle.errors import ArgumentError, TrainingStateError
from twinkle_client.calls import Call, twins
from twinkle_client.client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel, _Adapter
from twinkle_registry import check_keywords


class TransformersModel(MultiLoraTransformersModel):
    """The model of a service, as the local class of this name: with adapters, or trained whole.

    `add_adapter_to_model` adds adapters to it. Any other call without an adapter begins a training of all parameters,
    where the operator allows it. The service is then reserved for your key until `unload`, or until the session ends:
    it answers other keys with `Reserved`. The base model of the service stays as it is.

    Args:
        model_id: name of the served model; None is the one it serves.
        client: by default that of the last `init_twinkle_client`.
        **kwargs: none; options of the model are those of the service.

    Raises:
        ArgumentError: an argument is unknown.
    """

    def __init__(self, model_id: str | None = None, *, client: TwinkleClient | None = None, **kwargs: Any) -> None:
        super().__init__(model_id, client=client, **kwargs)
        self._number: int | None = None

    def _add_adapter_to_model(self, /, adapter_name: str, config: Any = None, **kwargs: Any) -> Call[None]:
        """Add an adapter; see `MultiLoraTransformersModel.add_adapter_to_model`."""
        if not adapter_name:
            raise ArgumentError("adapter_name must not be empty: '' is the full model")
        if self._number is not None:
            raise TrainingStateError(
                f"cannot add adapter {adapter_name!r}: all parameters are being trained; call unload() first"
            )
        check_keywords(
            super().add_adapter_to_model, kwargs, what="TransformersModel.add_adapter_to_model", partial=True
        )
        yield from super()._add_adapter_to_model(adapter_name, config, **kwargs)

    add_adapter_to_model, add_adapter_to_model_async = twins(_add_adapter_to_model)

    def _unload(self) -> Call[None]:
        """End the training of all parameters: the weights are dropped, and others can use the service again.

        Checkpoints stay. The next call without an adapter begins with the base model again.
        """
        with self._lock:
            number, self._number = self._number, None
        if number is not None:
            yield from self._remove_adapter("")

    unload, unload_async = twins(_unload)

    def _found(self, name: str | None) -> Call[_Adapter]:
        """Return an adapter, or the full model, which is created with its first call."""
        with self._lock:
            whole = not name and not (self._adapters.keys() - {""})
            known = self._adapters.get("")
            if whole and known is None and self._number is None:
                self._number = self.client.next_number("model")
            number = self._number
        if not whole or known is not None or number is None:
            return self._adapter(name)
        return (yield from self._created("", number, {"full_parameters": True}))

    def training_run_id(self, adapter_name: str | None = None) -> str:
        """Return the id of the training run of an adapter, or of the full model after its first call."""
        return self._adapter(adapter_name).model_id
