"""Runs a Hugging Face model on consecutive sequences in one row, each as if it were alone.

While it runs, transformers uses an attention implementation that reads the segments from a context variable, and
modules that mix tokens by other means (gated delta rule, Mamba, short convolutions) run on one sequence at a time.
Calls without segments use the model's own forward. Whether that is exact is measured, and again after a patch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import replace
from functools import cached_property, partial
from threading import Lock, local
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from twinkle._registry import registry
from twinkle.errors import TrainingStateError, Unsupported
from twinkle.logging import get_logger
from twinkle_torch.numerics import Evidence, evaluating, judge, probe_tokens, turned_off
from twinkle_torch.segments import Segments, by_segment, segment_attention
from twinkle_transformers.lowrank.products import Routing, excerpt

NAME = "twinkle_segments"
_PACKED = (5, 3, 5)
"""Lengths of the packed sequences of the measurement."""
_PREFIXED, _PARENTS = (5, 3, 3, 4), (-1, 0, 0, -1)
"""Lengths and parents of the segments of the measurement of shared prefixes."""


class Switch:
    """Replaces a model's attention and mixers while at least one scope is active, in any thread."""

    def __init__(self, config: Any, mixers: Sequence[nn.Module]) -> None:
        self.config, self.mixers = config, mixers
        self._lock, self._users = Lock(), 0
        self._own: tuple[Any, list[Any]] = None, []

    def on(self) -> None:
        """Add a user; the first replaces the model's attention and mixers."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            forwards = [mixer.__dict__.get("forward") for mixer in self.mixers]
            self._own = self.config._attn_implementation_internal, forwards
            self.config._attn_implementation_internal = NAME
            for mixer in self.mixers:
                mixer.__dict__["forward"] = _Apart(mixer, mixer.forward)

    def off(self) -> None:
        """Remove a user; the last restores the model's attention and mixers."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self.config._attn_implementation_internal, forwards = self._own
            for mixer, forward in zip(self.mixers, forwards, strict=True):
                mixer.__dict__["forward"] = forward
                if forward is None:
                    del mixer.__dict__["forward"]


class Scope(AbstractContextManager[None]):
    """Context in which a model runs on segments. It can be entered again: later, nested, or in another thread.

    Attributes:
        segments: boundaries of the sequences.
        switch: replaces the attention; None keeps the model's own, for calls with one sequence each.
        windows: window sizes of local attention that layers requested.
        masked: window sizes of local attention that masks were requested for.
        routing: assignment of tokens to adapters of a pool; None without a pool.
        elsewhere: returns the routing of a layer that gets another number of rows than the call has tokens (a head on
            the last token of each sequence, an expert on its tokens); None if unknown.
    """

    def __init__(
        self, segments: Segments, switch: Switch | None, routing: Routing | None = None,
        elsewhere: Callable[[int], Routing | None] | None = None,
    ) -> None:  # fmt: skip
        self.segments, self.switch, self.routing, self.elsewhere = segments, switch, routing, elsewhere
        self.windows: set[int | None] = set()
        self.masked: set[int] = set()
        self._tokens = _Tokens()
        self._excerpts: dict[tuple[int, ...], AbstractContextManager[None]] = {}

    def __enter__(self) -> None:
        self._tokens.entered.append(_ACTIVE.set(self))
        if self.switch is not None:
            self.switch.on()

    def __exit__(self, *exception: object) -> None:
        if self.switch is not None:
            self.switch.off()
        _ACTIVE.reset(self._tokens.entered.pop())

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of a layer: `[T, heads, size]` each, options of `segment_attention`; returns `[T, H, E]`."""
        return segment_attention(q, k, v, self.segments, **options)

    def only(self, numbers: tuple[int, ...]) -> AbstractContextManager[None]:
        """Return the context of a call with only these sequences."""
        if self.routing is None:
            return nullcontext()
        if numbers not in self._excerpts:
            routing = excerpt(self.routing, [self.segments.bounds[number] for number in numbers])
            self._excerpts[numbers] = Scope(self.segments, self.switch, routing)
        return self._excerpts[numbers]


class _Tokens(local):
    """State of one thread, to leave a scope again."""

    def __init__(self) -> None:
        self.entered: list[Token[Scope | None]] = []


_ACTIVE: ContextVar[Scope | None] = ContextVar("twinkle_segments", default=None)


def routing_now() -> Routing | None:
    """Return the routing of the running pass of a pool; None outside such passes."""
    scope = _ACTIVE.get()
    return None if scope is None else scope.routing


def routing_of(rows: int) -> Routing | None:
    """Return the routing of the rows that a layer of the running pass of a pool gets.

    Returns:
        the routing of the pass if the number of rows differs and nothing else is known; None outside passes.
    """
    scope = _ACTIVE.get()
    if scope is None or scope.routing is None or scope.elsewhere is None or rows == scope.routing.total:
        return None if scope is None else scope.routing
    return scope.elsewhere(rows)


def body_of(model: Any) -> Any:
    """Return a causal language model without its head; `base_model` of some classes (Llama 4) is the model itself."""
    others = (
        candidate
        for candidate in (model.get_decoder(), getattr(model, "model", None))
        if candidate not in (None, model)
    )
    return model.base_model if model.base_model is not model else next(others, model)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the `context_fn` of `torch.utils.checkpoint`, which restores the segments of the forward in recomputation.

    Recomputation may run in a thread of autograd and long after the forward, where the context variable is not set.
    """
    scope = _ACTIVE.get()
    return nullcontext(), nullcontext() if scope is None else scope


class Segmenter:
    """Runs one model on segments, if it supports them.

    Args:
        model: the causal language model.

    Attributes:
        evidence: measurements of each fast path that was tried, by name.
        precision: returns the context in which passes run (for example autocast); measurements use it too.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.evidence: dict[str, Evidence] = {}
        self.precision: Callable[[], AbstractContextManager[None]] = nullcontext
        self._patches = PatchWatch(model)
        self._assumed = False

    def within(self, segments: Segments, routing: Routing | None = None) -> AbstractContextManager[None]:
        """Return the context in which the model's body takes one row `[1, T]` of these segments.

        If segments continue a prefix, the body needs `segments.positions[None]` as its `position_ids`.

        Args:
            segments: boundaries of the sequences.
            routing: assignment of tokens to adapters of a pool.

        Raises:
            Unsupported: the model would mix the sequences, or cannot continue a shared prefix.
            TrainingStateError: activations are recomputed in a way that would lose the segments.
        """
        if refusal := self.check_prefixes() if segments.parents else self.check():
            raise Unsupported(refusal)
        if self.model.training and torch.is_grad_enabled():
            self._check_recomputation()
        return Scope(segments, self._switch, routing)

    def check(self) -> str | None:
        """Return why this model cannot run on segments, None if it can; measured on a few tokens.

        It is measured once, and again after a patch or kernel was applied to the model, or undone on it. If parameters
        will be sharded over ranks, call it before: it runs the model.
        """
        if not self._assumed and self._patches.changed():
            self.forget()
        if "packing" not in self.evidence:
            self._try("packing", _PACKED)
        if (reason := self.reason) is None:
            return None
        return (
            f"{type(self.model).__name__} does not take several sequences in one row: {reason}; pad instead: leave "
            "padding_free out and give each sequence as a row of its own"
        )

    @property
    def reason(self) -> str | None:
        """The reason why packing is off; None if it is on or was not tried."""
        evidence = self.evidence.get("packing")
        return None if evidence is None or evidence.exact else evidence.reason

    @property
    def mixers(self) -> list[str]:
        """Class names of the modules that run on one sequence at a time."""
        return sorted({type(mixer).__name__ for mixer in self._switch.mixers})

    def forget(self) -> None:
        """Discard all measurements, because the model was changed."""
        self.evidence.clear()
        self.__dict__.pop("_switch", None)

    def check_prefixes(self) -> str | None:
        """Return why sequences of this model cannot continue a shared prefix, None if they can.

        Measured once, on a few tokens, like `check`.
        """
        refusal = self.check()
        if "prefixes" not in self.evidence:
            if refusal is not None:
                self.evidence["prefixes"] = turned_off("prefixes") or replace(self.evidence["packing"], path="prefixes")
            elif self.mixers:
                keeps = f"the state of {', '.join(self.mixers)} at the end of a prefix is not stored"
                self.evidence["prefixes"] = turned_off("prefixes") or Evidence("prefixes", False, "structure", keeps)
            else:
                self._try("prefixes", _PREFIXED, _PARENTS)
        if refusal is not None or (evidence := self.evidence["prefixes"]).exact:
            return refusal
        return (
            f"{type(self.model).__name__} does not take sequences that share a prefix: {evidence.reason}; give each "
            "sequence its prefix"
        )

    def shares_prefixes(self) -> bool:
        """Return whether the model is correct for sequences that continue one prefix in the row."""
        return self.check_prefixes() is None

    def measured(self) -> dict[str, Evidence]:
        """Return the evidence for packing and prefixes; missing measurements are made first."""
        self.check_prefixes()
        return dict(self.evidence)

    def assume(self, evidence: Mapping[str, Evidence]) -> None:
        """Use the result of `measured` from another rank, instead of running the model."""
        self.evidence, self._assumed = dict(evidence), True

    @cached_property
    def _switch(self) -> Switch:
        _register()
        return Switch(self.model.config.get_text_config(), _mixers(self.model))

    @cached_property
    def _layers(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]

    def _check_recomputation(self) -> None:
        for layer in self._layers:
            if layer.gradient_checkpointing:
                function = getattr(layer, "_gradient_checkpointing_func", None)
                given = function.keywords if isinstance(function, partial) else {}
                if given.get("use_reentrant", True) or "context_fn" not in given:
                    raise TrainingStateError(
                        "gradient checkpointing was enabled in a way that loses the boundaries of packed sequences; "
                        'enable it with {"use_reentrant": False, "context_fn": recompute_contexts} from '
                        "twinkle_transformers.segments, or by gradient_checkpointing=True of the model"
                    )
                return

    def _try(self, path: str, lengths: tuple[int, ...], parents: tuple[int, ...] | None = None) -> None:
        """Measure a path, and store the result in `evidence`."""
        self.evidence[path] = evidence = turned_off(path) or self._judge(path, lengths, parents)
        get_logger().debug("%s: %s", type(self.model).__name__, evidence)

    def _judge(self, path: str, lengths: tuple[int, ...], parents: tuple[int, ...] | None) -> Evidence:
        """Compare hidden states of packed sequences with those of each alone, and change each sequence in turn.

        The comparison measures the error of packing; the changes show whether a sequence affects another one.
        """
        body, device = body_of(self.model), self.model.device
        segments = Segments.of(lengths, device, parents)
        vocabulary = self.model.config.get_text_config().vocab_size
        takes_positions = "position_ids" in inspect.signature(body.forward).parameters
        scope = Scope(segments, self._switch)

        def packed(ids: Tensor) -> Tensor:
            # No attention mask: a mask `[1, T]` cannot describe several sequences, so the scope must define them.
            given = {"input_ids": ids[None]}
            if takes_positions:
                given["position_ids"] = segments.positions[None]
            with scope:
                hidden: Tensor = body(**given, use_cache=False).last_hidden_state
            if unseen := _unseen_windows(scope, self._switch.config):
                raise Unsupported(f"its local attention of {unseen} tokens is made by a mask, which packed rows lack")
            return hidden[0]

        def alone(ids: Tensor) -> Tensor:
            parts = torch.split_with_sizes(ids, lengths)
            texts = [torch.cat([*(parts[i] for i in chain), part]) for chain, part in zip(
                segments.chains, parts, strict=True)]  # fmt: skip
            results: list[Tensor] = [ids] * len(texts)
            for size in {len(text) for text in texts}:  # sequences of one length are rows of one batch
                numbers = [i for i, text in enumerate(texts) if len(text) == size]
                hidden = body(input_ids=torch.stack([texts[i] for i in numbers]), use_cache=False).last_hidden_state
                for i, row in zip(numbers, hidden, strict=True):
                    results[i] = row[size - lengths[i] :]
            return torch.cat(results)

        ids, others = (
            torch.tensor(probe_tokens(segments.total, vocabulary, changed=changed), device=device)
            for changed in (False, True)
        )
        with evaluating(self.model), self.precision():
            return judge(path, packed, alone, ids, _changes(segments, ids, others), routed=is_routed(self.model))


def _changes(segments: Segments, ids: Tensor, others: Tensor) -> list[tuple[Tensor, list[int]]]:
    """Return inputs in which one sequence is changed, each with the tokens that must not be affected."""
    changes = []
    for number, (start, stop) in enumerate(segments.bounds):
        changed = ids.clone()
        changed[start:stop] = others[start:stop]
        blind = [i for i, chain in enumerate(segments.chains) if i != number and number not in chain]
        rows = [row for i in blind for row in range(*segments.bounds[i])]
        changes.append((changed, rows))
    return changes


def is_routed(model: Any) -> bool:
    """Return whether a model routes tokens to experts, so that rounding can change the expert of a token."""
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in _EXPERT_COUNTS)


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class _Apart:
    """The forward of a token mixer, run on one sequence at a time: it carries a state along the row."""

    def __init__(self, mixer: nn.Module, forward: Callable[..., Any]) -> None:
        self.name, self.forward = type(mixer).__name__, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; of several results the first is the mixed output, and the others are dropped."""
        scope = _current(self.name)
        given = {name: value for name, value in kwargs.items() if name not in _OF_THE_ROW}
        hidden, *rest = (given.pop("hidden_states"), *args) if "hidden_states" in given else args
        if any(isinstance(value, Tensor) for value in (*rest, *given.values())) or hidden.shape[0] != 1:
            raise Unsupported(f"{self.name} is called with unknown arguments")
        if any(given.get(name) is not None for name in ("cache_params", "past_key_values")):
            raise Unsupported(f"{self.name} requires a cache, which packed rows do not have")
        others = 0
        families = iter(scope.segments.families.values())  # the order in which they are called

        def run(stacked: Tensor) -> Tensor:
            nonlocal others
            with scope.only(next(families)):
                out = self.forward(stacked, *rest, **given)
            if isinstance(out, tuple):
                others = len(out) - 1
                out = out[0]
            mixed: Tensor = out
            return mixed

        mixed = by_segment(run, scope.segments, hidden[0])[None]
        return (mixed, *[None] * others) if others else mixed


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
    """Attention within segments, with the interface of transformers: `[1, heads, T, size]` to `[1, T, heads, size]`."""
    name = type(module).__name__
    scope = _current(name)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    strange = sorted(k for k, v in kwargs.items() if isinstance(v, Tensor) and k not in _POSITIONS)
    if attention_mask is not None or not causal or strange:
        what = "a mask of its own" if attention_mask is not None else f"{strange}" if strange else "no causal order"
        raise Unsupported(f"{name} attends with {what}")
    scope.windows.add(sliding_window)
    out = scope.attend(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    return out[None], None


_POSITIONS = frozenset({"position_ids", "cache_position"})
_OF_THE_ROW = _POSITIONS | {"attention_mask"}


def _no_mask(*, config: Any, use_vmap: bool = False, local_size: int | None = None, **kwargs: Any) -> None:
    """Return no mask: segments and attention arguments contain its information."""
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        raise Unsupported(f"{config.model_type} uses its own attention mask")
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
    """Return the modules that mix tokens by a convolution along the row and the operations after it."""
    return [
        module
        for module in body_of(model).modules()
        if any(isinstance(child, nn.Conv1d) and child.kernel_size != (1,) for child in module.children())
    ]


def _unseen_windows(scope: Scope, config: Any) -> list[int]:
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    local = kinds - {"full_attention", "linear_attention"}
    return sorted(scope.masked - scope.windows) if local else []


class PatchWatch:
    """Detects changes of the patches of a model.

    It includes patches of modules around and inside the model, and of classes and Python modules, which may affect any
    model.

    Args:
        model: the Hugging Face module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._record_version: Callable[[], int] = _exported("record_version") or (lambda: 0)
        self._applications: Callable[[], list[Any]] = _exported("applications") or (lambda: [])
        self._version, self._known = self._record_version(), self._applied()

    def changed(self) -> bool:
        """Return whether a patch was applied or undone since the last call; cheap if none was in this process."""
        if (version := self._record_version()) == self._version:
            return False
        before, self._version, self._known = self._known, version, self._applied()
        return before != self._known

    def forget(self) -> None:
        """Make the next call return True, because the last change could not be handled."""
        self._version, self._known = -1, [None]

    def _applied(self) -> list[Any]:
        inside = {id(module) for module in self._model.modules()}
        return [a for a in self._applications() if self._concerns(a.target(), inside)]

    def _concerns(self, target: Any, inside: set[int]) -> bool:
        if not isinstance(target, nn.Module):
            return isinstance(target, type | ModuleType)
        return id(target) in inside or any(module is self._model for module in target.modules())


def _exported(name: str) -> Any:
    """Return a function of the plugin for patches; None if it is not installed, so that nothing can be patched."""
    if name not in registry().exports("twinkle.patch"):
        return None
    return registry().export("twinkle.patch", name)
