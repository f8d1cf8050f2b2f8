"""The contract of a sampler."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format import InputFeature, SampleResponse, SamplingParams, Trajectory


class Sampler(ABC):
    """Generates tokens from a model and its adapters."""

    @abstractmethod
    def sample(
        self,
        inputs: InputFeature | Trajectory | Sequence[InputFeature | Trajectory],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = "",
        **kwargs: Any,
    ) -> list[SampleResponse]:
        """Return one response for each input, in order, with `num_samples` sequences each.

        Args:
            inputs: trajectories (encoded by the template with a generation prompt) or encoded rows.
            sampling_params: how to draw; a mapping is read by `SamplingParams.from_dict`.
            adapter_name: the adapter to sample with; empty means the sampler's default.
            **kwargs: what a backend adds, such as `adapter_path`.
        """

    @abstractmethod
    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """Set the template that encodes trajectories and decodes tokens."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; call it after the weights have changed."""

    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """Apply a patch to the underlying module; a backend without one module refuses."""
        from twinkle.errors import Unsupported

        raise Unsupported(f"{type(self).__name__} has no module that a patch could change")
