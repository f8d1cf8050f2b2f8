"""A causal language model as body and head, so that log-probabilities need no whole logits."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.logging import get_logger
from twinkle_torch.head import wide
from twinkle_torch.logits import LogitTransform, transform_of
from twinkle_torch.numerics import Evidence, evaluating, judge, probe_tokens
from twinkle_torch.pooling import embed, pool
from twinkle_transformers.batches import PackedBatch
from twinkle_transformers.segments import Segmenter, body_of
from twinkle_transformers.token_scores import IGNORE, Needs, check_top, has_targets, score_hidden, score_logits

_NOT_DATA = frozenset(
    {
        "past_key_values", "inputs_embeds", "use_cache", "cache_position", "labels", "logits_to_keep", "kwargs",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    }
)  # fmt: skip
"""Parameters of a forward that are switches or set here; a key of a row with this name is not passed on."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """Body and head of a causal language model.

    Attributes:
        model: the whole Hugging Face module.
        splits: whether its logits are `transform(head(hidden))`; if not, whole logits are made.
        transform: transformation of `head(hidden)` into logits.
        inputs: names of the tensors that the body takes.
        segmenter: runs it on several sequences in one row, if the model supports that.
        scores_rows: whether the head returns one vector a row (sequence classification) instead of tokens.
    """

    model: Any
    splits: bool
    transform: LogitTransform
    inputs: frozenset[str]
    segmenter: Segmenter
    scores_rows: bool = False

    @classmethod
    def of(cls, model: Any, splits: bool | None = None) -> "Backbone":
        """Split `model`, and check on two tokens that body, head and transform reproduce its logits.

        Args:
            model: the causal language model.
            splits: the result of that check, if another rank made it, for a model without weights.
        """
        config = model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            raise Unsupported(
                f"{type(model).__name__} asks for its router's auxiliary loss (output_router_logits=True), which is "
                "not added to the loss here; leave it off"
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise Unsupported(f"{type(model).__name__} is an encoder-decoder model; only decoder models are supported")
        taken = frozenset(inspect.signature(body_of(model).forward).parameters) - _NOT_DATA
        segmenter = Segmenter(model)
        if model.get_output_embeddings() is None:
            rows = type(model).__name__.endswith("ForSequenceClassification") and hasattr(model, "score")
            return cls(model, False, LogitTransform(), taken, segmenter, scores_rows=rows)
        backbone = cls(model, True, transform_of(config), taken, segmenter)
        evidence = backbone._judge() if splits is None else None
        if splits if evidence is None else evidence.exact:
            return backbone
        get_logger().info(
            "%s: body and head, called separately, do not reproduce its logits%s; whole logits will be computed, which "
            "takes more memory but gives the same results",
            type(model).__name__, "" if evidence is None else f" ({evidence.reason})",
        )  # fmt: skip
        return cls(model, False, LogitTransform(), taken, segmenter)

    def _judge(self) -> Evidence:
        """Compare `transform(head(hidden))` with the model's own logits."""
        tokens = probe_tokens(2, self.model.config.get_text_config().vocab_size)
        ids = torch.tensor([tokens], device=self.model.device)

        def ours(ids: Tensor) -> Tensor:
            hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state[0]
            return self.transform(self.head(hidden).to(wide(hidden.dtype)))

        def whole(ids: Tensor) -> Tensor:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
            return logits.to(wide(logits.dtype))

        with evaluating(self.model):
            return judge("head", ours, whole, ids)

    @property
    def body(self) -> Any:
        """The model without its head."""
        return body_of(self.model)

    @property
    def head(self) -> nn.Module:
        """The present output projection; an adapter or a resize replaces the module."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def __call__(self, batch: dict[str, Any], device: torch.device, needs: Needs, temperature: float) -> ModelOutput:
        """Run one collated micro-batch.

        Args:
            batch: tensors on the CPU; `input_ids` int64 `[B, T]`, optional `labels` (target tokens int64 `[B, T]`, or
                `[B, T, K]` for several a position; other labels are only for the loss). Keys that the model does not
                take are ignored.
            device: device of the model.
            needs: what to compute beside `logps`.
            temperature: divides the logits.
        """
        arguments = {k: v for k, v in batch.items() if k in self.inputs and isinstance(v, Tensor)}
        if isinstance(batch, PackedBatch):
            arguments = batch.join(arguments)
        elif _is_plain(arguments):
            # Without mask and positions, attention uses its causal fast path.
            arguments = {k: v for k, v in arguments.items() if k not in ("attention_mask", "position_ids")}
        arguments = {k: v.to(device) for k, v in arguments.items()}
        scored = has_targets(batch.get("labels")) and self.model.get_output_embeddings() is not None
        check_top(needs, scored and not needs.embeddings)
        if needs.embeddings:
            if temperature != 1.0 or needs.logits:
                raise ArgumentError("task='embedding' makes no logits; leave temperature and return_logits out")
            return {"embeddings": embed(self._hidden(arguments, batch), batch)}
        if self.scores_rows:
            # The model's own pooling searches its padding token, but other tokens may be used as padding.
            return {"logits": self.model.score(pool(self._hidden(arguments, batch), batch)) / temperature}
        if needs.softcap is not None and needs.softcap != self.transform.softcap:
            raise ArgumentError(
                f"softcap of the loss must be that of {type(self.model).__name__} ({self.transform.softcap}), got "
                f"{needs.softcap}; leave softcap out to use the model's own"
            )
        if not self.splits or needs.logits or not has_targets(batch.get("labels")):
            return self._whole(arguments, batch, needs, temperature)
        transform = LogitTransform(self.transform.scale, self.transform.softcap, temperature)
        return score_hidden(self._hidden(arguments, batch), batch, self.head, transform, needs)

    def _hidden(self, arguments: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        with self._seeing(batch, arguments):
            hidden: Tensor = self.body(**arguments, use_cache=False).last_hidden_state
        return batch.pad_rows(hidden) if isinstance(batch, PackedBatch) else hidden

    def _seeing(self, batch: dict[str, Any], arguments: dict[str, Any]) -> AbstractContextManager[None]:
        if not isinstance(batch, PackedBatch):
            return nullcontext()
        return self.segmenter.within(batch.segments(arguments["input_ids"].device))

    def _whole(self, arguments: dict[str, Any], batch: dict[str, Any], needs: Needs, temperature: float) -> ModelOutput:
        with self._seeing(batch, arguments):
            raw = self.model(**arguments, use_cache=False)
        if getattr(raw, "logits", None) is None:
            raise Unsupported(
                f"{type(self.model).__name__} has no head; use task='embedding', or load a class that has one"
            )
        logits = batch.pad_rows(raw.logits) if isinstance(batch, PackedBatch) else raw.logits
        if temperature != 1.0:
            logits = logits / temperature
        output: ModelOutput = {}
        scored = has_targets(batch.get("labels")) and self.model.get_output_embeddings() is not None
        if scored:
            output = score_logits(logits, batch, needs)
        if needs.logits or not scored:
            output["logits"] = logits
        return output


def check_batch(batch: dict[str, Any], model: Any) -> None:
    """Refuse token ids that would give wrong results or, on a GPU, a device-side assertion that ends the process.

    Raises:
        DataError: a token id is outside the vocabulary.
    """
    vocabulary = model.config.get_text_config().vocab_size
    labels = batch.get("labels")
    for name, ids in (("input_ids", batch["input_ids"]), ("labels", labels)):
        if ids is None or (name == "labels" and not has_targets(ids)):
            continue
        wrong = ids != ids.clamp(0, vocabulary - 1)
        if name == "labels":
            wrong &= ids != IGNORE
        if bool(wrong.any()):
            row, position, *_ = place = tuple(wrong.nonzero()[0].tolist())
            raise DataError(
                f"row {row} of the batch: {name}[{position}] is {int(ids[place])}, but the model's vocabulary "
                f"has {vocabulary} tokens; encode the rows with this model's own template"
            )


def _is_plain(arguments: dict[str, Tensor]) -> bool:
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None and not bool(mask.all()):
        return False
    if positions is None:
        return True
    return positions.ndim == 2 and bool((positions == torch.arange(positions.shape[1])).all())
