"""The preset dictionary with which the bodies of records are compressed: shapes of records, with made-up values.

It is never made from users' records: what is deleted from a store would live on in it. Rows name the dictionary with
which they were written, so a dictionary that was released never changes; a better one gets the next number.
"""

from __future__ import annotations

__all__ = ["DICTIONARY"]


_RARE = [
    '{"attempt":2,"eid":"1","epoch":1,"kind":"effect.intent","name":"a","policy":"once","request":{"messages":{"#":[0\2}',
    '{"epoch":1,"failure":{"blockers":{"#":[2\2,"explanation":{"#":[3\2,"kind":"provider_error","metadata":{}},'
    '"kind":"transition","out":{"call_failed":{"failure":{"blockers":{"#":[0\2,"explanation":{"#":[1\2,"kind":'
    '"transient_provider","metadata":{"#":[2\2}}},\1,"to":"recover","transition":"call_llm.transient_provider",',
    '"out":{"read":{"malformed":{"#":[0\2}},\1,"to":"recover","transition":"post_llm.output_malformed","tried":"001",',
    '"out":{"recovered":{"action":"retry","backoff_s":{"$float":"2.0"},"retry_calls":true}},\1,"to":"dispatch_tool",'
    '"transition":"recover.retry_tool","tried":"000001","ts":17,"us":[2000000,0]}',
    '"action":"handoff"}},\1,"to":"terminal","transition":"recover.stop",',
    '"ending":"Handoff","ending":"PartialRunSummary",',
    '"out":{"judged":{}},\1,"to":"terminal","transition":"post_tool.declared_done","tried":"001","ts":17',
    '"error_class":"ValueError","failure":{"explanation":{"#":[1\2,"kind":"tool_error","retryable":true,"status":"failed"',
    '{"epoch":1,"failure":{"explanation":{"#":[0\2,"kind":"environment_error","metadata":{"#":[1\2},"kind":"transition",'
    '"out":{"judged":{}},\1,"to":"recover","transition":"post_tool.environment_error","tried":"000000000000001","ts":17',
    '{"epoch":1,"kind":"transition","out":{"recovered":{"action":"retry"}},\1,"to":"pre_step",'
    '"transition":"recover.otherwise","tried":"0000001","ts":17',
    '{"epoch":2,"from":"interrupted","from":"approval","kind":"run.resumed",\1,"to":{"hash":"","seq":',
    '{"epoch":2,"kind":"transition","out":{"answered":{"reply":{"arguments":{"#":[0\2,"by":{"#":[0\2,"kind":"allow","text"'
    ':{"#":[0\2}}},\1,"to":"dispatch_tool","transition":"suspended.approval_decided","tried":"0001","ts":17',
    '{"epoch":1,"kind":"transition","out":{"parked":{"waiting":{"arguments":{"#":[0\2,"call_id":"call_1","kind":'
    '"approval","question":{"#":[1\2,"tool":"a","tool_digest":""}}},\1,"to":"suspended",'
    '"transition":"dispatch_tool.approval_required","tried":"001","ts":17',
    '{"epoch":1,"events":1,"expires":null,"id":"","kind":"run.suspended",\1,"ts":17,"waiting":{"arguments":{"#":[0\2,',
    '{"epoch":1,"kind":"transition","out":{"judged":{}},\1,"to":"dispatch_tool","transition":"post_tool.calls_pending",'
    '"tried":"0000001","ts":17',
    '{"epoch":1,"kind":"transition","out":{"read":{"answer":{"is":"text"}}},\1,"to":"terminal",'
    '"transition":"post_llm.otherwise","tried":"000000001","ts":17',
    '{"ending":"RunCompleted","epoch":1,"kind":"run.finished",\1,"ts":17',
]

_STEP = [
    '"message":{"content":{"#":[0\2,"role":"assistant","tool_calls":[{"arguments":{"#":[1\2,"id":"call_1","name":"a"}]},'
    '"usage":{"cached_tokens":1,"input_tokens":1000,"output_tokens":100}}}},\1,',
    '{"epoch":1,"kind":"transition","out":{"replied":{"reply":{"finish_reason":"tool_calls","message":{"role":"assistant",'
    '"tool_calls":[{"arguments":{"#":[0\2,"id":"call_1","name":"a"}]}}}},\1,"to":"post_llm",'
    '"transition":"call_llm.otherwise","tried":"000001","ts":17,"us":[1000,10]}',
    '{"epoch":1,"kind":"transition","out":{"read":{"calls":"reply"}},\1,"to":"dispatch_tool",'
    '"transition":"post_llm.tool_calls","tried":"00000001","ts":17}',
    '{"eid":"1.0","epoch":1,"kind":"effect.intent","name":"a","policy":"once",\1,"ts":17}',
    '{"eid":"1.0","epoch":1,"kind":"effect.result","out":{"call_id":"call_1","content":{"#":[0\2,"name":"a"},\1,"ts":17}',
    '{"epoch":1,"kind":"transition","out":{"ran":{"results":["1.0"]}},\1,"to":"post_tool",'
    '"transition":"dispatch_tool.otherwise","tried":"00001","ts":17,"us":[100,10]}',
    '{"epoch":1,"kind":"transition","out":{"judged":{}},\1,"to":"pre_step","transition":"post_tool.otherwise",'
    '"tried":"00000000000000001","ts":17}',
    '{"epoch":1,"kind":"transition","out":{"checked":{}},\1,"to":"call_llm","transition":"pre_step.otherwise",'
    '"tried":"000000001","ts":17,"us":[0,10]}',
    '{"eid":"1","epoch":1,"kind":"effect.intent","name":"a","policy":"again",\1,"ts":17}',
]

DICTIONARY = "\n".join([*_RARE, *_STEP]).encode()
"""Dictionary 1. What is nearer to its end takes fewer bits, so what is most frequent comes last."""
