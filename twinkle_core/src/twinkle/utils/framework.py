"""Published path of the questions which devices torch sees; `twinkle.platform` answers them."""

from twinkle.platform import GPU, NPU


class Torch:
    """Which devices there are; False where torch is not installed."""

    @staticmethod
    def is_gpu_available() -> bool:
        """Return whether torch sees a CUDA or ROCm device."""
        return GPU.is_available()

    @staticmethod
    def is_npu_available() -> bool:
        """Return whether `torch_npu` is installed and sees a device."""
        return NPU.is_available()
