"""A model of a service answers sums with a calculator, which runs here; one step then trains on the conversations.

python examples/client/multi_turn_rollout.py --url http://127.0.0.1:8000 --key tml-...
"""

from arguments import arguments, served_model
from peft import LoraConfig

from twinkle.template import Template
from twinkle_agentic.tools import CalculatorTool, ToolManager
from twinkle_client import init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.rollout import ClientMultiTurnRollout
from twinkle_client.sampler import vLLMSampler

QUESTIONS = (("What is 37 + 48?", "85"), ("What is 19 * 21?", "399"), ("What is 144 / 12?", "12"))
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>'


def conversation(question):
    """Return a prompt with a conversation to copy from."""
    turns = (("user", "What is 12 * 7?"), ("assistant", CALL), ("tool", "84"), ("assistant", "84"), ("user", question))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def play(options):
    client = init_twinkle_client(base_url=options.url, api_key=options.key)
    model_id = served_model(client, options.model)
    rollout = ClientMultiTurnRollout(
        vLLMSampler(model_id=model_id),
        Template(model_id=model_id),
        ToolManager([CalculatorTool()]),
        {"max_tokens": options.max_tokens, "temperature": 0.7, "seed": 0, "logprobs": 1},
        max_turns=3,
    )
    rows = rollout([conversation(question) for question, _ in QUESTIONS])
    for (question, answer), row in zip(QUESTIONS, rows, strict=True):
        said = row["messages"][-1]["content"]
        print(f"{question} {said!r} (right: {answer in said}; {row['stop_reason']} after {row['turns']} turns)")

    model = MultiLoraTransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", LoraConfig(r=8, target_modules="all-linear"), seed=0)
    model.set_optimizer("AdamW", lr=options.lr)
    for step in range(1, options.steps + 1):
        loss = model.forward_backward(inputs=rows)["loss"]
        model.clip_grad_and_step()
        print(f"step {step}/{options.steps}: loss {loss:.4f}", flush=True)
    client.close()


if __name__ == "__main__":
    play(arguments(__doc__, max_tokens=32, steps=2, lr=1e-4))
