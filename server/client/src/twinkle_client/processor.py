"""The processor of batches that lives on a service, with the methods of `twinkle.processor`."""

# mypy: disable-error-code="empty-body"

from typing import Any, ClassVar

from twinkle_client.data import Client, DataResource, remote

__all__ = ["InputProcessor"]


class InputProcessor(DataResource):
    """Pads encoded rows into a batch, whose tensors are returned as arrays of numpy.

    Args:
        device_mesh: None; padding does not depend on it.
        padding_free: rows one after the other in one row, without padding.
        framework: `transformers`.
        client: by default that of the last `init_twinkle_client`.
        **kwargs: `padding_side`, `pad_to_multiple_of`.
    """

    kind: ClassVar[str] = "processor"

    def __init__(
        self,
        device_mesh: Any = None,
        padding_free: bool = False,
        framework: str = "transformers",
        *,
        client: Client | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"padding_free": padding_free, "framework": framework, **kwargs}
        if getattr(device_mesh, "world_size", 1) != 1:
            given["device_mesh"] = str(device_mesh)
        super().__init__(type(self).__name__, (), given, client=client)

    @remote
    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Collate rows to one batch."""

    @remote
    def collate_fn(
        self, inputs: Any, micro_batch_size: int | None = None, variable_seq_lengths: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Return micro-batches of at most `micro_batch_size` rows, each collated."""
