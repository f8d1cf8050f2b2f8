"""Rows with several sequences for models with gated delta-net layers, whose state would run from one into the next."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from twinkle.errors import ArgumentError, PatchError, Unsupported
from twinkle.patch import Patch
from twinkle_patches.models import arguments, check_whole, hugging_face, model_of

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle_torch.numerics import Evidence

_MIXER = re.compile(r"Delta(Net|Attention)$")
_OF_THE_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_TRIED = (5, 3, 6, 3)
"""Lengths of the sequences on which a patched model is tried."""


class GatedDeltaNetPaddingFreePatch(Patch):
    """Gated delta-net layers (Qwen3-Next, Qwen3.5, OLMo hybrid, ...) reset their state for each packed sequence.

    The model takes one row `[1, T]` whose `position_ids` begin at 0 with each sequence (or `cu_seq_lens_q`, int32
    `[n + 1]`), without padding. Its attention layers keep such sequences apart by themselves; its recurrent layers leak
    from one into the next, or refuse the row where the package of their kernels is missing. With the patch each of them
    runs on every sequence alone, with the kernels that it has. For a model that you call yourself: `TransformersModel`
    does this with any model, and then the patch stands aside.

    The patch is tried on a few tokens when it is applied, and refused where packed sequences still see each other.
    """

    versions: ClassVar[dict[str, str]] = {"transformers": ">=5.0,<6"}
    changes = ("<model>.base_model.forward", "<model>...linear_attn.forward of each gated delta-net layer")
    needed = "for packed rows in models that you call yourself; TransformersModel keeps sequences apart"

    def __call__(self, module: Any) -> Any:
        """Apply the patch to a transformers model, or to a PEFT model around one, and return `module`.

        Raises:
            PatchError: the model has no gated delta-net layers, or its sequences would see each other all the same.
        """
        model = hugging_face(module, self)
        check_whole(model, self)
        mixers = _mixers(model)
        if not mixers:
            raise PatchError(
                f"GatedDeltaNetPaddingFreePatch: {type(model).__name__} has no gated delta-net layers; packed rows "
                "need no patch there"
            )
        for mixer in mixers:
            self.wrap(mixer, "forward", _each_alone)
            model_of(mixer.forward.original)
        self.wrap(model.base_model, "forward", _tell_lengths)
        model_of(model.base_model.forward.original)
        found = _judge(model)
        if not found.exact:
            raise PatchError(
                f"GatedDeltaNetPaddingFreePatch: {type(model).__name__} does not keep the sequences of a packed row "
                f"apart: {found.reason}; pad instead"
            )
        return module


def _tell_lengths(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a body; if its row has several sequences, pass their lengths to its layers.

    The lengths are passed as arguments, which recomputation in the backward preserves.
    """
    body = model_of(forward)
    given = arguments(forward, args, kwargs)
    attention = str(getattr(body.config.get_text_config(), "_attn_implementation", "") or "")
    bounds = None if attention.startswith("twinkle") else _bounds(given)
    if bounds is None:
        return forward(*args, **kwargs)
    mask = given.get("attention_mask")
    if mask is not None and not (getattr(mask, "ndim", 0) == 2 and bool(mask.all())):
        raise ArgumentError("a row with several sequences has no padding; leave attention_mask out")
    if given.get("use_cache") or given.get("past_key_values") is not None:
        raise ArgumentError("a row with several sequences has no cache; leave use_cache and past_key_values out")
    longest = int(bounds.diff().max())
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    if given.get("position_ids") is None:
        given["position_ids"] = _positions(bounds)
    return forward(**given | lengths | {"attention_mask": None, "use_cache": False, "past_key_values": None})


def _each_alone(forward: Callable[..., Any], hidden_states: "Tensor", *args: Any, **kwargs: Any) -> Any:
    """Run a mixer on each sequence of a row `[1, T, H]`; those of one length together."""
    from twinkle_torch.segments import Segments, by_segment

    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is None:
        return forward(hidden_states, *args, **kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in _OF_THE_ROW}
    if args or any(hasattr(value, "shape") for value in rest.values()):
        raise Unsupported(f"{type(model_of(forward)).__name__} is called in a way that the patch does not know")
    segments = Segments.of(bounds.diff().tolist(), hidden_states.device)
    return by_segment(lambda stacked: forward(stacked, **rest), segments, hidden_states[0])[None]


def _bounds(given: dict[str, Any]) -> "Tensor | None":
    """Return where the sequences of a row begin, and the end, int32 `[n + 1]`; None where there is one a row."""
    import torch

    bounds: Tensor | None = given.get("cu_seq_lens_q")
    if bounds is not None:
        return bounds
    positions = given.get("position_ids")
    if positions is None or positions.ndim != 2 or given.get("past_key_values") is not None:
        return None
    begins = positions[:, 1:] <= positions[:, :-1]
    if not bool(begins.any()):
        return None
    if len(positions) != 1:
        raise ArgumentError(
            f"{len(positions)} rows, some with several sequences; put them one after the other into one row"
        )
    if bool((positions[0, 1:][begins[0]] != 0).any()) or int(positions[0, 0]) != 0:
        raise ArgumentError("position_ids of a row with several sequences begin at 0 with each")
    inner = begins[0].nonzero().squeeze(-1) + 1
    ends = inner.new_tensor([positions.shape[1]])
    return torch.cat([inner.new_zeros(1), inner, ends]).to(torch.int32)


def _positions(bounds: "Tensor") -> "Tensor":
    import torch

    lengths = bounds.diff().tolist()
    return torch.cat([torch.arange(length, device=bounds.device) for length in lengths])[None]


def _mixers(model: Any) -> list[Any]:
    return [part for part in model.base_model.modules() if _MIXER.search(type(part).__name__)]


def _judge(model: Any) -> "Evidence":
    """Compare packed sequences with each alone, and change each sequence in turn."""
    import torch

    from twinkle_torch.numerics import evaluating, judge, probe_tokens

    body, device = model.base_model, model.device
    vocabulary = model.config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(length, device=device) for length in _TRIED])[None]

    def packed(ids: "Tensor") -> "Tensor":
        hidden: Tensor = body(input_ids=ids[None], position_ids=positions).last_hidden_state[0]
        return hidden

    def alone(ids: "Tensor") -> "Tensor":
        parts = torch.split_with_sizes(ids, _TRIED)
        return torch.cat([body(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in parts])

    ids, others = (
        torch.tensor(probe_tokens(sum(_TRIED), vocabulary, changed=changed), device=device) for changed in (False, True)
    )
    changes, start = [], 0
    for length in _TRIED:
        own = range(start, start + length)
        changed = ids.clone()
        changed[start : start + length] = others[start : start + length]
        changes.append((changed, [row for row in range(len(ids)) if row not in own]))
        start += length
    with evaluating(model):
        return judge("packing", packed, alone, ids, changes)
