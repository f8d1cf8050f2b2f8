"""The scripts under examples/ have the published structure; examples/README.md runs them."""

import ast
import re
import runpy
import subprocess
import sys
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


# The published script for GRPO, without its comments.
GRPO = """
from typing import List, Dict, Any
from peft import LoraConfig
import twinkle
from twinkle import DeviceMesh, DeviceGroup, get_device_placement, get_logger
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.processor import InputProcessor
from twinkle.reward import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle.sampler import vLLMSampler
from twinkle.template import Template
from twinkle.metric import CompletionRewardMetric
from twinkle.preprocessor.llm import GSM8KProcessor
logger = get_logger()
MODEL_ID = 'ms://Qwen/Qwen3.5-4B'
MODEL_GPUS = 4
SAMPLER_GPUS = 4
NUM_GPUS = MODEL_GPUS + SAMPLER_GPUS
NUM_GENERATIONS = 8
MAX_NEW_TOKENS = 4096
LEARNING_RATE = 1e-5
MAX_STEPS = 200
BATCH_SIZE = 16
MINI_BATCH_SIZE = 16
MICRO_BATCH_SIZE = 2
ADAPTER_NAME = 'default'
def create_gsm8k_dataset():
    dataset = Dataset(DatasetMeta('ms://modelscope/gsm8k', subset_name='main', split='train'))
    dataset.set_template('Qwen3_5Template', model_id=MODEL_ID, max_length=2048)
    dataset.map(GSM8KProcessor())
    dataset.encode(add_generation_prompt=True)
    return dataset
def compute_rewards(trajectories: List[Dict[str, Any]]):
    accuracy_reward_fn = GSM8KAccuracyReward()
    format_reward_fn = GSM8KFormatReward()
    accuracy_rewards = accuracy_reward_fn(trajectories)
    format_rewards = format_reward_fn(trajectories)
    total_rewards = [a + f for a, f in zip(accuracy_rewards, format_rewards)]
    return total_rewards, format_rewards, accuracy_rewards
def main():
    device_groups = [
        DeviceGroup(name='model', ranks=list(range(MODEL_GPUS)), device_type='GPU'),
        DeviceGroup(name='sampler', ranks=list(range(MODEL_GPUS, NUM_GPUS)), device_type='GPU'),
    ]
    model_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS)
    sampler_mesh = DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS)
    twinkle.initialize(mode='ray', nproc_per_node=NUM_GPUS, groups=device_groups, lazy_collect=False)
    lora_config = LoraConfig(target_modules='all-linear', r=32, lora_alpha=64, lora_dropout=0.05)
    model = TransformersModel(model_id=MODEL_ID, device_mesh=model_mesh, remote_group='model')
    model.add_adapter_to_model(ADAPTER_NAME, lora_config, gradient_accumulation_steps=1)
    model.set_optimizer('AdamW', lr=LEARNING_RATE)
    model.set_lr_scheduler('CosineAnnealingLR', T_max=MAX_STEPS, eta_min=0)
    model.set_loss('GRPOLoss', epsilon=0.2)
    model.set_processor(InputProcessor)
    model.set_template('Qwen3_5Template', model_id=MODEL_ID)
    sampler = vLLMSampler(
        model_id=MODEL_ID,
        engine_args={
            'gpu_memory_utilization': 0.8,
            'max_model_len': 4096,
            'max_lora_rank': 32,
            'enable_lora': False,
        },
        device_mesh=sampler_mesh,
        remote_group='sampler',
    )
    sampler.set_template('Qwen3_5Template', model_id=MODEL_ID)
    ckpt_manager = CheckpointEngineManager(model=model, sampler=sampler)
    dataloader = DataLoader(
        dataset=create_gsm8k_dataset,
        batch_size=BATCH_SIZE,
        min_batch_size=BATCH_SIZE,
        device_mesh=model_mesh,
        remote_group='model',
    )
    advantage_fn = GRPOAdvantage()
    metrics = CompletionRewardMetric()
    sampling_params = SamplingParams(max_tokens=MAX_NEW_TOKENS, num_samples=1, logprobs=1)
    optim_step = 0
    logger.info(get_device_placement())
    for batch in dataloader:
        if optim_step >= MAX_STEPS:
            break
        metrics.reset()
        global_prompts = batch if isinstance(batch, list) else [batch]
        ckpt_manager.sync_weights(merge_and_sync=True)
        sampler.reset_prefix_cache()
        sample_responses = sampler.sample(
            global_prompts * NUM_GENERATIONS,
            sampling_params,
        )
        all_input_data = []
        all_old_logps = []
        all_completion_lengths = []
        for sample_response in sample_responses:
            for sequence in sample_response.sequences:
                all_input_data.append(sequence.new_input_feature)
                all_old_logps.append([logprob[0][1] for logprob in sequence.logprobs])
                all_completion_lengths.append(len(sequence.tokens))
        total_rewards, format_rewards, accuracy_rewards = compute_rewards(all_input_data)
        metrics.accumulate(
            completion_lengths=all_completion_lengths,
            rewards={
                'total': total_rewards,
                'format': format_rewards,
                'accuracy': accuracy_rewards,
            },
        )
        advantages = advantage_fn(total_rewards, num_generations=NUM_GENERATIONS, scale='group').tolist()
        total_completions = len(all_input_data)
        for mb_start in range(0, total_completions, MINI_BATCH_SIZE):
            mb_end = min(mb_start + MINI_BATCH_SIZE, total_completions)
            mb_inputs = all_input_data[mb_start:mb_end]
            mb_old_logps = all_old_logps[mb_start:mb_end]
            mb_advantages = advantages[mb_start:mb_end]
            model.forward_backward(
                inputs=mb_inputs,
                old_logps=mb_old_logps,
                advantages=mb_advantages,
                micro_batch_size=MICRO_BATCH_SIZE,
            )
            model.clip_grad_and_step()
            optim_step += 1
            if optim_step >= MAX_STEPS:
                break
            log_dict = metrics.calculate()
            log_dict.update(model.calculate_metric(is_training=True))
            metrics.reset()
            logger.info(f'[Step {optim_step}/{MAX_STEPS}] {log_dict}')
    logger.info(f'Training completed. optim_steps={optim_step}')
    model.save('grpo-gsm8k-checkpoint')
if __name__ == '__main__':
    main()
"""

# What is changed in ours, beside values: each must be there in the published script.
GRPO_CHANGES = (
    ("DatasetMeta('ms://modelscope/gsm8k', subset_name='main', split='train')", "DatasetMeta(data=SUMS)"),
    ("vLLMSampler", "TorchSampler"),
    (
        """        engine_args={
            'gpu_memory_utilization': 0.8,
            'max_model_len': 4096,
            'max_lora_rank': 32,
            'enable_lora': False,
        },
""",
        "",
    ),
    ("global_prompts * NUM_GENERATIONS", "[prompt for prompt in global_prompts for _ in range(NUM_GENERATIONS)]"),
)


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


def test_the_grpo_script_is_the_published_one_but_for_three_changes() -> None:
    published = GRPO
    for before, after in GRPO_CHANGES:
        assert before in published
        published = published.replace(before, after)
    ours = (EXAMPLES / "grpo.py").read_text("utf-8")
    unused = {("typing", "List"), ("typing", "Dict"), ("twinkle.template", "Template")}
    assert names_imported(published) - names_imported(ours) == unused
    assert names_imported(ours) - names_imported(published) == set()
    published = published.replace("List[Dict[", "list[dict[")  # what the names are called today
    rest = [node for node in without_values(ours)[1] if "id='SUMS', ctx=Store()" not in node]
    assert len(rest) == len(without_values(ours)[1]) - 1
    assert rest == without_values(published)[1]
    for change in ("# change 1", "# change 2", "# change 3"):
        assert change in ours


def names_imported(source: str) -> set[tuple[str, str]]:
    """Return (module, name) of everything that a script imports."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {(getattr(node, "module", None) or "", alias.name) for node in found for alias in node.names}


def test_the_quickstart_ends_with_what_can_be_done_next(tmp_path: Path) -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/members", "quickstart"],  # these tests run under make too
        cwd=EXAMPLES.parent,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    (tmp_path / "runs" / "sft-1").mkdir(parents=True)
    last = subprocess.run(
        ["sh", "-ec", shown[shown.index("run=") :]], cwd=tmp_path, capture_output=True, check=True, text=True
    ).stdout
    assert "runs/sft-1/loss.png" in last
    script, folder = re.findall(r"bin/python (\S+) (\S+) 'Who are you\?'", last)[0]
    assert (EXAMPLES.parent / script).is_file()
    assert folder == "runs/sft-1/adapter"
    assert "make grpo-demo" in last


@pytest.mark.full
def test_the_grpo_script_runs(place: Path) -> None:
    text = (EXAMPLES / "grpo.py").read_text("utf-8")
    small = {"NUM_GENERATIONS": 2, "MAX_NEW_TOKENS": 4, "MAX_STEPS": 3, "BATCH_SIZE": 4, "MINI_BATCH_SIZE": 4}
    for name, value in small.items():
        text, found = re.subn(rf"^{name} = \d+$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert found == 1
    (place / "grpo.py").write_text(text, "utf-8")
    runpy.run_path("grpo.py", run_name="__main__")
    assert (place / "output" / "grpo-gsm8k-checkpoint" / "adapter_model.safetensors").is_file()


def test_grpo_on_mathematics_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--steps", "2", "--prompts", "2", "--group", "2", "--max-tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["grpo_math.py", *small])
    runpy.run_path("examples/grpo_math.py", run_name="__main__")
    assert "step 2/2: reward" in capsys.readouterr().out
    assert (place / "output" / "grpo-math").is_dir()


@pytest.mark.parametrize(
    ("script", "arguments", "last"),
    [
        ("dpo.py", ["--loss", "ORPOLoss"], "saved: output/dpo"),
        ("dpo_lora.py", [], "saved: output/dpo-lora"),
        ("gkd_off_policy.py", ["--topk", "4"], "saved: output/gkd-off-policy"),
        ("gkd_on_policy.py", ["--max_tokens", "2"], "saved: output/gkd-on-policy"),
        ("embedding.py", [], "saved: output/embedding"),
    ],
)
def test_scripts_of_preferences_distillation_and_embeddings_run(
    script: str,
    arguments: list[str],
    last: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--steps", "1", "--batch_size", "2", *arguments])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 1/1: ") for line in said)
    assert said[-1] == last
    assert (place / last.removeprefix("saved: ")).is_dir()
