"""Immutable versions of an adapter's weights, for sampling."""

from dataclasses import dataclass, field

from torch import Tensor

from twinkle.errors import NonFiniteError
from twinkle_torch.layout import Layout


@dataclass(frozen=True, eq=False)
class AdapterVersion:
    """The weights of an adapter at one time.

    Attributes:
        layout: offsets of the matrices.
        flat: `[P]`; nothing else may refer to it.
        key: identifies the weights: versions with equal keys are equal.
    """

    layout: Layout
    flat: Tensor
    key: str
    _finite: list[bool] = field(default_factory=list, repr=False)

    @property
    def nbytes(self) -> int:
        """Memory that the weights take, in bytes."""
        return self.flat.numel() * self.flat.element_size()

    def check(self) -> None:
        """Refuse weights that are not finite: in a grouped product they could affect rows of other adapters.

        Raises:
            NonFiniteError: a weight is NaN or infinite.
        """
        if not self._finite:
            self._finite.append(bool(self.flat.isfinite().all()))
        if not self._finite[0]:
            raise NonFiniteError(f"the weights of adapter {self.key!r} are NaN or infinite; did its training diverge?")
