"""`TorchSampler`: samples with torch alone, from its own weights or from the module that is being trained."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from twinkle import registry, remote_class, remote_function
from twinkle.data_format import InputFeature, SampledSequence, SampleResponse, SamplingParams, StopReason, Trajectory
from twinkle.errors import ArgumentError, DataError, TrainingStateError
from twinkle.platform import Platform
from twinkle.sampler import Sampler
from twinkle_torch.numerics import Evidence
from twinkle_transformers.backbone import context_of
from twinkle_transformers.lowrank.layout import AdapterVersion
from twinkle_transformers.router_replay import RouterReplay
from twinkle_transformers.sampling.engine import Limits, SamplingService
from twinkle_transformers.sampling.engine_args import read_engine_args
from twinkle_transformers.sampling.grammars import Grammar, Grammars
from twinkle_transformers.sampling.requests import (
    Prompt,
    PromptScores,
    Request,
    SampleHandle,
    SequenceState,
    StopRule,
    as_list,
    end_tokens,
    max_new_tokens_of,
    token_ids,
)
from twinkle_transformers.sampling.runner import Runner
from twinkle_transformers.sampling.sources import OwnWeights, Pick, SharedModel, Source
from twinkle_transformers.sync.receiving import ReceivesWeights

Row = InputFeature | Trajectory


@remote_class()
class TorchSampler(ReceivesWeights, Sampler):
    """A sampling engine with continuous batching: requests of all calls, threads and adapters share each decoding step.

    Log-probabilities are those of the model's distribution at the given temperature (at temperature 0, of temperature
    1), before every filter, penalty, bias and grammar: exactly what a training forward with `temperature=` computes. On
    request, log-probabilities of the filtered distribution that tokens were drawn from, and of the model at temperature
    1, are returned too (`sampled_logprobs`, `raw_logprobs`).

    With a `seed`, the noise of a token is a function of (seed, row of the call, sample, position): the same call gives
    the same tokens, for any batch size and any concurrent requests; torch's random generators are not used.

    Each step processes one token of every running sequence, and chunks of prompts beside them; threads that wait for a
    result take the steps. Models that do not support this are sampled call by call, which is slower and logged once.
    """

    def __init__(
        self,
        model_id: str | Path | None = None,
        engine_args: Mapping[str, Any] | None = None,
        device_mesh: Any = None,
        *,
        model: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        max_batch_size: int = 32,
        adapter_path: str | Path | None = None,
        cache_bytes: int | None = None,
        prefix_cache_bytes: int | None = None,
        prefill_tokens: int = 512,
        batch_invariant: bool = False,
        **kwargs: Any,
    ) -> None:
        """Load weights, or share those of a live model.

        Args:
            model_id: a folder, a GGUF file, or a reference `scheme://...`; the sampler then has its own weights.
            engine_args: the published form of options: those of vLLM's engine. `max_num_seqs` is `max_batch_size`,
                `max_num_batched_tokens` is `prefill_tokens`, `enable_prefix_caching=False` is `prefix_cache_bytes=0`,
                `max_model_len` limits a prompt with its sample, `dtype` and `trust_remote_code` are those of loading,
                and `enable_return_routed_experts=True` records the experts of mixture models, for
                `router_replay_action` of the trainer. Options that only tune vLLM are checked and have no effect.
            device_mesh: which workers share the rows of a call, under a runtime that places components.
            model: instead, a live model to share: a `TransformersModel`, or a module of transformers or PEFT.
            dtype: dtype of the sampler's own weights; see `load_model`.
            device: device of these weights; by default this process's device.
            max_batch_size: sequences decoded at once.
            adapter_path: the folder of a PEFT adapter that calls use by default; own weights only.
            cache_bytes: memory for keys and values of running requests; by default a third of the memory that is free
                at the first call.
            prefix_cache_bytes: memory for keys and values of earlier prompts, reused by prompts with the same
                beginning; by default a quarter of `cache_bytes`, 0 disables it. Concurrent prompts share theirs in any
                case.
            prefill_tokens: maximum number of prompt tokens in a step; more make prompts faster and running sequences
                slower.
            batch_invariant: pad every step to a multiple of 8 rows, cut prompts at multiples of `prefill_tokens` and
                share no prefixes, so that the same kernels compute a row in any batch. Otherwise results may differ by
                rounding, about 1e-6.
            **kwargs: for `load_model` (`attn_implementation`, `trust_remote_code`, `model_cls`, ...).

        Raises:
            ArgumentError: both or neither of `model_id` and `model`, or options that do not apply to them.
            ModelLoadError: the weights cannot be loaded.
            CheckpointError: the adapter is missing or belongs to another model.
            Unsupported: an option of `engine_args` that this sampler does not have, or experts of a model without
                routers.
        """
        engine = read_engine_args(engine_args)
        given = {
            "max_batch_size": (max_batch_size, 32), "prefill_tokens": (prefill_tokens, 512), "dtype": (dtype, "auto"),
            "prefix_cache_bytes": (prefix_cache_bytes, None),
        }  # fmt: skip
        kwargs = engine.merged(given, kwargs)
        max_batch_size, prefill_tokens, dtype, prefix_cache_bytes = (kwargs.pop(name) for name in given)
        self._max_length = engine.max_length
        if (model_id is None) == (model is None):
            raise ArgumentError("TorchSampler: give either model_id= (its own weights) or model= (a live model)")
        limits = Limits(max_batch_size, cache_bytes, prefix_cache_bytes, prefill_tokens, 8 if batch_invariant else 1)
        self.device_mesh = device_mesh
        self.max_batch_size = max_batch_size
        self._template: Any = None
        self._grammars: tuple[Any, Grammars] | None = None
        self._source: Source
        if model_id is not None:
            device = device if device is not None else Platform.get_local_device()
            self._source = OwnWeights(model_id, adapter_path=adapter_path, dtype=dtype, device=device, **kwargs)
            self._service = self._serve(limits, engine.routed_experts)
            if adapter_path is not None:
                self._source.pick("", None, self._service.runner)
            return
        unusable = {"dtype": dtype != "auto", "device": device is not None, "adapter_path": adapter_path is not None}
        if surplus := [*kwargs, *(name for name, is_given in unusable.items() if is_given)]:
            raise ArgumentError(
                f"TorchSampler: {', '.join(surplus)} cannot be set for a shared model; give model_id= to load weights"
            )
        self._source = SharedModel(model)
        self._service = self._serve(limits, engine.routed_experts)

    def _serve(self, limits: Limits, records_experts: bool) -> SamplingService:
        if records_experts:
            RouterReplay.of(self._source.base)  # an error now, rather than at the first call
        return SamplingService(self._source, limits, records_experts=records_experts)

    @property
    def model(self) -> nn.Module:
        """The module that is sampled from: the Hugging Face model, or PEFT's wrapper around it."""
        return self._source.module

    # Sampling

    @remote_function(dispatch="slice_dp", collect="flatten", lazy_collect=False)
    def sample(
        self,
        inputs: Row | Sequence[Row],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | Sequence[str | None] | None = "",
        adapter_path: str | Path | None = None,
        *,
        return_encoded: bool = False,
        use_base_model: bool = False,
        adapter_version: AdapterVersion | None = None,
        num_samples: int | None = None,
    ) -> list[SampleResponse]:
        """Return one response for each input, in order, with `num_samples` sequences each.

        Args:
            inputs: trajectories, which the template encodes with a generation prompt, or encoded rows; not both.
            sampling_params: `max_tokens=None` means 2048; every sequence also ends where the model's context ends.
                `max_tokens=0` draws nothing and scores the prompts. `logprobs=k` gives k pairs a token, the drawn
                token's first (0 is None). `prompt_logprobs=k` scores the prompt too, at the same temperature unless
                `prompt_temperature` is given.
            adapter_name: an adapter of the live model, or one added by `add_adapter_to_sampler`; "" is the live model's
                active adapter, or the sampler's default one; None is the base model. A list has one for each input.
            adapter_path: the folder of a PEFT adapter to sample with; a shared model reads it without adding it.
            return_encoded: require the encoded rows (`new_input_feature`), which are returned in any case where the
                sampler has a tokenizer: an error without one.
            use_base_model: sample without any adapter.
            adapter_version: instead, fixed weights: the result of `read_adapter`, or of a pool's `version`.
            num_samples: overrides `sampling_params.num_samples`.

        Raises:
            DataError: an input is empty, too long for the model's context, or contains ids outside its vocabulary.
            ArgumentError: an unknown adapter, or arguments that exclude each other.
            CheckpointError: the adapter is missing or belongs to another model.
            TrainingStateError: text or `return_encoded` needs a template, and none is set.
            CapacityError: a row's keys and values could never fit into `cache_bytes`.
            NonFiniteError: the model's logits, or the weights of an adapter, are NaN.
        """
        if return_encoded:
            _ = self.template
        handles = self._submit(
            as_list(inputs),
            _params(sampling_params, num_samples),
            _one_adapter(adapter_name, adapter_path, adapter_version, use_base_model),
        )
        try:
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def submit(
        self,
        inputs: Row,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | None = "",
        adapter_path: str | Path | None = None,
        *,
        use_base_model: bool = False,
        adapter_version: AdapterVersion | None = None,
        num_samples: int | None = None,
        cache_salt: str | None = None,
    ) -> SampleHandle:
        """Start to sample one input concurrently with other requests, and return a handle.

        Args:
            inputs: one trajectory or one encoded row.
            sampling_params: see `sample`.
            adapter_name: see `sample`.
            adapter_path: see `sample`.
            use_base_model: see `sample`.
            adapter_version: see `sample`.
            num_samples: see `sample`.
            cache_salt: names the owner of the prompt. Only requests with equal salts share keys and values, so that
                neither `cached_tokens` nor the time of a request shows whether others have sent the same prompt.
                Without one, all share.
        """
        rows = as_list(inputs)
        if len(rows) != 1:
            raise ArgumentError(f"submit takes one input, got {len(rows)}; call it for each, or use sample")
        params = _params(sampling_params, num_samples)
        adapter = _one_adapter(adapter_name, adapter_path, adapter_version, use_base_model)
        return self._submit(rows, params, adapter, cache_salt)[0]

    def sample_stream(
        self,
        inputs: Row,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | None = "",
        adapter_path: str | Path | None = None,
        *,
        use_base_model: bool = False,
    ) -> Iterator[tuple[str, StopReason | None]]:
        """Sample one input and yield its text as it grows: `(delta_text, finish_reason)`.

        The reason is None except with the last piece. Closing the iterator stops the request.

        Args:
            inputs: one trajectory or one encoded row.
            sampling_params: see `sample`; one sample.
            adapter_name: see `sample`.
            adapter_path: see `sample`.
            use_base_model: see `sample`.

        Raises:
            TrainingStateError: no template is set.
        """
        params = _params(sampling_params, None)
        if params.num_samples != 1:
            raise ArgumentError(f"sample_stream: num_samples must be 1, got {params.num_samples}; use submit")
        _ = self.template
        handle = self.submit(inputs, params, adapter_name, adapter_path, use_base_model=use_base_model)
        return _streamed(handle)

    def evidence(self) -> list[Evidence]:
        """Return the measurement of sampling step by step; it is made first if missing."""
        _ = self._service.engine
        evidence = self._service.evidence
        return [] if evidence is None else [evidence]

    def step(self) -> bool:
        """Take one step for all running requests, for a loop that does other work in between.

        It does not block: if another thread is taking steps, it returns True immediately. A model that cannot be
        sampled step by step completes the next call.

        Returns:
            False if there is no request.
        """
        return self._service.step()

    def read_adapter(self, path: str | Path) -> AdapterVersion:
        """Read a folder in PEFT's format for `adapter_version`; it stays in memory as long as the caller keeps it.

        Raises:
            CheckpointError: the folder is missing or contains an adapter of another model.
            Unsupported: it is more than low-rank terms of linear layers.
        """
        _ = self._source.module
        return self._source.read(path, self._service.runner)

    def _submit(
        self, rows: list[Any], params: SamplingParams, adapter: "_Adapter", cache_salt: str | None = None
    ) -> list[SampleHandle]:
        _ = self._source.module  # checks the module, once a call
        runner = self._service.runner
        features = self._encode(rows)
        stop = self._stop_rule(params)
        base = self._source.base
        vocabulary = int(base.get_input_embeddings().weight.shape[0])
        ids = [token_ids(feature, row, vocabulary) for row, feature in enumerate(features)]
        contexts = [size for size in (context_of(base.config), self._max_length) if size is not None]
        max_new_tokens = max_new_tokens_of(ids, params.max_tokens, min(contexts, default=None))
        if params.max_tokens is None and self._service.engine is not None:
            longest = self._service.engine.longest
            max_new_tokens = [
                max(1, min(n, longest - len(tokens) + 1)) for n, tokens in zip(max_new_tokens, ids, strict=True)
            ]
        prompts = [
            Prompt(row, tokens, n, PromptScores.of(tokens, params, row, vocabulary, alone=n == 0))
            for row, (tokens, n) in enumerate(zip(ids, max_new_tokens, strict=True))
        ]
        seed = secrets.randbits(63) if params.seed is None else params.seed
        with self._service.gate:  # the weights must not change between picking adapters and submitting
            picks = self._picks(adapter, len(rows), runner)
            served = self._service.submit(prompts, params, stop, seed, picks, cache_salt)
        return [
            SampleHandle(request, server, partial(self._response, feature))
            for (request, server), feature in zip(served, features, strict=True)
        ]

    def _picks(self, adapter: "_Adapter", count: int, runner: Runner | None) -> list[Pick]:
        """Return the adapter of each row."""
        if adapter.version is not None:
            return [self._source.pick_version(adapter.version, runner)] * count
        names = [None] * count if adapter.base else _names(adapter.name, count)
        picks = {name: self._source.pick(name, adapter.path, runner) for name in dict.fromkeys(names)}
        return [picks[name] for name in names]

    def reset_prefix_cache(self) -> None:
        """Clear the cache of earlier prompts.

        Changes of weights in place are detected automatically, except those through `Tensor.data`.
        """
        if (engine := self._service.engine) is not None:
            engine.forget_prefixes()

    # Text

    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """Set the template; `model_id` is that of the weights unless given.

        Args:
            template_cls: any form of component argument.
            **kwargs: for its constructor.
        """
        template = registry().resolve(template_cls, "template")
        if isinstance(template, type) and self._source.model_id is not None and "tokenizer" not in kwargs:
            kwargs.setdefault("model_id", self._source.model_id)
        self._template = registry().build(template, "template", **kwargs)

    @property
    def template(self) -> Any:
        """The template; by default `Template` with the tokenizer of the model's folder.

        Raises:
            TrainingStateError: none was set, and the folder of the shared module is unknown.
        """
        if self._template is None:
            if self._source.model_id is None:
                raise TrainingStateError(
                    "this sampler shares a bare module without a tokenizer; call set_template('Template', model_id=...)"
                )
            self.set_template("Template")
        return self._template

    def encode_trajectory(
        self, trajectory: Trajectory, adapter_name: str = "", add_generation_prompt: bool = True
    ) -> InputFeature:
        """Return the encoded row of a conversation; the template is the same for every adapter."""
        encoded: Any = self.template.encode(trajectory, add_generation_prompt=add_generation_prompt)
        if isinstance(encoded, list):
            raise DataError("the template splits a long conversation into several rows; sample with another truncation")
        return encoded  # type: ignore[no-any-return]

    def decode_response(self, token_ids: Sequence[int], adapter_name: str = "") -> str:
        """Return the text of tokens without special ones; the template is the same for every adapter."""
        return str(self.template.decode(list(token_ids), skip_special_tokens=True))

    # Changing the model

    def apply_patch(self, patch_cls: Any, **kwargs: Any) -> None:
        """Apply a patch, in any form of component argument, to the module that is sampled from."""
        from twinkle.patch import apply_patch

        apply_patch(self._source.module, patch_cls, **kwargs)
        self._service.rebuild()

    def add_adapter_to_sampler(self, adapter_name: str, config: str | Path) -> None:
        """Load a PEFT adapter from a folder (`config`) under a name; own weights only.

        Raises:
            CheckpointError: the folder is missing or contains an adapter of another model; nothing has changed then.
            Unsupported: the sampler shares a live model.
        """
        self._source.add(adapter_name, config, self._service.runner)

    def _encode(self, rows: list[Any]) -> list[InputFeature]:
        kinds = {"input_ids" in row for row in rows}
        if len(kinds) > 1:
            raise DataError("inputs mix encoded rows (with input_ids) and trajectories; give one kind a call")
        if kinds == {True}:
            return rows
        return [self.encode_trajectory(row) for row in rows]

    def _stop_rule(self, params: SamplingParams) -> StopRule:
        strings = tuple(string for string in params.stop_strings() if string)
        known = self._template is not None or self._source.model_id is not None
        tokenizer = self.template.tokenizer if known or strings else None
        all_ends = end_tokens(self._source.base, tokenizer)
        ids = (frozenset[int]() if params.endless else all_ends) | frozenset(params.stop_token_ids())
        return StopRule(ids, strings, tokenizer, self._grammar(params, all_ends))

    def _grammar(self, params: SamplingParams, ends: frozenset[int]) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        tokenizer = self.template.tokenizer
        if self._grammars is None or self._grammars[0] is not tokenizer:
            vocabulary = int(self._source.base.get_input_embeddings().weight.shape[0])
            self._grammars = tokenizer, Grammars(tokenizer, vocabulary, ends)
        return self._grammars[1].compile(params.structured_outputs)

    def _response(self, feature: InputFeature, request: Request) -> SampleResponse:
        result, scores = request.result, request.prompt.scores
        return SampleResponse(
            sequences=[self._sequence(feature, draft, request.params, request.stop) for draft in result.drafts],
            prompt_token_ids=list(request.prompt.ids),
            prompt_logprobs=scores.logprobs,
            topk_prompt_logprobs=scores.topk,
            prompt_target_logprobs=scores.targets,
            prompt_draws=scores.draws,
            cached_tokens=request.known,
        )

    def _sequence(
        self, feature: InputFeature, draft: SequenceState, params: SamplingParams, stop: StopRule
    ) -> SampledSequence:
        readable = stop.tokenizer is not None
        row = self.template.concat_input_feature(feature, draft.tokens) if readable and draft.tokens else None
        experts = None if draft.experts is None else draft.experts.numpy()
        if row is not None and experts is not None:
            row["routed_experts"] = experts
        return SampledSequence(
            stop_reason=draft.reason or "error",
            tokens=draft.tokens,
            logprobs=draft.logprobs if params.logprobs else None,
            topk_logprobs=draft.topk if params.topk_logprobs else None,
            sampled_logprobs=draft.sampled if params.sampled_logprobs else None,
            raw_logprobs=draft.raw if params.raw_logprobs else None,
            decoded=stop.trim(draft.tokens) if readable else None,
            new_input_feature=row,
            routed_experts=experts,
        )


def _params(given: SamplingParams | Mapping[str, Any] | None, num_samples: int | None) -> SamplingParams:
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if num_samples is None:
        return params
    return SamplingParams(**{**params.to_dict(), "num_samples": num_samples})


class _Adapter(NamedTuple):
    """The adapter arguments of a call."""

    name: str | Sequence[str | None] | None
    path: str | Path | None
    version: AdapterVersion | None
    base: bool


def _one_adapter(
    name: str | Sequence[str | None] | None, path: str | Path | None, version: AdapterVersion | None, base: bool
) -> _Adapter:
    if base and (name or path is not None or version is not None):
        raise ArgumentError("sample: use_base_model=True excludes adapter_name, adapter_path and adapter_version")
    if bool(name) + (path is not None) + (version is not None) > 1:
        raise ArgumentError("sample: give one of adapter_name, adapter_path and adapter_version, not several")
    return _Adapter(name, path, version, base)


def _names(given: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Return the adapter of each row."""
    if given is None or isinstance(given, str):
        return [given] * count
    names = list(given)
    if len(names) != count:
        raise ArgumentError(f"sample: {len(names)} adapter names for {count} inputs; give one name, or one for each")
    return names


def _streamed(handle: SampleHandle) -> Iterator[tuple[str, StopReason | None]]:
    try:
        yield from handle.text()
    finally:
        handle.cancel()
