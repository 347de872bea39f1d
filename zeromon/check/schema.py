"""The setting names and types of DeepSpeed, accelerate and transformers, from ``schema.json``.

``tools/read_check_schema.py`` writes that file from the sources of the installed frameworks.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

Schema = dict[str, Any]


@cache
def schema() -> Schema:
    """Returns the names, types and versions, by framework."""
    content: Schema = json.loads(files("zeromon.check").joinpath("schema.json").read_text())
    return content
