"""Every error a user can meet. Messages say where, what was found, what was expected and what to do."""


class InterlaceError(Exception):
    """Base of all errors that a user can correct; the command line prints them and exits with 2."""


class ConfigError(InterlaceError):
    """A configuration file, flag or option is unknown, of the wrong type, or contradicts another."""


class ProgramError(InterlaceError):
    """A program or a dump breaks a rule of the IR, or holds something that cannot be captured or lowered."""


class PlanError(InterlaceError):
    """A plan cannot be made, proved or lowered as asked."""


class BudgetError(PlanError):
    """No plan keeps to the memory budget; `least_bytes` is the least feasible one, 0 where it is not known."""

    def __init__(self, message: str, least_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class LoadError(PlanError):
    """A plan that was made before is not one for this run."""


class PassError(InterlaceError):
    """A pass lacks what it needs, or gave something that does not verify."""


class OutputError(InterlaceError):
    """A file cannot be written: the disk is full, a limit is reached, the folder is gone."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: cannot be written ({reason}); expected a place with room that may be written")
        self.path, self.reason = path, reason


class LaunchError(InterlaceError):
    """A local training run could not be started, or one of its ranks failed; `modes` are those (`train`, `eval`) that it had come to."""

    def __init__(self, message: str, modes: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.modes = modes


class ScriptError(InterlaceError):
    """A user's script cannot run as asked: its own options, its configuration of Interlace, or its text."""


class TransportError(InterlaceError):
    """Ranks of a local run disagree about a collective, or one did not arrive in time."""
