"""Errors a user can mend. The command line prints them as one line and exits with 2; any other exception is a fault."""


class UsfanError(ValueError):
    """Something the caller gave is wrong; the message says what, and what to do."""


class DataError(UsfanError):
    """A data set cannot be used as it is."""


class ConfigError(UsfanError):
    """A setting, or a combination of settings, is not allowed."""


class ArtifactError(UsfanError):
    """A model folder is not what it should be; the message names the file and the field."""
