"""The exception tree of packsvc; each class knows the exit code of its kind.

PacksvcError
├── ConfigError      2  the command line or the job file
├── SourceError      2  an input is missing, damaged, or changed since the plan
├── EncodeError      2  the tokenizer or the chat template cannot give exact ids and masks
├── FormatError      2  not a packsvc output, an unfinished or a foreign one
├── StateError       2  a state, a plan or a resume that belongs to something else
├── CheckError       1  a check failed or a limit was passed
│   ├── LimitError   1  too many rejects, an overlong row under `overlong: error`, nothing packed
│   ├── GroupError   1  a group failed on every try
│   ├── DamageError  1  a file is not what the manifest or its own checksums say
│   └── ConflictError 1 a commit exists with other content: the job is not deterministic
└── WorldError       3  cut short from outside, can be resumed
    ├── StorageError 3  disk full, not writable, storage gone
    └── ClusterError 3  no answer from the cluster, a node lost
"""

from __future__ import annotations


class PacksvcError(Exception):
    """Base of all errors raised on purpose. The message says what is wrong, where, and what to do."""

    exit_code = 1


class ConfigError(PacksvcError):
    """The command line or the job file is not what it must be."""

    exit_code = 2


class SourceError(PacksvcError):
    """An input is missing, unreadable, damaged, or changed since the plan was made."""

    exit_code = 2


class EncodeError(PacksvcError):
    """The tokenizer or the chat template cannot give exact ids and an exact mask."""

    exit_code = 2


class FormatError(PacksvcError):
    """A data set that is not packsvc's, is unfinished, or is of another format version."""

    exit_code = 2


class StateError(PacksvcError):
    """A reader state, plan or resume request that belongs to something else."""

    exit_code = 2


class CheckError(PacksvcError):
    """A check failed or a limit was passed."""


class LimitError(CheckError):
    """A limit of the job was passed."""


class GroupError(CheckError):
    """A group failed on every try; the other groups are committed and the job can be resumed."""


class DamageError(CheckError):
    """A file is not what the manifest, or its own checksums, say it is."""


class ConflictError(CheckError):
    """A commit exists with other content than this run made: the job is not deterministic."""


class WorldError(PacksvcError):
    """The run was cut short from outside and can be resumed."""

    exit_code = 3


class StorageError(WorldError):
    """Disk full, output not writable, or storage that does not answer."""


class ClusterError(WorldError):
    """No answer from the cluster, or a node was lost."""
