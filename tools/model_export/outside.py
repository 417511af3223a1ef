"""What comes from outside and goes there: modules that the user names, and files that are written (docs/security.md)."""

import contextlib
import errno
import importlib
import importlib.util
import os
import pathlib
import site
import stat
import sys
import tempfile


def search_packages():
    """After `python -I`: searches for modules in what PYTHONPATH and the user's site name as absolute folders.

    The current folder is not among them. Standard modules come before all of them, installed packages after PYTHONPATH.
    """
    named = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(folder)]
    installed = [i for i, folder in enumerate(sys.path) if os.path.basename(folder) in ("site-packages", "dist-packages")]
    at = installed[0] if installed else len(sys.path)
    sys.path[at:at] = [folder for folder in named if folder not in sys.path]
    if sys.prefix == sys.base_prefix and not os.environ.get("PYTHONNOUSERSITE"):  # a virtual environment has none
        folder = site.getusersitepackages()
        if os.path.isabs(folder) and os.path.isdir(folder):
            site.addsitedir(folder)


def _is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def named_module(module):
    """The module of that name. The current folder is searched only where none of that name is installed, and after all the others.

    So a folder's module runs because the user named it, and never in the place of another one.
    """
    if not _is_installed(module):
        sys.path.append(os.getcwd())
        importlib.invalidate_caches()
    return importlib.import_module(module)


def followed(file):
    """Where a path leads, by the rules of FollowLinks in core/staged_file.h: no link of another user decides what is overwritten."""
    done, left, links = pathlib.Path(), list(pathlib.Path(file).parts), 0
    while left:
        step = done / left.pop(0)
        if not step.is_symlink():
            done = step
            continue
        if step.is_relative_to("/proc"):  # a pipe or file of this process
            return pathlib.Path(file).resolve()
        owner = step.lstat().st_uid
        if owner not in (os.geteuid(), 0) and (not left or step.parent.stat().st_mode & stat.S_IWOTH):
            raise OSError(errno.EPERM, f"{step} is a link of user {owner}, expected one of yours")
        links += 1
        if links > 40:  # as the system
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = pathlib.Path(os.readlink(step))
        left[:0] = target.parts
        done = pathlib.Path() if target.is_absolute() else done
    return done


@contextlib.contextmanager
def replacing(file, *, follows=True):
    """A path whose file takes the place of `file` at the end of the block, and is removed where the block raises.

    It lies beside its place in a new folder with a random name, which nobody else may write. Pipes and devices are written in place.
    follows=False is for names that the program chooses: a link there is replaced, not followed.
    """
    path = followed(file) if follows else pathlib.Path(file)
    if follows and os.path.exists(file) and not os.path.isfile(file):
        status = os.stat(file)
        if status.st_uid not in (os.geteuid(), 0) and path.parent.stat().st_mode & stat.S_IWOTH:
            raise OSError(errno.EPERM, f"{path} is a pipe or device of user {status.st_uid}, expected one of yours")
        yield pathlib.Path(file)
        return
    with tempfile.TemporaryDirectory(prefix=path.name[:200] + ".tmp.", dir=path.parent) as folder:
        finished = pathlib.Path(folder) / path.name
        yield finished
        with open(finished, "rb") as written:
            os.fsync(written.fileno())
        os.replace(finished, path)


@contextlib.contextmanager
def filling(folder):
    """A new folder, whose files go into `folder` at the end of the block, in the place of those of their names; no link is followed."""
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished.", dir=target) as unfinished:
        yield pathlib.Path(unfinished)
        for name in sorted(os.listdir(unfinished), reverse=True):  # .metadata, which says what there is, is the last one
            os.replace(pathlib.Path(unfinished) / name, target / name)


def write(file, content, *, follows=True):
    """Writes a text or bytes as the whole of a file, or leaves the file as it is."""
    with replacing(file, follows=follows) as path, open(path, "wb") as out:
        out.write(content.encode() if isinstance(content, str) else content)
