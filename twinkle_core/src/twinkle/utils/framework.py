"""Published path of functions that report torch's devices; `twinkle.platform` implements them."""

from twinkle.platform import GPU, NPU


class Torch:
    """Reports available devices; False if torch is not installed."""

    @staticmethod
    def is_gpu_available() -> bool:
        """Return whether torch sees a CUDA or ROCm device."""
        return GPU.is_available()

    @staticmethod
    def is_npu_available() -> bool:
        """Return whether `torch_npu` is installed and sees a device."""
        return NPU.is_available()
