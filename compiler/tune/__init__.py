"""Schedule tuning, in the order in which a tuning passes the files.

tuner_options       which searches, learners and deadlines users may choose
search_space        which points a layer's search space has, with features, estimates and bounds
cycle_bounds        how many cycles no schedule of a layer can beat
cost_model          what a point should cost, learned from trials
search_algorithms   which points are tried next
device_pool         which process or machine runs a trial, and when it is given up
worker_process      how a process answers trials
layer_trial         what a point costs, and whether its output is right
layer_reference     what a layer's output must be (numpy)
records             which trials are known already
shipped             which records come with Celosia
network             which records a compilation follows
network_tuner       which layer gets the next trials, and which winners the complete network keeps
progress            what is reported in between
kernels/            the same for kernels of the CPU
"""
