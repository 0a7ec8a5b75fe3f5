"""The limits that the rules share, each with its source."""

EXPLAINS = 0.8  # fraction of the wait; a cause below it is listed with its share, and no rank is named alone
CONFIDENCE = 0.999  # confidence that no rank or link is named by chance: one false alarm in a thousand verdicts
LOOK_SECONDS = 1.0  # polling interval of a rank's monitor
STALL_SECONDS = 15.0  # after which the monitor of a rank dumps its calls
LONGER = 2.0  # times the longest earlier pause or the usual pace of this run
WRITE_SECONDS = 10.0  # interval at which a rank writes its file
STALE_SECONDS = 30.0  # three times that interval
TOGETHER_SECONDS = 15.0  # by which the last writes of ranks that end at once may differ: that interval and half of it
# Clocks of hosts that train together have been seen to differ by 40 s. Times by two hosts' clocks have a known order
# only if they differ by three times that. Ranks of one host read one clock, and write their end within two samples.
CLOCKS_SECONDS, ORDER_SECONDS = 120.0, 2.0
SILENT_RUN_SECONDS = 60.0  # six of these intervals, after which a run in which no rank writes has ended
# PyTorch ends a job whose ranks wait for 600 s (default of NCCL's process group): half of it leaves time to act.
BUSY_SECONDS = 300.0
IDLE_SECONDS = 60.0  # for a rank without CPU use and I/O: one tenth of PyTorch's 600 s
IDLE_SHARE = 0.05  # of a CPU: below it the main thread does not compute
START_CALLS = 8  # of a job that is still starting, besides one for each group
MAX_RANKS = 1 << 17  # maximum number in a job
