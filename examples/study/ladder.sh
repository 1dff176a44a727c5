#!/bin/sh
# Runs all trials of LADDER.md and writes the page, in about 15 core hours. What
# has a line in data/ is not run again, so a stopped script goes on.
set -e
python=${PYTHON:-python}
hidden='merit merit-l2 lamb adamw muon muon-hyperball'
all='merit-all merit-l2-all lamb-all adamw-all'
data=examples/study/data

ladder() {
  $python -m examples.study.large_batch ladder "$@"
}

# Rates tuned at each batch.
ladder --near 0.02 --batches 1024 4096 16384 --rules $hidden $all
ladder --near 0.02 --batches 65536 --rules $hidden $all --seeds 1 2 3 4 5
ladder --batches 16384 --at 0 --seeds 4 5 \
  --rules merit lamb merit-all lamb-all adamw-all
ladder --batches 16384 --at -1 --rules adamw --seeds 4 5

# Rates carried over: to 4,096 and to 16,384 tokens.
ladder --batches 4096 --at 0 2 --rules merit lamb merit-all
ladder --batches 4096 --at 1 2 --rules adamw
ladder --batches 4096 --at -1 1 2 --rules muon
ladder --batches 4096 --at -1 1 --rules lamb-all adamw-all muon-hyperball
ladder --batches 16384 --at -1 1 2 --rules merit lamb merit-all adamw-all
ladder --batches 16384 --at 0 1 2 --rules adamw
ladder --batches 16384 --at -2 -1 1 2 --rules muon lamb-all muon-hyperball
ladder --batches 16384 --at 1 --seeds 4 5 \
  --rules merit lamb adamw muon merit-all adamw-all
ladder --batches 16384 --at 1 --seeds 1 2 3 4 5 --rules merit-l2 merit-l2-all
# And to 65,536, from 4,096.
ladder --batches 65536 --at 1 --rules merit lamb merit-all lamb-all
ladder --batches 65536 --at 2 --rules adamw adamw-all
ladder --batches 65536 --at 0 --rules adamw-all
ladder --batches 65536 --at -2 --rules muon muon-hyperball

# Rates between the powers of two.
for at in '0.5 --seeds 0 1 2 3' '1.5 --seeds 0'
do
  ladder --batches 1024 4096 --rules merit merit-l2 lamb --at $at \
    --results $data/ladder_finer.jsonl
done
ladder --batches 1024 --rules lamb-all --at 0.5 --seeds 0 1 2 3 \
  --results $data/ladder_finer.jsonl

# What helps Muon.
variants='muon muon-bfloat16 muon-heads muon-neurons muon-cautious
  muon-polar-express'
ladder --batches 4096 --at 0 -1 --rules $variants --seeds 1 2 3 4 5
ladder --batches 4096 --rules muon-hyperball-decay muon-hyperball-sqrt
ladder --batches 16384 --at 0 --rules muon muon-neurons --seeds 1 2 3 4 5

# 108 and 432 steps.
steps=$data/equal_steps.jsonl
for size in '110592 --batches 1024' '442368 --batches 4096'
do
  ladder --tokens $size --near 0.02 --seeds 1 2 3 4 5 \
    --rules merit-all lamb-all adamw-all muon --results $steps
done
ladder --tokens 442368 --batches 1024 --near 0.02 \
  --rules merit-all adamw-all muon --results $steps
ladder --tokens 442368 --batches 1024 --at 1 --rules merit-all --results $steps
ladder --tokens 442368 --batches 1024 --at 0 --rules adamw-all --results $steps
ladder --tokens 7077888 --batches 16384 --at 0 1 --rules merit-all \
  --results $steps
ladder --tokens 7077888 --batches 16384 --at -1 0 --rules adamw-all \
  --results $steps
ladder --tokens 7077888 --batches 16384 --at 0 --rules muon --results $steps

# With another eps.
for at in '-1 0 --seeds 0' '-1 --seeds 1'
do
  ladder --eps 1e-6 --batches 65536 --rules adamw merit --at $at \
    --results $data/ladder_eps.jsonl
done

$python -m examples.study.report
