"""DeepSpeed: engines, their steps, the sub-modules and buckets that communicate, precision, offload.

All hooks are on classes, so an engine built before the agent is hooked like one built after. The agent
never imports DeepSpeed. Private names of DeepSpeed stand in the hooks' modules and in
``observe.zero_roles``; each has a canary test, and what a version lacks is reported as unknown.

Under ZeRO-3 a hook must not read a parameter through its module's attribute, because that would gather
it; the hooks use ``named_parameters`` and the ``ds_*`` attributes only.
"""
