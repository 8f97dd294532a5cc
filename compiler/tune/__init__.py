"""Schedule tuning: measuring other schedules of layers than the compiler's own, and keeping the best in records.

A point is one schedule of a layer: decisions for each of its workloads. A trial compiles and runs it: its cost is the
number of cycles. Files in the order in which a tuning passes them (`celosia tune`, driver/tune):

tuner_options       which searches, learners and deadlines users may choose (number of trials: driver/choices.py)
network_tuner       which layer gets the next trials, when the budget is spent, and which winners the network keeps
search_space        which points a layer's search space has, with features, estimates and bounds
cycle_bounds        how many cycles no schedule of a layer can beat
search_algorithms   which points are tried next, and when a search ends (`patience`)
cost_model          what a point should cost, learned from trials
records             which trials are known already, and how their file is written and read
device_pool         which process or machine runs a trial, and when it is given up
worker_process      how a process of the pool answers trials
layer_trial         what a point costs, and whether its output is right
layer_reference     what a layer's output must be (numpy)
progress            which counts are reported meanwhile

and at each compilation:

shipped             which records come with Celosia (presets/), and which a user asks for
network             which records a compilation follows

kernels/            the same for kernels of the CPU (`celosia tune --device cpu`)
"""
