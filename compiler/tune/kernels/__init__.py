"""Schedule tuning of CPU kernels (`celosia tune --device cpu`); records, searches and pools are those of tune/.

kernel_tuner     which kernel gets the next trials, which plans win, and which records a compilation follows
kernel_space     which plans are points of the search space
kernel_plan      what a schedule is in normal form, so that one decision can change
plan_changes     which plans differ from a plan in one decision
kernel_cost      what a loop nest should cost (features and estimate)
kernel_trial     what a plan costs, and whether its outputs are right
"""
