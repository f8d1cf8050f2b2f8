"""`LoraPool`: adapters of one model, and operations of many of them in one pass."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from time import time_ns
from traceback import clear_frames
from typing import Any, Literal

import torch
from torch import Tensor

from twinkle.engine import (
    AdapterBytes,
    AdapterRef,
    Operation,
    OperationError,
    OperationResult,
    Step,
    StepResult,
    Usage,
)
from twinkle.errors import ArgumentError, NonFiniteError, TrainingStateError, TwinkleError, Unsupported
from twinkle.logging import get_logger
from twinkle_transformers import losses
from twinkle_transformers.adapters import read_config as read_adapter_config
from twinkle_transformers.backbone import Backbone
from twinkle_transformers.group import OptimizerGroup, check_adapter, check_clipping
from twinkle_transformers.losses import loss_name
from twinkle_transformers.lowrank.layout import AdapterVersion, Layout, Shape
from twinkle_transformers.memory import Recompute, is_out_of_memory
from twinkle_transformers.optimizers import override
from twinkle_transformers.parallel import Replicated, parallel_of
from twinkle_transformers.pool import files
from twinkle_transformers.pool.compatibility import check_model_kind, drop_partial_sites, needs_separate_sequences
from twinkle_transformers.pool.config import AdapterPlan, first_weights, read_config
from twinkle_transformers.pool.paging import BLANK, Paging
from twinkle_transformers.pool.passes import (
    Admission,
    Compositions,
    ForwardPass,
    FusedPasses,
    UsageMeter,
    cuts_of,
    no_room,
)
from twinkle_transformers.pool.results import Ended, Results
from twinkle_transformers.pool.snapshots import restore_snapshot, take_snapshot
from twinkle_transformers.pool.stepping import check_pending, step_each
from twinkle_transformers.pool.tenants import Tenant, Tenants
from twinkle_transformers.pool.work import MicroBatch, WorkItem, by_row, prepare, split, split_in_half
from twinkle_transformers.segments import PatchWatch
from twinkle_transformers.sites import check_places, find_expert_sites, find_sites, install, install_experts, uninstall

Probe = Callable[[dict[str, Tensor]], object]
TOKENS_PER_PASS = 16_384
_ROUNDS = "numbers may differ from the earlier run's in the last places"
_FULL_ON_CPU = 1_024
"""Maximum number of tokens of a pass on a CPU: products reach full speed well below it, and larger activations are
returned to the system and faulted in again each time (`benchmarks/RESULTS.md` has both measurements)."""


class LoraPool:
    """Adapters of one model, and operations of many of them in one pass.

    Args:
        backbone: the model; it is frozen and set to evaluation mode permanently.
        device: device of the model.
        autocast: returns the context in which forwards run.
        dtype: dtype of the low-rank products.
        new_recompute: returns what decides on recomputation of activations, given a function that runs one row.
        new_group: returns the training state of a new adapter.
        encode: encodes trajectories of an adapter without a template.
        tokens_per_pass: maximum number of tokens of a pass, unless a single row has more.
        on_nonfinite: "raise" fails an operation whose loss or gradient is not finite; "skip" leaves it out.
        adapter_memory: maximum number of bytes of adapters on the device; beyond it, those idle longest are paged out.
        host_memory: maximum number of bytes of paged adapters in host memory; beyond it, they go to disk.
        parallel: the ranks that hold the same adapters; by default this process is alone.
        share_prefixes: compute a prompt that several rows of an operation begin with once. True is an error on a model
            that cannot; "auto" computes rows whole there.

    Attributes:
        between: called between two passes of a call, when neither holds memory, so that a sampler can take a step. It
            must not change the adapters.
        ended: called by `run` for each operation as soon as it has ended, those of one adapter in their order.

    Raises:
        Unsupported: the model cannot carry adapters, or the forward of a layer was replaced.
    """

    def __init__(
        self, backbone: Backbone, device: torch.device, autocast: Callable[[], AbstractContextManager[None]],
        dtype: torch.dtype, new_recompute: Callable[[Probe], Recompute], new_group: Callable[[str], OptimizerGroup],
        encode: Callable[[Any], Any], *, tokens_per_pass: int = TOKENS_PER_PASS, on_nonfinite: str = "raise",
        adapter_memory: int | None = None, host_memory: int | None = None, parallel: Replicated | None = None,
        share_prefixes: bool | str = False,
    ) -> None:  # fmt: skip
        if isinstance(tokens_per_pass, bool) or not isinstance(tokens_per_pass, int) or tokens_per_pass < 1:
            raise ArgumentError(f"tokens_per_pass must be an integer of at least 1, got {tokens_per_pass!r}")
        self.backbone, self.device = backbone, device
        check_model_kind(backbone)
        backbone.model.requires_grad_(False).eval()
        self._patches = PatchWatch(backbone.model)
        alone = needs_separate_sequences(backbone)
        sites, self.experts = find_sites(backbone.model), find_expert_sites(backbone.model)
        install(list(sites.values()), head=not backbone.splits)
        install_experts(self.experts.values())
        self.sites = drop_partial_sites(backbone, sites, alone)
        head = next((name for name, site in self.sites.items() if site.head), None)
        self._widest: dict[str, Shape] = {}
        self.passes = FusedPasses(backbone, device, autocast, dtype, new_recompute(self._probe), head, alone=alone)
        self.passes.measure(self.sites)
        self.admission, self.costs = Admission(self.passes), UsageMeter(backbone.model)
        self.paging = Paging(device, adapter_memory, host_memory)
        self.tenants = Tenants(self.paging.use)
        self.base = new_group("")
        self.compositions = Compositions(self.sites, self.experts, self.base, device)
        self._pass = 0
        self.tokens_per_pass, self.on_nonfinite = tokens_per_pass, on_nonfinite
        self.parallel = parallel_of(None, None, None) if parallel is None else parallel
        self._new_group, self._encode = new_group, encode
        self.between: Callable[[], None] = _nothing
        self.ended: Ended | None = None
        self._reads = count(1)
        self._share_prefixes = share_prefixes
        self._settle_prefixes()

    def _settle_prefixes(self) -> None:
        """Decide whether passes share prefixes, from the option and the capabilities of the model."""
        refusal = self.backbone.segmenter.check_prefixes() if self._share_prefixes else "not asked for"
        if refusal is not None and self._share_prefixes is True:
            raise Unsupported(f'{refusal}, or use share_prefixes="auto", which computes rows whole here')
        self.passes.share_prefixes = refusal is None

    def rebind(self, backbone: Backbone) -> None:
        """Use a model to which a patch was applied, or on which one was undone.

        Raises:
            Unsupported: the change would bypass adapters, or the model can no longer carry them.
        """
        self._patches.changed()  # patches up to now are taken into account here
        check_places(self.sites.values())
        install_experts(self.experts.values())
        self.passes.change(backbone, needs_separate_sequences(backbone))
        self.passes.measure(self.sites)
        head = [site for site in self.sites.values() if site.head]
        uninstall(head)
        install(head, head=not backbone.splits)
        self.backbone = backbone
        self._settle_prefixes()

    def _check_patches(self) -> None:
        """Rebind the model if its module, or a part of it, was patched without `apply_patch` of the model."""
        if not self._patches.changed():
            return
        replaced = "forward" in vars(self.backbone.model)  # the patch computes the logits
        try:
            self.rebind(replace(self.backbone, splits=False) if replaced else self.backbone)
        except BaseException:
            self._patches.forget()
            raise

    # Adapters
    def add(self, name: str, config: Any, *, seed: int | None = None, saved: bool = False) -> AdapterRef:
        """Add an adapter; see `Engine.add` for what is raised, and `read_config` for `saved`."""
        check_adapter(name, dict.fromkeys(self.tenants.names()))
        plan = self._plan(name, config, saved)
        seed = next((s for s in (seed, plan.seed) if s is not None), None)
        seed = seed_of(name) if seed is None else seed
        flat = torch.nn.Parameter(BLANK.expand(plan.layout.size))
        ref = self.tenants.next_ref(name)
        group = self._new_group(name)
        group.adapter_config = plan.config
        group.seed = seed
        group.left_out = [flat]
        tenant = Tenant(ref, plan, flat, group)
        self.paging.take(tenant, partial(first_weights, plan, seed, self.device))
        self.tenants.add(tenant)
        self._note(plan.layout)
        return ref

    def _plan(self, name: str, config: Any, saved: bool = False) -> AdapterPlan:
        return read_config(
            name, config, self.sites, self.backbone.model, experts=self.experts,
            rank_multiple=8 if self.device.type == "cuda" else 1, saved=saved,
        )  # fmt: skip

    def read_version(self, folder: Path) -> AdapterVersion:
        """Read a folder in PEFT's format for a sampler, without adding an adapter.

        Raises:
            CheckpointError: it is missing or damaged, or belongs to another model.
            Unsupported: a pool does not support its configuration.
        """
        plan = self._plan(folder.name, read_adapter_config(folder), saved=True)
        flat = files.read_flat(plan, folder, self.sites).to(self.device)
        return AdapterVersion(plan.layout, flat, f"{folder.resolve()}@{next(self._reads)}")

    def _note(self, layout: Layout) -> None:
        """Discard measurements of activations if an adapter has more or wider terms than all before it."""
        for name, shape in layout.shapes.items():
            if name not in self._widest or self._widest[name].rank < shape.rank:
                self._widest[name] = shape
                self.passes.recompute.forget()

    def _probe(self, row: dict[str, Tensor]) -> object:
        """Run a row as a training pass would, with the highest rank of all adapters at each layer."""
        return self.passes.probe(row["input_ids"], Layout.of(self._widest.items()))

    def remove(self, adapter: str | AdapterRef) -> None:
        """Remove an adapter with its state; its memory is zeroed."""
        self.paging.forget(self.tenants.remove(adapter))

    def ref(self, name: str) -> AdapterRef:
        """Return the reference of the adapter that currently has a name."""
        return self.tenants.find(name).ref

    # Operations
    def run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        """Run operations together; see `Engine.run`."""
        with self.paging.together():
            return self._run(operations)

    def _run(self, operations: Sequence[Operation]) -> list[OperationResult | OperationError]:
        works: list[WorkItem | OperationError] = []
        earlier: Counter[AdapterRef] = Counter()
        results = Results(operations, self._finish_and_note, self.ended)
        for index, operation in enumerate(operations):
            try:
                work = self.prepare(index, operation, evaluates=self._measured(operation))
                if work.training and work.tenant is not None and operation.number is None:
                    work.number += earlier[work.tenant.ref]
                    earlier[work.tenant.ref] += 1
                works.append(work)
            except Exception as error:  # a loss or processor may raise anything, and the other operations must go on
                works.append(OperationError(error, _name(operation.adapter), index))
        results.add(works)
        self.execute([work for work in works if isinstance(work, WorkItem)], results.advance)
        return results.all()

    def _finish_and_note(self, work: WorkItem) -> OperationResult | OperationError:
        """Return the result of an operation, whose forward becomes the last one of the adapter that it measures."""
        result = self.finish(work)
        if isinstance(result, OperationResult):
            self._note_last(self._measured(work.operation), work)
        return result

    def _measured(self, operation: Operation) -> Tenant | None:
        """Return the adapter whose metrics see an operation."""
        if operation.metrics_of is None:
            return None
        tenant = self.tenants[operation.metrics_of]
        if operation.adapter is not None and self.tenants[operation.adapter] is not tenant:
            raise ArgumentError("metrics_of must be the adapter of the operation, or the operation the base model's")
        return tenant

    def _note_last(self, tenant: Tenant | None, work: WorkItem) -> None:
        """Make a forward the adapter's last one, which `calculate_loss` scores."""
        if tenant is None:
            return
        tenant.group.training = work.training
        if work.training:
            tenant.group.train_status.passes = []
        else:
            passes = [part.item for part in work.parts if part.item is not None]
            tenant.group.eval_status.passes = passes

    def step(self, steps: Sequence[Step]) -> list[StepResult | OperationError]:
        """Update several adapters together; see `Engine.step`."""
        with self.paging.together():
            return self._step(steps)

    def _step(self, steps: Sequence[Step]) -> list[StepResult | OperationError]:
        results: list[StepResult | OperationError | None] = [None] * len(steps)
        ready: dict[int, Tenant] = {}
        options: dict[int, list[dict[str, Any]]] = {}
        for index, step in enumerate(steps):
            try:
                tenant = self.tenants[step.adapter]
                options[index] = _options_of(tenant)
                ready[index] = self._ready_for(step, tenant, ready)
            except (TwinkleError, ValueError, TypeError) as error:
                results[index] = OperationError(error, _name(step.adapter), index)
        updates = {index: tenant.group.updates for index, tenant in ready.items()}
        norms = step_each(
            list(ready.values()), [steps[index].max_grad_norm for index in ready], self.parallel, self.on_nonfinite
        )
        for (index, tenant), norm in zip(ready.items(), norms, strict=True):
            if isinstance(norm, Exception):
                for group, before in zip(tenant.group.optimizer.param_groups, options[index], strict=True):
                    group.update(before)
                results[index] = OperationError(_step_error(norm), tenant.name, index)
            else:
                results[index] = StepResult(norm, tenant.group.updates > updates[index])
        return [result for result in results if result is not None]

    def _ready_for(self, step: Step, tenant: Tenant, others: Mapping[int, Tenant]) -> Tenant:
        if tenant in others.values():
            raise ArgumentError(f"step: each adapter must be named once, got {tenant.name!r} twice")
        check_clipping(step.max_grad_norm, 2.0)
        if tenant.group.optimizer is None:
            raise TrainingStateError(f"step: adapter {tenant.name!r} has no optimizer; call set_optimizer first")
        check_pending(tenant, step.zero_if_none)
        self.paging.use(tenant, trained=True)
        if step.optim_params:  # the last check that can fail: a refused step must change nothing
            override(tenant.group.optimizer, step.optim_params)
        if not step.divide:
            tenant.group.denominator = 1.0
        if tenant.flat.grad is None and step.zero_if_none:
            tenant.add_gradient(torch.zeros_like(tenant.flat.detach()))
        return tenant

    def execute(self, works: Sequence[WorkItem], passed: Callable[[], None] | None = None) -> None:
        """Compute prepared operations in as many passes as needed; call `passed` after each of them."""
        full = min(self.tokens_per_pass, _FULL_ON_CPU) if self.device.type == "cpu" else self.tokens_per_pass
        passes = chain(
            self._again([work for work in works if work.operation.composition]),
            self.admission.sort([work for work in works if not work.operation.composition], full),
        )
        for number, (parts, free) in enumerate(passes):
            if number:
                self.between()
            self._compute(parts, free)
            if passed is not None:
                passed()

    def _again(self, works: Sequence[WorkItem]) -> Iterator[tuple[list[MicroBatch], int | None]]:
        """Yield the recorded passes of operations that are computed again, as far as they fit into memory."""
        for parts in self.compositions.passes(works):
            free = self.admission.free_for(parts)
            if self.admission.fits(parts, free):
                yield parts, free
                continue
            get_logger().warning("a recorded pass does not fit into memory any more; %s", _ROUNDS)
            for part in parts:
                if not part.placeholder:
                    yield [part], free

    def prepare(
        self, index: int, operation: Operation, *, rows: int | None = None, staged: bool = False,
        evaluates: Tenant | None = None,
    ) -> WorkItem:  # fmt: skip
        """Validate an operation and cut it into micro-batches.

        Args:
            index: its index in the call.
            operation: the operation.
            rows: maximum number of rows of a micro-batch.
            staged: the loss is calculated later, and all rows are one micro-batch.
            evaluates: adapter whose loss and metrics may be calculated later from a forward.
        """
        self._check_patches()
        tenant = None if operation.adapter is None else self.tenants[operation.adapter]
        group = next((t.group for t in (tenant, evaluates) if t is not None), self.base)
        if tenant is not None and operation.kind == "forward_backward":
            group.begin_backward()
            self.paging.use(tenant, trained=True)
        work = prepare(index, operation, tenant, self.backbone, group.processor, self.encoder(group), evaluates)
        if not staged:
            cuts = cuts_of(operation, len(work.parts[0].rows))
            split(work, group.processor, self.backbone, self.tokens_per_pass, rows, cuts)
        return work

    def encoder(self, group: OptimizerGroup) -> Callable[[Any], Any]:
        """Return what encodes trajectories of an adapter: its template, or the pool's default."""
        encode: Callable[[Any], Any] = self._encode if group.template is None else group.template.encode
        return encode

    def _compute(self, parts: list[MicroBatch], free: int | None = None) -> None:
        """Run one pass; if it fails, run smaller ones, until only the operations that cause the failure have failed."""
        if parts and (error := self._attempt(parts, free)) is not None:
            for smaller in self._smaller(parts, error):
                self._compute([part for part in smaller if part.work.error is None])

    def _attempt(self, parts: list[MicroBatch], free: int | None) -> Exception | None:
        """Run one pass and return None, or undo it and return its error."""
        forward_pass: ForwardPass | None = None
        try:
            forward_pass = self.passes.forward(parts, free)
            self.score(forward_pass)
            self.passes.backward(forward_pass)
            for part in parts:
                if not part.placeholder:
                    part.work.reserve_gradient()
        except Exception as error:  # whatever it is, the other operations must go on
            for part in parts:
                part.forget_pass()
            clear_frames(error.__traceback__)
            return error
        else:
            self.collect(forward_pass)
            return None
        finally:
            forward_pass = None  # the frames of an error would keep it alive

    def _smaller(self, parts: list[MicroBatch], error: Exception) -> list[list[MicroBatch]]:
        """Return the passes that replace a failed one; none if the failing operation is known."""
        if len(real := [part for part in parts if not part.placeholder]) < len(parts):
            get_logger().warning("a recorded pass cannot be repeated (%s); %s", error, _ROUNDS)
            return [real]
        if len(parts) > 1:
            get_logger().warning("a pass of %d operations failed (%s); it is repeated in halves", len(parts), error)
            return [parts[: len(parts) // 2], parts[len(parts) // 2 :]]
        [part] = parts
        if not is_out_of_memory(error):
            part.work.error = error
            return []
        self.passes.recompute.avoid(part.tokens)
        if cut := split_in_half(part, self.backbone):
            return [[half] for half in cut]
        part.tries += 1
        if part.tries < 2:
            return [[part]]
        part.work.error = no_room(part, "ran out of memory twice")
        part.work.error.__cause__ = error
        return []

    def score(self, forward_pass: ForwardPass) -> None:
        """Calculate the loss of each operation of a pass; losses that other processes compute are awaited last."""
        started = {part: self._start(part) for part in forward_pass.parts if _has_loss(part)}
        scored: list[MicroBatch] = []
        for part in sorted(started, key=lambda part: started[part] is not None):
            work, item = part.work, part.item
            if work.error is not None or item is None:
                continue
            try:
                with torch.set_grad_enabled(work.training):
                    losses.calculate(
                        work.loss, item, split=len(work.parts) > 1, several_ranks=False, loss_kwargs=part.loss_kwargs,
                        started=started[part],
                    )  # fmt: skip
                if work.training and item.loss is not None and not item.loss.loss_sum.requires_grad:
                    raise TrainingStateError(f"the result of {loss_name(work.loss)} has no gradient; was it detached?")
                scored.append(part)
            except Exception as error:  # a loss may raise anything, and the others go on
                work.error = error
        sums = [part.item.loss.loss_sum.detach() for part in scored if part.item and part.item.loss]
        values = torch.stack([value.double().reshape(()) for value in sums]).tolist() if sums else []
        for part, value in zip(scored, values, strict=True):
            assert part.item is not None
            losses.write_numbers(part.item, value)
            if value - value != 0.0:
                self._not_finite(part, f"{loss_name(part.work.loss)} of adapter {part.work.name!r} is {value}")

    def _start(self, part: MicroBatch) -> Callable[[], Any] | None:
        """Start a loss that another process computes; None for a loss of this process, or one that fails to start."""
        work, item = part.work, part.item
        if work.error is not None or item is None:
            return None
        try:
            if part.twin is not None:
                part.loss_kwargs["ref_logps"] = _logps_of(part.twin)
            with torch.set_grad_enabled(work.training):
                return losses.start(work.loss, item, part.loss_kwargs)
        except Exception as error:
            work.error = error
            return None

    def _not_finite(self, part: MicroBatch, what: str) -> None:
        work, item = part.work, part.item
        if self.on_nonfinite == "raise" or not work.training or item is None:
            work.error = NonFiniteError(
                f"{what}; the adapter is unchanged, and the rows are in this error's `inputs` "
                "(on_nonfinite='skip' leaves such rows out)", list(part.rows),
            )  # fmt: skip
            return
        item.usable, item.loss = False, None
        get_logger().warning("%s; these %d rows are left out", what, len(part.rows))

    def collect(self, forward_pass: ForwardPass) -> None:
        """Add finite gradients of a pass to their operations, and those of finished operations to their adapters."""
        for adapter_group, parts in forward_pass.stream.adapter_groups:
            if adapter_group.grads is None:
                continue
            sizes = torch.linalg.vector_norm(adapter_group.grads, dim=1).tolist()
            for row, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                work, item = part.work, part.item
                if work.error is not None or item is None or not item.usable:
                    continue
                if size - size != 0.0:
                    self._not_finite(part, f"the gradient of adapter {work.name!r} is {size}")
                    continue
                if len(work.parts) == 1:
                    work.grad = adapter_group.grads[row]
                elif work.grad is not None:
                    work.grad.add_(adapter_group.grads[row])
        for part in forward_pass.parts:
            if part.item is not None:
                asked = part.work.operation.options.get("return_logits", False)
                losses.detach(part.item, logits=asked or not part.work.training)
            part.done = part.work.error is None
        for part, usage in self.costs.of(forward_pass):
            part.work.usage += usage
        self._pass = max(self._pass + 1, time_ns())  # increases across restarts of the process
        twins = {id(part.twin) for part in forward_pass.parts if part.twin is not None}
        self.compositions.note([part for part in forward_pass.parts if id(part) not in twins], self._pass)
        for work in dict.fromkeys(part.work for part in forward_pass.parts if not part.placeholder):
            if all(part.done for part in work.parts) and work.training and work.tenant is not None:
                self._commit(work, work.tenant, [p.item for p in work.parts if p.item is not None and p.item.usable])
        self.passes.scratch.give_back(forward_pass.stream.borrowed)

    def finish(self, work: WorkItem) -> OperationResult | OperationError:
        """Return the result of an operation."""
        if work.error is not None or not all(part.done for part in work.parts):
            error = work.error or TrainingStateError("the operation was not computed")
            clear_frames(error.__traceback__)  # they keep passes alive
            return OperationError(error, work.name, work.index)
        used = [part.item for part in work.parts if part.item is not None and part.item.usable]
        usage = sum((part.twin.work.usage for part in work.parts if part.twin is not None), work.usage)
        usage = replace(usage, tokens=work.usage.tokens)  # the twins computed the same rows again, for the base model
        if work.tenant is not None:
            work.tenant.usage += usage
        result = OperationResult(by_row(work), usage=usage, composition=work.composition)
        if work.loss is not None and used:
            result.loss_sum = sum(item.outputs["loss_sum"] for item in used)
            result.denominator = sum(item.outputs["num_tokens"] for item in used)
            for item in used:
                for name, value in item.outputs.get("loss_metrics", {}).items():
                    result.metrics[name] = result.metrics.get(name, 0.0) + value
            share = result.loss_sum / result.denominator if result.denominator else 0.0
            for output in result.outputs:
                output["loss"], output["num_tokens"] = share, result.denominator
        return result

    def _commit(self, work: WorkItem, tenant: Tenant, used: list[Any]) -> None:
        """Add the gradients of an operation to its adapter, once all of its micro-batches have succeeded."""
        group = tenant.group
        if work.grad is not None:
            tenant.add_gradient(work.grad)
            work.grad = None
        group.denominator += sum(item.outputs["num_tokens"] for item in used)
        group.skipped += len(work.parts) - len(used)
        group.train_status.skipped += len(work.parts) - len(used)
        group.count_backward(losses.settled(used) if work.own_loss else [])

    # State
    def snapshot(self, adapter: str | AdapterRef, *, gradient: bool = True) -> dict[str, Any]:
        """Return a copy of an adapter's state; see `take_snapshot`."""
        with self.paging.together():
            return take_snapshot(self.tenants[adapter], gradient=gradient)

    def restore(self, adapter: str | AdapterRef, snapshot: Mapping[str, Any]) -> None:
        """Replace an adapter's state by a snapshot; see `restore_snapshot`."""
        with self.paging.together():
            restore_snapshot(self.tenants[adapter], snapshot)

    def page(
        self, adapter: str | AdapterRef, to: Literal["device", "host", "disk"], folder: Path | None = None
    ) -> None:
        """Move an adapter's state; see `Paging.page`."""
        self.paging.page(self.tenants.find(adapter), to, folder)

    def version(self, adapter: str | AdapterRef) -> AdapterVersion:
        """Return the present weights of an adapter; the same object until they change."""
        with self.paging.together():
            tenant = self.tenants[adapter]
            moment, latest = tenant.state, tenant.latest
            if latest is None or latest[0] != moment:
                name = f"{tenant.name}@{tenant.ref.generation}.{moment[0]}.{moment[1]}"
                latest = moment, AdapterVersion(tenant.plan.layout, tenant.flat.detach().clone(), name)
                tenant.latest = latest
            return latest[1]

    def bytes_of(self, adapter: str | AdapterRef) -> AdapterBytes:
        """Return how much memory an adapter takes, and where."""
        return self.paging.bytes_of(self.tenants.find(adapter))

    def usage(self, adapter: str | AdapterRef) -> Usage:
        """Return the cost of all successful operations of an adapter."""
        return replace(self.tenants.find(adapter).usage)


def _nothing() -> None:
    """Do nothing."""


def _has_loss(part: MicroBatch) -> bool:
    return part.work.error is None and part.work.loss is not None and part.item is not None


def _step_error(error: Exception) -> Exception:
    """Return the error of a step for the contract; metrics and schedulers may raise anything."""
    if isinstance(error, TwinkleError):
        return error
    failed = TrainingStateError(
        f"the step was made, and then a metric or the scheduler failed: {type(error).__name__}: {error}"
    )
    failed.__cause__ = error
    return failed


def _options_of(tenant: Tenant) -> list[dict[str, Any]]:
    groups = [] if tenant.group.optimizer is None else tenant.group.optimizer.param_groups
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _name(adapter: str | AdapterRef | None) -> str | None:
    return adapter.name if isinstance(adapter, AdapterRef) else adapter


def seed_of(name: str) -> int:
    """Return the seed of an adapter that was given none: a function of its name and of torch's seed."""
    import zlib

    return (torch.initial_seed() * 1_000_003 + zlib.crc32(name.encode())) % 2**63


def _logps_of(twin: MicroBatch) -> Tensor:
    if twin.work.error is not None:
        raise twin.work.error
    if twin.item is None or "logps" not in twin.item.outputs:
        raise TrainingStateError("ref_logps='base' requires rows with `labels`")
    return twin.item.outputs["logps"].detach()
