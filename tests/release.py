"""Whether a release can be made, and what a person types to publish it (`make release`).

python -m tests.release           checks the version, the changelog, the tag and the working tree
python -m tests.release --built   checks what was built, and says what is left to do
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import trireme

ROOT = Path(__file__).parent.parent


def problems(version: str, changelog: str, changed: str, tagged: str, head: str) -> list[str]:
    """Returns what stands in the way of a release.

    Args:
        version: the version of the package.
        changelog: the text of the changelog.
        changed: the files that are not committed.
        tagged: the commit with the version's tag; "" for none.
        head: the present commit.
    """
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        found.append(f"the version is {version}: set __version__ in trireme/version.py")
    if not re.search(rf"^## \[?{re.escape(version)}\b", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section {version}: name the unreleased one after it")
    if changed.strip():
        found.append(f"these files are not committed:\n{changed.rstrip()}")
    if tagged and tagged != head:
        found.append(f"the tag v{version} is of another commit, {tagged[:12]}: take a new version")
    return found


def steps(version: str, built: Sequence[str], *, tagged: bool) -> list[str]:
    """Returns what a person types to publish what was built."""
    files = " ".join(built)
    return [
        *([] if tagged else [f"git tag -a v{version} -m 'Trireme {version}'"]),
        f"git push origin v{version}",
        "python -m pip install twine",
        f"python -m twine check --strict {files}",
        f"python -m twine upload {files}    # asks for a token of pypi.org",
    ]


def main(words: Sequence[str]) -> int:
    """Returns 0 if nothing stands in the way, else 1."""
    version = trireme.__version__
    tagged = _git("rev-list", "-n", "1", f"v{version}")
    if "--built" not in words:
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        changed = _git("status", "--porcelain")
        found = problems(version, changelog, changed, tagged, _git("rev-parse", "HEAD"))
        for problem in found:
            print(f"release: {problem}", file=sys.stderr)
        return 1 if found else 0
    built = sorted(f"dist/{each.name}" for each in (ROOT / "dist").glob(f"*-{version}[-.]*"))
    if len(built) != 2:
        print(f"release: dist/ has no wheel and sdist of {version}: {built}", file=sys.stderr)
        return 1
    print(f"Trireme {version} is checked and built. To publish it, type:\n")
    print("\n".join(f"    {step}" for step in steps(version, built, tagged=bool(tagged))))
    return 0


def _git(*words: str) -> str:
    ended = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
