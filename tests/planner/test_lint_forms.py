"""Every form in which people keep environments is read, and what cannot be read is named."""

import contextlib
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from rigs.tables import data_of, each_row, rows_of

from planner.lint.environment import lint
from planner.lint.script import EnvironmentTextError, NamedEnvironment
from planner.lint.sources import Reading, explain_nothing, guess_kind, read_text

rows = rows_of(__file__)


def reading(text: str, name: str = "") -> Reading:
    """A text as it is in a file."""
    return read_text(textwrap.dedent(text).lstrip("\n"), None, name)


def only(found: Reading) -> NamedEnvironment:
    """The one environment."""
    (one,) = found.environments
    return one


PAIR = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0,mlx5_1"}
FORMS = data_of(__file__, "lint_forms.yaml")


@each_row("name", FORMS)
def test_forms(name: str) -> None:
    """The same two variables in every form, which is named."""
    found = reading(FORMS[name]["text"], FORMS[name].get("file", ""))
    merged = {name: value for each in found.environments for name, value in each.environment.items()}
    assert (found.form, merged) == (FORMS[name].get("form", "shell script"), PAIR)
    assert found.names() == ("NCCL_DEBUG", "NCCL_IB_HCA")


def test_a_variable_that_is_never_exported() -> None:
    """NCCL does not see it, and only known names are named."""
    found = only(reading("#!/bin/bash\nexport NCCL_DEBUG=WARN\nNCCL_IB_HCA=mlx5_0\nNCCL_OWN=1\ntorchrun t.py\n"))
    (finding,) = lint(found)
    assert (finding.code, finding.subject) == ("env.name.unexported", "NCCL_IB_HCA")


@each_row(("text", "says"), rows("unread"))
def test_what_is_not_read_is_named(text: str, says: str) -> None:
    """Never a silent zero."""
    found = reading(text)
    assert found.names() == ()
    assert says in explain_nothing(text, found)


@each_row(("name", "kind"), rows("kinds"))
def test_a_files_name_tells_its_form(name: str, kind: str) -> None:
    """Before its looks are asked."""
    assert guess_kind("NCCL_NET=IB\n", name) == kind


def test_what_the_script_itself_reads_is_no_mistake() -> None:
    """An unknown name that is used elsewhere is a note; one that only hands on its own value is none the better."""
    helper = only(reading("export NCCL_ITERS=20\n./all_reduce_perf -n $NCCL_ITERS\n"))
    (note,) = lint(helper)
    assert (note.code, note.status) == ("env.name.unknown", "info")
    alone = only(reading("export NCCL_ITERS=${NCCL_ITERS:-20}\n./all_reduce_perf\n"))
    (warning,) = lint(alone)
    assert warning.status == "warn"


# Texts of a length in proportion to n; those that double or call each other have one size.
ENDLESS: dict[str, Callable[[int], str]] = {
    "empty lines": lambda n: "\n" * 40 * n, "assignments": lambda n: "A=" * 20 * n, "backticks": lambda n: "`" * 80 * n,
    "doubling": lambda n: "A=aaaa\n" + "A=$A$A\n" * 100 + "export NCCL_X=$A\n",
    "conditions": lambda n: "if x; then\n" * 4 * n, "quotes": lambda n: 'bash -c "' * 4 * n,
    "conditions one after another": lambda n: "".join(f"if x{i}; then A{i}=1; fi\n" for i in range(2 * n)),
    "here-documents": lambda n: "cat <<E\n" * 4 * n, "braces": lambda n: "${" * 20 * n,
    "indented": lambda n: "\n    NCCL_X=1" * 2 * n, "pipes": lambda n: "a|" * 4 * n,
    "case": lambda n: "case x in a) ;; " * n, "arrays": lambda n: "A=(" * 4 * n, "and": lambda n: "a&&" * 10 * n + "b",
    "calls": lambda n: "f() { g; g; }; g() { h; h; }; h() { f; f; }\n" + "f\n" * 4 * n,
    "loops": lambda n: "for a in 1 2 3 4 5 6 7 8 9; do\n" * 9 + "NCCL_X=$a\n" + "done\n" * 9,
    "templates": lambda n: "{{ if x }}\n" * 4 * n, "stages": lambda n: "FROM a\nENV NCCL_X=1\n" * n,
    "defaults": lambda n: "export NCCL_X=" + "${A:-" * n + "}" * n + "\n",
    "functions": lambda n: "".join(f"f{i}() {{ NCCL_X{i}=1 torchrun a; }}\n" for i in range(2 * n)) + "torchrun a\n",
    "launches": lambda n: "".join(f"export NCCL_X{i}=1\ntorchrun a\n" for i in range(n)),
    "options": lambda n: "sudo" + " -u" * 40 * n + " torchrun a --export=b" * 4 * n + "\n",
    "options of others": lambda n: "".join(f"{i}{' -u a' * 6 * n} torchrun a\n" for i in ("env", "timeout", "srun")),
    "wrappers": lambda n: "".join(f"{i} -u " * 4 * n + "torchrun a\n" for i in ("env", "sudo", "nohup", "srun")),
    "joined lines": lambda n: "A=1 B=2\nexport NCCL_X=1\n" * n, "one word": lambda n: "x " + "abc" * 20 * n + "\n",
    "joined assignments": lambda n: "A=1 B=2 \\\n" * 10 * n + "\nexport NCCL_X=1\n",
    "arguments": lambda n: "set -- 1 2\n" + 'set -- "$@" "$@"\n' * 40 + "NCCL_X=$1 torchrun a\n",
    "words of a value": lambda n: "A='a a '\n" + 'A="$A$A"\n' * 13 + "x " + "$A " * 8 * n + "\n",
    "long lines in loops": lambda n: "for a in {1..60}; do for b in {1..60}; do x " + "a " * 20 * n + "; done; done\n",
    "skipped in loops": lambda n: "for a in {1..60}; do continue\n" + "NCCL_X=1 " * 16 * n + "\ndone\n",
    "sums": lambda n: "((" + "a=1," * 8 * n + "a=1))\n", "blanks": lambda n: "echo '$" + " " * 40 * n + "'\n",
    "groups": lambda n: "workerGroupSpecs:\n" + (" " * n + "x\n") * 4 + "export NCCL_X=1\n",
    "NUL": lambda n: "\0" * 40 * n, "unknown names": lambda n: "".join(f"NCCL_A{i}=1\n" for i in range(20 * n)),
    "texts": lambda n: "A='x '\n" + 'A="$A$A"\n' * 14 + 'eval "$A"\n' * n,
    "names": lambda n: "export" + "".join(f" NCCL_A{i}=1" for i in range(n)) + "".join(
        f"\nexport NCCL_B={i}\ntorchrun a\n" for i in range(200)),
    "anchor": lambda n: "- a: &s |\n" + "".join(f"   $a{i}&&NCCL_AB=1 a\n" for i in range(30)) + "- b: *s\n" * (n // 9),
    "array": lambda n: "A=(1)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + 'mpirun "${A[@]}"\n',
}  # fmt: skip


def seconds(text: str, kind: str | None = "shell") -> float:
    """CPU time of reading it. CPython 3.11 takes up to three times as long on a stack as deep as pytest's."""

    def read() -> float:
        began = time.thread_time()
        with contextlib.suppress(EnvironmentTextError):
            read_text(text, kind)
        return time.thread_time() - began

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(read).result()


@pytest.mark.long
@each_row("name", ENDLESS)
def test_no_text_takes_long(name: str) -> None:
    """What repeats, nests or doubles is read in one pass or refused: timed against a plain script of its length."""
    text = ENDLESS[name](500)
    plain = "export NCCL_X=1\n" * ((len(text) + 10_000) // 16)
    longest = 50 * min(seconds(plain) for _ in range(3))  # the most today is 38 times: texts
    others = {"shell", "yaml", "dockerfile"} - {guess_kind(text)}
    taken = {kind: seconds(text, kind) for kind in (None, *sorted(others))}
    for kind in [kind for kind, took in taken.items() if took >= longest]:  # a busy machine makes CPU seconds longer
        taken[kind] = min(taken[kind], seconds(text, kind))
    assert max(taken.values()) < longest, (longest, taken)
