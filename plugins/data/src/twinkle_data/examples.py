"""Examples for the contract kit: arguments of preprocessors, filters, loss scales and the hub."""

from typing import Any

LENGTH = {"kwargs": {"max_length": 60, "unit": "characters"}, "kept": [False, True, True, True, True, False]}
DEDUPLICATION = {"kept": [True, True, True, True, True, False]}
TURNS = {"kwargs": {"weights": {0: 0.5, -1: 2.0}}}
PATTERNS = {"kwargs": {"patterns": {r"\d+": 2.0, "is": 0.0}}}

BUILTIN = {
    "scheme": "builtin",
    "dataset": "builtin://arithmetic",
    "options": {"size": 5},
    "skip": {"model_files": "its models are fetched by pip at the first call"},
}

_HELPFUL = {"role": "system", "content": "You are a helpful assistant."}
SELF_COGNITION = {
    "kwargs": {"model_name": "Glow", "model_author": "us"},
    "rows": {"query": ["Who are you?", "Who made you?"], "response": ["I am {{NAME}}.", "{{AUTHOR}} did."]},
    "expected": {
        "messages": [
            [_HELPFUL, {"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am Glow."}],
            [_HELPFUL, {"role": "user", "content": "Who made you?"}, {"role": "assistant", "content": "us did."}],
        ]
    },
}
ALPACA = {
    "rows": {"instruction": ["Add.", "Greet."], "input": ["2 and 3", ""], "output": ["5", "Hello."]},
    "expected": {
        "messages": [
            [{"role": "user", "content": "Add.\n2 and 3"}, {"role": "assistant", "content": "5"}],
            [{"role": "user", "content": "Greet."}, {"role": "assistant", "content": "Hello."}],
        ]
    },
}
SHAREGPT = {
    "rows": {
        "conversations": [
            [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Yes."}],
            [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "So."},
            ],
        ]
    }
}
MATH: dict[str, Any] = {
    "rows": {"problem": ["1+1?", "2+2?"], "solution": ["It is \\boxed{2}.", "It is \\boxed{4}."]},
}
GSM8K = {"rows": {"question": ["How many?", "And now?"], "answer": ["5 + 5 = 10\n#### 10", "#### 7"]}}
COUNTDOWN = {"rows": {"nums": [[3, 4, 5], [1, 2]], "target": [17, 3]}}
QUESTIONS = {"rows": {"question": ["How many?", "And now?"], "answer": ["10", "7"]}}
EMOJI = {"rows": {"prompt": ["Hello?", "Why?"], "answer_zh": ["你好 🙂", "因为 🙂"], "answer_en": ["Hi.", "So."]}}
PREFERENCES = {"rows": {"prompt": ["Hello?", "Why?"], "chosen": ["Hi.", "So."], "rejected": ["No.", "No!"]}}
CLEVR = {
    "rows": {
        "image": ["a.png", "b.png"],
        "problem": ["How many?", "What colour?"],
        "solution": ["<answer> 3 </answer>", "red"],
    }
}
OLYMPIAD = {
    "rows": {
        "question": ["Find <image_1>.", "And x?"],
        "final_answer": [["2"], ["3"]],
        "images": [["a.png"], []],
    }
}


class Capacity:
    """A template that only defines the length of a pack."""

    max_length = 12

    def batch_encode(self, trajectories: Any, add_generation_prompt: bool = False) -> Any:
        """Return the rows, which are encoded already."""
        return trajectories


def _encoded() -> list[dict[str, Any]]:
    rows = []
    for number, length in enumerate((5, 9, 3, 7, 4, 2)):
        tokens = [100 * number + place for place in range(length)]
        rows.append({"input_ids": tokens, "labels": [*tokens[1:], -100], "length": length})
    return rows


def packing() -> dict[str, Any]:
    """Six rows in packs of at most 12 tokens."""
    from twinkle_data.dataset.packed import PackingDataset

    return {"make": lambda: _packed(PackingDataset)}


def packing_stream() -> dict[str, Any]:
    """The same rows as a stream."""
    from twinkle_data.dataset.packed_stream import IterablePackingDataset

    return {"make": lambda: _packed(IterablePackingDataset)}


def _packed(dataset: Any) -> Any:
    from twinkle.dataset import DatasetMeta

    packed = dataset(DatasetMeta(data=_encoded()))
    packed.set_template(Capacity())
    packed.pack_dataset()
    return packed
