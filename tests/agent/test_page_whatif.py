"""The what-if page: layouts, run time and cost."""

import re

import pytest
from pydantic import ValidationError
from rigs.command import drawn
from rigs.recorded import NAMES, view

from agent.advice import advise
from agent.advice.advise import EMBEDDED_MODEL, Request
from agent.base import question, units
from agent.http import pages, worker
from agent.http.worker import Answer
from agent.terminal.advice import print_recommendation


def page(host: str = "sick-h100-memlock-64KiB", **fields: str) -> str:
    known = worker.WorkerData()
    known.view = view(host)
    answer = worker.answer(known, "what_if", {"fields": tuple(fields.items())})
    assert isinstance(answer, Answer)
    return answer.body.decode()


def test_the_form_shows_what_was_asked_and_names_a_wrong_field() -> None:
    text = page(model="Llama-3.1-8B", method="full", machine="p5.48xlarge", nodes="2", price="90")
    assert 'name="price" maxlength="16" value="90"' in text
    again = page(model="meta-llama/Llama-3.1-8B", machine="h100")
    assert re.findall(r"<option selected>([^<]*)", again)[::2] == ["meta-llama/Llama-3.1-8B", "h100"], "as asked"
    refused = page(model="Llama-3.1-8B", machine="p5.48xlarge", price="cheap")
    assert "price=&#39;cheap&#39;: must be a number" in refused
    assert "? No layout: AMD GPUs are not supported" in page(model="Llama-3.1-8B", machine="mi300x")


def test_the_form_allows_what_the_question_allows() -> None:
    """The last value of each number is answered, and the one after it is refused."""
    html = page()
    limits = dict(re.findall(r'<input name="(\w+)" type="number" min="1" max="(\d+)"', html))
    assert set(limits) == {"nodes", "sequence_length", "global_batch", "steps"}
    for name, most in limits.items():
        assert question.model().model_validate({name: most})
        with pytest.raises(ValidationError):
            question.model().model_validate({name: str(int(most) + 1)})
    for name in ("method", "transport"):
        shown = re.search(rf'<select name="{name}">(.*?)</select>', html)
        assert shown and re.findall(r"<option[^>]*>(\w+)<", shown[1]) == question.rows()[f"--{name}"]["choices"]


def test_run_time_and_cost_have_fields_and_the_page_names_them() -> None:
    """Where one is empty the page says which to fill in."""
    empty = page(model="Llama-3.1-8B", method="full", machine="p5.48xlarge", nodes="2")
    for name, label in (("steps", "Run length (steps)"), ("price", "Price per node-hour")):
        assert f'<label>{label} <input name="{name}"' in empty and f"“{label}”" in empty
    assert "--steps" not in empty and "--price" not in empty
    full = page(model="Llama-3.1-8B", method="full", machine="p5.48xlarge", nodes="2", steps="2000", price="98.32")
    assert "not estimated" not in full
    time, cost = (re.search(rf"<dt>{word}</dt><dd>([\d.]+ ?\w*)", full) for word in ("time", "cost"))
    assert time and cost


def test_no_layout_is_called_slower_than_one_with_a_larger_step_time() -> None:
    """On every machine here, and for the small run, whose layout is not the fastest: what is said and what is shown."""
    wrong, said = [], 0
    for name in NAMES:
        for method in ("full", "lora"):
            advice = advise.advise_view(view(name), Request.of(model="Llama-3.1-8B", method=method, nodes=2))
            for shown in (advice, advise.with_fsdp(advice)):
                for other in shown.runners_up:
                    step, mine = shown.chosen.forecast.step_seconds.mid, other.forecast.step_seconds.mid
                    word = re.match(r"[\d.]+% (slower|faster)", other.why)
                    said += word is not None
                    if word and (mine < step) != (word[1] == "faster") and mine != step:
                        wrong.append((name, method, step, mine, other.why))
    assert not wrong and said > 50, (wrong, said)


def test_a_small_run_that_is_not_the_fastest_says_so_before_its_layout() -> None:
    """In page and terminal: both layouts with their forecasts, and no recommendation."""
    advice = advise.with_fsdp(
        advise.advise_view(view("cpu-only-vm"), Request.of(model=EMBEDDED_MODEL, nodes=2, ranks_per_node=1))
    )
    assert advice.chosen is not None and advice.chosen.layout.family == "FSDP"
    fastest = min(advice.runners_up, key=lambda one: one.forecast.step_seconds.mid)
    times = [units.seconds(one.forecast.step_seconds.mid) for one in (advice.chosen, fastest)]
    terminal = drawn(print_recommendation, advice, width=200, brief=True)
    for text in (terminal, pages.render_what_if_page(view(), {}, advice, "")):
        first = text.index("This small test run uses FSDP to show sharded traffic")
        assert all(time in text[first : first + 250] for time in times), times
        assert text.index("micro-batch") > first and "Recommended layout" not in text


def test_what_this_host_loses_stands_beside_its_layouts() -> None:
    text = page(model="Llama-3.1-8B", method="full", nodes="2")
    assert "limits.memlock.low: no RDMA, TCP over eno1" in text and "slower than healthy nodes" in text
    assert "slower than healthy nodes" not in page("hgx-h100-8xH100-8hca", model="Llama-3.1-8B", nodes="2")
