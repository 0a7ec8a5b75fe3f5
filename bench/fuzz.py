"""Coverage-guided fuzzing of every reader: `python bench/fuzz.py [--seconds 60] [--target nccl_log ...]`.

Uses atheris (libFuzzer for Python). The targets run one after another, each in a child process of its own, whose corpus
is in .cache/fuzz/<target>. `--runs N` runs N inputs that are derived from the seeds only and are the same each time,
with all targets in one process; the tests use it. An input that takes more than 10 s of CPU or 1 GiB of memory, or that
raises an unexpected exception, is written to .cache/fuzz/crashes, and the exit code is 1. `--target T --replay FILE`
runs such an input again. docs/measurements/fuzz.md has the results of the long run.
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
SLOW_SECONDS = 10  # of CPU time; the limit of wall-clock time is twelve times as long, for a busy machine
MEMORY_MIB = 1024
LENGTH_BYTES = 16384
TURN_SECONDS = 60
# Options that make runs of libFuzzer repeatable: a fixed seed, no traced comparisons, a fixed order of files.
SAME = ("-seed=1", "-use_cmp=0", "-use_memmem=0", "-entropic=0", "-shuffle=0", "-reload=0")
SEEDS = "seeds"  # file with the names of the seeds, in order
PACKAGES = ("probes", "topology", "collectives", "planner", "finetune", "agent", "yaml")


def main() -> int:
    """Run the fuzzer, replay one input, or run as the child process."""
    options = _options()
    if options.child:
        return _child(options.child, options.rest)
    if options.replay:
        return _replay(options.target, options.replay)
    # Only the names of the targets: the readers must be instrumented when they are imported.
    names = options.target or list(_names())
    turns = [",".join(names)] if options.runs else names
    inputs, findings = 0, list[str]()
    clock = _cpu_seconds if options.cpu else time.monotonic
    until = clock() + options.seconds
    while (left := until - clock()) > 0:
        for turn in turns:
            ran, crashes = _turn(turn, min(TURN_SECONDS, max(1.0, left / len(turns))), options.runs)
            inputs += ran
            findings += crashes
            print(f"{inputs} inputs, {_cpu_seconds():.0f} s of CPU, {len(findings)} findings {findings}", flush=True)
            if options.runs or (crashes and not options.go_on):
                return int(bool(crashes))
    return 1 if findings else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cpu", action="store_true", help="count seconds of CPU time instead of wall-clock time")
    parser.add_argument("--target", action="append", choices=_names(), help="run this target only; can be repeated")
    parser.add_argument("--runs", type=int, default=0, help="number of inputs, the same in each run, for all targets")
    parser.add_argument("--go-on", action="store_true", help="continue after the first finding")
    parser.add_argument("--replay", type=Path, help="run one input through --target")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def _names() -> tuple[str, ...]:
    text = (Path(__file__).with_name("fuzz_targets.py")).read_text(encoding="utf-8")
    return tuple(re.findall(r"^def (\w+)\(data: bytes\) -> object:", text, re.MULTILINE))


def _cpu_seconds() -> float:
    """Return the CPU time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _turn(turn: str, seconds: float, runs: int) -> tuple[int, list[str]]:
    """Run one child process. Return the number of its inputs, and its findings."""
    name = "together" if "," in turn else turn
    crashes = CACHE / "crashes"
    crashes.mkdir(parents=True, exist_ok=True)
    before = set(crashes.iterdir())
    with tempfile.TemporaryDirectory() as empty:
        folder, environment = Path(empty) if runs else CACHE / name, dict(os.environ)
        folder.mkdir(parents=True, exist_ok=True)
        if runs:
            length = [f"-runs={runs}", *SAME, f"-seed_inputs=@{folder}/{SEEDS}"]
            environment["PYTHONHASHSEED"] = "0"
        else:
            length = [f"-max_total_time={max(1, round(seconds))}"]
        command = [
            sys.executable, __file__, "--child", turn, "--", str(folder), *length,
            f"-timeout={12 * SLOW_SECONDS}", "-report_slow_units=120",
            f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={LENGTH_BYTES}", "-print_final_stats=1",
            f"-artifact_prefix={crashes}/{name}-", "-verbosity=1",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", env=environment)
    ran = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    new = sorted(path.name for path in set(crashes.iterdir()) - before)
    if done.returncode != 0:
        output = done.stdout[-6000:] + done.stderr[-6000:]
        (CACHE / f"{name}.log").write_text(output, encoding="utf-8")
        print(output, file=sys.stderr)
        new = new or [f"{name}: exit code {done.returncode}, no input was saved"]
    return int(ran[1]) if ran else 0, new if done.returncode else []


def _child(turn: str, options: Sequence[str]) -> int:
    import atheris

    with atheris.instrument_imports(include=list(PACKAGES)):
        import fuzz_targets

        targets = fuzz_targets.targets()
        selected = [targets[name] for name in turn.split(",")]
        for target in selected:  # run the seeds first, so that modules that a reader imports late are instrumented too
            for seed in target.seeds:
                fuzz_targets.check(target, seed)
    folder, written = Path(options[0]), []
    for number, target in enumerate(selected):
        for index, seed in enumerate(target.seeds):
            written.append(folder / f"seed-{number}-{index}")
            written[-1].write_bytes((bytes([number]) if len(selected) > 1 else b"") + seed)
    if any(word.startswith("-seed_inputs=@") for word in options):
        (folder / SEEDS).write_text(",".join(map(str, written)))
        options = options[1:]  # without the folder, whose files libFuzzer would also read, in an order that varies

    def one(data: bytes) -> None:
        began = time.process_time()
        if len(selected) == 1:
            fuzz_targets.check(selected[0], data)
        elif data:
            fuzz_targets.check(selected[data[0] % len(selected)], data[1:])
        if time.process_time() - began > SLOW_SECONDS:
            raise TimeoutError(f"the input took {time.process_time() - began:.0f} s of CPU time")

    atheris.Setup([sys.argv[0], *options], one)
    os.environ["PYTHONUNBUFFERED"] = "1"
    atheris.Fuzz()
    return 0


def _replay(names: Sequence[str] | None, path: Path) -> int:
    import fuzz_targets

    if not names or len(names) != 1:
        sys.exit("--replay requires exactly one --target")
    fuzz_targets.check(fuzz_targets.targets()[names[0]], path.read_bytes())
    print("The reader returned a result, or raised one of its own errors.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
