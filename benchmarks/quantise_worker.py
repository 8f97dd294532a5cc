"""python quantise_worker.py QUANTISER FOLDER NETWORK,...: what each option of a quantiser makes of each network.

Runs in the quantiser's own environment, and imports nothing of celosia. Reads FOLDER/NETWORK.onnx and its samples,
FOLDER/NETWORK.npz. Writes FOLDER/QUANTISER/OPTION/NETWORK.onnx, or NETWORK.txt with the quantiser's error.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np


class Task:
    """A network to quantise. model: its ONNX file. samples: [8, *shape] of its input "x". out: the file to write."""

    def __init__(self, name: str, folder: Path, out: Path) -> None:
        self.name, self.model, self.out = name, folder / f"{name}.onnx", out
        self.samples = np.load(folder / f"{name}.npz")["x"]

    def feeds(self) -> Iterator[dict[str, Any]]:
        """A feed for each sample."""
        yield from ({"x": sample} for sample in self.samples)

    def module(self) -> tuple[Any, Any]:
        """The network in PyTorch, and its samples."""
        from quantiser_networks import network

        made: tuple[Any, Any] = network(self.name)
        return made

    def reader(self, base: Any = None) -> Any:
        """The samples as calibration data, which may be rewound. base: the reader's class, by default onnxruntime's."""
        from onnxruntime.quantization import CalibrationDataReader

        feeds = self.feeds

        class Reader(base or CalibrationDataReader):  # type: ignore[misc]
            def __init__(self) -> None:
                self.rewind()

            def rewind(self) -> None:
                self.left = feeds()

            def get_next(self) -> Any:
                return next(self.left, None)

        return Reader()

    def loaded(self) -> Any:
        """The model in memory."""
        import onnx

        return onnx.load(self.model)

    def save(self, model: Any) -> None:
        """Write a model in one file."""
        import onnx

        onnx.save(model, self.out)


Option = Callable[[Task], None]


# onnxruntime.quantization


def _static(task: Task, activation: str = "QInt8", weight: str = "QInt8", form: str = "QDQ", **how: Any) -> None:
    from onnxruntime import quantization as q

    prepared = task.out.with_suffix(".prepared.onnx")
    q.shape_inference.quant_pre_process(str(task.model), str(prepared))
    extra = {name: how.pop(name) for name in list(how) if name[0].isupper()}
    q.quantize_static(
        prepared, task.out, task.reader(), quant_format=q.QuantFormat[form], activation_type=q.QuantType[activation],
        weight_type=q.QuantType[weight], extra_options=extra,
        calibrate_method=q.CalibrationMethod[how.pop("calibration", "MinMax")], **how,
    )  # fmt: skip


def _dynamic(task: Task, weight: str, per_channel: bool = False, **how: Any) -> None:
    from onnxruntime import quantization as q

    q.quantize_dynamic(task.model, task.out, weight_type=q.QuantType[weight], per_channel=per_channel, **how)


def _nbits(task: Task, bits: int, form: str, symmetric: bool, level: int, size: int = 32) -> None:
    from onnx.version_converter import convert_version
    from onnxruntime.quantization import QuantFormat, matmul_nbits_quantizer

    model = task.loaded() if form == "QOperator" else convert_version(task.loaded(), 21)  # with blocks of int4
    operators = ("MatMul", "Gather") if form == "QOperator" else ("MatMul",)
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
        model, bits, size, symmetric, level, quant_format=QuantFormat[form], op_types_to_quantize=operators
    )
    quantizer.process()
    task.save(quantizer.model.model)


def _bnb4(task: Task, kind: int, size: int) -> None:
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer

    quantizer = MatMulBnb4Quantizer(task.loaded(), kind, size)
    quantizer.process()
    task.save(quantizer.model.model)


def _half(task: Task, module: str, **how: Any) -> None:
    from importlib import import_module

    task.save(import_module(module).convert_float_to_float16(task.loaded(), **how))


ONNXRUNTIME: dict[str, Option] = {
    "qdq": _static,
    "qdq-per-channel": partial(_static, per_channel=True),
    "qdq-u8u8": partial(_static, activation="QUInt8", weight="QUInt8"),
    "qdq-u8s8": partial(_static, activation="QUInt8", per_channel=True),
    "qdq-u16s8": partial(_static, activation="QUInt16"),
    "qdq-s16s8": partial(_static, activation="QInt16", ActivationSymmetric=True),
    "qdq-u16u16": partial(_static, activation="QUInt16", weight="QUInt16"),
    "qdq-int4": partial(_static, weight="QInt4", UseQDQContribOps=False),
    "qdq-symmetric": partial(_static, ActivationSymmetric=True, per_channel=True, reduce_range=True),
    "qdq-entropy": partial(_static, calibration="Entropy"),
    "qdq-percentile": partial(_static, calibration="Percentile"),
    "qdq-contrib": partial(_static, UseQDQContribOps=True),
    "qdq-dedicated": partial(_static, DedicatedQDQPair=True, AddQDQPairToWeight=True),
    "qdq-bias": partial(_static, QuantizeBias=False),
    "qoperator": partial(_static, form="QOperator"),
    "qoperator-u8s8": partial(_static, form="QOperator", activation="QUInt8", per_channel=True, reduce_range=True),
    "qoperator-u8u8": partial(_static, form="QOperator", activation="QUInt8", weight="QUInt8"),
    "dynamic-int8": partial(_dynamic, weight="QInt8", reduce_range=True),
    "dynamic-uint8": partial(_dynamic, weight="QUInt8"),
    "dynamic-per-channel": partial(_dynamic, weight="QInt8", per_channel=True, reduce_range=True),
    "nbits-4": partial(_nbits, bits=4, form="QOperator", symmetric=True, level=0),
    "nbits-4-zero": partial(_nbits, bits=4, form="QOperator", symmetric=False, level=4),
    "nbits-8": partial(_nbits, bits=8, form="QOperator", symmetric=False, level=4),
    "nbits-4-qdq": partial(_nbits, bits=4, form="QDQ", symmetric=True, level=0),
    "nbits-4-qdq-zero": partial(_nbits, bits=4, form="QDQ", symmetric=False, level=0, size=16),
    "bnb4-fp4": partial(_bnb4, kind=0, size=64),
    "bnb4-nf4": partial(_bnb4, kind=1, size=16),
    "float16": partial(_half, module="onnxruntime.transformers.float16"),
    "float16-io": partial(_half, module="onnxruntime.transformers.float16", keep_io_types=True),
}


# Quantisers of ONNX models


CONVERTER: dict[str, Option] = {
    "float16": partial(_half, module="onnxconverter_common.float16"),
    "float16-io": partial(_half, module="onnxconverter_common.float16", keep_io_types=True),
    "float16-block": partial(_half, module="onnxconverter_common.float16", op_block_list=["Softmax", "Gemm"]),
}


def _quark(task: Task, config: str) -> None:
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config.config import Config
    from quark.onnx.quantization.config.custom_config import get_default_config

    quantizer = ModelQuantizer(Config(global_quant_config=get_default_config(config)))
    quantizer.quantize_model(str(task.model), str(task.out), task.reader())


QUARK: dict[str, Option] = {
    name.lower(): partial(_quark, config=name)
    for name in (
        "XINT8", "A8W8", "A16W8", "VINT8", "S8S8_AAWS", "U8S8_AAWS", "U8U8_AAWA", "S16S8_ASWS", "U16S8_AAWS",
        "INT8_CNN_DEFAULT", "INT16_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT", "UINT8_DYNAMIC_QUANT", "FP16", "BF16",
        "BFP16", "MX9", "MXINT8", "MATMUL_NBITS",
    )
}  # fmt: skip


def _modelopt(task: Task, mode: str, **how: Any) -> None:
    from modelopt.onnx.quantization import quantize

    quantize(
        str(task.model), quantize_mode=mode, calibration_data={"x": task.samples[0]}, calibration_eps=["cpu"],
        output_path=str(task.out), **how,
    )  # fmt: skip


MODELOPT: dict[str, Option] = {
    "int8": partial(_modelopt, mode="int8", calibration_method="entropy", high_precision_dtype="fp32"),
    "int8-max": partial(_modelopt, mode="int8", calibration_method="max", high_precision_dtype="fp32"),
    "int8-float16": partial(_modelopt, mode="int8", calibration_method="max", high_precision_dtype="fp16"),
    "int8-dq-only": partial(_modelopt, mode="int8", dq_only=True, high_precision_dtype="fp32"),
    "int4-awq": partial(_modelopt, mode="int4", calibration_method="awq_clip", high_precision_dtype="fp32"),
    "int4-rtn": partial(_modelopt, mode="int4", calibration_method="rtn_dq", high_precision_dtype="fp32"),
    "fp8": partial(_modelopt, mode="fp8", calibration_method="max", high_precision_dtype="fp32"),
    "fp8-float16": partial(_modelopt, mode="fp8", calibration_method="max", high_precision_dtype="fp16"),
}


def _nncf(task: Task, preset: str = "PERFORMANCE", device: str = "ANY", transformer: bool = False) -> None:
    import nncf

    kind = nncf.ModelType.TRANSFORMER if transformer else None
    task.save(nncf.quantize(
        task.loaded(), nncf.Dataset(list(task.feeds())), preset=nncf.QuantizationPreset[preset],
        target_device=nncf.TargetDevice[device], model_type=kind,
    ))  # fmt: skip


def _nncf_weights(task: Task, mode: str, **how: Any) -> None:
    import nncf

    task.save(nncf.compress_weights(task.loaded(), mode=nncf.CompressWeightsMode[mode], **how))


NNCF: dict[str, Option] = {
    "performance": _nncf,
    "mixed": partial(_nncf, preset="MIXED"),
    "cpu": partial(_nncf, device="CPU"),
    "npu": partial(_nncf, device="NPU", preset="MIXED"),
    "transformer": partial(_nncf, transformer=True),
    "weights-int8": partial(_nncf_weights, mode="INT8_ASYM"),
    "weights-int8-symmetric": partial(_nncf_weights, mode="INT8_SYM"),
    "weights-int4": partial(_nncf_weights, mode="INT4_SYM", group_size=16, all_layers=True),
    "weights-int4-zero": partial(_nncf_weights, mode="INT4_ASYM", group_size=16, all_layers=True),
}


def _neural(task: Task, kind: str, **how: Any) -> None:
    from onnx_neural_compressor import data_reader
    from onnx_neural_compressor.quantization import QuantFormat, QuantType, config, quantize
    from onnx_neural_compressor.quantization.algorithm_entry import rtn_quantize_entry

    if kind in ("StaticQuantConfig", "SmoothQuantConfig"):
        reader = task.reader(data_reader.CalibrationDataReader)
        how |= {"calibration_data_reader": reader, "quant_format": QuantFormat[how.pop("form", "QDQ")]}
    for name in ("activation_type", "weight_type"):
        if name in how:
            how[name] = QuantType[how[name]]
    chosen = getattr(config, kind)(**how)
    if kind == "RTNConfig":
        task.save(rtn_quantize_entry(str(task.model), chosen))
    else:
        quantize(str(task.model), str(task.out), chosen)


NEURAL: dict[str, Option] = {
    "static": partial(_neural, kind="StaticQuantConfig", activation_type="QInt8", weight_type="QInt8"),
    "static-u8": partial(_neural, kind="StaticQuantConfig", activation_type="QUInt8", weight_type="QInt8"),
    "static-qoperator": partial(_neural, kind="StaticQuantConfig", form="QOperator", activation_type="QUInt8"),
    "smooth": partial(_neural, kind="SmoothQuantConfig"),
    "dynamic": partial(_neural, kind="DynamicQuantConfig", weight_type="QInt8", reduce_range=True),
    "rtn": partial(_neural, kind="RTNConfig"),
    "rtn-zero": partial(_neural, kind="RTNConfig", weight_sym=False, accuracy_level=4),
}


def _olive(task: Task, name: str, **how: Any) -> None:
    from olive.model import ONNXModelHandler
    from olive.package_config import OlivePackageConfig
    from olive.passes.olive_pass import create_pass_from_dict

    chosen = OlivePackageConfig.load_default_config().import_pass_module(name)
    with tempfile.TemporaryDirectory() as folder:
        written = create_pass_from_dict(chosen, how, disable_search=True).run(
            ONNXModelHandler(str(task.model)), str(Path(folder) / "out.onnx")
        )
        import onnx

        task.save(onnx.load(written.model_path))


OLIVE: dict[str, Option] = {
    "dynamic": partial(_olive, name="OnnxDynamicQuantization", precision="int8"),
    "rtn": partial(_olive, name="OnnxBlockWiseRtnQuantization", block_size=16),
    "hqq": partial(_olive, name="OnnxHqqQuantization", block_size=16),
    "kquant": partial(_olive, name="OnnxKQuantQuantization", block_size=16),
    "bnb4": partial(_olive, name="OnnxBnb4Quantization", precision="nf4"),
    "float16": partial(_olive, name="OnnxFloatToFloat16"),
}


def _aimet(task: Task, activation: str = "int8", weight: str = "int8", scheme: str = "min_max", file: str = "") -> None:
    import aimet_onnx

    config = {"config_file": file} if file else {}
    sim = aimet_onnx.QuantizationSimModel(
        task.loaded(), param_type=weight, activation_type=activation, quant_scheme=scheme, **config
    )
    sim.compute_encodings(list(task.feeds()))
    task.save(sim.to_onnx_qdq())


AIMET: dict[str, Option] = {
    "int8": _aimet,
    "tf-enhanced": partial(_aimet, scheme="tf_enhanced"),
    "int16": partial(_aimet, activation="int16"),
    "int4": partial(_aimet, weight="int4"),
    "htp": partial(_aimet, file="htp_v73"),
}


# Quantisers of PyTorch modules


def _torchao(task: Task, dynamic: bool = False) -> None:
    import torch
    from quantiser_networks import export_dynamo
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    model, samples = task.module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    prepared = prepare_pt2e(torch.export.export(model, (samples[0],)).module(), quantizer)
    for sample in samples:
        prepared(sample)
    export_dynamo(convert_pt2e(prepared), samples[0], task.out)


TORCHAO: dict[str, Option] = {"x86": _torchao, "x86-dynamic": partial(_torchao, dynamic=True)}


def _brevitas(task: Task, way: str) -> None:
    import torch
    from brevitas.export import export_onnx_qcdq
    from brevitas.graph import quantize as q
    from brevitas.graph.calibrate import calibration_mode

    model, samples = task.module()
    if way == "layers":
        made = q.layerwise_quantize(model)
    else:
        made = q.quantize(q.preprocess_for_quantize(model, trace_model=True))
    with torch.no_grad(), calibration_mode(made):
        for sample in samples:
            made(sample)
    export_onnx_qcdq(made.eval(), args=samples[0], export_path=str(task.out), opset_version=17, dynamo=False)


BREVITAS: dict[str, Option] = {"layers": partial(_brevitas, way="layers"), "graph": partial(_brevitas, way="graph")}

QUANTISERS: dict[str, dict[str, Option]] = {
    "onnxruntime": ONNXRUNTIME, "onnxconverter-common": CONVERTER, "quark": QUARK, "modelopt": MODELOPT, "nncf": NNCF,
    "neural-compressor": NEURAL, "olive": OLIVE, "aimet": AIMET, "torchao": TORCHAO, "brevitas": BREVITAS,
}  # fmt: skip
"""The options of each quantiser."""


def main(quantiser: str, folder: Path, networks: list[str]) -> None:
    """Write what all options make of all networks."""
    sys.path.append(str(Path(__file__).parent))
    for option, function in QUANTISERS[quantiser].items():
        place = folder / quantiser / option
        place.mkdir(parents=True, exist_ok=True)
        for name in networks:
            out = place / f"{name}.onnx"
            if out.exists():
                continue
            out.with_suffix(".txt").unlink(missing_ok=True)
            try:
                function(Task(name, folder, out))
                if not out.exists():
                    raise FileNotFoundError(f"{quantiser} wrote no {out.name}")
            except BaseException as error:  # quantisers raise many classes, and some end the process
                if isinstance(error, KeyboardInterrupt):
                    raise
                out.unlink(missing_ok=True)
                line = next((line for line in str(error).splitlines() if line.strip()), "")
                out.with_suffix(".txt").write_text(f"{type(error).__name__}: {line[:300]}", encoding="utf-8")


if __name__ == "__main__":
    del sys.path[0]  # installed packages come before the modules of this folder, one of which is transformers.py
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","))
