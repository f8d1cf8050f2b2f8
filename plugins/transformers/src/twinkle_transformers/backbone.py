"""A causal language model seen as body, head and what lies between, so that whole logits need never exist."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.errors import DataError
from twinkle.logging import get_logger
from twinkle.torch.head import LogitTransform, score_tokens, wide

IGNORE = -100
_BATCH_KEYS = ("labels", "length", "completion_mask", "loss_scale", "messages", "user_data")


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
        head: its output projection, or None when logits cannot be had from hidden states; then whole logits are made.
        transform: what the model does to `head(hidden)`.
    """

    model: Any
    head: nn.Module | None
    transform: LogitTransform

    @classmethod
    def of(cls, model: Any) -> "Backbone":
        """Split `model`, and check on two tokens that body, head and transform give its own logits."""
        head = model.get_output_embeddings()
        found = cls(model, head, _transform(model.config.get_text_config()))
        if head is not None and found._agrees():
            return found
        get_logger().info(
            "%s does something to its logits that Twinkle does not know; whole logits will be made, which takes more "
            "memory but gives the same numbers",
            type(model).__name__,
        )
        return cls(model, None, LogitTransform())

    @torch.no_grad()
    def _agrees(self) -> bool:
        training = self.model.training
        self.model.eval()
        try:
            ids = torch.tensor([[1, 2]], device=self.model.device)
            whole = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.transform(self.head(self.body(input_ids=ids, use_cache=False).last_hidden_state).float())  # type: ignore[misc]
        finally:
            self.model.train(training)
        tolerance = 1e-4 if self.model.dtype == torch.float32 else 0.05
        return ours.shape == whole.shape and bool(torch.allclose(ours, whole, rtol=tolerance, atol=tolerance))

    @property
    def body(self) -> Any:
        """The model without its head."""
        return self.model.base_model

    def __call__(self, batch: dict[str, Any], device: torch.device, needs: Needs, temperature: float) -> ModelOutput:
        """Run one collated micro-batch.

        Args:
            batch: tensors on the CPU; `input_ids` int64 `[B, T]`, optional `labels` int64 `[B, T]`.
            device: where the model is.
            needs: what to prepare beside `logps`.
            temperature: divides the logits.

        Raises:
            DataError: a token id is outside the vocabulary.
        """
        _check_tokens(batch, self.model.get_input_embeddings().weight.shape[0])
        arguments = {key: value for key, value in batch.items() if key not in _BATCH_KEYS}
        mask = arguments.get("attention_mask")
        if mask is not None and bool(mask.all()):
            del arguments["attention_mask"]  # the causal fast path of the attention kernels
        arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        labels = batch.get("labels")
        if self.head is None or needs.logits or labels is None:
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


def _check_tokens(batch: dict[str, Any], vocabulary: int) -> None:
    """Refuse ids that the embedding does not have; on a GPU they would end the process, not the call."""
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
