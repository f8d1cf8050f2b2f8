"""Which mixed precision the hardware has."""


def mixed_precision(asked: str) -> str:
    """Return `asked`, or for `auto` bf16 where the device computes it natively, else `no`."""
    if asked != "auto":
        return asked
    import torch

    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    # torch has no public name for these two questions yet.
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return "bf16" if any(probe is not None and probe() for probe in probes) else "no"
