"""Reports as HTML pages with figures: of runs, of explorations, of optimised models."""
