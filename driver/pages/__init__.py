"""Reports as HTML pages with figures: of runs, of explorations, of optimised models.

- `report_page.py`: `celosia.report`: decides which page a Program, a Result or a file gets
- `run_page.py`: the page of a run: decides its sections, their figures and texts, and the table of the longest layers
  for notebooks (without Bokeh: `driver/run/run_result.py`; numbers of the run: `driver/run/run_report.py`; the row of
  each layer: `driver/run/explain.py`; the table of layers in the terminal: `driver/show/run_summary.py`)
- `activity.py`: bars, waits and scratchpad use of each cycle, from the counters of a run
- `run_figures.py`: Bokeh figures of a run: roofline, cycles, traffic, timeline, and their colours
- `graph.py`: the graph of layers and CPU kernels of a run, and its drawing
- `exploration_page.py`: the page of an exploration: decides its sections, and the columns of its table
- `exploration_figures.py`: Bokeh figures of an exploration
- `derivation.py`, `graph_picture.py`: the section on the steps of `celosia optimise`, and its drawings
- `names.py`: labels, short names and legends that pages share, also with `driver/show/`
- `page.py`, `page.html`, `page.css`, `page.js`: the frame that all pages share
- `chrome_trace.py`: the trace of a run for Perfetto (`--trace`), which is a file, not a page
"""
