"""Who may run code: `[trust]` of the project and of the user, the switch for the bold, redirects, signatures."""

import base64
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import NotTrusted, Registry, RequirementMissing, SettingsError
from twinkle_registry.trust.editor import LockEditor, remove, still_trusted, verify
from twinkle_registry.trust.lock import Lock
from twinkle_registry.trust.policy import Policy, matches
from twinkle_registry.trust.signatures import ED25519_FILE, SIGSTORE_FILE, sign_folder, signed_bytes

House = Callable[..., Registry]
FOCAL = "from house_contracts import Loss\nclass Focal(Loss):\n    def __call__(self, inputs): ...\n"
FILES = {"__init__.py": FOCAL}
COMMIT = "3f" * 20


@pytest.fixture
def registry(hub: Any, house: House) -> Registry:
    return house()


def trust(text: str, path: str = "twinkle.toml") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f"[trust]\n{text}\n", "utf-8")


@pytest.mark.parametrize(
    ("pattern", "place", "fits"),
    [
        ("hf://acme/*", "hf://acme/focal", True),
        ("hf://acme/*", "hf://acme-evil/focal", False),
        ("hf://acme/*", "ms://acme/focal", False),
        ("hf://*/focal", "hf://acme/focal", True),
        ("hf://*", "hf://acme/focal", False),
        ("hf://**", "hf://acme/focal", True),
        ("hf://acme/**", "hf://acme", False),
        ("*", "ms://any/thing", True),
        ("hf://acme/fo*", "hf://acme/focal", True),
        (f"hf://acme/focal@{COMMIT}", "hf://acme/focal", True),
        ("hf://acme/focal@3f3f*", "hf://acme/focal", True),
        ("hf://acme/focal@4f*", "hf://acme/focal", False),
        ("file:///opt/plugins/*", "file:///opt/plugins/a/b", False),
        ("file:///opt/plugins/**", "file:///opt/plugins/a/b", True),
        ("file:///opt/plugins/**", "file:///opt/plugins-evil/a", False),
    ],
)
def test_a_pattern_means_segments_and_commits(pattern: str, place: str, fits: bool) -> None:
    assert matches(pattern, place, COMMIT) is fits


def test_an_allowed_publisher_runs_unlocked_and_nobody_else_does(hub: Any, registry: Registry) -> None:
    trust('allow = ["hf://acme/*"]')
    hub.push("acme/focal", FILES)
    hub.push("other/focal", FILES)
    assert registry.resolve("hf://acme/focal", "loss").__name__ == "Focal"
    assert not Path("twinkle.lock").exists()
    with pytest.raises(NotTrusted, match="cannot run code from hf://other/focal"):
        registry.resolve("hf://other/focal", "loss")


def test_an_allowed_publisher_runs_what_the_branch_is_now(hub: Any, registry: Registry) -> None:
    trust('allow = ["hf://acme/*"]')
    hub.push("acme/focal", FILES)
    first = registry.resolve("hf://acme/focal", "loss")
    hub.push("acme/focal", {"__init__.py": FOCAL + "# new"})
    second = registry.resolve("hf://acme/focal", "loss")
    assert first.__module__ != second.__module__


def test_what_is_allowed_unpickles_elsewhere_under_the_same_policy_only(
    hub: Any, registry: Registry, site: Any
) -> None:
    trust('allow = ["hf://acme/*"]')
    hub.push("acme/word", {"__init__.py": "class Word:\n    text = 'allowed'\n"})
    pickled = pickle.dumps(registry.resolve("hf://acme/word#Word", "optimizer"))
    command = [sys.executable, "-c", "import pickle, sys; print(pickle.load(sys.stdin.buffer).text)"]
    assert subprocess.run(command, input=pickled, capture_output=True, check=True).stdout == b"allowed\n"
    trust('allow = ["hf://other/*"]')
    assert b"cannot run code from" in subprocess.run(command, input=pickled, capture_output=True).stderr


def test_one_commit_may_be_allowed(hub: Any, registry: Registry) -> None:
    commit = hub.push("acme/focal", FILES)
    trust(f'allow = ["hf://acme/focal@{commit}"]')
    assert registry.resolve("hf://acme/focal", "loss").__name__ == "Focal"
    hub.push("acme/focal", {"__init__.py": FOCAL + "# new"})
    with pytest.raises(NotTrusted, match="cannot run code from"):
        registry.resolve("hf://acme/focal", "loss")


def test_deny_wins_over_lock_allow_and_boldness(
    hub: Any, registry: Registry, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("acme/focal", FILES)
    add(registry, "hf://acme/focal")
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    trust('allow = ["*"]\ndeny = ["hf://ACME/focal"]')
    with pytest.raises(NotTrusted, match=r"\[trust\] deny has 'hf://ACME/focal'"):
        registry.resolve("hf://acme/focal", "loss")
    hub.asked.clear()
    with pytest.raises(NotTrusted, match=r"add hf://acme/focal: .* \[trust\] deny"):
        add(registry, "hf://acme/focal")
    assert hub.asked == []


def test_nothing_outside_of_only_is_even_added(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/focal", FILES)
    hub.push("other/focal", FILES)
    trust('only = ["hf://acme/*"]')
    add(registry, "hf://acme/focal")
    with pytest.raises(NotTrusted, match=r"\[trust\] only has 'hf://acme/\*'"):
        add(registry, "hf://other/focal")
    trust("only = []")
    with pytest.raises(NotTrusted, match=r"\[trust\] only has nothing"):
        registry.resolve("hf://acme/focal", "loss")


def test_only_may_name_one_commit_and_looks_at_where_a_redirect_leads(hub: Any, registry: Registry, add: Any) -> None:
    commit = hub.push("acme/new", FILES)
    hub.moved["acme/old"] = "acme/new"
    trust(f'only = ["hf://acme/new@{commit}"]')
    add(registry, "hf://acme/old")
    assert registry.resolve("hf://acme/old", "loss").__name__ == "Focal"
    hub.push("acme/new", {"__init__.py": FOCAL + "# new"})
    with pytest.raises(NotTrusted, match=r"\[trust\] only has"):
        add(registry, "hf://acme/old")


def test_what_the_user_denies_no_project_allows(hub: Any, registry: Registry, tmp_path: Path) -> None:
    hub.push("acme/focal", FILES)
    trust('deny = ["hf://acme/*"]', str(tmp_path / "home/.config/twinkle/twinkle.toml"))
    trust('allow = ["*"]')
    with pytest.raises(NotTrusted, match=r"\[trust\] deny"):
        registry.resolve("hf://acme/focal", "loss")


def test_the_bold_run_everything_that_is_not_denied(
    hub: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("acme/focal", FILES)
    for value in ("0", "", "false"):
        monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", value)
        with pytest.raises(NotTrusted):
            registry.resolve("hf://acme/focal", "loss")
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "maybe")
    with pytest.raises(SettingsError, match="TWINKLE_TRUST_REMOTE_CODE must be 1 or 0, got 'maybe'"):
        registry.resolve("hf://acme/focal", "loss")
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", "1")
    assert registry.resolve("hf://acme/focal", "loss").__name__ == "Focal"


def test_a_redirect_is_followed_before_the_policy_is_asked(hub: Any, registry: Registry, add: Any) -> None:
    commit = hub.push("evil/focal", FILES)
    hub.moved["acme/focal"] = "evil/focal"
    trust('allow = ["hf://acme/*"]')
    with pytest.raises(NotTrusted, match=r"code from hf://evil/focal \(hf://acme/focal has moved there\)") as error:
        registry.resolve("hf://acme/focal", "loss")
    assert f"twinkle plugins add hf://evil/focal@{commit}" in str(error.value)
    assert hub.asked == ["commit_of acme/focal"]
    trust('only = ["hf://acme/*"]')
    with pytest.raises(NotTrusted, match="code from hf://evil/focal is forbidden"):
        add(registry, "hf://acme/focal")
    trust("")
    with pytest.raises(NotTrusted, match=r"another publisher; if you trust .* twinkle plugins add hf://evil/focal"):
        add(registry, "hf://acme/focal")
    assert not Path("twinkle.lock").exists()
    add(registry, "hf://evil/focal")
    assert registry.resolve("hf://acme/focal", "loss") is registry.resolve("hf://evil/focal", "loss")
    trust('deny = ["hf://acme/*"]')
    with pytest.raises(NotTrusted, match="deny"):
        registry.resolve("hf://acme/focal", "loss")


def test_a_publisher_may_rename_a_repository(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/new", FILES)
    hub.moved["acme/old"] = "acme/new"
    assert add(registry, "hf://acme/old").origin == "hf://acme/new"
    assert Lock.load().hub[0].repository == "hf://acme/new"
    hub.offline = True
    assert registry.resolve("hf://acme/old", "loss") is registry.resolve("hf://acme/new", "loss")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('alow = ["hf://a/*"]', r"\[trust\] alow: unknown key, nearest: 'allow'"),
        ('allow = "hf://a/*"', "must be a list of patterns"),
        ("deny = [1]", "must be a list of patterns"),
        ('allow = ["acme/*"]', "must be a pattern such as 'hf://org/.' or .*, got 'acme/.'"),
        ('deny = ["hf://acme/"]', "must be a pattern"),
        ("signed = 1", "must be a table of patterns and signers"),
        ('signed = { "acme" = { ed25519 = "x" } }', "must be a pattern"),
        ('signed = { "hf://a/*" = "x" }', r"must be \{ ed25519 = "),
        ('signed = { "hf://a/*" = { ed25519 = "eA==" } }', "must be 32 bytes in base64"),
        ('signed = { "hf://a/*" = { ed25519 = 3 } }', "must be 32 bytes in base64"),
        ('signed = { "hf://a/*" = { gpg = "x" } }', "unknown key 'gpg'"),
        ('signed = { "hf://a/*" = { sigstore = { identity = "x" } } }', "must have 'identity' and 'issuer'"),
    ],
)
def test_a_wrong_policy_is_an_error_and_no_permission(hub: Any, registry: Registry, text: str, message: str) -> None:
    hub.push("acme/focal", FILES)
    trust(text)
    with pytest.raises(SettingsError, match=message):
        registry.resolve("hf://acme/focal", "loss")


@pytest.mark.parametrize("path", ["twinkle.toml", "../home/.config/twinkle/twinkle.toml"])
def test_a_misspelt_table_does_not_switch_the_policy_off(hub: Any, registry: Registry, add: Any, path: str) -> None:
    hub.push("acme/focal", FILES)
    trust("")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text('[trsut]\ndeny = ["**"]\n')
    for use in (lambda: add(registry, "hf://acme/focal"), lambda: registry.resolve("hf://acme/focal", "loss")):
        with pytest.raises(SettingsError, match=r"twinkle\.toml: unknown table \[trsut\], nearest: \[trust\]"):
            use()
    assert not Path("twinkle.lock").exists()


def test_lock_and_verify_read_the_policy_though_no_entry_is_of_a_hub(hub: Any, registry: Registry) -> None:
    def editor() -> LockEditor:
        return LockEditor(registry, lambda scheme: hub, lambda _: True)

    editor().renew()
    before = Path("twinkle.lock").read_text()
    trust('deny = ["hf//x"]')
    for use in (lambda: editor().renew(), lambda: verify(registry.records, lambda scheme: hub)):
        with pytest.raises(SettingsError, match=r"\[trust\] deny must be a pattern"):
            use()
    assert Path("twinkle.lock").read_text() == before


def test_what_was_removed_and_still_leads_to_something_trusted_is_told(hub: Any, registry: Registry, add: Any) -> None:
    hub.push("acme/focal", FILES)
    add(registry, "hf://acme/focal")
    commit = hub.push("mallory/focal", FILES)
    hub.moved["acme/focal"] = "mallory/focal"
    add(registry, "hf://mallory/focal")
    (told,) = still_trusted(remove("hf://acme/focal"), lambda scheme: hub)
    assert registry.resolve("hf://acme/focal", "loss").__name__ == "Focal"
    assert told == (
        f"hf://acme/focal still resolves to hf://mallory/focal@{commit}, which is trusted; "
        "remove that too: twinkle plugins remove hf://mallory/focal"
    )
    assert still_trusted(remove("hf://mallory/focal"), lambda scheme: hub) == []
    trust('allow = ["hf://mallory/*"]')
    (told,) = still_trusted(["hf://acme/focal", "acme-losses"], lambda scheme: hub)
    assert told.endswith("which is trusted; [trust] allows that")
    hub.offline = True
    assert still_trusted(["hf://acme/focal"], lambda scheme: hub) == []


def test_a_policy_without_files_allows_nothing() -> None:
    assert Policy.load() == Policy()


@pytest.fixture
def key() -> Any:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    return ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def signed(folder: Path, files: dict[str, str], private: bytes) -> dict[str, str | bytes]:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    sign_folder(folder, private)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_signature_by_the_key_of_the_policy_is_asked_for(
    hub: Any, registry: Registry, add: Any, key: Any, tmp_path: Path
) -> None:
    public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    trust(f'[trust.signed]\n"hf://acme/*" = {{ ed25519 = "{public}" }}')
    hub.push("acme/focal", FILES)
    with pytest.raises(NotTrusted, match=r"requires a signature by key .*, but it has no twinkle-plugin\.sig"):
        add(registry, "hf://acme/focal")
    files = signed(tmp_path / "repo", FILES, key.private_bytes_raw())
    hub.push("acme/focal", files)
    add(registry, "hf://acme/focal")
    assert registry.resolve("hf://acme/focal", "loss").__name__ == "Focal"
    hub.push("acme/focal", {**files, "__init__.py": FOCAL + "# tampered"})
    with pytest.raises(NotTrusted, match="is not a signature of these files by key"):
        add(registry, "hf://acme/focal")
    hub.push("acme/focal", {**files, "more.py": ""})
    with pytest.raises(NotTrusted, match="is not a signature of these files"):
        add(registry, "hf://acme/focal")
    hub.push("acme/focal", {**files, ED25519_FILE: b"no base64!"})
    with pytest.raises(NotTrusted, match="is not a signature of these files"):
        add(registry, "hf://acme/focal")


def test_a_signature_is_asked_for_on_the_load_path_too(
    hub: Any, registry: Registry, add: Any, key: Any, tmp_path: Path
) -> None:
    hub.push("acme/focal", FILES)
    add(registry, "hf://acme/focal")
    public = base64.b64encode(bytes(32)).decode()
    trust(f'[trust.signed]\n"hf://**" = {{ ed25519 = "{public}" }}')
    with pytest.raises(NotTrusted, match="requires a signature by"):
        registry.resolve("hf://acme/focal", "loss")
    hub.push("acme/focal", signed(tmp_path / "repo", FILES, key.private_bytes_raw()))
    with pytest.raises(NotTrusted, match="is not a signature of these files by key AAAA"):
        add(registry, "hf://acme/focal")


def test_what_is_signed_is_the_listing_without_signatures() -> None:
    files = {"b.py": "2" * 64, "a.py": "1" * 64, ED25519_FILE: "3" * 64, SIGSTORE_FILE: "4" * 64}
    expected = "twinkle plugin, version 1\n" + "1" * 64 + "  a.py\n" + "2" * 64 + "  b.py\n"
    assert signed_bytes(files) == expected.encode()


def test_a_key_may_be_pem_and_must_be_ed25519(key: Any, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    def pem(private: Any) -> bytes:
        text: bytes = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return text

    (tmp_path / "a.py").write_text("")
    raw = sign_folder(tmp_path, key.private_bytes_raw()).read_bytes()
    assert sign_folder(tmp_path, pem(key)).read_bytes() == raw
    with pytest.raises(SettingsError, match="must be an ed25519 key"):
        sign_folder(tmp_path, pem(ec.generate_private_key(ec.SECP256R1())))
    with pytest.raises(SettingsError, match="must be 32 bytes, or PEM"):
        sign_folder(tmp_path, b"short")


def test_without_the_package_a_signature_is_not_taken_on_faith(
    hub: Any, registry: Registry, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("acme/focal", {**FILES, ED25519_FILE: "eA==", SIGSTORE_FILE: "{}"})
    public = base64.b64encode(bytes(32)).decode()
    for module in ("cryptography.hazmat.primitives.asymmetric", "sigstore.errors"):
        monkeypatch.setitem(sys.modules, module, None)
    trust(f'[trust.signed]\n"hf://acme/*" = {{ ed25519 = "{public}" }}')
    with pytest.raises(RequirementMissing, match="pip install 'cryptography>=42'"):
        add(registry, "hf://acme/focal")
    trust('[trust.signed]\n"hf://acme/*" = { sigstore = { identity = "a@b", issuer = "https://c" } }')
    with pytest.raises(RequirementMissing, match="pip install 'sigstore>=4'"):
        add(registry, "hf://acme/focal")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_sigstore_bundle_that_cannot_be_checked_is_no_signature(hub: Any, registry: Registry, add: Any) -> None:
    pytest.importorskip("sigstore")
    trust('[trust.signed]\n"hf://acme/*" = { sigstore = { identity = "a@b", issuer = "https://c" } }')
    for bundle in ("{}", "no json", '{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}'):
        hub.push("acme/focal", {**FILES, SIGSTORE_FILE: bundle})
        with pytest.raises(NotTrusted, match="is not a signature of these files by a@b, or cannot be checked"):
            add(registry, "hf://acme/focal")
    hub.push("acme/focal", FILES)
    with pytest.raises(NotTrusted, match=r"it has no twinkle-plugin\.sigstore\.json"):
        add(registry, "hf://acme/focal")
