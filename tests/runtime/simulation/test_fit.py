"""The least squares behind a profile: planted coefficients come back, none is negative, a few disturbed steps do not bend them."""

import numpy as np
import pytest

from gristmill.errors import GristmillError
from gristmill.simulation.fit import fit_steps, nnls
from gristmill.simulation.profile import StepCost
from gristmill.worker.work import StepWork

PLANTED = StepCost(0.03, 3e-4, 9e-4, 5e-6, 3e-7)


def random_work(n: int, seed: int) -> list[StepWork]:
    rng = np.random.default_rng(seed)
    work = []
    for _ in range(n):
        rows, chunk = int(rng.integers(0, 32)), int(rng.choice([0, 0, 16, 128, 512]))
        work.append(StepWork(chunk, rows, rows * int(rng.integers(10, 2000)), chunk * int(rng.integers(chunk // 2, 2000)) if chunk else 0))
    return work


@pytest.mark.parametrize("seed", range(5))
def test_nnls_recovers_planted_coefficients(seed):
    rng = np.random.default_rng(seed)
    matrix, planted = rng.uniform(size=(40, 6)), np.array([0.0, 2.0, 0.0, 1e-3, 5.0, 0.3])
    assert nnls(matrix, matrix @ planted) == pytest.approx(planted, abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_nnls_is_optimal(seed):
    """Karush-Kuhn-Tucker: the gradient is zero where x is positive and nowhere points to something better."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(30, 5)), rng.normal(size=30)
    x = nnls(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert gradient[x > 0] == pytest.approx(0, abs=1e-9)
    assert (gradient <= 1e-9).all()


def test_nnls_with_columns_that_are_equal_or_empty():
    matrix = np.column_stack([np.ones(5), np.ones(5), np.zeros(5), np.arange(5.0)])
    x = nnls(matrix, 3 + 2 * np.arange(5.0))
    assert (x[0] + x[1], x[2], x[3]) == pytest.approx((3, 0, 2))


def test_exact_steps_give_the_planted_cost():
    work = random_work(200, seed=0)
    cost, quality = fit_steps(work, [PLANTED.seconds(w) for w in work])
    for name in StepCost.__struct_fields__:
        assert getattr(cost, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6)
    assert quality == {"steps": 200, "median_error": 0.0, "p90_error": 0.0}


def test_disturbed_steps_count_in_the_sum_and_do_not_bend_the_shape():
    work = random_work(400, seed=1)
    rng = np.random.default_rng(2)
    times = np.array([PLANTED.seconds(w) for w in work]) * rng.normal(1.0, 0.03, 400)
    times[::40] *= 6
    cost, _ = fit_steps(work, times.tolist())
    assert sum(map(cost.seconds, work)) == pytest.approx(times.sum())
    scale = times.sum() / sum(map(PLANTED.seconds, work))
    for name in StepCost.__struct_fields__:
        assert getattr(cost, name) == pytest.approx(getattr(PLANTED, name) * scale, rel=0.15)


def test_too_few_steps_are_refused():
    with pytest.raises(GristmillError, match="3 measured steps are too few"):
        fit_steps(random_work(3, seed=0), [1.0, 1.0, 1.0])
