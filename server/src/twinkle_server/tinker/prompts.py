"""Prompts and the options of sampling, checked before they are written into the log."""

import math
from collections.abc import Mapping
from typing import Any

from twinkle_server.payloads import Sample

_TARGETS = ("data", "shape", "sparse_crow_indices", "sparse_col_indices")
_MOST_CELLS = 2**24


def prompt_tokens(prompt: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        ValueError: it has another form, or holds something else than text.
    """
    from twinkle_server.wire import tinker_pb2 as pb
    from twinkle_server.wire.codec import datum_tokens
    from twinkle_server.wire.json_bodies import write_chunks

    datum = pb.Datum()
    try:
        write_chunks(prompt, datum)
        tokens: list[int] = datum_tokens(datum).tolist()
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    if not tokens:
        raise ValueError("prompt: there are no tokens in it; send at least one")
    return tokens


def check_sample(sample: Sample, context: int) -> int:
    """Return what a request costs, in tokens.

    Args:
        sample: the request, prompt included.
        context: tokens that prompt and sequence may have together; 0 while nobody knows, and then the engine checks it.

    Raises:
        ValueError: an option is none that sampling can have; the message names it.
    """
    _check_params(sample)
    prompt = len(sample.tokens)
    longest = sample.max_tokens if sample.max_tokens is not None else max(context, prompt + 1) - prompt
    if context and prompt + longest > context:
        raise ValueError(
            f"the prompt has {prompt} tokens and max_tokens is {sample.max_tokens}; the model's context is {context}"
        )
    _check_size(sample, longest)
    _check_scores(sample)
    return prompt + sample.count * longest


def _check_size(sample: Sample, longest: int) -> None:
    wide = sample.topk_prompt_logprobs + sample.alternatives
    cells = wide * len(sample.tokens) + sample.topk_sample_logprobs * sample.count * longest
    if cells > _MOST_CELLS:
        raise ValueError(
            f"topk_prompt_logprobs, topk_sample_logprobs and prompt_alt_tokens_k ask for {cells} numbers together; "
            f"there may be {_MOST_CELLS}"
        )


def _check_params(sample: Sample) -> None:
    if sample.max_tokens is not None and sample.max_tokens < 1:
        raise ValueError(f"max_tokens is {sample.max_tokens}; it is at least 1")
    if not math.isfinite(sample.temperature) or sample.temperature < 0:
        raise ValueError(f"temperature is {sample.temperature}; it is 0 (greedy) or more")
    if sample.top_k < 1 and sample.top_k != -1:
        raise ValueError(f"top_k is {sample.top_k}; it is at least 1, or -1 for all")
    if not 0 < sample.top_p <= 1:
        raise ValueError(f"top_p is {sample.top_p}; it is more than 0 and at most 1")
    if sample.stop is not None and "" in sample.stop:
        raise ValueError("stop holds an empty text, which would stop everywhere")


def _check_scores(sample: Sample) -> None:
    if sample.prompt_logprobs_last_n is not None:
        if not sample.prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n needs prompt_logprobs")
        if not 1 <= sample.prompt_logprobs_last_n <= len(sample.tokens) - 1:
            raise ValueError(
                f"prompt_logprobs_last_n is {sample.prompt_logprobs_last_n}; "
                f"1 to {len(sample.tokens) - 1} of this prompt's tokens can be scored"
            )
    if sample.targets is None:
        return
    from twinkle_server.wire.arrays import read_sparse, read_tensor
    from twinkle_server.wire.json_bodies import tensor_message

    sample.targets = {name: sample.targets[name] for name in _TARGETS if sample.targets.get(name) is not None}
    tensor = tensor_message({**sample.targets, "dtype": "int64"}, "target_prompt_logprobs")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        read_sparse(tensor)
    else:
        read_tensor(tensor, "target_prompt_logprobs")
    rows = tensor.shape[0] if len(tensor.shape) else 0
    if len(tensor.shape) != 2 or rows != len(sample.tokens) - 1:
        raise ValueError(
            f"target_prompt_logprobs has the shape {tuple(tensor.shape)}; "
            f"[{len(sample.tokens) - 1}, K] is meant, a row for each prompt token after the first"
        )
