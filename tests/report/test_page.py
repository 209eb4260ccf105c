"""The page of a run: what it says, what it draws, and that a browser shows it."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest

import mimose
from mimose.exceptions import MimoseError
from mimose.record_file import read_records
from mimose.records import StepRecord
from mimose.report.page import write_page
from mimose.report.page.headline import facts, headline, verdict, written
from mimose.report.page.scales import Extent, around_zero, extent, ticks
from mimose.report.page.steps import Steps, formula, n_elements
from mimose.report.page.thinning import groups
from mimose.report.shapes import split_runs

CHROMIUM = shutil.which("chromium")
MIB = 2**20


def _record(step=0, length=100, n_layers=4, **changes):
    """Make a planned step that recomputes its first layer."""
    return StepRecord(
        **{
            "step": step,
            "shape": {"ids.0": 8, "ids.1": length},
            "phase": "plan",
            "actions": ("recompute", *["keep"] * (n_layers - 1)),
            "budget_bytes": 1000 * MIB,
            "start_bytes": 100 * MIB,
            "predicted_peak_bytes": (100.0 + length) * MIB,
            "observed_peak_bytes": (102 + length) * MIB,
            "cache_hit": step % 2 == 1,
            "plan_seconds": 0.001,
            "recomputed_flops": 10**9 * length,
            "events": tuple(f"model.layers.{i}#0" for i in range(n_layers)),
            "seconds": 0.01,
            **changes,
        }
    )


def _many(n_steps, **changes):
    return [_record(i, 50 + i % 701, **changes) for i in range(n_steps)]


def _extremes():
    """Make runs of every odd kind, by name."""
    unusual = {"phase": "fallback", "retries": 1, "reason": "a <b>bold</b> </script>"}
    return {
        "one step": [_record()],
        "one that only measured": [
            _record(phase="collect", predicted_peak_bytes=None, seconds=None)
        ],
        "no peaks": [
            _record(i, 90 + i, observed_peak_bytes=None, retries=i % 2)
            for i in range(5)
        ],
        "neither peaks nor predictions": [
            _record(i, observed_peak_bytes=None, predicted_peak_bytes=None)
            for i in range(3)
        ],
        "no layers": [_record(actions=(), events=(), seconds=None, recomputed_flops=0)],
        "no names": [_record(i, 90 + i, events=()) for i in range(4)],
        "hundreds of layers": _many(20, n_layers=400),
        "many steps": [
            *_many(6000),
            _record(6000, 5000, observed_peak_bytes=2000 * MIB, **unusual),
        ],
        "no sizes": [_record(i, shape={}) for i in range(3)],
        "an unknown action": [_record(actions=("bake",) * 4)],
        "several runs": [
            *_many(5),
            *_many(3, n_layers=2, budget_bytes=500 * MIB),
            *(_record(i, shape={"x.0": 4, "y.2": 30 + i}) for i in range(4)),
        ],
        "strange names": [
            _record(i, 90 + i, events=tuple(f"<i>{'a.' * 30}{j}&" for j in range(4)))
            for i in range(2)
        ],
    }


def _page(records, tmp_path, **options):
    """Write a page; return its text."""
    path = tmp_path / "page.html"
    write_page(records, path, **options)
    return path.read_text(encoding="utf-8")


def _sections(page):
    """Return the figures by name, as HTML."""
    return dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL))


def _pictures(page):
    """Return the pictures by name; what is no sound XML is an error."""
    return {
        name: ElementTree.fromstring(re.search(r"<svg viewBox.*</svg>", html, re.S)[0])
        for name, html in _sections(page).items()
        if "<svg viewBox" in html
    }


def _marks(picture, name):
    """Return what a series' marks tell under the mouse, line by line."""
    return [
        mark.findtext("title").splitlines()
        for group in picture.iter("g")
        if group.get("data-key") == name
        for mark in group.iter("path")
        if mark.find("title") is not None
    ]


def _legend(page, figure):
    """Return the names in a figure's legend."""
    keys = re.findall(
        r'<button aria-pressed="true" data-key="(.*?)">', _sections(page)[figure]
    )
    return [unescape(key) for key in keys]


def _caption(page, figure):
    return unescape(
        re.search(r'<p class="caption">(.*?)</p>', _sections(page)[figure])[1]
    )


def _texts(picture):
    """Return what is written in a picture."""
    return [text.text for text in picture.iter("text")]


def _rows(page, table):
    """Return the cells of a table's rows."""
    if f'id="{table}"' not in page:
        return []
    body = page.split(f'id="{table}"')[1].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body)[1:]
    return [re.findall(r"<td.*?>(.*?)</td>", row) for row in rows]


@pytest.fixture(scope="module")
def trained(toys, tmp_path_factory):
    """Records of a model that really trained, within a budget it has to work for."""
    path = tmp_path_factory.mktemp("run") / "records.jsonl"
    n_rows = [8, 40, 16, 64, 24, 48, 32, 56, 64, 40, 64, 12]
    batches = [toys.inputs(n) for n in n_rows]
    with toys.counting() as meter:
        budget = toys.budget_between(toys.chain(), [toys.inputs(64)] * 2, 0.5, meter)
        model = toys.chain()
        with mimose.attach(model, budget, meter=meter, record_to=path):
            toys.train(model, batches)
    return read_records(path)


# ------------------------------------------------------------------ in a browser

_PROBE = """
<script>
const probe = {errors: [], sorted: [], hidden: []};
window.addEventListener("error", e => probe.errors.push(e.message));
document.addEventListener("securitypolicyviolation",
  e => probe.errors.push("would load " + e.blockedURI));
window.addEventListener("load", async () => {
  probe.wide = [...document.querySelectorAll(".picture svg")].map(
    svg => svg.getBBox().x >= 0 && svg.getBBox().width <= 1100);
  const key = document.querySelector("#peaks .legend button[data-key=planned]");
  const marks = document.querySelector("#peaks g[data-key=planned]");
  for (let i = 0; i < 2; i++) {
    key.click();
    probe.hidden.push(getComputedStyle(marks).display === "none");
  }
  const cells = column => [...document.querySelectorAll(
    "#shapes tbody tr")].map(row => Number(row.cells[column].dataset.number));
  probe.sorted.push(cells(0));
  const head = document.querySelectorAll("#shapes th button")[2];
  for (let i = 0; i < 2; i++) {
    head.click();
    await new Promise(done => setTimeout(done, 50));
    probe.sorted.push(cells(2));
  }
  document.body.innerHTML = "";
  document.body.append(JSON.stringify(probe));
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_everything(trained, tmp_path):
    """Legends hide, tables sort, nothing stands out of its picture or is loaded."""
    path = tmp_path / "probed.html"
    write_page(trained, path)
    page = path.read_text(encoding="utf-8").replace("<body>", f"<body>{_PROBE}", 1)
    path.write_text(page, encoding="utf-8")

    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--virtual-time-budget=30000",
            "--dump-dom",
            f"{path.as_uri()}#sort=shapes.0.asc",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )

    found = json.loads(re.search(r"<body>(.*)</body>", done.stdout)[1])
    assert [] == found["errors"]
    assert [] == [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert [True] * 5 == found["wide"]
    assert [True, False] == found["hidden"]
    addressed, descending, ascending = found["sorted"]
    assert sorted(addressed) == addressed
    assert sorted(descending, reverse=True) == descending
    assert sorted(ascending) == ascending
    assert len(set(ascending)) > 1


# ------------------------------------------------------------------ the document


def test_nothing_is_loaded(trained, tmp_path):
    """The page names no address but itself, and forbids what it does not name."""
    page = _page(trained, tmp_path)
    assert "://" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|img|iframe|object)[^>]*\ssrc=", page)
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]


def test_text_of_the_run_is_no_markup(tmp_path):
    """Whatever a reason, a layer or the title holds, it is shown as text."""
    page = _page(_extremes()["many steps"], tmp_path, title="<script>alert(1)</script>")
    assert "<b>bold" not in page
    assert "&lt;b&gt;bold&lt;/b&gt; &lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert 1 == page.count("</script>")
    strange = _pictures(_page(_extremes()["strange names"], tmp_path))["layers"]
    assert "…a.0&" in _texts(strange)


@pytest.mark.parametrize("name", _extremes())
def test_every_kind_of_run_has_a_page(name, tmp_path):
    """Titles of all figures and tables are there, drawn or not; no number is NaN."""
    page = _page(_extremes()[name], tmp_path)
    assert 7 == page.count("<h2>")
    assert ["peaks", "predictions", "layers", "price", "course"] == [*_sections(page)]
    for picture in _pictures(page).values():
        assert not re.search(r"\b(nan|inf)\b", ElementTree.tostring(picture).decode())


def test_half_a_character_is_a_question_mark(tmp_path):
    """Text that no encoding has does not keep a page from being written."""
    page = _page([_record(phase="fallback", reason="a \ud800 b")], tmp_path)
    assert "a ? b" in page


def test_a_page_needs_records(tmp_path):
    """There is nothing to say of no steps."""
    with pytest.raises(MimoseError, match="no steps"):
        write_page([], tmp_path / "page.html")
    assert [] == list(tmp_path.iterdir())


def test_axes_say_what_they_show(trained, tmp_path):
    """Every axis has a title, and those of memory a unit."""
    pictures = _pictures(_page(_many(30), tmp_path))
    assert {"growth of a step (MiB)", "size of the batch: ids.1"} <= {
        *_texts(pictures["peaks"])
    }
    assert "predicted growth (MiB)" in _texts(pictures["predictions"])
    course = _texts(pictures["course"])
    assert {"peak memory (MiB)", "error (% of growth)", "rate (%)", "step"} <= {*course}
    pictures = _pictures(_page(trained, tmp_path))
    assert "growth of a step (KiB)" in _texts(pictures["peaks"])


# ------------------------------------------------------------------ axes


def test_an_axis_begins_near_what_is_flat():
    """Values that differ little, far above 0, fill their axis."""
    axis = extent([500.0 + i for i in range(11)])
    assert 490 < axis.low < 500
    assert 510 < axis.high < 520
    assert 0.0 == extent([3.0, 10.0]).low


def test_level_values_look_level():
    """Readings that differ by a thousandth do not look like a mountain range."""
    axis = extent([1000.0, 1001.0])
    assert axis.high - axis.low > 20


@pytest.mark.parametrize(("line", "is_drawn"), [(120.0, True), (3000.0, False)])
def test_a_line_far_off_does_not_squeeze_the_values(line, is_drawn):
    """Near, it is part of the axis; far, it is left to words."""
    axis = extent([float(i) for i in range(101)], line)
    assert is_drawn == axis.has_line
    assert axis.high < 140


def test_a_few_values_far_off_do_not_squeeze_the_others():
    """They stand at the end of the axis, as its two neighbours say."""
    axis = extent([*map(float, range(1000)), 50_000.0])
    assert axis.high < 1100
    assert (1, 1.0) == (axis.beyond(50_000.0), axis.place(50_000.0))
    assert around_zero([0.1, -0.2] * 100 + [8.0]).beyond(8.0) == 1


@pytest.mark.parametrize(
    ("low", "high", "written"),
    [
        (0.0, 10.0, ["0", "5", "10"]),
        (0.98, 1.02, ["0.98", "1.00", "1.02"]),
        (-120.0, 30.0, ["-100", "-50", "0"]),
        (0.0, 100_000.0, ["0", "50,000", "100,000"]),
    ],
)
def test_round_numbers_stand_at_an_axis(low, high, written):
    """Steps of 1, 2 or 5, with as many decimals as they need."""
    assert written == [text for _, text in ticks(Extent(low, high), 3)]


@pytest.mark.parametrize(
    ("n_steps", "written"),
    [(1, ["0"]), (3, ["0", "1", "2"]), (100, ["0", "20", "40", "60", "80"])],
)
def test_steps_are_counted_in_whole_numbers(n_steps, written, tmp_path):
    """At the axis of the steps no number stands that no step has."""
    axis = Extent(-1.0, float(n_steps), counts=(0, n_steps - 1))
    assert written == [text for _, text in ticks(axis, 8)]
    texts = _texts(_pictures(_page(_many(n_steps), tmp_path))["course"])
    end = texts.index("rate (%)")
    assert written == texts[end - len(written) : end]
    assert "-1" not in texts


# ------------------------------------------------------------------ what is drawn


def test_growth_stands_at_the_size_of_the_batch(tmp_path):
    """Each step is a dot; steps over the budget have a ring."""
    records = [_record(i, 100 + i) for i in range(3)]
    records[2] = replace(records[2], observed_peak_bytes=1010 * MIB)
    page = _page(records, tmp_path)
    picture = _pictures(page)["peaks"]
    assert ["step 0 (plan)", "step 1 (plan)", "step 2 (plan)"] == [
        mark[0] for mark in _marks(picture, "planned")
    ]
    (over,) = _marks(picture, "over the budget")
    assert ["over the budget", "step 2 (plan)", "ids.1=102"] == over[:3]
    assert ["planned", "predicted", "over the budget"] == _legend(page, "peaks")


def _small(n_steps, **changes):
    """Make a small model's run: 500 MiB held, a growth of 5 to 20, 3 GiB of budget."""
    return [
        _record(
            i,
            20 + 10 * (i % 5),
            **{
                "budget_bytes": 3 * 2**30,
                "start_bytes": 500 * MIB,
                "predicted_peak_bytes": (505.0 + 3 * (i % 5)) * MIB,
                "observed_peak_bytes": (505 + 3 * (i % 5)) * MIB + (i % 7) * MIB // 10,
                "actions": ("keep",) * 4,
                **changes,
            },
        )
        for i in range(n_steps)
    ]


def test_a_budget_far_off_does_not_hide_the_growth(tmp_path):
    """Growth fills the picture; the budget is told in words, and no line is drawn."""
    page = _page(_small(1180), tmp_path)
    picture = _pictures(page)["peaks"]
    heights = [
        float(number)
        for group in picture.iter("g")
        if group.get("data-key") == "planned"
        for mark in group.iter("path")
        for number in re.findall(r"^M[\d.]+ ([\d.]+)", mark.get("d"))
    ]
    assert max(heights) - min(heights) > 150  # of 330 pixels
    assert "what the budget leaves" not in _texts(picture)
    note = "the budget leaves 2.51 GiB, 146 × the highest step ↑"
    assert note in _texts(picture)
    assert "budget of 3.00 GiB leaves 2.51 GiB for it" in _caption(page, "peaks")
    course = _texts(_pictures(page)["course"])
    assert "budget 3.00 GiB, beyond this axis ↑" in course
    assert "0" not in course[: course.index("peak memory (MiB)")]


def test_a_budget_that_is_near_is_a_line(tmp_path):
    """With its label."""
    records = [_record(i, 500 + i) for i in range(300)]
    pictures = _pictures(_page(records, tmp_path))
    assert "what the budget leaves" in _texts(pictures["peaks"])
    assert "budget 1000.0 MiB" in _texts(pictures["course"])


def test_what_is_left_is_a_band_where_starts_differ(tmp_path):
    """No step that kept the budget lies above all that was left for any."""
    records = [
        _record(i, 400 + i % 50, start_bytes=(100 + i) * MIB, observed_peak_bytes=n)
        for i, n in enumerate([990 * MIB] * 300)
    ]
    page = _page(records, tmp_path)
    said = "leaves 750.5 MiB for it (604.0 MiB to 897.0 MiB, by step)"
    assert said in _caption(page, "peaks")
    (band,) = (
        re.fullmatch(r"M92 ([\d.]+)H1080V([\d.]+)H92z", path.get("d"))
        for path in _pictures(page)["peaks"].iter("path")
        if path.get("opacity") == "0.08"
    )
    top, bottom = float(band[1]), float(band[2])
    assert bottom - top > 100  # pixels
    heights = [
        float(re.match(r"M[\d.]+ ([\d.]+)", path.get("d"))[1])
        for group in _pictures(page)["peaks"].iter("g")
        if group.get("data-key") == "planned"
        for path in group.iter("path")
    ]
    assert top < min(heights) < bottom


def test_equal_steps_share_a_mark(tmp_path):
    """One for each shape and phase, that tells how many, and from where to where."""
    marks = _marks(_pictures(_page(_small(1180), tmp_path))["peaks"], "planned")
    assert 5 == len(marks)
    assert [
        "236 steps (plan), 0 to 1,175",
        "ids.1=20",
        "median 5.3 MiB",
        "from 5.0 MiB to 5.6 MiB",
    ] == marks[0]


def test_marks_stand_for_every_step_once():
    """No step is lost, none counted twice, whatever the number of shapes."""
    records = _many(9000)
    records[::10] = [replace(record, phase="fallback") for record in records[::10]]
    steps = Steps(records)
    parts = groups(steps, np.array(steps.elements, dtype=float), steps.growth)
    assert list(range(9000)) == sorted(np.concatenate([p.positions for p in parts]))
    assert len(parts) <= 400
    assert {"plan", "fallback"} == {part.phase for part in parts}


def test_one_size_is_a_sentence(tmp_path):
    """There is nothing to draw against a size that never changes."""
    page = _page([_record(i) for i in range(200)], tmp_path)
    assert "peaks" not in _pictures(page)
    assert "All batches were of one size" in _caption(page, "peaks")
    assert "200 steps grew by 102.0 MiB (median)" in _caption(page, "peaks")
    assert "200 steps were predicted to grow by about" in _caption(page, "predictions")


def test_errors_are_of_the_growth(tmp_path):
    """What was held before counts in neither."""
    records = [_record(0, 100), _record(1, 200)]
    page = _page(records, tmp_path)
    assert "observed over predicted (%)" in _texts(_pictures(page)["predictions"])
    assert 2 == len(_marks(_pictures(page)["predictions"], "planned"))
    assert [0.02, 0.01] == pytest.approx(
        Steps([_record(0, 100), _record(1, 200)]).errors
    )


# ------------------------------------------------------------------ the map of layers


def test_the_map_shows_the_last_plan_of_each_shape(tmp_path):
    """Shapes go from small to large; a layer that did not run is blank."""
    records = [
        _record(0, 300),
        _record(1, 100, actions=("recompute",) * 4, phase="collect"),
        _record(2, 200, actions=("keep", "keep"), events=("model.layers.0#0", "new#0")),
        _record(3, 300, actions=("keep", "keep", "recompute", "keep")),
    ]
    page = _page(records, tmp_path)
    keep, redo, measure = _legend(page, "layers")
    assert "keep: its activations are held until backward" == keep
    assert "recompute: its forward runs a second time in backward" == redo
    assert measure.startswith("recompute, to measure")
    picture = _pictures(page)["layers"]
    assert [["model.layers.2", "300", redo]] == _marks(picture, redo)
    rows = [f"model.layers.{i}" for i in range(4)]
    assert [[row, "100", measure] for row in rows] == _marks(picture, measure)
    assert [
        ["model.layers.0", "200 … 300", keep],
        ["model.layers.1", "300", keep],
        ["model.layers.3", "300", keep],
        ["new", "200", keep],
    ] == _marks(picture, keep)


@pytest.mark.parametrize(
    ("action", "phase", "sentence"),
    [
        ("keep", "plan", "all 4 layer calls are kept: nothing had to be recomputed"),
        ("recompute", "fallback", "recomputed: the budget left no room to keep any"),
        ("recompute", "collect", "recomputed to be measured: no plan had been made"),
        ("bake", "plan", "under bake: the planner chose nothing else"),
    ],
)
def test_a_map_of_one_colour_is_a_sentence(action, phase, sentence, tmp_path):
    """It says what every layer does, and why."""
    records = [_record(i, 90 + i, actions=(action,) * 4, phase=phase) for i in range(3)]
    page = _page(records, tmp_path)
    assert "layers" not in _pictures(page)
    assert "In each of the 3 shapes" in _caption(page, "layers")
    assert sentence in _caption(page, "layers")


def test_shapes_with_one_plan_share_a_column(tmp_path):
    """If they are neighbours; the caption tells how many there were."""
    records = [
        _record(i, 90 + i, actions=("recompute" if i > 6 else "keep", *["keep"] * 3))
        for i in range(14)
    ]
    page = _page(records, tmp_path)
    assert "14 shapes make 2 columns" in _caption(page, "layers")
    assert {"90 … 96", "97 … 103"} <= {*_texts(_pictures(page)["layers"])}


def test_long_names_lose_what_they_share(tmp_path):
    """Of names that are too long, the part that differs is left."""
    events = tuple(
        f"wrapper.module.model.decoder.layers.{i}.mixture#0" for i in range(4)
    )
    texts = _texts(_pictures(_page([_record(events=events)], tmp_path))["layers"])
    assert [f"…layers.{i}…" for i in range(4)] == texts[:4]


def test_large_maps_are_cut_and_say_so(tmp_path):
    """Some hundred columns and rows are drawn, whatever there is."""
    rng = np.random.default_rng(0)
    records = [
        _record(
            i,
            50 + i,
            actions=tuple(rng.choice(["keep", "recompute"], 300).tolist()),
            events=tuple(f"model.layers.{k}#0" for k in range(300)),
        )
        for i in range(400)
    ]
    page = _page(records, tmp_path)
    assert "120 of these are drawn, evenly chosen by size" in _caption(page, "layers")
    assert "100 of these rows are drawn" in _caption(page, "layers")
    assert len(_sections(page)["layers"]) < 250_000


# ------------------------------------------------------------------ long runs


@pytest.fixture(scope="module")
def long_run():
    """A hundred thousand steps of 701 shapes, with a few that stand out."""
    kinds = _many(701)
    values = [{f: getattr(r, f) for f in StepRecord.__slots__} for r in kinds]
    records = [StepRecord(**{**values[i % 701], "step": i}) for i in range(100_000)]
    records[40_000] = replace(records[40_000], observed_peak_bytes=5000 * MIB)
    records[50_000] = replace(records[50_000], retries=3)
    records[60_000] = replace(records[60_000], observed_peak_bytes=950 * MIB)
    records[70_000] = replace(records[70_000], phase="fallback")
    records[70_000] = replace(records[70_000], reason="size 811 is beyond 750")
    records[70_002] = replace(records[70_002], phase="fallback")
    records[70_002] = replace(records[70_002], reason="size 813 is beyond 750")
    return records


def test_a_page_does_not_grow_with_the_run(long_run, tmp_path):
    """All of it, with what draws it, is less than a MB at a hundred thousand steps."""
    few = len(_page(long_run[:5000], tmp_path).encode())
    many = len(_page(long_run, tmp_path).encode())
    assert many < 1_000_000
    assert many < 1.5 * few


def test_extremes_survive_a_long_run(long_run, tmp_path):
    """Steps over the budget, run again or predicted worst are marked by themselves."""
    page = _page(long_run, tmp_path)
    pictures = _pictures(page)
    for figure in ("peaks", "course"):
        over = _marks(pictures[figure], "over the budget")
        again = _marks(pictures[figure], "run again")
        assert ["step 40,000 (plan)"] == [mark[1] for mark in over]
        assert ["step 50,000 (plan)"] == [mark[1] for mark in again]
    worst = {mark[1] for mark in _marks(pictures["predictions"], "worst of the plans")}
    assert {"step 40,000 (plan)", "step 60,000 (plan)"} <= worst
    assert "highest step: 4.79 GiB ↑" in _texts(pictures["peaks"])
    assert re.search(r"highest: \+\d,\d+ % ↑", " ".join(_texts(pictures["course"])))


def test_the_highest_of_very_many_steps_over_are_marked(tmp_path):
    """And the page says how many there were."""
    records = [
        _record(i, 50 + i % 9, observed_peak_bytes=(1001 + i) * MIB)
        for i in range(3000)
    ]
    page = _page(records, tmp_path)
    marks = _marks(_pictures(page)["peaks"], "over the budget")
    assert {f"step {i:,} (plan)" for i in range(2800, 3000)} == {m[1] for m in marks}
    said = "Of 3,000 steps over the budget the 200 highest are ringed."
    assert said in _caption(page, "peaks")


def test_tables_of_a_long_run_are_short(long_run, tmp_path):
    """Neighbouring shapes that went the same way share a row; so do like remarks."""
    page = _page(long_run, tmp_path)
    shapes = _rows(page, "shapes")
    assert len(shapes) < 20
    assert 701 == sum(int(row[1]) for row in shapes)
    assert 100_000 == sum(int(row[2].replace(",", "")) for row in shapes)
    unusual = _rows(page, "unusual")
    assert 3 == len(unusual)
    (fell,) = [row for row in unusual if row[3] == "fallback"]
    assert ["2", "70,000", "70,002"] == fell[:3]
    assert fell[4] in ("size 811 is beyond 750", "size 813 is beyond 750")


def test_tables_are_bounded(tmp_path):
    """A hundred rows at most; steps over the budget are listed before others."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    records = [
        _record(
            i, 50 + i, n_layers=1 + i % 2, reason=f"{letters[i % 26]}{letters[i // 26]}"
        )
        for i in range(300)
    ]
    records[7] = replace(records[7], observed_peak_bytes=1001 * MIB)
    page = _page(records, tmp_path)
    assert (100, 100) == (len(_rows(page, "shapes")), len(_rows(page, "unusual")))
    assert "The 100 of the largest shapes are listed" in page
    assert "100 of 300 rows are listed" in page
    assert any("over the budget; ha" == row[4] for row in _rows(page, "unusual"))


def test_cards_are_few(tmp_path):
    """However many phases there were, they share one."""
    records = [
        _record(i, 90 + i, phase=phase, retries=1)
        for i, phase in enumerate(["collect", "step_down", "plan", "plan", "fallback"])
    ]
    cards = list(facts(headline(Steps(records))))
    assert len(cards) <= 9
    assert (
        "steps by phase",
        "2 planned",
        "1 measuring, 1 first plans, 1 safest plan",
    ) == cards[-1]


def test_rates_are_over_the_last_steps(tmp_path):
    """The first steps' rates are over those there are; later, over fifty."""
    records = [_record(i, cache_hit=i >= 50) for i in range(150)]
    picture = _pictures(_page(records, tmp_path))["course"]
    (line,) = (
        group.find("path").get("d")
        for group in picture.iter("g")
        if group.get("data-key") == "plan from the cache"
    )
    heights = [float(y) for y in re.findall(r" ([\d.]+)", line)]
    first, last = heights[0], heights[-1]
    shares = [(first - heights[i]) / (first - last) for i in (0, 49, 74, 99, 149)]
    assert [0, 0, 0.5, 1, 1] == pytest.approx(shares, abs=0.01)


def test_recomputation_is_summed_up_by_phase(tmp_path):
    """Bars are FLOPs from the records and seconds by the host's clock."""
    records = [_record(0, phase="collect"), _record(1), _record(2)]
    texts = _texts(_pictures(_page(records, tmp_path))["price"])
    assert [
        *("time in steps (ms)", "collect", "10 ms, 1 step"),
        *("plan", "20 ms, 2 steps", "choosing plans", "3 ms"),
        *("recomputed (GFLOP)", "collect", "100 GFLOP", "plan", "200 GFLOP"),
    ] == texts


# ------------------------------------------------------------------ what is said


def test_headline_follows_from_the_records(trained):
    """Counts and extremes are those of the records."""
    numbers = headline(Steps(trained))
    assert (12, 1, 9) == (numbers.steps, numbers.runs, numbers.shapes)
    assert numbers.steps == sum(numbers.phases.values())
    assert max(r.observed_peak_bytes for r in trained) == numbers.peak_bytes
    assert 0 == numbers.steps_over
    assert sum(r.recomputed_flops for r in trained) == numbers.recomputed_flops
    assert 0 < numbers.collected_flops <= numbers.recomputed_flops


def test_headline_of_planned_steps():
    """The error is over planned steps alone; use is of each run's own budget."""
    records = [
        _record(0, 100),
        _record(1, 100, phase="fallback", observed_peak_bytes=900 * MIB),
        _record(2, 100, observed_peak_bytes=1001 * MIB, retries=1),
        _record(3, 100, observed_peak_bytes=None),
    ]
    numbers = headline(Steps(records))
    assert (3, 1, 1) == (numbers.steps_read, numbers.steps_over, numbers.retries)
    assert pytest.approx((0.02 + 8.01) / 2) == numbers.error_p50
    assert 1.001 == numbers.budget_use
    assert (0.25, 0.5) == (numbers.recompute_share, numbers.cache_hit_rate)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "one step",
            "1 step stayed within the budget of 1000.0 MiB; the highest peak took "
            "20.2% of it.",
        ),
        (
            "no peaks",
            "No peak could be read: whether the budget of 1000.0 MiB was kept is not "
            "known.",
        ),
        (
            "many steps",
            "1 of 6,001 steps went over the budget of 1000.0 MiB; the highest peak "
            "took 200.0% of it.",
        ),
        (
            "several runs",
            "All 12 steps stayed within the budget of their run; the highest peak took "
            "30.8% of it.",
        ),
    ],
)
def test_the_verdict_is_a_sentence(name, sentence, tmp_path):
    """Whether the budget was kept is said first, in words."""
    records = _extremes()[name]
    assert sentence == verdict(headline(Steps(records)))
    assert sentence in _page(records, tmp_path)


def test_facts_leave_out_what_is_not_known():
    """Without peaks there is neither a prediction error nor a count of steps over."""
    names = [name for name, _, _ in facts(headline(Steps(_extremes()["no peaks"])))]
    assert "highest peak" in names
    assert not {"prediction off by", "steps over the budget"} & set(names)


def test_steps_that_were_not_timed_say_so():
    """Choosing plans is timed in every step, the steps' own time may be unknown."""
    untimed = facts(headline(Steps([_record(seconds=None)])))
    timed = facts(headline(Steps([_record()])))
    said = [
        written(*fact[1:])
        for own in (untimed, timed)
        for fact in own
        if fact[0] == "choosing plans took"
    ]
    assert ["1 ms, steps not timed", "1 ms of 10 ms in steps"] == said


def test_reserved_bytes_are_shown_where_the_budget_is_about_them(tmp_path):
    """A shape whose requested peak was low shows the reserved one that went over."""
    records = [
        _record(i, 100 + i, reserved_peak_bytes=(900 + 50 * i) * MIB) for i in range(4)
    ]
    page = _page(records, tmp_path)
    largest = _rows(page, "shapes")[0]
    assert {"1.03 GiB", "105.0%"} <= set(largest)
    assert "the highest peak is of reserved bytes" in page
    (over,) = _marks(_pictures(page)["course"], "over the budget")
    assert "reserved 1.03 GiB, of a budget of 1000.0 MiB" in over


def test_a_file_of_two_devices_mixes_nothing_up(tmp_path):
    """What was reserved, the budget and what it leaves are all of the last run."""
    on_accelerator = [
        _record(i, 100 + i, reserved_peak_bytes=(700 + i) * MIB) for i in range(4)
    ]
    on_cpu = [_record(i, 100 + i, budget_bytes=500 * MIB) for i in range(4)]
    page = _page([*on_accelerator, *on_cpu], tmp_path)
    assert "the allocator reserved for them" not in page
    assert "The last run's budget of 500.0 MiB leaves" in _caption(page, "peaks")
    assert "peak memory (MiB)" in _texts(_pictures(page)["course"])
    page = _page([*on_cpu, *on_accelerator], tmp_path)
    assert "the last run's budget of 1000.0 MiB is about" in _caption(page, "peaks")
    assert "703.0 MiB at the most" in _caption(page, "peaks")


def test_unusual_steps_are_listed_with_their_reasons(tmp_path):
    """Measuring steps have reasons too, and are not listed."""
    records = [
        _record(0, phase="collect", reason="nothing was measured yet"),
        _record(1),
        _record(2, reason="two backwards"),
        _record(3, observed_peak_bytes=1001 * MIB),
    ]
    page = _page(records, tmp_path)
    said = {row[4] for row in _rows(page, "unusual")}
    assert {"two backwards", "over the budget"} == said


# ------------------------------------------------------------------ runs, shapes, sizes


def test_runs_are_parted_where_a_step_comes_again():
    """Steps that ended out of order are still of one run."""
    order = [0, 2, 1, 3, 0, 1, 0]
    runs = split_runs([_record(step) for step in order])
    assert [[0, 2, 1, 3], [0, 1], [0]] == [[r.step for r in run] for run in runs]


def test_sizes_that_never_vary_are_left_out():
    """The first records name all sizes, later ones those that varied by then."""
    shapes = [
        {"ids.0": 8, "ids.1": 20, "pixels.2": 32},
        {"ids.1": 30},
        {"ids.0": 7, "ids.1": 30},
        {"ids.0": 8, "ids.1": 20},
    ]
    steps = Steps([_record(i, shape=shape) for i, shape in enumerate(shapes)])
    assert [(8, 20), (8, 30), (7, 30), (8, 20)] == [
        tuple(size for _, size in shape) for shape in steps.shapes
    ]
    assert ("ids.0", "ids.1") == steps.names
    assert [160, 240, 210, 160] == steps.elements


@pytest.mark.parametrize(
    ("shape", "written", "size"),
    [
        ({"ids.1": 30}, "ids.1", 30),
        ({"ids.0": 4, "ids.1": 30}, "ids.0 × ids.1", 120),
        ({"x.0": 2, "x.2": 8, "x.3": 9}, "x.0 × x.2 × x.3", 144),
        ({"a.0": 2, "a.1": 5, "b.1": 7}, "a.0 × (a.1 + b.1)", 24),
        ({"a.0": 2, "a.1": 5, "b.0": 3}, "a.0 × a.1 + b.0", 13),
        ({"a.0": 6}, "a.0", 6),
        ({}, "1", 1),
    ],
)
def test_size_of_a_batch(shape, written, size):
    """It is the number of elements, as far as it varies, and says how it is made."""
    assert written == formula(tuple(shape))
    assert size == n_elements(tuple(shape.items()))
