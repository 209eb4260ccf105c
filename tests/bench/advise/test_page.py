"""The page of an answer: what it draws, and that every kind of answer has one."""

import json
import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from mimose.bench.advise.advice import advise_on
from mimose.bench.advise.looks import LOOKS
from mimose.bench.advise.measured import Measured, read
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.page import page
from mimose.bench.advise.short import short_answer
from mimose.bench.advise.words import verdict

PLAIN = ("none", 40, 400, 0.02, 0.05)
FULL = ("full", 12, 400, 0.027, 0.05)
POOL = ("pool", 20, 400, 0.024, 0.05)


def _html(measured, **options):
    return page(advise_on(measured, **options)).decode()


def _picture(html):
    found = re.search(r"<svg viewBox.*?</svg>", html, re.DOTALL)
    return ElementTree.fromstring(found.group(0))


def _texts(picture):
    return ["".join(each.itertext()) for each in picture.iter("text")]


def _groups(picture, name):
    return [each for each in picture.iter("g") if each.get("data-key") == name]


@pytest.fixture
def measured(line, measurements):
    """Return measurements of four methods, one of which could not be had."""
    return measurements(
        line(*PLAIN),
        line(*FULL),
        line(*POOL),
        Measured(method="offload", why_not="a model on a CPU is on the host already"),
        budget_mib=800,
    )


def test_the_verdict_stands_at_the_top(measured):
    """The answer in a line, set off, and then all paragraphs of the text."""
    html = unescape(_html(measured))
    advice = advise_on(measured)
    said = verdict(advice)
    first = f'<p class="verdict">{short_answer(advice)}</p>'
    assert html.index(first) < html.index(f"<p>{said[0]}</p>")
    assert all(f"<p>{each}</p>" in html for each in said)
    assert html.index(said[-1]) < html.index("<svg viewBox") < html.index("<table")


def test_nothing_is_loaded(measured):
    """No address of another file stands anywhere."""
    html = _html(measured)
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    assert "http://" not in html
    assert "https://" not in html


def test_a_name_is_no_markup(measured):
    """What the user calls the model cannot change the page."""
    html = _html(replace(measured, model="<script>alert(1)</script>"))
    assert "<script>alert" not in html


def test_every_method_has_a_line_and_its_dots(measured):
    """In both panels; a dot for each step that ran, where the axis shows its memory."""
    picture = _picture(_html(measured))
    for name in ("plain training", "full", "pool"):
        groups = _groups(picture, name)
        titles = [t.text for g in groups for t in g.iter("title")]
        assert sum(each.startswith(f"{name}, ran") for each in titles) >= 6
        lines = [p for g in groups for p in g.iter("path") if p.get("stroke-width")]
        assert len(lines) >= 2
    assert not _groups(picture, "offload")
    assert _texts(picture).count("full") == 2


def test_dots_lie_where_steps_ran(measured):
    """Of plain training at a batch of 8: 720 MiB, and 8 ÷ 0.21 s."""
    picture = _picture(_html(measured))
    titles = [t.text for t in picture.iter("title")]
    assert "plain training, ran\nbatch 8: 38.1 samples/s" in titles
    assert "plain training, ran\nbatch 8: 720.0 MiB" in titles


def test_the_memory_asked_about_is_a_rule(measured):
    """Down both panels, at its place on the axis, named once."""
    picture = _picture(_html(measured))
    rules = [p for p in picture.iter("path") if p.get("stroke-dasharray") == "7 4"]
    assert len(rules) == 2
    assert len({re.match(r"M([\d.]+)", p.get("d"))[1] for p in rules}) == 1
    assert _texts(picture).count("asked about: 800.0 MiB") == 1


def test_flips_are_marked(measured):
    """Where another method becomes the fastest it says which."""
    texts = _texts(_picture(_html(measured)))
    assert "from here on full" in texts
    assert "from here on plain training" in texts


def test_what_was_not_run_is_faint(line, measurements):
    """A line goes on fainter beyond the largest batch that ran."""
    measured = measurements(
        line(*PLAIN), line(*FULL, batches=(2, 4, 8, 16)), budget_mib=700
    )
    picture = _picture(_html(measured))
    lines = [g for g in _groups(picture, "full") if g.get("opacity") is not None]
    assert {float(each.get("opacity")) for each in lines} == {0.35, 1.0}


def test_names_do_not_cover_each_other(line, measurements):
    """Lines that end at the same height have their names one over the other."""
    measured = measurements(
        *(line(name, *PLAIN[1:]) for name in ("none", "full", "lean", "sdpa")),
        budget_mib=800,
    )
    picture = _picture(_html(measured))
    for name in ("full", "lean", "sdpa"):
        assert _texts(picture).count(name) == 2
    heights = sorted(
        float(each.get("y"))
        for each in picture.iter("text")
        if each.text in ("full", "lean", "sdpa", "plain training")
    )
    gaps = [b - a for a, b in pairwise(heights)]
    assert min(gaps) >= 14.9


def test_every_method_looks_like_no_other():
    """Without its colour, too, among those of the same colour."""
    assert set(LOOKS) == set(METHODS)
    assert len({each[:3] for each in LOOKS.values()}) == len(LOOKS)
    assert len({(e.colour, e.dash) for e in LOOKS.values()}) == len(LOOKS)


def test_tables_can_be_sorted_by_numbers(measured):
    """Cells carry the number they show; what is not known sorts as the least."""
    html = _html(measured)
    rows = re.search(r'<table id="methods">(.*?)</table>', html, re.DOTALL)[1]
    assert 'data-number="33.0">33<' in rows
    assert "inf" not in re.findall(r'data-number="([^"]*)"', rows)
    assert "nan" not in re.findall(r'data-number="([^"]*)"', html)


def test_fits_are_told(measured):
    """What a sample takes and what does not depend on it, as the lines have it."""
    html = _html(measured)
    rows = re.search(r'<table id="fits">(.*?)</table>', html, re.DOTALL)[1]
    for said in ("40.0 MiB", "400.0 MiB", "20 ms", "50 ms", "1.0000"):
        assert f">{said}<" in rows


def test_the_rule_is_explained_with_its_numbers(measured):
    """Free bytes for a second of fixed time, and what each method saves for one."""
    html = unescape(_html(measured))
    reading = html[html.index('id="reading"') :]
    assert "50 ms of fixed time" in reading
    # 400 MiB ÷ 0.05 s; 28 MiB ÷ 0.007 s
    assert "7.81 GiB for each second" in reading
    assert "full (3.91 GiB for each second)" in reading
    assert "not above it" in reading


def test_a_step_without_fixed_time_is_explained(line, measurements):
    """There larger batches win nothing, and no bytes are divided by nothing."""
    measured = measurements(
        line("none", 40, 400, 0.02, 0.0), line(*FULL), budget_mib=800
    )
    html = unescape(_html(measured))
    assert "no fixed time" in html or "of fixed time" in html
    assert "inf" not in re.findall(r">([^<]*)</td>", html)


@pytest.mark.parametrize("budget_mib", [300, 420, 800, 5000])
def test_every_memory_has_a_page(measured, budget_mib):
    """Also one that nothing fits into, and one that all do."""
    _picture(_html(measured, budget_bytes=budget_mib * 2**20))


def test_without_timings_there_is_nothing_to_draw(line, measurements):
    """The page then says so, and tells what was measured of memory."""
    measured = measurements(
        line(*PLAIN, rounds=0), line(*FULL, rounds=0), budget_mib=800, n_rounds=0
    )
    html = _html(measured)
    assert "nothing to draw" in html
    assert "<svg viewBox" not in html
    assert "240.0 MiB too much" in html


def test_measurements_written_and_read_make_the_same_page(measured, tmp_path):
    """The page is drawn from plain data."""
    measured.write(tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text())
    assert _html(read(tmp_path / "m.json")) == _html(measured)


def test_a_memory_far_above_all_that_ran_has_a_page(measured):
    """No line reaches so far: the page says so."""
    html = unescape(_html(measured, budget_bytes=90 * 2**30))
    assert "nothing to draw" in html


def test_a_recommended_method_is_drawn_though_no_line_fits(line, measurements):
    """Through what was timed: a rule that names it has a line and dots beside it."""
    odd = line("accumulate", 5, 400, 0.01, 0.1)
    timed = tuple(
        replace(each, rounds=tuple((1 + 0.6 * (i % 2)) * s for s in each.rounds))
        for i, each in enumerate(odd.timed)
    )
    measured = measurements(
        line("none", 20, 400, 0.03, 0.1), replace(odd, timed=timed), budget_mib=520
    )
    advice = advise_on(measured)
    assert advice.at_sample.name == "accumulate"
    assert advice.models["accumulate"].refused
    picture = _picture(page(advice).decode())
    assert any("from here on accumulate" in each for each in _texts(picture))
    groups = _groups(picture, "accumulate")
    titles = [t.text for g in groups for t in g.iter("title")]
    assert sum(each.startswith("accumulate, ran") for each in titles) >= 6
    lines = [p for g in groups for p in g.iter("path") if p.get("stroke-width")]
    assert len(lines) >= 2
