"""A superoptimiser of graphs: rules that are proved, chosen by the cycles of the whole launch."""
