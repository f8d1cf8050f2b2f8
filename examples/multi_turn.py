"""SmolLM2 answers sums with a calculator: turns, tool calls and results, ready to be trained on.

python examples/multi_turn.py
python examples/multi_turn.py --trouble     (the calculator also fails, hangs and returns junk)
"""

import argparse
import itertools
import time

from twinkle.rollout import MultiTurnRollout
from twinkle.sampler import TorchSampler
from twinkle.tool import CalculatorTool
from twinkle_agentic.tools import ToolManager

QUESTIONS = ("What is 37 + 48?", "What is 19 * 21?", "What is 1000 - 387?", "What is 144 / 12?")
SYSTEM = "Answer questions with a calculator. Call it as shown, wait for its result, then say the answer."


class TroubledCalculator(CalculatorTool):
    """Fails, hangs and returns junk in turns before it computes, as tools out there do."""

    calls = itertools.count(1)

    def __call__(self, tool_name, arguments):
        trouble = next(self.calls) % 4
        if trouble == 1:
            raise OSError("the calculator is on fire")
        if trouble == 2:
            time.sleep(3600)  # the tool manager does not wait so long
        if trouble == 3:
            return b"\x00\xff" * 100
        return super().__call__(tool_name, arguments)


def said(role, content):
    return {"role": role, "content": content}


def call(expression):
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def prompt(question):
    """Two conversations to copy from: the smallest of models was never taught to call tools."""
    examples = []
    for text, expression, result in (("What is 12 * 7?", "12 * 7", "84"), ("What is 90 - 41?", "90 - 41", "49")):
        examples += [said("user", text), said("assistant", call(expression)), said("tool", result)]
        examples.append(said("assistant", f"The answer is {result}."))
    return {"messages": [said("system", SYSTEM), *examples, said("user", question)]}


def play(sampler, trouble=False, trace_dir="runs/multi_turn"):
    tool = TroubledCalculator() if trouble else CalculatorTool()
    rollout = MultiTurnRollout(
        sampler,
        tool_manager=ToolManager([tool], time_limit=1.0),
        sampling_params={"max_tokens": 64, "temperature": 0.0, "seed": 0},
        max_turns=4,
        trace_dir=trace_dir,
    )
    prompts = [prompt(question) for question in QUESTIONS]
    rows = rollout(prompts)
    for given, row in zip(prompts, rows, strict=True):
        for message in row["messages"][len(given["messages"]) - 1 :]:
            calls = "".join(
                f" [calls {c['function']['name']}({c['function']['arguments']})]" for c in message.get("tool_calls", ())
            )
            print(f"{message['role']:>9}: {message['content']}{calls}")
        trained, tokens = len(row["logprobs"]), row["length"]
        print(f"  -> {row['stop_reason']} after {row['turns']} turns; {trained} of {tokens} tokens are trained\n")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trouble", action="store_true", help="let the calculator also fail, hang and return junk")
    play(TorchSampler("builtin://smollm2-135m-instruct"), parser.parse_args().trouble)
    print("traces: runs/multi_turn")


if __name__ == "__main__":
    main()
