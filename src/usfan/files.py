"""Files in folders that may be a stranger's: nothing outside the folder, nothing out of proportion.

A folder is opened once, and each fixed name inside it relative to that descriptor. A link at such a name is never
followed, neither to read nor to write; only regular files are opened, and only up to a limit in bytes. JSON and YAML
are measured before they are parsed. Files are whole or absent: written beside, brought to the disk, then renamed.
Several files that belong together are written into a folder beside them; one rename makes all of them count.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from usfan.errors import ArtifactError, ConfigError, option, printable

if TYPE_CHECKING:  # settings are read before anything heavy is imported
    from torch import Tensor

MOST_JSON = 256 << 20
"""Bytes of a JSON file: the paths of two million images."""
MOST_PARSED = 768 << 20
"""Bytes that a parsed JSON file may take, as estimated from its characters."""
MOST_YAML = 64 << 10
"""Bytes of a YAML file: settings by name. A parser written in Python takes seconds for more."""
PART = ".files.part"
"""Folder of files that are being written together."""
READY = ".files.new"
"""The same folder once it is whole: its files count instead of those beside it, and are moved there."""
PARTS = re.compile(r"\..+\.[0-9a-f]{8}\.part")
"""Names of what killed writers leave behind: folders, and files of earlier versions."""
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""A link is not followed, and a pipe is not waited for."""
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
}


class Folder:
    """An open folder. The path itself is the user's, so links on the way to it are followed; links inside are not.

    `shared` is a folder that links inside may point into: the cache of the Hugging Face Hub stores files once.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        create: bool = False,
        shared: Path | None = None,
        descriptor: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.shared = shared
        self.newer: Folder | None = None
        """Where files are that have not been moved here yet."""
        if create:
            self.path.mkdir(parents=True, exist_ok=True)
        if descriptor is None:
            descriptor = os.open(self.path, _OPEN_FOLDER)
        self.fd = descriptor

    def inner(self, name: str, *, create: bool = False) -> Folder:
        """A folder inside; one that is a link is refused."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.fd)
        path = self.path / name
        try:
            descriptor = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                kind = self.kind(name)
                raise ArtifactError(f"{path}: not a folder but {kind}: take it away") from None
            raise OSError(error.errno, error.strerror, str(path)) from None
        folder = Folder(path, shared=self.shared, descriptor=descriptor)
        if self.newer is not None and self.newer.kind(name) == "a folder":
            folder.newer = self.newer.inner(name)
        return folder

    def see_newer(self) -> Folder:
        """This folder, in which files that were written together count as soon as all of them are there."""
        if self.kind(READY) == "a folder":
            self.newer = self.inner(READY)
        return self

    def close(self) -> None:
        if self.newer is not None:
            self.newer.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def place(self) -> Path:
        """A path to this very folder, for libraries that take paths, even if its name has changed since."""
        by_descriptor = Path(f"/dev/fd/{self.fd}")
        return by_descriptor if by_descriptor.is_dir() else self.path

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))

    def kind(self, name: str) -> str:
        """The kind of thing at a name, in words."""
        if self.newer is not None and self.newer.kind(name) != "missing":
            return self.newer.kind(name)
        try:
            mode = os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode
        except OSError:
            return "missing"
        return _KINDS.get(stat.S_IFMT(mode), "a device")

    def rights(self, name: str) -> int:
        """Those of a regular file; 0 if there is none."""
        with contextlib.suppress(OSError):
            mode = os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode
            return mode & 0o777 if stat.S_ISREG(mode) else 0
        return 0

    def owner(self, name: str) -> int:
        """The number of the user to whom a file belongs; −1 if there is none."""
        with contextlib.suppress(OSError):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_uid
        return -1

    def holds(self, name: str) -> bool:
        """Whether a regular file lies at the name."""
        return self.kind(name) == "a file" or self._shared_file(name) is not None

    def _shared_file(self, name: str) -> Path | None:
        if self.shared is None or self.kind(name) != "a link":
            return None
        real = os.path.realpath(self.path / name)
        root = os.path.realpath(self.shared)
        is_inside = os.path.commonpath([real, root]) == root
        return Path(real) if is_inside and os.path.isfile(real) else None

    def open(self, name: str, most: int | None = None) -> BinaryIO:
        """A regular file to read, of at most this many bytes."""
        return self._open(name, os.O_RDONLY, "rb", most)

    def _open(self, name: str, flags: int, mode: str, most: int | None = None) -> BinaryIO:
        """A file that is opened without surprises."""
        if mode == "rb" and self.newer is not None and self.newer.kind(name) != "missing":
            return self.newer._open(name, flags, mode, most)
        path = (self._shared_file(name) if mode == "rb" else None) or name
        try:
            descriptor = os.open(path, flags | _SAFE, 0o666, dir_fd=self.fd)
        except OSError as error:
            # A missing file that would be created means that the folder itself is gone.
            is_missing = error.errno == errno.ENOENT and not flags & os.O_CREAT
            if is_missing or error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise ArtifactError(f"{self.path / name}: {self._reason(name)}") from None
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None
        status = os.fstat(descriptor)
        problem = None
        if not stat.S_ISREG(status.st_mode):
            problem = self._reason(name)
        elif most is not None and status.st_size > most:
            problem = f"larger than {most:,} bytes"
        elif mode != "rb" and status.st_nlink > 1:
            problem = "has a second name elsewhere (a hard link): copy the folder first"
        if problem is not None:
            os.close(descriptor)
            raise ArtifactError(f"{self.path / name}: {problem}")
        return os.fdopen(descriptor, mode)  # type: ignore[return-value]

    def _reason(self, name: str) -> str:
        """Why the name is no regular file."""
        kind = self.kind(name)
        if kind == "missing":
            return "no such file"
        return f"{kind}, not a regular file; links are not followed"

    def read(self, name: str, most: int) -> bytes:
        with self.open(name, most) as file:
            return file.read(most)

    def in_place(self, name: str, *, append: bool) -> BinaryIO:
        """A file to append to (made if missing) or to cut; no other name may lead to it."""
        if append:
            return self._open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab")
        return self._open(name, os.O_RDWR, "rb+")

    def lock(self, name: str, *, wait: bool = False) -> int:
        """The handle of a lock, which holds until it is closed; BlockingIOError if another process has it, or `wait`
        for that one."""
        with self.in_place(name, append=True) as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return os.dup(file.fileno())  # the lock is that of both

    def remove(self, name: str) -> None:
        """For a link, the link is removed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Write to the yielded path; it becomes the name in one step, on disk, or not at all. A link there goes. The
        file keeps the rights of the one before; a new one gets those of the umask.

        It is written in a folder that only its owner may open: who else may write here cannot lay a link in its place.
        """
        part = f".{name}.{secrets.token_hex(4)}.part"
        path = self.path / part / name
        try:
            os.mkdir(part, 0o700, dir_fd=self.fd)
            with self.inner(part) as private:
                path = private.place / name
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                descriptor = os.open(name, flags, 0o666, dir_fd=private.fd)
                with os.fdopen(descriptor, "wb"):
                    if os.fstat(descriptor).st_uid != os.fstat(private.fd).st_uid:
                        raise ArtifactError(f"{self.path / part}: a folder of another user")
                    rights = self.rights(name) or os.fstat(descriptor).st_mode & 0o777
                    os.fchmod(descriptor, rights | 0o600)
                yield path
                with private.open(name) as file:
                    os.fchmod(file.fileno(), rights)
                    os.fsync(file.fileno())
                os.replace(name, name, src_dir_fd=private.fd, dst_dir_fd=self.fd)
            with contextlib.suppress(OSError):
                os.fsync(self.fd)
        except OSError as error:
            place = str(error.filename or part)
            if place not in (name, str(path)) and part not in place:
                raise
            target = str(self.path / name)
            raise OSError(error.errno, error.strerror or str(error), target) from error
        finally:
            with contextlib.suppress(OSError):
                remove_tree(self, part)


@contextlib.contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Errors of the system that name no file, as those of an open file, are of this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), path) from error


@contextlib.contextmanager
def written_together(path: Path) -> Iterator[Path]:
    """Write files, and folders of files, to the yielded folder. All of them become those of `path` in one step, or
    none does; other files there stay. A reader opens the folder by `see_newer`."""
    with Folder(path, create=True) as folder:
        place = PART
        try:
            finish_writing(folder)
            remove_tree(folder, PART)
            remove_tree(folder, READY)
            os.mkdir(PART, 0o700, dir_fd=folder.fd)
            with folder.inner(PART) as part:
                place = str(part.place)
                yield part.place
                match_rights(part, folder)
                os.fsync(part.fd)
            os.rename(PART, READY, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except OSError as error:
            if isinstance(error.filename, str):
                error.filename = error.filename.replace(place, str(path))
            raise
        finally:
            with contextlib.suppress(OSError):
                remove_tree(folder, PART)
        finish_writing(folder)


def match_rights(new: Folder, old: Folder) -> None:
    """Give new files the rights of those that they will replace. Raise if one cannot be replaced."""
    for name in new.names():
        kind = old.kind(name)
        if new.kind(name) == "a folder":
            if kind != "missing":
                with new.inner(name) as inner, old.inner(name) as before:
                    match_rights(inner, before)
        elif kind == "a folder":
            raise IsADirectoryError(
                errno.EISDIR, os.strerror(errno.EISDIR), str(old.path / name)
            )
        elif old.rights(name):
            os.chmod(name, old.rights(name), dir_fd=new.fd)


def finish_writing(folder: Folder) -> None:
    """Move files that were written together to their names, which a writer may not have lived to do."""
    if folder.kind(READY) == "a folder":
        with folder.inner(READY) as ready:
            move_all(ready, folder)
        os.rmdir(READY, dir_fd=folder.fd)


def move_all(origin: Folder, target: Folder, depth: int = 1) -> None:
    """Move files, and those in folders down to this depth: a mixture has a folder for each model."""
    for name in origin.names():
        if depth and origin.kind(name) == "a folder":
            with origin.inner(name) as inner, target.inner(name, create=True) as to:
                move_all(inner, to, depth - 1)
            os.rmdir(name, dir_fd=origin.fd)
        else:
            os.replace(name, name, src_dir_fd=origin.fd, dst_dir_fd=target.fd)
    with contextlib.suppress(OSError):
        os.fsync(target.fd)


def remove_tree(folder: Folder, name: str, depth: int = 1) -> None:
    """Remove a folder and what is in it, down to this depth, or the link or file that has its name."""
    if folder.kind(name) != "a folder":
        folder.remove(name)
        return
    with folder.inner(name) as inner:
        for part in inner.names():
            if depth and inner.kind(part) == "a folder":
                remove_tree(inner, part, depth - 1)
            else:
                inner.remove(part)
    os.rmdir(name, dir_fd=folder.fd)


def remove_parts_of(folder: Folder) -> None:
    """Remove what killed writers left in a folder. Only for the holder of the folder's lock."""
    for name in folder.names():
        if PARTS.fullmatch(name):
            with contextlib.suppress(OSError):
                remove_tree(folder, name)


def must_be_writable(folder: Path, flag: str | None = None) -> None:
    """Check before the work that a folder named by the user can be written to or created. Creates nothing."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ConfigError(
            f"{flag or option('run')}: {existing} is not a folder, so nothing can be written below it"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag or option('run')}: no permission to write to {existing}")


@contextlib.contextmanager
def whole_file(path: Path, *, follow: bool = False) -> Iterator[Path]:
    """Write to the yielded path; it becomes `path` in one step, on disk, or not at all.

    A link at the path is replaced. With `follow`, for a file that the user named, what the link names is written, if
    the link is the user's or root's: in a shared folder anybody may have laid it.
    """
    if follow and path.is_symlink() and path.lstat().st_uid in (0, os.geteuid()):
        path = Path(os.path.realpath(path))
    with Folder(path.parent, create=True) as folder, folder.replacing(path.name) as part:
        yield part


def write_text(
    path: Path,
    text: str,
    *,
    follow: bool = False,
) -> None:
    with whole_file(path, follow=follow) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=True, default=str) + "\n")


def write_yaml(path: Path, value: Any) -> None:
    """Without aliases, which `read_yaml` refuses: a copy through JSON holds no object twice."""
    import yaml

    copied = json.loads(json.dumps(value, default=str))
    write_text(path, yaml.safe_dump(copied, sort_keys=False, allow_unicode=True))


def append_line(path: Path, line: str) -> None:
    """To a log, in one write."""
    with Folder(path.parent) as folder, folder.in_place(path.name, append=True) as file:
        file.write(line.encode() + b"\n")


def write_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
) -> None:
    with Folder(path.parent, create=True) as folder:
        write_tensors_in(folder, path.name, tensors, metadata)


def write_tensors_in(
    folder: Folder,
    name: str,
    tensors: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    ready = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}
    with folder.replacing(name) as part:
        try:
            save_file(ready, part, metadata)
        except SafetensorError as error:  # it hides the system's number in its text
            code = re.search(r"os error (\d+)", str(error))
            number = int(code[1]) if code else errno.EIO
            raise OSError(number, os.strerror(number), str(folder.path / name)) from error


def parse_json(content: bytes, most: int = MOST_PARSED) -> Any:
    """ValueError for invalid JSON, or JSON that would take too much memory: a list of empty lists takes 25 times its
    size."""
    values = content.count(b",") + content.count(b":")
    containers = content.count(b"[") + content.count(b"{")
    characters = len(content) * (3 if content.isascii() else 9)
    needed = characters + 100 * values + 300 * containers
    if needed > most:
        raise ValueError(
            f"it would take about {needed >> 20} MiB of memory, over the limit of {most >> 20}"
        )
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(content: bytes) -> Any:
    """ValueError for invalid YAML. Aliases are refused, because a few lines of them can name millions of values."""
    import yaml

    class Bounded(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise ValueError(
                    "it holds an alias (*name), and aliases are not allowed: write the value out"
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = set()
            for part, _ in node.value:
                name = str(part.value)
                if name in names:
                    raise ValueError(f"it holds {name} twice: keep one")
                names.add(name)
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            """Of `1:30`, which YAML 1.1 reads as 90, and `010`, which it reads as 8, the text."""
            is_plain = re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", node.value)
            return super().construct_yaml_int(node) if is_plain else node.value

        def construct_yaml_float(self, node: Any) -> Any:
            return node.value if ":" in node.value else super().construct_yaml_float(node)

    for kind in ("int", "float"):
        Bounded.add_constructor(
            f"tag:yaml.org,2002:{kind}", getattr(Bounded, f"construct_yaml_{kind}")
        )
    if len(content) > MOST_YAML:
        raise ValueError(f"it has {len(content)} bytes, over the limit of {MOST_YAML}")
    try:
        return Bounded(content.decode("utf-8")).get_single_data()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (
        Exception
    ) as error:  # odd tags and keys make the parser raise nearly every type there is
        raise ValueError(" ".join(str(error).split())) from None


def read_json(path: Path) -> Any:
    """ArtifactError for a file that is missing, a link, too large, or not JSON."""
    with Folder(path.parent) as folder:
        return read_in(folder, path.name)


def read_in(folder: Folder, name: str, most: int = MOST_JSON) -> Any:
    """The content of a JSON or .yaml file."""
    is_yaml = name.endswith(".yaml")
    try:
        return (parse_yaml if is_yaml else parse_json)(folder.read(name, most))
    except ArtifactError:
        raise
    except (ValueError, OSError) as error:
        kind = "YAML" if is_yaml else "JSON"
        reason = printable(error, 300)
        raise ArtifactError(f"{folder.path / name}: not readable as {kind}: {reason}") from None


def read_yaml(path: str | Path) -> Any:
    """Content of a file that the user named. OSError or ValueError if it cannot be read."""
    return parse_yaml(read_named(path, MOST_YAML))


def read_named(path: str | Path, most: int) -> bytes:
    """A file that the user named: a link is followed, a pipe is read. Devices and what is too long are refused."""
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOCTTY)
    ) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"over the limit of {most} bytes", str(path))
    return content
