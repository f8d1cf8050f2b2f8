"""Cross entropy of a Hugging Face model without its logits."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle.errors import PatchError
from twinkle.patch import Patch
from twinkle_patches.models import arguments, check_whole, hugging_face, model_of

if TYPE_CHECKING:
    from torch import Tensor


class TransformersFusedCEPatch(Patch):
    """A Hugging Face model that is called with labels computes its loss by `twinkle_torch.head`, in chunks.

    The loss and its gradients are the model's own up to rounding, `[tokens, vocabulary]` never exists, and the output's
    `logits` are None. Without labels, or with `logits_to_keep`, `output_router_logits` or `return_dict=False`, the
    model's own forward runs. For a model that you call yourself, in a loop or a trainer that reads `loss` alone; the
    loss of `TransformersModel` is always computed this way and needs no patch.
    """

    versions: ClassVar[dict[str, str]] = {"transformers": ">=5.0,<6"}
    changes = ("<model>.forward",)
    needed = "for models that you call yourself; TransformersModel never makes whole logits"

    def __call__(self, module: Any) -> Any:
        """Apply the patch to a causal language model, or to a PEFT model around one, and return `module`.

        Raises:
            PatchError: the model's loss is not the cross entropy of `transform(head(hidden))`, tried on a few tokens.
        """
        model = hugging_face(module, self)
        check_whole(model, self)
        self.wrap(model, "forward", _with_fused_loss)
        if refusal := _refusal(model_of(model.forward.original), model.forward.original):
            raise PatchError(f"TransformersFusedCEPatch: {type(model).__name__} {refusal}; leave the patch out")
        return module


def _with_fused_loss(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    model = model_of(forward)
    given = arguments(forward, args, kwargs)
    others = any(given.get(name) for name in ("output_router_logits",)) or given.get("return_dict") is False
    keeps = given.get("logits_to_keep")
    keeps = keeps is not None and not (isinstance(keeps, int) and keeps == 0)
    if (given.get("labels") is None and given.get("shift_labels") is None) or others or keeps:
        return forward(*args, **kwargs)
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    count, ignored = given.pop("num_items_in_batch", None), given.pop("ignore_index", -100)
    kept = {name: value for name, value in given.items() if name not in ("logits_to_keep", "return_dict")}
    made = model.base_model(**kept)
    loss = _loss(
        model, made.last_hidden_state, _targets(labels, ignored) if shifted is None else shifted, count, ignored
    )
    return CausalLMOutputWithPast(
        loss=loss,
        logits=None,
        past_key_values=made.get("past_key_values"),
        hidden_states=made.get("hidden_states"),
        attentions=made.get("attentions"),
    )


def _targets(labels: "Tensor", ignored: int) -> "Tensor":
    """Return for each position the next one's label; the last has none."""
    from torch.nn.functional import pad

    return pad(labels[..., 1:], (0, 1), value=ignored)


def _loss(model: Any, hidden: "Tensor", targets: "Tensor", count: Any, ignored: int) -> "Tensor":
    """Return the sum of `-log p(target)` over the trained positions, divided by `count` or by their number."""
    from twinkle_torch.head import score_tokens, transform_of

    targets = targets.reshape(-1).to(hidden.device)
    where = (targets != ignored).nonzero().squeeze(-1)
    rows = hidden.reshape(-1, hidden.shape[-1])[where]
    transform = transform_of(model.config.get_text_config())
    scores = score_tokens(rows, targets[where], model.get_output_embeddings(), transform=transform)
    total: Tensor = -scores.logps.sum()
    if count is None:
        return total / len(where) if len(where) else total / total.new_zeros(())  # NaN, as cross_entropy's mean
    divided: Tensor = total / (count.to(total.device) if hasattr(count, "to") else count)
    return divided


def _refusal(model: Any, forward: Callable[..., Any]) -> str:
    """Return why the model's loss cannot be computed like this, after trying it on a few tokens."""
    import torch

    from twinkle_torch.numerics import evaluating, judge, probe_tokens

    if model.get_output_embeddings() is None:
        return "has no head"
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        return "adds its router's auxiliary loss (output_router_logits=True)"
    if any(parameter.is_meta for parameter in model.parameters()):
        return "has no weights yet"
    ids = torch.tensor([probe_tokens(4, model.config.get_text_config().vocab_size)], device=model.device)

    def ours(ids: "Tensor") -> "Tensor":
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return _loss(model, hidden, _targets(ids, -100), None, -100).reshape(1, 1)

    def own(ids: "Tensor") -> "Tensor":
        loss: Tensor = forward(input_ids=ids, labels=ids, use_cache=False).loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)).reshape(1, 1)

    with evaluating(model):
        found = judge("loss", ours, own, ids)
    return "" if found.exact else f"computes its loss in a way that is not known here: {found.reason}"
