"""The unmodified SDKs of OpenAI and Anthropic talk to the base model, and to adapters while they are trained."""

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pydantic
import pytest
import server_sdk as sdk
import torch
from deferred import Deferred
from native_rows import CONFIG
from peft import PeftModel
from serving import Served, pool
from transformers import AutoModelForCausalLM

from twinkle.testing import tiny_model, tiny_tokenizer
from twinkle_client import MultiLoraTransformersModel, TwinkleClient
from twinkle_server.chat.decoding import TokenTexts

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
anthropic: Any = Deferred("anthropic")
openai: Any = Deferred("openai")
TEMPLATE = Path(__file__).parents[2] / "plugins" / "chat" / "tests" / "chat_templates" / "qwen2_5.jinja"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = [5, 6, 7]
REPEATED = [5, 6, 5, 6, 5]
SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
}  # fmt: skip
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": CITY}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ADAM = sdk.tinker.AdamParams(learning_rate=1e-2)
SECONDS = 60.0
BASE = "acme/tiny"
INTERNAL = re.compile(r"constrained|list\[|<state>|%json|SamplingParams|encode with")
"""Words of libraries and of the service's own code, which do not belong into an error of the API."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("chat")
    base = tiny_model(
        folder / "base", "qwen2", chat_template=TEMPLATE.read_text(), initializer_range=0.1,
        max_position_embeddings=2048,
    )  # fmt: skip
    served = pool(folder / "data", base, {"name": BASE, "auth": True})
    try:
        yield served.start()
    finally:
        status = served.stop()
    assert status == 0


@pytest.fixture(scope="module")
def client(service: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0, timeout=SECONDS) as made:
        yield made


@pytest.fixture(scope="module")
def claude(service: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=service.url, api_key=service.key, max_retries=0, timeout=SECONDS) as made:
        yield made


def complete(client: Any, model: str, **options: Any) -> Any:
    """Return the first choice of a greedy completion, with log-probabilities."""
    options = {"max_tokens": 4, "temperature": 0, "logprobs": 0, **options}
    return client.completions.create(model=model, prompt=PROMPT, **options).choices[0]


def test_a_conversation_whole_and_streamed_is_the_same(client: Any) -> None:
    options: Any = {"model": BASE, "messages": HELLO, "max_tokens": 12, "seed": 3, "n": 2, "temperature": 1.5}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    texts = ["", ""]
    last: Any = None
    for last in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in last.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    assert last.usage.prompt_tokens_details.cached_tokens > 0, "the prompt was read before"
    rendered = tiny_tokenizer(TEMPLATE.read_text()).apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert whole.usage.prompt_tokens == len(rendered)
    scores = whole.choices[0].logprobs.content
    assert len(scores) == 12
    assert all(len(score.top_logprobs) == 2 and score.logprob <= score.top_logprobs[0].logprob for score in scores)
    assert bytes(byte for score in scores for byte in score.bytes).decode(errors="replace")


def test_completions_echo_the_prompt_with_its_scores(client: Any) -> None:
    scored = client.completions.create(model=BASE, prompt="abc", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert (scored.text, scored.logprobs.tokens) == ("abc", ["a", "b", "c"])
    assert scored.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    both = client.completions.create(model=BASE, prompt=["ab", "cd"], n=2, max_tokens=3, seed=1, stream=True)
    assert {choice.index for chunk in both for choice in chunk.choices} == {0, 1, 2, 3}


def test_offsets_are_those_of_the_text(client: Any) -> None:
    text = "日本語 é The"
    scored = client.completions.create(model=BASE, prompt=text, max_tokens=2, echo=True, logprobs=0, temperature=0)
    logprobs, shown = scored.choices[0].logprobs, scored.choices[0].text
    assert shown.startswith(text)
    assert logprobs.text_offset[:16] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8], "a token of each byte"
    assert all(len(top) == 1 for top in logprobs.top_logprobs[1:]), "the sampled token is always there"


def test_options_change_what_is_sampled(client: Any) -> None:
    free = complete(client, BASE, max_tokens=6)
    biased = complete(client, BASE, logit_bias={"65": 100}, max_tokens=3)
    assert biased.logprobs.tokens == [tiny_tokenizer().decode([65])] * 3
    assert complete(client, BASE, extra_body={"top_k": 1, "min_p": 0.5}, temperature=2).text == free.text[:4]
    assert complete(client, BASE, top_p=0, temperature=2).text == free.text[:4]
    varied = complete(
        client, BASE, frequency_penalty=2, presence_penalty=2, logit_bias={"65": 5, "66": 5}, max_tokens=4
    )
    assert sorted(set(varied.logprobs.tokens[:2])) == sorted(map(tiny_tokenizer().decode, ([65], [66])))
    stop = next(letter for letter in free.text if letter.isprintable())
    stopped = complete(client, BASE, stop=[stop], max_tokens=6)
    assert (stopped.text, stopped.finish_reason) == (free.text.partition(stop)[0], "stop")


@pytest.mark.parametrize(
    "options",
    [{}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}, {"min_p": 1.0}],
    ids=lambda options: next(iter(options), "none"),
)
def test_tokens_and_scores_are_those_of_transformers(service: Served, client: Any, options: dict[str, float]) -> None:
    """`min_p=1` leaves the most probable token alone, at any temperature; the rest is greedy with its penalty."""
    temperature = 2.0 if "min_p" in options else 0.0
    given = client.completions.create(
        model=BASE, prompt=REPEATED, max_tokens=8, temperature=temperature, logprobs=2, echo=True, extra_body=options,
        logit_bias={"258": -100},
    ).choices[0]  # fmt: skip
    tokens, scores = greedy(service, options, temperature or 1.0)
    names = TokenTexts(tiny_tokenizer().backend_tokenizer)
    assert given.logprobs.tokens == [names[token].name for token in tokens]
    assert given.logprobs.token_logprobs[1:] == pytest.approx([row[token] for row, token in scores], abs=1e-4)
    for found, (row, sampled) in zip(given.logprobs.top_logprobs[1:], scores, strict=True):
        best = {names[int(token)].name: row[token] for token in np.argsort(-row)[:2]} | {
            names[sampled].name: row[sampled]
        }
        assert found == pytest.approx(best, abs=1e-4)


def greedy(service: Served, options: dict[str, float], temperature: float) -> tuple[list[int], list[tuple[Any, int]]]:
    """Return a prompt with its greedy continuation, and log-probabilities `[V]` and token of each but the first."""
    model = AutoModelForCausalLM.from_pretrained(str(Path(service.data).parent / "base")).eval()
    tokens = list(REPEATED)

    def logits() -> Any:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].double()

    while len(tokens) < len(REPEATED) + 8:
        last = logits()[-1]
        for token in set(tokens):
            penalty = options.get("repetition_penalty", 1.0)
            last[token] = last[token] / penalty if last[token] > 0 else last[token] * penalty
            count = tokens[len(REPEATED) :].count(token)
            last[token] -= options.get("presence_penalty", 0.0) * (count > 0)
            last[token] -= options.get("frequency_penalty", 0.0) * count
        last[258] -= 100
        tokens.append(int(last.argmax()))
    scored = (logits() / temperature).log_softmax(-1).numpy()
    return tokens, [(scored[place], token) for place, token in enumerate(tokens[1:])]


def test_limits_seeds_and_both_headers(service: Served, client: Any) -> None:
    options: Any = {"model": BASE, "messages": HELLO, "temperature": 1.5}
    seeded = [
        client.chat.completions.create(**options, seed=seed, max_completion_tokens=9).choices[0] for seed in (1, 1, 2)
    ]
    texts = [choice.message.content for choice in seeded]
    assert texts[0] == texts[1] != texts[2]
    limited = client.chat.completions.create(**options, max_completion_tokens=3, logit_bias={"258": -100})
    assert (limited.usage.completion_tokens, limited.choices[0].finish_reason) == (3, "length")
    without = client.chat.completions.create(**options, max_tokens=2, stream=True)
    assert all(chunk.usage is None for chunk in without), "nobody asked for the usage"
    body = {"model": BASE, "prompt": PROMPT, "max_tokens": 1}
    for headers in ({"Authorization": f"Bearer {service.key}"}, {"X-API-Key": service.key}):
        answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, trust_env=False)
        assert answer.status_code == 200, headers
        wrong = {name: f"{value}x" for name, value in headers.items()}
        answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=wrong, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def with_parameters(schema: Any, name: str = "weather", **options: Any) -> Any:
    """Return a tool with another schema."""
    return {"type": "function", "function": {"name": name, "parameters": schema, **options}}


def schema_format(schema: Any) -> Any:
    """Return a `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def allowed(mode: str, *names: str) -> Any:
    """Return a `tool_choice` of some tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"n": 100_000}, "n"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_name_of_the_parameter(client: Any, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=param) as caught:
        client.chat.completions.create(model=BASE, messages=HELLO, extra_body=options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        ({"continue_final_message": True}, "continue_final_message", "'user'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages", "continue_final_message=true"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "opposite"),
        ({"stop": ["x", ""]}, "stop", r"stop\.1: String"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "one of the keys"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs", "nothing"),
        ({"response_format": schema_format({"$ref": "#"})}, "response_format", "no text matches it$"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "wether")}, "tool_choice", "'wether'"),
        ({"tools": [with_parameters({"type": "array"})]}, "tools", "'weather' must be a schema .* got 'array'"),
        (
            {
                "tools": [TOOL, with_parameters({"type": "object", "properties": {"a": {"type": "strnig"}}}, "other")],
                "tool_choice": "required",
            },
            "tools",
            "'other' cannot be used: Invalid type: strnig$",
        ),
        ({"tools": [with_parameters({"anyOf": [{"type": "strnig"}]}, strict=True)]}, "tools", "'weather' .* strnig"),
    ],
)
def test_errors_name_what_the_client_has_sent(client: Any, options: Any, param: str, reason: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=BASE, messages=HELLO, extra_body=options)
    assert caught.value.param == param
    message: str = caught.value.body["message"]  # type: ignore[index, call-overload, assignment]
    assert re.search(reason, message), message
    assert not INTERNAL.search(message)


def test_a_long_prompt_that_is_wrong_has_a_short_error(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=BASE, prompt=[[1] * 500, [-1] * 500])
    message: str = caught.value.body["message"]  # type: ignore[index, call-overload, assignment]
    assert message == "prompt.1.0: Input should be greater than or equal to 0"


def test_structured_output_matches_its_schema(client: Any) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=BASE, messages=HELLO, response_format=wanted, seed=seed, max_tokens=300, temperature=1.5
        ).choices[0]
        assert answer.finish_reason == "stop"
        assert json.loads(answer.message.content or "")["ok"] in (True, False)
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="schema") as caught:
        client.chat.completions.create(model=BASE, messages=HELLO, response_format=wrong)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tool_calls(client: Any, choice: Any) -> None:
    options: Any = {
        "model": BASE, "messages": HELLO, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False,
        "max_tokens": 300, "seed": 1,
    }  # fmt: skip
    answer = client.chat.completions.create(**options).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    streamed = [each for chunk in chunks for each in chunk.delta.tool_calls or ()]
    assert [(each.index, each.function.arguments) for each in streamed] == [(0, call.function.arguments)]
    assert chunks[-1].finish_reason == "tool_calls"


def test_tools_that_may_be_called_are_a_part_of_all(client: Any) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    options: Any = {"model": BASE, "messages": HELLO, "max_tokens": 300, "seed": 1, "parallel_tool_calls": False}
    answer = client.chat.completions.create(
        **options, tools=[other, TOOL], tool_choice=allowed("required", "weather"), stop=["\n", "city"]
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("weather", "tool_calls"), "stop is for text"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_is_not_text(client: Any, stream: bool) -> None:
    options: Any = {"model": BASE, "messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 20}
    answer = client.chat.completions.create(**options, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert choices[-1].finish_reason == "length"
    parts = [choice.delta if stream else choice.message for choice in choices]
    assert not any(part.content or part.tool_calls for part in parts)


def test_claude_sees_text_tools_and_tokens(claude: Any) -> None:
    tool: Any = {"name": "weather", "description": "x", "input_schema": CITY}
    options: Any = {
        "model": BASE, "max_tokens": 300, "tools": [tool], "system": "Be brief.",
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    first = claude.messages.create(messages=HELLO, **options)
    assert first.stop_reason == "tool_use"
    (use,) = first.content
    assert use.type == "tool_use"
    assert (use.name, use.input["city"] in ("Rome", "Oslo")) == ("weather", True)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    history: Any = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    with claude.messages.stream(messages=history, **options) as stream:
        second = stream.get_final_message()
    assert [block.type for block in second.content] == ["tool_use"]
    counted = claude.messages.count_tokens(model=BASE, messages=history, tools=[tool], system="Be brief.")
    assert counted.input_tokens == second.usage.input_tokens
    plain = claude.messages.create(model=BASE, messages=HELLO, max_tokens=5)
    assert (plain.stop_reason, plain.usage.output_tokens, plain.content[0].type) == ("max_tokens", 5, "text")
    with claude.messages.stream(model=BASE, messages=HELLO, max_tokens=5, extra_body={"temperature": 0}) as stream:
        streamed = "".join(stream.text_stream)
    assert (
        streamed
        == claude.messages.create(model=BASE, messages=HELLO, max_tokens=5, extra_body={"temperature": 0})
        .content[0]
        .text
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_the_answer_continues_a_last_message_of_the_assistant(service: Served, thinking: bool) -> None:
    """On both faces, as the model continues the text of its own turn; whole and streamed."""
    begun: Any = [*HELLO, {"role": "assistant", "content": "The answer is <b>"}]
    tokenizer = tiny_tokenizer(TEMPLATE.read_text())
    prompt = tokenizer.apply_chat_template(begun, continue_final_message=True)["input_ids"]
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0, timeout=SECONDS) as client:
        expected = client.completions.create(model=BASE, prompt=prompt, max_tokens=8, temperature=0)
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        extra["chat_template_kwargs"] = {"enable_thinking": thinking}
        found = client.chat.completions.create(
            model=BASE, messages=begun, max_tokens=8, temperature=0, extra_body=extra
        )
    assert found.choices[0].message.content == expected.choices[0].text
    assert found.usage.prompt_tokens == len(prompt)
    with anthropic.Anthropic(base_url=service.url, api_key=service.key, max_retries=0, timeout=SECONDS) as claude:
        options: Any = {"model": BASE, "max_tokens": 8, "extra_body": {"temperature": 0}}
        assert claude.messages.create(messages=begun, **options).content[0].text == expected.choices[0].text
        with claude.messages.stream(messages=begun, **options) as stream:
            assert "".join(stream.text_stream) == expected.choices[0].text
        assert claude.messages.count_tokens(model=BASE, messages=begun).input_tokens == len(prompt)
        empty = claude.messages.create(messages=[*HELLO, {"role": "assistant", "content": ""}], **options)
        assert empty.content == claude.messages.create(messages=HELLO, **options).content
        for last, reason in (
            ("x ", "white space"),
            ([{"type": "tool_use", "id": "a", "name": "f", "input": {}}], "result"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=reason):
                claude.messages.create(messages=[*HELLO, {"role": "assistant", "content": last}], **options)


def test_claude_writes_json_of_a_schema(claude: Any) -> None:
    class Answer(pydantic.BaseModel):
        ok: bool

    options: Any = {"model": BASE, "messages": HELLO, "max_tokens": 300}
    assert claude.messages.parse(**options, output_format=Answer).parsed_output.ok in (True, False)
    wanted: Any = {"type": "json_schema", "schema": SCHEMA}
    with claude.messages.stream(**options, output_config={"format": wanted}) as stream:
        assert json.loads("".join(stream.text_stream))["ok"] in (True, False)
    begun = [*HELLO, {"role": "assistant", "content": "{"}]
    tool = {"name": "weather", "input_schema": CITY}
    for wrong in (
        {"output_config": {"format": {**wanted, "schema": {"type": "nothing"}}}},
        {"output_config": {"format": wanted}, "messages": begun},
        {"output_config": {"format": wanted}, "tools": [tool]},
        {"output_config": {"effort": "low"}},
    ):
        with pytest.raises(anthropic.BadRequestError, match=r"schema|output_config"):
            claude.messages.create(**{**options, **wrong})


def test_claude_calls_tools_as_their_options_say(claude: Any) -> None:
    options: Any = {"model": BASE, "messages": HELLO, "max_tokens": 4, "extra_body": {"temperature": 0}}
    tool: Any = {"name": "weather", "description": "x", "input_schema": CITY}
    assert claude.messages.create(**options, tools=[{**tool, "strict": True}]).stop_reason == "max_tokens"
    misspelled = {**tool, "input_schema": {"type": "object", "properties": {"city": {"type": "strnig"}}}}
    assert claude.messages.create(**options, tools=[misspelled]).stop_reason == "max_tokens"
    for wrong in ({**misspelled, "strict": True}, {**tool, "defer_loading": True}, {**tool, "input_examples": [{}]}):
        with pytest.raises(anthropic.BadRequestError, match=r"strnig|defer_loading|input_examples"):
            claude.messages.create(**options, tools=[wrong])


def test_the_tool_runner_of_claude_goes_on_without_a_thread(claude: Any) -> None:
    @anthropic.beta_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Return the weather.

        Args:
            city: the city.
        """
        return f"rain in {city}"

    runner = claude.beta.messages.tool_runner(
        model=BASE,
        max_tokens=300,
        messages=HELLO,
        tools=[weather],
        max_iterations=2,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    seen = [message.stop_reason for message in runner]
    assert seen == ["tool_use", "tool_use"]
    with pytest.raises(anthropic.BadRequestError, match="thread"):
        claude.messages.create(model=BASE, max_tokens=1, messages=HELLO, extra_body={"thread": {"type": "create"}})


def test_claude_lists_models_and_gets_ids_of_requests(service: Served, claude: Any) -> None:
    (listed,) = [model for model in claude.models.list(limit=1000) if model.id == BASE]
    assert (listed.type, listed.display_name, listed.lifecycle) == ("model", BASE, "active")
    assert listed.created_at.year == 1970
    one = claude.models.retrieve(BASE)
    assert one == listed
    assert one._request_id
    page = claude.models.list(limit=1)
    assert (page.first_id, page.last_id) == (BASE, BASE)
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.models.retrieve("nobody/has-this")
    assert missing.value.request_id
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    for wrong in ({"limit": 0}, {"after_id": "x"}, {"before_id": "x"}, {"after_id": BASE, "before_id": BASE}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            claude.models.list(**wrong)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        claude.with_options(api_key="tml-wrong").models.list()
    assert refused.value.body["type"] == "error"  # type: ignore[index, call-overload]
    message = claude.messages.create(model=BASE, messages=HELLO, max_tokens=1)
    assert message._request_id


def test_claude_reads_system_messages_and_hidden_thoughts(claude: Any) -> None:
    options: Any = {"model": BASE, "max_tokens": 4, "extra_body": {"temperature": 0}}
    as_message = claude.messages.create(messages=[{"role": "system", "content": "Be brief."}, *HELLO], **options)
    assert as_message.content == claude.messages.create(messages=HELLO, system="Be brief.", **options).content
    turn: Any = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "hi"}]
    with_thought = claude.messages.create(messages=[*HELLO, {"role": "assistant", "content": turn}, *HELLO], **options)
    without = claude.messages.create(messages=[*HELLO, {"role": "assistant", "content": "hi"}, *HELLO], **options)
    assert with_thought.content == without.content
    assert claude.messages.create(messages=HELLO, model=BASE, max_tokens=4, extra_body={"top_p": 0}).content == (
        claude.messages.create(messages=HELLO, **options).content
    )


def test_claude_stops_at_a_sequence_and_refuses_what_it_does_not_know(claude: Any) -> None:
    options: Any = {"model": BASE, "messages": HELLO, "max_tokens": 8, "extra_body": {"temperature": 0}}
    free = claude.messages.create(**options).content[0].text
    stop = next(letter for letter in free[1:] if letter.isprintable())
    stopped = claude.messages.create(**options, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == free.partition(stop)[0]
    for wrong in ({"no_such": 1}, {"container": "x"}, {"temperature": 1e9}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))) as caught:
            claude.messages.create(**{**options, "extra_body": wrong})
        assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index, call-overload]
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="tml-wrong").messages.create(**options)


def test_errors_have_the_form_of_each_api(service: Served, client: Any, claude: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody/has-this", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="tml-wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="no_such_option"):
        client.chat.completions.create(model=BASE, messages=HELLO, extra_body={"no_such_option": 1})
    with pytest.raises(openai.BadRequestError, match="context") as long:
        client.completions.create(model=BASE, prompt=[1] * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.NotFoundError) as absent:
        claude.messages.create(model="nobody/has-this", messages=HELLO, max_tokens=1)
    assert absent.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    image: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(model=BASE, messages=[{"role": "user", "content": [image]}], max_tokens=1)
    for path, name in (("/v1/nothing", "error"), ("/api/v1/nothing", "detail")):
        answer = httpx.get(f"{service.url}{path}", headers={"Authorization": f"Bearer {service.key}"}, trust_env=False)
        assert (answer.status_code, name in answer.json()) == (404, True)


@pytest.fixture(scope="module")
def training(service: Served) -> Iterator[Any]:
    with sdk.opened(service.url, service.key) as opened:
        yield sdk.trainer(opened, BASE, rank=16, seed=1)


def test_the_adapter_answers_after_each_step_and_its_checkpoints_stay(client: Any, training: Any) -> None:
    run = training.model_id
    seen = [complete(client, BASE).logprobs.token_logprobs, complete(client, run).logprobs.token_logprobs]
    assert seen[0] == seen[1], "a new adapter changes nothing"
    for _ in range(3):
        training.forward_backward([sdk.row([*PROMPT, 70, 71, 72, 73])], "cross_entropy").result(SECONDS)
        training.optim_step(ADAM).result(SECONDS)
        seen.append(complete(client, run).logprobs.token_logprobs)
    assert len({tuple(each) for each in seen}) == 4, "each step is seen at once"
    paths = [training.save_state("state").result(SECONDS).path]
    paths.append(training.save_weights_for_sampler("sampler").result(SECONDS).path)
    kept = [f"{run}/state", f"{run}/sampler", *paths]
    training.forward_backward([sdk.row([*PROMPT, 90, 91])], "cross_entropy").result(SECONDS)
    training.optim_step(ADAM).result(SECONDS)
    for name in kept:
        assert complete(client, name).logprobs.token_logprobs == pytest.approx(seen[-1], abs=1e-4), name
    assert complete(client, f"{run}/latest").logprobs.token_logprobs != pytest.approx(seen[-1], abs=1e-4)
    assert {BASE, run, *kept[:2]} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(f"{run}/state").id == f"{run}/state"


def test_a_running_request_finishes_on_the_weights_it_began_with(client: Any, training: Any) -> None:
    options: Any = {"model": training.model_id, "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
    expected = client.completions.create(**options).choices[0].text
    stream = client.completions.create(**options, stream=True)
    text = next(iter(stream)).choices[0].text
    training.forward_backward([sdk.row([*PROMPT, 100, 101, 102])], "cross_entropy").result(SECONDS)
    training.optim_step(sdk.tinker.AdamParams(learning_rate=0.1)).result(SECONDS)
    text += "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == expected
    assert client.completions.create(**options).choices[0].text != expected


def test_another_tenant_neither_sees_nor_reaches_them(service: Served, client: Any, training: Any) -> None:
    run = training.model_id
    if f"{run}/state" not in {model.id for model in client.models.list()}:
        training.save_state("state").result(SECONDS)
    names = [run, f"{run}/latest", f"{run}/state", f"tinker://{run}/weights/state"]
    key = service.new_key("stranger")
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0, timeout=SECONDS) as stranger:
        assert [model.id for model in stranger.models.list()] == [BASE]
        for name in names:
            unknown = name.replace(run[:8], "0" * 8)
            for ask in (
                lambda model: stranger.models.retrieve(model),
                lambda model: stranger.completions.create(model=model, prompt=PROMPT),
                lambda model: stranger.chat.completions.create(model=model, messages=HELLO),
                lambda model: stranger.embeddings.create(model=model, input="x"),
            ):
                said = []
                for model in (name, unknown):
                    with pytest.raises(openai.NotFoundError) as caught:
                        ask(model)
                    said.append(str(caught.value).replace(model, "M"))
                assert said[0] == said[1]
        assert stranger.completions.create(model=BASE, prompt=PROMPT, max_tokens=1).usage.completion_tokens == 1


def test_a_client_that_leaves_frees_the_engine(service: Served, client: Any) -> None:
    stream = client.completions.create(model=BASE, prompt=PROMPT, max_tokens=1900, stream=True, temperature=0,
                                       logit_bias={"258": -100})  # fmt: skip
    next(iter(stream))
    stream.close()
    freed(service)


def test_a_client_that_leaves_before_the_answer_frees_the_engine_too(service: Served) -> None:
    body = {"model": BASE, "prompt": PROMPT, "max_tokens": 1900, "temperature": 0, "logit_bias": {"258": -100}}
    headers = {"Authorization": f"Bearer {service.key}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=0.3)
    freed(service)


def freed(service: Served) -> None:
    """Wait until no streamed request is left."""
    for _ in range(400):
        figures = httpx.get(f"{service.url}/twinkle/status", headers={"X-API-Key": service.key}, trust_env=False).json()
        if figures["streams"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError("the request still runs")


def test_a_reader_that_stops_delays_nobody(service: Served, client: Any) -> None:
    body = {"model": BASE, "prompt": PROMPT, "max_tokens": 500, "stream": True, "logit_bias": {"258": -100}}
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, headers=headers, trust_env=False) as slow:
        assert slow.status_code == 200  # and nothing is read
        for _ in range(3):
            assert complete(client, BASE, max_tokens=8).finish_reason in ("length", "stop")
        assert b"[DONE]" in b"".join(slow.iter_bytes())


def test_vectors_of_an_adapter_for_embeddings(service: Served, client: Any, training: Any) -> None:
    texts = ["ab", "cde"]
    with sdk.opened(service.url, service.key) as opened:
        adapter = sdk.trainer(opened, BASE, rank=4, seed=3, user_metadata={"task": "embedding"})
        for _ in range(2):
            adapter.forward_backward([sdk.row([*PROMPT, 70, 71])], "cross_entropy").result(SECONDS)
            adapter.optim_step(ADAM).result(SECONDS)
        names = [adapter.model_id, f"{adapter.model_id}/state", f"{adapter.model_id}/sampler"]
        adapter.save_state("state").result(SECONDS)
        adapter.save_weights_for_sampler("sampler").result(SECONDS)
        found = [client.embeddings.create(model=name, input=texts) for name in names]
        lists = client.embeddings.create(model=names[0], input=texts, encoding_format="float")
        expected = vectors(newest_export(service), service, texts)
    for answer in found:
        for one, own in zip(answer.data, expected, strict=True):
            assert one.embedding == pytest.approx(own, abs=1e-4)
    assert lists.data[1].embedding == pytest.approx(found[0].data[1].embedding, abs=1e-6)
    assert lists.usage.prompt_tokens == 5
    for name in (BASE, training.model_id):
        with pytest.raises(openai.BadRequestError, match="not trained for embeddings"):
            client.embeddings.create(model=name, input="x")


def vectors(adapter: Path, service: Served, texts: list[str]) -> list[list[float]]:
    """Return normalized last hidden states of the last tokens, by transformers and PEFT alone."""
    base = str(Path(service.data).parent / "base")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()
    found = []
    for text in texts:
        ids = torch.tensor([tiny_tokenizer().encode(text)])
        with torch.no_grad():
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        found.append(torch.nn.functional.normalize(hidden, dim=0).tolist())
    return found


def test_an_adapter_trained_with_infonce_answers_after_each_step(service: Served, client: Any) -> None:
    """Trained through the native client, embedded through OpenAI's: live, saved, and loaded into a new model."""
    texts = ["ab", "cde", "xyz", "q"]
    rows = [
        {"input_ids": tiny_tokenizer().encode(text), "labels": label}
        for text, label in zip(texts, [1, 0, 1, 0], strict=True)
    ]
    options: Any = {"input": texts, "encoding_format": "float"}
    with TwinkleClient(service.url, service.key) as native:
        model = MultiLoraTransformersModel(BASE, client=native)
        model.add_adapter_to_model("a", {**CONFIG, "lora_dropout": 0.0}, seed=5)
        model.set_loss("InfonceLoss", temperature=0.1)
        model.set_optimizer("AdamW", lr=3e-2)
        run = model.training_run_id()
        for task in ("forward_only", "forward"):
            getattr(model, task)(inputs=rows, task="embedding")
        with pytest.raises(openai.BadRequestError, match="not trained for embeddings") as untrained:
            client.embeddings.create(model=run, **options)
        assert (untrained.value.param, untrained.value.code) == ("model", "unsupported_model")
        seen = []
        for _ in range(2):
            model.forward_backward(inputs=rows, task="embedding")
            model.clip_grad_and_step()
            answer = client.embeddings.create(model=run, **options)
            seen.append(np.array([entry.embedding for entry in answer.data]))
            own = model.forward_only(inputs=rows, task="embedding")["embeddings"]
            np.testing.assert_allclose(seen[-1], own, atol=1e-5)
        assert np.abs(seen[1] - seen[0]).max() > 1e-2, "the step is seen at once"
        assert answer.usage.model_dump() == {"prompt_tokens": 9, "total_tokens": 9}
        saved = {
            kind: model.save(kind, save_optimizer=kind == "full", is_sampler=kind == "sampler").twinkle_path
            for kind in ("sampler", "state", "full")
        }
        expected = vectors(newest_export(service), service, texts)
        np.testing.assert_allclose(seen[1], expected, atol=1e-4)
        loaded = MultiLoraTransformersModel(BASE, client=native)
        loaded.add_adapter_to_model("b", {**CONFIG, "lora_dropout": 0.0}, seed=6)
        loaded.load(saved["state"])
        for name in (*(f"{run}/{name}" for name in saved), saved["sampler"], loaded.training_run_id()):
            found = [entry.embedding for entry in client.embeddings.create(model=name, **options).data]
            np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=name)
    cut = client.embeddings.create(model=run, input=[row["input_ids"] for row in rows], dimensions=5)
    first = seen[1][:, :5] / np.linalg.norm(seen[1][:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose([entry.embedding for entry in cut.data], first, atol=1e-5)
    for wrong, param in (
        ({"dimensions": 4096}, "dimensions"),
        ({"input": [[5, 10**6]]}, "input"),
        ({"input": [""]}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(**{"model": run, "input": "ab", **wrong})  # type: ignore[arg-type]
        assert refused.value.param == param


def newest_export(service: Served) -> Path:
    """Return the folder of the newest checkpoint for sampling."""
    folders = [path.parent for path in Path(service.data).rglob("adapter_model.safetensors")]
    return max(
        (folder for folder in folders if "checkpoints" in folder.parts), key=lambda folder: folder.stat().st_mtime
    )


@pytest.mark.full
def test_a_trained_adapter_calls_a_tool_by_itself(service: Served, client: Any) -> None:
    with sdk.opened(service.url, service.key) as opened:
        calls_a_tool(client, sdk.trainer(opened, BASE, rank=16, seed=2))


def calls_a_tool(client: Any, training: Any) -> None:
    """Train an adapter on one call, and demand that it makes it, whole and streamed."""
    tokenizer = tiny_tokenizer(TEMPLATE.read_text())
    prompt = tokenizer.apply_chat_template(HELLO, tools=[TOOL], add_generation_prompt=True)["input_ids"]
    row = sdk.row([*prompt, *tokenizer.encode(CALL), 258], [0.0] * (len(prompt) - 1) + [1.0] * (len(CALL) + 1))
    for _ in range(80):
        training.forward_backward([row], "cross_entropy").result(SECONDS)
        training.optim_step(ADAM).result(SECONDS)
    options: Any = {"model": training.model_id, "messages": HELLO, "tools": [TOOL], "temperature": 0}
    answer = client.chat.completions.create(**options, max_tokens=200).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"city": "Rome"}
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    same = client.chat.completions.create(**{**options, "tools": [strict]}, max_tokens=200).choices[0]
    assert same.message.tool_calls[0].function == answer.message.tool_calls[0].function
    chunks = list(client.chat.completions.create(**options, max_tokens=200, stream=True))
    (call,) = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert call.function.name == "weather"


@pytest.mark.full
def test_an_engine_that_dies_is_an_error_and_the_retry_of_the_sdk_succeeds(
    service: Served, client: Any, training: Any
) -> None:
    run = training.model_id
    expected = complete(client, run).logprobs.token_logprobs
    options: Any = {"model": run, "prompt": PROMPT, "max_tokens": 1900, "stream": True, "logit_bias": {"258": -100}}
    stream = client.completions.create(**options)
    next(iter(stream))
    assert service.kill_engine()
    with pytest.raises(openai.APIError, match="repeat the request"):
        list(stream)
    found: list[Any] = []
    retried = threading.Thread(target=lambda: found.append(complete(client.with_options(max_retries=5), run)))
    retried.start()
    retried.join(SECONDS)
    assert found[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-5), "the model was restored first"
