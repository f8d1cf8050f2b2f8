"""The configuration of the recipe `sft`: each key with its type, default and meaning."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from twinkle_recipes.config.parts import MeshConfig, Part, RunConfig, SamplerConfig
from twinkle_recipes.config.rows import DataConfig, parse_slice
from twinkle_recipes.config.strict import Positive

if TYPE_CHECKING:
    from twinkle.mesh import DeviceMesh

__all__ = ["DataConfig", "SFTConfig", "parse_slice"]


class SFTConfig(RunConfig):
    """Supervised fine-tuning on conversations."""

    recipe = "sft"
    takes_streams = True
    takes_packs = True
    free = RunConfig.free | {"questions", "sampler", "mesh"}
    kept_in_checkpoints = RunConfig.kept_in_checkpoints | {"epochs", "gradient_accumulation_steps"}

    gradient_accumulation_steps: Positive = Field(default=1, description="Batches of one optimizer step")
    epochs: Positive = Field(default=1, description="How often each row is seen; not for a stream")
    max_steps: Positive | None = Field(
        default=None, description="Optimizer steps at most, even if epochs are left; of a stream: exactly"
    )
    questions: list[str] = Field(default=[], description="Asked before and after training, shown side by side")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="How the questions are answered")
    mesh: MeshConfig = Field(default_factory=MeshConfig, description="How several processes share the model")

    @property
    def device_mesh(self) -> "DeviceMesh | None":
        """The mesh of the processes, or None where nothing is said of it.

        Raises:
            MeshError: there is no such mesh.
        """
        if self.mesh.dp is None and self.mesh.fsdp is None:
            return None
        from twinkle.mesh import DeviceMesh

        return DeviceMesh.from_sizes(dp_size=self.mesh.dp or 1, fsdp_size=self.mesh.fsdp)

    def parts(self) -> Iterator[Part]:
        """See `RunConfig.parts`; the sampler takes part where questions are asked."""
        yield from super().parts()
        if self.questions:
            yield Part("sampler", self.sampler.name)

    @model_validator(mode="after")
    def _divisible(self) -> "SFTConfig":
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}; "
                "micro-batches are parts of a batch"
            )
        return self
