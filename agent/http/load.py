"""The endpoints that make load: POST /preflight scans anew, POST /benchmarks runs ranks in a child process.

Both need a bearer token (agent.http.access), and both are capped in size, duration and rate.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from agent.documents import document
from agent.gate.codes import ALL_CODES
from agent.gate.verdict import Check, FailOn, GateError, judge, select, worst_first
from agent.http.access import Bucket, Tokens
from agent.http.models import TOKEN, Gate, problems
from agent.http.problem import ProblemError
from agent.http.state import State
from agent.jobs import result_store as keep
from agent.jobs.result_store import BENCH_FILE
from agent.view import View
from collectives.bench import lock, processes
from collectives.bench.ops import OPS
from collectives.bench.results import BenchResult, result_from_json

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 65536
MOST_BENCH_BYTES = 1 << 30
MOST_RANKS = 64
MOST_BENCH_SECONDS = 300.0
LATE_SECONDS = 240.0  # beyond the budget: start-up and the end of ranks that hang (collectives.bench.plan.BenchSpec)
POSTS_PER_MINUTE = 12.0
STOP_SECONDS = 5.0  # for ranks to end (collectives.bench.watch.TERM_SECONDS) and the result to be written


class Preflight(BaseModel):
    """What POST /preflight takes: the gate's options, and whether to measure before judging."""

    model_config = ConfigDict(extra="forbid")

    require: list[Annotated[str, Field(max_length=128)]] = Field(default=[], max_length=256)
    skip: list[Annotated[str, Field(max_length=128)]] = Field(default=[], max_length=256)
    fail_on: FailOn = "fail"
    measure: bool = Field(default=False, description="Measure collectives with real ranks first: makes load.")
    ranks: int | None = Field(default=None, ge=1, le=MOST_RANKS, description="With measure.")
    budget_seconds: float = Field(default=20.0, ge=1, le=MOST_BENCH_SECONDS, description="With measure.")


class Bench(BaseModel):
    """What POST /benchmarks takes."""

    model_config = ConfigDict(extra="forbid")

    ops: list[str] = Field(default=["all_gather", "reduce_scatter", "all_reduce"], min_length=1, max_length=len(OPS))
    ranks: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    min_bytes: int | None = Field(default=None, ge=1, le=MOST_BENCH_BYTES, description="A sweep by factors of 4.")
    max_bytes: int | None = Field(
        default=None, ge=1, le=MOST_BENCH_BYTES,
        description="Without either: 64 KiB, 1 MiB, 16 MiB and, on GPUs, 64 MiB of every rank, which is judged.",
    )  # fmt: skip
    budget_seconds: float = Field(default=60.0, ge=1, le=MOST_BENCH_SECONDS)

    def words(self) -> list[str]:
        """As the command line takes them."""
        unknown = [op for op in self.ops if op not in OPS]
        if unknown:
            raise ProblemError(400, f"ops: {unknown[0]!r}: must be one of {', '.join(OPS)}", allowed=list(OPS))
        sizes = (("min-bytes", self.min_bytes), ("max-bytes", self.max_bytes))
        words = [f"--budget={self.budget_seconds}", *(f"--{name}={value}" for name, value in sizes if value)]
        return words + [f"--op={op}" for op in self.ops] + ([f"--ranks={self.ranks}"] if self.ranks else [])


class Bencher:
    """One benchmark at a time, in a child process that imports torch so that this one does not."""

    def __init__(self, state: State, *, command: Sequence[str] = (sys.executable, "-m", "agent.cli")) -> None:
        self._state, self._command = state, tuple(command)
        self._lock = threading.Lock()
        self._running = False
        self._child: processes.Tree | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._until = 0.0
        self.last: dict[str, Any] = {"status": "none"}

    def start(self, wanted: Bench) -> dict[str, Any]:
        """Start it, or raise 409 where one runs, 501 where this image cannot."""
        self._begin(wanted)
        return self.last

    def _begin(self, wanted: Bench) -> Future[dict[str, Any]]:
        """As `start`; the future is what `last` becomes."""
        from agent.jobs.benchmark import gpu_processes

        words = wanted.words()
        if importlib.util.find_spec("torch") is None:
            raise ProblemError(501, "this image has no torch, so it runs no ranks",
                               grant="kubectl apply -k deploy/bench/job runs them in pods of their own")  # fmt: skip
        view = self._state.view
        if view is not None and (pids := gpu_processes(view.snapshots)):
            named = ", ".join(map(str, pids[:8]))
            raise ProblemError(409, f"GPUs are in use by processes {named}: a benchmark would disturb them",
                               headers={"Retry-After": "60"})  # fmt: skip
        with self._lock:
            if self._running:
                left = max(1, round(self._until - time.monotonic()))
                raise ProblemError(409, "a benchmark is running", headers={"Retry-After": str(left)})
            self._until = time.monotonic() + wanted.budget_seconds + LATE_SECONDS
            self._running = True
            self.last = {"status": "running", "started_at_seconds": time.time(), "request": wanted.model_dump()}
        ended: Future[dict[str, Any]] = Future()
        self._thread = threading.Thread(target=self._follow, args=(words, ended), name="benchmark", daemon=True)
        self._thread.start()
        return ended

    def measure(self, wanted: Bench) -> BenchResult:
        """Start it, wait for its end, and return what it measured. ProblemError as `start`; 500 without a result."""
        done = self._begin(wanted).result()  # the thread that sets it bounds the child's life
        try:
            return result_from_json(done["result"])
        except (KeyError, TypeError, ValueError):
            said = " | ".join(done.get("messages", ())[-3:])
            raise ProblemError(500, f"the benchmark ended without a result: {said or done['status']}") from None

    def stop(self) -> None:
        """End a child that still runs; it ends its ranks by itself, and what it measured until then is kept."""
        self._stopping = True
        child, thread = self._child, self._thread
        if child is not None:
            child.process.terminate()
        if thread is not None:
            thread.join(STOP_SECONDS)

    def _follow(self, words: Sequence[str], ended: Future[dict[str, Any]]) -> None:
        """Run the child in this thread, which lives as long as it does: the child dies when its starter does."""
        done = dict(self.last)
        try:
            with lock.run_folder() as folder:
                saved, errors = folder / BENCH_FILE, folder / "stderr"
                with errors.open("wb") as stream:
                    line = [*self._command, "bench", *words, f"--save={saved}", "--output=json"]
                    child = self._child = processes.Tree(line, os.environ, stream, errors_only=True)
                if self._stopping:  # told while the child was being started: `stop` has not seen it
                    child.process.terminate()
                late = child.wait(self._until, threading.Event())
                child.end(30.0)
                code = None if late else child.process.returncode
                done |= {
                    "status": "done" if code == 0 else "failed", "exit_code": code, "ended_at_seconds": time.time(),
                }  # fmt: skip
                with errors.open("rb") as stream:
                    stream.seek(max(0, errors.stat().st_size - 2000))
                    done["messages"] = stream.read(2000).decode(errors="replace").splitlines()[-10:]
                if saved.exists():
                    done["result"] = json.loads(saved.read_text())
                    self._keep(saved)
        except (OSError, ValueError) as error:
            done |= {"status": "failed", "messages": [f"{type(error).__name__}: {error}"]}
        finally:
            with self._lock:
                self.last, self._child, self._running = done, None, False
            ended.set_result(done)

    def _keep(self, saved: Path) -> None:
        """Into the state's folder, where the next scan finds it."""
        if self._state.folder is not None:
            try:
                result = result_from_json(keep.read(saved))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("the benchmark's result is not kept: %s", error)
                return
            if keep.keep_bench(result, self._state.folder) and not self._stopping:
                self._state.refresh()


def judged(view: View, result: BenchResult | None) -> tuple[Check, ...]:
    """The view's checks; those that rest on a benchmark by this result, though the state keeps none."""
    if result is None:
        return view.checks
    from agent.gate.measured import BENCH_CODES, asked_now, checks_of_bench

    scanned = (check for check in view.checks if check.id not in BENCH_CODES)
    return (*scanned, *asked_now(checks_of_bench(result, view.snapshots)))


def _scanned(state: State, bencher: Bencher, requested: Preflight) -> JSONResponse:
    """The gate over a scan made now."""
    options: dict[str, Any] = {"require": requested.require, "skip": requested.skip, "known": ALL_CODES}
    try:
        select((), **options)  # before the scan: a wrong word costs none
        result = None
        if requested.measure:
            result = bencher.measure(Bench(ranks=requested.ranks, budget_seconds=requested.budget_seconds))
        checks = select(judged(state.refresh(), result), **options)
    except GateError as error:
        raise ProblemError(400, str(error)) from None
    verdict = judge(checks, fail_on=requested.fail_on)
    return JSONResponse(document({"verdict": verdict, "checks": worst_first(checks)}),
                        headers={"Cache-Control": "no-store"})  # fmt: skip


def install(app: FastAPI, state: State, tokens: Tokens) -> Bencher:
    """Add the endpoints."""
    bencher = Bencher(state)
    posts = Bucket(rate=POSTS_PER_MINUTE / 60, size=POSTS_PER_MINUTE)

    def enter(request: Request) -> None:
        if not posts.take():
            raise ProblemError(429, f"more than {POSTS_PER_MINUTE:.0f} such requests a minute",
                               headers={"Retry-After": "5"})  # fmt: skip
        log.info("POST %s by %s", request.url.path, request.state.user)

    @app.post("/preflight", tags=["gate"], operation_id="preflight_now", response_model=Gate, dependencies=TOKEN,
              responses=problems(409, 413, 500, 501))  # fmt: skip
    async def preflight(request: Request, requested: Annotated[Preflight | None, Body()] = None) -> JSONResponse:
        """The gate over a scan made now; with `measure` over a benchmark made now too. Needs a token."""
        enter(request)
        requested = requested or Preflight()
        if requested.measure:  # whoever may scan may not therefore make load
            await tokens.judge(request, path="/benchmarks", verb="post")
        return await run_in_threadpool(_scanned, state, bencher, requested)

    @app.post("/benchmarks", tags=["gate"], operation_id="benchmark_start", status_code=202, dependencies=TOKEN,
              responses=problems(409, 413, 501))  # fmt: skip
    def start(request: Request, requested: Annotated[Bench | None, Body()] = None) -> JSONResponse:
        """Start a benchmark; 409 while one runs. Needs a token. GET /benchmarks tells how it goes."""
        enter(request)
        return JSONResponse(bencher.start(requested or Bench()), status_code=202, headers={"Location": "/benchmarks"})

    @app.get("/benchmarks", tags=["facts"], operation_id="benchmarks", responses=problems())
    def benchmarks() -> JSONResponse:
        """The benchmark that runs, or the last one this agent started."""
        return JSONResponse(bencher.last, headers={"Cache-Control": "no-store"})

    return bencher
