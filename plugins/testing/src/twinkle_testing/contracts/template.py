"""Contract checks of templates: shifted labels on the assistant's text only, decodable tokens."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle_testing.contracts.case import Case, refusal, require
from twinkle_testing.contracts.common import pickled
from twinkle_testing.contracts.values import left_alone, same, shown

_IGNORED = -100


def _conversation() -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "What is 2 + 3?"},
            {"role": "assistant", "content": "It is 5."},
            {"role": "user", "content": "And 漢字 twice?"},
            {"role": "assistant", "content": "That is 10."},
        ],
        "user_data": [("row", "7")],
    }


@dataclass(kw_only=True)
class TemplateCase(Case):
    """A template and a conversation that it encodes.

    Without `model_id` or `tokenizer` among its arguments it gets a byte-level tokenizer.

    Attributes:
        trajectory: a conversation of at least one round that ends with the assistant.
        chat_template: Jinja text of the tokenizer's chat template; by default ChatML.
    """

    kind = "template"

    trajectory: Mapping[str, Any] = field(default_factory=_conversation)
    chat_template: str | None = None

    def build(self, **more: Any) -> Any:
        """Return the template with its tokenizer."""
        if not self.is_class or {"model_id", "tokenizer"} & {*self.kwargs, *more}:
            return super().build(**more)
        from twinkle_testing.models import CHATML, tiny_tokenizer

        return super().build(tokenizer=tiny_tokenizer(self.chat_template or CHATML), **more)

    def encode(self, template: Any, trajectory: Any = None, **options: Any) -> dict[str, Any]:
        """Return a row as plain lists."""
        found = template.encode(copy.deepcopy(dict(self.trajectory if trajectory is None else trajectory)), **options)
        require(isinstance(found, Mapping), f"encode() returned {shown(found)}; return a mapping")
        return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in found.items()}


def row_form(case: TemplateCase) -> None:
    """A row has integers in `input_ids`, `labels`, `attention_mask` and `position_ids`, all of one length."""
    row = case.encode(case.build())
    length = len(row["input_ids"])
    require(length > 0, "it made no tokens")
    for key in ("input_ids", "labels", "attention_mask", "position_ids"):
        values = row.get(key)
        require(isinstance(values, list) and len(values) == length, f"{key} is {shown(values)} for {length} tokens")
        require(all(type(value) is int for value in row[key]), f"{key} must contain integers only")
    require(row.get("length", length) == length, f"length is {row.get('length')} for {length} tokens")


def labels_are_next_tokens(case: TemplateCase) -> None:
    """`labels[i]` is the token after position i or -100, and the last position is -100."""
    row = case.encode(case.build())
    ids, labels = row["input_ids"], row["labels"]
    require(labels[-1] == _IGNORED, f"the last label is {labels[-1]}; nothing follows it, so it must be -100")
    for place, label in enumerate(labels[:-1]):
        fine = label in (_IGNORED, ids[place + 1])
        require(fine, f"label {place} is {label}; the next token is {ids[place + 1]} (labels are shifted already)")


def only_assistant_trained(case: TemplateCase) -> None:
    """Only the text of the assistant and the ends of its turns are trained."""
    template = case.build()
    row = case.encode(template)
    trained = template.decode([label for label in row["labels"] if label != _IGNORED])
    for message in case.trajectory["messages"]:
        said = message["content"] in trained
        if message["role"] == "assistant":
            require(said, f"{shown(message['content'])} of the assistant is not trained: {shown(trained)}")
        else:
            require(not said, f"{shown(message['content'])} of the {message['role']} is trained: {shown(trained)}")


def text_comes_back(case: TemplateCase) -> None:
    """Decoding gives the text of every message, in order."""
    template = case.build()
    text, place = template.decode(case.encode(template)["input_ids"]), 0
    for message in case.trajectory["messages"]:
        found = text.find(message["content"], place)
        require(found >= 0, f"{shown(message['content'])} does not occur, in its order, in {shown(text, 400)}")
        place = found


def prompt(case: TemplateCase) -> None:
    """A generation prompt is a prefix of the conversation with an answer, and has no labels."""
    template = case.build()
    messages = list(case.trajectory["messages"])
    asked = {**case.trajectory, "messages": messages[:2][:-1] if messages[1]["role"] == "assistant" else messages[:-1]}
    row = case.encode(template, asked, add_generation_prompt=True)
    trained = [label for label in row.get("labels", []) if label != _IGNORED]
    require(not trained, "with add_generation_prompt=True there are labels")
    whole = case.encode(template, {**asked, "messages": [*asked["messages"], messages[len(asked["messages"])]]})
    start = whole["input_ids"][: len(row["input_ids"])]
    require(
        start == row["input_ids"],
        f"the prompt {shown(row['input_ids'])} is not a prefix of the answered conversation: {shown(start)}",
    )


def untrained_turns(case: TemplateCase) -> None:
    """A turn with `loss` false is not trained; other turns do not change."""
    template = case.build()
    messages = [dict(message) for message in case.trajectory["messages"]]
    for message in messages:
        if message["role"] == "assistant":
            message["loss"] = False
    row = case.encode(template, {**case.trajectory, "messages": messages})
    require(set(row["labels"]) == {_IGNORED}, "turns with loss=False are trained")
    require(row["input_ids"] == case.encode(template)["input_ids"], "loss=False changes the tokens")


def batches(case: TemplateCase) -> None:
    """`batch_encode` of a list and of columns equals `encode` of each row."""
    template = case.build()
    one, two = dict(case.trajectory), {**case.trajectory, "messages": list(case.trajectory["messages"])[:2]}
    expected = [case.encode(template, row)["input_ids"] for row in (one, two)]
    listed = template.batch_encode(copy.deepcopy([one, two]))
    found = [list(row["input_ids"]) for row in listed]
    require(found == expected, "batch_encode() of a list gives other rows than encode() of each")
    columns = template.batch_encode({key: [row[key] for row in (one, two)] for key in one})
    require([list(ids) for ids in columns["input_ids"]] == expected, "batch_encode() of columns gives other rows")


def rides_along(case: TemplateCase) -> None:
    """Other keys of the conversation are copied to the row."""
    row = case.encode(case.build())
    for key in case.trajectory:
        require(key in row, f"the encoded row has no {key}")


def joined(case: TemplateCase) -> None:
    """`concat_input_feature` keeps the tokens of the prompt and trains exactly the new ones."""
    template = case.build()
    asked = {**case.trajectory, "messages": list(case.trajectory["messages"])[:1]}
    before = case.encode(template, asked, add_generation_prompt=True)
    new = case.encode(template)["input_ids"][-4:]
    after = template.concat_input_feature(copy.deepcopy(before), list(new))
    ids, labels = list(after["input_ids"]), list(after["labels"])
    require(ids == [*before["input_ids"], *new], "the tokens are not the prompt's and the new ones")
    trained = [label for label in labels if label != _IGNORED]
    require(
        trained == list(new) and labels[-1] == _IGNORED, f"trained is {shown(trained)}; the new tokens are {shown(new)}"
    )


def trajectory_left_alone(case: TemplateCase) -> None:
    """It does not change the conversation."""
    template = case.build()
    left_alone(template.encode, copy.deepcopy(dict(case.trajectory)), "the conversation")


def bad_rows_refused(case: TemplateCase) -> None:
    """No messages, an unknown role and a row without `messages` are errors."""
    template = case.build()
    rows: list[dict[str, Any]] = [{"messages": []}, {"messages": [{"role": "nobody", "content": "a"}]}, {"text": "a"}]
    for wrong in rows:
        with refusal(f"encode({wrong})"):
            template.encode(wrong)


def pickle(case: TemplateCase) -> None:
    """It can be pickled for encoding in several processes, and gives the same rows."""
    template = case.build()
    again = case.encode(pickled(template))
    require(same(again["input_ids"], case.encode(template)["input_ids"]), "after pickling it gives other tokens")


CASE = TemplateCase
CHECKS = (
    row_form,
    labels_are_next_tokens,
    only_assistant_trained,
    text_comes_back,
    prompt,
    untrained_turns,
    batches,
    rides_along,
    joined,
    trajectory_left_alone,
    bad_rows_refused,
    pickle,
)
