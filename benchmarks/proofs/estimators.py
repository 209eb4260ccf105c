"""Which estimator predicts what layers hold, after sixteen shapes?

Mimose's Table IV compares regressors of one scalar. Here each estimator gets the same
data as from `attach(predictor=...)`: for each family of layers the sizes that vary and
the measured held bytes of a call, from models that train on the simulated device. It is
fitted to the first sixteen shapes, and predicts the others.

    python -m benchmarks.proofs estimators
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.svm import SVR
from sklearn.tree import DecisionTreeRegressor

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.numbers import percent, quantile
from mimose.cost.quantity import Quantity
from mimose.predictors import Estimator, Fit, LeastSquares
from mimose.session import attach

QUESTION = "Which estimator tells what layers hold, after sixteen shapes?"
OPTIONS = (common.device("sim"), common.count("--steps", 28, "a model"))

_SPECS = by_name(
    ModelSpec("bert", {"batch": (4, 12), "length": (64, 256)}),
    ModelSpec("gpt2", {"batch": (4, 12), "length": (64, 256)}),
    ModelSpec("t5", {"batch": (4, 8), "source": (64, 256), "target": (32, 128)}),
)
ESTIMATORS: Mapping[str, Callable[[], Estimator]] = {
    "least squares, chosen terms": LeastSquares,
    "line": LinearRegression,
    "quadratic": lambda: make_pipeline(PolynomialFeatures(2), LinearRegression()),
    "support vectors": lambda: make_pipeline(StandardScaler(), SVR(C=1e9)),
    "tree": lambda: DecisionTreeRegressor(random_state=0),
    "boosted trees": lambda: GradientBoostingRegressor(random_state=0),
}
_FITTED = 16
_BAR = 1e-6


def ask(settings: Settings, options: Options) -> Answer:
    """Train every model, and judge the estimators by all of its layers."""
    names = names_of(_SPECS, settings.models)
    rows: list[Row] = []
    for name in names:
        task = {"model": name, "steps": options.steps}
        rows += common.measured("estimators", settings, **task)
    answer = Answer(rows=list(rows))
    for estimator in ESTIMATORS:
        own = [row for row in rows if row["estimator"] == estimator]
        errors = [row["off"] for row in own]
        line = {
            "estimator": estimator,
            "error p50": percent(quantile(errors, 0.5), 3),
            "error p99": percent(quantile(errors, 0.99), 3),
        }
        answer.table.append(line)
    first = next(iter(ESTIMATORS))
    default = [row["off"] for row in rows if row["estimator"] == first]
    answer.bars.append(Bar("the default's error, p99", quantile(default, 0.99), _BAR))
    return answer


def work(task: Task) -> Rows:
    """Train one model, then fit what its layers held."""
    spec = _SPECS[task["model"]]
    loop = Loop(spec.build(task["seed"], task["device"]))
    generator = torch.Generator().manual_seed(task["seed"])
    with attach(
        loop.model,
        common.AMPLE_BYTES,
        predictor=DummyRegressor(),  # is never believed, so that all is measured
        refine=False,
        meter=loop.meter,
    ) as session:
        for _ in range(task["steps"]):
            loop.step(spec.batch(spec.draw(generator), generator))
        series = session.state_dict()["cost_model"]["series"]
    for name, told in series:
        quantity = Quantity(*name)
        if quantity.name == "held" and len(told["samples"]) > _FITTED:
            said = {"family": quantity.owner, "action": quantity.action}
            for row in compared(told["samples"]):
                yield {"model": spec.model, **said, **row}


def compared(
    samples: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> Rows:
    """Fit the first samples by each estimator; yield its error at each of the others.

    Args:
        samples: Sizes and readings of each shape.
    """
    readings = {tuple(sizes): own for sizes, own in samples[:_FITTED]}
    for name, make in ESTIMATORS.items():
        fit = Fit(make(), readings, 0.0, is_peak=False)
        for sizes, own in samples[_FITTED:]:
            off = abs(fit.predict(tuple(sizes)) / own[0] - 1.0)
            yield {"estimator": name, "off": off}
