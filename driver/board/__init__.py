"""The accelerator on the board that this process runs on.

board_device   how a run is started, awaited and ended through registers, and which memory it uses; PYNQ's classes
lock           which process may use the accelerator
flash          how a bitstream is checked and loaded

A board that is reached over ssh is the topic of `driver/remote/`.
"""
