"""Teacher and student of distillation: what the teacher thinks of rows, and rows that the student samples itself."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import IGNORE_INDEX
from twinkle.errors import ConfigError, EncodeError
from twinkle_recipes.data import encode_rows
from twinkle_recipes.distillation.config import DistillationConfig
from twinkle_recipes.policy.rollouts import build_sampler, check_room, params_of, seed_of
from twinkle_recipes.run.building import build_frozen, check_tokens

Teacher = Callable[[Sequence[Any]], dict[str, Any]]
"""Takes rows, and returns what the loss needs of the teacher, as keyword arguments."""


def build_teacher(config: DistillationConfig, student: Any) -> Teacher:
    """Load the teacher.

    Raises:
        ConfigError: it has other tokens than the student.
    """
    check_tokens(config, config.teacher.id, "teacher")
    model = build_frozen(config, config.teacher)
    check_logits(config, student, model)
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


def check_logits(config: DistillationConfig, student: Any, teacher: Any) -> None:
    """Compare how many tokens the logits of student and teacher are of.

    Raises:
        ConfigError: they differ, and whole distributions are to be compared; or `teacher.topk` asks for more.
    """
    sizes = [model.model.config.get_text_config().vocab_size for model in (student, teacher)]
    if config.teacher.topk is not None and config.teacher.topk > min(sizes):
        raise ConfigError(
            f"teacher.topk {config.teacher.topk} is more than the {min(sizes)} tokens that there are; give less, or "
            "leave it out to compare whole distributions"
        )
    if sizes[0] != sizes[1] and config.teacher.topk is None:
        raise ConfigError(
            f"the logits of the teacher {config.teacher.id} are over {sizes[1]} tokens and those of the student "
            f"{config.model.id} over {sizes[0]}, padding included; the tokens are the same, so compare the most "
            "probable ones: teacher.topk 64"
        )


class Student:
    """Samples answers from the model that is trained, the same for the same run and step.

    Args:
        config: of the run.
        model: the student.
    """

    def __init__(self, config: DistillationConfig, model: Any) -> None:
        self._config = config
        self.sampler = build_sampler(config, config.sampling, model)
        self._syncing = CheckpointEngineManager(model=model, sampler=self.sampler)

    def check_room(self, loaders: Iterable[Any]) -> None:
        """Find out whether there is room for an answer behind every prompt: see `rollouts.check_room`."""
        check_room(self.sampler, loaders, self._config.data, _prompt, _prompt_length)

    def answers(self, rows: Sequence[Mapping[str, Any]], step: int) -> list[Any]:
        """Return the student's answers to the prompts of some rows, with its weights as they are now.

        What is drawn is a function of (seed of the run, step, place of the row). An answer without a token is left
        out: there is nothing in it to learn from.
        """
        settings = self._config.sampling
        self._syncing.sync_weights(merge_and_sync=settings.merge_and_sync)
        self.sampler.reset_prefix_cache()
        params = params_of(settings, seed=seed_of(self._config.seed, step))
        responses = self.sampler.sample([_prompt(row) for row in rows], params)
        sampled = [response.sequences[0].new_input_feature for response in responses]
        return [row for row in sampled if row is not None]


def is_on_policy(config: DistillationConfig, step: int) -> bool:
    """Return whether the student answers in this step, which a coin decides (arXiv:2306.13649, algorithm 1)."""
    return Random(seed_of(config.seed, step)).random() < config.on_policy


def asked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation without the answer that it may end with."""
    return list(messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages)


def encode_conversations(dataset: Any, config: DistillationConfig) -> None:
    """Turn conversations into tokens; where the student answers in all steps, without the answers that they end with.

    Raises:
        EncodeError: the student is to answer, and there is no question; or the answer given is to be learnt from, and
            there is none. Names the row.
    """
    for number in range(len(dataset)):
        messages = dataset[number].get("messages") or ()
        if config.on_policy > 0 and not asked(messages):
            raise EncodeError(
                f"row {number}: there is nothing before the answer that the student could answer itself; leave the "
                "row out, or learn from given answers alone: on_policy 0"
            )
        if config.on_policy < 1 and messages and all(message["role"] != "assistant" for message in messages):
            raise EncodeError(
                f"row {number} has no answer, and with on_policy {config.on_policy:g} given answers are learnt from "
                "too; give it one, or let the student answer always: on_policy 1"
            )
    if config.samples:
        dataset.map(lambda columns: {"messages": [asked(messages) for messages in columns["messages"]]})
    encode_rows(dataset, config)


def _prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"messages": asked(row["messages"])}


def _prompt_length(row: Mapping[str, Any]) -> int:
    """Return the number of tokens of a row before its last trained answer; all tokens if nothing is trained."""
    labels = row.get("labels") or ()
    first = max((place for place, label in enumerate(labels) if label != IGNORE_INDEX), default=None)
    if first is None:
        return len(row["input_ids"])
    while first > 0 and labels[first - 1] != IGNORE_INDEX:
        first -= 1
    return first + 1  # a label is one position before its token
