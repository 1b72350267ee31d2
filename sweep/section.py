"""The strict base of every section of a search space: unknown keys are errors, values are frozen."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping of the YAML file. Unknown keys are refused, since a misspelt setting that is ignored costs a night."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word.replace("_", "-"), [k.replace("_", "-") for k in known], n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
