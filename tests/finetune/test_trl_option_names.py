"""The tables of contracts/trl.toml: no option in two of them, and every name on the right is one that the job has."""

import typing
from collections import Counter
from dataclasses import fields

from contracts import trl
from contracts.job_config import JobConfig, known_settings, parse_config
from contracts.layout import Layout


def test_every_row_of_the_option_tables_is_sound():
    names = trl.option_names()
    settings, members = {one.name for one in fields(JobConfig)}, {one.name for one in fields(Layout)}
    schedules = typing.get_args(typing.get_type_hints(JobConfig)["lr_scheduler_type"])
    wrong = []
    tables = (names.renamed, names.no_effect, names.only, trl.IN_LAYOUT, dict.fromkeys(settings))
    found = Counter(name for table in tables for name in table)
    wrong += [f"{name}: in {count} tables" for name, count in found.items() if count > 1]
    for name, here in (
        *names.renamed.items(),
        *names.elsewhere.items(),
        *names.sections["model_init_kwargs"].members.items(),
    ):
        if here not in known_settings():
            wrong.append(f"{name} = {here}: no setting of that name")
    for name, member in (
        *trl.IN_LAYOUT.items(),
        *names.deepspeed["members"].items(),
        *names.sections["parallelism_config"].members.items(),
        *names.sections["fsdp_config"].members.items(),
    ):
        if member not in members:
            wrong.append(f"{name} = {member}: no member of the layout")
    wrong += [f"{kind} = {name}" for kind, name in names.deepspeed["schedules"].items() if name not in schedules]
    wrong += [f"{name}: no reason" for name, why in names.no_effect.items() if len(why.split()) < 2]
    wrong += [f"{name}: no reason" for name, (_, why) in names.only.items() if len(why.split()) < 2]
    for each in names.sections.values():
        found = Counter((*each.members, *each.no_effect, *each.only))
        wrong += [f"{name}: in {count} tables" for name, count in found.items() if count > 1]
    assert wrong == []


def test_every_option_of_the_tables_is_read():
    """An option without effect leaves a note, whatever its value; one of a few values takes each of these."""
    names, wrong = trl.option_names(), []
    rows = [(name, 5) for name in names.no_effect]
    rows += [(name, value) for name, (allowed, _) in names.only.items() for value in [*allowed, None]]
    for name, value in rows:
        _, explicit, notes = parse_config({name: value})
        if explicit or not any(note.startswith(f"{name}: no effect, ") for note in notes):
            wrong.append((name, value, explicit, notes))
    assert wrong == []
