"""Random models beside onnxruntime: cases of the kind `model`.

net.py          a graph that grows node by node, each run under onnxruntime as it is added
networks.py     float networks of common pieces     quantised.py    what onnxruntime's quantiser makes of them
operators/      single operators with random attributes
habits.py       what exporters do to names, constants and sizes
case.py         a model, its inputs, how it is compiled
draw.py         the case of a seed
judge.py        a case on both sides: its verdict
exclusions.py   where a step of difference is documented
minimise.py     the smallest case of a finding
campaign.py     a case of a run, and findings
"""
