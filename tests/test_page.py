"""The page of a run: what it says, what it draws, and that a browser draws it."""

import json
import re
import shutil
import subprocess

import pytest

import mimose
from mimose.exceptions import MimoseError
from mimose.page import write_page
from mimose.page.headline import facts, headline, verdict
from mimose.page.steps import Steps, formula, n_elements, split_runs
from mimose.records import StepRecord, read_records

plotly_offline = pytest.importorskip("plotly.offline", reason="needs mimose[report]")
plotly_objects = pytest.importorskip("plotly.graph_objects")

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
    """Write a page; return its text without what draws the figures."""
    path = tmp_path / "page.html"
    write_page(records, path, **options)
    text = path.read_text(encoding="utf-8")
    plotly_js = plotly_offline.get_plotlyjs()
    assert text.count(plotly_js) == 1
    return text.replace(plotly_js, "")


def _figures(page):
    """Return the figures' data and layouts, as the browser gets them."""
    return json.loads(re.search(r'<script id="figures".*?>(.*?)</script>', page)[1])


def _trace(figure, name):
    return next(trace for trace in figure["data"] if trace.get("name") == name)


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

_ODD = ("one step", "no peaks", "no layers", "several runs")
"""Runs of which every figure is drawn; of the others, the map of layers."""

_PROBE = """
<script>
const probe = {errors: [], drawn: {}, sorted: []};
window.addEventListener("error", e => probe.errors.push(e.message));
document.addEventListener("securitypolicyviolation",
  e => probe.errors.push("would load " + e.blockedURI));
window.addEventListener("load", async () => {
  const others = JSON.parse(document.getElementById("others").textContent);
  const here = JSON.parse(document.getElementById("figures").textContent);
  for (const [name, figure] of [...Object.entries(here), ...others]) {
    const place = document.getElementById(name) || document.createElement("div");
    if (!place.isConnected) {
      document.body.append(place);
      await Plotly.newPlot(place, figure.data, figure.layout);
    }
    const paths = [...place.querySelectorAll("path")].map(p => p.getAttribute("d"));
    if (paths.some(d => d && d.includes("NaN"))) probe.errors.push(name + ": NaN");
    probe.drawn[name] = place.querySelectorAll("svg.main-svg").length > 0;
  }
  const cells = column => [...document.querySelectorAll(
    "#shapes tbody tr")].map(row => Number(row.cells[column].dataset.number));
  probe.sorted.push(cells(0));
  const head = document.querySelectorAll("#shapes th button")[1];
  for (let i = 0; i < 2; i++) {
    head.click();
    await new Promise(done => setTimeout(done, 50));
    probe.sorted.push(cells(1));
  }
  document.body.innerHTML = "";
  document.body.append(JSON.stringify(probe));
});
</script>
<script id="others" type="application/json">%s</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_everything(trained, tmp_path):
    """Figures of all kinds of runs are drawn, tables sort, nothing is loaded."""
    others = [
        (f"{name}: {figure}", parts)
        for name, records in _extremes().items()
        for figure, parts in _figures(_page(records, tmp_path)).items()
        if name in _ODD or figure == "layers"
    ]
    path = tmp_path / "probed.html"
    write_page(trained, path)
    probe = _PROBE % json.dumps(others).replace("<", "\\u003c")
    page = path.read_text(encoding="utf-8").replace("<body>", f"<body>{probe}", 1)
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
    assert len(others) + 5 == len(found["drawn"])
    assert all(found["drawn"].values())
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
    assert "<b>bold" not in re.sub(r'<script id="figures".*', "", page)
    assert "&lt;b&gt;bold&lt;/b&gt; &lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert 3 == page.count("</script>")
    rows = _figures(_page(_extremes()["strange names"], tmp_path))["layers"]["data"][0]
    assert rows["y"][0].startswith("&lt;i&gt;")


@pytest.mark.parametrize("name", _extremes())
def test_every_kind_of_run_has_a_page(name, tmp_path):
    """Titles of all figures and tables are there, drawn or not; figures are valid."""
    page = _page(_extremes()[name], tmp_path)
    assert 7 == page.count("<h2>")
    drawn = set(re.findall(r'<div id="(\w+)"', page))
    assert drawn == _figures(page).keys()
    for figure in _figures(page).values():
        plotly_objects.Figure(figure)  # raises what plotly.js would not understand


def test_a_page_needs_records(tmp_path):
    """There is nothing to say of no steps."""
    with pytest.raises(MimoseError, match="no steps"):
        write_page([], tmp_path / "page.html")
    assert [] == list(tmp_path.iterdir())


def test_axes_say_what_they_show(trained, tmp_path):
    """Every axis with numbers has a title, and those of memory a unit."""
    for name, figure in _figures(_page(trained, tmp_path)).items():
        for key, axis in figure["layout"].items():
            if key.startswith(("xaxis", "yaxis")) and name not in ("layers", "price"):
                assert axis["title"]["text"]
    titles = _figures(_page(_extremes()["one step"], tmp_path))["peaks"]["layout"]
    assert "peak memory (MiB)" == titles["yaxis"]["title"]["text"]


# ------------------------------------------------------------------ what is drawn


def test_peaks_stand_at_the_size_of_the_batch(tmp_path):
    """Solid is observed, hollow predicted; steps over the budget have a ring."""
    records = [_record(i, 100 + i) for i in range(3)]
    records[2].observed_peak_bytes = 1010 * MIB
    figure = _figures(_page(records, tmp_path))["peaks"]
    assert ([100, 101, 102], [202, 203, 1010]) == tuple(
        _trace(figure, "planned")[key] for key in "xy"
    )
    assert [200, 201, 202] == _trace(figure, "predicted (plan)")["y"]
    assert [102] == _trace(figure, "over the budget")["x"]
    assert [1000] == [line["y0"] for line in figure["layout"]["shapes"]]


def test_growth_is_compared_without_what_was_held(tmp_path):
    """Predicted growth to the right, observed growth up, the diagonal between."""
    figure = _figures(_page([_record(0, 100), _record(1, 200)], tmp_path))
    planned = _trace(figure["predictions"], "planned")
    assert ([100, 200], [102, 202]) == (planned["x"], planned["y"])
    diagonal = _trace(figure["predictions"], "observed = predicted")
    assert diagonal["x"] == diagonal["y"]


def test_the_map_shows_the_last_plan_of_each_shape(tmp_path):
    """Shapes go from small to large; a layer that did not run is blank."""
    records = [
        _record(0, 300),
        _record(1, 100, actions=("recompute",) * 4, phase="collect"),
        _record(2, 200, actions=("keep", "keep"), events=("model.layers.0#0", "new#0")),
        _record(3, 300, actions=("keep", "keep", "recompute", "keep")),
    ]
    figure = _figures(_page(records, tmp_path))["layers"]
    cells = figure["data"][0]
    assert ["100", "200", "300"] == cells["x"]
    assert [*(f"model.layers.{i}#0" for i in range(4)), "new#0"] == cells["y"]
    measured = "recompute, to measure"
    assert [
        [measured, "keep", "keep"],
        [measured, "", "keep"],
        [measured, "", "recompute"],
        [measured, "", "keep"],
        ["", "keep", ""],
    ] == cells["text"]
    assert [None, 0, None] == cells["z"][4]
    assert figure["layout"]["yaxis"]["ticktext"][0] == "model.layers.0"


def test_long_names_lose_what_they_share(tmp_path):
    """Of names that are too long, the part that differs is left."""
    events = tuple(
        f"wrapper.module.model.decoder.layers.{i}.mixture#0" for i in range(4)
    )
    figure = _figures(_page([_record(events=events)], tmp_path))["layers"]
    labels = figure["layout"]["yaxis"]["ticktext"]
    assert [f"…layers.{i}…" for i in range(4)] == labels


def test_large_maps_are_cut_and_say_so(tmp_path):
    """Some hundred shapes are drawn, the largest among them."""
    page = _page(_many(700), tmp_path)
    columns = _figures(page)["layers"]["data"][0]["x"]
    assert (300, "749") == (len(columns), columns[-1])
    assert "300 of 700 shapes are drawn" in page
    assert "The 500 largest of 700 shapes are listed" in page


def test_many_steps_are_thinned_and_the_page_says_so(tmp_path):
    """Unusual steps are never left out before ordinary ones; lines keep their ends."""
    page = _page(_extremes()["many steps"], tmp_path)
    figures = _figures(page)
    assert len(_trace(figures["peaks"], "planned")["x"]) <= 3000
    assert "Of 6,001 steps 2,000 are drawn" in page
    assert [6000] == _trace(figures["course"], "safest plan")["x"]
    assert [6000] == _trace(figures["course"], "run again")["x"]
    rate = _trace(figures["course"], "plan from the cache")
    assert (0, 6000) == (rate["x"][0], rate["x"][-1])


def test_rates_are_over_the_last_steps(tmp_path):
    """The first steps' rates are over those there are; later, over fifty."""
    records = [_record(i, cache_hit=i >= 50) for i in range(150)]
    rate = _trace(_figures(_page(records, tmp_path))["course"], "plan from the cache")
    assert [0, 0, 50, 100, 100] == [rate["y"][i] for i in (0, 49, 74, 99, 149)]


def test_recomputation_is_summed_up_by_phase(tmp_path):
    """Bars are FLOPs from the records and seconds by the host's clock."""
    records = [_record(0, phase="collect"), _record(1), _record(2)]
    times, flops = _figures(_page(records, tmp_path))["price"]["data"]
    assert (["collect", "plan"], [100, 200]) == (flops["y"], flops["x"])
    assert ["collect", "plan", "choosing plans"] == times["y"]
    assert [10, 20, 3] == pytest.approx(times["x"])
    assert ["10 ms, 1 step", "20 ms, 2 steps", "3 ms"] == times["text"]


# ------------------------------------------------------------------ what is said


def test_headline_follows_from_the_records(trained):
    """Counts and extremes are those of the records."""
    numbers = headline(trained)
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
    numbers = headline(records)
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
    assert sentence == verdict(headline(records))
    assert sentence in _page(records, tmp_path)


def test_facts_leave_out_what_is_not_known():
    """Without peaks there is neither a prediction error nor a count of steps over."""
    names = [name for name, _, _ in facts(headline(_extremes()["no peaks"]))]
    assert "highest peak" in names
    assert not {"prediction off by", "steps over the budget"} & set(names)


def test_unusual_steps_are_listed_with_their_reasons(tmp_path):
    """Measuring steps have reasons too, and are not listed."""
    records = [
        _record(0, phase="collect", reason="nothing was measured yet"),
        _record(1),
        _record(2, reason="two backwards"),
        _record(3, observed_peak_bytes=1001 * MIB),
    ]
    page = _page(records, tmp_path)
    rows = re.findall(r"<tr>(.*?)</tr>", page.split('id="unusual"')[1])[1:]
    assert 2 == len(rows)
    assert "two backwards" in rows[0]
    assert "over the budget" in rows[1]


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
