"""Where a run lives: a local directory, or a URL of an object store, which a plug-in opens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trireme.errors import ConfigurationError
from trireme.plugins import Plugins, known

_STORES = "trireme.stores"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_FLATTENED = re.compile(r"([a-z][a-z0-9+.-]+):/[^/]")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A directory or an object in an object store, named as a `Path` names a local one.

    Attributes:
        url: such as `s3://bucket/run`; without a slash at the end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """All but the last part."""
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def scheme(self) -> str:
        """What comes before `://`."""
        return self.url.partition("://")[0]

    @property
    def scratch(self) -> Path:
        """The local directory of what a job keeps on its own host, below `runs/`.

        Logs, records, event files, secrets, locks and sockets.
        """
        scheme, _, rest = self.url.partition("://")
        parts = [quote(part, safe="", errors="surrogatepass") for part in rest.split("/")]
        return Path("runs", scheme, *(part for part in parts if part not in ("", ".", "..")))


Location = Path | RemotePath  # a local directory, or one of an object store


def location(place: str | Location) -> Location:
    """Returns a local directory as a `Path`, and one of an object store as a `RemotePath`."""
    if isinstance(place, RemotePath):
        return place
    if isinstance(place, Path):
        flattened = _FLATTENED.match(str(place))
        if flattened is not None and flattened[1] in known(_STORES):
            raise ConfigurationError(
                f"Path({str(place)!r}) was made of a URL and has lost one of its slashes: give the "
                "URL itself, as text"
            )
        return place
    match = _URL.fullmatch(place)
    if match is None:
        return Path(place)
    scheme, rest = match[1].lower(), match[2].rstrip("/")
    if scheme not in known(_STORES):
        schemes = "".join(f", or {each}://" for each in known(_STORES))
        raise ConfigurationError(
            f"the run directory {place} has the scheme {scheme}://, which is not known: give a "
            f"local directory{schemes}"
        )
    bucket, _, inside = rest.partition("/")
    if not bucket or (not inside and scheme != "memory") or "//" in rest:
        raise ConfigurationError(
            f"the run directory {place} is not complete: name a bucket and a directory in it, such "
            f"as {scheme}://bucket/run"
        )
    return RemotePath(f"{scheme}://{rest}")


def local_directory(place: str | Location) -> Path:
    """Returns the directory of what a job keeps on its own host; see `RemotePath.scratch`."""
    where = location(place)
    return where if isinstance(where, Path) else where.scratch


class StoreError(OSError):
    """An object store has refused a request, or did not answer; says what to do.

    Attributes:
        denied: whether the store denies it to this user: it would do so again.
    """

    denied = False


@dataclass(frozen=True, slots=True)
class StoreType:
    """A kind of object store. Its module should import fast."""

    # The class of an open store, made of a `RemotePath`, as `package.module:class`. It raises
    # `ConfigurationError` where the store cannot be opened, and `StoreError` later.
    open: str
    # That of its `trireme.session.checkpoint.place.Place`, made of an open store.
    place: str
    shared: bool = True  # whether other processes see what one writes


STORES = Plugins(_STORES, "object store", StoreType)  # every installed one, by its scheme


def open_store(where: RemotePath) -> tuple[StoreType, Any]:
    """Returns the kind of a run directory's object store, and the open store."""
    try:
        kind = STORES.load(where.scheme)
        opened = STORES.imported(where.scheme, "open")
    except ConfigurationError as error:
        raise ConfigurationError(f"the run directory {where} cannot be opened: {error}") from error
    return kind, opened(where)
