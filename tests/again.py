"""Runs pytest with the given words; in CI what failed runs once more, alone, and is named (docs/decisions/0008).

A fault fails twice. What fails once on a busy machine and passes alone is unsteady: it does not stop a release, and it
is not hidden either. Ends with pytest's exit code, of the second run where there was one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = 5  # with failures in more of them something is broken, and running it again would only take time


def failed(cache: Path) -> list[str]:
    """Test ids that pytest's own record calls failed."""
    record = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(record.read_text(encoding="utf-8"))) if record.exists() else []


def main(words: list[str]) -> int:
    """Run, and where CI is set perhaps once more."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", *words, "-o", f"cache_dir={folder}"]
        code = subprocess.run(command, check=False).returncode
        ids = failed(Path(folder))
        if code != 1 or os.environ.get("CI") != "true" or not 0 < len({one.partition("::")[0] for one in ids}) <= FILES:
            return code
        print(f"\nfailed, and runs once more alone: {', '.join(ids)}", flush=True)
        code = subprocess.run(
            [*command, "-n", "0", "--last-failed", "--last-failed-no-failures=none"], check=False
        ).returncode
        still = failed(Path(folder))
        for one in ids:
            print(f"{'FAILED TWICE' if one in still else 'UNSTEADY, failed once'}: {one}", flush=True)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
