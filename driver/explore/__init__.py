"""Search over Configs for models on a board, and the Pareto front that it finds; sweeps over fields of a Config.

In the order in which data passes them:

- `explore.py`: `celosia.explore`: checks arguments, sets up the parts below, decides which Configs come first, runs the
  parts, and builds the result
- `configs.py`: decides which Configs there are: the values of each field, and which combinations are possible
- `search.py`: decides which Configs to propose next (bottleneck, NSGA-II, random)
- `explorer.py`: the loop: asks the search, estimates, decides which Configs to measure and when to end (default time:
  `driver/choices.py`)
- `ladder.py`: decides how a Config is judged at each rung; asks resource_use.py whether it fits the device
- `model_cost.py`: cycles and bytes of a model on a Config, estimated or by the timing model
- `resource_use.py`: LUTs, flip-flops, DSP blocks and block RAM of a Config; decides whether they fit a device
- `objectives.py`: computes objectives (cycles, area, energy, ...) of costs and resources
- `pareto.py`: which points are on the front; hypervolume; which points promise most
- `records.py`: Points and their file, so that a later run continues
- `rewritten.py`: superoptimises the models for the Configs of the front
- `confirm.py`: confirms the front by Yosys or on the RTL
- `exploration_result.py`: front.json, the TOML files, and the recommendation. `driver/pages/` draws its page.

`sweep.py` is apart: `celosia sweep` measures all combinations of a few values, and draws its own page.
"""
