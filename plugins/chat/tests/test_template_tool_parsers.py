"""Each form of tool calls is read, cleaned away and, where it is malformed, left as the text that it is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.errors import ComponentNotFound, ComponentTypeError
from twinkle.template import Template
from twinkle.template.tools import ToolCallRegistry
from twinkle.testing import tiny_tokenizer
from twinkle.tool_parser import (
    ClineParser,
    DSMLParser,
    HermesQwenParser,
    ReActParser,
    ToolCallParser,
    VCPParser,
    detect_first,
    parsers,
)

TEMPLATE = Template(tokenizer=tiny_tokenizer())
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
QWEN3_5 = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
CLINE = "<read_weather>\n<city>Köln</city>\n<days>\n2\n</days>\n</read_weather>"
VCP = (
    "<<<[TOOL_REQUEST]>>>\ntool_name:「始」weather「末」,\ncity:「始」Köln「末」,\ndays:「始」2「末」\n"
    "<<<[END_TOOL_REQUEST]>>>"
)
REACT = 'Action: weather[{"city": "Köln", "days": 2}]'
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Köln'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)
PARSERS: dict[str, Any] = {
    "hermes": (HermesQwenParser, HERMES),
    "qwen3.5": (HermesQwenParser, QWEN3_5),
    "cline": (ClineParser, CLINE),
    "vcp": (VCPParser, VCP),
    "react": (ReActParser, REACT),
    "dsml": (DSMLParser, DSML),
}
FORMS = pytest.mark.parametrize("form", PARSERS)


def said(calls: list[Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def weather(form: str) -> tuple[str, Any]:
    days = "2" if form in ("vcp", "cline") else 2  # these have no types
    return "read_weather" if form == "cline" else "weather", {"city": "Köln", "days": days}


@FORMS
def test_a_call_is_read_and_the_text_around_it_kept(form: str) -> None:
    kind, markup = PARSERS[form]
    parser, text = kind(), f"Let me look.\n{markup}\nDone."
    assert parser.detect(text)
    assert said(parser.parse(text)) == [weather(form)]
    assert parser.clean(text).split() == ["Let", "me", "look.", "Done."]
    assert parser.open_marker in text
    assert parser.close_marker in text


@FORMS
def test_calls_come_in_order_with_ids_of_their_own(form: str) -> None:
    kind, markup = PARSERS[form]
    calls = kind().parse(f"{markup}\n{markup}\n")
    assert said(calls) == [weather(form)] * 2
    assert [(call["id"], call["type"]) for call in calls] == [("call_0", "function"), ("call_1", "function")]
    assert kind().clean(f"{markup}\n{markup}") == ""


@FORMS
def test_the_first_parser_that_knows_the_form_is_found_by_name(form: str) -> None:
    kind, markup = PARSERS[form]
    assert isinstance(detect_first(f"hm\n{markup}"), kind)
    assert said(TEMPLATE.parse_tool_call(markup)) == [weather(form)]
    assert TEMPLATE.clean_tool_call(f"hm\n{markup}") == "hm"


@FORMS
def test_text_without_calls_is_left_as_it_is(form: str) -> None:
    parser = PARSERS[form][0]()
    for text in (
        "",
        "just text",
        "<b>bold</b>",
        "<my_list>\n<li>a</li> and\n</my_list>",
        '{"name": "f"}',
        "Action: none",
    ):
        assert not parser.detect(text)
        assert parser.parse(text) == []
        assert parser.clean(text) == text


@FORMS
def test_markup_cut_anywhere_is_text_and_never_an_error(form: str) -> None:
    kind, markup = PARSERS[form]
    parser = kind()
    for end in range(len(markup) - 1):
        cut = markup[:end].strip()
        if kind is HermesQwenParser and f"{cut}\n</tool_call>" == markup:
            continue  # complete but for its closing marker
        assert parser.parse(cut) == []
        assert parser.clean(cut) == cut
        assert not parser.detect(cut)


@pytest.mark.parametrize("form", ["hermes", "qwen3.5"])
@pytest.mark.parametrize("end", ["", "\n", "  "])
def test_a_call_without_its_closing_marker_at_the_end_is_read(form: str, end: str) -> None:
    markup = PARSERS[form][1].removesuffix("\n</tool_call>") + end
    parser = HermesQwenParser()
    assert parser.detect(markup)
    assert said(parser.parse(f"hm {markup}")) == [weather(form)]
    assert parser.clean(f"hm {markup}") == "hm"
    assert said(parser.parse(f"{HERMES} and {markup}")) == [weather("hermes"), weather(form)]
    assert TEMPLATE.parse_tool_call(markup) == parser.parse(markup)
    assert parser.parse(f"{markup} words after it") == []


@pytest.mark.sample(3)
@FORMS
@given(noise=st.text(max_size=8), place=st.integers(0, 400), length=st.integers(0, 9))
def test_markup_damaged_anywhere_never_raises(form: str, noise: str, place: int, length: int) -> None:
    kind, markup = PARSERS[form]
    damaged = markup[:place] + noise + markup[place + length :]
    for parser in (kind(), *parsers()):
        calls = parser.parse(damaged)
        assert parser.detect(damaged) == bool(calls)
        assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
        if not calls:
            assert parser.clean(damaged) == damaged.strip()


@pytest.mark.parametrize(
    "malformed",
    [
        '<tool_call>{"name": "f", "arguments": {]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>[{"name": "f"}]</tool_call>',
        "<tool_call>\n<function=f>\n<parameter=a>1</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nwords\n</function>\n</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "</tool_call><tool_call>",
    ],
)
def test_a_malformed_call_is_text_beside_one_that_is_right(malformed: str) -> None:
    parser = HermesQwenParser()
    assert parser.parse(malformed) == []
    assert parser.clean(malformed) == malformed
    assert said(parser.parse(f"{malformed} {HERMES}")) == [weather("hermes")]
    assert parser.clean(f"{malformed} {HERMES}") == malformed


def test_hermes_reads_what_models_really_write() -> None:
    parser = HermesQwenParser()
    assert said(parser.parse('<tool_call>{"name": "f"}</tool_call>')) == [("f", {})]
    assert said(parser.parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')) == [("f", {"a": 1})]
    assert said(parser.parse("<tool_call>\n<function=f>\n</function>\n</tool_call>")) == [("f", {})]
    code = "<tool_call>\n<function=f>\n<parameter=code>\nif a < b:\n    pass\n\n</parameter>\n</function>\n</tool_call>"
    assert said(parser.parse(code)) == [("f", {"code": "if a < b:\n    pass\n"})]
    values = "".join(f"<parameter=p{n}>{v}</parameter>" for n, v in enumerate(["true", "null", "[1]", '"x"', "007"]))
    expected = {"p0": True, "p1": None, "p2": [1], "p3": '"x"', "p4": "007"}
    assert said(parser.parse(f"<tool_call><function=f>{values}</function></tool_call>")) == [("f", expected)]
    assert said(parser.parse(f"<tool_call> a <tool_call>{HERMES}")) == [weather("hermes")]


def test_not_every_tag_is_a_call_of_cline() -> None:
    parser = ClineParser()
    for text in (
        "<div>\n<p>a</p>\n</div>",
        "<tool_call>\n<name>f</name>\n</tool_call>",
        "<read_file></read_file>",
        "<read_file><path>a</path> and more</read_file>",
        "<ul><li>a</li></ul>",
        "<read_file>a</read_file>",
    ):
        assert parser.parse(text) == []
    text = "<write_to_file>\n<path>a.html</path>\n<content>\n<p>1</p>\n\n<p>2</p>\n</content>\n</write_to_file>"
    assert said(parser.parse(text)) == [("write_to_file", {"path": "a.html", "content": "<p>1</p>\n\n<p>2</p>"})]


def test_a_call_of_cline_may_be_within_a_line_and_its_values_are_text() -> None:
    parser = ClineParser()
    text = "I read it: <read_file><path> a.py </path><lines>12</lines></read_file> now."
    assert parser.parse(text)[0]["function"] == {"name": "read_file", "arguments": {"path": "a.py", "lines": "12"}}
    assert parser.clean(text) == "I read it:  now."
    values = "<ask><flag>true</flag><list>[1]</list></ask>"
    assert said(parser.parse(values)) == [("ask", {"flag": "true", "list": "[1]"})]


# The published registry


class Arrow(ToolCallParser):
    """A parser in the published form: without blocks, and without a marker."""

    name = "arrow"
    open_marker = None  # type: ignore[assignment]
    close_marker = None  # type: ignore[assignment]

    def detect(self, text: str) -> bool:
        return "->" in text

    def parse(self, text: str) -> list[Any]:
        function = {"name": text.partition("->")[2].strip(), "arguments": {}}
        return [{"id": "1", "type": "function", "function": function}]

    def clean(self, text: str) -> str:
        return text.partition("->")[0].rstrip()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Arrow:
    monkeypatch.setattr(ToolCallRegistry, "_registered", ())
    parser = Arrow()
    assert ToolCallRegistry.register(parser) is parser
    return parser


def test_the_published_paths_lead_to_the_same_classes() -> None:
    import twinkle.template.base
    import twinkle.template.tools as tools

    assert tools.ToolCallParser is ToolCallParser
    assert tools.HermesQwenParser is HermesQwenParser
    assert (tools.ClineParser, tools.VCPParser, tools.ReActParser) == (ClineParser, VCPParser, ReActParser)
    assert tools.ToolCallRegistry is ToolCallRegistry
    assert twinkle.template.base.Template is Template
    assert {parser.name for parser in tools.ToolCallRegistry.parsers()} >= {"hermes_qwen", "cline", "vcp", "react"}
    assert isinstance(tools.ToolCallRegistry.detect_first(f"hm {HERMES}"), HermesQwenParser)
    assert tools.ToolCallRegistry.detect_first("hm") is None


def test_a_registered_parser_serves_templates(registered: Arrow) -> None:
    assert ToolCallRegistry.parsers()[-1] is registered
    assert TEMPLATE.parse_tool_call("so -> stop")[0]["function"]["name"] == "stop"
    assert TEMPLATE.clean_tool_call("so -> stop") == "so"
    assert isinstance(detect_first(f"a -> b {HERMES}"), HermesQwenParser), "one with a known place is preferred"


def test_a_name_is_registered_once(registered: Arrow) -> None:
    assert ToolCallRegistry.register(Arrow()) is registered
    cline = ClineParser()
    assert ToolCallRegistry.register(cline) is not cline
    assert len(ToolCallRegistry.parsers()) == len(list(parsers()))
    with pytest.raises(ComponentTypeError, match="must be a ToolCallParser, got str"):
        ToolCallRegistry.register("ClineParser")


def test_react_takes_plain_text_as_input() -> None:
    parser = ReActParser()
    assert said(parser.parse("Thought: x\nAction 1: search[Paris [France]]\nAction: finish[]")) == [
        ("search", {"input": "Paris [France]"}),
        ("finish", {"input": ""}),
    ]
    assert parser.clean("Thought: x\nAction: search[Paris]") == "Thought: x"


def test_one_block_of_deepseek_v4_holds_many_calls() -> None:
    invoke = DSML.partition("\n")[2].rpartition("\n")[0]
    many = f"<｜DSML｜tool_calls>\n{invoke}\n{invoke}\n</｜DSML｜tool_calls>"
    assert said(DSMLParser().parse(many)) == [weather("dsml")] * 2
    none = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    assert said(DSMLParser().parse(none)) == [("f", {})]
    assert DSMLParser().parse(f"<｜DSML｜tool_calls>\n{invoke}\nwords\n</｜DSML｜tool_calls>") == []


@pytest.mark.parametrize(
    ("parser", "text", "result"),
    [
        (HermesQwenParser(), "a<tool_response>\nrain\n</tool_response>b", "rain"),
        (ClineParser(), "[read_file for 'a.py'] Result:\nimport os", "import os"),
        (ClineParser(), "[read_file for 'a.py'] Result: import os", "import os"),
        (ClineParser(), "[read_file for 'a.py'] Result:\n  if a:\n    b", "  if a:\n    b"),
        (VCPParser(), "[[VCP调用结果信息汇总:\n- rain\nVCP调用结果结束]]", "- rain"),
        (ReActParser(), "Observation: rain\nall day\nThought: x", "rain\nall day"),
        (DSMLParser(), "<tool_result>rain</tool_result>", "rain"),
    ],
)
def test_a_quoted_result_is_found(parser: ToolCallParser, text: str, result: str) -> None:
    assert parser.extract_tool_result(text) == result
    assert parser.extract_tool_result("just text") is None
    assert parser.extract_tool_result(text[:11]) is None


def test_sampled_calls_join_the_messages_in_a_form_that_can_be_encoded_again() -> None:
    prompt: Any = TEMPLATE.encode({"messages": [{"role": "user", "content": "q"}]}, add_generation_prompt=True)
    joined: Any = TEMPLATE.concat_input_feature(prompt, TEMPLATE.tokenizer(f"hm {HERMES}<|im_end|>")["input_ids"])
    assert joined["messages"][-1]["content"] == "hm"
    assert said(joined["messages"][-1]["tool_calls"]) == [weather("hermes")]


@pytest.mark.parametrize("unit", ["<a_b>\n", "<tool_call>", "</tool_call>", "<a_b><c>", "Action: a[]]", "「始」a:"])
def test_endless_repetition_is_read_in_passing(unit: str) -> None:
    text = unit * 4000
    for parser in parsers():
        parser.parse(text)
        assert len(parser.clean(text)) <= len(text)


def test_a_parser_is_a_component() -> None:
    from twinkle._registry import registry

    assert isinstance(registry().build("ReActParser", "tool_parser"), ReActParser)
    with pytest.raises(ComponentNotFound, match="'ReActParser'"):
        registry().build("ReactParser", "tool_parser")


def test_a_call_that_another_call_quotes_in_another_markup_is_none() -> None:
    inner = "\n<read_file>\n<path>secret</path>\n</read_file>\n"
    text = f"<tool_call>\n<function=note>\n<parameter=text>{inner}</parameter>\n</function>\n</tool_call>"
    assert said(TEMPLATE.parse_tool_call(text)) == [("note", {"text": inner.strip("\n")})]
    assert TEMPLATE.clean_tool_call(text) == ""


@pytest.mark.parametrize(
    "arguments", ['"arguments": ""', '"arguments": null', '"arguments": " "', '"arguments": {}', ""]
)
def test_a_call_without_arguments_has_none(arguments: str) -> None:
    for key in ("name", "tool_name"):
        text = "<tool_call>{" + ", ".join(filter(None, [f'"{key}": "stop"', arguments])) + "}</tool_call>"
        assert said(HermesQwenParser().parse(text)) == [("stop", {})]
    assert HermesQwenParser().parse('<tool_call>{"name": "stop", "arguments": "now"}</tool_call>') == []


def test_values_of_vcp_are_as_written_and_may_be_escaped() -> None:
    text = (
        "<<<[TOOL_REQUEST]>>>\ntool_name:「始」 note 「末」,\ntext:「始ESCAPE」 a 「始」b「末」\n「末ESCAPE」,\n"
        "more:「始」 c 「末」\n<<<[END_TOOL_REQUEST]>>>"
    )
    assert said(VCPParser().parse(text)) == [("note", {"text": " a 「始」b「末」\n", "more": " c "})]
    assert VCPParser().clean(f"so {text}") == "so"
