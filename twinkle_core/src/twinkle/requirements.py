"""Whether packages are installed: `twinkle.exists("torch>=2.6")`, `twinkle.requires("peft")`."""

from typing import TYPE_CHECKING

from twinkle.errors import ArgumentError, ManifestError, RequirementMissing

if TYPE_CHECKING:
    from twinkle_registry import MissingRequirement


def exists(requirement: str) -> bool:
    """Return whether a distribution is installed in a matching version; nothing is imported.

    Args:
        requirement: a requirement in pip's syntax: `torch`, `torch>=2.6,<3`, `datasets[audio]`.

    Raises:
        ArgumentError: `requirement` is not valid.
    """
    return not _missing((requirement,))


def requires(*requirements: str) -> None:
    """Raise unless all of `requirements` are installed; their syntax is that of `exists`.

    Raises:
        RequirementMissing: one is missing or has another version; the message has the command that installs them.
        ArgumentError: a requirement is not valid.
    """
    if missing := _missing(requirements):
        command = " ".join(f"'{item.requirement}'" for item in missing)
        raise RequirementMissing(f"this needs {', '.join(map(str, missing))}; run: pip install {command}")


def _missing(requirements: tuple[str, ...]) -> "list[MissingRequirement]":
    from twinkle_registry import ComponentSpec, missing_requirements

    for text in requirements:
        if not isinstance(text, str):
            raise ArgumentError(f"{text!r} is not a requirement; give a text such as 'torch>=2.6'")
    try:
        return missing_requirements(ComponentSpec("package", "", "", requires=requirements))
    except ManifestError as error:
        reason = str(error.__cause__).splitlines()[0]
        raise ArgumentError(f"{', '.join(requirements)}: {reason}; write it as 'torch>=2.6'") from error
