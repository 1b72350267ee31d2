"""Questions to a driver that may hang for ever: asked aside, and given up after a while."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
Args = TypeVar("Args")

_PATIENCE_S = 10.0


@dataclass(slots=True)
class Bounded(Generic[Args, T]):
    """Calls `ask` in a thread of its own; None when no answer comes in time, and from then on.

    The thread is a daemon: one that hangs in the kernel must not hold up the end of the program.
    """

    ask: Callable[[Args], T | None]
    patience_s: float = _PATIENCE_S
    hung: bool = field(default=False, init=False)

    def __call__(self, about: Args) -> T | None:
        if self.hung:
            return None
        answers: queue.SimpleQueue[T | BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._answer, args=(about, answers), daemon=True).start()
        try:
            answer = answers.get(timeout=self.patience_s)
        except queue.Empty:
            self.hung = True
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _answer(self, about: Args, answers: queue.SimpleQueue[T | BaseException | None]) -> None:
        try:
            answers.put(self.ask(about))
        except Exception as error:  # noqa: BLE001 - raised again by whoever asked
            answers.put(error)
