"""Examples with which the contract kit builds optimizers, schedulers, models and engines."""

from typing import Any

IN_PROCESS = {"start": "here"}
ENGINE = {"kwargs": {"model": {"mixed_precision": "no"}}}
WARMUP = {"kwargs": {"num_warmup_steps": 2}, "rates": (0.0, 0.5, 1.0)}
WARMUP_DECAY = {"kwargs": {"num_warmup_steps": 2, "num_training_steps": 12}, "rates": (0.0, 0.5, 1.0)}
WARMUP_STABLE_DECAY = {
    "kwargs": {"num_warmup_steps": 2, "num_training_steps": 10, "num_decay_steps": 4},
    "rates": (0.0, 0.5, 1.0, 1.0, 1.0),
}

SPARSE = {"sparse": True}
ASGD = {"skip": {"learning_rate": "its rate is what the step before computed from the learning rate"}}
RPROP = {"skip": {"learning_rate": "it finds a step size for each number itself; lr is only where they begin"}}

STEP_LR = {"kwargs": {"step_size": 2, "gamma": 0.5}, "rates": (1.0, 1.0, 0.5, 0.5, 0.25)}
MULTI_STEP_LR = {"kwargs": {"milestones": [1, 3], "gamma": 0.5}, "rates": (1.0, 0.5, 0.5, 0.25)}
EXPONENTIAL_LR = {"kwargs": {"gamma": 0.5}, "rates": (1.0, 0.5, 0.25)}
COSINE_ANNEALING = {"kwargs": {"T_max": 4}, "rates": (1.0, 0.8535533906, 0.5)}
COSINE_RESTARTS = {"kwargs": {"T_0": 4}, "rates": (1.0, 0.8535533906, 0.5)}
ONE_CYCLE = {"kwargs": {"max_lr": 1.0, "total_steps": 60}}
CYCLIC = {"kwargs": {"base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": False}}
PLATEAU = {"step_arguments": (1.0,)}


def halved(step: int) -> float:
    """A rate that halves with each step."""
    return 0.5**step


LAMBDA = {"kwargs": {"lr_lambda": halved}, "rates": (1.0, 0.5, 0.25)}


def constant_half(step: int) -> float:
    """A factor of one half."""
    return 0.5


MULTIPLICATIVE = {"kwargs": {"lr_lambda": constant_half}, "rates": (1.0, 0.5, 0.25)}


def sequential() -> dict[str, Any]:
    """Two constants, one after the other."""
    from torch.optim.lr_scheduler import ConstantLR, SequentialLR

    def make(optimizer: Any) -> Any:
        parts: list[Any] = [ConstantLR(optimizer, factor=factor, total_iters=9) for factor in (0.1, 0.5)]
        return SequentialLR(optimizer, parts, milestones=[3])

    return {"make": make}


def chained() -> dict[str, Any]:
    """Two schedulers that halve the rate."""
    from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR

    def make(optimizer: Any) -> Any:
        return ChainedScheduler([ExponentialLR(optimizer, gamma=0.5) for _ in range(2)])

    return {"make": make, "rates": (1.0, 0.25, 0.0625)}


def pool() -> dict[str, Any]:
    """One adapter of a pool, whose B is not 0, so that all of it is trained."""

    def add(model: Any) -> None:
        config = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
        model.add_adapter_to_model("one", config, seed=1)

    return {"prepare": add, "adapter": "one", "lr": 0.1}
