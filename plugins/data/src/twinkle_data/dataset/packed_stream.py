"""The packed stream: concatenates encoded rows in their order, one window at a time."""

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from twinkle.dataset.meta import DatasetMeta
from twinkle.errors import ArgumentError, DataError, TrainingStateError
from twinkle.logging import get_logger
from twinkle.runtime import remote_class, remote_function
from twinkle_data.dataset.calls import from_one, template_for
from twinkle_data.dataset.iterable import IterableDataset
from twinkle_data.dataset.packed import Fill, capacity_of, check_lengths, joined, pack_lengths, token_keys_of
from twinkle_data.dataset.stages import Chunk, EncodeMissing, EncodeStage, Row, Stage, encode_stage, run_stages

_remote = remote_function(dispatch="all", execute="first", collect="first")


@remote_class(execute="first")
class IterablePackingDataset(IterableDataset):
    """A stream whose rows are packed, see `PackingDataset`; rows that are not encoded yet are encoded before.

    `pack_dataset` ends the recorded steps. With a template, the first iteration calls it where it was not called.
    """

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        **kwargs: Any,
    ) -> None:
        """Locate the source; errors are those of `IterableDataset`.

        Args:
            dataset_meta: as for `IterableDataset`.
            packing_interval: how many rows are packed together; the fullest packs are handed out, and the rows of the
                emptiest one join the next window.
            packing_num_proc: how many processes map and encode while one iterates; a `DataLoader` with workers does so
                itself. The rows are the same for any number.
            cyclic: begin again at the end of the source, without an end.
            **kwargs: as for `IterableDataset`.

        Raises:
            ArgumentError: a number below 1.
        """
        self.packing_interval = from_one("packing_interval", packing_interval)
        self.packing_num_proc = from_one("packing_num_proc", packing_num_proc)
        self.cyclic = bool(cyclic)
        self._capacity: int | None = None
        super().__init__(dataset_meta, **kwargs)

    @_remote
    def set_template(self, template_func: Any = None, *, template_cls: Any = None, **kwargs: Any) -> None:
        """Set the template, see `IterableDataset.set_template`.

        Args:
            template_func: as there.
            template_cls: the published name of this argument in this class.
            **kwargs: as there.

        Raises:
            ArgumentError: both names are given, or none.
        """
        if (template_func is None) == (template_cls is None):
            raise ArgumentError(
                "IterablePackingDataset.set_template: template_func and template_cls are two names of one argument; "
                "give one"
            )
        super().set_template(template_cls if template_func is None else template_func, **kwargs)

    @_remote
    def pack_dataset(self) -> None:
        """Record that rows are packed, and encoded before if they are not.

        The log reports how full packs are after the first window and at the end.

        Raises:
            TrainingStateError: it was recorded already, or the template has no `max_length`.
        """
        self._refuse_change("pack_dataset")
        capacity = capacity_of(self.template)
        if self.template is not None and not any(isinstance(stage, EncodeStage) for stage in self._recorded()):
            template = template_for(self.template, "encode") if hasattr(self.template, "batch_encode") else None
            if template is not None:
                self._record(None, EncodeMissing(encode_stage(template, False, {})))
        self._capacity = capacity

    @_remote
    def chunks(self, worker: int = 0, workers: int = 1) -> Iterator[list[Row]]:
        """Yield chunks of rows before packing; see `IterableDataset.chunks`."""
        if self.packing_num_proc == 1:
            yield from super().chunks(worker, workers)
            return
        if workers > 1 or multiprocessing.current_process().daemon:
            raise ArgumentError(
                f"packing_num_proc={self.packing_num_proc} starts processes, which a worker process may not; read the "
                "stream in the main process, or leave packing_num_proc out"
            )
        yield from _in_processes(self._raw_chunks(), self._plan()[1], self.packing_num_proc)

    # Inside

    @_remote
    def in_order(self, chunks: Iterable[list[Row]]) -> Iterator[Row]:
        """Yield packs of the rows; see `IterableDataset.in_order`."""
        self._pack_at_last()
        return super().in_order(chunks)

    def _pack_at_last(self) -> None:
        if self._capacity is None and self.template is not None:
            self.pack_dataset()

    def _raw_chunks(self) -> Iterator[Chunk]:
        self._pack_at_last()
        return _endless(super()._raw_chunks) if self.cyclic else super()._raw_chunks()

    def _assembled(self, rows: Iterator[Row]) -> Iterator[Row]:
        return rows if self._capacity is None else self._packed(rows, self._capacity)

    def _packed(self, rows: Iterator[Row], capacity: int) -> Iterator[Row]:
        """Yield packs: of each window all but the emptiest, whose rows are packed again with the next window."""
        fill, numbered = Fill(capacity), enumerate(rows)
        carried: list[tuple[int, Row]] = []
        reported = False
        while window := list(itertools.islice(numbered, self.packing_interval)):
            lengths = _lengths(window, capacity)
            members = [*carried, *window]
            sizes = [len(row["input_ids"]) for _, row in carried] + lengths
            packs = pack_lengths(sizes, capacity)
            keys = token_keys_of([row for _, row in members])
            last = min(range(len(packs)), key=lambda pack: (sum(sizes[row] for row in packs[pack]), -pack))
            carried = [members[row] for row in packs[last]]
            for number, pack in enumerate(packs):
                if number != last:
                    fill.add([sizes[row] for row in pack])
                    yield joined([members[row][1] for row in pack], [members[row][0] for row in pack], keys)
            if fill.packs and not reported:
                get_logger(__name__).info("%s, so far", fill)
                reported = True
        if carried:
            carried_rows = [row for _, row in carried]
            fill.add([len(row["input_ids"]) for row in carried_rows])
            yield joined(carried_rows, [number for number, _ in carried], token_keys_of(carried_rows))
            get_logger(__name__).info("%s", fill)

    def _refuse_change(self, change: str) -> None:
        if self._capacity is not None:
            raise TrainingStateError(f"the rows are packed already; call {change} before pack_dataset()")
        super()._refuse_change(change)


def _lengths(window: list[tuple[int, Row]], capacity: int) -> list[int]:
    for number, row in window:
        if row.get("input_ids") is None:
            raise TrainingStateError(
                f"pack_dataset() packs encoded rows, but row {number} has no input_ids (it has {', '.join(row)}); call "
                "encode() before"
            )
    lengths = [len(row["input_ids"]) for _, row in window]
    check_lengths(lengths, capacity, window[0][0])
    return lengths


def _endless(begin_pass: Callable[[], Iterator[Chunk]]) -> Iterator[Chunk]:
    while True:
        nothing = True
        for chunk in begin_pass():
            nothing = False
            yield chunk
        if nothing:
            raise DataError("the stream has no rows, so it cannot begin again")


def _in_processes(chunks: Iterator[Chunk], stages: list[Stage], processes: int) -> Iterator[list[Row]]:
    """Yield the chunks after all stages, in order, a few chunks ahead of the reader."""
    with ProcessPoolExecutor(processes, initializer=_begin_work, initargs=(stages,)) as pool:
        coming: deque[Future[list[Row]]] = deque()
        try:
            for chunk in chunks:
                coming.append(pool.submit(_work, chunk))
                if len(coming) > 2 * processes:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_STAGES: list[Stage] = []


def _begin_work(stages: list[Stage]) -> None:
    _STAGES[:] = stages


def _work(chunk: Chunk) -> list[Row]:
    return run_stages(_STAGES, chunk).rows
