"""GRPO as published, in one process: sample groups of answers, score them, compare within the group, train.

It is the published script in local mode with three changes, each marked below: (1) model and data, (2) `TorchSampler`
in place of `vLLMSampler`, (3) how prompts are repeated. An hour on two CPU cores; lower MAX_STEPS to see it work.

python examples/grpo.py
"""

from typing import Any

from peft import LoraConfig

import twinkle
from twinkle import DeviceGroup, DeviceMesh, get_device_placement, get_logger
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.metric import CompletionRewardMetric
from twinkle.model import TransformersModel
from twinkle.preprocessor.llm import GSM8KProcessor
from twinkle.processor import InputProcessor
from twinkle.reward import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle.sampler import TorchSampler  # change 2: no vLLM in one process on a CPU

logger = get_logger()

MODEL_ID = "builtin://smollm2-135m-instruct"  # change 1: a model for two CPU cores
MODEL_GPUS = 1
SAMPLER_GPUS = 1
NUM_GPUS = MODEL_GPUS + SAMPLER_GPUS

NUM_GENERATIONS = 8
MAX_NEW_TOKENS = 64
LEARNING_RATE = 1e-5
MAX_STEPS = 200
BATCH_SIZE = 16
MINI_BATCH_SIZE = 16
MICRO_BATCH_SIZE = 2
ADAPTER_NAME = "default"

# change 1: sums in GSM8K's form, which need no network
SUMS = [
    {"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
    for a in range(30)
    for b in range(30)
]


def create_gsm8k_dataset():
    dataset = Dataset(DatasetMeta(data=SUMS))  # change 1
    dataset.set_template("Template", model_id=MODEL_ID, max_length=2048)  # change 1: the template of the model
    dataset.map(GSM8KProcessor())
    dataset.encode(add_generation_prompt=True)
    return dataset


def compute_rewards(trajectories: list[dict[str, Any]]):
    accuracy_reward_fn = GSM8KAccuracyReward()
    format_reward_fn = GSM8KFormatReward()
    accuracy_rewards = accuracy_reward_fn(trajectories)
    format_rewards = format_reward_fn(trajectories)
    total_rewards = [a + f for a, f in zip(accuracy_rewards, format_rewards)]  # noqa: B905 - as published
    return total_rewards, format_rewards, accuracy_rewards


def main():
    device_groups = [
        DeviceGroup(name="model", ranks=list(range(MODEL_GPUS)), device_type="GPU"),
        DeviceGroup(name="sampler", ranks=list(range(MODEL_GPUS, NUM_GPUS)), device_type="GPU"),
    ]
    model_mesh = DeviceMesh.from_sizes(world_size=MODEL_GPUS, dp_size=MODEL_GPUS)
    sampler_mesh = DeviceMesh.from_sizes(world_size=SAMPLER_GPUS, dp_size=SAMPLER_GPUS)

    twinkle.initialize(mode="local", nproc_per_node=NUM_GPUS, groups=device_groups, lazy_collect=False)

    lora_config = LoraConfig(target_modules="all-linear", r=32, lora_alpha=64, lora_dropout=0.05)

    model = TransformersModel(model_id=MODEL_ID, device_mesh=model_mesh, remote_group="model")
    model.add_adapter_to_model(ADAPTER_NAME, lora_config, gradient_accumulation_steps=1)
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    model.set_lr_scheduler("CosineAnnealingLR", T_max=MAX_STEPS, eta_min=0)
    model.set_loss("GRPOLoss", epsilon=0.2)
    model.set_processor(InputProcessor)
    model.set_template("Template", model_id=MODEL_ID)  # change 1

    # change 2: weights of its own, as vLLM's are, so that syncing means the same; the engine's own options are gone
    sampler = TorchSampler(
        model_id=MODEL_ID,
        device_mesh=sampler_mesh,
        remote_group="sampler",
    )
    sampler.set_template("Template", model_id=MODEL_ID)  # change 1

    ckpt_manager = CheckpointEngineManager(model=model, sampler=sampler)

    dataloader = DataLoader(
        dataset=create_gsm8k_dataset,
        batch_size=BATCH_SIZE,
        min_batch_size=BATCH_SIZE,
        device_mesh=model_mesh,
        remote_group="model",
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

        # change 3: `global_prompts * NUM_GENERATIONS` puts all prompts behind each other, NUM_GENERATIONS times, but a
        # group is NUM_GENERATIONS rows in succession: it would compare answers to different prompts
        sample_responses = sampler.sample(
            [prompt for prompt in global_prompts for _ in range(NUM_GENERATIONS)],
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
                "total": total_rewards,
                "format": format_rewards,
                "accuracy": accuracy_rewards,
            },
        )

        advantages = advantage_fn(total_rewards, num_generations=NUM_GENERATIONS, scale="group").tolist()

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
            logger.info(f"[Step {optim_step}/{MAX_STEPS}] {log_dict}")

    logger.info(f"Training completed. optim_steps={optim_step}")
    model.save("grpo-gsm8k-checkpoint")


if __name__ == "__main__":
    main()
