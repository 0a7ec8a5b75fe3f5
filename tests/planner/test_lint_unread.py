"""Settings that are easily lost, lines that cannot be understood, and what the verb answers then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.checks.lint import lint_text
from planner.lint.environment import lint
from planner.lint.sources import Reading, read_text

ROOT = Path(__file__).parents[2]


def settings(found: Reading) -> dict[str, str | None]:
    """Every variable found; None where only its name is known."""
    return {
        name: value
        for each in found.environments
        for name, value in ({**each.unresolved, **each.environment} | dict.fromkeys(each.unresolved)).items()
    }


POD = "kind: Pod\nspec:\n  containers:\n  - name: t\n    env:\n"
# file name, text, what it sets, lines that are not understood
ROWS: tuple[tuple[str, str, dict[str, str | None], tuple[int, ...]], ...] = (
    # `<<` that begins no here-document
    ("Dockerfile", "FROM x\nRUN sed -i 's|cout << \"hi\"|x|' a.cc\nENV NCCL_NET=IB\n", {"NCCL_NET": "IB"}, ()),
    ("Dockerfile", "FROM x\nRUN python -c 'print(1 << shift)'\nENV NCCL_NET=IB\n", {"NCCL_NET": "IB"}, ()),
    ("Dockerfile", "FROM x\nRUN echo $((1 << 3)) \\\n  && a\nENV NCCL_NET=IB\n", {"NCCL_NET": "IB"}, ()),
    ("Dockerfile", "FROM x\nRUN cat <<NO\nENV NCCL_NET=IB\n", {"NCCL_NET": "IB"}, (2,)),
    ("a.sh", "python -c 'print(1 << shift)'\nexport NCCL_NET=IB\n", {"NCCL_NET": "IB"}, ()),
    ("a.sh", 'python -c "x = 1 << shift"\nexport NCCL_NET=IB\n', {"NCCL_NET": "IB"}, ()),
    # here-documents of a Dockerfile
    ("Dockerfile", "FROM x\nRUN <<EOF\necho NCCL_NET=IB > /etc/nccl.conf\nEOF\nENV NCCL_ALGO=Ring\n",
     {"NCCL_NET": "IB", "NCCL_ALGO": "Ring"}, ()),
    ("Dockerfile", "FROM x\nCOPY <<-'E' /etc/nccl.conf\n\tNCCL_NET=IB\n\tE\n", {"NCCL_NET": "IB"}, ()),
    ("Dockerfile", "FROM x\nRUN cat <<E > /etc/nccl.conf && ls\nNCCL_NET=IB\nE\n", {"NCCL_NET": "IB"}, ()),
    # other forms of a Dockerfile
    ("Dockerfile", "# escape=`\nFROM x\nENV NCCL_NET=IB `\n # why\n\n NCCL_ALGO=Ring\n",
     {"NCCL_NET": "IB", "NCCL_ALGO": "Ring"}, ()),
    ("Dockerfile", "ARG V=1\nFROM x AS b\nARG V=2\nENV NCCL_NET=$V\nFROM b\nENV NCCL_ALGO=a\\ b NCCL_PROTO=$NCCL_NET\n",
     {"NCCL_NET": "2", "NCCL_ALGO": "a b", "NCCL_PROTO": "2"}, ()),
    ("Dockerfile", "FROM x\nENV NCCL_NET=IB\nNCCL_ALGO=Ring\nCMD []\n", {"NCCL_NET": "IB"}, (3,)),
    # a line of the C shell
    ("a.sh", "export NCCL_NET=IB\nsetenv NCCL_ALGO Ring\n", {"NCCL_NET": "IB"}, (2,)),
    # JSON in an option
    ("a.sh", 'ray job submit --runtime-env-json="{\n  \\"env_vars\\": {\\"NCCL_NET\\": \\"IB\\"}\n}" -- a\n',
     {"NCCL_NET": "IB"}, ()),
    ("a.sh", "R='{\"env_vars\": {\"NCCL_NET\": \"IB\"}}'\nray job submit --runtime-env-json=\"$R\"\n",
     {"NCCL_NET": "IB"}, ()),
    ("a.sh", 'cat > e.json <<EOF\n{"env_vars": {"NCCL_NET": "IB"}}\nEOF\nray --runtime-env-json="$(cat e.json)"\n',
     {"NCCL_NET": "IB"}, ()),
    ("a.sh", "export NCCL_ALGO=Ring\nray --runtime-env-json='{\"NCCL_NET\": \"IB\",'\n", {"NCCL_ALGO": "Ring"}, (2,)),
    # substitutions that hold documents, and what follows them
    ("a.sh", "export NCCL_NET=IB\nX=$(cat <<EOF\n{\"a\": 1}\nEOF\n)\nNCCL_ALGO=Ring python t.py\n",
     {"NCCL_NET": "IB", "NCCL_ALGO": "Ring"}, ()),
    ("a.sh", 'export NCCL_NET="${NCCL_NET:-${DEVICE:-IB}}"\n', {"NCCL_NET": "IB"}, ()),
    ("a.sh", ': "${NCCL_NET:=IB}"\nexport NCCL_NET\n', {"NCCL_NET": "IB"}, ()),
    # exported by an attribute, by a launcher that reads the output, by a loop
    ("a.sh", "for v in NCCL_NET NCCL_ALGO; do export \"$v\"; done\nNCCL_NET=IB\nset -a\nNCCL_ALGO=Ring\nset +a\n",
     {"NCCL_NET": "IB", "NCCL_ALGO": "Ring"}, ()),
    ("a.sh", 'NCCL_IB_TC="${NCCL_IB_TC:-104}"\necho "env.NCCL_IB_TC=${NCCL_IB_TC}"\n', {"NCCL_IB_TC": "104"}, ()),
    ("a.sh", "f() { export NCCL_NET=$1; }\nf IB\n", {"NCCL_NET": "IB"}, ()),
    ("a.sh", "out=$(mpirun -x NCCL_NET=IB a)\n", {"NCCL_NET": "IB"}, ()),
    ("a.sh", "CMD='mpirun -x NCCL_NET=IB a'\neval \"$CMD\"\n", {"NCCL_NET": "IB"}, ()),
    ("a.sh", "make NCCL_HOME=/x\nexport NCCL_NET=IB\n", {"NCCL_NET": "IB"}, ()),
    ("a.sh", "gcloud run --set-env-vars=NCCL_NET=IB,NCCL_ALGO=Ring\n", {"NCCL_NET": "IB", "NCCL_ALGO": "Ring"}, ()),
    # settings in another language inside a script
    ("a.sh", "export NCCL_NET=IB\npython - <<E\nimport os\nos.environ['NCCL_ALGO'] = 'Ring'\nE\n",
     {"NCCL_NET": "IB"}, (4,)),
    ("a.sh", "export NCCL_NET=IB\npython -c \"import os; os.environ['NCCL_ALGO'] = 'Ring'\"\n",
     {"NCCL_NET": "IB"}, (2,)),
    ("a.sh", "export NCCL_NET=IB\nif [ x; then\n  export NCCL_ALGO=(\n", {"NCCL_NET": "IB"}, (2, 3)),
    # env files and logs
    ("a.env", "NCCL_NET=IB\nrun with NCCL_DEBUG=INFO\n", {"NCCL_NET": "IB"}, (2,)),
    ("", "RuntimeError: NCCL error in: a.cpp:1, system error (run with NCCL_DEBUG=INFO for details)\n", {}, ()),
    ("a.log", "h:1:1 [0] NCCL INFO NCCL_NET set by environment to IB.\nrun with NCCL_DEBUG=INFO\n",
     {"NCCL_NET": "IB"}, ()),
    ("a.py", "import os\nos.environ['NCCL_NET'] = 'IB'\n", {}, ()),
    ("README.md", "# Run\n\n```bash\nexport NCCL_NET=IB\n```\n", {}, ()),
    # documents
    ("a.yaml", "x-env:\n  - script: |\n      docker run --rm \\\n        -e NCCL_NET=IB \\\n        img\n",
     {"NCCL_NET": "IB"}, ()),
    ("a.yaml", POD + "    - {name: NCCL_NET, value: IB}\n    args:\n    - |\n      import os\n"
     "      os.environ['NCCL_ALGO'] = 'Ring'\n", {"NCCL_NET": "IB"}, (10,)),
)  # fmt: skip


def test_what_is_set_and_what_is_not_understood() -> None:
    wrong = []
    for name, text, sets, lines in ROWS:
        found = read_text(text, None, name)
        got = settings(found), tuple(each.line for each in found.unread)
        if got != (sets, lines):
            wrong.append((name, text, got))
    assert not wrong


def test_line_numbers_after_continued_texts() -> None:
    """Of what follows a substitution, a string and a here-document of several lines."""
    text = 'A=$(a \\\n  b\n)\nB="x\ny"\ncat > f <<E\n1\n2\nE\nexport NCCL_NET=IB\nbash -c "\nexport NCCL_ALGO=Ring\n"\n'
    (each,) = read_text(text, None, "a.sh").environments
    assert each.lines == {"NCCL_NET": 10, "NCCL_ALGO": 12}


def test_line_numbers_inside_a_here_document() -> None:
    found = read_text("export NCCL_NET=IB\ncat > a.env <<E\nNCCL_ALGO=Ring\nno setting\nE\n", None, "a.sh")
    assert [each.lines for each in found.environments] == [{"NCCL_NET": 1}, {"NCCL_ALGO": 3}]
    assert [each.line for each in found.unread] == [4]


def test_branches_of_a_template_do_not_shadow_each_other() -> None:
    for begin, other, end in (
        ("{{- if .a }}", "{{- else }}", "{{- end }}"),
        ("{% if a %}", "{% else %}", "{% endif %}"),
    ):
        text = f"{POD}    {begin}\n    - name: NCCL_IB_TC\n      value: '106'\n    {other}\n    - name: NCCL_IB_TC\n"
        found = read_text(f"{text}      value: '300'\n    {end}\n", None, "a.yaml")
        assert not [finding for each in found.environments for finding in each.findings]
        assert [each.environment for each in found.environments] == [{"NCCL_IB_TC": "106"}, {"NCCL_IB_TC": "300"}]


def test_only_the_last_stage_of_an_image_holds_for_its_containers() -> None:
    found = read_text("FROM a AS b\nENV NCCL_NET=IB\nFROM c\nENV NCCL_ALGO=Ring\n", None, "Dockerfile")
    assert [(each.source, each.environment) for each in found.environments] == [
        ("Dockerfile", {"NCCL_ALGO": "Ring"}), ("Dockerfile, stage b", {"NCCL_ALGO": "Ring", "NCCL_NET": "IB"}),
    ]  # fmt: skip


def test_findings_about_settings_beside_others() -> None:
    """Environment, what is said of it (codes by subject), and what is not said."""
    fastrak = {"NCCL_FASTRAK_CTRL_DEV": "eth0"}
    rows = (
        ({"NCCL_PROTO": "Simple,LL128", **fastrak}, {}),
        ({"NCCL_PROTO": "LL", **fastrak}, {"NCCL_PROTO": ("env.debug.leftover", "info")}),
        ({"NCCL_ALGO": "Ring,Tree", **fastrak}, {"NCCL_ALGO": ("env.debug.leftover", "info")}),
        ({"NCCL_BUFFSIZE": "8388608", "NCCL_NET": "gIB"}, {"NCCL_BUFFSIZE": ("env.debug.leftover", "info")}),
        ({"NCCL_PROTO": "Simple"}, {"NCCL_PROTO": ("env.debug.leftover", "warn")}),
        ({"NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1"},
         {"NCCL_SHM_DISABLE": ("env.pair.network", "warn"), "NCCL_P2P_DISABLE": ("env.debug.leftover", "warn")}),
        ({"NCCL_DEBUG": "INFO "}, {"NCCL_DEBUG": ("env.value.blank", "warn")}),
        ({"NCCL_IB_TC": "106 "}, {"NCCL_IB_TC": ("env.value.blank", "info")}),
        ({"NCCL_SOCKET_IFNAME": " eth0"}, {"NCCL_SOCKET_IFNAME": ("env.value.blank", "warn")}),
    )  # fmt: skip
    for environment, wanted in rows:
        found = {each.subject: (each.code, each.status) for each in lint(environment, nccl_version=(2, 27, 7))}
        assert found == wanted, environment
    (proto,) = lint({"NCCL_PROTO": "LL", **fastrak})
    assert "Unset" not in proto.remedy and "Simple,LL128" in proto.message


def test_secrets_are_not_repeated() -> None:
    text = 'export NCCL_DEBUG=INFO NCCL_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345 NCCL_X="password=hunter2secret"\n'
    answer = lint_text(text, "auto", nccl_version=None, machine=None)
    assert len(answer.checks) >= 2
    for secret in ("hf_abcdefghijklmnopqrstuvwxyz012345", "hunter2secret"):
        assert secret not in str(answer)


@pytest.mark.parametrize(
    ("text", "first", "code"),
    [
        ("export NCCL_DEBUG=INFO\n", "✓ nothing to say", 0),
        ("export NCCL_NET=IB\npython -c \"os.environ['NCCL_ALGO']='x'\"\n", "! Not understood: line 2 (", 5),
        ("export NCCL_BUFFSIZE=8M\npython -c \"os.environ['NCCL_ALGO']='x'\"\n", "! Not understood: line 2 (", 3),
        ("import os\nos.environ['NCCL_ALGO']='x'\n", "Error: the text: 1 line names NCCL's variables (line 2)", 2),
    ],
)
def test_the_first_line_and_the_exit_code(text: str, first: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent.cli", "lint-env", "-"], input=text, capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, (done.stdout or done.stderr).startswith(first)) == (code, True), done


@pytest.mark.corpus
def test_defects_of_the_corpus(corpus: Path) -> None:
    """Every shared input is read whole."""
    for path in sorted((corpus / "defects" / "lint").iterdir()):
        found = read_text(path.read_text(), None, str(path))
        assert found.names() and not found.unread, path.name
