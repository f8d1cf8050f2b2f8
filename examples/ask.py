"""Ask a trained adapter: python examples/ask.py runs/NAME/adapter "Who are you?" "Who created you?"."""

import sys

from twinkle.sampler import TorchSampler

folder, *questions = sys.argv[1:]
sampler = TorchSampler("builtin://smollm2-135m-instruct", adapter_path=folder)
prompts = [{"messages": [{"role": "user", "content": question}]} for question in questions]
for response in sampler.sample(prompts, {"max_tokens": 60, "temperature": 0}):
    print(response.sequences[0].decoded)
