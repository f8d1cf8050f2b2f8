"""Each row of the table in docs/reference/errors.md is a mistake that is made here; error and message are compared."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle import DeviceMesh, errors, initialize, registry
from twinkle.cli import main
from twinkle.data_format import LossOutput, SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
ROW = {"input_ids": [1, 2, 3], "labels": [2, 3, -100]}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
MISTAKES: dict[str, Callable[[], Any]] = {}


def mistake(text: str) -> Callable[[Callable[[], Any]], None]:
    def remember(make: Callable[[], Any]) -> None:
        MISTAKES[text] = make

    return remember


def model(**options: Any) -> Any:
    return TransformersModel(model_id="builtin://smollm2-135m-instruct", mixed_precision="no", **options)


def write(name: str, text: str) -> str:
    Path(name).write_text(text, "utf-8")
    return f"./{name}"


@mistake("a misspelt component")
def _() -> None:
    model().set_loss("CrossEntropyLos")


@mistake("a component of another kind")
def _() -> None:
    model().set_loss("AdamW")


@mistake("a plugin that is not installed")
def _() -> None:
    model().set_loss("acme-losses/FocalLoss")


@mistake("a class that is not a loss")
def _() -> None:
    model().set_loss(dict)


@mistake("a misspelt keyword of a component")
def _() -> None:
    model().set_loss("CrossEntropyLoss", dtf=True)


@mistake("a misspelt argument of a loss")
def _() -> None:
    model().forward_backward(inputs=[ROW], advantage=[1.0])


@mistake("a missing argument of a loss")
def _() -> None:
    def needs(inputs, outputs, weight):
        return LossOutput(outputs["logps"].sum() * weight, 1)

    trained = model()
    trained.set_loss(needs)
    trained.forward_backward(inputs=[ROW])


@mistake("a loss that reads an output that was not computed")
def _() -> None:
    def reads(inputs: Any, outputs: Any) -> LossOutput:
        return LossOutput(outputs["logits"].sum(), 1)

    trained = model()
    trained.set_loss(reads)
    trained.forward_backward(inputs=[ROW])


@mistake("a loss without a denominator")
def _() -> None:
    trained = model()
    trained.set_loss(lambda inputs, outputs: {"loss": outputs["logps"].sum()})
    trained.forward_backward(inputs=[ROW])


@mistake("a misspelt sampling parameter")
def _() -> None:
    SamplingParams.from_dict({"temprature": 0.5})


@mistake("a name that a file does not define")
def _() -> None:
    registry().resolve(write("my_loss.py", "x = 1\n") + ":MyLoss", "loss")


@mistake("a file that cannot be imported")
def _() -> None:
    registry().resolve(write("bad_loss.py", "import nothing_like_this\n") + ":MyLoss", "loss")


@mistake("a hub that is not installed")
def _() -> None:
    Dataset(DatasetMeta("s3://org/rows"))


@mistake("an invalid repository name")
def _() -> None:
    Dataset(DatasetMeta("hf://rows/of/mine"))


@mistake("an upload of a missing folder")
def _() -> None:
    model().upload_to_hub("checkpoint-1", "hf://org/name")


def published() -> str:
    folder = Path("acme-focal").absolute()
    folder.mkdir()
    (folder / "__init__.py").write_text("from twinkle.loss import Loss\n\n\nclass Focal(Loss): ...\n", "utf-8")
    return f"file://{folder}"


@mistake("code from a hub that is not trusted")
def _() -> None:
    registry().resolve(published(), "loss")


@mistake("code from a hub that was changed after it was added")
def _() -> None:
    reference = published()
    assert main(["plugins", "add", reference, "--yes"], standalone_mode=False) in (0, None)
    (stored,) = Path(os.environ["TWINKLE_CACHE_DIR"]).glob("code/trees/*/files/__init__.py")
    stored.write_bytes(stored.read_bytes()[:-1] + b" ")
    registry().resolve(reference, "loss")


@mistake("an unlocked plugin in a frozen run")
def _() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINKLE_FROZEN", "1")
        registry.cache_clear()
        try:
            registry().resolve("CrossEntropyLoss", "loss")
        finally:
            registry.cache_clear()


@mistake("a damaged lock")
def _() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINKLE_TRUST_FOLDER", str(Path.cwd()))
        Path("twinkle.lock").write_text('schema = 1\n[[hub]]\nreference = "hf://acme/focal\n', "utf-8")
        registry.cache_clear()
        registry()


@mistake("an unknown key in `twinkle.toml`")
def _() -> None:
    write("twinkle.toml", "[plugins]\ndisabled = []\n")
    registry.cache_clear()
    registry()


@mistake("a missing model")
def _() -> None:
    TransformersModel(model_id="./no-such-model")


@mistake("an adapter folder used as a model")
def _() -> None:
    trained = model()
    trained.add_adapter_to_model("a", {"r": 2, "target_modules": "all-linear"})
    TransformersModel(model_id=trained.save("adapter", output_dir="."))


@mistake("a mesh before torchrun is initialized")
def _() -> None:
    model(device_mesh=DeviceMesh.from_sizes(dp_size=2))


@mistake("a mesh that is larger than the number of processes")
def _() -> None:
    initialize(global_device_mesh=DeviceMesh.from_sizes(fsdp_size=4, dp_size=2))


@mistake("mesh sizes that do not match the world size")
def _() -> None:
    DeviceMesh.from_sizes(world_size=6, dp_size=4)


@mistake("a missing data set")
def _() -> None:
    Dataset(DatasetMeta("no-such-rows.jsonl"))


@mistake("a line that is not JSON")
def _() -> None:
    Dataset(DatasetMeta(write("rows.jsonl", '{"a": 1}\n{"a": \n')))


@mistake("an empty data set")
def _() -> None:
    Dataset(DatasetMeta(write("empty.jsonl", "")))


@mistake("rows without `messages`")
def _() -> None:
    rows = Dataset(DatasetMeta(data=[{"text": "Hi"}]))
    rows.set_template("Template", model_id="builtin://smollm2-135m-instruct")
    rows.encode()


@mistake("a row that is too long")
def _() -> None:
    rows = Dataset(DatasetMeta(data=[CHAT]))
    rows.set_template("Template", model_id="builtin://smollm2-135m-instruct", max_length=8)
    rows.encode()


@mistake("encoding without a template")
def _() -> None:
    Dataset(DatasetMeta(data=[CHAT])).encode()


@mistake("a misspelt option of the data loader")
def _() -> None:
    DataLoader([ROW], batch_size=1, num_worker=2)


@mistake("rows without labels")
def _() -> None:
    model().forward_backward(inputs=[{"input_ids": [1, 2, 3]}])


@mistake("a token outside the vocabulary")
def _() -> None:
    model().forward_backward(inputs=[{"input_ids": [5, 999], "labels": [6, -100]}])


@mistake("position ids that do not increase")
def _() -> None:
    model().forward_backward(inputs=[{**ROW, "position_ids": [0, 1, 1]}])


@mistake("a step before a backward pass")
def _() -> None:
    fresh = model()
    fresh.set_optimizer("SGD")
    fresh.step()


@mistake("an adapter that does not exist")
def _() -> None:
    model().forward_backward(inputs=[ROW], adapter_name="b")


@mistake("a loss that is NaN")
def _() -> None:
    broken = model()
    broken.set_loss(lambda inputs, outputs: {"loss": outputs["logps"].sum() * float("nan"), "num_tokens": 2})
    broken.forward_backward(inputs=[ROW])


@mistake("a mean instead of a sum")
def _() -> None:
    mean = model()
    mean.set_loss(lambda inputs, outputs: {"loss": outputs["logps"].mean(), "num_tokens": 0})
    mean.forward_backward(inputs=[ROW, ROW], micro_batch_size=1)


@mistake("a prompt longer than the model's context")
def _() -> None:
    TorchSampler(model=model()).sample({"input_ids": [1] * 600}, SamplingParams(max_tokens=1))


@mistake("resuming from weights without optimizer state")
def _() -> None:
    saved = model()
    saved.set_optimizer("SGD")
    saved.resume_from_checkpoint(saved.save("weights-only", output_dir="."))


@mistake("adapter weights with a different scale")
def _() -> None:
    for alpha in (64, 8):
        adapted = model()
        adapted.add_adapter_to_model("default", {"r": 2, "lora_alpha": alpha, "target_modules": ["q_proj"]})
        if alpha == 64:
            adapted.save("alpha", output_dir=".")
    adapted.load("alpha", output_dir=".")


@mistake("an output folder that is not a checkpoint")
def _() -> None:
    Path("notes").mkdir()
    write("notes/mine.txt", "x")
    model().save("notes", output_dir=".")


@mistake("an output folder that is a file")
def _() -> None:
    model().save("adapter", output_dir=write("taken", "x"))


def table() -> dict[str, tuple[str, str]]:
    rows = [line[2:-2].split(" | ", 2) for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    return {text: (error.strip("`"), message.strip("` ")) for text, error, message in rows[2:]}


def test_the_table_has_a_row_for_each_mistake() -> None:
    assert list(table()) == list(MISTAKES)


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_gets_the_error_that_the_table_says(text: str, place: Path) -> None:
    error, message = table()[text]
    kind: type[Exception] = getattr(errors, error)
    pattern = re.escape(message.replace("\\|", "|")).replace(re.escape("..."), ".+")
    with pytest.raises(kind, match=f"^{pattern}$") as caught:
        MISTAKES[text]()
    assert type(caught.value) is kind
