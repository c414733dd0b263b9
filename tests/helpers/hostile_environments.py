"""Fifty environments whose secrets are words of the journal's own, and simulated runs in each of them.

A variable whose value is a word of ours (``=transition``, ``assistant``, a tool's name) must change nothing: not what
runs, not what is replayed, and not what ``verify`` says. Each world of ``fault_simulation`` is simulated in an
environment without secrets, and in each hostile one; the histories must be the same.

Run as ``python -m tests.helpers.hostile_environments FIRST COUNT ENVIRONMENT...``; prints counts as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter

from agentfsm.loop.withholding import environment_secrets
from tests.helpers import fault_simulation
from tests.helpers.crash_injection import use_snapshots
from tests.helpers.simulated_stores import do_at_once

LINES = "pre_step.otherwise\ndispatch_tool.otherwise\nrun.suspended, done"
PEM = f"-----BEGIN PRIVATE KEY-----\n{LINES}\n-----END PRIVATE KEY-----"
ACCOUNT = json.dumps(
    {"type": "effect.result", "role": ["assistant", "careful 1"], "n": "once 1 once 1", "kind": 12345678}
)
PLACEHOLDERS = ("[sealed 00000000 AAAA]", "[secret 00000000000000000000000000000000]")

ENVIRONMENTS: tuple[dict[str, str], ...] = (
    # names of ours
    {"X_TOKEN": "=transition"},
    {"X_TOKEN": "transition", "PARTITION_KEY": "assistant", "DB_PASSWORD": "postgres"},
    {"STATE_SECRET": "pre_step.otherwise", "ROW_SECRET": "post_llm.tool_calls"},
    {"API_KEY": "dispatch_tool.in_doubt", "API_KEY_2": "dispatch_tool.otherwise"},
    {"API_KEY": "run.created", "OTHER_KEY": "run.suspended", "THIRD_KEY": "run.finished"},
    {"API_KEY": "effect.intent", "OTHER_KEY": "effect.result"},
    {"TOOL_KEY": "once", "TOOL_TOKEN": "again", "TOOL_PASSWORD": "careful", "TOOL_PW": "beside_once"},
    {"TYPE_SECRET": "agentfsm.loop.recovery_policy.DefaultPolicy"},
    {"PRESET_KEY": "standard", "GRAPH_KEY": "terminal", "STATE_KEY": "suspended", "ROLE_KEY": "tool_calls"},
    {"EVENT_TOKEN": "UserInputRequested", "EVENT_KEY": "RunCompleted", "EVENT_PASSWORD": "Handoff"},
    {"RUN_TOKEN": "run0", "RUN_KEY": "run1-past", "RUN_SECRET": "run2-past", "RUN_PASSWORD": "run0-past"},
    {"CALL_KEY": "call0_0", "CALL_TOKEN": "call1_0", "CALL_SECRET": "call2_0_", "ID_SECRET": "run0:1.0"},
    {"EFFECT_KEY": '"eid":"1.0"', "OTHER_KEY": '"eid":"2.0"'},
    {"CASE_TOKEN": "TRANSITION1", "CASE_KEY": "Transition.Otherwise"},
    # texts of the runs
    {"TEXT_KEY": "careful 1", "TEXT_TOKEN": "careful 9", "TEXT_SECRET": "beside_once 2"},
    {"ERROR_SECRET": "ValueError: not with 1"},
    {"ERROR_SECRET": "not with 1", "REPLY_KEY": "once 1, once 3"},
    {"LONG_PASSWORD": "the calls that were made before this one were all made"},
    {"FLAKY_KEY": "flaky 1: ValueError", "UNKNOWN_KEY": "no tool is named 'nobody'"},
    # JSON of ours
    {"JSON_KEY": '"kind":"transition"'},
    {"JSON_KEY": '{"checked":{}}', "OTHER_KEY": '{"judged":{}}'},
    {"JSON_KEY": '"out":{"checked":{}}', "OTHER_KEY": '"out":{"ran":{"results":["1.0"]}}'},
    {"JSON_KEY": '{"read":{"calls":"reply"}}'},
    {"JSON_KEY": '"policy":"once"', "OTHER_KEY": '"policy":"again"'},
    {"JSON_KEY": '"arguments":{"n":1}', "OTHER_KEY": '{"n":1}', "THIRD_KEY": '{"n":2}', "FOURTH_KEY": '"n": 3'},
    {"JSON_KEY": '"status":"running"', "OTHER_KEY": '"role":"assistant"'},
    {"JSON_KEY": '"#":[0,"', "OTHER_KEY": '{"#":[0,"', "THIRD_KEY": '[["'},
    {"JSON_KEY": '"$str":""', "OTHER_KEY": '{"$str":"[sealed "}', "THIRD_KEY": "$float:1"},
    {"JSON_KEY": '","arguments":{"', "OTHER_KEY": '"content":"', "THIRD_KEY": '","content":"'},
    {"JSON_KEY": '{"n":', "OTHER_KEY": '"},{"', "THIRD_KEY": "}}}}}}}}", "FOURTH_KEY": "[[[[[[[["},
    {"JSON_KEY": '\\u0000\\n\\"', "OTHER_KEY": '\\\\"\\\\"\\\\"'},
    {"JSON_KEY": "nullnull", "OTHER_KEY": "true,false,null", "THIRD_KEY": "[null,null]"},
    # numbers and digests
    {"NUMBER_KEY": "000000001", "OTHER_KEY": "00000001", "THIRD_KEY": "00000000000000001"},
    {"NUMBER_KEY": "1000000000", "OTHER_KEY": "1000000000000", "THIRD_KEY": "1000007200"},
    {"NUMBER_KEY": "12345678", "OTHER_KEY": "0.5", "THIRD_KEY": "1e9", "FOURTH_KEY": "-7200.00"},
    {"DIGEST_KEY": "0" * 64, "OTHER_KEY": "f" * 64, "THIRD_KEY": "e3b0c44298fc1c149afbf4c8996fb924"},
    {"DIGEST_KEY": "00000000", "OTHER_KEY": "deadbeef", "THIRD_KEY": "ffffffff"},
    # placeholders
    {"PLACEHOLDER_KEY": PLACEHOLDERS[0], "OTHER_KEY": PLACEHOLDERS[1]},
    {"PLACEHOLDER_KEY": "[sealed ", "OTHER_KEY": "[secret ", "THIRD_KEY": "sealed 0", "FOURTH_KEY": "[se[se[se"},
    {"PLACEHOLDER_KEY": "(redacted)", "OTHER_KEY": "redaction"},
    # other kinds of variables
    {
        "DATABASE_URL": "postgres://assistant:once%201%20@careful/run0",
        "REDIS_URL": "redis://:transition-1@terminal:1/0",
    },
    {"DATABASE_URL": "postgres://user:pre_step.otherwise@host/db", "API_URL": 'http://a:{"n":1}{"n":2}@host'},
    {"TLS": PEM},
    {"GOOGLE_CREDENTIALS": ACCOUNT},
    {"SESSION_COOKIE": "a=transition; b=careful 1; c=once", "BEARER": "Bearer transition"},
    {"AGENTFSM_SECRET": "of the tests", "HOST_SECRET": "of the tests 1"},
    # everything at once, and everything declared
    {f"KEY_{n}": c * 8 for n, c in enumerate('0123456789abcdefnotr_.-:;,"{}[]()<>#$%&= \\/\n\t')},
    {
        f"KEY_{n}": word
        for n, word in enumerate(("transition", "assistant", "=transition", "careful 1", '"kind":"', "1.0"))
    },
    {f"PIN_{n}": str(n) * 8 for n in range(10)},
    {"KEY": "once 1\nagain 2\nonce 3", "OTHER_KEY": "call_llm\ntransition\nassistant 1\n"},
)
"""Variables by name. A value that is a word counts as no secret; each environment has some that are none, or declares
them."""

DECLARED = {
    2: ("pre_step.otherwise", "post_llm.tool_calls", "otherwise"),
    3: ("dispatch_tool.in_doubt", "in_doubt"),
    4: ("run.created", "run.suspended", "run"),
    5: ("effect.intent", "effect.result", "effect"),
    1: ("transition", "assistant", "postgres"),
    6: ("once", "again", "careful", "beside_once", "flaky"),
    8: ("standard", "terminal", "suspended", "user", "tool", "id"),
    9: ("go", "done", "n", "1", "2", "9"),
    13: ("transition", "run0", "call0_0", "#"),
    39: ("redaction", "hidden", "kind", "seq", "r", "."),
    46: tuple('0123456789abcdefnotr_.-:;,"{}[]()<>#$%&= \\/\n\t'),
}
"""By environment, values that its host declares (``Host(secrets=...)``): they are secret however short they are."""


CHATTER = " ".join(word for variables in ENVIRONMENTS for word in variables.values())
"""A text with every value, which the runs are asked and which their models say."""


def main(first: int, count: int, *numbers: int) -> None:
    """Simulate these seeds without secrets, and then in each of these environments."""
    do_at_once()
    gc.disable()  # each collection would traverse all abandoned tasks
    told, code = Counter[str](), 1
    try:
        use_snapshots(lambda _: told.update(["from snapshots"]))
        fault_simulation.SETTING.chatter = CHATTER
        seeds = range(first, first + count)
        honest = {seed: fault_simulation.simulate(seed)[1] for seed in seeds}
        for number in numbers:
            variables, declared = ENVIRONMENTS[number], DECLARED.get(number, ())
            secrets = environment_secrets(variables)
            assert secrets or declared, f"environment {number} has no secret"
            os.environ.update(variables)
            fault_simulation.SETTING.declared = declared
            for seed in seeds:
                more, history = fault_simulation.simulate(seed)
                assert history == honest[seed], f"seed {seed}: another history with {variables}, declared {declared}"
                told += more
            told["environments"] += 1
            told["secrets"] += len(secrets) + len(declared)
            for name in variables:
                del os.environ[name]
        sys.stdout.write(json.dumps(told))
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without cleaning up the abandoned tasks


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
