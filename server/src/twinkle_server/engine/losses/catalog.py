"""The losses that a request may name: the published ones, and those of installed plugins declared safe for tenants.

Losses that ship with Twinkle are computed in the engine process; those of other plugins in worker processes.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

from twinkle import registry
from twinkle.errors import NotTrusted
from twinkle_registry import CodeIdentity, ComponentSpec, nearest
from twinkle_server.engine.errors import UserError
from twinkle_server.engine.losses.building import (
    SEQUENCES,
    TARGETS,
    WEIGHTS,
    WIRE_NAMES,
    Rows,
    build_loss,
    enforce_weights,
    mask_weightless,
    with_inputs,
)
from twinkle_server.engine.losses.identities import identity_or_none
from twinkle_server.engine.losses.workers import WorkerLimits
from twinkle_server.wire.codec import Array

if TYPE_CHECKING:
    from twinkle_server.engine.losses.workers.workers import LossWorkers

CUSTOM: Final = "custom"
"""Name of losses that clients send as graphs."""
PUBLISHED: Final = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
OWN: Final = ("stable_reinforce",)
"""Names of the protocol without a published formula. Twinkle has its own formulas, which `strict` refuses."""
_SHIPPED: Final = "twinkle-losses"
"""The distribution whose losses run in the engine process."""
_STRICT: Final = (
    "cannot run loss_fn {!r}: its published name has no published formula, and this service was started with "
    "--strict-losses, which refuses Twinkle's own; pass loss_fn='importance_sampling', 'ppo', 'cispo' or 'gspo'"
)
_CROSS_ENTROPY: Final = "cross_entropy"
_IGNORED: Final = (
    "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask", "ref_logps",
)  # fmt: skip
"""Inputs of other published losses that `cross_entropy` ignores: clients send one datum to several losses."""

NATIVE_ONLY: Final = frozenset({"InfonceLoss"})
"""Losses of vectors instead of tokens: the results of Tinker requests are log-probabilities of tokens."""


class Losses:
    """The losses of a service.

    Args:
        allowed: names in addition to the published ones; None allows all installed tenant-safe losses.
        limits: limits of the worker processes that compute the losses of plugins; None computes them in this process.
        in_process: plugins whose losses are computed in this process in any case.
        strict: whether to refuse `OWN`.

    Attributes:
        workers: the worker processes; None if no loss needs one.
        strict: whether the names of published losses mean Tinker's formulas only.
    """

    def __init__(
        self, allowed: Sequence[str] | None = None, limits: WorkerLimits | None = None, in_process: Sequence[str] = (),
        *, strict: bool = False,
    ) -> None:  # fmt: skip
        self._allowed = None if allowed is None else frozenset(allowed) | frozenset(PUBLISHED) | frozenset(OWN)
        self.strict = strict
        self._in_process = frozenset(in_process)
        self.workers: LossWorkers | None = None
        self._identities: dict[str, CodeIdentity | None] = {}
        remote = [spec for spec in self._specs().values() if limits is not None and self.is_remote(spec)]
        if limits is not None and remote:
            from twinkle_server.engine.losses.workers import workers  # imports torch

            self.workers = workers.LossWorkers(limits)
            self.workers.prepare(remote)

    def names(self, native: Set[str] = frozenset()) -> tuple[str, ...]:
        """Return the names of all losses that a Tinker request may use, the published ones first.

        Args:
            native: names of further losses, computed by the engine itself.
        """
        return _published_first((self._specs().keys() | native) - NATIVE_ONLY)

    def own_names(self) -> tuple[str, ...]:
        """Return the names of all losses that a model can be given by native calls, the published ones first."""
        return _published_first(self._specs().keys())

    def build(
        self, spec: ComponentSpec, config: Mapping[str, float | str], rows: Rows, *, queue_id: str = "", number: int = 0
    ) -> Any:
        """Build a loss for one operation; its options and the rows' inputs are checked against its manifest.

        Args:
            spec: the loss.
            config: its options.
            rows: of the request.
            queue_id: the model, which has its own worker for each plugin.
            number: number of the operation.

        Raises:
            UserError: an option is invalid, or an input is missing, unknown or has another shape.
        """
        _check_inputs(spec, rows)
        if self.workers is not None and self.is_remote(spec):
            weighted = mask_weightless(rows)
            loss: Any = self.workers.open(spec, config, queue_id=queue_id, number=number, weighted=weighted)
            loss.row_inputs = with_inputs(loss.row_inputs, spec)
            _check_missing(spec, loss, rows)
            return loss
        self._identify(spec)
        try:
            loss = build_loss(spec, config)
        except NotTrusted as error:  # revoked after `find`
            raise UserError(f"loss_fn {spec.name!r} is no longer available: {error}") from error
        _check_missing(spec, loss, rows)
        if not getattr(loss, "require_logps", True):  # a loss of logits; results of Tinker requests have logps
            loss.require_logps = True
        return loss if spec.name in (*PUBLISHED, *OWN) else enforce_weights(loss, spec.name, rows)

    def build_own(self, spec: ComponentSpec, options: Mapping[str, Any], *, queue_id: str, number: int) -> Any:
        """Build the loss of a model that takes its arguments from native calls.

        Args:
            spec: the loss.
            options: its options.
            queue_id: the model, which has its own worker for each plugin.
            number: number of the operation that uses the loss, if a worker computes it.

        Raises:
            UserError: an option is invalid, or the plugin was revoked.
        """
        if self.workers is not None and self.is_remote(spec):
            loss: Any = self.workers.open(spec, options, queue_id=queue_id, number=number, weighted=False)
            loss.row_inputs = with_inputs(loss.row_inputs, spec)
            return loss
        self._identify(spec)
        try:
            return build_loss(spec, options)
        except NotTrusted as error:  # revoked after `find`
            raise UserError(f"loss {spec.name!r} is no longer available: {error}") from error

    def code_of(self, spec: ComponentSpec, loss: Any) -> dict[str, str] | None:
        """Return which code computed a loss: `loss`, `plugin`, `version` and `sha256`; None if its plugin is gone.

        Args:
            spec: the loss.
            loss: what `build` or `build_own` returned, after its last call.
        """
        remote = self.workers is not None and self.is_remote(spec)
        identity = loss.code if remote else self._identify(spec)
        return None if identity is None else {"loss": spec.name, **dataclasses.asdict(identity)}

    def _identify(self, spec: ComponentSpec) -> CodeIdentity | None:
        """Return the code of a plugin in this process, as it was when this was called first: before its import."""
        if spec.root not in self._identities:
            self._identities[spec.root] = identity_or_none(spec)
        return self._identities[spec.root]

    def end_dropped(self) -> None:
        """End the worker processes of plugins that no longer offer a loss."""
        if self.workers is not None:
            self.workers.keep({spec.dist for spec in self._specs().values()})

    def is_remote(self, spec: ComponentSpec) -> bool:
        """Return whether worker processes compute a loss, if there are any."""
        return spec.dist not in self._in_process and not _is_own(spec)

    def _specs(self) -> dict[str, ComponentSpec]:
        """Return the losses available now; those of a plugin revoked at run time disappear immediately."""
        available = {}
        for name, specs in registry().specs("loss").items():
            safe = [spec for spec in specs if spec.tenant_safe and "served" in spec.runtimes]
            refused = self.strict and name in OWN
            if len(safe) == 1 and not refused and (self._allowed is None or name in self._allowed):
                available[name] = safe[0]
        return available

    def find_for_tokens(self, name: str) -> ComponentSpec:
        """Return the loss that a Tinker request names, whose results are log-probabilities of tokens.

        Raises:
            UserError: the loss does not exist, its plugin was revoked, or it is one of `NATIVE_ONLY`.
        """
        spec = self.find(name)
        if name in NATIVE_ONLY:
            raise UserError(
                f"loss_fn {name!r} compares vectors of texts, and requests of this protocol return log-probabilities "
                "of tokens; use set_loss and forward_backward(task='embedding') of the native client"
            )
        return spec

    def find(self, name: str) -> ComponentSpec:
        """Return the loss of a name.

        Raises:
            UserError: the loss does not exist, or its plugin was revoked.
        """
        specs = self._specs()
        if name in specs:
            return specs[name]
        if self.strict and name in OWN:
            raise UserError(_STRICT.format(name))
        if reason := _why_refused(name):
            raise UserError(f"loss_fn {name!r} is no longer available: {reason}")
        close = nearest(name, specs)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"unknown loss_fn {name[:80]!r}{hint}; available: {', '.join(self.names())}")


def _published_first(names: Set[str]) -> tuple[str, ...]:
    first = (*PUBLISHED, *OWN)
    return (*(name for name in first if name in names), *sorted(names - set(first)))


def _why_refused(name: str) -> str:
    """Return why the plugin of a loss must not run, or an empty string."""
    for record in registry().records:
        offered = record.manifest.components if record.manifest and isinstance(record.cause, NotTrusted) else ()
        if any(spec.kind == "loss" and spec.name == name for spec in offered):
            return record.reason
    return ""


def _is_own(spec: ComponentSpec) -> bool:
    """Return whether a loss ships with Twinkle; a plugin's name alone could be faked."""
    shipped = {record.package for record in registry().records if record.name == record.dist == _SHIPPED}
    return spec.dist == _SHIPPED and spec.ref.partition(":")[0].partition(".")[0] in shipped


def _check_inputs(spec: ComponentSpec, rows: Rows) -> None:
    for name, arrays in rows.inputs.items():
        wire = WIRE_NAMES.get(name, name)
        if name not in spec.inputs:
            raise UserError(
                f"loss_fn {spec.name!r} does not take the loss_fn_input {wire!r}; it takes "
                f"{', '.join(accepted_inputs(spec))}"
            )
        for number, array in enumerate(arrays):
            _check_shape(spec.inputs[name], array, f"datum {number}: {wire}", len(rows.features[number]["input_ids"]))


def accepted_inputs(spec: ComponentSpec) -> tuple[str, ...]:
    """Return the inputs of a loss by their names in requests."""
    return (TARGETS, WEIGHTS, *(WIRE_NAMES.get(name, name) for name in spec.inputs if name != SEQUENCES))


def ignored_inputs(spec: ComponentSpec) -> tuple[str, ...]:
    """Return the inputs that a loss ignored_inputs, by their names in requests."""
    return _IGNORED if spec.name == _CROSS_ENTROPY else ()


def _check_missing(spec: ComponentSpec, loss: Any, rows: Rows) -> None:
    """Refuse a request without a required input of the loss."""
    for name, parameter in inspect.signature(loss).parameters.items():
        if name in spec.inputs and name not in rows.inputs and parameter.default is parameter.empty:
            wire = WIRE_NAMES.get(name, name)
            raise UserError(f"loss_fn {spec.name!r} requires the loss_fn_input {wire!r}, got {_input_names(rows)}")


def _input_names(rows: Rows) -> str:
    return ", ".join(["target_tokens", *(WIRE_NAMES.get(name, name) for name in rows.inputs)])


def _check_shape(kind: str, array: Array, where: str, length: int) -> None:
    """Compare an array with a declaration such as `float32[T]`; T is the number of tokens of the row.

    Other letters stand for any size.
    """
    dtype, _, rest = kind.partition("[")
    sizes = [size.strip() for size in rest.rstrip("]").split(",") if size.strip()]
    if array.dtype.kind == "f" and dtype.startswith("int"):
        raise UserError(f"{where} must contain integers ({kind}), got {array.dtype}")
    expected = [length if size == "T" else int(size) if size.isdigit() else None for size in sizes]
    shape = list(array.shape)
    if not sizes and shape == [1]:
        return
    if len(shape) != len(expected) or any(e not in (None, s) for e, s in zip(expected, shape, strict=True)):
        raise UserError(f"{where} must have the shape {kind} for a row of {length} tokens, got {shape}")
