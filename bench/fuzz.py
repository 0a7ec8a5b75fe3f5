"""Coverage-guided fuzzing of every reader: `python bench/fuzz.py [--seconds 60] [--target nccl_log ...]`.

Surface: atheris (libFuzzer for Python). Targets take turns, one child process at a time, each with what it has found so
far in .cache/fuzz/<target>. `--runs N` is that many inputs from the seeds alone, the same ones in each run, with all
targets in one process, which is what a test needs. An input that takes 10 s of CPU, 1 GiB of memory or an exception
that is not the reader's own ends the run with 1 and lies in .cache/fuzz/crashes; `--replay FILE` shows it.
docs/measurements/fuzz.md holds what the long run found.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CACHE = ROOT / ".cache" / "fuzz"
SLOW_SECONDS = 10  # of CPU; on the clock twelve times as much, as the machine may have more to do
MEMORY_MIB = 1024
LENGTH_BYTES = 16384
TURN_SECONDS = 60
# libFuzzer without what makes two runs differ: its dice, what the interpreter compares meanwhile, the order of files
SAME = ("-seed=1", "-use_cmp=0", "-use_memmem=0", "-entropic=0", "-shuffle=0", "-reload=0")
SEEDS = "seeds"  # the list of them, in their order
PACKAGES = ("probes", "topology", "collectives", "planner", "finetune", "agent", "yaml")


def main() -> int:
    """Run, replay, or be the child."""
    options = _options()
    if options.child:
        return _child(options.child, options.rest)
    if options.replay:
        return _replay(options.target, options.replay)
    # The targets' names alone: readers must not be imported before they are instrumented.
    names = options.target or list(_names())
    turns = [",".join(names)] if options.runs else names
    inputs, findings = 0, list[str]()
    clock = _cpu_seconds if options.cpu else time.monotonic
    until = clock() + options.seconds
    while (left := until - clock()) > 0:
        for turn in turns:
            ran, found = _turn(turn, min(TURN_SECONDS, max(1.0, left / len(turns))), options.runs)
            inputs += ran
            findings += found
            print(f"{inputs} inputs, {_cpu_seconds():.0f} s of CPU, {len(findings)} findings {findings}", flush=True)
            if options.runs or (found and not options.go_on):
                return int(bool(found))
    return 1 if findings else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cpu", action="store_true", help="count seconds of CPU time, not of the clock")
    parser.add_argument("--target", action="append", choices=_names(), help="only these")
    parser.add_argument("--runs", type=int, default=0, help="so many inputs, the same in each run, all together")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first finding")
    parser.add_argument("--replay", type=Path, help="run one input through --target")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def _names() -> tuple[str, ...]:
    text = (Path(__file__).with_name("fuzz_targets.py")).read_text(encoding="utf-8")
    return tuple(re.findall(r"^def (\w+)\(data: bytes\) -> object:", text, re.MULTILINE))


def _cpu_seconds() -> float:
    """Of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _turn(turn: str, seconds: float, runs: int) -> tuple[int, list[str]]:
    """One child; how many inputs it ran, and what it found."""
    name = "together" if "," in turn else turn
    crashes = CACHE / "crashes"
    crashes.mkdir(parents=True, exist_ok=True)
    before = set(crashes.iterdir())
    with tempfile.TemporaryDirectory() as anew:
        folder, environment = Path(anew) if runs else CACHE / name, dict(os.environ)
        folder.mkdir(parents=True, exist_ok=True)
        if runs:
            length = [f"-runs={runs}", *SAME, f"-seed_inputs=@{folder}/{SEEDS}"]
            environment["PYTHONHASHSEED"] = "0"
        else:
            length = [f"-max_total_time={max(1, round(seconds))}"]
        words = [
            sys.executable, __file__, "--child", turn, "--", str(folder), *length,
            f"-timeout={12 * SLOW_SECONDS}", "-report_slow_units=120",
            f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={LENGTH_BYTES}", "-print_final_stats=1",
            f"-artifact_prefix={crashes}/{name}-", "-verbosity=1",
        ]  # fmt: skip
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, errors="replace", env=environment)
    ran = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    new = sorted(path.name for path in set(crashes.iterdir()) - before)
    if done.returncode != 0:
        output = done.stdout[-6000:] + done.stderr[-6000:]
        (CACHE / f"{name}.log").write_text(output, encoding="utf-8")
        print(output, file=sys.stderr)
        new = new or [f"{name}: exit {done.returncode}, no input kept"]
    return int(ran[1]) if ran else 0, new if done.returncode else []


def _child(turn: str, rest: Sequence[str]) -> int:
    import atheris

    with atheris.instrument_imports(include=list(PACKAGES)):
        import fuzz_targets

        found = fuzz_targets.targets()
        chosen = [found[name] for name in turn.split(",")]
        for target in chosen:  # what a reader imports late is instrumented too
            for seed in target.seeds:
                fuzz_targets.check(target, seed)
    folder, written = Path(rest[0]), []
    for number, target in enumerate(chosen):
        for at, seed in enumerate(target.seeds):
            written.append(folder / f"seed-{number}-{at}")
            written[-1].write_bytes((bytes([number]) if len(chosen) > 1 else b"") + seed)
    if any(word.startswith("-seed_inputs=@") for word in rest):
        (folder / SEEDS).write_text(",".join(map(str, written)))
        rest = rest[1:]  # else the folder is read too, in whatever order

    def one(data: bytes) -> None:
        began = time.process_time()
        if len(chosen) == 1:
            fuzz_targets.check(chosen[0], data)
        elif data:
            fuzz_targets.check(chosen[data[0] % len(chosen)], data[1:])
        if time.process_time() - began > SLOW_SECONDS:
            raise TimeoutError(f"took {time.process_time() - began:.0f} s of CPU")

    atheris.Setup([sys.argv[0], *rest], one)
    os.environ["PYTHONUNBUFFERED"] = "1"
    atheris.Fuzz()
    return 0


def _replay(names: Sequence[str] | None, path: Path) -> int:
    import fuzz_targets

    if not names or len(names) != 1:
        sys.exit("--replay needs one --target")
    fuzz_targets.check(fuzz_targets.targets()[names[0]], path.read_bytes())
    print("a result, or the reader's own error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
