"""Counts the files of our own that six everyday journeys enter, from the call to the result.

    python scripts/journeys.py                  # all six, a line each
    python scripts/journeys.py run_sft --list   # one of them, with the files

A file counts when a function that is defined in it is called; that a module or the body of a class is executed by an
import does not count. What is done once in a process (imports, loading the model, the first call) is not part of a
journey, except for `run sft` and `plugins add`, which are whole processes.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHASE, ENTERED = "TWINKLE_JOURNEY_PHASE", "TWINKLE_JOURNEY_ENTERED"
WATCHER = f'''
import os, sys, threading, time

if "{PHASE}" in os.environ:
    phase_file, entered_folder = os.environ["{PHASE}"], os.environ["{ENTERED}"]
    entered = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_flags & 1:  # CO_OPTIMIZED: neither a module nor the body of a class
            entered.add(frame.f_code.co_filename)

    def watch():
        seen = ""
        while True:
            try:
                phase = open(phase_file).read().strip()
            except OSError:
                phase = ""
            if phase != seen:
                if phase.startswith("begin"):
                    entered.clear()
                elif phase.startswith("end"):
                    write(phase)
                seen = phase
            time.sleep(0.02)

    def write(phase):
        path = os.path.join(entered_folder, f"{{phase}}-{{os.getpid()}}")
        with open(path + ".part", "w") as file:
            file.write("\\n".join(sorted(entered.copy())))
        os.replace(path + ".part", path)

    import atexit
    threading.setprofile(note)
    sys.setprofile(note)
    threading.Thread(target=watch, daemon=True).start()
    atexit.register(write, "exit")
'''
MODEL_SCRIPT = """
import sys, time, pathlib
sys.path.insert(0, "{root}/tests/support")
from twinkle.testing import tiny_model
from twinkle.model import TransformersModel
from twinkle.loss import CrossEntropyLoss
phase = pathlib.Path("{phase}")

def journey(name, call):
    call()
    phase.write_text("begin-" + name)
    time.sleep(0.3)
    call()
    phase.write_text("end-" + name)
    time.sleep(0.3)

model = TransformersModel(model_id=str(tiny_model("{folder}/tiny")))
from peft import LoraConfig
model.add_adapter_to_model("default", LoraConfig(r=4, target_modules="all-linear"))
model.set_optimizer("AdamW", lr=1e-3)
model.set_loss("CrossEntropyLoss")
row = {{"input_ids": [1, 2, 3, 4], "labels": [2, 3, 4, -100]}}
journey("set_loss", lambda: model.set_loss("CrossEntropyLoss"))
journey("forward_backward", lambda: model.forward_backward(inputs=[row]))
"""
CLIENT_SCRIPT = """
import os, pathlib, time
os.environ["TINKER_TELEMETRY"] = "0"
import tinker
phase = pathlib.Path("{phase}")
service = tinker.ServiceClient(base_url="{url}", api_key="tml-none")
training = service.create_lora_training_client(base_model="{model}", rank=4)
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]),
    loss_fn_inputs={{"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4}},
)
sampling = training.save_weights_and_get_sampling_client()

def journey(name, call):
    call()
    time.sleep(1)
    phase.write_text("begin-" + name)
    time.sleep(0.3)
    call()
    phase.write_text("end-" + name)
    time.sleep(0.3)

journey("tinker_forward_backward", lambda: training.forward_backward([datum], "cross_entropy").result())
prompt = tinker.ModelInput.from_ints([1, 2, 3])
journey("tinker_sample", lambda: sampling.sample(prompt, 1, tinker.SamplingParams(max_tokens=4)).result())
"""
JOURNEYS = (
    "set_loss", "forward_backward", "tinker_forward_backward", "tinker_sample", "run_sft", "plugins_add",
)  # fmt: skip


def main() -> None:
    """Walk the journeys and print how many files each enters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journeys", nargs="*", metavar="JOURNEY", help=f"by default all: {', '.join(JOURNEYS)}")
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--json", type=Path, help="write the files of each journey here")
    options = parser.parse_args()
    if unknown := [name for name in options.journeys if name not in JOURNEYS]:
        parser.error(f"unknown journey {unknown[0]!r}; choose from {', '.join(JOURNEYS)}")
    with tempfile.TemporaryDirectory() as name:
        files_of = Walk(Path(name)).walk(options.journeys or JOURNEYS)
    for journey, files in files_of.items():
        sys.stdout.write(f"{journey:<26}{len(files):4d} files\n")
        if options.list:
            sys.stdout.write("".join(f"    {file}\n" for file in files))
    if options.json:
        options.json.write_text(json.dumps(files_of, indent=1))


class Walk:
    """Runs the journeys in processes that note which files they enter.

    Args:
        folder: an empty folder for everything that they write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.phase, self.entered = folder, folder / "phase", folder / "entered"
        self.entered.mkdir()
        (folder / "watch").mkdir()
        (folder / "watch" / "sitecustomize.py").write_text(WATCHER)
        self.environment = os.environ | {
            "PYTHONPATH": str(folder / "watch"), PHASE: str(self.phase), ENTERED: str(self.entered),
            "OMP_NUM_THREADS": "1", "TWINKLE_STATE_DIR": str(folder / "state"),
        }  # fmt: skip

    def walk(self, journeys: Sequence[str]) -> dict[str, list[str]]:
        """Return the files of each of these journeys, relative to the root of the repository."""
        self._model()  # makes the tiny model, too
        if any(name.startswith("tinker_") for name in journeys):
            self._service()
        if "run_sft" in journeys:
            self._whole("run_sft", self._sft)
        if "plugins_add" in journeys:
            self._whole("plugins_add", self._add)
        return {name: self._files(f"end-{name}-*") or self._files(f"{name}-*") for name in JOURNEYS if name in journeys}

    def _files(self, pattern: str) -> list[str]:
        paths = {line for file in self.entered.glob(pattern) for line in file.read_text().splitlines()}
        ours = (Path(path) for path in paths if path.startswith(f"{ROOT}/"))
        return sorted(str(path.relative_to(ROOT)) for path in ours if "/src/" in str(path))

    def _python(self, script: str, **environment: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=self.folder, env=self.environment | environment, check=False
        )
        if done.returncode:
            raise SystemExit("a journey failed")

    def _model(self) -> None:
        self._python(MODEL_SCRIPT.format(root=ROOT, phase=self.phase, folder=self.folder))

    def _service(self) -> None:
        tiny = self.folder / "tiny"
        command = [
            sys.executable,
            "-m",
            "twinkle.cli",
            "serve",
            str(tiny),
            "--data",
            "data",
            "--port",
            "0",
            "--no-auth",
        ]
        with self._served(command) as url:
            plain = {key: value for key, value in os.environ.items() if key != PHASE}
            script = CLIENT_SCRIPT.format(phase=self.phase, url=url, model=tiny)
            subprocess.run([sys.executable, "-c", script], cwd=self.folder, env=plain, check=True)
            time.sleep(1)

    @contextlib.contextmanager
    def _served(self, command: list[str]) -> Iterator[str]:
        import re

        with subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if address := re.search(r"at (http://\S+)", line):
                        yield address[1]
                        return
                raise SystemExit("the service did not start")
            finally:
                process.terminate()

    def _whole(self, name: str, run: Callable[[], None]) -> None:
        """Run a journey that is a whole process, or several, and keep what they entered under its name."""
        for earlier in self.entered.glob("exit-*"):
            earlier.unlink()
        run()
        for number, file in enumerate(sorted(self.entered.glob("exit-*"))):
            file.rename(self.entered / f"{name}-{number}")

    def _twinkle(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "twinkle.cli", *words], cwd=self.folder, env=self.environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"twinkle {' '.join(words)} failed:\n{done.stdout}{done.stderr}")

    def _sft(self) -> None:
        config = {
            "model": {"id": str(self.folder / "tiny")},
            "data": {"id": "builtin://self-cognition", "preprocessor": "SelfCognitionProcessor", "slice": 8,
                     "preprocessor_args": {"model_name": "Glow", "model_author": "us"}},
            "lora": {"rank": 4, "target_modules": "all-linear"},
            "batch_size": 2, "max_steps": 1,
        }  # fmt: skip
        (self.folder / "sft.yaml").write_text(json.dumps(config))
        self._twinkle("run", "sft", "--config", "sft.yaml")

    def _add(self) -> None:
        repository = self.folder / "acme"
        repository.mkdir()
        (repository / "__init__.py").write_text(
            "from twinkle.data_format import LossOutput\nfrom twinkle.loss import Loss\n\n\nclass AcmeLoss(Loss):\n"
            '    """A loss."""\n\n    def __call__(self, inputs, outputs, **kwargs):\n'
            "        return LossOutput(loss_sum=outputs['logps'].sum(), denominator=1)\n"
        )
        self._twinkle("plugins", "add", f"file://{repository}", "--yes")
        self._python(
            f"import twinkle; print(twinkle.registry().resolve('file://{repository}#AcmeLoss', 'loss'))",
            TWINKLE_TRUST_FOLDER=str(self.folder),
        )


if __name__ == "__main__":
    main()
