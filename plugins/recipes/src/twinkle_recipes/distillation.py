"""Teacher and student of distillation: what the teacher thinks of rows, and rows that the student samples itself."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from twinkle._registry import registry
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.errors import ConfigError
from twinkle_recipes.building import build_frozen
from twinkle_recipes.data import encode_rows
from twinkle_recipes.distillation_config import DistillationConfig
from twinkle_recipes.rollouts import seed_of

Teacher = Callable[[Sequence[Any]], dict[str, Any]]
"""Takes rows, and returns what the loss needs of the teacher, as keyword arguments."""


def build_teacher(config: DistillationConfig, student: Any) -> Teacher:
    """Load the teacher.

    Raises:
        ConfigError: it has other tokens than the student.
    """
    model = build_frozen(config, config.teacher)
    check_vocabularies(config, student, model)
    topk = config.teacher.topk

    def whole(rows: Sequence[Any]) -> dict[str, Any]:
        outputs = model.forward_only(inputs=rows, return_logits=True, **config.in_memory)
        return {"teacher_logits": outputs["logits"]}

    def most_probable(rows: Sequence[Any]) -> dict[str, Any]:
        # The loss takes them as they come, so they are made at its temperature.
        temperature = config.loss.args.get("temperature", 1.0)
        outputs = model.forward_only(inputs=rows, topk_logprobs=topk, temperature=temperature, **config.in_memory)
        return {"teacher_topk_logprobs": outputs["topk_logprobs"], "teacher_topk_indices": outputs["topk_indices"]}

    return whole if topk is None else most_probable


def check_vocabularies(config: DistillationConfig, student: Any, teacher: Any) -> None:
    """Compare the tokens of student and teacher, and how many their logits are of.

    Raises:
        ConfigError: they differ; names both sizes.
    """
    ids = config.model.id, config.teacher.id
    own, theirs = (registry().build(config.data.template, "template", model_id=model).tokenizer for model in ids)
    own, theirs = own.get_vocab(), theirs.get_vocab()
    if different := len(own.items() ^ theirs.items()):
        raise ConfigError(
            f"the teacher {ids[1]} has a vocabulary of {len(theirs)} tokens and the student {ids[0]} one of "
            f"{len(own)}, and {different} entries differ; they must share a tokenizer, so choose a teacher of the same "
            "family"
        )
    sizes = [model.model.config.get_text_config().vocab_size for model in (student, teacher)]
    if sizes[0] != sizes[1] and config.teacher.topk is None:
        raise ConfigError(
            f"the logits of the teacher {ids[1]} are over {sizes[1]} tokens and those of the student {ids[0]} over "
            f"{sizes[0]}, padding included; the tokens are the same, so compare the most probable ones: teacher.topk 64"
        )


class Student:
    """Samples answers from the model that is trained, the same for the same run and step.

    Args:
        config: of the run.
        model: the student.
    """

    def __init__(self, config: DistillationConfig, model: Any) -> None:
        self._config = config
        settings, data = config.sampling, config.data
        source = {"model": model} if settings.weights == "shared" else {"model_id": config.model.id}
        self._sampler: Any = registry().build(settings.name, "sampler", **source, **settings.args)
        lengths = {"max_length": data.max_length, "truncation_strategy": data.truncation}
        self._sampler.set_template(data.template, model_id=config.model.id, **lengths, **data.template_args)
        self._syncing = CheckpointEngineManager(model=model, sampler=self._sampler)

    def answers(self, rows: Sequence[Mapping[str, Any]], step: int) -> list[Any]:
        """Return the student's answers to the prompts of some rows, with its weights as they are now.

        What is drawn is a function of (seed of the run, step, place of the row). An answer without a token is left
        out: there is nothing in it to learn from.
        """
        settings = self._config.sampling
        self._syncing.sync_weights(merge_and_sync=settings.merge_and_sync)
        self._sampler.reset_prefix_cache()
        params = SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=settings.stop,
            seed=seed_of(self._config.seed, step),
        )
        responses = self._sampler.sample([{"messages": asked(row["messages"])} for row in rows], params)
        sampled = [response.sequences[0].new_input_feature for response in responses]
        return [row for row in sampled if row is not None]


def is_on_policy(config: DistillationConfig, step: int) -> bool:
    """Return whether the student answers in this step, which a coin decides (arXiv:2306.13649, algorithm 1)."""
    return Random(seed_of(config.seed, step)).random() < config.on_policy


def asked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation without the answer that it may end with."""
    return list(messages[:-1] if messages[-1]["role"] == "assistant" else messages)


def encode_prompts(dataset: Any, config: DistillationConfig) -> None:
    """Turn conversations, whether they end with an answer or not, into prompts in tokens."""
    dataset.map(lambda columns: {"messages": [asked(messages) for messages in columns["messages"]]})
    encode_rows(dataset, config)
