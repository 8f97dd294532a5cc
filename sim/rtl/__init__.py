"""RTL simulator: the hardware compiled by Verilator (build.py), and the device that runs it (rtlsim.py)."""
