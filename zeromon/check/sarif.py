"""Problems as SARIF 2.1.0, for GitHub's code scanning and for editors."""

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from zeromon import __version__
from zeromon.check.problem import Problem
from zeromon.diagnosis.pages import pages

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def as_sarif(problems: Iterable[Problem]) -> dict[str, Any]:
    """Returns a SARIF log with one run: *problems* and the rules that they violate."""
    results = list(problems)
    used = sorted({problem.code for problem in results})
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "zeromon",
                        "version": __version__,
                        "rules": [_rule(code) for code in used],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(problem, used.index(problem.code)) for problem in results],
            }
        ],
    }


def _rule(code: str) -> dict[str, Any]:
    page = pages()[code]
    return {
        "id": code,
        "name": page.name,
        "shortDescription": {"text": page.summary},
        "fullDescription": {"text": page.summary},
        "help": {"text": page.text.strip(), "markdown": page.text.strip()},
    }


def _result(problem: Problem, index: int) -> dict[str, Any]:
    return {
        "ruleId": problem.code,
        "ruleIndex": index,
        "level": _LEVELS[problem.severity],
        "message": {"text": f"{problem.message}. Fix: {problem.fix}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(problem.file)},
                    "region": {"startLine": problem.line, "startColumn": problem.column},
                },
                "logicalLocations": [{"fullyQualifiedName": problem.key}] if problem.key else [],
            }
        ],
        "properties": {"key": problem.key, "fix": problem.fix},
    }


def _uri(file: str) -> str:
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
