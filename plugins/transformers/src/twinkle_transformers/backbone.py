"""A causal language model seen as body, head and what lies between, so that whole logits need never exist."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.errors import DataError, Unsupported
from twinkle.logging import get_logger
from twinkle.torch.head import LogitTransform, score_tokens, wide

IGNORE = -100
_NOT_DATA = frozenset(
    {
        "past_key_values", "inputs_embeds", "use_cache", "cache_position", "labels", "logits_to_keep", "kwargs",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    }
)  # fmt: skip
"""Parameters of a model's forward that are switches or set here: a row's key of that name is no input."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a forward must prepare, from the loss, the metrics and the call."""

    logits: bool = False
    entropies: bool = False
    predictions: bool = False


@dataclass(frozen=True, slots=True)
class Backbone:
    """Body and head of a causal language model.

    Attributes:
        model: the whole Hugging Face module.
        splits: whether its logits are `transform(head(hidden))`; if not, whole logits are made.
        transform: what the model does to `head(hidden)`.
        inputs: names of the tensors that its body takes.
    """

    model: Any
    splits: bool
    transform: LogitTransform
    inputs: frozenset[str]

    @classmethod
    def of(cls, model: Any, splits: bool | None = None) -> "Backbone":
        """Split `model`, and check on two tokens that body, head and transform give its own logits.

        Args:
            model: the causal language model.
            splits: the result of that check where it was made already, for a model without weights.
        """
        config = model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            raise Unsupported(
                f"{type(model).__name__} asks for its router's auxiliary loss (output_router_logits=True), which is "
                "not added to the loss here; leave it off"
            )
        taken = frozenset(inspect.signature(model.base_model.forward).parameters) - _NOT_DATA
        found = cls(model, model.get_output_embeddings() is not None, _transform(config), taken)
        if found.splits and (found._agrees() if splits is None else splits):
            return found
        get_logger().info(
            "%s does something to its logits that Twinkle does not know; whole logits will be made, which takes more "
            "memory but gives the same numbers",
            type(model).__name__,
        )
        return cls(model, False, LogitTransform(), taken)

    @torch.no_grad()
    def _agrees(self) -> bool:
        training = self.model.training
        self.model.eval()
        try:
            ids = torch.tensor([[1, 2]], device=self.model.device)
            whole = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.transform(self.head(self.body(input_ids=ids, use_cache=False).last_hidden_state).float())
        finally:
            self.model.train(training)
        tolerance = 1e-4 if self.model.dtype == torch.float32 else 0.05
        return ours.shape == whole.shape and bool(torch.allclose(ours, whole, rtol=tolerance, atol=tolerance))

    @property
    def body(self) -> Any:
        """The model without its head."""
        return self.model.base_model

    @property
    def head(self) -> nn.Module:
        """The output projection as it is now: an adapter or a resize puts another module in its place."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def __call__(self, batch: dict[str, Any], device: torch.device, needs: Needs, temperature: float) -> ModelOutput:
        """Run one collated micro-batch.

        Args:
            batch: tensors on the CPU; `input_ids` int64 `[B, T]`, optional `labels` int64 `[B, T]`. Whatever the
                model does not take is left aside.
            device: where the model is.
            needs: what to prepare beside `logps`.
            temperature: divides the logits.
        """
        arguments = {k: v for k, v in batch.items() if k in self.inputs and isinstance(v, Tensor)}
        if _is_plain(arguments):
            # The causal fast path of the attention kernels: nothing is masked and positions count from 0.
            arguments = {k: v for k, v in arguments.items() if k not in ("attention_mask", "position_ids")}
        arguments = {k: v.to(device) for k, v in arguments.items()}
        labels = batch.get("labels")
        if not self.splits or needs.logits or labels is None:
            return self._whole(arguments, labels, device, needs, temperature)
        hidden = self.body(**arguments, use_cache=False).last_hidden_state
        trained = (labels.reshape(-1) != IGNORE).nonzero().squeeze(-1)  # found on the CPU: no wait for the device
        targets = labels.reshape(-1)[trained].to(device)
        trained = trained.to(device)
        transform = LogitTransform(self.transform.scale, self.transform.softcap, temperature)
        scores = score_tokens(
            hidden.reshape(-1, hidden.shape[-1])[trained],
            targets,
            self.head,
            transform=transform,
            entropies=needs.entropies,
            predictions=needs.predictions,
        )
        return _spread(labels.shape, trained, scores.logps, scores.entropies, scores.predictions)

    def _whole(
        self, arguments: dict[str, Any], labels: Tensor | None, device: torch.device, needs: Needs, temperature: float
    ) -> ModelOutput:
        logits = self.model(**arguments, use_cache=False).logits
        if temperature != 1.0:
            logits = logits / temperature
        output: ModelOutput = {}
        if labels is not None:
            trained = (labels.reshape(-1) != IGNORE).nonzero().squeeze(-1).to(device)
            targets = labels.to(device).reshape(-1)[trained]
            log_p = logits.reshape(-1, logits.shape[-1])[trained].to(wide(logits.dtype)).log_softmax(-1)
            logps = log_p.gather(-1, targets[:, None]).squeeze(-1)
            entropies = -(log_p.exp() * log_p).sum(-1) if needs.entropies else None
            best = log_p.argmax(-1) if needs.predictions else None
            output = _spread(labels.shape, trained, logps, entropies, best)
        if needs.logits or labels is None:
            output["logits"] = logits
        return output


def check_batch(batch: dict[str, Any], model: Any) -> None:
    """Refuse what the model would answer with wrong numbers or, on a GPU, with the end of the process.

    Raises:
        DataError: a token id is outside the vocabulary.
        Unsupported: positions restart within a row (packed sub-sequences would attend to each other).
    """
    vocabulary = model.config.get_text_config().vocab_size
    labels = batch.get("labels")
    for name, ids in (("input_ids", batch["input_ids"]), ("labels", labels)):
        if ids is None:
            continue
        wrong = (ids < 0) | (ids >= vocabulary)
        if name == "labels":
            wrong &= ids != IGNORE
        if bool(wrong.any()):
            row, position = wrong.nonzero()[0].tolist()
            raise DataError(
                f"row {row} of the batch: {name}[{position}] is {int(ids[row, position])}, but the model's vocabulary "
                f"has {vocabulary} tokens; encode the rows with this model's own template"
            )

    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if positions is not None and positions.ndim == 2:
        back = positions[:, 1:] <= positions[:, :-1]
        if mask is not None:
            back &= (mask[:, 1:] * mask[:, :-1]) != 0
        if bool(back.any()):
            row, position = back.nonzero()[0].tolist()
            raise Unsupported(
                f"row {row} of the batch: position_ids restart at {position + 1}; packed rows are not trained by this "
                "backend, give each sub-sequence as a row of its own"
            )


def _is_plain(arguments: dict[str, Tensor]) -> bool:
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None and not bool(mask.all()):
        return False
    if positions is None:
        return True
    return positions.ndim == 2 and bool((positions == torch.arange(positions.shape[1])).all())


def _spread(
    shape: torch.Size, where: Tensor, logps: Tensor, entropies: Tensor | None, predictions: Tensor | None
) -> ModelOutput:
    output: ModelOutput = {"logps": _place(shape, where, logps, 0.0)}
    if entropies is not None:
        output["entropies"] = _place(shape, where, entropies, 0.0)
    if predictions is not None:
        output["predictions"] = _place(shape, where, predictions, IGNORE)
    return output


def _place(shape: torch.Size, where: Tensor, values: Tensor, empty: float) -> Tensor:
    return values.new_full((shape.numel(),), empty).index_put((where,), values).view(shape)


def _transform(config: Any) -> LogitTransform:
    scale = getattr(config, "logit_scale", None) or 1.0
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale = scale / divisor
    return LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
