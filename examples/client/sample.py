"""Sample from the base model of a service, or (`--adapter`) from a checkpoint.

python examples/client/sample.py --adapter twinkle://RUN/weights/final
"""

from arguments import arguments, served_model

from twinkle.data_format import SamplingParams
from twinkle_client import init_twinkle_client
from twinkle_client.sampler import vLLMSampler

QUESTIONS = ("Who are you?", "What is your name?")


def sample(options):
    client = init_twinkle_client(base_url=options.url, api_key=options.key)
    sampler = vLLMSampler(model_id=served_model(client, options.model))
    sampler.set_template("Template")
    prompts = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    params = SamplingParams(
        max_tokens=options.max_tokens, num_samples=options.count, temperature=options.temperature, seed=0, logprobs=1
    )
    responses = sampler.sample(prompts, params, adapter_uri=options.adapter)
    for question, response in zip(QUESTIONS, responses, strict=True):
        print(question)
        for sequence in response.sequences:
            mean = sum(pairs[0][1] for pairs in sequence.logprobs) / len(sequence.tokens)
            print(f"  {sequence.decoded!r} ({sequence.stop_reason}, mean log-probability {mean:.3f})")
    client.close()


if __name__ == "__main__":
    sample(arguments(__doc__, adapter=None, max_tokens=32, count=2, temperature=0.0))
