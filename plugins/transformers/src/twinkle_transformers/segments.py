"""Runs a Hugging Face model over sequences that lie one after the other in a row, each as if it were alone.

While it runs, transformers is told of an attention implementation of ours that reads the segments from a context
variable, and modules that mix tokens by other means (gated delta rule, Mamba, short convolutions) see one sequence at a
time. Otherwise the model is as it was: what runs without segments runs as if this file did not exist.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twinkle.errors import TrainingStateError, Unsupported
from twinkle.torch.segments import Segments, by_segment, segment_attention

NAME = "twinkle_segments"
_CHECKED = (5, 3, 6, 3)
"""Lengths of the sequences that tell whether a model can do this."""


class Scope(AbstractContextManager[None]):
    """The time during which a model sees segments. May be entered again, also inside itself.

    Attributes:
        segments: where the sequences lie.
        windows: sizes of local attention that the model's layers asked for.
        masked: sizes of local attention that its masks were asked for.
    """

    def __init__(self, segments: Segments, config: Any, mixers: tuple[nn.Module, ...]) -> None:
        self.segments, self.config, self.mixers = segments, config, mixers
        self.windows: set[int | None] = set()
        self.masked: set[int] = set()
        self._entered: list[tuple[Token[Scope | None], Any, list[Any]]] = []

    def __enter__(self) -> None:
        own = [mixer.__dict__.get("forward") for mixer in self.mixers]
        self._entered.append((_ACTIVE.set(self), self.config._attn_implementation_internal, own))
        self.config._attn_implementation_internal = NAME
        for mixer in self.mixers:
            if not isinstance(mixer.__dict__.get("forward"), _Apart):
                mixer.__dict__["forward"] = _Apart(mixer, mixer.forward)

    def __exit__(self, *exception: object) -> None:
        token, implementation, own = self._entered.pop()
        for mixer, forward in zip(self.mixers, own, strict=True):
            if forward is None:
                del mixer.__dict__["forward"]
            else:
                mixer.__dict__["forward"] = forward
        self.config._attn_implementation_internal = implementation
        _ACTIVE.reset(token)


_ACTIVE: ContextVar[Scope | None] = ContextVar("twinkle_segments", default=None)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the `context_fn` of `torch.utils.checkpoint`: recomputation sees the segments that the forward saw.

    It may run in a thread of autograd and long after the forward, where the context variable is not set.
    """
    scope = _ACTIVE.get()
    return nullcontext(), nullcontext() if scope is None else scope


@dataclass(eq=False)
class Segmenter:
    """Lets one model see segments, if it can.

    Args:
        model: the causal language model.
    """

    model: Any
    _refusal: str | None = None
    _checked: bool = False
    _mixers: tuple[nn.Module, ...] = ()
    _layers: list[nn.Module] = field(default_factory=list)

    def within(self, segments: Segments) -> AbstractContextManager[None]:
        """Return the context in which the model's body takes one row `[1, T]` of these segments.

        Raises:
            Unsupported: the model would mix the sequences; it names the model.
            TrainingStateError: activations are recomputed in a way that would forget the segments.
        """
        if refusal := self.check():
            raise Unsupported(refusal)
        if self.model.training and torch.is_grad_enabled():
            self._check_recomputation()
        return self._scope(segments)

    def check(self) -> str | None:
        """Return why this model cannot see segments, None if it can; found out once, on a few tokens.

        Where parameters are sharded over ranks, call it before that: it runs the model.
        """
        if not self._checked:
            self._look()
            reason = self._try()
            if reason is not None:
                self._refusal = (
                    f"{type(self.model).__name__} does not take several sequences in one row: {reason}; pad instead: "
                    "leave padding_free out and give each sequence as a row of its own"
                )
        return self._refusal

    def assume(self, refusal: str | None) -> None:
        """Take over what `check` returned where the same model has its weights."""
        if not self._checked:
            self._look()
            self._refusal = refusal

    def _look(self) -> None:
        _register()
        self._mixers = tuple(_mixers(self.model))
        self._layers = [m for m in self.model.modules() if hasattr(m, "gradient_checkpointing")]
        self._checked = True

    def _scope(self, segments: Segments) -> Scope:
        return Scope(segments, self.model.config.get_text_config(), self._mixers)

    def _check_recomputation(self) -> None:
        for layer in self._layers:
            if layer.gradient_checkpointing:
                function = getattr(layer, "_gradient_checkpointing_func", None)
                given = function.keywords if isinstance(function, partial) else {}
                if given.get("use_reentrant", True) or "context_fn" not in given:
                    raise TrainingStateError(
                        "gradient checkpointing was enabled in a way that forgets where packed sequences lie; enable "
                        'it with {"use_reentrant": False, "context_fn": recompute_contexts} from '
                        "twinkle_transformers.segments, or by gradient_checkpointing=True of the model"
                    )
                return

    @torch.no_grad()
    def _try(self) -> str | None:
        """Compare hidden states of packed sequences with those of each alone."""
        body, device = self.model.base_model, self.model.device
        total = sum(_CHECKED)
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = (1 + torch.arange(total, device=device) % (vocabulary - 1))[None]
        given = {"input_ids": ids}
        if "position_ids" in inspect.signature(body.forward).parameters:
            given["position_ids"] = torch.cat([torch.arange(n, device=device) for n in _CHECKED])[None]
        scope = self._scope(Segments.of(_CHECKED, device))
        training = self.model.training
        self.model.eval()
        try:
            alone = [
                body(input_ids=part, use_cache=False).last_hidden_state
                for part in torch.split_with_sizes(ids, _CHECKED, dim=1)
            ]
            with scope:
                packed = body(**given, use_cache=False).last_hidden_state
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, Unsupported) as error:
            return str(error) or type(error).__name__
        finally:
            self.model.train(training)
        if unseen := _unseen_windows(scope):
            return f"its local attention of {unseen} tokens is made by a mask, which packed rows do not have"
        return None if _equal(packed[0], torch.cat(alone, 1)[0]) else "they would see each other"


class _Apart:
    """The forward of a token mixer, run on each sequence alone."""

    def __init__(self, mixer: nn.Module, forward: Callable[..., Any]) -> None:
        self.name, self.forward = type(mixer).__name__, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope = _current(self.name)
        given = dict(kwargs)
        hidden = given.pop("hidden_states") if "hidden_states" in given else args[0]
        rest = args[1:] if "hidden_states" not in kwargs else args
        for name in ("attention_mask", "cache_params", "past_key_values", "position_ids"):
            value = given.pop(name, None)
            if value is not None and name in ("cache_params", "past_key_values"):
                raise Unsupported(f"{self.name} takes a cache, which packed rows do not have")
        if any(value is not None for value in rest) or hidden.shape[0] != 1:
            raise Unsupported(f"{self.name} is called in a way that Twinkle does not know")

        def run(stacked: Tensor) -> Tensor:
            out = self.forward(stacked, **given)
            extra.append(out[1:] if isinstance(out, tuple) else None)
            return out[0] if isinstance(out, tuple) else out

        extra: list[Any] = []
        mixed = by_segment(run, scope.segments, hidden[0])[None]
        return mixed if extra[0] is None else (mixed, *[None] * len(extra[0]))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within segments: `[1, heads, T, size]` each, as transformers calls it; returns `[1, T, heads, size]`."""
    name = type(module).__name__
    scope = _current(name)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    strange = sorted(k for k, v in kwargs.items() if isinstance(v, Tensor) and k not in _POSITIONS)
    if attention_mask is not None or not causal or strange:
        what = "a mask of its own" if attention_mask is not None else f"{strange}" if strange else "no causal order"
        raise Unsupported(f"{name} attends with {what}")
    scope.windows.add(sliding_window)
    out = segment_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scope.segments,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    return out[None], None


_POSITIONS = frozenset({"position_ids", "cache_position"})


def _no_mask(*, config: Any, use_vmap: bool = False, local_size: int | None = None, **kwargs: Any) -> None:
    """Build no mask: what it would say is in the segments and in what attention is told."""
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        raise Unsupported(f"{config.model_type} masks attention in a way of its own")
    if local_size is not None:
        _current("mask").masked.add(local_size)


def _current(what: str) -> Scope:
    scope = _ACTIVE.get()
    if scope is None:
        raise TrainingStateError(
            f"{what} runs without knowing the segments of its row: two threads use one model at a time, or activations "
            "are recomputed without `context_fn`"
        )
    return scope


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _mixers(model: Any) -> list[nn.Module]:
    """Return the modules that mix tokens by a convolution along the row, and by what follows it."""
    return [
        module
        for module in model.base_model.modules()
        if any(isinstance(child, nn.Conv1d) and child.kernel_size != (1,) for child in module.children())
    ]


def _unseen_windows(scope: Scope) -> list[int]:
    kinds = set(getattr(scope.config, "layer_types", None) or ["sliding_attention"])
    local = kinds - {"full_attention", "linear_attention"}
    return sorted(scope.masked - scope.windows) if local else []


def _equal(packed: Tensor, alone: Tensor) -> bool:
    """Say whether two results `[T, H]` differ by no more than rounding.

    In half precision a quarter of the tokens may differ more: rounding can send a token to another expert.
    """
    precise = packed.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(packed.device.type)
    error = (packed.double() - alone.double()).norm(dim=-1)
    near = error <= (1e-4 if precise else 0.05) * alone.double().norm(dim=-1)
    return bool(near.double().mean() >= (1.0 if precise else 0.75))
