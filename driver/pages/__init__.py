"""Reports as HTML pages with figures: of runs, of explorations, of optimised models.

- `report_page.py`: `celosia.report`: decides which page a Program, a Result or a file gets
- `run_page.py`: the page of a run: decides its sections, their tables and texts (the numbers are those of
  `driver/run/run_report.py`)
- `activity.py`: bars, waits and scratchpad use of each cycle, from the counters of a run
- `run_figures.py`: Bokeh figures of a run: roofline, cycles, traffic, timeline
- `graph.py`: the graph of layers and CPU kernels of a run, and its drawing
- `exploration_page.py`: the page of an exploration: decides its sections, and the columns of its table
- `exploration_figures.py`: Bokeh figures of an exploration
- `derivation.py`, `graph_picture.py`: the section on the steps of `celosia optimise`, and its drawings
- `names.py`: labels, short names and legends that pages share, also with `driver/show/`
- `page.py`, `page.html`, `page.css`, `page.js`: the frame that all pages share
- `timeline.py`: Chrome's trace of a run (`--trace`), which is a file, not a page
"""
