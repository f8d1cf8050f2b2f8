"""The contract of a sampler."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twinkle.data_format import InputFeature, SampleResponse, SamplingParams, StopReason, Trajectory


class Sampler(ABC):
    """Generates tokens from a model and its adapters."""

    @abstractmethod
    def sample(
        self,
        inputs: InputFeature | Trajectory | Sequence[InputFeature | Trajectory],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | Sequence[str | None] | None = "",
        **kwargs: Any,
    ) -> list[SampleResponse]:
        """Return one response for each input, in order, with `num_samples` sequences each.

        Args:
            inputs: trajectories (encoded by the template with a generation prompt) or encoded rows.
            sampling_params: sampling parameters; a mapping is read by `SamplingParams.from_dict`.
            adapter_name: the adapter to sample with; empty means the sampler's default. A backend may accept a list
                with one name for each input, None for the base model.
            **kwargs: further arguments of a backend, such as `adapter_path`.
        """

    @abstractmethod
    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """Set the template that encodes trajectories and decodes tokens."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Clear cached prefixes; call it after the weights have changed."""

    def sample_stream(
        self,
        inputs: InputFeature | Trajectory,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | None = "",
        **kwargs: Any,
    ) -> Iterator[tuple[str, StopReason | None]]:
        """Yield the text of one sample as it grows, as `(delta_text, finish_reason)`; the reason comes with the last.

        Args:
            inputs: one trajectory or one encoded row.
            sampling_params: see `sample`.
            adapter_name: see `sample`.
            **kwargs: further arguments of a backend.

        Raises:
            Unsupported: the backend does not support streaming.
        """
        from twinkle.errors import Unsupported

        raise Unsupported(f"{type(self).__name__} has no streams; use sample, or TorchSampler")

    def add_adapter_to_sampler(self, adapter_name: str, config: Any) -> None:
        """Add an adapter under a name; `Unsupported` for a backend whose adapters come with each call.

        Args:
            adapter_name: the name for `sample(adapter_name=...)`.
            config: the folder of a saved adapter.
        """
        from twinkle.errors import Unsupported

        raise Unsupported(f"{type(self).__name__} adds no adapters; give adapter_path= to sample, or use TorchSampler")

    def encode_trajectory(
        self, trajectory: Trajectory, adapter_name: str = "", add_generation_prompt: bool = True
    ) -> InputFeature:
        """Return the encoded row of a conversation; `Unsupported` for a backend that takes encoded rows only."""
        from twinkle.errors import Unsupported

        raise Unsupported(f"{type(self).__name__} has no template; encode the rows with a Template")

    def decode_response(self, token_ids: Sequence[int], adapter_name: str = "") -> str:
        """Return the text of tokens; `Unsupported` for a backend without a tokenizer."""
        from twinkle.errors import Unsupported

        raise Unsupported(f"{type(self).__name__} has no template; decode the tokens with a Template")

    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """Apply a patch to the underlying module; `Unsupported` for a backend without a module."""
        from twinkle.errors import Unsupported

        raise Unsupported(f"{type(self).__name__} has no module that a patch could change")
