"""Published recipes as questions: the recipe's own layout, ours, and why they differ where they do.

What explains a difference is this planner's own account of both layouts, and the test holds the explanation to it:
`SLOWER`: the recipe's is forecast slower. `EVEN`: as fast, within what two forecasts err against each other. `ROOM`:
by this memory forecast the recipe's fits only with recomputation that its source does not name. No recipe
may be forecast faster than ours by more than that error: the search would have missed it.
"""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import yaml
from rigs.tables import each_row

from planner.forecast import machines
from planner.forecast.calibration import widths
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import forecast_named, plan
from planner.search import Candidate, search

SLOWER, EVEN, ROOM = "slower", "even", "room"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published run. `differs`: split, batch or recomputation, and why ours is another."""

    source: str
    model: str
    on: tuple[str, int] | tuple[str, int, int]  # machine, nodes, GPUs of each where not all
    train: dict
    layout: dict
    claim: str
    differs: dict[str, str] = field(default_factory=dict)


def read_recipes() -> dict[str, Recipe]:
    """Every row of layout_recipes.yaml by its name."""
    rows = yaml.safe_load(Path(__file__).with_name("layout_recipes.yaml").read_text(encoding="utf-8"))
    for row in rows.values():
        row["layout"] = {k: tuple(v) if isinstance(v, list) else v for k, v in row["layout"].items()}
    return {name: Recipe(**{**row, "on": tuple(row["on"])}) for name, row in rows.items()}


RECIPES = read_recipes()


PARTS = {
    "split": ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "sharding"),
    "batch": ("micro_batch", "gradient_accumulation"), "recomputation": ("checkpointing", "offload"),
}  # fmt: skip


@each_row("name", RECIPES)
def test_every_difference_from_a_published_recipe_is_explained(name: str) -> None:
    """The recipe's layout exists here, ours is no slower, and what differs has a reason that the forecasts bear out."""
    recipe = RECIPES[name]
    machine, nodes, *gpus = recipe.on
    cluster = machines.cluster(machine, nodes, gpus_per_node=gpus[0] if gpus else None)
    planned = plan(cluster, (), model_named(recipe.model), TrainSpec(**recipe.train))
    found = search(planned).best
    assert found, "nothing fits"
    ours: Candidate = found[0]
    schedule = {"schedule": "interleaved"} if "virtual_stages" in recipe.layout else {}
    theirs = forecast_named(planned, {**recipe.layout, **schedule})
    assert "breaks" not in theirs.why, theirs.why
    gain = math.log(theirs.forecast.step_seconds.mid / ours.seconds)
    assert gain > -widths().pair, f"the recipe is forecast {math.exp(-gain):.2f} times as fast as {ours.layout}"
    both = ours.layout, theirs.layout
    differ = {part for part, names in PARTS.items() if attrgetter(*names)(both[0]) != attrgetter(*names)(both[1])}
    assert differ <= recipe.differs.keys(), both
    if recipe.claim == SLOWER:
        assert gain > 0
    elif recipe.claim == EVEN:
        assert abs(gain) <= widths().pair
    else:
        assert recipe.claim == ROOM
        assert "checkpointing" not in recipe.layout
        assert theirs.layout.checkpointing != "none"


def test_the_recipes_span_models_machines_lengths_and_methods() -> None:
    """15 at least, from the stacks' own authors."""
    assert len(RECIPES) >= 15
    assert {"Llama-3.1-8B", "DeepSeek-V3"} <= {recipe.model for recipe in RECIPES.values()}
    assert {"2xa40-roce", "gb300-nvl72"} <= {recipe.on[0] for recipe in RECIPES.values()}
    assert max(recipe.train["sequence_length"] for recipe in RECIPES.values()) == 131072
    assert {recipe.train.get("method", "lora") for recipe in RECIPES.values()} == {"full", "lora", "qlora"}
