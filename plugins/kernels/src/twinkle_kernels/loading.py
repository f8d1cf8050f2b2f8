"""Kernels of a hub, loaded by the package `kernels` once Twinkle's own policy allows each repository and commit."""

import re
from typing import Any

from twinkle.errors import ArgumentError, HubError, NotTrusted, TwinkleError
from twinkle_kernels.reference import HubRef, local_folder

_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_reference(ref: HubRef) -> Any:
    """Return the layer class or function that a reference means.

    Raises:
        RequirementMissing: the package `kernels` is not installed.
        NotTrusted: this code, or that of a repository it depends on, is not trusted.
        HubError: it cannot be found, downloaded or imported, or has no build for this machine.
        ArgumentError: it has no such layer.
    """
    from twinkle.requirements import requires

    requires("kernels>=0.17")
    _refuse_frozen(ref)
    try:
        module = _load(ref)
    except TwinkleError:
        raise
    except Exception as error:  # a client, or code at its import, may raise anything
        reason = " ".join(str(error).split())
        raise HubError(f"{ref} cannot be loaded: {type(error).__name__}: {reason}") from error
    return _member(module, ref)


def _refuse_frozen(ref: HubRef) -> None:
    from twinkle_registry.settings import is_frozen

    if is_frozen():
        raise NotTrusted(
            f"{ref}: this run is frozen, and twinkle.lock does not hold kernel repositories; use an installed kernel"
        )


def _load(ref: HubRef) -> Any:
    import huggingface_hub
    from kernels import load, resolver, validate

    api = huggingface_hub.HfApi(library_name="twinkle")
    found: Any = resolver.HubCacheResolver if huggingface_hub.constants.HF_HUB_OFFLINE else resolver.HubResolver
    resolvers: list[Any] = [_Judged(found(trust_remote_code=True), api, load)]
    name, version = ref.repo, load.KernelVersion.Version(ref.version or 0)
    if ref.is_local:
        name = str(local_folder(ref))
        resolvers.insert(0, resolver.RepoPathsResolver(local_kernels={name: local_folder(ref)}))
    elif ref.revision is not None:
        version = load.KernelVersion.Revision(ref.revision)
    checks = [*validate.default_metadata_validators(), validate.ArchValidator()]
    return load.get_kernel_with_resolver(
        api=api,
        backend=ref.backend,
        kernel=load.KernelDependency(repo_id=name, version=version),
        resolver=resolver.SequentialResolver(resolvers=resolvers),
        metadata_validator=validate.AllValidator(validators=checks),
    )


class _Judged:
    """Finds kernels as `inner` does, but asks Twinkle's policy first, for each repository that a kernel needs."""

    def __init__(self, inner: Any, api: Any, words: Any) -> None:
        self.inner, self.api, self.words = inner, api, words

    def resolve(self, *, api: Any, backend: str | None, kernel: Any) -> Any:
        """Return where a kernel is, at one commit that is allowed."""
        number = getattr(kernel.version, "version", None)
        revision = kernel.version.revision if number is None else f"v{number}"
        commit = allowed_commit(kernel.repo_id, str(revision), self.api)
        pinned = self.words.KernelDependency(repo_id=kernel.repo_id, version=self.words.KernelVersion.Revision(commit))
        return self.inner.resolve(api=api, backend=backend, kernel=pinned)


def allowed_commit(repo: str, revision: str, api: Any) -> str:
    """Return the commit that a revision means now, if the policy lets code of it run.

    Raises:
        NotTrusted: it does not.
    """
    from twinkle_registry.settings import untrusted_suffix
    from twinkle_registry.trust.policy import Policy
    from twinkle_registry.trust.reference import Origin

    policy, context = Policy.load(fetch=True), f"kernel repository {repo!r}"
    if reason := policy.denies(f"hf://{repo}"):
        raise NotTrusted(f"{context}: code from hf://{repo} is forbidden: {reason}; ask the owner of that file")
    place, commit = _whereabouts(repo, revision, api)
    origin = Origin.checked("hf", place, commit, context=context)
    if reason := policy.denies(f"hf://{repo}", commit) or policy.forbids(origin):
        raise NotTrusted(f"{context}: code from {origin} is forbidden: {reason}; ask the owner of that file")
    if not policy.allows(origin):
        raise NotTrusted(
            f"{context}: cannot run code from {origin.place}: it is not trusted; review it, then allow this commit in "
            f"twinkle.toml: [trust] allow = [{str(origin)!r}]\n  (other ways: {origin.place!r} there for all commits, "
            f"or TWINKLE_TRUST_REMOTE_CODE=1 for all code){untrusted_suffix()}"
        )
    if policy.signers(origin):
        raise NotTrusted(
            f"{context}: the policy requires signed code from {origin.place}, but signatures of kernel repositories "
            "are not checked; use an installed kernel"
        )
    return commit


def _whereabouts(repo: str, revision: str, api: Any) -> tuple[str, str]:
    """Return the present address of a repository and the commit of a revision; offline, from the cache."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        info = api.kernel_info(repo, revision=revision)
        return info.id or repo, info.sha
    if _COMMIT.fullmatch(revision):
        return repo, revision
    from pathlib import Path

    from kernels.hf_hub import CACHE_DIR

    try:
        folder = api.snapshot_download(
            repo, repo_type="kernel", revision=revision, local_files_only=True, cache_dir=CACHE_DIR
        )
    except OSError as error:
        raise HubError(
            f"kernel repository {repo!r}: its revision {revision!r} is not in the cache of this machine, and "
            "HF_HUB_OFFLINE is set; load it once where there is a network"
        ) from error
    return repo, Path(folder).name


def _member(module: Any, ref: HubRef) -> Any:
    from twinkle_registry.naming import nearest_or_all

    layers = getattr(module, "layers", None)
    for owner in (layers, module):
        value = owner
        for part in ref.layer.split("."):
            value = getattr(value, part, None)
        if callable(value):
            return value
    offered = [name for owner in (layers, module) for name in getattr(owner, "__all__", None) or vars(owner or module)]
    raise ArgumentError(
        f"{ref}: it has no layer or function {ref.layer!r}; "
        f"{nearest_or_all(ref.layer, sorted({name for name in offered if not name.startswith('_')}))}"
    )
