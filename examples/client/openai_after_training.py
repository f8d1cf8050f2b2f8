"""Train with the Tinker SDK, and ask the tuned adapter with the OpenAI SDK while the training goes on.

The service answers for a run by its id, with the weights of the last `optim_step`; nothing is saved or restarted.

python examples/client/openai_after_training.py --url http://127.0.0.1:8000 --key tml-...
"""

from arguments import arguments, tinker_model

from twinkle import init_tinker_client

FACT = "The capital of Glow is Lumen."


def train(options):
    init_tinker_client(options.url, options.key)  # before the SDK is imported
    import tinker
    from openai import OpenAI

    service = tinker.ServiceClient()
    model_id = tinker_model(options.model)
    training = service.create_lora_training_client(base_model=model_id, rank=8, seed=0).result()
    tokens = training.get_tokenizer().encode(FACT)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    with OpenAI(base_url=f"{options.url.rstrip('/')}/v1", api_key=options.key) as client:

        def ask(model):
            asked = {"prompt": FACT[:-6], "max_tokens": 8, "temperature": 0}
            return client.completions.create(model=model, **asked).choices[0].text

        print(f"base: {ask(model_id)!r}")
        for step in range(1, options.steps + 1):
            passed = training.forward_backward([datum], "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=options.lr)).result()
            loss = passed.result().metrics["loss:sum"] / (len(tokens) - 1)
            print(f"step {step}/{options.steps}: loss {loss:.4f}, answer {ask(training.model_id)!r}", flush=True)
        chat = [{"role": "user", "content": "What is the capital of Glow?"}]
        answer = client.chat.completions.create(model=training.model_id, messages=chat, max_tokens=8, temperature=0)
        print(f"chat: {answer.choices[0].message.content!r}")
    service.close("success").result()


if __name__ == "__main__":
    train(arguments(__doc__, steps=16, lr=2e-3))
