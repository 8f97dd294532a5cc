"""Compare random models with onnxruntime: cases of the kind `model`.

net.py          a graph that grows node by node, each run under onnxruntime as it is added
networks.py     float networks of common pieces     quantised.py    quantised by onnxruntime's quantiser
operators/      single operators with random attributes
habits.py       changes of names, constants and sizes, as exporters make them
case.py         a model, its inputs, and options of the compilation
draw.py         draw the case of a seed
judge.py        run a case here and under onnxruntime, and compare
exclusions.py   documented differences of one step
minimise.py     shrink the case of a finding
campaign.py     run cases, and list findings
"""
