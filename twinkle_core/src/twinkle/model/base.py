"""The contract of a model: the methods that a training loop calls."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle.data_format import InputFeature, ModelOutput, Trajectory

if TYPE_CHECKING:
    from twinkle.hub import Upload

Inputs = InputFeature | Trajectory | Sequence[InputFeature | Trajectory]


class TwinkleModel(ABC):
    """A model with adapters, each with its own optimizer, scheduler, loss, template, processor and metrics.

    Every method takes `adapter_name=`; the default is the adapter that was added last (or the full model, whose name is
    `""`). An unknown keyword is an error. With `gradient_accumulation_steps=k` the methods `clip_grad_norm`, `step`,
    `zero_grad` and `lr_step` act at backward k, 2k, 3k, ... and do nothing in between; with `flush=True` they also act
    on an incomplete accumulation. The first backward after a step begins without gradients. Gradients are divided once,
    at the step, by the sum of the losses' denominators over all ranks, micro-batches and accumulation steps, whether or
    not they are clipped.

    Attributes:
        default_metrics: components of kind `metric` that every adapter has from the start.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(self, *, inputs: Inputs, **kwargs: Any) -> ModelOutput:
        """Run the model in training mode and keep the graph for `calculate_loss` and `backward`."""

    @abstractmethod
    def forward_only(self, *, inputs: Inputs, **kwargs: Any) -> ModelOutput:
        """Run the model in evaluation mode without a graph."""

    @abstractmethod
    def calculate_loss(self, **kwargs: Any) -> float:
        """Return the loss of the last forward, divided by its own denominator."""

    @abstractmethod
    def backward(self, **kwargs: Any) -> None:
        """Add the gradients of the last calculated loss."""

    @abstractmethod
    def forward_backward(self, *, inputs: Inputs, **kwargs: Any) -> ModelOutput:
        """Forward, loss and backward of a batch, in micro-batches of `micro_batch_size` rows."""

    @abstractmethod
    def clip_grad_norm(self, max_grad_norm: float = 1.0, norm_type: float = 2, **kwargs: Any) -> float:
        """Scale the gradients so that their global norm is at most `max_grad_norm`; returns the norm before that."""

    @abstractmethod
    def step(self, **kwargs: Any) -> None:
        """Update the parameters."""

    @abstractmethod
    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients and their denominators."""

    @abstractmethod
    def lr_step(self, **kwargs: Any) -> None:
        """Advance the learning-rate scheduler."""

    def clip_grad_and_step(self, max_grad_norm: float = 1.0, norm_type: float = 2, **kwargs: Any) -> None:
        """`clip_grad_norm`, `step`, `zero_grad` and `lr_step`, in this order."""
        self.clip_grad_norm(max_grad_norm=max_grad_norm, norm_type=norm_type, **kwargs)
        self.step(**kwargs)
        self.zero_grad(**kwargs)
        self.lr_step(**kwargs)

    @abstractmethod
    def set_loss(self, loss_cls: Any, **kwargs: Any) -> None:
        """Set the loss, in any form of component argument; keyword arguments go to its constructor."""

    @abstractmethod
    def set_optimizer(self, optimizer_cls: Any, **kwargs: Any) -> None:
        """Set the optimizer; keyword arguments (`lr`, `weight_decay`, ...) go to its constructor."""

    @abstractmethod
    def set_lr_scheduler(self, scheduler_cls: Any, **kwargs: Any) -> None:
        """Set the learning-rate scheduler; the optimizer is passed to its constructor."""

    @abstractmethod
    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """Set the template that encodes trajectories given to `forward`."""

    @abstractmethod
    def set_processor(self, processor_cls: Any, **kwargs: Any) -> None:
        """Set the processor that collates rows into tensors."""

    @abstractmethod
    def add_metric(self, metric_cls: Any, is_training: bool | None = None, **kwargs: Any) -> None:
        """Add a metric for training, for evaluation, or (None) for both."""

    @abstractmethod
    def calculate_metric(self, is_training: bool, **kwargs: Any) -> Mapping[str, float]:
        """Return the numbers of all metrics since the last call, and reset the metrics."""

    @abstractmethod
    def add_adapter_to_model(self, adapter_name: str, config_or_dir: Any, **kwargs: Any) -> None:
        """Add an adapter from a PEFT configuration or a saved adapter, and make it the active one."""

    @abstractmethod
    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """Apply a patch to the underlying module."""

    @abstractmethod
    def save(self, name: str | None = None, output_dir: str | None = None, **kwargs: Any) -> str | None:
        """Save in the standard format of the weights; returns the directory."""

    @abstractmethod
    def load(self, name: str, output_dir: str | None = None, **kwargs: Any) -> None:
        """Load what `save` wrote."""

    @abstractmethod
    def get_state_dict(self, **kwargs: Any) -> Mapping[str, Any]:
        """Return the trainable parameters by name."""

    @abstractmethod
    def resume_from_checkpoint(
        self, checkpoint_dir: str, *, resume_only_model: bool = False, **kwargs: Any
    ) -> dict[str, int]:
        """Load weights, optimizer, scheduler, counters and random state; returns the counters."""

    @abstractmethod
    def get_train_configs(self, **kwargs: Any) -> str:
        """Return a readable summary of what is trained and how."""

    def upload_to_hub(
        self, checkpoint_dir: str | Path, hub_model_id: str, hub_token: str | None = None, async_upload: bool = True
    ) -> "Upload | str | None":
        """Upload a saved checkpoint from the first rank. If the repository does not exist, it is created as private.

        Args:
            checkpoint_dir: the folder that `save` returned. Its present files are uploaded, whatever changes later.
            hub_model_id: `hf://owner/name`, `ms://owner/name`, or `owner/name` at the default hub.
            hub_token: token with write access; by default from the hub's variable or login.
            async_upload: return at once and upload in the background.

        Returns:
            The `Upload`, which can be awaited and reports failure; with `async_upload=False` the repository's address;
            None on other ranks.

        Raises:
            HubError: the folder does not exist, or (at once, or from the `Upload`) the hub refuses.
        """
        from twinkle.hub import HubOperation
        from twinkle.platform import Platform

        if not Platform.is_master():
            return None
        push = HubOperation.async_push_to_hub if async_upload else HubOperation.push_to_hub
        return push(hub_model_id, checkpoint_dir, token=hub_token, commit_message="Upload a checkpoint")
