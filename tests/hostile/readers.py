"""What the tests about hostile input share: every reader by name, from the fuzzer's own list."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "bench"))

import fuzz_targets

TARGETS = fuzz_targets.targets()
check = fuzz_targets.check
dumped = fuzz_targets._dumps
