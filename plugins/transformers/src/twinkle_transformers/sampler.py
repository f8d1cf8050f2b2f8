"""`TorchSampler`: samples with torch alone, from weights of its own or from the module that is being trained."""

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
from twinkle_transformers.sampling.prompts import PromptScores, as_list, context_of, end_tokens, rooms, token_ids
from twinkle_transformers.sampling.requests import Prompt, Request, SampleHandle, SequenceState
from twinkle_transformers.sampling.runner import Runner
from twinkle_transformers.sampling.service import Limits, SamplingService
from twinkle_transformers.sampling.sources import OwnWeights, Pick, SharedModel, Source
from twinkle_transformers.sampling.stopping import StopRule
from twinkle_transformers.sync.receiving import ReceivesWeights
from twinkle_transformers.versions import AdapterVersion

Row = InputFeature | Trajectory


@remote_class()
class TorchSampler(ReceivesWeights, Sampler):
    """An engine: all requests, of any call, thread and adapter, run in one batch, a step at a time.

    Log-probabilities are those of the model's distribution at the given temperature (at temperature 0, of temperature
    1), before top-k, top-p and repetition penalty: exactly what a training forward with `temperature=` computes. On
    request they come with those of the distribution that was really drawn from, and of the model's own
    (`sampled_logprobs`, `raw_logprobs`).

    With a `seed`, the noise of a token is a function of (seed, row of the call, sample, position): the same call gives
    the same tokens, whatever the batch size and whatever else is being sampled; torch's random generators are not used.

    Each step reads one token of every running sequence and pieces of prompts beside them; whoever waits for a result
    takes the steps. Models that cannot run so are sampled call by call, slower, and the log says so once.
    """

    def __init__(
        self,
        model_id: str | Path | None = None,
        *,
        model: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        device_mesh: Any = None,
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
            model_id: a folder, a GGUF file, or a reference `scheme://...`: weights of the sampler's own.
            model: instead, a live model to share: a `TransformersModel`, or a module of transformers or PEFT.
            dtype: of the sampler's own weights; see `load_model`.
            device: where they go; by default this process's device.
            device_mesh: which workers share the rows of a call, under a runtime that places components.
            max_batch_size: sequences decoded at once.
            adapter_path: the folder of a PEFT adapter that calls use by default; own weights only.
            cache_bytes: memory for keys and values of what is being sampled; by default a third of what is free when
                the first call begins.
            prefix_cache_bytes: memory for keys and values of earlier prompts, which a prompt that begins alike need not
                compute again; by default a quarter of `cache_bytes`, 0 keeps none. Prompts that run at the same time
                share how they begin in any case.
            prefill_tokens: tokens of prompts that are read beside one token of each running sequence; more at once make
                prompts faster and what runs beside them slower.
            batch_invariant: pad every step to a multiple of 8 rows, so that a row's numbers come from the same kernels
                whatever is beside it, and share no prompt's beginning with that. Otherwise they may differ by rounding,
                about 1e-6.
            **kwargs: for `load_model` (`attn_implementation`, `trust_remote_code`, `model_cls`, ...).

        Raises:
            ArgumentError: both or neither of `model_id` and `model`, or options that do not go with them.
            ModelLoadError: the weights cannot be loaded.
            CheckpointError: the adapter is missing or belongs to another model.
        """
        if (model_id is None) == (model is None):
            raise ArgumentError("TorchSampler: give either model_id= (weights of its own) or model= (a live model)")
        limits = Limits(max_batch_size, cache_bytes, prefix_cache_bytes, prefill_tokens, 8 if batch_invariant else 1)
        self.device_mesh = device_mesh
        self.max_batch_size = max_batch_size
        self._template: Any = None
        self._source: Source
        if model_id is not None:
            device = device if device is not None else Platform.get_local_device()
            self._source = OwnWeights(model_id, adapter_path=adapter_path, dtype=dtype, device=device, **kwargs)
            self._service = SamplingService(self._source, limits)
            if adapter_path is not None:
                self._source.pick("", None, self._service.runner)
            return
        given = {"dtype": dtype != "auto", "device": device is not None, "adapter_path": adapter_path is not None}
        if surplus := [*kwargs, *(name for name, is_given in given.items() if is_given)]:
            raise ArgumentError(
                f"TorchSampler: {', '.join(surplus)} belong to weights of its own (model_id=); a shared model has them"
            )
        self._source = SharedModel(model)
        self._service = SamplingService(self._source, limits)

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
                `prompt_temperature` says another.
            adapter_name: an adapter of the live model, or one added by `add_adapter_to_sampler`; "" is the live model's
                active adapter, or the sampler's default one; None is the base model. A list has one for each input.
            adapter_path: the folder of a PEFT adapter to sample with; a shared model reads it without adding it.
            use_base_model: sample without any adapter.
            adapter_version: instead, weights at one moment: what `read_adapter`, or a pool's `version`, returned.
            num_samples: wins over `sampling_params.num_samples`.

        Raises:
            DataError: an input is empty, too long for the model's context, or holds ids outside its vocabulary.
            ArgumentError: an unknown adapter, or arguments that exclude each other.
            CheckpointError: the adapter is missing or belongs to another model.
            TrainingStateError: text is needed but no template is set.
            CapacityError: a row's keys and values could never fit into `cache_bytes`.
            NonFiniteError: the model's logits, or the weights of an adapter, are NaN.
        """
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
    ) -> SampleHandle:
        """Begin to sample one input, beside whatever else is being sampled, and return a handle on it.

        Args:
            inputs: one trajectory or one encoded row.
            sampling_params: see `sample`.
            adapter_name: see `sample`.
            adapter_path: see `sample`.
            use_base_model: see `sample`.
            adapter_version: see `sample`.
            num_samples: see `sample`.
        """
        rows = as_list(inputs)
        if len(rows) != 1:
            raise ArgumentError(f"submit takes one input, not {len(rows)}; call it for each, or use sample")
        params = _params(sampling_params, num_samples)
        return self._submit(rows, params, _one_adapter(adapter_name, adapter_path, adapter_version, use_base_model))[0]

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

        The reason is None but with the last piece. Closing the iterator stops the request.

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
            raise ArgumentError(f"sample_stream: num_samples is {params.num_samples}; a stream has one (use submit)")
        _ = self.template
        handle = self.submit(inputs, params, adapter_name, adapter_path, use_base_model=use_base_model)
        return _streamed(handle)

    def evidence(self) -> list[Evidence]:
        """Return what was measured about sampling step by step, after measuring it if that was not done yet."""
        _ = self._service.engine
        evidence = self._service.evidence
        return [] if evidence is None else [evidence]

    def step(self) -> bool:
        """Take one step for whatever is being sampled, for a loop that does other work in between.

        It waits for nobody: where another thread is taking steps, it returns True at once. A model that cannot be
        sampled step by step serves the next call whole.

        Returns:
            False if there was nothing to do.
        """
        return self._service.step()

    def read_adapter(self, path: str | Path) -> AdapterVersion:
        """Read a folder that PEFT wrote, for `adapter_version`; whoever holds it decides how long it stays in memory.

        Raises:
            CheckpointError: the folder is missing or holds an adapter of another model.
            Unsupported: it is more than low-rank terms of linear layers.
        """
        _ = self._source.module
        return self._source.read(path, self._service.runner)

    def _submit(self, rows: list[Any], params: SamplingParams, adapter: "_Adapter") -> list[SampleHandle]:
        _ = self._source.module  # which checks it, once a call
        runner = self._service.runner
        features = self._encode(rows)
        stop = self._stop_rule(params)
        base = self._source.base
        vocabulary = int(base.get_input_embeddings().weight.shape[0])
        ids = [token_ids(feature, row, vocabulary) for row, feature in enumerate(features)]
        room = rooms(ids, params.max_tokens, context_of(base.config))
        if params.max_tokens is None and self._service.engine is not None:
            longest = self._service.engine.longest
            room = [max(1, min(n, longest - len(tokens) + 1)) for n, tokens in zip(room, ids, strict=True)]
        prompts = [
            Prompt(row, tokens, n, PromptScores.of(tokens, params, row, vocabulary, alone=n == 0))
            for row, (tokens, n) in enumerate(zip(ids, room, strict=True))
        ]
        seed = secrets.randbits(63) if params.seed is None else params.seed
        with self._service.gate:  # or the weights could change between what is picked and what begins
            picks = self._picks(adapter, len(rows), runner)
            served = self._service.submit(prompts, params, stop, seed, picks)
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
        """Forget what is kept of earlier prompts.

        Weights that change in place are noticed; only what writes through `Tensor.data` is not.
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
        """The template; where none was set, `Template` of the weights' own folder.

        Raises:
            TrainingStateError: none was set and the shared module does not say where its tokenizer is.
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

    def add_adapter_to_sampler(self, adapter_name: str, path: str | Path) -> None:
        """Load a PEFT adapter from a folder under a name; own weights only.

        Raises:
            CheckpointError: the folder is missing or holds an adapter of another model; nothing has changed then.
            Unsupported: the sampler shares a live model.
        """
        self._source.add(adapter_name, path, self._service.runner)

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
        ends = frozenset[int]() if params.endless else end_tokens(self._source.base, tokenizer)
        ids = ends | frozenset(params.stop_token_ids())
        return StopRule(ids, strings, tokenizer)

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
        return SampledSequence(
            stop_reason=draft.reason or "error",
            tokens=draft.tokens,
            logprobs=draft.logprobs if params.logprobs else None,
            topk_logprobs=draft.topk if params.topk_logprobs else None,
            sampled_logprobs=draft.sampled if params.sampled_logprobs else None,
            raw_logprobs=draft.raw if params.raw_logprobs else None,
            decoded=stop.trim(draft.tokens) if readable else None,
            new_input_feature=(
                self.template.concat_input_feature(feature, draft.tokens) if readable and draft.tokens else None
            ),
        )


def _params(given: SamplingParams | Mapping[str, Any] | None, num_samples: int | None) -> SamplingParams:
    params = given if isinstance(given, SamplingParams) else SamplingParams.from_dict(given or {})
    if num_samples is None:
        return params
    return SamplingParams(**{**params.to_dict(), "num_samples": num_samples})


class _Adapter(NamedTuple):
    """What a call says about the adapter to sample with."""

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
