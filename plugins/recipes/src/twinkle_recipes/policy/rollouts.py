"""Samples the answers of a step, in groups, as rows for training; reproducible by seed."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.data_format import SampledSequence, SamplingParams
from twinkle.errors import DataError
from twinkle_recipes.config import DataConfig, RunConfig
from twinkle_recipes.policy.config import DrawingConfig, GRPOConfig


@dataclass(frozen=True)
class Answer:
    """One sampled answer.

    Attributes:
        row: prompt and answer as one encoded row, with `messages` and `user_data`; it trains the answer's tokens.
        logps: the log-probability of each of its tokens as the sampler computed it.
        text: the decoded answer.
        stop_reason: why it ended; `length` means that it was truncated.
        group: number of its prompt in the step.
    """

    row: Mapping[str, Any]
    logps: list[float]
    text: str
    stop_reason: str
    group: int

    @property
    def prompt(self) -> str:
        """The last message of the user."""
        texts = [turn["content"] for turn in self.row.get("messages", ()) if turn["role"] == "user"]
        return str(texts[-1]) if texts else ""


def build_sampler(config: RunConfig, settings: DrawingConfig, model: Any) -> Any:
    """Return the sampler of `settings`, on the trained module or with its own weights."""
    data = config.data
    source = {"model": model} if settings.weights == "shared" else {"model_id": config.model.id}
    sampler = config.build("sampler", settings.name, **source, **settings.args)
    lengths = {"max_length": data.max_length, "truncation_strategy": data.truncation}
    sampler.set_template(
        config.component("template", data.template), model_id=config.model.id, **lengths, **data.template_args
    )
    return sampler


def params_of(settings: DrawingConfig, **others: Any) -> SamplingParams:
    """Return the configured sampling parameters, updated with `others`."""
    drawing = {name: getattr(settings, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stop")}
    return SamplingParams(**(drawing | others))


def check_room(
    sampler: Any,
    loaders: Iterable[Any],
    data: DataConfig,
    prompt_of: Callable[[Any], Any] = lambda row: row,
    length_of: Callable[[Any], int] = lambda row: len(row["input_ids"]),
) -> None:
    """Sample one token after the longest prompt, to detect prompts that fill the model's context before step 1.

    Args:
        sampler: the sampler of the run.
        loaders: loaders of all rows; None is skipped.
        data: configuration of the data set.
        prompt_of: returns the prompt of a row.
        length_of: returns the number of tokens of its prompt.

    Raises:
        DataError: the model's context is shorter than the prompt.
    """
    datasets = [loader.dataset for loader in loaders if loader is not None]
    longest = max((dataset[number] for dataset in datasets for number in range(len(dataset))), key=length_of)
    try:
        sampler.sample([prompt_of(longest)], SamplingParams(max_tokens=1, temperature=0.0))
    except DataError as error:
        raise DataError(
            f"data set {data.id}: its longest prompt has {length_of(longest)} tokens, which leaves no room for an "
            f"answer ({error}); set data.max_length with data.truncation delete or left"
        ) from error


def sample(sampler: Any, prompts: Sequence[Mapping[str, Any]], config: GRPOConfig, step: int) -> list[Answer]:
    """Return `num_generations` answers to each prompt, grouped by prompt.

    The answers are a function of (seed of the run, step, prompt, answer), so a repeated step gives the same answers.
    """
    settings = config.sampling
    params = params_of(settings, num_samples=settings.num_generations, logprobs=1, seed=seed_of(config.seed, step))
    return _answers(sampler.sample(list(prompts), params), prompts)


def answer_greedily(sampler: Any, prompts: Sequence[Mapping[str, Any]], config: GRPOConfig) -> list[Answer]:
    """Return the most probable answer to each prompt."""
    return _answers(sampler.sample(list(prompts), params_of(config.sampling, temperature=0.0)), prompts)


def sizes(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Return the lengths of the answers of a step, and the tokens per second of the whole step."""
    lengths = [len(answer.logps) for answer in answers]
    tokens = sum(len(answer.row["input_ids"]) for answer in answers)
    return {
        "completion_length": sum(lengths) / len(lengths),
        "truncated": sum(answer.stop_reason == "length" for answer in answers) / len(answers),
        "tokens": tokens,
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }


def seed_of(seed: int, step: int) -> int:
    """Return a seed in [0, 2^63) that depends on both numbers alone."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _answers(responses: Sequence[Any], prompts: Sequence[Mapping[str, Any]]) -> list[Answer]:
    return [
        _answer(sequence, prompts[group], group)
        for group, response in enumerate(responses)
        for sequence in response.sequences
    ]


def _answer(sequence: SampledSequence, prompt: Mapping[str, Any], group: int) -> Answer:
    row: Any = sequence.new_input_feature
    if row is None:  # an empty answer gets a reward, but has no tokens to train
        row = {**prompt, "messages": [*prompt.get("messages", ()), {"role": "assistant", "content": ""}]}
    logps = [pairs[0][1] for pairs in sequence.logprobs or ()]
    return Answer(row, logps, sequence.decoded or "", sequence.stop_reason, group)
