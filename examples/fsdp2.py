"""LoRA on sharded parameters (FSDP2), started by torchrun: every process runs this script on its own rows.

torchrun --nproc_per_node=2 examples/fsdp2.py

Several minutes on two CPU cores. Eight GPUs: sizes 4 and 2 below, and --nproc_per_node=8.
"""

from peft import LoraConfig
from tqdm import tqdm

import twinkle
from twinkle import DeviceMesh, get_device_placement, get_logger
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor import SelfCognitionProcessor

# Build device_mesh: fsdp=2, dp=1, using 2 processes in total
device_mesh = DeviceMesh.from_sizes(fsdp_size=2, dp_size=1)
# Use torchrun mode
twinkle.initialize(mode="local", global_device_mesh=device_mesh)

logger = get_logger()


def eval(model):
    # Validation set: 100 samples
    dataset = Dataset(dataset_meta=DatasetMeta("builtin://self-cognition", data_slice=range(100)))
    dataset.set_template("Template", model_id="builtin://smollm2-135m-instruct")
    dataset.map(SelfCognitionProcessor("Glow", "the Twinkle founders"))
    dataset.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=8)
    for step, batch in tqdm(enumerate(dataloader)):
        model.forward_only(inputs=batch)
        model.calculate_loss()
    metrics = model.calculate_metric(is_training=False)
    return metrics


def train():
    # Training set: 1000 samples
    dataset = Dataset(dataset_meta=DatasetMeta("builtin://self-cognition", data_slice=range(1000)))
    # Set template to prepare encoding
    dataset.set_template("Template", model_id="builtin://smollm2-135m-instruct")
    # Preprocess: replace placeholders in self-cognition data
    dataset.map(SelfCognitionProcessor("Glow", "the Twinkle founders"))
    # Encode dataset
    dataset.encode()
    # Global batch size = 8; each of the 2 processes takes 4 samples
    dataloader = DataLoader(dataset=dataset, batch_size=8)
    # Load model
    model = TransformersModel(model_id="builtin://smollm2-135m-instruct")
    model.model._no_split_modules = {"LlamaDecoderLayer"}

    lora_config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")

    # Add LoRA adapter named "default"
    # Comment this out to switch to full-parameter training
    model.add_adapter_to_model("default", lora_config, gradient_accumulation_steps=2)
    # Configure optimizer for LoRA
    model.set_optimizer(optimizer_cls="AdamW", lr=1e-4)
    # Configure learning rate scheduler: 125 batches are 62 updates of two batches each, so the cosine of this published
    # script stops halfway; num_training_steps=len(dataloader) // 2 would bring it down to 0
    model.set_lr_scheduler(
        scheduler_cls="CosineWarmupScheduler", num_warmup_steps=5, num_training_steps=len(dataloader)
    )
    logger.info(get_device_placement())
    # Print training config
    logger.info(model.get_train_configs())
    logger.info(f"Total steps: {len(dataloader)}")
    loss_metric = 99.0
    for step, batch in enumerate(dataloader):
        # Forward + backward pass
        model.forward_backward(inputs=batch)
        # Gradient clipping + optimizer step
        model.clip_grad_and_step()
        if step % 20 == 0:
            # Print training metrics
            metric = model.calculate_metric(is_training=True)
            logger.info(f"Current is step {step} of {len(dataloader)}, metric: {metric}")
        if step > 0 and step % 40 == 0:
            # Periodic evaluation
            metrics = eval(model)
            logger.info(f"Eval metric: {metrics}")
            metrics["step"] = step
            # Save best checkpoint
            if loss_metric > float(metrics["loss"]):
                model.save(f"checkpoint-{step}")
                loss_metric = float(metrics["loss"])
    model.save("last-checkpoint")


if __name__ == "__main__":
    train()
