"""The table of script arguments: one dataclass for each group, one line for each argument.

Names, defaults and aliases are the published ones. Help, documentation and checks are generated from this table.
"""

# ruff: noqa: RUF009 - `arg` is `dataclasses.field` with a meaning

from dataclasses import dataclass, field
from typing import Any, Literal


def arg(default: Any, meaning: str, *, alias: str = "", primary: bool = False, bare: bool = True) -> Any:
    """Return the dataclass field of one argument.

    Args:
        default: its value if it is not set.
        meaning: one line of description.
        alias: a second name.
        primary: if several groups have the name, whether the name without a group refers to this argument.
        bare: whether the name may be used without its group.
    """
    return field(default=default, metadata={"meaning": meaning, "alias": alias, "primary": primary, "bare": bare})


@dataclass(slots=True)
class ModelArgs:
    """The model that is trained."""

    model_id: str | None = arg(None, "Folder, GGUF file or `scheme://` reference of the model", primary=True)
    model_cls: str | None = arg(
        None, "transformers class to load the model with; default: the class in the model's configuration"
    )
    tokenizer_id: str | None = arg(None, "Source of the tokenizer, if it is not in the model folder")
    mixed_precision: Literal["auto", "no", "fp8", "fp16", "bf16"] = arg(
        "auto", "Precision of matrix multiplications; auto: bf16 if the hardware supports it, else no"
    )
    strategy: Literal["accelerate", "native_fsdp", "megatron"] = arg(
        "accelerate", "How the model is distributed over devices; `use_megatron` sets `megatron`"
    )
    memory_efficient_init: bool = arg(False, "Load the weights on one rank and distribute them")
    gradient_checkpointing: bool | Literal["auto"] = arg(
        "auto", "Recompute activations in the backward pass; `auto`: if memory requires it"
    )
    trust_remote_code: bool = arg(False, "Run Python code in the model folder")
    load_weights: bool = arg(True, "Megatron: load the weights; false: random initialization")
    recompute_granularity: str | None = arg("full", "Megatron: recomputation granularity, `full` or `selective`")
    recompute_method: str | None = arg("uniform", "Megatron: recomputation method, `uniform` or `block`")
    recompute_num_layers: int | None = arg(1, "Megatron: number of layers per recomputation unit")
    recompute_modules: list[str] | None = arg(None, "Megatron: modules for selective recomputation")
    use_distributed_optimizer: bool = arg(True, "Megatron: shard the optimizer's state over data ranks")
    variable_seq_lengths: bool = arg(True, "Megatron: allow batches with different sequence lengths")
    ddp_config: dict[str, Any] | None = arg(None, "Options of data parallelism")
    fsdp_config: dict[str, Any] | None = arg(None, "Options of sharding")
    grad_scaler_config: dict[str, Any] | None = arg(None, "Options of the fp16 loss scale")
    enable_liger: bool = arg(False, "For the script: whether to apply Liger kernels")
    enable_fused_ce: bool = arg(True, "For the script: whether to use `task='fused_lm_ce'`")

    @property
    def use_megatron(self) -> bool:
        """Whether `strategy` is `megatron`."""
        return self.strategy == "megatron"


@dataclass(slots=True)
class LoraArgs:
    """Low-rank adapters."""

    use_lora: bool = arg(False, "For the script: whether to add an adapter")
    lora_r: int = arg(8, "Rank of the update")
    lora_alpha: int | float = arg(32, "The update is scaled by alpha / rank")
    lora_dropout: float = arg(0.05, "Dropout on the input of the adapter")
    lora_target_modules: str | list[str] | None = arg(
        None, "Linear layers with an adapter: a list, a regular expression or `all-linear` (default)"
    )
    adapter_name: str = arg("default", "For the script: name of the adapter")
    lora_path: str | None = arg(None, "For the script: folder of a saved adapter to start from")


@dataclass(slots=True)
class DatasetArgs:
    """The training data."""

    dataset_id: str = arg("", "File, folder or `scheme://` reference of the data set")
    subset_name: str = arg("default", "Subset (configuration) of the data set")
    split: str = arg("train", "Split of the data set")
    streaming: bool = arg(False, "For the script: whether to use `IterableDataset`")
    num_proc: int | None = arg(None, "Number of processes that the hub uses to prepare the data")
    data_slice: int | str | list[int] | None = arg(
        None, "Rows to use: a count, `start:stop`, `start:stop:step` or a list of row numbers"
    )
    revision: str | None = arg(None, "Revision on the hub")


@dataclass(slots=True)
class TemplateArgs:
    """How conversations become tokens."""

    template_cls: str | None = arg(None, "For the script: component of kind `template`")
    model_id: str | None = arg(None, "Source of the tokenizer; default: `tokenizer_id` or `model_id` of the model")
    max_length: int | None = arg(8192, "Maximum row length in tokens")
    truncation_strategy: Literal["raise", "left", "right", "split", "delete"] = arg(
        "raise", "Handling of rows longer than `max_length`"
    )
    use_chat_template: bool = arg(True, "Apply the chat template; false: encode the text of a single message directly")
    enable_thinking: bool = arg(True, "Variable `enable_thinking` of the chat template")
    default_system: str | None = arg(None, "System message for conversations without one")


@dataclass(slots=True)
class TrainingArgs:
    """The loop."""

    max_steps: int = arg(200, "Total number of updates")
    num_train_epochs: int | float | None = arg(None, "Passes over the data; None: train until `max_steps`")
    batch_size: int = arg(8, "Rows per global batch")
    mini_batch_size: int | None = arg(None, "Rows per update, if a batch is used for several updates")
    micro_batch_size: int | None = arg(2, "Rows per forward pass")
    gradient_accumulation_steps: int = arg(1, "Backward passes per update")
    output_dir: str = arg("./output", "Folder for checkpoints")
    save_steps: int | None = arg(50, "Updates between checkpoints")
    save_total_limit: int | None = arg(None, "Number of checkpoints to keep")
    log_interval: int = arg(10, "Updates between log lines")
    eval_interval: int | None = arg(None, "Updates between evaluations")
    eval_samples: int | None = arg(None, "Rows per evaluation")
    train_samples: int | None = arg(None, "Rows to train on")
    resume_from_checkpoint: str | None = arg(None, "Folder of the checkpoint to continue from")
    resume_only_model: bool = arg(False, "Load only the weights of the checkpoint")
    ignore_data_skip: bool = arg(False, "Restart the data from the beginning when resuming")
    seed: int = arg(42, "Seed of all random generators", primary=True)
    full_determinism: bool = arg(False, "Use only deterministic torch algorithms")
    padding_free: bool = arg(False, "Concatenate the rows of a batch instead of padding them")


@dataclass(slots=True)
class OptimizerArgs:
    """The optimizer."""

    optimizer_cls: str = arg("AdamW", "Component of kind `optimizer`")
    learning_rate: float = arg(1e-5, "Learning rate", alias="lr")
    weight_decay: float = arg(0.0, "Weight decay")
    adam_beta1: float = arg(0.9, "Decay rate of the gradient mean")
    adam_beta2: float = arg(0.999, "Decay rate of the squared gradient mean")
    adam_epsilon: float = arg(1e-8, "Added to the denominator of the update")
    max_grad_norm: float = arg(1.0, "For the script: maximum gradient norm")

    @property
    def lr(self) -> float:
        """`learning_rate`."""
        return self.learning_rate


@dataclass(slots=True)
class SchedulerArgs:
    """The learning-rate schedule; arguments that the scheduler does not take are rejected."""

    scheduler_cls: str = arg("CosineAnnealingLR", "Component of kind `scheduler`")
    num_warmup_steps: int = arg(0, "Updates until the full learning rate")
    num_training_steps: int | None = arg(None, "Total number of updates; default: `training.max_steps`")
    t_max: int | None = arg(None, "Updates until the lowest rate; default: `num_training_steps`")
    eta_min: float = arg(0.0, "The lowest rate")
    lr_decay_steps: int | None = arg(None, "Megatron: updates until the lowest rate; default: `training.max_steps`")
    max_lr: float | None = arg(None, "The highest rate; Megatron: default `learning_rate`")


@dataclass(slots=True)
class LossArgs:
    """The loss; arguments that it does not take are rejected."""

    loss_cls: str = arg("CrossEntropyLoss", "Component of kind `loss`")
    loss_type: str = arg("sigmoid", "Variant of a preference loss")
    epsilon: float = arg(0.2, "Clipping range of the policy ratio")
    epsilon_high: float | None = arg(None, "Upper clipping range; default: `epsilon`")
    beta: float = arg(0.1, "Weight of the KL term to the reference")
    sft_weight: float = arg(1.0, "Weight of the cross entropy on the chosen answer")
    entropy_coef: float = arg(0.0, "Weight of the entropy bonus")
    ignore_index: int = arg(-100, "Label of tokens that are not trained")


@dataclass(slots=True)
class SamplerArgs:
    """The sampler; all arguments except its type are options of the vLLM engine."""

    sampler_type: str = arg("vLLMSampler", "Component of kind `sampler`")
    gpu_memory_utilization: float = arg(0.8, "Fraction of the device memory that the engine uses")
    max_model_len: int | None = arg(None, "Maximum length of prompt and completion in tokens")
    tensor_parallel_size: int | None = arg(None, "Number of devices for tensor parallelism of the sampler")
    enable_lora: bool = arg(False, "Whether the engine supports adapters")
    max_lora_rank: int = arg(32, "Maximum rank of an adapter")
    enforce_eager: bool = arg(False, "Disable CUDA graphs")


@dataclass(slots=True)
class SamplingArgs:
    """Sampling parameters."""

    max_tokens: int | None = arg(None, "Maximum number of new tokens", alias="max_new_tokens")
    temperature: float = arg(1.0, "Sampling temperature; 0: greedy")
    top_k: int = arg(-1, "Sample from the k most probable tokens; -1: all")
    top_p: float = arg(1.0, "Sample from the smallest set of tokens with this cumulative probability")
    repetition_penalty: float = arg(1.0, "Penalty on repeated tokens; values above 1 make them less likely")
    num_samples: int = arg(1, "Sequences per prompt")
    logprobs: int | None = arg(None, "Number of log-probabilities per token; 1: only the sampled token")
    seed: int | None = arg(None, "Seed of the sampler")
    stop: str | list[str] | list[int] | None = arg(
        None, "Stop strings or token ids: a string, a list of strings or a list of token ids"
    )

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
    world_size: int | None = arg(None, "Number of ranks of the mesh; default: the product of the sizes")
    dp_size: int | None = arg(None, "Data-parallel ranks")
    fsdp_size: int | None = arg(None, "Ranks that parameters are sharded over")
    tp_size: int | None = arg(None, "Tensor-parallel ranks")
    pp_size: int | None = arg(None, "Pipeline stages")
    cp_size: int | None = arg(None, "Context-parallel ranks")
    ep_size: int | None = arg(None, "Ranks that experts are divided over")
    etp_size: int | None = arg(None, "Tensor-parallel ranks within an expert")
    ep_fsdp_size: int | None = arg(None, "Ranks that each expert is sharded over")
    vpp_size: int | None = arg(None, "Virtual pipeline stages per rank")
    ulysses_size: int | None = arg(None, "Ranks for Ulysses sequence parallelism")
    sequence_parallel: bool = arg(False, "Megatron: sequence parallelism between tensor-parallel layers")
    lazy_collect: bool = arg(True, "Keep results on the workers until they are used")

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
    log_level: str = arg("INFO", "Log level of the server")


@dataclass(slots=True)
class RLArgs:
    """For scripts with rewards or a teacher."""

    num_generations: int = arg(8, "Completions per prompt")
    advantage_type: str = arg("GRPOAdvantage", "Component of kind `advantage`")
    advantage_scale: str = arg("group", "Scope of the advantage normalization")
    reward_fns: list[str] | None = arg(None, "Components of kind `reward`")
    student_model_id: str | None = arg(None, "Student model")
    teacher_model_id: str | None = arg(None, "Teacher model")
    gkd_beta: float = arg(0.5, "Distillation: interpolation between forward (0) and reverse (1) KL divergence")
    gkd_temperature: float = arg(1.0, "Distillation: temperature of the logits")
    gkd_topk: int | None = arg(64, "Distillation: number of most probable teacher tokens to compare")
    router_replay_mode: str = arg("disabled", "Mode of router replay")


@dataclass(slots=True)
class CheckpointArgs:
    """For scripts that save checkpoints or send weights to a sampler."""

    save_optimizer: bool = arg(True, "Also save the optimizer state")
    merge_and_sync: bool = arg(True, "Merge the adapter into the weights before sending them")
    platform: str = arg("GPU", "Device type of sender and receiver")
    lora_sync_dir: str | None = arg(None, "Folder for transferring adapters")
