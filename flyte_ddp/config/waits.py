"""The waits that many rooms share, in seconds. Others stand beside what they are for."""

# between two looks at what sends no message: a stop, a log, a process; nobody notices so little
POLL_INTERVAL = 0.1
# between two heartbeats, and between two tries or looks that ask another machine: enough of them
# are lost before anything counts as lost, and one costs next to nothing
BEAT_INTERVAL = 1.0
# for what is there to answer, also on a busy machine, before it counts as absent
ANSWER_TIMEOUT = 5.0
# between two lines about what goes on, for people who read a log
LINE_INTERVAL = 10.0
