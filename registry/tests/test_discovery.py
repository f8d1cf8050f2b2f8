"""Installed plugins become records, whatever is wrong with them, and none is imported for it."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from twinkle_registry import ManifestError, PluginBroken, discovery, installed_plugins


def only(records: list[Any]) -> Any:
    (record,) = records
    return record


def test_a_plugin_is_found_without_being_imported(site: Any, table: Any) -> None:
    manifest = site.plugin("acme-losses", table("L", "acme_losses.loss:L"), version="1.2")
    site.write("acme_losses/__init__.py", "raise RuntimeError('imported')")
    record = only(installed_plugins("0.1.0"))
    assert (record.dist, record.version, record.package) == ("acme-losses", "1.2", "acme_losses")
    assert (record.status, record.reason, record.name) == ("ok", "", "acme-losses")
    assert record.location == str(manifest)
    assert record.manifest.components[0].dist == "acme-losses"
    assert record.manifest.components[0].version == "1.2"
    assert "acme_losses" not in sys.modules


def test_distributions_without_the_group_are_no_plugins(site: Any) -> None:
    site.metadata("numpy")
    site.write("other-1.0.dist-info/entry_points.txt", "[twinkle.other]\na = b\n[console_scripts]\ntwinkle = x:y\n")
    site.write("~cme-1.0.dist-info/entry_points.txt", "[twinkle]\na = b\n")
    assert installed_plugins() == []


def test_an_egg_info_counts_too(site: Any) -> None:
    site.plugin("acme")
    (site.folder / "acme-1.0.dist-info").rename(site.folder / "acme.egg-info")
    (site.folder / "acme.egg-info" / "METADATA").rename(site.folder / "acme.egg-info" / "PKG-INFO")
    record = only(installed_plugins())
    assert (record.dist, record.version, record.status) == ("acme", "1.0", "ok")


def test_metadata_that_is_missing_is_read_off_the_folder(site: Any) -> None:
    site.plugin("acme")
    (site.folder / "acme-1.0.dist-info" / "METADATA").unlink()
    record = only(installed_plugins())
    assert (record.dist, record.version) == ("acme", "1.0")


def test_a_stale_entry_point_is_a_broken_record(site: Any) -> None:
    site.metadata("acme", entry="acme_gone")
    record = only(installed_plugins())
    assert (record.status, record.manifest, record.location) == ("broken", None, "")
    assert record.reason == (
        "package 'acme_gone' cannot be found, its entry point is stale; reinstall or uninstall the distribution"
    )
    assert isinstance(record.cause, PluginBroken)


def test_a_namespace_folder_is_a_broken_record(site: Any) -> None:
    site.plugin("acme")
    (site.folder / "acme" / "__init__.py").unlink()
    record = only(installed_plugins())
    assert record.status == "broken"
    assert record.reason == f"'acme' is only a namespace folder without __init__.py at {site.folder / 'acme'}"


def test_a_single_module_is_a_broken_record(site: Any) -> None:
    site.metadata("acme", entry="acme_module")
    site.write("acme_module.py")
    assert "is a module" in only(installed_plugins()).reason


@pytest.mark.parametrize("entry", ["acme.plugin", "acme:plugin", "acme [extra]"])
def test_an_entry_point_that_is_no_top_level_package_is_a_broken_record(site: Any, entry: str) -> None:
    site.metadata("acme", entry=entry)
    assert only(installed_plugins()).reason == (
        f"its entry point of group 'twinkle' must be the name of a top-level package, got {entry!r}"
    )


def test_a_missing_manifest_is_a_broken_record(site: Any) -> None:
    site.plugin("acme").unlink()
    record = only(installed_plugins())
    assert (
        record.reason
        == f"{site.folder / 'acme' / 'twinkle-plugin.toml'} is missing; it must list what the plugin offers"
    )
    assert isinstance(record.cause, ManifestError)


def test_a_bad_manifest_is_a_broken_record_that_says_where(site: Any) -> None:
    manifest = site.plugin("acme", "colour = 1\n")
    record = only(installed_plugins())
    assert (record.status, record.location) == ("broken", str(manifest))
    assert "colour: unknown key" in record.reason


def test_a_finder_that_raises_breaks_only_the_record(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == "acme":
                raise OSError("the network share is gone")

    site.plugin("acme")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert only(installed_plugins()).reason == "package 'acme' cannot be located: OSError: the network share is gone"


@pytest.mark.parametrize(
    ("core", "installed", "fits"),
    [
        (">=0.1,<1", "0.1.0", True),
        (">=0.1,<1", "0.1", True),
        (">=0.1.0,<1", "0.1", True),
        (">=0.1,<1", "1.0", False),
        (">=0.2,<1", "0.1.9", False),
        (">=0.1,<1", "0.10", True),
        ("<0.1.0", "0.1", False),
        (">=0.1,<1", "0.2.0rc1", True),
        (">=0.2", "0.2.0.dev3", False),
        ("~=0.1.2", "0.1.9", True),
        ("==0.1.*", "0.2", False),
        (">=0.1,!=0.1.3", "0.1.3", False),
    ],
)
def test_the_core_version_is_compared_as_pep_440_says(site: Any, core: str, installed: str, fits: bool) -> None:
    from packaging.specifiers import SpecifierSet

    site.plugin("acme", core=core)
    record = only(installed_plugins(installed))
    assert SpecifierSet(core).contains(installed, prereleases=True) is fits
    assert record.status == ("ok" if fits else "incompatible")
    if not fits:
        assert record.reason == (
            f"plugin acme 1.0 needs twinkle-core {core}, but {installed} is installed; "
            f"run: pip install -U 'acme' or pip install 'twinkle-core{core}'"
        )


def test_the_first_of_two_versions_on_the_path_counts(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme", version="2.0")
    older = type(site)(tmp_path / "older", monkeypatch)
    older.plugin("acme", version="1.0")
    older.plugin("other")
    monkeypatch.syspath_prepend(str(older.folder))
    monkeypatch.setattr(discovery, "_path_entries", lambda: [str(older.folder), str(site.folder)])
    assert [(r.dist, r.version) for r in installed_plugins()] == [("acme", "1.0"), ("other", "1.0")]


def test_a_plugin_in_a_zip_archive_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "plugins.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("zipped_acme/__init__.py", "")
        zipped.writestr("zipped_acme/twinkle-plugin.toml", 'schema = 1\ncore = ">=0.1"\nname = "zipped-acme"\n')
        zipped.writestr(
            "zipped_acme-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: zipped-acme\nVersion: 1.0\n\n"
        )
        zipped.writestr("zipped_acme-1.0.dist-info/entry_points.txt", "[twinkle]\nx = zipped_acme\n")
        zipped.writestr("bare_acme/__init__.py", "")
        zipped.writestr("bare_acme-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: bare-acme\nVersion: 1.0\n\n")
        zipped.writestr("bare_acme-1.0.dist-info/entry_points.txt", "[twinkle]\nx = bare_acme\n")
    monkeypatch.syspath_prepend(str(archive))
    monkeypatch.setattr(discovery, "_path_entries", lambda: [str(archive)])
    bare, zipped_record = installed_plugins()
    assert (zipped_record.dist, zipped_record.status) == ("zipped-acme", "ok")
    assert (bare.status, "is missing" in bare.reason) == ("broken", True)


def test_what_is_no_folder_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "junk.zip").write_bytes(b"no archive")
    entries = [str(tmp_path / "junk.zip"), str(tmp_path / "absent")]
    monkeypatch.setattr(discovery, "_path_entries", lambda: entries)
    assert installed_plugins() == []


def test_an_editable_install_is_found_through_its_pth_file(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = type(site)(tmp_path / "source", monkeypatch)
    manifest = source.plugin("acme")
    (source.folder / "acme-1.0.dist-info").rename(site.folder / "acme-1.0.dist-info")
    site.write("acme.pth", str(source.folder))
    code = (
        f"import site, sys; site.addsitedir({str(site.folder)!r})\n"
        "import twinkle_registry\n"
        "for r in twinkle_registry.installed_plugins():\n"
        "    if r.dist == 'acme': print(r.location, r.status, r.manifest and r.manifest.core)"
    )

    def run() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert run() == f"{manifest} ok >=0.1,<1"
    manifest.write_text(manifest.read_text().replace(">=0.1,<1", ">=0.1,<2"))
    assert run() == f"{manifest} ok >=0.1,<2"


def test_a_folder_of_the_package_name_in_the_working_directory_does_not_hide_it(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme")
    (tmp_path / "work" / "acme" / "src").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert only(installed_plugins()).status == "ok"


def test_the_working_directory_stands_for_an_empty_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/x", "/x", 3])
    assert discovery._path_entries() == [str(Path.cwd()), "/x"]
