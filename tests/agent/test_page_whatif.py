"""The what-if page: worked examples before a question, and with it layouts, cost and what other numbers of nodes do."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError
from rigs.recorded import view

from agent.http import questions
from agent.http.worker import Answer
from agent.pages import render as pages
from contracts import question


def page(host: str = "sick-h100-memlock-64KiB", **fields: str) -> str:
    known = questions.Known(view=view(host))
    answer = questions.answer(known, "what_if", {"fields": tuple(fields.items())})
    assert isinstance(answer, Answer)
    return answer.body.decode()


def test_it_opens_with_worked_examples_that_are_questions_to_ask_again() -> None:
    text = page()
    assert text.count('<a href="what-if?model=') == len(pages.examples())
    table = text[text.index("Worked examples") :]
    assert len(re.findall(r"\d+ (?:m?s|s) \(", table)) == len(pages.examples()), "each with its step"
    assert "nothing fits" not in table


def test_a_machine_of_the_catalogue_shows_time_and_cost_by_nodes() -> None:
    text = page(model="Llama-3.1-8B", method="full", machine="p5.48xlarge", nodes="2", price="90")
    frontier = text[text.index('id="frontier"') :]
    assert frontier.count("× p5.48xlarge</th>") == len(questions.FRONTIER_NODES)
    assert "<svg" in frontier and "cost" in frontier
    assert 'name="price" maxlength="16" value="90"' in text
    refused = page(model="Llama-3.1-8B", machine="p5.48xlarge", price="cheap")
    assert "price=&#39;cheap&#39;: must be a number" in refused


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


def test_what_this_host_loses_stands_beside_its_layouts() -> None:
    text = page(model="Llama-3.1-8B", method="full", nodes="2")
    assert "limits.memlock.low: no RDMA, TCP over eno1" in text and "slower than sound nodes" in text
    assert "slower than sound nodes" not in page("hgx-h100-8xH100-8hca", model="Llama-3.1-8B", nodes="2")
