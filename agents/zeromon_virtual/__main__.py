"""``python -m zeromon_virtual < spec.json``: prints the result as JSON."""

import json
import sys


def main() -> int:
    """Reads a specification from stdin and writes the result to stdout."""
    from zeromon_virtual.spec import SpecError, from_json

    try:
        spec = from_json(json.load(sys.stdin))
        from zeromon_virtual.step import run

        result = run(spec)
    except (SpecError, json.JSONDecodeError, ImportError) as error:
        sys.stderr.write(f"zeromon_virtual: {error}\n")
        return 2
    json.dump(result.as_json(), sys.stdout)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
