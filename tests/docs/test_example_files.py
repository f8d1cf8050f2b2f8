"""The scripts under examples/ have the published structure; examples/README.md runs them."""

import ast
import runpy
import threading
import time
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# The published script for one GPU. Ours names another model and other data, and has more lines.
PUBLISHED = """
from twinkle.model import TransformersModel
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta

def train():
    dataset = Dataset(dataset_meta=DatasetMeta('ms://swift/self-cognition'))
    dataset.set_template('Template', model_id='ms://Qwen/Qwen3.5-4B')
    dataset.encode()

    dataloader = DataLoader(dataset=dataset, batch_size=8)
    model = TransformersModel(model_id='ms://Qwen/Qwen3.5-4B')

    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()

if __name__ == '__main__':
    train()
"""


# The published script for torchrun: model, data, names and the sizes of the mesh are ours.
FSDP2 = """
from peft import LoraConfig
from tqdm import tqdm
import twinkle
from twinkle import DeviceMesh, get_device_placement, get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor
device_mesh = DeviceMesh.from_sizes(fsdp_size=4, dp_size=2)
twinkle.initialize(mode='local', global_device_mesh=device_mesh)
logger = get_logger()
def eval(model):
    dataset = Dataset(dataset_meta=DatasetMeta('ms://swift/self-cognition', data_slice=range(100)))
    dataset.set_template('Qwen3_5Template', model_id='ms://Qwen/Qwen3.5-4B')
    dataset.map(SelfCognitionProcessor('twinkle LLM', 'ModelScope Community'))
    dataset.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=8)
    for step, batch in tqdm(enumerate(dataloader)):
        model.forward_only(inputs=batch)
        model.calculate_loss()
    metrics = model.calculate_metric(is_training=False)
    return metrics
def train():
    dataset = Dataset(dataset_meta=DatasetMeta('ms://swift/self-cognition', data_slice=range(1000)))
    dataset.set_template('Qwen3_5Template', model_id='ms://Qwen/Qwen3.5-4B')
    dataset.map(SelfCognitionProcessor('twinkle LLM', 'ModelScope Community'))
    dataset.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=8)
    model = TransformersModel(model_id='ms://Qwen/Qwen3.5-4B')
    model.model._no_split_modules = {'Qwen3_5DecoderLayer'}
    lora_config = LoraConfig(r=8, lora_alpha=32, target_modules='all-linear')
    model.add_adapter_to_model('default', lora_config, gradient_accumulation_steps=2)
    model.set_optimizer(optimizer_cls='AdamW', lr=1e-4)
    model.set_lr_scheduler(
        scheduler_cls='CosineWarmupScheduler', num_warmup_steps=5, num_training_steps=len(dataloader))
    logger.info(get_device_placement())
    logger.info(model.get_train_configs())
    logger.info(f'Total steps: {len(dataloader)}')
    loss_metric = 99.0
    for step, batch in enumerate(dataloader):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        if step % 20 == 0:
            metric = model.calculate_metric(is_training=True)
            logger.info(f'Current is step {step} of {len(dataloader)}, metric: {metric}')
        if step > 0 and step % 40 == 0:
            metrics = eval(model)
            logger.info(f'Eval metric: {metrics}')
            metrics['step'] = step
            if loss_metric > float(metrics['loss']):
                model.save(f'checkpoint-{step}')
                loss_metric = float(metrics['loss'])
    model.save(f'last-checkpoint')
if __name__ == '__main__':
    train()
"""


def statements(source: str) -> list[str]:
    """Return imports (sorted: their order is a matter of taste), heads of blocks and statements, one text each."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "://" in node.value:
            node.value = "scheme://"
    imports = sorted(ast.unparse(node) for node in tree.body if isinstance(node, ast.ImportFrom))
    rest = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    return imports + [line.strip() for node in rest for line in ast.unparse(node).splitlines() if line.strip()]


def without_values(source: str) -> tuple[set[str], list[str]]:
    """Return the structure with numbers and texts made equal, and texts with and without fields too."""
    tree = ast.parse(source)
    body = tree.body[1:] if ast.get_docstring(tree) else tree.body
    module = Blank().visit(ast.Module(body, []))
    imports = {ast.dump(node) for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)}
    return imports, [ast.dump(node) for node in module.body if not isinstance(node, ast.Import | ast.ImportFrom)]


class Blank(ast.NodeTransformer):
    """Puts one value in place of every constant."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(type(node.value).__name__)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("str")


def test_the_torchrun_script_is_the_published_one_but_for_its_values() -> None:
    assert without_values((EXAMPLES / "fsdp2.py").read_text("utf-8")) == without_values(FSDP2)


def test_the_single_gpu_script_is_the_published_one_with_lines_between() -> None:
    ours = iter(statements((EXAMPLES / "single_gpu.py").read_text("utf-8")))
    assert [line for line in statements(PUBLISHED) if line not in ours] == []


def test_the_calculator_of_the_multi_turn_example_fails_hangs_and_returns_junk_and_the_rollout_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from twinkle.template import Template
    from twinkle.testing import tiny_tokenizer
    from twinkle_agentic.examples import ScriptedSampler

    class Asks(ScriptedSampler):
        """Calls the calculator once a question; the examples of the prompt are turns too."""

        def _next(self, row: Any, params: Any) -> Any:
            asked = row["messages"][-1]["role"] == "user"
            self.texts = [script["call"]("2 + 3") if asked else "I see."]
            return super()._next(row, params.__class__())

    script = runpy.run_path(str(EXAMPLES / "multi_turn.py"), run_name="example")
    let_go = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: let_go.wait(60))
    rows = script["play"](Asks([], Template(tokenizer=tiny_tokenizer())), trouble=True, trace_dir=tmp_path)
    let_go.set()
    assert [row["stop_reason"] for row in rows] == ["stop"] * 4
    results = sorted(row["messages"][-2]["content"] for row in rows)
    assert results == [
        "5",
        "Error: OSError: the calculator is on fire",
        "Error: TypeError: the tool returned 200 bytes of binary data; a result is text",
        "Error: calculator: no answer within 1 seconds",
    ]
    assert len(list(tmp_path.iterdir())) == 4
    assert capsys.readouterr().out.count("stop after 2 turns") == 4
