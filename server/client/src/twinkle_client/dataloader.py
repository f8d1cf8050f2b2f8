"""The loader of batches that lives on a service, with the methods of `twinkle.dataloader`."""

# mypy: disable-error-code="empty-body"

from collections.abc import Callable
from typing import Any, ClassVar

from twinkle.dataset.protocol import NotSized
from twinkle_client.data import Iterated, dataset_of, remote

__all__ = ["DataLoader"]


class DataLoader(Iterated):
    """Batches of a data set that lives on a service.

    Args:
        dataset: a data set of `twinkle_client.dataset`, or a function that returns one.
        batch_size: rows of a batch.
        min_batch_size: a last batch with fewer rows is dropped.
        device_mesh: None; the service divides batches over its devices.
        **kwargs: `shuffle`, `seed`, `drop_last`, `shuffle_buffer`, `max_retries`, ...

    Raises:
        ComponentTypeError: the data set is not on the service.
        ArgumentError: an unknown argument.
    """

    kind: ClassVar[str] = "dataloader"
    eager: ClassVar[bool] = True

    def __init__(
        self,
        dataset: Any | Callable[[], Any],
        *,
        batch_size: int,
        min_batch_size: int | None = None,
        device_mesh: Any = None,
        **kwargs: Any,
    ) -> None:
        parent = dataset_of(dataset)
        if getattr(device_mesh, "world_size", 1) == 1:
            device_mesh = None  # as without one
        given = {"dataset": parent, "batch_size": batch_size, "min_batch_size": min_batch_size, **kwargs}
        if device_mesh is not None:
            given["device_mesh"] = str(device_mesh)
        super().__init__("DataLoader", (), given, parent=parent)
        self.dataset, self.batch_size = parent, batch_size

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch.

        Raises:
            NotSized: the rows are a stream.
        """
        if not getattr(self.dataset, "sized", True):
            raise NotSized("this loader reads a stream, which has no length; iterate over it, and stop when you want")
        number: int = self._run(self._invoke("__len__", {}))
        return number

    @remote
    def set_processor(self, processor_cls: Any, **kwargs: Any) -> None:
        """Set the processor that collates each batch: a name, with its arguments, or a processor of the client."""

    @remote
    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Continue after the first `consumed_train_samples` rows."""

    @remote
    def resume_from_checkpoint(self, consumed_train_samples: int, **kwargs: Any) -> None:
        """Continue from `get_state`: the same rows follow, in this epoch and in later ones."""

    @remote
    def get_state(self) -> dict[str, Any]:
        """Return `{"consumed_train_samples": n}`: number of rows returned so far."""
