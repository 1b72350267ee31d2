"""What can go wrong outside a trial, as a tree.

SweepError
├── ConfigError        a file, a key or an argument is wrong            exit 2
├── MachineError       this machine cannot run any trial                exit 4
├── NoAnswerError      an endpoint that was to be measured is silent    exit 3
├── LockedError        another process works on the study               exit 5
└── StoppedError       the failure budget or an unclean GPU             exit 6

What goes wrong inside a trial is not an exception but a value: model.Failure.
"""

from __future__ import annotations


class SweepError(Exception):
    """Base of every error with a message for people; `exit_code` is the program's."""

    exit_code = 1


class ConfigError(SweepError):
    """Bad input. The message names the file, the line, the key and the fix."""

    exit_code = 2


class MachineError(SweepError):
    """What every trial would suffer: no vLLM, no model, a gated repository, a full disk."""

    exit_code = 4


class NoAnswerError(SweepError):
    """An endpoint that was to be measured does not answer, so nothing succeeded."""

    exit_code = 3


class LockedError(SweepError):
    """The study is being worked on by another process."""

    exit_code = 5


class StoppedError(SweepError):
    """The sweep stopped itself: too many failures in a row, or memory that does not come back."""

    exit_code = 6
