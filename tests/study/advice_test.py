"""What the sections tell a reader to do, by how the runs have come out."""

import math

import pytest

from examples.study import claims, curvature as measured
from examples.study.contenders import CONTENDERS
from examples.study.experiments import (
  curvature,
  llama,
  stale_rows,
  steps_to_loss,
  width_depth,
)
from examples.study.plans import Result, execute
from examples.study.scales import SCALES

_SCALE = SCALES['nano']


def _outcome(module, excess, measure=lambda run: None):
  """Returns what a plan finds out of losses with some excess.

  Rates are best at 0.02, and losses of seeds deviate a little.
  """

  def run_all(runs):
    return [
      Result(
        2
        + excess(run)
        + 0.1 * math.log2(run.config.learning_rate / 0.02) ** 2
        + 0.002 * (run.config.seed % 3),
        {},
        measure(run),
      )
      for run in runs
    ]

  return execute(module.plan(_SCALE), run_all)


def _last(module, outcome):
  return module.section(outcome, _SCALE).split('\n\n')[-1]


def _rows(growth, norm):
  group = {'rows': 9, 'growth': [growth] * 3, 'norm': norm, 'moved': 0.1}
  common = group | {'norm': 1.0}
  groups = {'never': group, 'rare': group, 'common': common}
  return dict.fromkeys(stale_rows.MATRICES, groups)


@pytest.mark.parametrize(
  ('least', 'norm', 'cost', 'words'),
  [
    (0.01, 1.0, 0.0, 'take min_norm 0.01: it costs nothing that was seen'),
    (0.1, 1.0, 0.0, 'take min_norm 0.1: it costs nothing that was seen'),
    (0.1, 1.0, 0.1, 'not as the default: it costs loss'),
    (0.1, 1.0, -0.1, 'which even lowers the loss'),
    (0.2, 1.0, 0.0, 'No min_norm that was tried is enough'),
    # All have grown far over live rows.
    (0.01, 3.0, 0.0, 'Nothing that was tried holds'),
    (0.0, 1.0, 0.0, 'held the rows of the embedding here as well'),
    (0.1, 1.0, math.inf, 'nothing is known'),
  ],
)
def test_the_smallest_min_norm_that_holds_rows_is_judged(
  least, norm, cost, words
):
  def is_held(run):
    is_merit = run.config.optimizer == 'merit'
    return run.config.min_norm >= least or not is_merit

  outcome = _outcome(
    stale_rows,
    lambda run: cost if math.isinf(cost) else cost * (run.config.min_norm > 0),
    lambda run: (
      _rows(1.0 if is_held(run) else 0.3, norm) if run.measure else None
    ),
  )
  assert words in _last(stale_rows, outcome)


@pytest.mark.parametrize(
  ('turned', 'words'),
  [
    (False, 'is best for this Llama too'),
    (True, 'GPT-2 MERIT; Llama AdamW. Choose the optimizer again'),
  ],
)
def test_an_order_that_turns_is_told(turned, words):
  def excess(run):
    is_llama = run.config.architecture == 'llama'
    losses = {'merit': 0.1, 'adamw': 0.0 if turned and is_llama else 0.2}
    return losses.get(run.config.optimizer, 0.3)

  assert words in _last(llama, _outcome(llama, excess))


@pytest.mark.parametrize(
  ('costs', 'words'),
  [
    ({}, 'No difference between wide and deep was seen'),
    ({1: 0.1}, 'loss of 12 × 32 rises less (with AdamW; MERIT; Muon; Muon'),
    ({1: 0.1}, 'take a deep model rather than a wide one'),
    ({12: 0.1}, 'take a wide model rather than a deep one'),
    ({1: math.inf, 3: math.inf, 12: math.inf}, 'nothing is known'),
    ({'adamw': math.inf}, 'was seen (not known with AdamW): choose'),
  ],
)
def test_the_shape_that_loses_less_is_taken(costs, words):
  def excess(run):
    is_large = run.config.batch_size == _SCALE.batch_sizes[-1]
    cost = costs.get(run.config.num_layers, 0.0)
    return costs.get(run.config.optimizer, cost) if is_large else 0.0

  section = width_depth.section(_outcome(width_depth, excess), _SCALE)
  assert words in section


def test_a_shape_whose_loss_rises_less_but_is_higher_is_not_taken():
  def excess(run):
    rise = 0.1 * (run.config.batch_size == _SCALE.batch_sizes[-1])
    return {1: 0.5, 3: rise, 12: rise}[run.config.num_layers]

  section = width_depth.section(_outcome(width_depth, excess), _SCALE)
  assert 'the loss of 1 × 112 rises less (with' in section
  assert 'but is not lower at 256' in section
  assert 'take a wide model' not in section


def test_the_shapes_of_the_lowest_loss_are_listed():
  def excess(run):
    if run.config.optimizer == 'adamw':
      return {1: 0.0, 3: 0.1, 12: math.inf}[run.config.num_layers]
    if run.config.optimizer == 'merit':
      return math.inf
    return 0.1 * (run.config.num_layers == 12)

  section = width_depth.section(_outcome(width_depth, excess), _SCALE)
  assert (
    'Lowest loss at batch 256: AdamW: 1 × 112; MERIT: not known; Muon: '
    '1 × 112 or 3 × 64; ' in section
  )


def test_a_rate_that_does_not_carry_over_is_told():
  def excess(run):
    # For the deep shape the best rate is four times that of the others.
    if run.config.num_layers < 12:
      return 0.0
    rate = run.config.learning_rate
    return 0.1 * (math.log2(rate / 0.08) ** 2 - math.log2(rate / 0.02) ** 2)

  outcome = _outcome(width_depth, excess)
  assert 'choose the rate again' in _last(width_depth, outcome)
  flat = _last(width_depth, _outcome(width_depth, lambda run: 0.0))
  assert 'they carry over' in flat
  assert 'cost other shapes 0.000 nats' in flat


def test_one_bad_seed_of_the_tuning_does_not_hinder_a_rate():
  # With the seed that chooses, the usual rate is far off for other shapes.
  def excess(run):
    is_usual = run.config.num_layers == 3
    if is_usual or run.config.seed != _SCALE.tuning_seeds[0]:
      return 0.0
    return 0.1 * abs(math.log2(run.config.learning_rate / 0.04))

  assert 'choose the rate again' not in _last(
    width_depth, _outcome(width_depth, excess)
  )


def test_rows_that_turn_at_the_same_length_are_not_held():
  def measure(run):
    rows = _rows(1.0, 1.0)
    if not run.config.min_norm:
      rows['embedding']['never'] = rows['embedding']['never'] | {'moved': 1.5}
    return rows if run.measure else None

  outcome = _outcome(stale_rows, lambda run: 0.0, measure)
  held = {name for name, x in outcome.items() if stale_rows.keeps(x, 'never')}
  assert held == {name for name in outcome if 'min_norm' in name}


def test_shapes_have_about_equal_parameters():
  for scale in SCALES.values():
    counts = [shape.parameters for shape in width_depth.shapes(scale)]
    assert max(counts) < 1.15 * min(counts)
    wide, usual, deep = width_depth.shapes(scale)
    assert wide.num_layers < usual.num_layers < deep.num_layers
    config = scale.run('adamw', 8, 1.0).config
    assert usual[:2] == (config.num_layers, config.width)


def _curvature(sharper, relative, excess=lambda run: 0.0):
  """Returns an outcome where AdamW is sharper by two factors."""

  def measure(run):
    if not run.measure:
      return None
    is_adamw = run.config.optimizer == 'adamw'
    # Seeds differ by a tenth.
    top = 10 * (1 + 0.05 * (run.config.seed % 3)) * (sharper if is_adamw else 1)
    scaled = 10 * (1 + 0.05 * (run.config.seed % 3))
    return {
      'top_eigenvalue': top,
      'residual': 0.0,
      'trace': top,
      'trace_error': 0.1,
      'relative_eigenvalue': scaled * (relative if is_adamw else 1),
      'relative_residual': 0.0,
      'preconditioned_eigenvalue': 1.0,
    }

  return _outcome(curvature, excess, measure)


@pytest.mark.parametrize(
  ('factors', 'verdicts'),
  [
    ((3.0, 2.0), ('reproduced', 'reproduced')),
    # Smaller weights alone can raise an eigenvalue.
    ((3.0, 1.0), ('reproduced', 'no difference seen')),
    ((0.5, 0.5), ('contradicted', 'contradicted')),
    ((1.0, 1.0), ('no difference seen', 'no difference seen')),
  ],
)
def test_flatness_that_is_not_of_scale_is_judged_apart(factors, verdicts):
  outcome = _curvature(*factors)
  table = claims.table({'curvature': outcome}, _SCALE)
  rows = [x for x in table.splitlines() if 'AdamW over MERIT' in x]
  # At both of the larger batches.
  for row, verdict in zip(rows, verdicts * 2, strict=True):
    assert row.endswith(f'| {verdict} |')
  assert f'top eigenvalue {factors[0]:g} × [' in rows[0]
  assert ('would have been seen' in rows[0]) == (factors[0] == 1.0)


def test_who_is_flatter_than_the_best_is_told():
  # AdamW is sharper by a factor of three, and has the lowest loss.
  def excess(run):
    return 0.0 if run.config.optimizer == 'adamw' else 0.2

  outcome = _curvature(3.0, 1.0, excess)
  *_, flatter, advice = curvature.section(outcome, _SCALE).split('\n\n')
  assert 'AdamW has the lowest loss' in flatter
  assert 'top eigenvalue: MERIT, Muon' in flatter
  assert 'scale-free: none' in flatter
  assert 'by the loss, not by how flat' in advice


def test_what_is_not_known_is_no_sign_of_flatness():
  outcome = _curvature(1.0, 1.0)
  for size in {size for _, size in outcome}:
    ends = outcome['Muon', size]
    for result in ends.results:
      result.measured.update(dict.fromkeys(result.measured))
  section = curvature.section(outcome, _SCALE)
  assert 'diverged' not in section
  flatter, advice = section.split('\n\n')[-2:]
  assert '(not known: Muon)' in flatter or 'Muon has the lowest' in flatter
  assert 'What is known of flatness does not speak against' in advice


def _steps(*means):
  """Returns an outcome where all optimizers take these steps."""
  names = [x.name for x in CONTENDERS]
  sizes = _SCALE.batch_sizes[::2]
  return steps_to_loss.Outcome(
    1.5,
    {
      (name, size): steps_to_loss.Steps(size, (mean, mean), {100: 1.5})
      for name in names
      for size, mean in zip(sizes, means, strict=True)
    },
  )


@pytest.mark.parametrize(
  ('means', 'words'),
  [
    # 16 times the batch, 1.6 and 1.4 times the tokens.
    ((1600, 400, 160), 'AdamW: 64;'),
    ((1600, 400, 140), 'AdamW: 256;'),
    # A batch that pays does not, behind one that does not.
    ((1600, 640, 100), 'AdamW: 16;'),
    ((1600, 400, math.inf), 'AdamW: 64;'),
    # Fewer than the shortest run has, which is no loss that is not reached.
    ((0, 400, 100), 'AdamW: not known;'),
  ],
)
def test_a_batch_pays_as_far_as_all_smaller_ones(means, words):
  assert words in steps_to_loss.section(_steps(*means), _SCALE)


def test_without_a_target_no_steps_are_told():
  text = steps_to_loss.section(
    _steps(1, 1, 1)._replace(target=math.inf), _SCALE
  )
  assert (
    text == 'There is no loss to aim at: with each optimizer a seed diverged.'
  )


def test_the_text_says_how_curvature_is_measured():
  text = curvature.section(_curvature(1.0, 1.0), _SCALE)
  assert f'{measured.SEQUENCES} training sequences' in text
  assert f'{measured.LANCZOS_STEPS} Lanczos' in text
  assert f'{measured.TRACE_SAMPLES} vectors' in text
