"""All that is known of the messages with which vLLM, and what is around it, fails: one row for each.

Wordings are those of vLLM 0.4 to 0.33. A row that is added brings a line for it in tests/serve/test_failures.py.
"""

from __future__ import annotations

from sweep.serve.argument_rules import ARGUMENT_RULES
from sweep.serve.ending_rules import CLIENT_RULES, ENDING_RULES
from sweep.serve.machine_rules import MACHINE_RULES
from sweep.serve.memory_rules import MEMORY_RULES
from sweep.serve.model_rules import FEATURE_RULES, MODEL_RULES
from sweep.serve.rule import Rule

# Within a rank the first line of the log decides, and for one line the first rule.
RULES: tuple[Rule, ...] = (
    *MEMORY_RULES,
    *MODEL_RULES,
    *MACHINE_RULES,
    *FEATURE_RULES,
    *ARGUMENT_RULES,
    *CLIENT_RULES,
    *ENDING_RULES,
)
