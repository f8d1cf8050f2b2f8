"""A causal language model as body and head, and the scores of tokens that a pass reads from its hidden states.

Log-probabilities need no whole logits: the head runs on the trained positions alone.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from twinkle.data_format import ModelOutput
from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.logging import get_logger
from twinkle.loss import FusedLoss, HeadProduct
from twinkle_torch.head import (
    CHUNK_TOKENS,
    LogitTransform,
    TokenScores,
    is_plain,
    product_of,
    score_tokens,
    top_of,
    transform_of,
    wide,
)
from twinkle_torch.numerics import Evidence, evaluating, judge, probe_tokens
from twinkle_torch.pooling import embed, pool
from twinkle_transformers.batches import PackedBatch
from twinkle_transformers.segments import Segmenter, body_of

_NOT_DATA = frozenset(
    {
        "past_key_values", "inputs_embeds", "use_cache", "cache_position", "labels", "logits_to_keep", "kwargs",
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    }
)  # fmt: skip
"""Parameters of a forward that are switches or set here; a key of a row with this name is not passed on."""
IGNORE = -100


@dataclass(frozen=True, slots=True)
class Needs:
    """What a forward must compute beside `logps`, from the loss, the metrics and the call.

    Attributes:
        logits: whole logits.
        logps: whether log-probabilities need a gradient, where whole logits are computed.
        entropies: the entropy at each trained position.
        uniform_logps: the mean log-probability of the vocabulary at each trained position.
        predictions: the most probable token at each trained position.
        top: how many of the most probable tokens at each trained position.
        embeddings: one vector a row, and nothing else.
        skip_weight_zero: positions with `loss_scale` 0 need no scores.
        chunk_tokens: number of positions whose logits exist at the same time; None is the default of the head.
        softcap: cap of the logits that the loss expects; None is any.
        fuse: computes the loss from the product of hidden states and head, or returns None.
    """

    logits: bool = False
    logps: bool = True
    entropies: bool = False
    uniform_logps: bool = False
    predictions: bool = False
    top: int = 0
    embeddings: bool = False
    skip_weight_zero: bool = False
    chunk_tokens: int | None = None
    softcap: float | None = None
    fuse: Callable[[HeadProduct], FusedLoss | None] | None = None


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


def context_of(config: Any) -> int | None:
    """Return how many positions a model was made for, or None where its configuration does not say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _is_plain(arguments: dict[str, Tensor]) -> bool:
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None and not bool(mask.all()):
        return False
    if positions is None:
        return True
    return positions.ndim == 2 and bool((positions == torch.arange(positions.shape[1])).all())


def has_targets(labels: Any) -> TypeGuard[Tensor]:
    """Return whether `labels` are target tokens, int64 `[B, T]` or `[B, T, K]`, and not numbers of whole rows."""
    return isinstance(labels, Tensor) and labels.ndim in (2, 3) and not labels.is_floating_point()


def targets_at(labels: Tensor, places: Tensor) -> Tensor:
    """Return the targets `[N]` (or `[N, K]`) at indices of the flattened batch; token 0 replaces ignored targets."""
    return labels.reshape(-1, *labels.shape[2:])[places].clamp(min=0)


def check_top(needs: Needs, scored: bool) -> None:
    """Refuse a request for the most probable tokens where no position is scored.

    Raises:
        ArgumentError: `scored` is False, and `needs.top` is not 0.
    """
    if needs.top and not scored:
        raise ArgumentError(
            "topk_logprobs requires positions with a label, and there are none; give rows with `labels` (one "
            "token a position), task='causal_lm', and a model that predicts tokens"
        )


def score_hidden(
    hidden: Tensor, batch: dict[str, Any], head: nn.Module, transform: LogitTransform, needs: Needs
) -> ModelOutput:
    """Score the trained positions without computing whole logits.

    Args:
        hidden: `[B, T, H]` last hidden states.
        batch: `labels` int64 `[B, T]` (or `[B, T, K]`) and optional `loss_scale` of that shape, on the CPU.
        head: the output projection.
        transform: transformation of the product into logits.
        needs: what to compute beside log-probabilities.
    """
    labels, device = batch["labels"], hidden.device
    chosen = trained_places(batch, needs)
    targets, where = targets_at(labels, chosen).to(device), chosen.to(device)
    rows = hidden.reshape(-1, hidden.shape[-1])[where]
    if (
        needs.fuse is not None
        and labels.ndim == 2
        and (outputs := _fused(rows, targets, chosen, batch, head, transform, needs)) is not None
    ):
        return outputs
    scores = score_tokens(
        rows,
        targets,
        head,
        transform=transform,
        entropies=needs.entropies,
        uniform_logps=needs.uniform_logps,
        predictions=needs.predictions,
        top=needs.top,
        chunk_tokens=needs.chunk_tokens or CHUNK_TOKENS,
    )
    return scatter_scores(labels, where, scores)


def score_logits(logits: Tensor, batch: dict[str, Any], needs: Needs) -> ModelOutput:
    """Score the trained positions of whole logits `[B, T, V]`; the rest is as in `score_hidden`.

    Scores without a gradient are computed in chunks of positions.
    """
    labels = batch["labels"]
    chosen = trained_places(batch, needs)
    targets, where = targets_at(labels, chosen).to(logits.device), chosen.to(logits.device)
    flat = logits.reshape(-1, logits.shape[-1])
    differentiated = needs.logps or needs.entropies or needs.uniform_logps
    if differentiated and torch.is_grad_enabled() and logits.requires_grad:
        return scatter_scores(labels, where, _read(flat[where], targets, needs))
    chunk = needs.chunk_tokens or CHUNK_TOKENS
    with torch.no_grad():
        pieces = [slice(start, start + chunk) for start in range(0, max(len(where), 1), chunk)]
        return scatter_scores(labels, where, _join([_read(flat[where[part]], targets[part], needs) for part in pieces]))


def _read(logits: Tensor, targets: Tensor, needs: Needs) -> TokenScores:
    """Return the scores of some positions from their logits `[N, V]`, with a graph where they have one."""
    log_p = logits.to(wide(logits.dtype)).log_softmax(-1)
    columns = targets if targets.ndim == 2 else targets[:, None]
    return TokenScores(
        log_p.gather(-1, columns).view(targets.shape),
        -(log_p.exp() * log_p).sum(-1) if needs.entropies else None,
        log_p.mean(-1) if needs.uniform_logps else None,
        log_p.argmax(-1) if needs.predictions else None,
        *(top_of(log_p, needs.top) if needs.top else ()),
    )


def _join(parts: list[TokenScores]) -> TokenScores:
    columns = [[getattr(part, field.name) for part in parts] for field in fields(TokenScores)]
    joined: list[Any] = [None if column[0] is None else torch.cat(column) for column in columns]
    return TokenScores(*joined)


def trained_places(batch: dict[str, Any], needs: Needs) -> Tensor:
    """Return the indices of the positions to score, computed on the CPU to avoid a device synchronization."""
    trained: Tensor = batch["labels"] != IGNORE
    if needs.skip_weight_zero and (weights := batch.get("loss_scale")) is not None:
        trained &= weights != 0
    if trained.ndim == 3:
        trained = trained.any(-1)
    return trained.reshape(-1).nonzero().squeeze(-1)


def _fused(
    rows: Tensor, targets: Tensor, chosen: Tensor, batch: dict[str, Any], head: nn.Module, transform: LogitTransform,
    needs: Needs,
) -> ModelOutput | None:  # fmt: skip
    """Return the outputs of a fused loss, or None if the loss or the head does not support fusing."""
    capped_late = transform.softcap is not None and transform.temperature != 1.0
    if needs.fuse is None or needs.entropies or not is_plain(head) or capped_late or not len(chosen):
        return None
    weights = batch.get("loss_scale")
    with_scale = rows if transform.factor == 1.0 else rows * transform.factor
    hidden, weight, bias = product_of(with_scale, head)
    if bias is not None and transform.factor != 1.0:
        bias = bias * transform.factor
    product = HeadProduct(
        hidden,
        targets,
        weight,
        bias,
        transform.softcap,
        None if weights is None else weights.reshape(-1)[chosen],
        needs.predictions,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        fused = needs.fuse(product)
    if fused is None:
        return None
    output: ModelOutput = {"fused_loss_sum": fused.loss_sum}
    if fused.predictions is not None:
        output["predictions"] = _place(batch["labels"].shape[:2], chosen.to(rows.device), fused.predictions, IGNORE)
    return output


def scatter_scores(labels: Tensor, where: Tensor, scores: TokenScores) -> ModelOutput:
    """Return scores of some positions as outputs `[B, T]`; `logps` have the shape of the labels.

    Args:
        labels: `[B, T]` or `[B, T, K]`, on the CPU.
        where: int64 `[N]`, indices of the positions in the flattened batch.
        scores: scores of the positions.
    """
    shape = labels.shape[:2]
    logps = _place(shape, where, scores.logps, 0.0)
    if labels.ndim == 3:
        logps = torch.where((labels != IGNORE).to(logps.device), logps, 0.0)
    output: ModelOutput = {"logps": logps}
    if scores.entropies is not None:
        output["entropies"] = _place(shape, where, scores.entropies, 0.0)
    if scores.uniform_logps is not None:
        output["uniform_logps"] = _place(shape, where, scores.uniform_logps, 0.0)
    if scores.predictions is not None:
        output["predictions"] = _place(shape, where, scores.predictions, IGNORE)
    if scores.top_logps is not None and scores.top_tokens is not None:
        output["topk_logprobs"] = _place(shape, where, scores.top_logps, 0.0)
        output["topk_indices"] = _place(shape, where, scores.top_tokens, 0)
    return output


def _place(shape: torch.Size, where: Tensor, values: Tensor, empty: float) -> Tensor:
    places = where // shape[1], where % shape[1]
    return values.new_full((*shape, *values.shape[1:]), empty).index_put(
        places, values
    )  # no view: FSDP2 hooks what a pass returns
