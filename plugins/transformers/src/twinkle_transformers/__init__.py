"""Trains and samples Hugging Face models: TransformersModel, TorchSampler, optimizers and schedulers."""
