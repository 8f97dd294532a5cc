"""Run Programs on boards over ssh.

On this machine:
ssh             how a board is connected to, how long that may take, and what an error of ssh or a command means
channel         how bytes pass to and from a command there, and how long it may be silent
runner          which modules are packed for a board
deploy          which files a board needs, whether it can run a Program; one run or a stream of runs there
remote_device   a board's accelerator as a Device: each call (allocate, write, read, run) is a message. Where no answer
                comes, the device is closed: nothing is sent again

On the board, where `driver/board/` accesses registers, and waits while another process uses the accelerator:
bootstrap       the first program: reports facts and installs files, without Celosia
serve           the format of messages (both sides), and how requests are answered; passes a device's options on to
                driver/run/open_device.py unchanged
simulated       a replacement of the package pynq, for rehearsals without a board
"""
