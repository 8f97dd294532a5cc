"""Schedule tuning: measuring other schedules of layers than the compiler's own, and keeping the best in records.

A point is one schedule of a layer: decisions for each of its workloads. A trial compiles and runs it: its cost is the
number of cycles. Files in the order in which a tuning passes them (`celosia tune`, driver/tune):

tuner_options   which searches, learners and deadlines users may choose (number of trials: driver/choices.py)
network_tuner   which layer gets the next trials, when the budget is spent, and which winners the network keeps
layer_space     which points a layer's search space has, with features and estimates; how many cycles no schedule beats
search          which points are tried next, and when a search ends (`patience`); the cost model: what a point should
                cost, learned from trials
records         which trials are known already, how their file is written and read, and which come with Celosia
                (presets/); which counts are reported meanwhile (Progress)
device_pool     which process or machine runs a trial, and when it is given up
worker_process  how a process of the pool answers trials
layer_trial     what a point costs, and whether its output is right; what a layer's output must be (numpy)

and at each compilation:

network         which records a compilation follows

The same for kernels of the CPU (`celosia tune --device cpu`), with records, searches and pools as above:

kernel_tuner    which kernel gets the next trials, which plans win, and which records a compilation follows
kernel_space    which plans are points of the search space, and what a loop nest should cost (features and estimate)
kernel_plan     what a schedule is in normal form, and which plans differ from it in one decision
kernel_trial    what a plan costs, and whether its outputs are right
"""
