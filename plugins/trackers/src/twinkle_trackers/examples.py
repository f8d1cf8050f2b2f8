"""What the contract kit calls those trackers with that would ask a service on the network."""

WANDB = {"kwargs": {"mode": "offline"}}
SWANLAB = {"kwargs": {"mode": "offline"}}
