"""The page of a run: what it holds, that it stays small, that a browser draws it."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

import mimose
from mimose.records import StepRecord, read_records
from mimose.report.page import figures, headline, verdict, write_page

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


_BLIND = {"observed_peak_bytes": None, "predicted_peak_bytes": None}
_KINDS = {
    "one step": [_record(reason="a </script> & <b>bold</b> \ud800")],
    "nothing known": [_record(i, actions=(), seconds=None, **_BLIND) for i in range(3)],
    "predictions alone": [
        _record(i, 90 + i, observed_peak_bytes=None, events=()) for i in range(5)
    ],
    "several runs": [
        *_many(5),
        *_many(3, n_layers=2, budget_bytes=500 * MIB),
        *(_record(i, shape={"x.0": 4, "y.2": 30 + i}) for i in range(4)),
    ],
    "an accelerator's": [
        _record(i, 90 + i, reserved_peak_bytes=(900 + 50 * i) * MIB) for i in range(4)
    ],
    "many steps": [
        *_many(6000, n_layers=300, actions=("bake", "keep") * 150),
        _record(6000, 5000, phase="fallback", retries=1),
    ],
}


def _page(records, tmp_path, **options):
    """Write a page; return its text, and what it draws."""
    path = tmp_path / "page.html"
    write_page(records, path, **options)
    page = path.read_text(encoding="utf-8")
    (text,) = re.findall(r'<script id="data" .*?>(.*?)</script>', page)
    return page, json.loads(text)


def _told(marks):
    """Return what marks tell under the mouse, line by line."""
    return [mark[-1].splitlines() for mark in marks]


# ------------------------------------------------------------------ in a browser

_PROBE = """
<script>
const probe = {errors: [], hidden: [], sorted: []};
addEventListener("error", event => probe.errors.push(event.message));
addEventListener("securitypolicyviolation",
  event => probe.errors.push("would load " + event.blockedURI));
addEventListener("load", () => {
  const all = selector => [...document.querySelectorAll(selector)];
  probe.drawn = all("section svg[viewBox]").map(svg => svg.closest("section").id);
  probe.isInside = all("section svg[viewBox]").every(svg => {
    const {x, y, width, height} = svg.getBBox();
    const {width: most, height: highest} = svg.viewBox.baseVal;
    return x >= 0 && x + width <= most && y >= 0 && y + height <= highest;
  });
  probe.hasNaN = all("svg *").some(part => [...part.attributes].some(
    ({value}) => /NaN|Infinity|undefined/.test(value)));
  const dots = document.querySelector("#growth g.plan");
  const rows = column => all("#shapes tbody tr").map(
    row => Number(row.cells[column].dataset.number));
  for (let i = 0; i < 2; i++) {
    document.querySelector("#growth .legend button[data-key=planned]")?.click();
    if (dots) probe.hidden.push(dots.style.display === "none");
    document.querySelectorAll("#shapes th")[2].click();
    probe.sorted.push(rows(2));
  }
  document.body.textContent = JSON.stringify(probe);
});
</script>
"""
_ALL = ["growth", "predictions", "layers", "course"]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("kind", _KINDS)
def test_a_browser_draws_it(kind, tmp_path):
    """Nothing fails, is loaded or stands out of its picture; legends and heads work."""
    path = tmp_path / "probed.html"
    write_page(_KINDS[kind], path)
    page = path.read_text(encoding="utf-8").replace("<body>", f"<body>{_PROBE}", 1)
    path.write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    options.append(f"--user-data-dir={tmp_path / 'profile'}")

    command = [CHROMIUM, *options, path.as_uri()]
    shown = subprocess.run(command, capture_output=True, timeout=100, check=True)

    text = re.search(r"<body>(.*)</body>", shown.stdout.decode(), re.DOTALL)[1]
    probe = json.loads(re.sub("&(lt|gt|amp);", "?", text))
    assert [] == probe["errors"]
    missing = {
        "nothing known": {"growth", "predictions", "layers"},
        "predictions alone": {"predictions"},
    }.get(kind, set())
    assert [name for name in _ALL if name not in missing] == probe["drawn"]
    assert probe["isInside"]
    assert not probe["hasNaN"]
    assert probe["hidden"] == ([] if "growth" in missing else [True, False])
    descending, ascending = probe["sorted"]
    assert sorted(descending, reverse=True) == descending
    assert sorted(ascending) == ascending


# ------------------------------------------------------------------ the document


@pytest.mark.parametrize("kind", _KINDS)
def test_nothing_is_loaded_and_no_text_is_markup(kind, tmp_path):
    """The page forbids what it does not hold, and a run's words end no element."""
    page, data = _page(_KINDS[kind], tmp_path, title="<script>alert(1)</script>")
    assert "default-src 'none'" in page
    assert "://" not in page
    assert re.findall(r'\b(?:href|src)="([^"]*)"', page) == ["data:,"]
    assert 2 == page.count("</script>")
    assert "<script>alert(1)</script>" == data["title"]


# ------------------------------------------------------------------ what is drawn


def test_the_map_shows_the_last_plan_of_each_shape(tmp_path):
    """Shapes go from small to large; a layer that did not run is blank."""
    records = [
        _record(0, 300),
        _record(1, 100, actions=("recompute",) * 4, phase="collect"),
        _record(2, 200, actions=("keep", "keep"), events=("model.layers.0#0", "new#0")),
        _record(3, 300, actions=("keep", "keep", "recompute", "keep")),
        _record(4, 301, actions=("keep", "keep", "recompute", "keep")),
    ]
    _, data = _page(records, tmp_path)
    layers = data["layers"]
    write = [*layers["actions"], "blank"]
    assert ["100", "200", "300 … 301"] == layers["columns"]
    assert {name: [write[i] for i in cells] for name, cells in layers["rows"]} == {
        "model.layers.0": ["measured", "keep", "keep"],
        "model.layers.1": ["measured", "blank", "keep"],
        "model.layers.2": ["measured", "blank", "recompute"],
        "model.layers.3": ["measured", "blank", "keep"],
        "new": ["blank", "keep", "blank"],
    }


# ------------------------------------------------------------------ long runs


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """The page of twenty thousand steps, of which a few stand out."""
    kinds = _many(701)
    records = [replace(kinds[i % 701], step=i) for i in range(20_000)]
    for at, changes in {
        8_000: {"observed_peak_bytes": 5000 * MIB},
        10_000: {"retries": 3},
        12_000: {"observed_peak_bytes": 950 * MIB},
        14_000: {"phase": "fallback", "reason": "size 811 is beyond 750"},
        14_002: {"phase": "fallback", "reason": "size 813 is beyond 750"},
    }.items():
        records[at] = replace(records[at], **changes)
    return _page(records, tmp_path_factory.mktemp("long"))


def test_what_stands_out_of_a_long_run_is_there(long_run):
    """Some hundred steps are drawn, and each that stands out has a mark."""
    _, data = long_run
    for figure in ("growth", "predictions", "peaks", "errors"):
        marks = data[figure]
        assert 2 == len(marks["fallback"])
        assert 300 <= len(marks["plan"]) <= 400
        assert ["step 8,000 (plan)"] == [of[0] for of in _told(marks["over"])]
        assert ["step 10,000 (plan)"] == [of[0] for of in _told(marks["again"])]
        worst = [of[0] for of in _told(marks["worst"])]
        assert {"step 8,000 (plan)", "step 12,000 (plan)"} <= {*worst}


# ------------------------------------------------------------------ what is said


def test_headline_follows_from_the_records(toys, tmp_path):
    """Counts and extremes are those of a model that trained within a budget."""
    path = tmp_path / "records.jsonl"
    n_rows = [8, 40, 16, 64, 24, 48, 32, 56, 64, 40, 64, 12]
    batches = [toys.inputs(n) for n in n_rows]
    with toys.counting() as meter:
        budget = toys.budget_between(toys.chain(), [toys.inputs(64)] * 2, 0.5, meter)
        model = toys.chain()
        with mimose.attach(model, budget, meter=meter, record_to=path):
            toys.train(model, batches)
    trained = read_records(path)
    numbers = headline(trained)
    assert (12, 9, 0) == (numbers.steps, numbers.shapes, numbers.steps_over)
    assert numbers.steps == sum(numbers.phases.values())
    assert max(r.observed_peak_bytes for r in trained) == numbers.peak_bytes
    assert 0 < numbers.collected_flops <= numbers.recomputed_flops
    _, data = _page(trained, tmp_path)
    assert verdict(numbers) == data["verdict"]
    assert [list(figure) for figure in figures(numbers)] == data["figures"]
