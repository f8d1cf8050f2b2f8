"""The methods of `TransformersModel` that write and read checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle import remote_function
from twinkle.hub import local_folder
from twinkle.model import TwinkleModel
from twinkle_transformers import adapters, saving
from twinkle_transformers.group import OptimizerGroup
from twinkle_transformers.options import check_name, plain_state
from twinkle_transformers.parallel import Replicated


class Checkpoints(TwinkleModel):
    """Saving, loading and resuming; what is trained, and how its weights are called, says the model."""

    model: Any
    model_id: str
    model_path: Path
    base: Mapping[str, str]
    parallel: Replicated

    @remote_function(collect="first")
    def save(
        self,
        name: str | None = None,
        output_dir: str | None = None,
        interval: int = 1,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        loop_state: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Save a PEFT adapter, or the full model as Hugging Face safetensors, with the tokenizer's files.

        Args:
            name: folder name, by default `checkpoint-step-<cur_step>`.
            output_dir: its parent, by default `output`.
            interval: save only when `cur_step` is a multiple; else return None.
            adapter_name: which; by default the active one.
            save_optimizer: also save what `resume_from_checkpoint` needs to go on bit for bit.
            consumed_train_samples: kept in `trainer_state.json`, from `DataLoader.get_state()`.
            loop_state: what else the loop needs to go on, as JSON can hold it; kept there under `loop`.

        Returns:
            the directory, which is absent or whole at every moment. An older checkpoint of that name is replaced.

        Raises:
            OutputError: it cannot be written, or something that is no checkpoint stands there.
            ArgumentError: JSON cannot hold `loop_state`.
        """
        group = self._trained(adapter_name, saving=True)
        name = name or f"checkpoint-step-{group.cur_step}"
        check_name(name, interval)
        if group.cur_step % interval:
            return None
        target = Path(output_dir or "output", name)
        saving.save(
            self,
            group,
            target,
            save_optimizer=save_optimizer,
            consumed_train_samples=consumed_train_samples,
            loop_state=plain_state(loop_state),
        )
        return str(target)

    @remote_function()
    def load(
        self,
        name: str,
        output_dir: str | None = None,
        *,
        adapter_name: str | None = None,
        load_optimizer: bool = False,
        token: str | None = None,
    ) -> None:
        """Load weights (and, with `load_optimizer`, the whole training state) that `save` wrote.

        Args:
            name: a checkpoint's folder, its name below `output_dir`, or its id on a hub.
            output_dir: parent of `name`.
            adapter_name: which adapter to load into; by default the active one.
            load_optimizer: as `resume_from_checkpoint`.
            token: for a private repository of a hub.

        Raises:
            CheckpointError: it is missing, incomplete, or belongs to another model; nothing is changed then.
            HubError: the hub cannot be reached, refuses, or has no such repository.
        """
        folder = Path(output_dir, name) if output_dir else local_folder(name, **({"token": token} if token else {}))
        if load_optimizer:
            self.resume_from_checkpoint(str(folder), adapter_name=adapter_name)
        else:
            saving.load_weights(self, self._trained(adapter_name, saving=True), saving.find(self, folder))

    @remote_function(collect="first")
    def resume_from_checkpoint(
        self, checkpoint_dir: str, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, int]:
        """Load weights, optimizer, scheduler, counters and random state, adapters and full models alike.

        Args:
            checkpoint_dir: a folder that `save(save_optimizer=True)` wrote.
            resume_only_model: weights and counters only.
            adapter_name: which adapter; by default the active one.

        Returns:
            `cur_step`, `consumed_train_samples`, `gradient_accumulation_steps`.
        """
        return saving.resume(self, self._trained(adapter_name), Path(checkpoint_dir), only_model=resume_only_model)

    # what is trained

    if TYPE_CHECKING:  # from `Components`; a body here could stand before that one

        def _trained(self, adapter_name: str | None, *, saving: bool = False) -> OptimizerGroup: ...
        def _place(self, group: OptimizerGroup, *, trained: bool = True) -> None: ...

    def _names(self, group: OptimizerGroup) -> Mapping[str, torch.nn.Parameter]:
        """Return the trained parameters by saved name."""
        return dict(adapters.named_parameters(self.model, group.adapter_name))

    def _weights(self, group: OptimizerGroup) -> Mapping[str, torch.Tensor]:
        """Return what a checkpoint holds: an adapter's weights, or the full model's."""
        return adapters.weights(self.model, group.adapter_name) if group.adapter_name else self.model.state_dict()

    def _load_adapter(self, group: OptimizerGroup, folder: Path) -> None:
        """Copy a saved adapter's weights into an adapter."""
        adapters.load_weights(self.model, group.adapter_name, folder)

    def _resumed(self, group: OptimizerGroup) -> None:
        """Do what is to be done after a training state was put in place."""
