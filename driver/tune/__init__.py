"""Search for schedules and equal models, and the fleets that measure them. The searches are in `compiler/tune/` and
`compiler/superoptimise/`; here are their entry points for users.

- `tune.py`: `celosia.tune`: schedules of layers on the accelerator (when a search ends, and other decisions of it:
  `compiler/tune/`)
- `cpu.py`: `celosia.tune_cpu`, `celosia.tune_kernel`: schedules of kernels of this CPU
- `optimise.py`: `celosia.optimise`: the superoptimiser, with onnxruntime as judge of equal bytes; `celosia.compile`
- `weighing.py`: prices the steps of that search in a fleet
- `fleet.py`: decides who measures: processes, a board over ssh, or workers of a Dask cluster
"""
