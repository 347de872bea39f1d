"""A recorded run in the forms of other tools: tables, traces, boards."""
