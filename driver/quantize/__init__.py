"""Quantise float models to 8-bit integers (`celosia quantize`).

In the order in which data passes them:

- `quantize.py`: the steps of `celosia.quantize`; decides which options onnxruntime's quantiser gets: which operators
  it quantises and which stay float (`exclude`), how ranges come from samples (minmax, entropy, percentile), when
  activations have no zero point; which rewrites run before the quantiser; writes the report
- `decoders.py`: inputs that samples of decoders may leave out; finds the operators that `operators="products"` names;
  perplexity
- `supported_forms.py`: these rewrites, which bring operators (Gemm, Sum, BatchNormalization, pools, LSTM, ...) to the
  forms that onnxruntime's quantiser supports
- `smooth.py`: SmoothQuant and equalisation: decides which channels are scaled by which factors
- `attention_scales.py`: finds the operators that `operators="rotary"`, "attention" and "all" of a decoder add to
  these; decides the ranges of masked scores
- `score_masks.py`: finds masks, and writes them as sums
- `four_bits.py`: weights of 4, 2 or 1 bits: decides steps, factors and rounding (GPTQ)
- `second_moments.py`: statistics of layers' inputs for that
- `accuracy_report.py`: errors of outputs, operators that stay float and why, advice

`driver/data/calibration.py` reads the samples.
"""
