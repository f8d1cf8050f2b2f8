"""Records which experts the routers of a mixture model choose for each token, and replays recorded choices.

A router of transformers scores the experts of a token and takes the best of them by `topk`. While a pass records or
replays, that `topk` is intercepted. In a replay it returns the recorded experts with their present scores, so that all
further arithmetic is the model's own, and gradients reach the router's weights through these scores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from threading import local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from twinkle.errors import ArgumentError, DataError, Unsupported
from twinkle.model.transformers.moe.router_replay import RouterReplayAction
from twinkle_torch.numerics import evaluating, probe_tokens
from twinkle_transformers.batches import PackedBatch

KEY = "routed_experts"
"""Key of rows, batches and outputs."""
OWN = -1
"""In recorded experts: the router chooses by itself (padding, and tokens that were not recorded)."""
_CHOOSES = (torch.topk, Tensor.topk)
_SAMPLE = 5  # tokens of the check at the start


class Routes:
    """The experts of the tokens of one pass: recorded, and perhaps prescribed.

    Args:
        layers: number of routers.
        given: int64 `[N, layers, k]`, the experts to use, OWN where a router chooses; None records only.
    """

    def __init__(self, layers: int, given: Tensor | None = None) -> None:
        self._given = given
        self._found: list[Tensor | None] = [None] * layers

    def prescribed(self, layer: int, tokens: int, name: str) -> Tensor | None:
        """Return the experts `[N, k]` that a layer must use, if any.

        Raises:
            Unsupported: the layer gets another number of tokens than the pass has.
        """
        if self._given is None:
            return None
        if len(self._given) != tokens:
            raise Unsupported(
                f"router {name} gets {tokens} tokens, and the pass has {len(self._given)}; experts cannot be replayed "
                "in a model that does not route every token of the text once"
            )
        return self._given[:, layer]

    def note(self, layer: int, experts: Tensor) -> None:
        """Store the experts `[N, k]` that a layer used; a recomputation stores the same again."""
        self._found[layer] = experts

    def used(self) -> Tensor:
        """Return the experts of all layers, int16 `[N, layers, k]`.

        Raises:
            Unsupported: layers were not called, or not with the same tokens.
        """
        found = [experts for experts in self._found if experts is not None]
        if len(found) != len(self._found) or len({experts.shape for experts in found}) != 1:
            raise Unsupported(
                f"{len(found)} of {len(self._found)} routers were called, with tokens "
                f"{sorted({len(experts) for experts in found})}; experts can be recorded only in a model whose routers "
                "all see every token once"
            )
        return torch.stack(found, 1).to(torch.int16)


_ROUTES: ContextVar[Routes | None] = ContextVar("twinkle_routes", default=None)


@contextmanager
def routing(routes: Routes | None) -> Iterator[None]:
    """Make the routers of this thread record into `routes`, and follow them."""
    token = _ROUTES.set(routes)
    try:
        yield
    finally:
        _ROUTES.reset(token)


class SameRoutes(AbstractContextManager[None]):
    """Context of a recomputation, which must route as the forward did; it can be entered again, in any thread."""

    def __init__(self, others: AbstractContextManager[None]) -> None:
        self._routes, self._others = _ROUTES.get(), others
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = routing(self._routes)
        context.__enter__()
        self._entered.append(context)
        self._others.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._others.__exit__(*exception)
        self._entered.pop().__exit__(None, None, None)


class _Choice(TorchFunctionMode):
    """Intercepts the choice of one router."""

    def __init__(self, experts: int, count: int, prescribed: Callable[[int], Tensor | None]) -> None:
        super().__init__()
        self._experts, self._count, self._prescribed = experts, count, prescribed
        self.chosen: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; a `topk` over all experts returns the prescribed ones."""
        result = func(*args, **(kwargs or {}))
        if func not in _CHOOSES:
            return result
        scores = args[0]
        if scores.dim() != 2 or scores.shape[1] != self._experts or result.indices.shape[1] != self._count:
            return result  # a choice of groups of experts
        experts = result.indices
        if (given := self._prescribed(len(experts))) is not None:
            experts = torch.where(given < 0, experts, given.to(experts.device))
            result = torch.return_types.topk((scores.gather(1, experts), experts))
        self.chosen.append(experts.detach())
        return result


class _Running(local):
    """The calls of a router that one thread is in."""

    def __init__(self) -> None:
        self.stack: list[tuple[Routes, _Choice]] = []


class _Router:
    """Hooks of one router module."""

    def __init__(self, layer: int, name: str, module: Any) -> None:
        self.layer, self.name = layer, name
        self.experts, self.count = int(module.num_experts), int(module.top_k)
        self._running = _Running()
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, args: Any) -> None:
        if (routes := _ROUTES.get()) is None:
            return
        choice = _Choice(self.experts, self.count, lambda tokens: routes.prescribed(self.layer, tokens, self.name))
        choice.__enter__()  # type: ignore[no-untyped-call]
        self._running.stack.append((routes, choice))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if _ROUTES.get() is None or not self._running.stack:
            return
        routes, choice = self._running.stack.pop()
        choice.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if len(choice.chosen) == 1:
            routes.note(self.layer, choice.chosen[0])


class RouterReplay:
    """Records and replays the experts of one model.

    Attributes:
        layers: for each router, the index of its layer in the model.
        count: number of experts of a token.

    Args:
        model: the Hugging Face model.
        check: whether to run the model on a few tokens, to check that its routers follow. Not possible on one rank of
            a sharded model.

    Raises:
        Unsupported: the model has no routers that choose by `topk`, or they do not follow recorded choices.
    """

    def __init__(self, model: Any, *, check: bool = True) -> None:
        self._name = type(model).__name__
        routers = _routers_of(model)
        if not routers:
            raise Unsupported(
                f"router replay: {self._name} has no router that chooses top_k of num_experts; leave "
                "enable_router_replay out (it is for mixture-of-experts models, such as Qwen3-MoE or Mixtral)"
            )
        self._routers = [_Router(number, name, module) for number, (name, module) in enumerate(routers)]
        sizes = {(router.experts, router.count) for router in self._routers}
        if len(sizes) > 1:
            raise Unsupported(f"router replay: the routers of {self._name} choose differently: {sorted(sizes)}")
        ((self.experts, self.count),) = sizes
        self.layers = tuple(_layer_of(name, number) for number, (name, _) in enumerate(routers))
        self._depth = int(getattr(model.config.get_text_config(), "num_hidden_layers", len(routers)))
        if check:
            self._check(model)

    @classmethod
    def of(cls, model: Any, *, check: bool = True) -> "RouterReplay":
        """Return the one of a model, which is created at the first call: its routers get their hooks once."""
        if model not in _KNOWN:
            _KNOWN[model] = cls(model, check=check)
        return _KNOWN[model]

    def recording(self) -> Routes:
        """Return routes that record one pass."""
        return Routes(len(self._routers))

    def replaying(self, given: Tensor) -> Routes:
        """Return routes that prescribe the experts `[N, layers, k]` of one pass, and record."""
        return Routes(len(self._routers), given.long())

    def take(self, rows: Sequence[Mapping[str, Any]], *, left: bool) -> tuple[list[Mapping[str, Any]], Tensor]:
        """Return rows without their recorded experts, and these, int16 `[N, layers, k]` for the tokens of all rows.

        Tokens whose `attention_mask` is 0 are left out, because batches do not have them.

        Args:
            rows: encoded rows; routers choose for rows that have no recorded experts.
            left: whether batches are padded on the left.

        Raises:
            DataError: the experts of a row do not fit the row or the model.
        """
        tables = []
        for number, row in enumerate(rows):
            tokens = len(row["input_ids"])
            if row.get(KEY) is None:
                table = torch.full((tokens, len(self._routers), self.count), OWN, dtype=torch.int16)
            else:
                table = self.align(row[KEY], number, tokens, left=left)
            mask = row.get("attention_mask")
            tables.append(table if mask is None else table[torch.as_tensor(mask).bool().cpu()])
        return without_routes(rows), torch.cat(tables)

    def align(self, routes: Any, row: int, tokens: int, *, left: bool) -> Tensor:
        """Return the recorded experts of a row as int16 `[tokens, layers, k]`; OWN where nothing was recorded.

        Args:
            routes: array, tensor or lists `[T, L, k]`, with L routers, or L layers of the model of which some may have
                no router. T is the number of tokens, or one less (the last token of a sample was not read), or more
                (padding of a batch).
            row: number of the row, for errors.
            tokens: number of tokens of the row.
            left: whether batches are padded on the left.

        Raises:
            DataError: they do not fit the row or the model.
        """
        try:
            table = torch.as_tensor(routes)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"row {row}: {KEY!r} are not numbers ({error}); give [tokens, layers, experts]") from error
        wide = table.ndim == 3 and table.shape[1] != len(self.layers) and table.shape[1] == self._depth
        if wide:
            table = table[:, torch.tensor(self.layers)]
        if table.ndim != 3 or tuple(table.shape[1:]) != (len(self.layers), self.count) or len(table) < tokens - 1:
            raise DataError(
                f"row {row}: {KEY!r} are {list(table.shape)}; for its {tokens} tokens {self._name} needs [{tokens}, "
                f"{len(self.layers)} layers, {self.count} experts], as forward_only(router_replay_action='record') or "
                "the sampler returns them"
            )
        if len(table) > tokens:
            table = table[-tokens:] if left else table[:tokens]
        elif len(table) < tokens:
            table = torch.cat([table, table.new_full((1, *table.shape[1:]), OWN)])
        table = table.to(torch.int16).cpu()
        ordered = table.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if bool(((table < OWN) | (table >= self.experts)).any()) or bool(twice.any()):
            raise DataError(
                f"row {row}: {KEY!r} must be {self.count} different experts below {self.experts}, or {OWN} where the "
                "router shall choose"
            )
        return table

    def _check(self, model: Any) -> None:
        """Record a few tokens, and replay them with other experts.

        Raises:
            Unsupported: a router was not called, or did not use the prescribed experts.
        """
        ids = torch.tensor([probe_tokens(_SAMPLE, model.config.get_text_config().vocab_size)], device=model.device)
        with evaluating(model):
            first = self.recording()
            with routing(first):
                model(input_ids=ids, use_cache=False)
            other = (first.used().long() + 1) % self.experts
            seen: list[tuple[Tensor, ...]] = []
            hooks = [
                module.register_forward_hook(lambda m, a, out: seen.append(out)) for _, module in _routers_of(model)
            ]
            try:
                with routing(self.replaying(other)):
                    model(input_ids=ids, use_cache=False)
            finally:
                for hook in hooks:
                    hook.remove()
        for layer, (router, output) in enumerate(zip(self._routers, seen, strict=False)):
            tensors = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else []
            indices = [part for part in tensors if not part.is_floating_point() and part.shape == other[:, layer].shape]
            weights = [part for part in tensors if part.is_floating_point() and part.shape == other[:, layer].shape]
            follows = any(torch.equal(part, other[:, layer]) for part in indices)
            if not follows or not all(bool((part > 0).all()) for part in weights):
                raise Unsupported(
                    f"router replay: router {router.name} of {self._name} does not use prescribed experts (it limits "
                    "the choice by other means, such as groups of experts)"
                )


def without_routes(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows without recorded experts."""
    return [{key: value for key, value in row.items() if key != KEY} if KEY in row else row for row in rows]


def place(batch: Mapping[str, Any], experts: Tensor) -> Tensor:
    """Return the experts of the tokens of a batch `[N, layers, k]` in its shape, `[B, T, layers, k]`, OWN at padding.

    Raises:
        DataError: the processor has dropped or added tokens.
    """
    size = batch["input_ids"].shape[:2]
    places = _places(batch)
    if len(places) != len(experts):
        raise DataError(
            f"the rows have recorded experts of {len(experts)} tokens, and their batch has {len(places)} tokens; use a "
            "processor that keeps all tokens of the rows, in their order"
        )
    placed = experts.new_full((size.numel(), *experts.shape[1:]), OWN)
    placed[places] = experts
    return placed.view(*size, *experts.shape[1:])


def in_stream(batch: Mapping[str, Any], placed: Tensor) -> Tensor:
    """Return `[B, T, layers, k]` in the order in which the routers get the tokens, `[tokens, layers, k]`."""
    flat = placed.flatten(0, 1)
    return flat[batch.places] if isinstance(batch, PackedBatch) else flat


def in_rows(batch: Mapping[str, Any], used: Tensor) -> Tensor:
    """Return experts `[tokens, layers, k]`, in the order of the routers, in the shape of the batch; OWN at padding."""
    if isinstance(batch, PackedBatch):
        return batch.pad_rows(used[None] - OWN) + OWN
    placed = used.view(*batch["input_ids"].shape[:2], *used.shape[1:])
    mask = batch.get("attention_mask")
    return placed if mask is None else placed.masked_fill((mask == 0).to(used.device)[..., None, None], OWN)


def _places(batch: Mapping[str, Any]) -> Tensor:
    if isinstance(batch, PackedBatch):
        return batch.places
    mask = batch.get("attention_mask")
    ones = torch.ones(batch["input_ids"].shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
    return ones.flatten().nonzero().squeeze(-1)


_KNOWN: WeakKeyDictionary[Any, RouterReplay] = WeakKeyDictionary()


def _is_router(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    counts = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    return ("router" in name or "gate" in name) and all(isinstance(count, int) for count in counts)


def _routers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if _is_router(module)]


def _layer_of(name: str, number: int) -> int:
    """Return the first number in the path of a router, which is its layer."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), number)


def action_of(action: RouterReplayAction | str | None) -> RouterReplayAction:
    """Return an action of a call as a member; None is DISABLED.

    Raises:
        ArgumentError: there is no such action, or it is not one of a call.
    """
    try:
        found = RouterReplayAction.DISABLED if action is None else RouterReplayAction(action)
    except ValueError as error:
        known = ", ".join(repr(member.value) for member in RouterReplayAction)
        raise ArgumentError(f"router_replay_action={action!r}; it must be None or one of {known}") from error
    if found is RouterReplayAction.REPLAY_BACKWARD:
        raise ArgumentError(
            "router_replay_action='replay_backward' is not an action of a call: a backward that recomputes activations "
            "uses the experts of its forward; give 'replay_forward'"
        )
    return found
