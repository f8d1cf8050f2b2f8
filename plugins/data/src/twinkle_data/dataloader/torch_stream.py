"""Adapter from streams to torch's loader; a separate module, because it imports torch."""

from collections.abc import Iterator
from typing import Any

import torch

from twinkle.dataset.protocol import StreamLike


class Chunks(torch.utils.data.IterableDataset[list[Any]]):
    """The chunks of a stream; in a worker process, that worker's."""

    def __init__(self, stream: StreamLike) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[list[Any]]:
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            yield from self.stream.chunks()
        else:
            yield from self.stream.chunks(worker.id, worker.num_workers)
