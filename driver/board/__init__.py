"""The accelerator on the board that this process runs on.

board_device   how a run is started, awaited and ended, after how many cycles the hardware ends it (watchdog, lease),
               and which memory it uses; which options the device has, here and over ssh; under which lock it runs while
               other processes use the accelerator (`board_lock`); PYNQ's classes
lock           how a process holds a lock file, and waits for it (default time: `PATIENCE`)
flash          how a bitstream is checked and loaded (for which FPGA a .bit file is, in any speed grade: hw/manifest.py)

`sim/host.py` reads and writes registers by name, and checks that the accelerator is the one expected. A board that is
reached over ssh is the topic of `driver/remote/`.
"""
