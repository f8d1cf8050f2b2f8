"""Weights of an adapter at one moment, which nobody changes any more."""

from dataclasses import dataclass, field

from torch import Tensor

from twinkle.errors import NonFiniteError
from twinkle_torch.layout import Layout


@dataclass(frozen=True, eq=False)
class AdapterVersion:
    """The weights of an adapter at one time.

    Attributes:
        layout: where the matrices lie.
        flat: `[P]`; whoever makes a version gives its weights away, or a copy.
        key: says which weights these are: two versions of one key are the same.
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
        """Refuse weights that are not finite: in a product they could reach rows of others.

        Raises:
            NonFiniteError: a weight is NaN or infinite.
        """
        if not self._finite:
            self._finite.append(bool(self.flat.isfinite().all()))
        if not self._finite[0]:
            raise NonFiniteError(f"the weights of adapter {self.key!r} are NaN or infinite; did its training diverge?")
