"""One preflight, from scan to comparison, and its report. A stage that could not run becomes a note.

`report.json` is the complete document, `report.html` one self-contained page, `junit.xml` a file for CI systems.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from agent.advice.advise import advise, with_fsdp
from agent.advice.job_plan import build_job_plan, build_job_request, estimate_grace, read_settings
from agent.advice.request import Request
from agent.base import EXIT_PASS, result_store, units, version
from agent.base.options import InputError, read_snapshots
from agent.base.output import Progress, render_template, to_document, write_atomic
from agent.checks import baseline, measured
from agent.checks.findings import sort_worst_first
from agent.checks.host_checks import ALL_CODES, BENCH_CODES, RUN_CODES, make_unmeasured
from agent.checks.verdict import FailOn, GateError, Verdict, describe_unchecked_gpus, judge, select
from agent.checks.view import View, build_view, with_environment
from agent.jobs import benchmark, launch
from agent.jobs.launch import VerbOptions
from collectives.bench.results import BenchResult
from contracts.finding import Finding
from contracts.host_list import compress_host_list, expand_host_list, name_in_slurm
from contracts.plain import printable
from contracts.run_record import Comparison, RunRecord, compare
from planner.advice import Recommendation
from planner.forecast.calibration import Calibration
from probes.api import Snapshot, read_host_name
from probes.gpu.health import fail_full_gpus
from probes.registry import ALL
from topology.graph import NodeTopology
from topology.paths import RequiredLinks

if TYPE_CHECKING:
    from agent.checks.expect import NodeExpectation
    from agent.cluster.nodes import NodeRecord

REASON_CHARACTERS = 400  # shown on one line by `sinfo -R` and logs
REPORTS = Path("reports")  # folder of the report and of runs, unless --report names one
PROBE_SECONDS = 30.0  # for each probe; a faulty node is slow


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions(VerbOptions):
    """What preflight checks, measures and trains, and which results fail."""

    train: bool
    quick: bool
    bench_seconds: float | None
    force: bool
    skip: tuple[str, ...]
    fail_on: FailOn
    baseline: Path | None
    expect: tuple[str, ...]
    expect_file: Path | None
    nodes: str | None  # names of a cluster's nodes, as a host list
    selector: str | None
    context: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of one run, and notes on what it could not do."""

    started_at_seconds: float = 0.0
    seconds: float = 0.0
    topoflight_version: str = version()
    snapshots: tuple[Snapshot, ...] = ()
    topologies: tuple[NodeTopology, ...] = ()
    checks: tuple[Finding, ...]
    verdict: Verdict
    bench: BenchResult | None = None
    recommendation: Recommendation | None = None
    run: RunRecord | None = None
    notes: tuple[str, ...] = ()  # stages that did not run, and why
    nodes: tuple[NodeRecord, ...] = ()  # checked from records published by their agents, without graphs
    schema_version: int = baseline.REPORT_VERSION

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Compare step time and memory of the run with its forecast; empty without a run."""
        return compare(self.run) if self.run else ()

    @property
    def subject(self) -> str:
        """Describe the hosts or nodes of the report."""
        return units.some([s.hostname for s in self.snapshots] or [node.name for node in self.nodes])


def run(options: PreflightOptions, progress: Progress) -> Report:
    """Scan, measure, recommend, train, compare and judge. SIGTERM after the scan ends it with the results so far."""
    started, clock = time.time(), time.monotonic()
    # first, so that a wrong word or file is rejected before the run
    expected = require_expectations(options.expect, options.expect_file)
    needs = ("statuses", "busbw") if options.measure or options.train else ("statuses",)
    before = baseline.read_baseline(options.baseline, needs)
    request = replace(options.request, nodes=1) if options.train else options.request  # a job runs on this host
    read_settings(request)
    progress.step("scan: asking this host" if not request.hosts else "scan: replaying recordings")
    seconds = min(PROBE_SECONDS, options.timeout)
    snapshots = read_snapshots(request.hosts, ALL, root=request.root, timeout_seconds=seconds)
    with benchmark.stop_on_signals(signal.SIGTERM) as (stop, _):
        report = _Stages(options, request, progress, snapshots, before, expected, stop).report()
    return replace(report, started_at_seconds=started, seconds=time.monotonic() - clock)


@dataclass(slots=True)
class _Stages:
    """Everything after the scan. Load ends soon after `stop` is set, and no later stage generates load."""

    options: PreflightOptions
    request: Request
    progress: Progress
    snapshots: tuple[Snapshot, ...]
    before: baseline.Baseline
    expected: Sequence[NodeExpectation]
    stop: threading.Event
    notes: list[str] = field(default_factory=list)

    def report(self) -> Report:
        """Run all stages."""
        options, snapshots = self.options, self.snapshots
        request = build_job_request(self.request) if options.train else self.request
        result = self._measure()
        calibration = self._calibrate(request) if result and options.train and not result.stopped_by else None
        if result is not None:
            result = baseline.add_baseline_bars(result, self.before.busbw)
        view = measured.with_bench(build_view(snapshots, expected=self.expected), result)
        view = replace(view, checks=fail_full_gpus(view.checks, snapshots))
        reason = self.notes[-1] if self.notes else "not requested; add --measure"
        unmeasured = make_unmeasured(BENCH_CODES, reason) if result is None else ()
        self.progress.step("recommend: environment and layout")
        verified = tuple(m for m in result.measurements if m.verified) if result else ()
        advice = with_fsdp(advise(request, snapshots, measurements=verified, calibration=calibration))
        record, of_run = self._run(view, advice, result)
        stopped = "" if record is not None else self._get_stop_signal(result)
        if stopped:
            self.notes.append(f"stopped by {stopped}: what was not measured by then is unknown")
        scanned = view.checks if stopped else measured.require_measured(view.checks)
        findings = [*scanned, *unmeasured, *of_run, *baseline.find_missing_devices(self.before, snapshots)]
        checks = self._compare(select(findings, require=options.require, skip=options.skip), stopped)
        return Report(
            snapshots=snapshots, topologies=view.topologies, checks=checks, bench=result, recommendation=advice,
            verdict=judge(checks, fail_on=options.fail_on, stopped=stopped), run=record, notes=tuple(self.notes),
        )  # fmt: skip

    def _get_stop_signal(self, result: BenchResult | None) -> str:
        """Return the signal that ended the run; empty if none did."""
        return (result.stopped_by if result else None) or ("SIGTERM" if self.stop.is_set() else "")

    def _compare(self, checks: Iterable[Finding], stopped: str) -> tuple[Finding, ...]:
        """Compare the checks with the baseline; checks that a stopped run did not measure are not regressions."""
        cut = {*BENCH_CODES, *RUN_CODES} if stopped else set()
        not_measured = tuple(check for check in checks if check.code in cut and check.status == "unknown")
        checks = [check for check in checks if check not in not_measured]
        return (*baseline.compare_with_baseline(checks, self.before.statuses), *not_measured)

    def _find_blocking_failures(self, view: View, advice: Recommendation) -> str:
        """Return the failure that prevents training; empty if it may start. Unknown checks do not prevent it.

        The checks are those of the host with the settings of the run, because a problem that they correct is none.
        """
        settings = {setting.name: setting.value for setting in advice.settings}
        hosts = [with_environment(snapshot, settings) for snapshot in view.snapshots]
        scanned = measured.with_bench(build_view(hosts, expected=self.expected), view.bench)
        findings = fail_full_gpus(scanned.checks, view.snapshots)
        return name_blocking_failures(findings, self.before, skip=self.options.skip, force=self.options.force)

    def _measure(self) -> BenchResult | None:
        """Measure collectives with real ranks."""
        options = self.options
        if not (options.measure or options.train):
            return None
        if self.request.hosts:
            self.notes.append("not measured: recorded hosts cannot be measured")
            return None
        spec = benchmark.build_preflight_spec(
            self.snapshots, self._ranks(), options.bench_seconds, force=options.force, quick=options.quick,
            required=make_required_links(self.expected),
        )  # fmt: skip
        try:
            return benchmark.measure(spec, self.progress, self.stop)
        except benchmark.BenchmarkError as error:
            self.notes.append(f"not measured: {error}")
            return None

    def _ranks(self) -> int:
        return self.request.ranks_per_node or benchmark.count_default_ranks(self.snapshots)

    def _calibrate(self, request: Request) -> Calibration | None:
        """Measure GEMMs and a layer of the model for the forecast of the run."""
        self.progress.step(f"measure: GEMMs and a layer of {request.model}")
        try:
            gpu = bool(benchmark.list_gpus(self.snapshots))
            return benchmark.calibrate_host(request, self._ranks(), gpu=gpu, stop=self.stop)
        except (benchmark.BenchmarkError, ValueError) as error:
            self.notes.append(f"not calibrated: {error}")
            return None

    def _run(
        self, view: View, advice: Recommendation, result: BenchResult | None
    ) -> tuple[RunRecord | None, Sequence[Finding]]:
        """Train, unless something prevents it; return the record, and the checks of the run."""
        stopped = self._get_stop_signal(result)
        if not self.options.train or (self.request.hosts and not stopped):
            return None, make_unmeasured(RUN_CODES, "not requested; add --train")
        if stopped:
            return None, make_unmeasured(RUN_CODES, f"not trained: stopped by {stopped} before that")
        if failed := self._find_blocking_failures(view, advice):
            self.notes.append(f"not trained: {failed}")
            return None, make_unmeasured(RUN_CODES, f"not trained: {failed}; --force trains anyway")
        record, reason = self._train(advice)
        if self.stop.is_set() and record is None:  # the end of the job then shows nothing about the machine
            return None, make_unmeasured(RUN_CODES, reason)
        return record, measured.check_run(record, self.snapshots[0].hostname, reason)

    def _train(self, advice: Recommendation) -> tuple[RunRecord | None, str]:
        """Launch the job with exactly the recommended environment and layout."""
        self.progress.step(f"launch: fine-tune with {advice.chosen.layout.family}" if advice.chosen else "launch")
        # A new folder for every run: otherwise the job would resume, and a finished run has no steps left
        output = (self.options.folder or REPORTS) / "runs" / time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        try:
            plan = build_job_plan(advice, self.request.with_settings(f"output_dir={output}"))
            done = launch.train(
                plan, output, timeout_seconds=self.options.timeout, grace_seconds=estimate_grace(advice, None),
                on_line=self.progress.note, stop=self.stop,
            )  # fmt: skip
        except (InputError, OSError) as error:
            return None, str(error)
        if done.record is not None:
            result_store.store_run(done.record)
            wrote_its_end = done.record.reason != done.ending  # otherwise `launch.train` has added the end
            if done.exit_code == 0 or (wrote_its_end and not done.cut_short):
                return done.record, ""
        return None, f"{done.ending}: {' | '.join(done.last_lines[-3:])} (whole log: {done.output})"


def name_blocking_failures(
    findings: Sequence[Finding], before: baseline.Baseline, *, skip: Sequence[str], force: bool
) -> str:
    """Return the failures that prevent a training run; empty without one, or with --force."""
    checks = select(measured.require_measured(findings), skip=skip, codes=ALL_CODES)
    checks = baseline.compare_with_baseline(checks, before.statuses)
    failed = sorted({check.code for check in checks if check.status == "fail"})
    return "" if force or not failed else f"{', '.join(failed)} failed"


def judge_nodes(options: PreflightOptions) -> Report:
    """Judge other nodes by their published records. Nothing is scanned, measured or recommended."""
    from agent.cluster.client import TRIES, connect
    from agent.cluster.gate import check_nodes, select_nodes
    from agent.cluster.nodes import Fleet, make_unknown_node

    started, clock = time.time(), time.monotonic()
    expected = require_expectations(options.expect, options.expect_file)
    nodes = expand_host_list((options.nodes or "").lower().replace("node/", ""))  # node/NAME: `kubectl get -o name`
    if not (nodes or options.selector):  # an empty variable of a pipeline
        raise GateError("--nodes or --selector is empty")
    before = baseline.read_baseline(options.baseline, ("statuses",))
    client = connect(options.context).limited(tries=TRIES, timeout_seconds=5.0)
    names = select_nodes(client, nodes, options.selector)
    fleet = Fleet()
    fleet.read(client)
    findings = (*chain(*names.values()), *check_nodes(names, fleet, expected=expected))
    checks = select(findings, require=options.require, skip=options.skip, codes=ALL_CODES)
    checks = baseline.compare_with_baseline(checks, before.statuses)
    return Report(
        started_at_seconds=started, seconds=time.monotonic() - clock, checks=checks,
        verdict=judge(checks, fail_on=options.fail_on),
        nodes=tuple(replace(fleet.record(name) or make_unknown_node(name), facts=None) for name in names),
        notes=("judged by what the nodes' agents published; nothing was measured in this run",),
    )  # fmt: skip


def require_expectations(arguments: Sequence[str], path: Path | None) -> tuple[NodeExpectation, ...]:
    """Return the expectations. Raises GateError if options are given that contain none."""
    if not arguments and path is None:
        return ()
    from agent.checks.expect import read_expectations

    expectations = read_expectations(arguments, path)
    if not expectations:  # an agent's ConfigMap may be empty, a gate may not
        raise GateError(f"{f'--expect-file {path}' if path else '--expect'}: contains no expectation")
    return expectations


def make_required_links(expected: Sequence[NodeExpectation]) -> RequiredLinks | None:
    """Return the link expectations of --expect, as the first bar of a measurement."""
    first = {expectation.key: expectation.value for expectation in reversed(expected)}
    wire = first["hcas"] * first["rate"] if {"hcas", "rate"} <= first.keys() else None
    return RequiredLinks(nvlinks=first.get("nvlink"), wire=wire) if first else None


def write_folder(report: Report, folder: Path, html: str) -> tuple[Path, ...]:
    """Write the report's files into `folder`, which is created if needed; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "report.json": json.dumps(to_document(report), indent=1, sort_keys=True) + "\n",
        "report.html": html,
        "junit.xml": render_junit(report),
    }
    return tuple(write_atomic(folder / name, text) for name, text in files.items())


def _list_blocking(report: Report) -> Iterator[tuple[str, Finding]]:
    """Yield the checks that prevent a pass, worst first, each with its node as Slurm names it.

    A check of the run names no node. It is of the scanned host, of this host if none was scanned, and else left out.
    """
    if report.verdict.exit_code == EXIT_PASS:
        return
    hosts = [snapshot.hostname for snapshot in report.snapshots] or [read_host_name()] * (not report.nodes)
    blocking = [check for check in sort_worst_first(report.checks) if check.status == report.verdict.word]
    for check in [check for check in blocking if check.required or check.status != "unknown"] or blocking:
        if name := check.node or (hosts[0] if len(hosts) == 1 else ""):
            yield name_in_slurm(name), check


def format_slurm_hosts(report: Report) -> str:
    """Return the nodes that do not pass as a Slurm host list, for --exclude and `scontrol update NodeName=`."""
    names = {name for name, _ in _list_blocking(report)}
    return f"{compress_host_list(names)}\n" if names else ""


def format_slurm_reasons(report: Report) -> str:
    """Return one line for each finding that prevents a node from passing: node, code, device and message.

    Checks of a node that were not measured are combined into one line.
    """
    unknown = report.verdict.word == "unknown"
    lines = (
        f"{name}: {report.verdict.why}" if unknown else
        f"{name}: {check.code} {check.subject}".rstrip() + f": {check.message}"
        for name, check in _list_blocking(report)
    )  # fmt: skip
    return "".join(f"{' '.join(printable(line).split())[:REASON_CHARACTERS]}\n" for line in dict.fromkeys(lines))


def render_junit(report: Report) -> str:
    """Return JUnit XML: a suite per node, a case per check; an unknown check is an error only if it was required."""
    suites: dict[str, list[Finding]] = {}
    for check in sort_worst_first(report.checks):
        suites.setdefault(check.node or "run", []).append(check)
    measured = [m for m in report.bench.measurements if m.verified] if report.bench else []
    aside = describe_unchecked_gpus(report.checks)
    by_node = sorted(suites.items())
    return printable(render_template(__file__, "junit.xml.j2", aside=aside, suites=by_node, measured=measured))
