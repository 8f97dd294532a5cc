"""Runs in a Python that has TVM, not in ours: python tvm_worker.py MODEL.onnx INPUTS.npz OUTPUTS.npz SECONDS

Compiles with TVM's default pipeline for this processor, runs on one thread, writes the outputs and prints the processor
seconds of the fastest run.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["TVM_NUM_THREADS"] = "1"


def main(model_path: str, inputs_path: str, outputs_path: str, seconds: str) -> None:
    """Writes the outputs of the model under TVM, and seconds of a run, to `outputs_path`."""
    import numpy as np
    import onnx
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    model = onnx.load(model_path)
    feed = np.load(inputs_path)
    shapes = {name: list(feed[name].shape) for name in feed.files}
    module = from_onnx(model, shape_dict=shapes, keep_params_in_input=False)
    target = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu(), "num-cores": 1})
    machine = relax.VirtualMachine(relax.build(module, target), tvm.cpu())
    names = [value.name for value in model.graph.input if value.name in feed.files]
    machine.set_input("main", *(tvm.runtime.tensor(feed[name]) for name in names))
    best, end = float("inf"), time.perf_counter() + float(seconds)
    while best == float("inf") or time.perf_counter() < end:
        started = time.process_time()
        machine.invoke_stateful("main")
        best = min(best, time.process_time() - started)
    result = machine.get_outputs("main")
    results = result if isinstance(result, (list, tuple)) or not hasattr(result, "numpy") else [result]
    np.savez(outputs_path, *(each.numpy() for each in results))
    print(best)


if __name__ == "__main__":
    main(*sys.argv[1:])
