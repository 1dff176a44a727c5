from examples.study.scales import SCALES
from examples.study.trial import make_result
from examples.study.tuning.plans import count_trials, execute, gather

_SCALE = SCALES['nano']


def _run(rate, **changes):
  return _SCALE.run('adamw', 128, rate, **changes)


def test_plans_that_ask_for_nothing_end():
  def nothing():
    return 3
    yield

  def once():
    (result,) = yield [_run(1.0)]
    return result.loss

  def run_all(runs):
    return [make_result(run, 2.0) for run in runs]

  assert execute(nothing(), run_all) == 3
  plans = {'a': nothing(), 'b': once()}
  assert execute(gather(plans), run_all) == {'a': 3, 'b': 2.0}


def test_runs_are_counted_once_and_without_those_that_are_known():
  def plan():
    yield [_run(1.0), _run(1.0), _run(0.5)]
    yield [_run(0.5), _run(0.25)]

  def known(run):
    is_known = run.config.learning_rate == 0.25
    return make_result(run, 1.0) if is_known else None

  assert count_trials(plan(), known) == 2
  assert count_trials(plan(), lambda run: make_result(run, 1.0)) == 0
