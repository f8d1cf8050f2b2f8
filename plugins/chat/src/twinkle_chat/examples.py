"""Examples for the contract kit: texts in the markup of each tool parser, and rows to pack."""

_READ = ("read_file", {"path": "a.py", "lines": [1, 2]})
_SEARCH = ("search", {"query": "Paris"})

HERMES = {
    "calls": {
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py", "lines": [1, 2]}}\n</tool_call>': [_READ],
        "<tool_call>\n<function=search><parameter=query>\nParis\n</parameter></function></tool_call>": [_SEARCH],
    }
}
CLINE = {"calls": {"<read_file>\n<path>a.py</path>\n</read_file>": [("read_file", {"path": "a.py"})]}}
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
