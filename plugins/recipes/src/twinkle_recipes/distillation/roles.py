"""Teacher and student of distillation: the teacher's outputs for rows, and rows that the student samples."""

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
"""Maps rows to the teacher's outputs, as keyword arguments of the loss."""


def build_teacher(config: DistillationConfig, student: Any) -> Teacher:
    """Load the teacher.

    Raises:
        ConfigError: its vocabulary differs from the student's.
    """
    check_tokens(config, config.teacher.id, "teacher")
    model = build_frozen(config, config.teacher)
    check_logits(config, student, model)
    topk = config.teacher.topk

    def whole(rows: Sequence[Any]) -> dict[str, Any]:
        outputs = model.forward_only(inputs=rows, return_logits=True, **config.in_memory)
        return {"teacher_logits": outputs["logits"]}

    def most_probable(rows: Sequence[Any]) -> dict[str, Any]:
        # The loss does not rescale the teacher's outputs, so they are computed at its temperature.
        temperature = config.loss.args.get("temperature", 1.0)
        outputs = model.forward_only(inputs=rows, topk_logprobs=topk, temperature=temperature, **config.in_memory)
        return {"teacher_topk_logprobs": outputs["topk_logprobs"], "teacher_topk_indices": outputs["topk_indices"]}

    return whole if topk is None else most_probable


def check_logits(config: DistillationConfig, student: Any, teacher: Any) -> None:
    """Compare the vocabulary sizes of the logits of student and teacher.

    Raises:
        ConfigError: they differ and full distributions are compared, or `teacher.topk` exceeds them.
    """
    sizes = [model.model.config.get_text_config().vocab_size for model in (student, teacher)]
    if config.teacher.topk is not None and config.teacher.topk > min(sizes):
        raise ConfigError(
            f"teacher.topk must be at most the vocabulary size, {min(sizes)}, got {config.teacher.topk}; reduce it, or "
            "omit it to compare full distributions"
        )
    if sizes[0] != sizes[1] and config.teacher.topk is None:
        raise ConfigError(
            f"the logits of the teacher {config.teacher.id} are over {sizes[1]} tokens and those of the student "
            f"{config.model.id} over {sizes[0]}, padding included; the tokens are the same, so compare the most "
            "probable ones: teacher.topk 64"
        )


class Student:
    """Samples answers from the trained model, reproducibly for each run and step.

    Args:
        config: of the run.
        model: the student.
    """

    def __init__(self, config: DistillationConfig, model: Any) -> None:
        self._config = config
        self.sampler = build_sampler(config, config.sampling, model)
        self._syncing = CheckpointEngineManager(model=model, sampler=self.sampler)

    def check_room(self, loaders: Iterable[Any]) -> None:
        """Check that every prompt leaves room for an answer, see `rollouts.check_room`."""
        check_room(self.sampler, loaders, self._config.data, _prompt, _prompt_length)

    def answers(self, rows: Sequence[Mapping[str, Any]], step: int) -> list[Any]:
        """Return the student's answers to the prompts of rows, sampled with its current weights.

        The answers are a function of (seed of the run, step, index of the row). Empty answers are omitted, because they
        have no tokens to train.
        """
        settings = self._config.sampling
        self._syncing.sync_weights(merge_and_sync=settings.merge_and_sync)
        self.sampler.reset_prefix_cache()
        params = params_of(settings, seed=seed_of(self._config.seed, step))
        responses = self.sampler.sample([_prompt(row) for row in rows], params)
        sampled = [response.sequences[0].new_input_feature for response in responses]
        return [row for row in sampled if row is not None]


def is_on_policy(config: DistillationConfig, step: int) -> bool:
    """Return whether the student answers in this step, decided at random (arXiv:2306.13649, algorithm 1)."""
    return Random(seed_of(config.seed, step)).random() < config.on_policy


def asked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation without its final answer, if it has one."""
    return list(messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages)


def encode_conversations(dataset: Any, config: DistillationConfig) -> None:
    """Encode conversations; if the student answers in all steps, without their final answers.

    Raises:
        EncodeError: the student is to answer, and there is no question; or the answer given is to be learnt from, and
            there is none. Names the row.
    """
    for number in range(len(dataset)):
        messages = dataset[number].get("messages") or ()
        if config.on_policy > 0 and not asked(messages):
            raise EncodeError(
                f"row {number}: there is no prompt before the answer; drop the "
                "row, or use only the answers of the data: on_policy 0"
            )
        if config.on_policy < 1 and messages and all(message["role"] != "assistant" for message in messages):
            raise EncodeError(
                f"row {number} has no answer, but with on_policy {config.on_policy:g} answers of the data are used "
                "too; add an answer, or let the student always answer: on_policy 1"
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
