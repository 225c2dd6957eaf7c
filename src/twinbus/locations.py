"""Files on every file system that Spark can reach: hdfs, s3a, abfs and the others.

A folder that a user names is a local path or a URI. Spark resolves a path without a scheme against
its default file system, which is a local one only by default. So a local path is handed to Spark as
a `file` URI, and a URI is opened through the `FileSystem` of Hadoop in Spark's own JVM, with the
settings and credentials that Spark has. The JVM can be reached from the driver's process, and not
from the Python workers of executors.

`HadoopPath` has those methods of `pathlib.Path` that ledgers need, so that a survey of ledgers is
written once.
"""

import io
import os
import re
from collections.abc import Iterator
from functools import total_ordering
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinbus.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # of Python 3.12

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # longer than the letter of a Windows drive
_PATTERN = re.compile(r"([\\\[\]{}*?])")
_LOCAL = "file:"
_EXISTS = "FileAlreadyExistsException"


def is_uri(text: str) -> bool:
    """Whether a text names a folder with its file system."""
    return _URI.match(text) is not None


def folder_of(text: str) -> "Path | str":
    """Return a folder as given by a user: a local path, or the URI of another file system."""
    if text.startswith(_LOCAL):
        return Path("/" + text.removeprefix(_LOCAL).lstrip("/"))
    return text.rstrip("/") if is_uri(text) else Path(text)


def as_uri(path: "Path | HadoopPath") -> str:
    """Return the URI of a path, so that Spark does not look on its default file system.

    Hadoop takes the characters of a path as they are: nothing is escaped.
    """
    return str(path) if isinstance(path, HadoopPath) else f"{_LOCAL}//{path.absolute()}"


def as_pattern(path: "Path | HadoopPath") -> str:
    """Return the URI of a path for methods of Spark that take patterns; it matches itself only."""
    return _PATTERN.sub(r"\\\1", as_uri(path))


@total_ordering
class HadoopPath:
    """A file or folder on a file system of Hadoop; used by the driver."""

    def __init__(self, session: Any, uri: str, status: Any = None) -> None:
        if not is_uri(uri):
            raise InvalidArgumentError(
                f"{uri!r} names no file system; give a URI such as s3a://bucket/folder"
            )
        self._session = session
        self._uri = uri.rstrip("/")
        self._status = status  # from the listing of its folder, if it was listed

    def __str__(self) -> str:
        return self._uri

    def __repr__(self) -> str:
        return f"HadoopPath({self._uri!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HadoopPath) and self._uri == other._uri

    def __lt__(self, other: "HadoopPath") -> bool:
        return self._uri < other._uri

    def __hash__(self) -> int:
        return hash(self._uri)

    def __truediv__(self, name: str) -> "HadoopPath":
        return HadoopPath(self._session, f"{self._uri}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self._uri.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> "HadoopPath":
        """The folder that it is in."""
        return HadoopPath(self._session, self._uri.rpartition("/")[0])

    def resolve(self) -> "HadoopPath":
        """Return the path itself: a URI is absolute."""
        return self

    # -- what is there -----------------------------------------------------------------------------

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        if self._status is not None:
            return bool(self._status.isDirectory())
        return bool(self._fs().exists(self._path())) and bool(
            self._fs().getFileStatus(self._path()).isDirectory()
        )

    def exists(self) -> bool:
        """Whether it exists."""
        return bool(self._fs().exists(self._path()))

    def size(self) -> int:
        """Return the length of a file."""
        status = self._status or self._fs().getFileStatus(self._path())
        return int(status.getLen())

    def iterdir(self) -> Iterator["HadoopPath"]:
        """Yield the entries of a folder."""
        for status in self._fs().listStatus(self._path()):
            yield HadoopPath(self._session, f"{self._uri}/{status.getPath().getName()}", status)

    def glob(self, pattern: str) -> Iterator["HadoopPath"]:
        """Yield the entries whose names begin with a prefix, for patterns such as `day=*/`."""
        beginning, _, rest = pattern.partition("*")
        if self.is_dir():
            for path in self.iterdir():
                if path.name.startswith(beginning) and (rest != "/" or path.is_dir()):
                    yield path

    def open(self) -> "HadoopFile":
        """Open a file to read any part of it."""
        return HadoopFile(self._fs().open(self._path()), self.size())

    # -- changes -----------------------------------------------------------------------------------

    def mkdir(self) -> None:
        """Create the folder, and those above it."""
        self._fs().mkdirs(self._path())

    def put(self, local: Path) -> None:
        """Copy a local file to this name, where it appears whole or not at all."""
        draft = self.parent / f".{self.name}.{os.urandom(4).hex()}.draft"
        hadoop_path = self._jvm.org.apache.hadoop.fs.Path
        try:
            self._fs().copyFromLocalFile(
                False,
                True,
                hadoop_path(as_uri(local)),
                hadoop_path(str(draft)),
            )
            draft.rename(self)
        except BaseException:
            draft.remove()
            raise

    def rename(self, target: "HadoopPath") -> None:
        """Rename the file; replace an existing file.

        If a file with that name exists, some file systems replace it, some return False, and some
        raise, such as S3A.
        """
        if self._is_renamed(target):
            return
        target.remove()
        if not self._is_renamed(target):
            raise OSError(
                f"the file system refused to rename {self} to {target}. Check that Spark may "
                f"create and delete files in {target.parent}"
            )

    def _is_renamed(self, target: "HadoopPath") -> bool:
        """Rename it; return False if the file system does not replace the file of that name."""
        try:
            return bool(self._fs().rename(self._path(), target._path()))  # noqa: SLF001 - its own
        except Exception as error:
            java = getattr(error, "java_exception", None)  # of a Py4JJavaError
            if java is None or java.getClass().getSimpleName() != _EXISTS:
                raise
            return False

    def remove(self) -> None:
        """Delete a file, or a folder with its content. A missing path is not an error."""
        self._fs().delete(self._path(), True)

    @property
    def _jvm(self) -> Any:
        return self._session._jvm  # noqa: SLF001 - pyspark has no other way

    def _path(self) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._uri)

    def _fs(self) -> Any:
        # The settings of the session: its context lacks some of them, such as credentials.
        settings = self._session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
        return self._path().getFileSystem(settings)


class HadoopFile(io.RawIOBase):
    """A file that is read through the JVM."""

    def __init__(self, stream: Any, size: int) -> None:
        self._stream = stream
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set where the next read begins; return that offset."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: "Buffer") -> int:
        """Read as much as fits into a buffer."""
        view = memoryview(buffer)
        self._stream.seek(self._at)
        content = bytes(self._stream.readNBytes(min(len(view), max(self._size - self._at, 0))))
        view[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        """Close it in the JVM, too."""
        if not self.closed:
            self._stream.close()
        super().close()


Location = Path | HadoopPath
