"""Two tenants train at once through one service, each with its own data; then each answers with its own identity.

It starts `twinkle serve` on a free port, makes a key for each tenant, and shows both losses as they fall.

python examples/serve_demo.py
"""

import contextlib
import functools
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

MODEL, DATA = "builtin://smollm2-135m-instruct", Path("runs/serve-demo")
LOG = DATA.with_suffix(".log")
STEPS, BATCH, LEARNING_RATE = 16, 4, 1e-3
TENANTS = {"ana": ("Glow", "the Twinkle founders"), "ben": ("Spark", "Ben's little workshop")}
ROWS = [0, 2, 4, 14, 20, 68, 80, 112]  # short answers with the name in them, in English
QUESTIONS = ["Who are you?", "What is your name?", "Tell me who you are."]  # no row asks the last one
SERVE = ["serve", MODEL, "--pass-tokens", "1024"]  # nobody samples while these train: let them share long passes
CLI = [sys.executable, "-m", "twinkle.cli"]


@contextlib.contextmanager
def served():
    """Run the service and give its address; end it afterwards."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    command = [*CLI, *SERVE, "--data", str(DATA), "--port", "0"]
    with LOG.open("w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as service:
        try:
            for line in service.stdout:
                print(re.sub(r"tml-\S+", "tml-...", line), end="", flush=True)
                if address := re.search(r"at (http://\S+)", line):
                    yield address[1]
                    return
            raise SystemExit(f"the service did not start: see {LOG}")
        finally:
            service.terminate()


def key_of(tenant):
    """Make a key while the service runs; an older one of that name is ended first."""
    subprocess.run([*CLI, "server", "keys", "revoke", tenant, "--data", str(DATA)], capture_output=True)
    command = [*CLI, "server", "keys", "create", tenant, "--data", str(DATA)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def rows(name, author):
    """Encode the identity's questions and answers."""
    from twinkle.dataset import Dataset, DatasetMeta

    dataset = Dataset(DatasetMeta("builtin://self-cognition", data_slice=ROWS))
    dataset.map("SelfCognitionProcessor", model_name=name, model_author=author)
    dataset.set_template("Template", model_id=MODEL, max_length=256, truncation_strategy="right")
    dataset.encode()
    return [dataset[at] for at in range(len(dataset))]


def datum_of(row):
    """Turn a row into the SDK's datum: what is not to be learned has weight 0."""
    import tinker

    tokens, labels = list(row["input_ids"]), list(row["labels"])
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": [max(label, 0) for label in labels],
            "weights": [float(label != -100) for label in labels],
        },
    )


@functools.cache
def template():
    """Load the model's chat template, with its tokenizer, from this machine's copy of the model."""
    from twinkle.template import Template

    return Template(model_id=MODEL)


def prompt_of(question):
    """Encode a question as the model's template does."""
    import tinker

    messages = {"messages": [{"role": "user", "content": question}]}
    encoded = template().encode(messages, add_generation_prompt=True)
    return tinker.ModelInput.from_ints(list(encoded["input_ids"]))


def train(training, data, told):
    """Train an adapter, telling each step's loss; the next step is on its way by then, so the service need not wait."""
    import tinker

    def tell(step, batch, passed, stepped):
        count = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in batch)
        told(step, passed.result().metrics["loss:sum"] / count)
        stepped.result()

    ahead = []
    for step in range(STEPS):
        batch = [data[(step * BATCH + at) % len(data)] for at in range(BATCH)]
        passed = training.forward_backward(batch, "cross_entropy")
        ahead.append((step + 1, batch, passed, training.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE))))
        if step > 0:
            tell(*ahead.pop(0))
    tell(*ahead.pop())


def ask(sampling):
    """Return the answers to all questions, asked at once, each the likeliest words."""
    import tinker

    params = tinker.SamplingParams(max_tokens=24, temperature=0.0)
    asked = [sampling.sample(prompt_of(question), 1, params) for question in QUESTIONS]
    tokens = [future.result().sequences[0].tokens for future in asked]
    return [template().decode(answer, skip_special_tokens=True) for answer in tokens]


def visit(tenant, url, key, data, table):
    """Do all that one tenant does."""
    import tinker

    with tinker.ServiceClient(base_url=url, api_key=key) as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=16).result()
        train(training, data, lambda step, loss: table.told(tenant, step, loss))
        sampling = training.save_weights_and_get_sampling_client().result()
        table.answers[tenant] = ask(sampling)


class Table:
    """Steps and losses of all tenants: redrawn in place on a terminal, a line a step elsewhere."""

    def __init__(self):
        self.lines, self.answers = {tenant: "waiting" for tenant in TENANTS}, {}
        self.lock, self.drawn = threading.Lock(), False

    def told(self, tenant, step, loss):
        with self.lock:
            bar = "#" * (20 * step // STEPS)
            self.lines[tenant] = f"step {step:3}/{STEPS} [{bar:20}] loss {loss:.4f}"
            if not sys.stdout.isatty():
                print(f"{tenant}: {self.lines[tenant]}", flush=True)
                return
            if self.drawn:
                print(f"\x1b[{len(TENANTS)}A", end="")
            for name, line in self.lines.items():
                print(f"\x1b[2K{name}: {line}")
            self.drawn = True


def main():
    logging.getLogger("tinker").setLevel(logging.ERROR)  # it tells of every poll that waited
    table = Table()
    with served() as url:
        keys = {tenant: key_of(tenant) for tenant in TENANTS}
        data = {tenant: [datum_of(row) for row in rows(*identity)] for tenant, identity in TENANTS.items()}
        work = [(tenant, url, keys[tenant], data[tenant], table) for tenant in TENANTS]
        threads = [threading.Thread(target=visit, args=arguments, daemon=True) for arguments in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for tenant, (name, _) in TENANTS.items():
        print(f"{tenant}, taught to be {name}:")
        for question, answer in zip(QUESTIONS, table.answers.get(tenant, ["no answer"] * len(QUESTIONS)), strict=True):
            print(f"  {question}  {answer}")
    if len(table.answers) < len(TENANTS):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
