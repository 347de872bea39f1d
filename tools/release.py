"""Builds what a release consists of, in dist/: ``make release KEY=you@example.org``.

    python tools/release.py [--sign KEY] [--pythons 3.10 3.11 ...]

A source distribution, a wheel for every Python and machine, and compiled ones (``compiled.py``) for each
Python on Linux of x86-64 and aarch64; pip takes a compiled one where it fits. SHA256SUMS has the hash of
each file, SHA256SUMS.asc its signature by the GPG key KEY. Nothing is uploaded. Exit code 2: an
interpreter or the key is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")


def build(folder: Path, pythons: list[str]) -> None:
    """Writes source distribution and wheels into *folder*; the plain wheel is made from the former."""
    _uv("build", "--out-dir", folder, ROOT, ZEROMON_COMPILE="0")
    for python in pythons:
        for machine in MACHINES:
            _uv(
                "build",
                "--wheel",
                "--python",
                python,
                "--out-dir",
                folder,
                ROOT,
                ZEROMON_COMPILE=machine,
            )
    (folder / ".gitignore").unlink(missing_ok=True)


def write_sums(folder: Path) -> Path:
    """Writes SHA256SUMS of the files in *folder*, for ``sha256sum --check``; returns its path."""
    sums = folder / "SHA256SUMS"
    files = [path for path in sorted(folder.iterdir()) if not path.name.startswith(sums.name)]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    sums.write_text("".join(lines))
    return sums


def sign(sums: Path, key: str) -> None:
    """Writes the signature of *sums* by the GPG key *key* beside it."""
    command = ["gpg", "--batch", "--yes", "--local-user", key, "--armor", "--detach-sign", str(sums)]
    subprocess.run(command, check=True)


def _uv(*words: str | Path, **environment: str) -> None:
    print("uv", *words, *environment.values(), file=sys.stderr)
    subprocess.run(["uv", *words, "--quiet"], check=True, env=os.environ | environment)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="X.Y")
    parser.add_argument("--sign", default="", metavar="KEY")
    options = parser.parse_args()
    secret = ["gpg", "--list-secret-keys", options.sign]
    if options.sign and subprocess.run(secret, capture_output=True, check=False).returncode:
        print(f"gpg has no secret key {options.sign}", file=sys.stderr)
        return 2
    find = [["uv", "python", "find", version] for version in options.pythons]
    done = [subprocess.run(words, capture_output=True, check=False).returncode for words in find]
    missing = [words[-1] for words, code in zip(find, done, strict=True) if code]
    if missing:
        remedy = (
            f"uv python install {' '.join(missing)}, or PYTHONS='X.Y ...' with those that are in PATH"
        )
        print(f"no Python {', '.join(missing)} here: {remedy}", file=sys.stderr)
        return 2
    build(options.out, options.pythons)
    sums = write_sums(options.out)
    if options.sign:
        sign(sums, options.sign)
    else:
        print(f"{sums} is not signed: make release KEY=you@example.org", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
