"""The engine of `TorchSampler`: continuous batching over requests and adapters, with a slotted cache."""
