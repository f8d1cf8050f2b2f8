"""Reads the text of a lock file, strictly: whoever edits it by hand is told what is wrong."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingsError, TwinkleError
from ..naming import nearest_or_all
from .listing import check_names, check_path, digest_of
from .lock import SCHEMA, Lock, LockedDistribution, LockedFile, LockedRepository
from .reference import HubReference, Origin

_HEX = re.compile(r"[0-9a-f]{64}")
_TOP = ("schema", "hub", "pypi", "file")
_MEND = "restore it from version control, or remove it and add its plugins again"


def parse_lock(content: bytes, path: Path) -> Lock:
    """Return what a lock file says.

    Raises:
        SettingsError: It is damaged; the text names the place and what to do.
    """
    try:
        raw = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is damaged: it cannot be read as TOML ({error}); {_MEND}") from error
    reader = _Reader(path)
    reader.known("the file", raw, _TOP)
    schema = raw.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise SettingsError(
            f"{path}: schema = {schema}, but this version reads {SCHEMA}; run: pip install -U twinkle-registry"
        )
    if schema != SCHEMA or type(schema) is not int:
        raise reader.damaged(f"schema is {schema!r}, not {SCHEMA}")
    return Lock(
        path,
        tuple(reader.repository(table) for table in reader.tables(raw, "hub")),
        tuple(reader.distribution(table) for table in reader.tables(raw, "pypi")),
        tuple(reader.file(table) for table in reader.tables(raw, "file")),
    )


class _Reader:
    """Takes the tables of one file apart."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def damaged(self, what: str) -> SettingsError:
        return SettingsError(f"{self.path} is damaged: {what}; {_MEND}")

    def known(self, where: str, table: Mapping[str, Any], keys: tuple[str, ...]) -> None:
        for key in table:
            if key not in keys:
                raise self.damaged(f"{where} has the unknown key {key!r}, {nearest_or_all(key, keys)}")

    def tables(self, raw: Mapping[str, Any], sort: str) -> list[dict[str, Any]]:
        value = raw.get(sort, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.damaged(f"{sort} is not a list of tables [[{sort}]]")
        return value

    def repository(self, table: dict[str, Any]) -> LockedRepository:
        where, files = self._entry(table, "hub", ("reference", "repository", "commit", "digest"))
        try:
            HubReference.parse(table["reference"], asked=where)
            asked = HubReference.parse(table["repository"], asked=where)
            Origin.checked(asked.scheme, asked.repo, table["commit"], asked=where)
            for path in files:
                check_path(path, asked=where)
            check_names(files, asked=where)
        except TwinkleError as error:
            raise self.damaged(str(error)) from error
        if table["digest"] != digest_of(files):
            raise self.damaged(f"the digest of {where} is not that of its files")
        return LockedRepository(table["reference"], table["repository"], table["commit"], files)

    def distribution(self, table: dict[str, Any]) -> LockedDistribution:
        _, files = self._entry(table, "pypi", ("name", "version"))
        return LockedDistribution(table["name"], table["version"], files)

    def file(self, table: dict[str, Any]) -> LockedFile:
        where = self._texts(table, "file", ("path", "sha256"), ())
        if not _HEX.fullmatch(table["sha256"]):
            raise self.damaged(f"the sha256 of {where} is no SHA-256")
        return LockedFile(table["path"], table["sha256"])

    def _entry(self, table: dict[str, Any], sort: str, keys: tuple[str, ...]) -> tuple[str, dict[str, str]]:
        where = self._texts(table, sort, keys, ("files",))
        files = table.get("files")
        fine = isinstance(files, dict) and all(isinstance(v, str) and _HEX.fullmatch(v) for v in files.values())
        if not fine or not isinstance(files, dict):
            raise self.damaged(f"files of {where} is not a table of paths and SHA-256")
        return where, files

    def _texts(self, table: dict[str, Any], sort: str, keys: tuple[str, ...], more: tuple[str, ...]) -> str:
        where = f"{sort} {table.get(keys[0])!r}"
        self.known(where, table, (*keys, *more))
        for key in keys:
            if not isinstance(table.get(key), str) or not table[key]:
                raise self.damaged(f"{key} of {where} is {table.get(key)!r}, not a text")
        return where
