"""`MultiLoraTransformersModel` on a service: the methods of the local class, for adapters that live there."""

import math
import threading
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle.errors import ArgumentError
from twinkle.logging import get_logger
from twinkle_client.calls import Call, twins
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.custom_loss import LossFunction, differentiate, encoded_rows
from twinkle_client.hub import set_automatic, token_of, upload, upload_status
from twinkle_client.naming import component_for
from twinkle_client.queues import AdapterQueue, result_of_operation
from twinkle_client.results import result_of
from twinkle_client.rows import sendable_rows
from twinkle_registry import check_keywords

if TYPE_CHECKING:
    from twinkle_client import types

T = TypeVar("T")
_SYNCED = "synced-to-sampler"
_OPTIONS = ("temperature", "return_logits", "task", "topk_logprobs", "disable_lora")


class _Adapter:
    """An adapter on the service."""

    def __init__(self, name: str, model_id: str, queue: AdapterQueue) -> None:
        self.name, self.model_id, self.queue = name, model_id, queue


class MultiLoraTransformersModel:
    """Adapters on the base model of a service, each with its own optimizer, loss, template, processor and metrics.

    Every method takes `adapter_name=`; by default it is the adapter that was added last. Every method that calls the
    service also exists as coroutine `..._async`; calls of one adapter run in the order in which they begin. Results are
    plain values (a mapping, a number, a text) that also have the attribute `.result`.

    Args:
        model_id: name of the served model, with or without the prefix `ms://` or `hf://`; None is the one it serves.
        client: by default that of the last `init_twinkle_client`.
        **kwargs: none; options of the model are those of the service.

    Raises:
        ArgumentError: an argument is unknown.
    """

    def __init__(self, model_id: str | None = None, *, client: TwinkleClient | None = None, **kwargs: Any) -> None:
        if kwargs:
            raise ArgumentError(
                f"MultiLoraTransformersModel: {sorted(kwargs)[0]!r} is an option of the service that holds the model; "
                "leave it out"
            )
        self.model_id = model_id
        self.client = client or current_client()
        self._adapters: dict[str, _Adapter] = {}
        self._lock = threading.Lock()
        self.adapter_name = ""

    def run(self, call: Call[T]) -> T:
        """Run a call in this thread."""
        return self.client.run(call)

    async def run_async(self, call: Call[T]) -> T:
        """Run a call on the current event loop."""
        return await self.client.run_async(call)

    # Adapters

    def _add_adapter_to_model(
        self,
        adapter_name: str,
        config: Any = None,
        *,
        gradient_accumulation_steps: int = 1,
        seed: int | None = None,
        checkpoint: Any = None,
        load_optimizer: bool = False,
        user_metadata: Mapping[str, Any] | None = None,
        save_dir: str | None = None,
    ) -> Call[None]:
        """Add an adapter, which the calls without a name then mean.

        Args:
            adapter_name: any name.
            config: `peft.LoraConfig`, or a mapping of its fields (and of `train_attn`, `train_mlp`, `train_unembed`).
            gradient_accumulation_steps: backward calls for each step.
            seed: seed of the first weights and of dropout; None lets the service draw one.
            checkpoint: `twinkle://` path of a checkpoint to begin with, instead of `config`.
            load_optimizer: load its optimizer, too.
            user_metadata: texts that are kept with the training run.
            save_dir: has no effect: a service has its own folders, and a note in the log says so. It is not sent.

        Raises:
            ArgumentError: the name is taken, or a field is not supported on a service.
        """
        from twinkle_client.types.models import plain_config

        if save_dir is not None:
            if not isinstance(save_dir, str | PathLike):
                raise ArgumentError(f"save_dir must be a path or None, got a {type(save_dir).__name__}")
            get_logger().info(
                "add_adapter_to_model: save_dir=%r has no effect, a service saves in its own folders; save() returns "
                "the path of a checkpoint, and list_checkpoints() lists them", str(save_dir),
            )  # fmt: skip
        with self._lock:
            if adapter_name in self._adapters:
                raise ArgumentError(f"adapter {adapter_name!r} already exists; choose another name")
        body: dict[str, Any] = {"gradient_accumulation_steps": gradient_accumulation_steps, "seed": seed}
        if checkpoint is not None:
            body |= {"checkpoint": str(checkpoint), "load_optimizer": load_optimizer}
        body["config"] = plain_config(config) if config is not None else ({} if checkpoint is None else None)
        if user_metadata:
            body["user_metadata"] = {key: str(value) for key, value in user_metadata.items()}
        yield from self._created(adapter_name, self.client.next_number("model"), body)

    def _created(self, name: str, number: int, options: Mapping[str, Any]) -> Call[_Adapter]:
        """Create a model on the service; the same call again, with the same number, gets the same model."""
        connection = self.client.connection
        addressed = {"session_id": self.client.session_id, "model_seq_id": number, "base_model": _bare(self.model_id)}
        answer = yield from connection.exchange("POST", "/models", {**addressed, **options})
        model_id = (yield from result_of_operation(connection, "add_adapter_to_model", answer))["model_id"]
        with self._lock:
            if name not in self._adapters:
                self._adapters[name] = _Adapter(name, model_id, AdapterQueue(connection, f"/models/{model_id}"))
            self.adapter_name = name
            return self._adapters[name]

    add_adapter_to_model, add_adapter_to_model_async = twins(_add_adapter_to_model)

    def _remove_adapter(self, adapter_name: str | None = None) -> Call[None]:
        """Remove an adapter from the service; its checkpoints stay."""
        adapter = yield from self._found(adapter_name)
        yield from adapter.queue.call("unload", {})
        with self._lock:
            self._adapters.pop(adapter.name, None)
            self.adapter_name = next(reversed(self._adapters), "")

    remove_adapter, remove_adapter_async = twins(_remove_adapter)

    def training_run_id(self, adapter_name: str | None = None) -> str:
        """Return the id of an adapter's training run."""
        return self._adapter(adapter_name).model_id

    # Components

    def _set(self, method: str, adapter_name: str | None, name: Any, options: dict[str, Any], **more: Any) -> Call[Any]:
        name, options = component_for(method, name, options)
        body = {"name": name, "options": options} | more
        return (yield from self._call(adapter_name, method, body))

    def _set_loss(self, /, loss_cls: str, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Set the loss, by the name of a component that is installed on the service.

        Its class is sent by name too, and an object by the name and the arguments that build an equal one. A class of
        this script is an error, even if it has the name of a component; see `forward_backward_custom`.

        Raises:
            ArgumentError: the service cannot have the class or the object.
        """
        return (yield from self._set("set_loss", adapter_name, loss_cls, kwargs))

    set_loss, set_loss_async = twins(_set_loss)

    def _set_optimizer(
        self, /, optimizer_cls: str = "AdamW", *, adapter_name: str | None = None, **kwargs: Any
    ) -> Call[Any]:
        """Set the optimizer, by name."""
        return (yield from self._set("set_optimizer", adapter_name, optimizer_cls, kwargs))

    set_optimizer, set_optimizer_async = twins(_set_optimizer)

    def _set_lr_scheduler(self, /, scheduler_cls: str, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Set the scheduler of the learning rate, by name."""
        return (yield from self._set("set_lr_scheduler", adapter_name, scheduler_cls, kwargs))

    set_lr_scheduler, set_lr_scheduler_async = twins(_set_lr_scheduler)

    def _set_template(self, /, template_cls: str, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Set the template that encodes conversations, by name."""
        own = _bare(kwargs.pop("model_id", None))
        if own not in (None, _bare(self.model_id)):
            raise ArgumentError(f"set_template: model_id must be that of the model, {self.model_id!r}, got {own!r}")
        return (yield from self._set("set_template", adapter_name, template_cls, kwargs))

    set_template, set_template_async = twins(_set_template)

    def _set_processor(self, /, processor_cls: str, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Set the processor that collates rows, by name."""
        return (yield from self._set("set_processor", adapter_name, processor_cls, kwargs))

    set_processor, set_processor_async = twins(_set_processor)

    def _add_metric(
        self, /, metric_cls: str, is_training: bool | None = None, *, adapter_name: str | None = None, **kwargs: Any
    ) -> Call[Any]:
        """Add a metric for training, for evaluation, or (None) one for each, by name."""
        return (yield from self._set("add_metric", adapter_name, metric_cls, kwargs, is_training=is_training))

    add_metric, add_metric_async = twins(_add_metric)

    def _apply_patch(self, /, patch_cls: str, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Apply a patch that changes the passes of one adapter only, by name; others are refused."""
        return (yield from self._set("apply_patch", adapter_name, patch_cls, kwargs))

    apply_patch, apply_patch_async = twins(_apply_patch)

    # Forward and backward

    def _forward(self, /, inputs: Any, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Run rows in training mode for `calculate_loss` and `backward`; returns `logps` `[B, T]`."""
        return (yield from self._rows("forward", adapter_name, inputs, kwargs))

    forward, forward_async = twins(_forward)

    def _forward_only(self, /, inputs: Any, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Run rows without a graph; `disable_lora=True` uses only the base model. Returns `logps` `[B, T]`.

        Args:
            inputs: rows (`input_ids`, `labels`, ...) or conversations (`messages`, ...).
            adapter_name: the adapter.
            **kwargs: `temperature`, `return_logits`, `task`, `topk_logprobs`, `disable_lora`, and `micro_batch_size`:
                a service chooses its own, and the numbers do not depend on it.
        """
        return (yield from self._rows("forward_only", adapter_name, inputs, kwargs))

    forward_only, forward_only_async = twins(_forward_only)

    def _forward_backward(self, /, inputs: Any, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Forward, loss and backward of rows; returns `loss`, `num_tokens` and `logps` `[B, T]`.

        Args:
            inputs: rows (`input_ids`, `labels`, ...) or conversations (`messages`, ...).
            adapter_name: the adapter.
            **kwargs: `temperature`, `return_logits`, `task`, `micro_batch_size` (a service chooses its own, and the
                numbers do not depend on it), and `rewards`, a number for each row that the service records for its
                dashboard; all others are arguments of the loss, such as `old_logps`, `advantages` or `ref_outputs`.
        """
        return (yield from self._rows("forward_backward", adapter_name, inputs, kwargs, loss=True))

    forward_backward, forward_backward_async = twins(_forward_backward)

    def _forward_backward_custom(
        self,
        /,
        inputs: Any,
        loss_fn: LossFunction,
        *,
        adapter_name: str | None = None,
        temperature: float = 1.0,
        denominator: float = 1.0,
    ) -> Call[Any]:
        """Forward, a loss that this process computes with torch, and backward.

        The service computes two passes, and the loss of the model (`set_loss`) is not used. Other calls of the adapter
        are refused until this one has ended.

        Args:
            inputs: encoded rows. `labels` `[T]` has one token at each position, `[T, K]` a set of K; -100 is none.
            loss_fn: gets the rows and a list of their log-probabilities, float32 tensors in the shapes of the labels,
                and returns a scalar, or a scalar and a mapping of metrics.
            adapter_name: the adapter.
            temperature: divides the logits.
            denominator: what the loss is divided by at the step, with those of other backward calls: 1 for a loss that
                is a mean, and the number of tokens for a sum over tokens.

        Returns:
            `loss`, `num_tokens` (the denominator), `metrics`, and `logps`, an array for each row.

        Raises:
            ArgumentError: a row is not encoded, or the function returns no scalar with a gradient.
        """
        what = "forward_backward_custom"
        adapter, rows = self._adapter(adapter_name), encoded_rows(inputs)
        sent, common = sendable_rows(rows), {"temperature": float(temperature)}
        first = {"inputs": [_without_weights(row) for row in sent], "rows_apart": True, **common}
        with adapter.queue.held(what):
            second = adapter.queue.unanswered_part(first)
            if second is None:
                logps = (yield from adapter.queue.call("forward_only", first, what))["logps"]
                loss, metrics, gradients = differentiate(loss_fn, rows, logps)
                second = {
                    "inputs": [{**row, "loss_scale": grad} for row, grad in zip(sent, gradients, strict=True)],
                    "given_loss": {"value": loss, "denominator": float(denominator)}, **common,
                }  # fmt: skip
                adapter.queue.note_part(first, second, {"metrics": metrics, "logps": logps})
            passed = yield from adapter.queue.call("forward_backward", second, what)
            kept = adapter.queue.finish_part()
        return result_of({"loss": passed["loss"], "num_tokens": passed["num_tokens"], **kept})

    forward_backward_custom, forward_backward_custom_async = twins(_forward_backward_custom)

    def _calculate_loss(self, /, *, adapter_name: str | None = None, **kwargs: Any) -> Call[Any]:
        """Return the loss of the last forward; the arguments are those of the loss."""
        return (yield from self._call(adapter_name, "calculate_loss", {"loss_inputs": _plain(kwargs)}))

    calculate_loss, calculate_loss_async = twins(_calculate_loss)

    def _backward(self, *, adapter_name: str | None = None) -> Call[Any]:
        """Add the gradients of the last calculated loss."""
        return (yield from self._call(adapter_name, "backward", {}))

    backward, backward_async = twins(_backward)

    # Step

    def _clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> Call[Any]:
        """Clip the gradients if a step is due, and return their norm before."""
        body = _clipping(max_grad_norm, norm_type) | _due(gradient_accumulation_steps, flush)
        return (yield from self._call(adapter_name, "clip_grad_norm", body))

    clip_grad_norm, clip_grad_norm_async = twins(_clip_grad_norm)

    def _step(
        self,
        *,
        optim_params: Mapping[str, Any] | None = None,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> Call[Any]:
        """Update the weights if a step is due."""
        body = _due(gradient_accumulation_steps, flush) | {"optim_params": optim_params}
        return (yield from self._call(adapter_name, "step", body))

    step, step_async = twins(_step)

    def _zero_grad(
        self,
        *,
        set_to_none: bool = True,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> Call[Any]:
        """Drop the gradients of a finished accumulation; of an unfinished one too with `flush`."""
        body = _due(gradient_accumulation_steps, flush) | {"set_to_none": set_to_none}
        return (yield from self._call(adapter_name, "zero_grad", body))

    zero_grad, zero_grad_async = twins(_zero_grad)

    def _lr_step(
        self,
        *,
        metrics: float | None = None,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> Call[Any]:
        """Advance the scheduler by the steps since the last call."""
        body = _due(gradient_accumulation_steps, flush) | {"metrics": metrics}
        return (yield from self._call(adapter_name, "lr_step", body))

    lr_step, lr_step_async = twins(_lr_step)

    def _clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2,
        *,
        adapter_name: str | None = None,
        gradient_accumulation_steps: int | None = None,
        flush: bool = False,
    ) -> Call[Any]:
        """`clip_grad_norm`, `step`, `zero_grad` and `lr_step`; returns the norm, 0 if no step was due."""
        body = _clipping(max_grad_norm, norm_type) | _due(gradient_accumulation_steps, flush)
        return (yield from self._call(adapter_name, "clip_grad_and_step", body))

    clip_grad_and_step, clip_grad_and_step_async = twins(_clip_grad_and_step)

    # Metrics and state

    def _calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> Call[Any]:
        """Return the numbers of all metrics since the last call."""
        return (yield from self._call(adapter_name, "calculate_metric", {"is_training": is_training}))

    calculate_metric, calculate_metric_async = twins(_calculate_metric)

    def _get_train_configs(self, *, adapter_name: str | None = None) -> Call[Any]:
        """Return a readable summary of what is trained and how."""
        return (yield from self._call(adapter_name, "get_train_configs", {}))

    get_train_configs, get_train_configs_async = twins(_get_train_configs)

    def _get_state_dict(self, *, adapter_name: str | None = None) -> Call[Any]:
        """Return the adapter's weights by PEFT's names, as arrays of numpy."""
        return (yield from self._call(adapter_name, "get_state_dict", {}))

    get_state_dict, get_state_dict_async = twins(_get_state_dict)

    def _save(
        self,
        name: str | None = None,
        output_dir: None = None,
        interval: int = 1,
        *,
        adapter_name: str | None = None,
        save_optimizer: bool = False,
        is_sampler: bool = False,
        consumed_train_samples: int = 0,
        overwrite: bool = True,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        push_to_hub: str | None = None,
        hub_token: str | None = None,
    ) -> Call["types.SaveResponse | None"]:
        """Save a checkpoint on the service.

        Args:
            name: letters, digits, '.', '_' and '-'; by default `checkpoint-step-<number of backward calls>`.
            output_dir: None; a service decides where it saves.
            interval: save only if the number of backward calls is a multiple of it; otherwise return None.
            adapter_name: the adapter.
            save_optimizer: include optimizer, scheduler and counters, for `resume_from_checkpoint`.
            is_sampler: save for sampling, as `adapter_uri` of a sampler.
            consumed_train_samples: number of samples that were consumed, which `resume_from_checkpoint` returns.
            overwrite: replace a checkpoint of this name.
            ttl_seconds: lifetime; None is unlimited.
            user_metadata: texts that are kept with the checkpoint.
            push_to_hub: begin to upload the checkpoint to this repository, which is private if it is new; see
                `upload_to_hub`. The result has the id of the upload, for `upload_status`.
            hub_token: a token of yours at the hub; by default that of `HF_TOKEN` or `MODELSCOPE_API_TOKEN`.

        Returns:
            the paths of the checkpoint.

        Raises:
            HubError: `push_to_hub` without a token; nothing was saved.
        """
        from twinkle_client import types

        if output_dir is not None:
            raise ArgumentError("output_dir: a service decides where it saves; leave it out")
        if push_to_hub is not None:
            hub_token = token_of(push_to_hub, hub_token)
        elif hub_token is not None:
            raise ArgumentError("hub_token has no effect without push_to_hub; leave it out")
        adapter = yield from self._found(adapter_name)
        if name is None or interval != 1:
            step = (yield from adapter.queue.call("get_progress", {}))["cur_step"]
            if step % interval:
                return None
            name = name or f"checkpoint-step-{step}"
        body = {
            "name": name,
            "save_optimizer": save_optimizer,
            "is_sampler": is_sampler,
            "consumed_train_samples": consumed_train_samples,
            "overwrite": overwrite,
            "ttl_seconds": ttl_seconds,
        }
        if user_metadata:
            body["user_metadata"] = {key: str(value) for key, value in user_metadata.items()}
        saved = yield from adapter.queue.call("save", body)
        path = saved["path"].replace("tinker://", "twinkle://", 1)
        self.client.note_save(path)
        begun: dict[str, Any] = {}
        if push_to_hub is not None:
            begun = yield from upload(self.client.connection, path, push_to_hub, hub_token, wait=False)
        return types.SaveResponse(twinkle_path=path, checkpoint_dir=path, upload_id=begun.get("request_id"))

    save, save_async = twins(_save)

    def sync_sampler(self, sampler: Any, adapter_name: str | None = None) -> str:
        """Make a sampler of the same service use the present weights of an adapter, until the next sync.

        `CheckpointEngineManager(model, sampler).sync_weights()` calls this. The weights stay on the service: the
        adapter is saved for sampling under one name, which the next sync replaces, and `sampler.sample` without
        `adapter_uri` then uses this checkpoint.

        Args:
            sampler: of `twinkle_client.sampler`.
            adapter_name: the adapter.

        Returns:
            The path of the checkpoint.

        Raises:
            ArgumentError: the sampler is not one of this service.
        """
        follow = getattr(sampler, "follow_checkpoint", None)
        connection = getattr(getattr(sampler, "client", None), "connection", None)
        if follow is None or connection is None or connection.base_url != self.client.connection.base_url:
            raise ArgumentError(
                f"sync_sampler: the sampler must be one of {self.client.connection.base_url}, such as "
                f"twinkle_client.sampler.vLLMSampler, got {sampler!r}"
            )
        saved = self.save(_SYNCED, is_sampler=True, adapter_name=adapter_name)
        path = str(saved)
        follow(path)
        return path

    def _load(
        self, name: Any, output_dir: None = None, *, adapter_name: str | None = None, load_optimizer: bool = False
    ) -> Call[None]:
        """Load the weights of a checkpoint.

        Args:
            name: its `twinkle://` path, or the name of a checkpoint of this adapter.
            output_dir: None; a service knows where it saved.
            adapter_name: the adapter.
            load_optimizer: load optimizer, scheduler and counters, too.
        """
        if output_dir is not None:
            raise ArgumentError("output_dir: give the path of the checkpoint, twinkle://<run>/weights/<name>, as name")
        yield from self._loaded(adapter_name, name, load_optimizer)

    load, load_async = twins(_load)

    def _resume_from_checkpoint(
        self, name: Any, *, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> Call[Any]:
        """Load a checkpoint with optimizer, scheduler and counters, or (`resume_only_model`) its weights alone.

        Returns:
            `cur_step`, `consumed_train_samples` and `gradient_accumulation_steps`.
        """
        progress = yield from self._loaded(adapter_name, name, not resume_only_model)
        names = ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")
        return result_of({name: progress[name] for name in names})

    resume_from_checkpoint, resume_from_checkpoint_async = twins(_resume_from_checkpoint)

    def _upload_to_hub(
        self,
        /,
        checkpoint_dir: Any,
        hub_model_id: str,
        hub_token: str | None = None,
        async_upload: bool = True,
        poll_interval: float = 5.0,
        **kwargs: Any,
    ) -> Call[Any]:
        """Upload a checkpoint of the service to a hub; see `twinkle_client.hub.upload`.

        Args:
            checkpoint_dir: what `save` returned, or its `twinkle://` path.
            hub_model_id: `hf://owner/name`, `ms://owner/name`, or `owner/name` of the service's default hub.
            hub_token: a token of yours at the hub; by default that of `HF_TOKEN` or `MODELSCOPE_API_TOKEN`.
            async_upload: as published, whether the service uploads in the background; it always does, and the call
                waits for the end of the upload in both cases.
            poll_interval: seconds between two questions for its state, while waiting.
            **kwargs: `wait=False` returns as soon as the upload has begun, see `upload_status`; `private`, `revision`,
                `path_in_repo`, `commit_message`, `timeout` and `progress`.

        Raises:
            HubError: the upload failed or was cancelled, or has not ended in time.
        """
        check_keywords(upload, kwargs, what="upload_to_hub", partial=True)
        connection = self.client.connection
        state = yield from upload(
            connection, checkpoint_dir, hub_model_id, hub_token, async_upload, poll_interval, **kwargs
        )
        return result_of(state)

    upload_to_hub, upload_to_hub_async = twins(_upload_to_hub)

    def _upload_status(self, request_id: str) -> Call[Any]:
        """Return the state of an upload that `upload_to_hub` began."""
        return result_of((yield from upload_status(self.client.connection, request_id)))

    upload_status, upload_status_async = twins(_upload_status)

    def _upload_every_save(
        self,
        /,
        hub_model_id: str | None,
        hub_token: str | None = None,
        *,
        adapter_name: str | None = None,
        **kwargs: Any,
    ) -> Call[None]:
        """Upload every later checkpoint of an adapter to a hub; None stops that. A restart of the service ends it.

        Args:
            hub_model_id: as for `upload_to_hub`.
            hub_token: as for `upload_to_hub`.
            adapter_name: the adapter.
            **kwargs: `private`, `revision` and `path_in_repo`.
        """
        check_keywords(set_automatic, kwargs, what="upload_every_save", partial=True)
        run = (yield from self._found(adapter_name)).model_id
        yield from set_automatic(self.client.connection, run, hub_model_id, hub_token, **kwargs)

    upload_every_save, upload_every_save_async = twins(_upload_every_save)

    def _loaded(self, adapter_name: str | None, name: Any, optimizer: bool) -> Call[Any]:
        body = {"path": str(name), "load_optimizer": optimizer}
        adapter = yield from self._found(adapter_name)
        return (yield from adapter.queue.call("load", body))

    # Parts

    def _found(self, name: str | None) -> Call[_Adapter]:
        """Return an adapter for a call."""
        yield from ()
        return self._adapter(name)

    def _adapter(self, name: str | None) -> _Adapter:
        with self._lock:
            name = self.adapter_name if name is None else name
            if name not in self._adapters:
                known = ", ".join(sorted(self._adapters)) or "none"
                raise ArgumentError(f"there is no adapter {name!r}; there are: {known} (add one: add_adapter_to_model)")
            return self._adapters[name]

    def _call(self, adapter_name: str | None, method: str, body: Mapping[str, Any]) -> Call[Any]:
        adapter = yield from self._found(adapter_name)
        return result_of((yield from adapter.queue.call(method, body)))

    def _rows(
        self, method: str, adapter_name: str | None, inputs: Any, kwargs: dict[str, Any], *, loss: bool = False
    ) -> Call[Any]:
        size = kwargs.pop("micro_batch_size", None)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ArgumentError(f"micro_batch_size must be an integer of at least 1, or None, got {size!r}")
        body = {name: kwargs.pop(name) for name in _OPTIONS if kwargs.get(name) is not None}
        kwargs = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
        if loss:
            body["loss_inputs"] = _plain(kwargs)
        elif kwargs:
            raise ArgumentError(f"{method}: there is no argument {sorted(kwargs)[0]!r}")
        return (yield from self._call(adapter_name, method, {"inputs": sendable_rows(inputs), **body}))


def _without_weights(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "loss_scale"}


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a loss that are given; None is what every optional argument is without being given."""
    return {name: value for name, value in arguments.items() if value is not None}


def _clipping(max_norm: float, norm_type: float) -> dict[str, Any]:
    return {"max_grad_norm": float(max_norm), "norm_type": "inf" if math.isinf(norm_type) else float(norm_type)}


def _due(accumulation: int | None, flush: bool) -> dict[str, Any]:
    return {"gradient_accumulation_steps": accumulation, "flush": flush}


def _bare(model_id: str | None) -> str | None:
    """Return the id of a model without the prefix of a hub."""
    if model_id is None:
        return None
    return model_id.removeprefix("ms://").removeprefix("hf://")
