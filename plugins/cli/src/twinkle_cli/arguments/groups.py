"""The table of script arguments: one dataclass for each group, one line for each argument.

Names, defaults and aliases are the published ones. Help, documentation and checks are made from this table.
"""

# ruff: noqa: RUF009 - `arg` is `dataclasses.field` with a meaning

from dataclasses import dataclass, field
from typing import Any, Literal


def arg(default: Any, meaning: str, *, alias: str = "", primary: bool = False, bare: bool = True) -> Any:
    """Return the dataclass field of one argument.

    Args:
        default: its value if it is not set.
        meaning: one line for people.
        alias: a second name.
        primary: whether the name without its group means this argument, where several groups have the name.
        bare: whether it may be called without its group at all.
    """
    return field(default=default, metadata={"meaning": meaning, "alias": alias, "primary": primary, "bare": bare})


@dataclass(slots=True)
class ModelArgs:
    """The model that is trained."""

    model_id: str | None = arg(None, "Folder, GGUF file or `scheme://` reference of the model", primary=True)
    model_cls: str | None = arg(None, "Class in transformers to load with; by default the configuration's")
    tokenizer_id: str | None = arg(None, "Source of the template's tokenizer, if it is not in the model folder")
    mixed_precision: Literal["no", "fp8", "fp16", "bf16"] = arg("bf16", "Precision of the matrix products")
    strategy: Literal["accelerate", "native_fsdp", "megatron"] = arg(
        "accelerate", "How the model is distributed over devices; `use_megatron` sets `megatron`"
    )
    memory_efficient_init: bool = arg(False, "Load the weights on one rank and distribute them")
    gradient_checkpointing: bool | Literal["auto"] = arg(
        "auto", "Recompute activations in the backward pass; `auto`: if memory requires it"
    )
    trust_remote_code: bool = arg(False, "Run Python code in the model folder")
    load_weights: bool = arg(True, "Megatron: read the weights; off leaves them random")
    recompute_granularity: str | None = arg("full", "Megatron: what is recomputed, `full` or `selective`")
    recompute_method: str | None = arg("uniform", "Megatron: which layers are recomputed, `uniform` or `block`")
    recompute_num_layers: int | None = arg(1, "Megatron: layers in one piece of recomputation")
    recompute_modules: list[str] | None = arg(None, "Megatron: modules of selective recomputation")
    use_distributed_optimizer: bool = arg(True, "Megatron: shard the optimizer's state over data ranks")
    variable_seq_lengths: bool = arg(True, "Megatron: batches of differing length")
    ddp_config: dict[str, Any] | None = arg(None, "Options of data parallelism")
    fsdp_config: dict[str, Any] | None = arg(None, "Options of sharding")
    grad_scaler_config: dict[str, Any] | None = arg(None, "Options of the fp16 loss scale")
    enable_liger: bool = arg(False, "For the script: whether it applies Liger kernels")
    enable_fused_ce: bool = arg(True, "For the script: whether it asks for `task='fused_lm_ce'`")

    @property
    def use_megatron(self) -> bool:
        """Whether `strategy` is `megatron`."""
        return self.strategy == "megatron"


@dataclass(slots=True)
class LoraArgs:
    """Low-rank adapters."""

    use_lora: bool = arg(False, "For the script: whether it adds an adapter")
    lora_r: int = arg(8, "Rank of the update")
    lora_alpha: int | float = arg(32, "The update is scaled by alpha / rank")
    lora_dropout: float = arg(0.05, "Dropout before the update")
    lora_target_modules: str | list[str] | None = arg(
        None, "Linear layers that get one: a list, a regular expression or `all-linear`, which is the default"
    )
    adapter_name: str = arg("default", "For the script: what the adapter is called")
    lora_path: str | None = arg(None, "For the script: folder of a saved adapter to start from")


@dataclass(slots=True)
class DatasetArgs:
    """The training data."""

    dataset_id: str = arg("", "File, folder or `scheme://` reference of the data set")
    subset_name: str = arg("default", "Subset (configuration) of the data set")
    split: str = arg("train", "Split of the data set")
    streaming: bool = arg(False, "For the script: whether it takes `IterableDataset`")
    num_proc: int | None = arg(None, "Processes that the hub prepares the data with")
    data_slice: int | str | list[int] | None = arg(
        None, "Rows to use: a count, `start:stop`, `start:stop:step` or a list of row numbers"
    )
    revision: str | None = arg(None, "Revision at the hub")


@dataclass(slots=True)
class TemplateArgs:
    """How conversations become tokens."""

    template_cls: str | None = arg(None, "For the script: component of kind `template`")
    model_id: str | None = arg(None, "Whose tokenizer; by default `tokenizer_id` or `model_id` of the model")
    max_length: int | None = arg(8192, "Longest row, in tokens")
    truncation_strategy: Literal["raise", "left", "right", "split", "delete"] = arg(
        "raise", "What happens to longer rows"
    )
    use_chat_template: bool = arg(True, "Off encodes the text of a single message as it is")
    enable_thinking: bool = arg(True, "The chat template's variable of that name")
    default_system: str | None = arg(None, "System message for conversations that have none")


@dataclass(slots=True)
class TrainingArgs:
    """The loop."""

    max_steps: int = arg(200, "Updates in all")
    num_train_epochs: int | float | None = arg(None, "Passes over the data; None: until `max_steps`")
    batch_size: int = arg(8, "Rows of a global batch")
    mini_batch_size: int | None = arg(None, "Rows of one update, where a batch is used for several")
    micro_batch_size: int | None = arg(2, "Rows of one forward")
    gradient_accumulation_steps: int = arg(1, "Backward calls for each update")
    output_dir: str = arg("./output", "Where checkpoints go")
    save_steps: int | None = arg(50, "Updates between checkpoints")
    save_total_limit: int | None = arg(None, "Checkpoints that are kept")
    log_interval: int = arg(10, "Updates between lines of the log")
    eval_interval: int | None = arg(None, "Updates between evaluations")
    eval_samples: int | None = arg(None, "Rows of an evaluation")
    train_samples: int | None = arg(None, "Rows to train on")
    resume_from_checkpoint: str | None = arg(None, "Folder of the checkpoint to continue from")
    resume_only_model: bool = arg(False, "Take only its weights")
    ignore_data_skip: bool = arg(False, "Start the data afresh when resuming")
    seed: int = arg(42, "Of every random generator", primary=True)
    full_determinism: bool = arg(False, "Let torch use deterministic algorithms only")
    padding_free: bool = arg(False, "Put the rows of a batch in one line instead of padding them")


@dataclass(slots=True)
class OptimizerArgs:
    """The optimizer."""

    optimizer_cls: str = arg("AdamW", "Component of kind `optimizer`")
    learning_rate: float = arg(1e-5, "Learning rate", alias="lr")
    weight_decay: float = arg(0.0, "Weight decay")
    adam_beta1: float = arg(0.9, "Decay of the mean of gradients")
    adam_beta2: float = arg(0.999, "Decay of the mean of squared gradients")
    adam_epsilon: float = arg(1e-8, "Added to the root of the latter")
    max_grad_norm: float = arg(1.0, "For the script: largest norm of the gradient")

    @property
    def lr(self) -> float:
        """`learning_rate`."""
        return self.learning_rate


@dataclass(slots=True)
class SchedulerArgs:
    """The course of the learning rate; what the chosen scheduler does not take is refused."""

    scheduler_cls: str = arg("CosineAnnealingLR", "Component of kind `scheduler`")
    num_warmup_steps: int = arg(0, "Updates until the full learning rate")
    num_training_steps: int | None = arg(None, "Updates in all; by default `training.max_steps`")
    t_max: int | None = arg(None, "Updates until the lowest rate; by default `num_training_steps`")
    eta_min: float = arg(0.0, "The lowest rate")
    lr_decay_steps: int | None = arg(None, "Megatron: updates until the lowest rate; by default `training.max_steps`")
    max_lr: float | None = arg(None, "The highest rate; Megatron: by default `learning_rate`")


@dataclass(slots=True)
class LossArgs:
    """The loss; what the chosen one does not take is refused."""

    loss_cls: str = arg("CrossEntropyLoss", "Component of kind `loss`")
    loss_type: str = arg("sigmoid", "Form of a preference loss")
    epsilon: float = arg(0.2, "Clipping of the policy's ratio")
    epsilon_high: float | None = arg(None, "Clipping above; by default `epsilon`")
    beta: float = arg(0.1, "Weight of the distance from the reference")
    sft_weight: float = arg(1.0, "Weight of the cross entropy of the chosen answer")
    entropy_coef: float = arg(0.0, "Weight of the entropy bonus")
    ignore_index: int = arg(-100, "Label that is not trained")


@dataclass(slots=True)
class SamplerArgs:
    """The sampler; all but its type are options of vLLM's engine."""

    sampler_type: str = arg("vLLMSampler", "Component of kind `sampler`")
    gpu_memory_utilization: float = arg(0.8, "Part of the device's memory that the engine takes")
    max_model_len: int | None = arg(None, "Longest prompt and completion, in tokens")
    tensor_parallel_size: int | None = arg(None, "Devices that share the sampler's model")
    enable_lora: bool = arg(False, "Whether the engine takes adapters")
    max_lora_rank: int = arg(32, "Largest rank of an adapter")
    enforce_eager: bool = arg(False, "Do without CUDA graphs")


@dataclass(slots=True)
class SamplingArgs:
    """How tokens are drawn."""

    max_tokens: int | None = arg(None, "At most so many new tokens", alias="max_new_tokens")
    temperature: float = arg(1.0, "0 is greedy")
    top_k: int = arg(-1, "Draw among the k most probable; -1 means all")
    top_p: float = arg(1.0, "Draw among the fewest tokens whose probability reaches p")
    repetition_penalty: float = arg(1.0, "Above 1 makes tokens that occurred less likely")
    num_samples: int = arg(1, "Sequences a prompt")
    logprobs: int | None = arg(None, "Log-probabilities a token; 1 gives the drawn one's")
    seed: int | None = arg(None, "Makes the draw repeatable")
    stop: str | list[str] | list[int] | None = arg(None, "Where a sequence ends: a text, texts or token ids")

    @property
    def max_new_tokens(self) -> int | None:
        """`max_tokens`."""
        return self.max_tokens


@dataclass(slots=True)
class InfraArgs:
    """Where components live, and the sizes of the device mesh."""

    mode: str = arg("local", "Component of kind `runtime`: `local`, `ray`, ...")
    nproc_per_node: int = arg(8, "Worker processes on each machine", alias="num_gpus")
    ncpu_proc_per_node: int = arg(8, "CPU worker processes on each machine")
    model_gpus: int | None = arg(None, "For the script: devices of the model's group")
    sampler_gpus: int | None = arg(None, "For the script: devices of the sampler's group")
    ref_model_gpus: int | None = arg(None, "For the script: devices of the reference model's group")
    world_size: int | None = arg(None, "Ranks of the mesh; by default the product of the sizes")
    dp_size: int | None = arg(None, "Data-parallel ranks")
    fsdp_size: int | None = arg(None, "Ranks over which parameters are sharded")
    tp_size: int | None = arg(None, "Tensor-parallel ranks")
    pp_size: int | None = arg(None, "Pipeline stages")
    cp_size: int | None = arg(None, "Context-parallel ranks")
    ep_size: int | None = arg(None, "Ranks over which experts are divided")
    etp_size: int | None = arg(None, "Tensor-parallel ranks inside an expert")
    ep_fsdp_size: int | None = arg(None, "Ranks over which each expert is sharded")
    vpp_size: int | None = arg(None, "Virtual pipeline stages on each rank")
    ulysses_size: int | None = arg(None, "Ranks that share a sequence")
    sequence_parallel: bool = arg(False, "Megatron: divide sequences between tensor-parallel layers")
    lazy_collect: bool = arg(True, "Leave results on the workers until they are used")

    @property
    def num_gpus(self) -> int:
        """`nproc_per_node`."""
        return self.nproc_per_node


@dataclass(slots=True)
class ServerArgs:
    """For scripts that start a server."""

    config: str | None = arg(None, "Configuration file of the server", bare=False)
    ray_namespace: str = arg("twinkle_cluster", "Namespace of the Ray cluster")
    host: str = arg("0.0.0.0", "Address to listen on")
    port: int = arg(8000, "Port to listen on")
    log_level: str = arg("INFO", "Level of the server's log")


@dataclass(slots=True)
class RLArgs:
    """For scripts with rewards or a teacher."""

    num_generations: int = arg(8, "Completions a prompt")
    advantage_type: str = arg("GRPOAdvantage", "Component of kind `advantage`")
    advantage_scale: str = arg("group", "Over what advantages are scaled")
    reward_fns: list[str] | None = arg(None, "Components of kind `reward`")
    student_model_id: str | None = arg(None, "Model that learns from a teacher")
    teacher_model_id: str | None = arg(None, "Model that teaches")
    gkd_beta: float = arg(0.5, "Distillation: between forward (0) and reverse (1) divergence")
    gkd_temperature: float = arg(1.0, "Distillation: divides the logits")
    gkd_topk: int | None = arg(64, "Distillation: teacher's tokens that are compared")
    router_replay_mode: str = arg("disabled", "Replay of expert choices")


@dataclass(slots=True)
class CheckpointArgs:
    """For scripts that save, or send weights to a sampler."""

    save_optimizer: bool = arg(True, "Save the optimizer's state too")
    merge_and_sync: bool = arg(True, "Merge the adapter into the weights that are sent")
    platform: str = arg("GPU", "Device that sends and receives")
    lora_sync_dir: str | None = arg(None, "Folder through which adapters are handed over")
