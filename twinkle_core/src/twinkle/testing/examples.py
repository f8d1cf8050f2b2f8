"""What the contract kit calls core's own components with: texts in the markup of each tool parser, rows to pack."""

from typing import Any

_READ = ("read_file", {"path": "a.py", "lines": [1, 2]})
_SEARCH = ("search", {"query": "Paris"})

HERMES = {
    "calls": {
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py", "lines": [1, 2]}}\n</tool_call>': [_READ],
        "<tool_call>\n<function=search><parameter=query>\nParis\n</parameter></function></tool_call>": [_SEARCH],
    }
}
CLINE = {"calls": {"<read_file>\n<path>a.py</path>\n<lines>[1, 2]</lines>\n</read_file>": [_READ]}}
REACT = {
    "calls": {
        "Action: search[Paris]": [("search", {"input": "Paris"})],
        'Action: read_file[{"path": "a.py", "lines": [1, 2]}]': [_READ],
    }
}
VCP = {
    "calls": {
        "<<<[TOOL_REQUEST]>>>\ntool_name:「始」search「末」,\nquery:「始」Paris「末」\n<<<[END_TOOL_REQUEST]>>>": [
            _SEARCH
        ]
    }
}
DSML = {
    "calls": {
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="read_file">\n'
        '<｜DSML｜parameter name="path" string="true">a.py</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="lines" string="false">[1, 2]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>": [_READ]
    }
}


class Capacity:
    """A template that only says how long a pack may be."""

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
    from twinkle.dataset.packed import PackingDataset

    return {"make": lambda: _packed(PackingDataset)}


def packing_stream() -> dict[str, Any]:
    """The same rows as a stream."""
    from twinkle.dataset.packed_stream import IterablePackingDataset

    return {"make": lambda: _packed(IterablePackingDataset)}


def _packed(dataset: Any) -> Any:
    from twinkle.dataset import DatasetMeta

    made = dataset(DatasetMeta(data=_encoded()))
    made.set_template(Capacity())
    made.pack_dataset()
    return made
