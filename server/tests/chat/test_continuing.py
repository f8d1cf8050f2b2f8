"""A begun turn of the assistant is rendered up to the end of its text, as transformers does it."""

from pathlib import Path
from typing import Any

import pytest

from twinkle.testing import tiny_tokenizer
from twinkle_server.chat.render_worker import Refused, Worker

TEMPLATES = Path(__file__).parents[3] / "plugins" / "chat" / "tests" / "chat_templates"
ASKED: Any = {"role": "user", "content": "Name a city."}


def worker(folder: Path, name: str, component: str = "Template") -> Worker:
    return of_source(folder, (TEMPLATES / f"{name}.jinja").read_text(), component)


def of_source(folder: Path, source: str, component: str = "Template") -> Worker:
    tiny_tokenizer(source).save_pretrained(str(folder))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").touch()
    return Worker(str(folder), component)


def text(of: Worker, messages: list[Any], tools: Any = None, thinking: bool = True) -> str:
    return str(tiny_tokenizer().decode(of.chat(messages, tools, thinking, True)))


@pytest.mark.parametrize("begun", ["The city is called", "{", "a\nb <b>"])
@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_it_is_the_text_of_transformers(tmp_path: Path, name: str, begun: str) -> None:
    made = worker(tmp_path, name)
    for messages in ([ASKED], [ASKED, {"role": "assistant", "content": begun}, ASKED]):
        begun_messages = [*messages, {"role": "assistant", "content": begun}]
        expected = made._tokenizer.apply_chat_template(
            begun_messages, continue_final_message=True, enable_thinking=True, tokenize=False
        )
        assert text(made, begun_messages) == expected
        assert text(made, begun_messages).endswith(begun)


def test_a_prompt_that_opens_a_thought_is_continued_after_it(tmp_path: Path) -> None:
    made = worker(tmp_path, "deepseek_r1", "DeepseekR1Template")
    begun = [ASKED, {"role": "assistant", "content": "The city"}]
    assert text(made, begun).endswith("<think>\n\n</think>\n\nThe city")
    thought = [ASKED, {"role": "assistant", "content": "The city", "reasoning_content": "Rome?"}]
    assert text(made, thought).endswith("<think>\nRome?\n</think>\n\nThe city")


def test_text_that_looks_like_the_mark_is_kept(tmp_path: Path) -> None:
    made = worker(tmp_path, "qwen2_5")
    begun = [{**ASKED, "content": "TWINKLEENDX"}, {"role": "assistant", "content": "a TWINKLEEND b "}]
    assert text(made, begun).endswith("a TWINKLEEND b ")


def test_templates_that_cannot_continue_say_so(tmp_path: Path) -> None:
    hidden = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    made = of_source(tmp_path, hidden)
    with pytest.raises(Refused, match="does not show the text of the last message"):
        text(made, [ASKED, {"role": "assistant", "content": "x"}])
    made._templates = {True: object()}
    with pytest.raises(Refused, match="cannot continue a message"):
        text(made, [ASKED, {"role": "assistant", "content": "x"}])
