"""What goes wrong, as the program's exit codes tell it apart (docs/errors.md)."""


class Error(Exception):
    """Any failure of Shardwright; its text is the program's."""


class UsageError(Error, ValueError):
    """Arguments that no file could make right (exit code 2)."""


class InputError(Error, ValueError):
    """What the arguments name is missing, wrong or does not fit together (exit code 3)."""


class MachineError(Error, OSError):
    """This machine lacks or refuses something (exit code 4)."""


class RunError(Error, RuntimeError):
    """A plan failed while it ran (exit code 5)."""


class InternalError(Error, RuntimeError):
    """A fault of Shardwright (exit code 70): please report it."""
