"""Errors of the queue, one tree.

QueueError
├── QueueUnavailable      the server cannot be reached, does not answer in time, or cannot do it now
├── QueueFull             no room came free in time (`when_full="wait"`), or the server's memory is full
├── JobTooLarge           a body over `QueueConfig.max_body_bytes`
└── ServerError           a server that cannot be used
    ├── ServerRefuses     its operator has to change something: a password, a permission, its disk
    ├── ServerTooOld      its version lacks what the queue needs
    └── ServerStartFailed the embedded server did not come up
"""


class QueueError(Exception):
    """Base of every error that this package raises on purpose."""


class QueueUnavailable(QueueError):
    """The server cannot be reached, did not answer in time, or is busy; the same call may be made again."""


class QueueFull(QueueError):
    """There is no room for the job, and the configuration forbids dropping another one."""


class JobTooLarge(QueueError):
    """The job's body is larger than `QueueConfig.max_body_bytes`; it was not queued."""


class ServerError(QueueError):
    """The server cannot be used at all; trying again does not help."""


class ServerRefuses(ServerError):
    """The server answers and refuses, until its operator changes something; the same call helps then."""


class ServerTooOld(ServerError):
    """The server's version lacks a command that the queue needs."""


class ServerStartFailed(ServerError):
    """The embedded server did not come up; the message holds the end of its log."""
