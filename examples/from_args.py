"""A script whose every choice is an argument: model, data, adapter, optimizer, scheduler, loop.

python examples/from_args.py --model_id MODEL --dataset_id DATA --use_lora --lr 1e-4 --max_steps 100
"""

from itertools import islice

import twinkle
from twinkle.cli import CLI
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import TransformersModel


def build_loader(args):
    dataset = Dataset(**args.get_dataset_args())
    if preprocessor := args.get("preprocessor"):  # --extra.preprocessor NAME
        dataset.map(preprocessor, init_args=args.get("preprocessor_args"))
    dataset.set_template(args.template.template_cls or "Template", **args.get_template_args())
    dataset.encode()
    return DataLoader(dataset, batch_size=args.training.batch_size, shuffle=True, seed=args.training.seed)


def build_model(args):
    model = TransformersModel(**args.get_model_args())
    if args.lora.use_lora:
        model.add_adapter_to_model(args.lora.adapter_name, args.get_lora_args())
    model.set_loss(args.loss.loss_cls, **args.get_loss_args())
    model.set_optimizer(args.optimizer.optimizer_cls, **args.get_optimizer_args())
    model.set_lr_scheduler(args.scheduler.scheduler_cls, **args.get_scheduler_args())
    return model


def epochs(loader):
    while True:
        yield from loader


def train(args):
    twinkle.initialize(**args.get_infra_args())
    loader, model = build_loader(args), build_model(args)
    training, accumulation = args.training, args.training.gradient_accumulation_steps

    for call, batch in enumerate(islice(epochs(loader), training.max_steps * accumulation), 1):
        model.forward_backward(inputs=batch, micro_batch_size=training.micro_batch_size)
        model.clip_grad_and_step(max_grad_norm=args.optimizer.max_grad_norm, gradient_accumulation_steps=accumulation)
        step, rest = divmod(call, accumulation)
        if rest == 0 and (step % training.log_interval == 0 or step == training.max_steps):
            print(f"step {step}: {model.calculate_metric(is_training=True)}")
    return model.save("last", output_dir=training.output_dir, save_optimizer=args.checkpoint.save_optimizer)


if __name__ == "__main__":
    train(CLI.from_args())
