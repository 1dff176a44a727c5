from pathlib import Path
import re

from examples.study.scales import SCALES
from examples.study.trial import make_result
from examples.study.tuning.plans import execute


def test_the_documented_experiment_compares_what_it_says():
  page = Path(__file__).parents[2] / 'examples/study/README.md'
  (code,) = re.findall(r'```python\n(.*?)```', page.read_text(), re.DOTALL)
  experiment = {}
  exec(code, experiment)

  def run_all(trials):
    configs = [x.config for x in trials]
    losses = [2 + 0.001 * (x.seed % 3) - x.b1 for x in configs]
    return [make_result(*x) for x in zip(trials, losses, strict=True)]

  plan = experiment['plan'](SCALES['nano'])
  tables = experiment['tables'](execute(plan, run_all))
  assert [x['optimizer'] for x in tables['losses']] == ['Muon', 'Hyperball']
  for name, b1 in (('b1 0.8', 0.8), ('b1 0.9', 0.9), ('b1 0.95', 0.95)):
    assert tables['losses'][0][name].startswith(f'{2.001 - b1:.3f} ± ')
  assert tables['differences'][0]['difference'] == 'Hyperball − Muon'
